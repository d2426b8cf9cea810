# Licensed under the Apache License, Version 2.0.
"""Which tokens contribute to a head's output: Hidden Token Attribution (Pascal et al. 2021)."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Until 0.2: names of the module that was here.
    from . import local

    try:
        return getattr(local, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
