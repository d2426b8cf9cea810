# Licensed under the Apache License, Version 2.0.
"""Keeps what Transformers' tests do inside this folder's tests."""

import random

import huggingface_hub.constants
import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def contained(tmp_path, monkeypatch):
    """No Hub, files written to the working directory or the caches end up in `tmp_path`, random states come back."""
    monkeypatch.chdir(tmp_path)
    # The environment variable of this name is read on import only.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
