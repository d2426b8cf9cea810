# Licensed under the Apache License, Version 2.0.
"""Random numbers of a training that something else looks into."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Afterwards random numbers of Python, NumPy and PyTorch go on as if none had been drawn.

    Args:
        device (`torch.device`): Where the model is; the generators of that kind of device and of the CPU are kept.
    """
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
