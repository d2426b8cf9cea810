# Licensed under the Apache License, Version 2.0.
"""Which tokens contribute to a head's output: Hidden Token Attribution (Pascal et al. 2021)."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Until 0.2: names of the module that was here. `from . import` would ask this function for the module.
    module = importlib.import_module(f"{__name__}.local")
    try:
        return getattr(module, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
