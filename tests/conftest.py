"""Shared set-up: reference twins are importable by name, and nothing reaches for the network."""

import os
import sys
from pathlib import Path

import pytest


# Tests run side by side, one a core; libraries of linear algebra ask when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent / "reference"))

import torch  # noqa: E402


torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real data sets, named by `ATTN_DYNAMICS_DATA`."""
    folder = os.environ.get("ATTN_DYNAMICS_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real data: set ATTN_DYNAMICS_DATA to its folder")
    return Path(folder)


@pytest.fixture(scope="session")
def real_models() -> Path:
    """Folder of trained models, named by `ATTN_DYNAMICS_MODELS`."""
    folder = os.environ.get("ATTN_DYNAMICS_MODELS")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs trained models: set ATTN_DYNAMICS_MODELS to their folder")
    return Path(folder)
