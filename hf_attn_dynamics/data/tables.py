# Licensed under the Apache License, Version 2.0.
"""Columns of tables: CSV, TSV, JSON and Parquet files, plain or compressed, and datasets on the Hub."""

import contextlib
import csv
import gzip
import io
import json
import logging
import re
import textwrap
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import TABLES, find_files, kind_of, read_lines


if TYPE_CHECKING:
    from datasets import Features

logger = logging.getLogger(__name__)

Column = str | int  # a name, or the index in a file without header

csv.field_size_limit(2**31 - 1)  # a process-wide setting: a cell may have a whole document


def column_of_flag(value: str | None) -> Column | None:
    """Parses a column from a command line: a name, or an index in a file without header.

    Args:
        value (`str`, *optional*): The value, such as `"label"`, `"1"` or `"-1"`.

    Example:
        >>> [column_of_flag(value) for value in ("label", "1", None)]
        ['label', 1, None]
    """
    return int(value) if value is not None and re.fullmatch(r"-?\d+", value) else value


@dataclass
class Table:
    """A table whose columns are read lazily.

    Args:
        origin (`str`): The file or dataset, for messages.
        columns (`list[str]` or `list[int]`): Names of the columns, or indices without a header.
        read (`Callable`): Returns the cells of a column, which are read from files during iteration.
        class_names (`dict[str, list[str]]`): Class names of the columns that are declared as labels or lists of
            labels.
    """

    origin: str
    columns: list[Column]
    read: Callable[[Column], Iterable]
    class_names: dict[str, list[str]]

    def listed(self) -> str:
        """The columns, for messages, shortened, since a file without header may have texts as names."""
        return ", ".join(textwrap.shorten(str(column), 60, placeholder=" …") for column in self.columns)

    def find(self, name: str, without: Collection[Column | None] = ()) -> Column | None:
        """Finds a column by its name in lower case, ignoring case and the columns `without`; `None` if there is none.

        Raises:
            ValueError: if there are several.
        """
        found = [column for column in self.columns if str(column).casefold() == name and column not in without]
        if len(found) > 1:
            raise ValueError(
                f"{self.origin} has the columns {' and '.join(map(str, found))}, which only differ in case; rename "
                "all but one."
            )
        return found[0] if found else None

    def stream(self, argument: str, column: Column) -> Iterable:
        """Iterates over the cells of a column; negative indices count from the last column.

        Raises:
            ValueError: if there is no such column; the message has the name of the `argument`.
        """
        index = column + len(self.columns) if isinstance(column, int) and column < 0 else column
        if index not in self.columns:
            is_named = kind_of(self.origin) in (".csv", ".tsv") and not isinstance(column, int)
            choice = f"{self.listed()}{'; or pass indices, from 0, if the file has no header' * is_named}"
            raise ValueError(f"{argument} {column!r} is not a column of {self.origin}; choose one of {choice}.")
        return self.read(index)

    def cells(self, argument: str, column: Column) -> list:
        """The cells of a column as a list, see `stream`; raises ValueError if the table has no rows."""
        cells = list(self.stream(argument, column))
        if not cells:
            raise ValueError(f"{self.origin} has no rows; leave it out.")
        return cells


def find_tables(files: str | Path | Iterable[str | Path]) -> list[Path]:
    """Resolves files, folders and patterns to files of tables, see [`find_files`]."""
    return find_files(files, TABLES)


def first_cells(path: Path, encoding: str = "utf-8") -> list[str]:
    """Cells of the first row of a CSV or TSV file, which may be a header; empty for an empty file."""
    return next((row for _, row in _read_rows(path, encoding)), [])


def open_table(path: Path, has_header: bool = True, skip_torn: bool = False, encoding: str = "utf-8") -> Table:
    """Opens a file as a table; cells of CSV and TSV files are strings.

    Args:
        path (`Path`): The file, with a suffix in `TABLES`, compressed if its name ends in `.gz`. TSV files have no
            quoting.
        has_header (`bool`): Whether the first row of a CSV or TSV file is a header.
        skip_torn (`bool`): Whether to skip rows of a CSV or TSV file with another number of cells than the first one,
            with a warning, instead of raising an error.
        encoding (`str`): The encoding, except of Parquet files.

    Raises:
        ValueError: if the file is damaged, empty or in another encoding; or without header, if it is not CSV or TSV.
            During iteration, if a row is damaged or ragged.
    """
    kind = kind_of(path)
    if not has_header and kind not in (".csv", ".tsv"):
        raise ValueError(f"{path}: columns of a {kind} file have names; pass them instead of indices.")
    if kind == ".parquet":
        return _open_parquet(path)
    if kind in (".json", ".jsonl"):
        return _open_json(path, encoding)
    return _open_rows(path, has_header, skip_torn, encoding)


