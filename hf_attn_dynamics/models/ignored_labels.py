# Licensed under the Apache License, Version 2.0.
"""Labels that count, and those that are ignored. Readers of data ask, too, so that nothing here imports PyTorch."""

from typing import Any


IGNORED = -100  # labels of this value have no loss


def is_labelled(labels: Any) -> Any:
    """True for labels that have a loss, in the shape of `labels`, a tensor or an array of NumPy."""
    return labels != IGNORED
