# Licensed under the Apache License, Version 2.0.
"""Columns of tables: CSV, TSV, JSON and Parquet files, plain or compressed, and data sets of the Hub."""

import contextlib
import csv
import gzip
import io
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import TABLES, find_files, kind_of, read_lines


if TYPE_CHECKING:
    from datasets import Features

logger = logging.getLogger(__name__)

Column = str | int  # a name, or the position in a file without header

csv.field_size_limit(2**31 - 1)  # of the process: a cell may hold a document


def column_of_flag(value: str | None) -> Column | None:
    """A column as a command line names it: by name, or by its position in a file without header.

    Args:
        value (`str`, *optional*): What was given: `"label"`, `"1"`, `"-1"`.

    Example:
        >>> [column_of_flag(value) for value in ("label", "1", None)]
        ['label', 1, None]
    """
    return int(value) if value is not None and re.fullmatch(r"-?\d+", value) else value


@dataclass
class Table:
    """A table whose columns are read when they are asked for.

    Args:
        origin (`str`): The file or data set, for messages.
        columns (`list[str]` or `list[int]`): Names of the columns; positions if there is no header.
        read (`Callable`): Maps a column to its cells. Those of files are read while iterating.
        class_names (`dict[str, list[str]]`): Names of the classes of those columns that are declared as labels, or as
            lists of labels.
    """

    origin: str
    columns: list[Column]
    read: Callable[[Column], Iterable]
    class_names: dict[str, list[str]]

    def find(self, name: str, without: Collection[Column | None] = ()) -> Column | None:
        """The column of a usual name, which is compared without regard to case; `None` if there is none.

        Args:
            name (`str`): The name, in lower case.
            without (collection): Columns that are something else.

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
        """The cells of a column, which may be more than memory holds.

        Args:
            argument (`str`): The argument that named the column, for messages.
            column (`str` or `int`): The column; negative positions count from the last.

        Raises:
            ValueError: if there is no such column.
        """
        place = column + len(self.columns) if isinstance(column, int) and column < 0 else column
        if place not in self.columns:
            raise ValueError(
                f"{argument} {column!r} is not a column of {self.origin}; choose from "
                f"{', '.join(map(str, self.columns))}."
            )
        return self.read(place)

    def cells(self, argument: str, column: Column) -> list:
        """The cells of a column as a list, arguments as of `stream`.

        Raises:
            ValueError: if there is no such column, or no row.
        """
        cells = list(self.stream(argument, column))
        if not cells:
            raise ValueError(f"{self.origin} has no row; add some or leave it out.")
        return cells


def find_tables(files: str | Path | Iterable[str | Path]) -> list[Path]:
    """Files of tables, see [`find_files`]."""
    return find_files(files, TABLES)


def first_cells(path: Path, encoding: str = "utf-8") -> list[str]:
    """The cells of the first row of a CSV or TSV file: the header, if there is one; none if the file is empty."""
    return next((row for _, row in _read_rows(path, encoding)), [])


def open_table(path: Path, has_header: bool = True, skip_torn: bool = False, encoding: str = "utf-8") -> Table:
    """Opens a file as a table; cells of CSV and TSV files are strings.

    Args:
        path (`Path`): The file, of one of the kinds in `TABLES`, compressed if its name ends in `.gz`. A TSV file
            knows no quotes.
        has_header (`bool`): Whether the first row of a CSV or TSV file names the columns.
        skip_torn (`bool`): Whether rows of a CSV or TSV file that have more or fewer cells than the first one are left
            out, with a warning; otherwise they are refused.
        encoding (`str`): The encoding, except of Parquet files.

    Raises:
        ValueError: if the file is not what its name says: broken, empty, in another encoding; or if a file of another
            kind is to be without header. While cells are read: if a row is broken or ragged.
    """
    kind = kind_of(path)
    if not has_header and kind not in (".csv", ".tsv"):
        raise ValueError(f"{path}: columns of a {kind} file have names; give them instead of positions.")
    if kind == ".parquet":
        return _open_parquet(path)
    if kind in (".json", ".jsonl"):
        return _open_json(path, encoding)
    return _open_rows(path, has_header, skip_torn, encoding)


def open_hub_table(name: str, config: str | None, split: str) -> Table:
    """Opens a split of a data set of the Hub as a table.

    Args:
        name (`str`): The data set, for `datasets.load_dataset`.
        config (`str`, *optional*): Its configuration.
        split (`str`): Its split.
    """
    from datasets import load_dataset

    dataset = load_dataset(name, config, split=split)
    return Table(name, dataset.column_names, lambda column: dataset[column][:], _class_names(dataset.features))


def check_source(files: Any, dataset_name: str | None, dataset_config: str | None, split: str) -> None:
    """Checks that either files or a data set of the Hub is named.

    Raises:
        ValueError: if not exactly one of `files` and `dataset_name` is given, or arguments for one meet the other.
    """
    if bool(files) == bool(dataset_name):
        raise ValueError(f"Give either files or dataset_name; got files={files!r} and dataset_name={dataset_name!r}.")
    if files and (dataset_config is not None or split != "train"):
        raise ValueError(
            f"dataset_config={dataset_config!r} and split={split!r} select from a dataset_name and cannot be combined "
            "with files; leave them out and list the files of that split."
        )


def open_tables(
    files: str | Path | Iterable[str | Path] | None,
    dataset_name: str | None,
    dataset_config: str | None,
    split: str,
    has_header: Callable[[Path], bool],
    encoding: str = "utf-8",
) -> list[Table]:
    """Opens either files or a data set of the Hub.

    Args:
        files (`str`, `Path` or a list of these, *optional*): See [`find_files`].
        dataset_name (`str`, *optional*): The data set, instead of `files`.
        dataset_config (`str`, *optional*): The configuration of that data set.
        split (`str`): The split of that data set.
        has_header (`Callable`): Whether the first row of a CSV or TSV file names the columns.
        encoding (`str`): The encoding of the files.

    Raises:
        ValueError: as [`check_source`] and [`open_table`].
    """
    check_source(files, dataset_name, dataset_config, split)
    if dataset_name:
        return [open_hub_table(dataset_name, dataset_config, split)]
    return [open_table(path, has_header(path), encoding=encoding) for path in find_tables(files)]


def strings(argument: str, column: Column, origin: str, cells: Iterable) -> Iterator[str]:
    """The cells of a column that holds texts and nothing else.

    Args:
        argument (`str`): The argument that named the column, for messages.
        column (`str` or `int`): The column.
        origin (`str`): The file or data set.
        cells (iterable): The cells.

    Raises:
        ValueError: if a cell is not a string.
    """
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, str):
            raise ValueError(
                f"{argument} {column!r} of {origin} holds {cell!r} in row {number}, not a string; convert it or leave "
                "the row out."
            )
        yield cell


def check_strings(argument: str, column: Column, origin: str, cells: Iterable) -> None:
    """Checks that a column holds texts and nothing else, see [`strings`]."""
    for _ in strings(argument, column, origin, cells):
        pass


def declared_class(names: Sequence[str], cell: Any) -> str | None:
    """Name of the class that a cell of a column with declared classes has the number of; `None` if it has none.

    Args:
        names (sequence of `str`): Names of the classes, see [`Table`].
        cell: The cell.
    """
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else None


def _empty(path: Path) -> ValueError:
    return ValueError(f"files: {path} is empty; remove it or leave it out.")


def _class_names(features: "Features") -> dict[str, list[str]]:
    """Names of the classes of columns of labels, and of lists of labels."""
    from datasets import ClassLabel

    cells = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: cell.names for name, cell in cells.items() if isinstance(cell, ClassLabel)}


def _open_parquet(path: Path) -> Table:
    import pyarrow as pa
    from datasets import Features
    from pyarrow.parquet import ParquetFile

    if path.stat().st_size == 0:
        raise _empty(path)

    def opened() -> ParquetFile:
        return ParquetFile(io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix.lower() == ".gz" else path)

    def read(column: Column) -> Iterator:
        try:
            with opened() as file:
                for batch in file.iter_batches(columns=[column]):
                    yield from batch.column(0).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"files: {path} cannot be read as .parquet: {error}") from error

    try:
        with opened() as file:
            schema = file.schema_arrow
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(f"files: {path} cannot be read as .parquet: {error}") from error
    return Table(str(path), schema.names, read, _class_names(Features.from_arrow_schema(schema)))


def _open_json(path: Path, encoding: str) -> Table:
    if kind_of(path) == ".json" and (whole := _single_object(path, encoding)):
        raise ValueError(
            f"files: {path} holds an object, not an array of objects; give the array alone, which is in one of "
            f"{', '.join(islice(whole, 5))}."
        )
    first = next(_read_records(path, encoding), None)
    if first is None:
        raise _empty(path)

    def read(column: Column) -> Iterator:
        for number, record in enumerate(_read_records(path, encoding), 1):
            if column not in record:
                raise ValueError(
                    f"files: record {number} of {path} has no {column!r}, only {', '.join(record)}; all records need "
                    "it."
                )
            yield record[column]

    return Table(str(path), list(first), read, {})


def _single_object(path: Path, encoding: str) -> dict | None:
    """What a file holds if it is one object over several lines, or one whose values are arrays of objects."""
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
    """Objects of a JSON file: one a line or, in a `.json`, also the members of an array."""
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
    """What the lines of a file from this number on say."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} in line {number + error.lineno - 1}, column {error.colno}"
        raise ValueError(f"files: {path} cannot be read as {kind_of(path)}: {reason}.") from error
    except RecursionError as error:
        raise ValueError(f"files: {path} cannot be read as {kind_of(path)}: {error} in line {number}.") from error