def open_hub_table(name: str, config: str | None, split: str) -> Table:
    """Opens a split of a dataset on the Hub as a table; see `datasets.load_dataset` for the arguments."""
    from datasets import load_dataset

    dataset = load_dataset(name, config, split=split)
    return Table(name, dataset.column_names, lambda column: dataset[column][:], _class_names(dataset.features))


def check_source(files: Any, dataset_name: str | None, dataset_config: str | None, split: str) -> None:
    """Raises ValueError unless exactly one of `files` and `dataset_name` is given, with its own arguments only."""
    if bool(files) == bool(dataset_name):
        raise ValueError(f"Pass either files or dataset_name; got files={files!r} and dataset_name={dataset_name!r}.")
    if files and (dataset_config is not None or split != "train"):
        raise ValueError(
            f"dataset_config={dataset_config!r} and split={split!r} need dataset_name; with files, leave them out and "
            "list the files of that split."
        )


def open_tables(
    files: str | Path | Iterable[str | Path] | None,
    dataset_name: str | None,
    dataset_config: str | None,
    split: str,
    has_header: Callable[[Path], bool],
    encoding: str = "utf-8",
) -> list[Table]:
    """Opens files or a dataset on the Hub; see [`load_classification`] for the arguments.

    Args:
        has_header (`Callable`): Returns whether the first row of a CSV or TSV file is a header.

    Raises:
        ValueError: see [`check_source`] and [`open_table`].
    """
    check_source(files, dataset_name, dataset_config, split)
    if dataset_name:
        return [open_hub_table(dataset_name, dataset_config, split)]
    return [open_table(path, has_header(path), encoding=encoding) for path in find_tables(files)]


def strings(argument: str, column: Column, origin: str, cells: Iterable) -> Iterator[str]:
    """Iterates over the cells of a column of strings; raises ValueError, with `argument` and `origin`, for others."""
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, str):
            raise ValueError(
                f"{argument} {column!r} of {origin} has {cell!r} in row {number}, not a string; convert it or leave "
                "out the row."
            )
        yield cell


def check_strings(argument: str, column: Column, origin: str, cells: Iterable) -> None:
    """Checks that all cells of a column are strings, see [`strings`]."""
    for _ in strings(argument, column, origin, cells):
        pass


def declared_class(names: Sequence[str], cell: Any) -> str | None:
    """Class name for a class id in a cell; `None` for other cells."""
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else None


def _empty(path: Path) -> ValueError:
    return ValueError(f"files: {path} is empty; leave it out.")


def _unreadable(path: Path, reason: object) -> ValueError:
    return ValueError(f"files: {path} cannot be read as {kind_of(path)}: {reason}")


def _class_names(features: "Features") -> dict[str, list[str]]:
    """Class names of columns of labels and of lists of labels."""
    from datasets import ClassLabel

    cells = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: cell.names for name, cell in cells.items() if isinstance(cell, ClassLabel)}


def _open_parquet(path: Path) -> Table:
    import pyarrow as pa
    from datasets import Features
    from pyarrow.parquet import ParquetFile

    if path.stat().st_size == 0:
        raise _empty(path)

    @contextlib.contextmanager
    def opened() -> Iterator[ParquetFile]:
        try:
            source = io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix.lower() == ".gz" else path
            with ParquetFile(source) as file:
                yield file
        except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error

    def read(column: Column) -> Iterator:
        with opened() as file:
            for batch in file.iter_batches(columns=[column]):
                yield from batch.column(0).to_pylist()

    with opened() as file:
        schema = file.schema_arrow
    return Table(str(path), schema.names, read, _class_names(Features.from_arrow_schema(schema)))


def _open_json(path: Path, encoding: str) -> Table:
    if kind_of(path) == ".json" and (whole := _single_object(path, encoding)):
        raise ValueError(
            f"files: {path} must be an array of objects, got an object; extract the array from one of its keys, "
            f"{', '.join(islice(whole, 5))}."
        )
    first = next(_read_records(path, encoding), None)
    if first is None:
        raise _empty(path)

    def read(column: Column) -> Iterator:
        for number, record in enumerate(_read_records(path, encoding), 1):
            if column not in record:
                raise ValueError(
                    f"files: record {number} of {path} needs {column!r}, which it lacks; it has {', '.join(record)}."
                )
            yield record[column]

    return Table(str(path), list(first), read, {})


