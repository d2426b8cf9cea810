# Licensed under the Apache License, Version 2.0.
"""Layer-wise relevance propagation, by head (Voita et al. 2019)."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Until 0.2: names of the module that was here.
    from . import heads

    try:
        return getattr(heads, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
