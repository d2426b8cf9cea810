# Licensed under the Apache License, Version 2.0.
"""What one process does for all."""

from collections.abc import Callable
from typing import Any, TypeVar


Result = TypeVar("Result")


def from_main_process(make: Callable[[], Result]) -> Result:
    """Calls a function in the main process, and returns its result in all processes.

    Args:
        make (callable): Returns an object that can be pickled, with tensors on the CPU.

    Raises:
        Exception: what `make` raises, in the main process. The others raise ValueError for ValueError and OSError, and
            RuntimeError otherwise, instead of waiting for a result.
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [None, None, None]
    failure = None
    if PartialState().is_main_process:
        try:
            found[0] = make()
        except Exception as error:
            failure = error
            found = [None, str(error), isinstance(error, (ValueError, OSError))]
    broadcast_object_list(found)
    if failure is not None:
        raise failure
    result, message, is_bad_input = found
    if message is not None:
        raise ValueError(message) if is_bad_input else RuntimeError(f"the main process failed: {message}")
    return result
