# Licensed under the Apache License, Version 2.0.
"""Checks for numbers in settings and arguments; booleans and strings are not numbers."""

import operator
import sys
from typing import Any


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of any library, but not a boolean.

    Example:
        >>> import numpy as np
        >>> [is_integer(value) for value in (3, np.int64(3), 3.0, True, "3")]
        [True, True, False, False, False]
    """
    try:
        operator.index(value)
    except TypeError:
        # Raised by floating-point tensors, too, although they have `__index__`.
        return False
    return not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a number in the range of `float`, but not a boolean.

    Example:
        >>> [is_finite(value) for value in (3, 0.5, float("inf"), 10**400, True, "3")]
        [True, True, False, False, False, False]
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max
