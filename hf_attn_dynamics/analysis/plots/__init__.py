# Licensed under the Apache License, Version 2.0.
"""Pictures of results."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Until 0.2: names of the module that was here.
    from . import base

    try:
        return getattr(base, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
