"""Shared set-up: reference twins are importable by name, and nothing reaches for the network."""

import os
import sys
from pathlib import Path

import pytest


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent / "reference"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real data sets, named by `ATTN_DYNAMICS_DATA`."""
    folder = os.environ.get("ATTN_DYNAMICS_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real data: set ATTN_DYNAMICS_DATA to its folder")
    return Path(folder)
