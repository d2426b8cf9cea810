# Licensed under the Apache License, Version 2.0.
"""Names of the contributions that pages show beside attention; flags check them before PyTorch is imported."""

from collections.abc import Sequence


CONTRIBUTIONS = ("value_weighted", "local", "global")


def check_contributions(contributions: Sequence[str]) -> None:
    """Checks names of contributions.

    Raises:
        ValueError: if one is unknown.
    """
    if isinstance(contributions, str) or not set(contributions) <= set(CONTRIBUTIONS):
        raise ValueError(f"contributions must be some of {', '.join(CONTRIBUTIONS)}, got {contributions!r}.")
