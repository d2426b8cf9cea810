# Licensed under the Apache License, Version 2.0.
"""Rows of the tables of recipes that classify."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from .base import Record


AnyRow = TypeVar("AnyRow", bound="TrainingRow")


@dataclass(kw_only=True)
class TrainingRow(Record):
    """One training; subclasses declare its fields, with the metrics as a dictionary last.

    Trainings store their results flat, as the file does.
    """

    @classmethod
    def of(cls: type[AnyRow], values: Mapping[str, Any]) -> AnyRow:
        """The row of stored results; whatever is no other field is a metric."""
        own = [one.name for one in fields(cls) if one.name != "metrics"]
        metrics = {name: value for name, value in values.items() if name not in own}
        return cls(**{name: values[name] for name in own}, metrics=metrics)
