"""Shared set-up: reference twins are importable by name, and nothing reaches for the network."""

import contextlib
import logging
import os
import re
import sys
from pathlib import Path

import pytest


# Tests run side by side, one a core; libraries of linear algebra ask when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent / "reference"))

import torch


torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Read when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")


# What Transformers logs as deprecated of its own calls, by regular expression.
CAUSED_BY_TRANSFORMERS = (
    r"`generation_config` together with .*'(begin_)?suppress_tokens'",  # `generate` of Whisper
)


class _Deprecations(logging.Handler):
    """Raises what Transformers logs about names that it will remove; `pyproject.toml` has the same for warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        # `warning_once` remembers a message only once it has been logged, so that each test fails for its own.
        message = record.getMessage()
        if "deprecated" in message and not any(re.search(known, message) for known in CAUSED_BY_TRANSFORMERS):
            raise FutureWarning(message)


@pytest.fixture(autouse=True)
def _deprecated_names_are_errors():
    library, handler = logging.getLogger("transformers"), _Deprecations()
    library.addHandler(handler)
    yield
    library.removeHandler(handler)


@pytest.fixture
def refused(tmp_path, capsys):
    """Asserts that what is done is refused with this message, in one line, and that nothing is written."""

    @contextlib.contextmanager
    def refused(*messages):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as stop:
            yield
        assert stop.value.code == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert all(message in error for message in ("error: ", *messages)), error
        assert sorted(tmp_path.rglob("*")) == before

    return refused


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real datasets, named by `ATTN_DYNAMICS_DATA`."""
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
