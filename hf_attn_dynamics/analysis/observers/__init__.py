# Licensed under the Apache License, Version 2.0.
"""Observers: statistics of attention weights while a model runs, and what looks on."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Until 0.2: names of the module that was here.
    from . import base

    try:
        return getattr(base, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
