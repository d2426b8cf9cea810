# Licensed under the Apache License, Version 2.0.
"""Random states during measurements."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Context that restores the random states of Python, NumPy and PyTorch at its end.

    Args:
        device (`torch.device`): Device of the model, whose generator is restored in addition to that of the CPU.
    """
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
