# Licensed under the Apache License, Version 2.0.
"""The ignored label. This file does not import PyTorch, since readers of data use it, too."""

from typing import Any


IGNORED = -100  # labels that the loss ignores


def is_labelled(labels: Any) -> Any:
    """Mask of the labels that are not ignored, for a tensor or a NumPy array."""
    return labels != IGNORED
