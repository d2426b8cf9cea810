# Licensed under the Apache License, Version 2.0.
"""What results of analyses have in common: they can be written to a file, and read as a table."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .._files import read_json, write_text


if TYPE_CHECKING:
    from typing import Self

    import pandas


def import_pandas(instead: str) -> Any:
    """The module pandas.

    Args:
        instead (`str`): What gives the same without it.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"to_pandas() needs pandas: pip install pandas, or use {instead}.") from error
    return pandas


def as_lists(table: torch.Tensor) -> Any:
    """Nested lists of a tensor as JSON can hold them: `None` in place of NaN."""
    return nan_to_none(table.tolist())


def as_tensor(lists: Any) -> torch.Tensor:
    """The inverse of `as_lists`, in float64."""
    return torch.tensor(none_to_nan(lists), dtype=torch.float64)


def nan_to_none(values: Any) -> Any:
    """Numbers in nested lists and dictionaries as JSON can hold them."""
    return _each(lambda value: None if math.isnan(value) else value, values)


def none_to_nan(values: Any) -> Any:
    """The inverse of `nan_to_none`."""
    return _each(lambda value: math.nan if value is None else value, values)


def _each(function: Callable, values: Any) -> Any:
    """A function of each number in nested lists and dictionaries."""
    if isinstance(values, dict):
        return {key: _each(function, one) for key, one in values.items()}
    if isinstance(values, list):
        return [_each(function, one) for one in values]
    return function(values)


def _same(one: Any, other: Any) -> bool:
    """Equality of nested lists and dictionaries, where NaN is NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other or (one != one and other != other)  # noqa: PLR0124


class Result:
    """A result that has `to_dict`; a subclass says how it is read back, and which rows its table has."""

    columns: ClassVar[list[str]] = []  # of the table

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same; where both hold no number, that is the same."""
        return type(self) is type(other) and _same(self.to_dict(), other.to_dict())

    __hash__ = None

    def to_dict(self) -> dict[str, Any]:
        """Everything in a form that JSON can hold."""
        raise NotImplementedError

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "Self":
        raise NotImplementedError

    def records(self) -> Iterator[tuple]:
        """Rows of the table, as tuples."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """The inverse of `to_dict`.

        Raises:
            ValueError: if `values` are no such result.
        """
        try:
            return cls._from_dict(values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not what {cls.__name__}.to_dict() gives: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Writes the result as JSON."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Self":
        """Reads what `save` wrote.

        Raises:
            ValueError: if the file does not hold such a result.
        """
        try:
            return cls.from_dict(read_json(path))
        except ValueError as error:
            raise ValueError(f"{path} does not hold {cls.__name__}: {error}") from error

    def to_pandas(self) -> "pandas.DataFrame":
        """The result as a long table.

        Raises:
            ImportError: if pandas is not installed.
        """
        return import_pandas("to_dict()").DataFrame(self.records(), columns=self.columns)

    def _repr_html_(self) -> str | None:
        """The table, for notebooks; None without pandas, so that they show the text."""
        try:
            return self.to_pandas()._repr_html_()
        except ImportError:
            return None