def _single_object(path: Path, encoding: str) -> dict | None:
    """The content of a file with a single object, over several lines or with an array of objects; otherwise `None`."""
    lines = filter(str.strip, read_lines(path, encoding))
    beginning = list(islice(lines, 2))
    if not beginning or not beginning[0].lstrip().startswith("{"):
        return None
    try:
        if len(beginning) == 2:
            with contextlib.suppress(json.JSONDecodeError):
                json.loads(beginning[0])
                return None
        whole = json.loads("\n".join([*beginning, *lines]))
    except (json.JSONDecodeError, RecursionError):
        return None
    arrays = (value for value in whole.values() if isinstance(value, list) and value)
    return whole if len(beginning) == 2 or any(isinstance(array[0], dict) for array in arrays) else None


def _read_records(path: Path, encoding: str) -> Iterator[dict]:
    """Yields the objects of a JSON file: one per line or, in a `.json` file, the members of an array."""
    for number, record in enumerate(_read_json(path, encoding), 1):
        if not isinstance(record, dict):
            raise ValueError(f"files: {path} has {type(record).__name__} as record {number}, not a JSON object.")
        yield record


def _read_json(path: Path, encoding: str) -> Iterator[object]:
    is_lines = kind_of(path) == ".jsonl"
    lines = enumerate(read_lines(path, encoding), 1)
    for number, line in lines:
        if not is_lines and line.lstrip().startswith("["):
            yield from _parse_json(path, number, "\n".join([line, *(rest for _, rest in lines)]))
        elif line.strip():
            is_lines = True
            yield _parse_json(path, number, line)


def _parse_json(path: Path, number: int, text: str) -> Any:
    """Parses JSON that starts at a line of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} in line {number + error.lineno - 1}, column {error.colno}."
        raise _unreadable(path, reason) from error
    except RecursionError as error:
        raise _unreadable(path, f"{error} in line {number}.") from error


def _open_rows(path: Path, has_header: bool, skip_torn: bool, encoding: str) -> Table:
    first = first_cells(path, encoding)
    if not first:
        raise _empty(path)
    columns = first if has_header else list(range(len(first)))
    if len(set(columns)) < len(columns):
        raise ValueError(f"files: {path} must have unique column names, got {', '.join(first)}; rename one.")
    has_warned = False

    def read(column: Column) -> Iterator[str]:
        nonlocal has_warned
        place = columns.index(column)
        whole = torn = 0
        for number, row in islice(_read_rows(path, encoding), int(has_header), None):
            if len(row) == len(first):
                whole += 1
                yield row[place]
            elif skip_torn:
                torn += 1
            else:
                raise _torn_row(path, number, row, len(first))
        if torn and not has_warned:
            has_warned = True
            rows = whole + torn
            logger.warning("%d of %d rows of %s do not have %d cells and are skipped.", torn, rows, path, len(first))

    return Table(str(path), columns, read, {})


def _read_rows(path: Path, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the numbered non-empty rows of a CSV or TSV file, from the first one that is not blank."""
    if kind_of(path) == ".tsv":
        # A carriage return within a line is white space.
        lines = read_lines(path, encoding)
        rows = enumerate((line.replace("\r", " ").split("\t") if line else [] for line in lines), 1)
    else:
        rows = _read_csv(path, encoding)
    rows = dropwhile(lambda row: not "".join(row[1]).strip(), rows)
    return ((number, row) for number, row in rows if row)


def _read_csv(path: Path, encoding: str) -> Iterator[tuple[int, list[str]]]:
    is_over = False

    def lines() -> Iterator[str]:
        nonlocal is_over
        yield from read_lines(path, encoding, keep_ends=True)
        is_over = True

    try:
        for number, row in enumerate(csv.reader(lines()), 1):
            if is_over:  # the reader has reached the end of the file within a row
                raise _unreadable(path, f"row {number} opens a quote and does not close it.")
            yield number, row
    except csv.Error as error:
        raise _unreadable(path, error) from error


def _torn_row(path: Path, number: int, row: list[str], expected: int) -> ValueError:
    if kind_of(path) == ".csv":
        separator, way_out = ",", "quote cells with a comma or a line break"
    else:
        separator, way_out = "\t", "remove tabs and line breaks from its cells, since TSV has no quoting"
    must = f"row {number} must have {expected} cells like the first row"
    return _unreadable(path, f"{must}, got {len(row)} in {separator.join(row)[:50]!r}; {way_out}.")
