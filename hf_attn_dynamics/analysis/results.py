# Licensed under the Apache License, Version 2.0.
"""Base class of the results of analyses: saved as JSON, compared by value, shown as tables and pictures."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

import torch

from .._files import read_json, write_text
from .notebook import MOST_ROWS, html_table


if TYPE_CHECKING:
    from typing import Self

    import pandas
    from matplotlib.figure import Figure


def import_pandas(instead: str) -> Any:
    """Imports pandas.

    Args:
        instead (`str`): Method that returns the same data without pandas, for the message.

    Raises:
        ImportError: if pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"to_pandas() needs pandas: pip install pandas, or use {instead}.") from error
    return pandas


def to_json(value: Any) -> Any:
    """Converts results, tensors, and lists and dictionaries of these to JSON types; NaN becomes `None`."""
    if isinstance(value, Result):
        return value.to_dict()
    if torch.is_tensor(value):
        return to_json(value.tolist())
    if isinstance(value, dict):
        return {key: to_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def from_json(value: Any, kind: Any) -> Any:
    """The inverse of [`to_json`], given the type of the value: tensors are float64, `None` becomes NaN in them."""
    container, inner = get_origin(kind), get_args(kind)
    if container is dict:
        return {key: from_json(one, inner[1]) for key, one in value.items()}
    if container is list:
        return [from_json(one, inner[0]) for one in value]
    if container is tuple:
        return tuple(value)
    if kind is torch.Tensor:
        return torch.tensor(_none_to_nan(value), dtype=torch.float64)
    if kind is float:
        return _none_to_nan(value)
    return kind.from_dict(value) if isinstance(kind, type) and issubclass(kind, Result) else value


def _none_to_nan(values: Any) -> Any:
    if isinstance(values, list):
        return [_none_to_nan(one) for one in values]
    return math.nan if values is None else values


def _same(one: Any, other: Any) -> bool:
    """Equality of nested lists and dictionaries."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other or (one != one and other != other)  # noqa: PLR0124


class Result:
    """Base class of results.

    A subclass is a dataclass whose fields have types that [`to_json`] converts. It implements `records`, the rows of
    its table, and `plot` for a single picture or `pictures` for several.
    """

    columns: ClassVar[list[str]] = []  # names of the columns of the table

    def __eq__(self, other: object) -> bool:
        """Whether both are of one class and have equal values; NaN equals NaN."""
        return type(self) is type(other) and _same(self.to_dict(), other.to_dict())

    __hash__ = None

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types; `None` for NaN."""
        return {name: to_json(value) for name, value in vars(self).items()}

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "Self":
        types = {field.name: field.type for field in fields(cls)}
        return cls(**{name: from_json(value, types[name]) for name, value in values.items()})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """The inverse of `to_dict`.

        Raises:
            ValueError: if `values` does not hold such a result.
        """
        try:
            return cls._from_dict(values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the output of {cls.__name__}.to_dict(): {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Writes the result as JSON."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Self":
        """Reads a file that `save` wrote.

        Raises:
            ValueError: if the file does not hold such a result.
        """
        try:
            return cls.from_dict(read_json(path))
        except ValueError as error:
            raise ValueError(f"{path} does not hold {cls.__name__}: {error}") from error

    def records(self) -> Iterator[tuple]:
        """Rows of the table as tuples, in the order of `columns`."""
        raise NotImplementedError

    def to_pandas(self) -> "pandas.DataFrame":
        """The result as a table in long format.

        Raises:
            ImportError: if pandas is not installed.
        """
        return import_pandas("to_dict()").DataFrame(self.records(), columns=self.columns)

    def _repr_html_(self) -> str:
        """The first rows of the table, for notebooks."""
        rows = list(self.records())
        rest = f"; the first {MOST_ROWS} are shown, to_pandas() has all" if len(rows) > MOST_ROWS else ""
        caption = f"{type(self).__name__}: {len(rows):,} row{'s' * (len(rows) != 1)}{rest}"
        return html_table(self.columns, rows[:MOST_ROWS], caption)

    def pictures(self) -> "dict[str, Callable[..., Figure]]":
        """Functions that draw the result, by name of the picture; each takes `path` and `title` and returns the
        figure. A result with a single picture has `plot` as its only function."""
        if type(self).plot is Result.plot:
            raise NotImplementedError(f"{type(self).__name__} has no pictures; see to_pandas() for its table.")
        return {"plot": self.plot}

    def plot(self, path: str | Path | None = None, what: str | None = None, title: str = "") -> "Figure":
        """Draws the result.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            what (`str`, *optional*): Name of the picture; the first of [`pictures`] by default.
            title (`str`): Model and data; the picture itself says what it shows.

        Returns:
            `matplotlib.figure.Figure`

        Raises:
            ValueError: if there is no such picture.
        """
        available = self.pictures()
        what = next(iter(available)) if what is None else what
        if what not in available:
            raise ValueError(f"what must be one of {', '.join(available)}, got {what!r}.")
        return available[what](path=path, **({"title": title} if title else {}))
