# Licensed under the Apache License, Version 2.0.
"""Keeps what Transformers' tests do to global state from the tests of other folders."""

import random

import huggingface_hub.constants
import numpy as np
import pytest
import torch


# No tests; and as a doctest file, `suite.py` would be left in `sys.modules` half imported where it skips.
collect_ignore = ["sdist.py", "suite.py"]


@pytest.fixture(autouse=True)
def contained(monkeypatch):
    """No Hub; random states come back. Files the tests write go to temporary folders of their own."""
    # The environment variable of this name is read on import only.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
