"""For tests and for the examples in docstrings."""

import gc

import pytest

from hf_attn_dynamics.models import patterns


@pytest.fixture(autouse=True)
def _patterns_of_examples_are_forgotten(monkeypatch):
    """A pattern that one example registers is not among those that another one lists."""
    monkeypatch.setattr(patterns, "_PATTERNS", dict(patterns._PATTERNS))


def pytest_collection_finish():
    _leave_out_of_collections()


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        _leave_out_of_collections()


def _leave_out_of_collections():
    """Every training collects garbage, which takes seconds where it looks at all that has been imported by then."""
    gc.collect()
    gc.freeze()
