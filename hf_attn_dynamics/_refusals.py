# Licensed under the Apache License, Version 2.0.
"""Error messages of command-line programs."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def refuse_bad_input(everywhere: bool = False) -> Iterator[None]:
    """Context that reports ValueError and OSError in one line on standard error and exits with status 2.

    Args:
        everywhere (`bool`): Whether every process reports the error, for errors that only some processes raise.

    Example:
        >>> with refuse_bad_input():
        ...     raise ValueError("vocab_size is 3; raise it.")
        Traceback (most recent call last):
        SystemExit: 2
    """
    try:
        yield
    except (ValueError, OSError) as error:
        logger.debug("refused", exc_info=True)
        if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {error}\n")
        raise SystemExit(2) from error
