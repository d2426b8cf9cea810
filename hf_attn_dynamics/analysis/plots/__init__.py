# Licensed under the Apache License, Version 2.0.
"""Pictures of results: each function returns a matplotlib figure, and saves it if it is given a path."""

import importlib
from typing import Any


_MODULES = ("base", "heads", "attribution", "dynamics")


def __getattr__(name: str) -> Any:
    # On demand, since drawing needs matplotlib, and results that can draw themselves do not.
    for module in _MODULES if not name.startswith("_") else ():
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
        if found is not None and getattr(found, "__module__", __name__).startswith(__name__):
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
