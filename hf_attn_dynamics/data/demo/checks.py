# Licensed under the Apache License, Version 2.0.
"""Checks of sizes."""


def check_positive(**numbers: int) -> None:
    """Raises ValueError unless all numbers are at least 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}.")
