# Licensed under the Apache License, Version 2.0.
"""What counts as a number in settings and arguments: truth values and text never do."""

import operator
import sys
from typing import Any


def is_integer(value: Any) -> bool:
    """Integers of any library count, truth values do not.

    Example:
        >>> import numpy as np
        >>> [is_integer(value) for value in (3, np.int64(3), 3.0, True, "3")]
        [True, True, False, False, False]
    """
    try:
        operator.index(value)
    except TypeError:
        # Floating-point tensors have the method, and refuse.
        return False
    return not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a setting is a number that floating-point numbers hold, not infinite or NaN; truth values are none.

    Example:
        >>> [is_finite(value) for value in (3, 0.5, float("inf"), 10**400, True, "3")]
        [True, True, False, False, False, False]
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max
