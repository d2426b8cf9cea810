# Licensed under the Apache License, Version 2.0.
"""Checks of dictionaries of settings. This file does not import PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def given_settings(value: Any, keys: list[str], where: str) -> dict[str, Any]:
    """Returns the given settings of one kind of site, after checking that they are a dictionary of known keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a dictionary or None, got {value!r}.")
    if unknown := sorted(str(key) for key in set(value) - set(keys)):
        raise ValueError(f"{where} has no key {unknown[0]!r}; its keys are {', '.join(keys)}.")
    return dict(value)


def check_choice(settings: Any, key: str, choices: tuple[str, ...], where: str) -> None:
    """Raises ValueError unless the setting `key` is one of the choices."""
    if getattr(settings, key) not in choices:
        raise ValueError(f"{where} {key} must be one of {', '.join(choices)}, got {getattr(settings, key)!r}.")
