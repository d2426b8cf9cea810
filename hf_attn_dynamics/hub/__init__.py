# Licensed under the Apache License, Version 2.0.
"""Model cards and uploads to the Hub."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Until 0.2: names of the module that was here.
    from . import push

    try:
        return getattr(push, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