def _open_rows(path: Path, has_header: bool, skip_torn: bool, encoding: str) -> Table:
    first = first_cells(path, encoding)
    if not first:
        raise _empty(path)
    columns = first if has_header else list(range(len(first)))
    if len(set(columns)) < len(columns):
        raise ValueError(f"files: {path} names a column twice in its header: {', '.join(first)}; rename it.")
    told = False

    def read(column: Column) -> Iterator[str]:
        nonlocal told
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
        if torn and not told:
            told = True
            rows = whole + torn
            logger.warning("%d of %d rows of %s have not %d cells and are left out.", torn, rows, path, len(first))

    return Table(str(path), columns, read, {})


def _read_rows(path: Path, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Rows of a CSV or TSV file that are not empty, from the first that is not blank, with their numbers."""
    if kind_of(path) == ".tsv":
        # A carriage return that ends no line is white space.
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
            if is_over:  # the reader looks for the end of a row behind that of the file
                raise ValueError(
                    f"files: {path} cannot be read as .csv: row {number} opens a quote and does not close it."
                )
            yield number, row
    except csv.Error as error:
        raise ValueError(f"files: {path} cannot be read as .csv: {error}") from error


def _torn_row(path: Path, number: int, row: list[str], expected: int) -> ValueError:
    kind = kind_of(path)
    separator, way_out = {
        ".csv": (",", "put cells that hold a comma or a line break in quotes"),
        ".tsv": ("\t", "take tabs and line breaks out of its cells, where quotes mean nothing"),
    }[kind]
    return ValueError(
        f"files: {path} cannot be read as {kind}: row {number} must have {expected} cells as the first one has, got "
        f"{len(row)} in {separator.join(row)[:50]!r}; {way_out}."
    )
