# Licensed under the Apache License, Version 2.0.
"""Observers: statistics of attention weights while a model runs, and what looks on."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Until 0.2: names of the module that was here. `from . import` would ask this function for the module.
    module = importlib.import_module(f"{__name__}.base")
    try:
        return getattr(module, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
