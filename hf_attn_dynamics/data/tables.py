# Licensed under the Apache License, Version 2.0.
"""Columns of tables: TSV, CSV, JSON and Parquet files, and data sets of the Hub."""

import csv
import gzip
import io
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from datasets import ClassLabel, Features, load_dataset

from .text import UNREADABLE, _find_files, _json_lines, refuse_torn_rows


logger = logging.getLogger(__name__)

TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")

Column = str | int  # a name, or the position in a file without header


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
        read (`Callable`): Maps a column to the list of its cells.
        class_names (`dict[str, list[str]]`): Names of the classes of those columns that are declared as labels, or as
            lists of labels.
    """

    origin: str
    columns: list[Column]
    read: Callable[[Column], list]
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

    def cells(self, argument: str, column: Column) -> list:
        """The cells of a column.

        Args:
            argument (`str`): The argument that named the column, for messages.
            column (`str` or `int`): The column.

        Raises:
            ValueError: if there is no such column, or no row.
        """
        if column not in self.columns:
            raise ValueError(
                f"{argument} {column!r} is not a column of {self.origin}; choose from "
                f"{', '.join(map(str, self.columns))}."
            )
        cells = self.read(column)
        if not cells:
            raise ValueError(f"{self.origin} has no row; add some or leave it out.")
        return cells


def find_tables(files: str | Path | Iterable[str | Path]) -> list[Path]:
    """Files of tables, from files, folders and patterns.

    Args:
        files (`str`, `Path` or a list of these): As for [`load_texts`], but without `.txt`.

    Returns:
        `list[Path]`: The files, each once.

    Raises:
        ValueError: if a file is of an unknown kind or empty, or a folder has no table.
        FileNotFoundError: if a file is missing or a pattern matches nothing.
    """
    paths = _find_files([files] if isinstance(files, (str, Path)) else files, TABLES)
    for path in paths:
        if path.stat().st_size == 0:
            raise ValueError(f"files: {path} is empty; remove it or leave it out.")
    return paths


def read_utf8(path: Path) -> str:
    """The text of a plain or gzip-compressed file in UTF-8, without a byte order mark.

    Args:
        path (`Path`): The file; compressed if its name ends in `.gz`.

    Raises:
        ValueError: if it is not in UTF-8 (the message names line and byte), or not compressed although called `.gz`.
    """
    content = path.read_bytes()
    if path.suffix.lower() == ".gz":
        try:
            content = gzip.decompress(content)
        except UNREADABLE as error:
            raise ValueError(f"files: {path} cannot be read as .gz: {error}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + len(content) - len(error.object)  # the error counts from behind the mark
        line = content.count(b"\n", 0, start) + 1
        raise ValueError(
            f"files: {path} is not in UTF-8: byte 0x{content[start]:02x} at position {start}, in line {line}; convert "
            "it."
        ) from error


def first_cells(path: Path) -> list[str]:
    """The cells of the first row of a CSV or TSV file: the header, if there is one.

    Args:
        path (`Path`): The file.

    Raises:
        ValueError: if it is not in UTF-8, or a cell of a CSV file is longer than 131,072 characters.
    """
    text = _from_first_row(path)
    if path.suffix.lower() == ".tsv":
        return next((line.rstrip("\r\n").split("\t") for line in io.StringIO(text, newline="\n") if line.strip()), [])
    try:
        return next((row for row in csv.reader(io.StringIO(text, newline="")) if row), [])
    except csv.Error as error:
        raise ValueError(f"files: {path} cannot be read as .csv: {error}") from error


def open_table(path: Path, has_header: bool = True, skip_torn: bool = False) -> Table:
    """Opens a file as a table; cells of CSV and TSV files are strings.

    Args:
        path (`Path`): The file, of one of the kinds in `TABLES`. A TSV file knows no quotes.
        has_header (`bool`): Whether the first row of a CSV or TSV file names the columns.
        skip_torn (`bool`): Whether rows of a CSV or TSV file that have more or fewer cells than the first one are left
            out, with a warning; otherwise they are refused.

    Raises:
        ValueError: if the file is not what its name says: broken, ragged, without rows, not in UTF-8; or if a file of
            another kind is to be without header.
    """
    kind = path.suffix.lower()
    if not has_header and kind not in (".csv", ".tsv"):
        raise ValueError(f"{path}: columns of a {kind} file have names; give them instead of positions.")
    try:
        if kind == ".parquet":
            return _open_parquet(path)
        if kind in (".json", ".jsonl"):
            return _open_json(path)
        return _open_csv(path, kind, has_header, skip_torn)
    except UNREADABLE as error:
        raise ValueError(f"files: {path} cannot be read as {kind}: {error}") from error


def open_hub_table(name: str, config: str | None, split: str) -> Table:
    """Opens a split of a data set of the Hub as a table.

    Args:
        name (`str`): The data set, for `datasets.load_dataset`.
        config (`str`, *optional*): Its configuration.
        split (`str`): Its split.
    """
    dataset = load_dataset(name, config, split=split)
    return Table(name, dataset.column_names, lambda column: dataset[column][:], _class_names(dataset.features))


def open_tables(
    files: str | Path | Iterable[str | Path] | None,
    dataset_name: str | None,
    dataset_config: str | None,
    split: str,
    has_header: Callable[[Path], bool],
) -> list[Table]:
    """Opens either files or a data set of the Hub.

    Args:
        files (`str`, `Path` or a list of these, *optional*): See [`find_tables`].
        dataset_name (`str`, *optional*): The data set, instead of `files`.
        dataset_config (`str`, *optional*): The configuration of that data set.
        split (`str`): The split of that data set.
        has_header (`Callable`): Whether the first row of a CSV or TSV file names the columns.

    Raises:
        ValueError: if not exactly one of `files` and `dataset_name` is given, or arguments for one meet the other.
    """
    if bool(files) == bool(dataset_name):
        raise ValueError(f"Give either files or dataset_name; got files={files!r} and dataset_name={dataset_name!r}.")
    if dataset_name:
        return [open_hub_table(dataset_name, dataset_config, split)]
    if dataset_config is not None or split != "train":
        raise ValueError(
            f"dataset_config={dataset_config!r} and split={split!r} select from a dataset_name and cannot be combined "
            "with files; leave them out and list the files of that split."
        )
    return [open_table(path, has_header(path)) for path in find_tables(files)]


def check_strings(argument: str, column: Column, origin: str, cells: list) -> None:
    """Checks that a column holds texts and nothing else.

    Args:
        argument (`str`): The argument that named the column, for messages.
        column (`str` or `int`): The column.
        origin (`str`): The file or data set.
        cells (`list`): The cells.

    Raises:
        ValueError: if a cell is not a string.
    """
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, str):
            raise ValueError(
                f"{argument} {column!r} of {origin} holds {cell!r} in row {number}, not a string; convert it or leave "
                "the row out."
            )


def declared_class(names: Sequence[str], cell: Any) -> str | None:
    """Name of the class that a cell of a column with declared classes has the number of; `None` if it has none.

    Args:
        names (sequence of `str`): Names of the classes, see [`Table`].
        cell: The cell.
    """
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else None


def _class_names(features: Features) -> dict[str, list[str]]:
    """Names of the classes of columns of labels, and of lists of labels."""
    cells = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: cell.names for name, cell in cells.items() if isinstance(cell, ClassLabel)}


def _open_parquet(path: Path) -> Table:
    schema = pa.parquet.read_schema(path)

    def read(column: Column) -> list:
        try:
            return pa.parquet.read_table(path, columns=[column]).column(0).to_pylist()
        except UNREADABLE as error:
            raise ValueError(f"files: {path} cannot be read as .parquet: {error}") from error

    return Table(str(path), schema.names, read, _class_names(Features.from_arrow_schema(schema)))


def _open_json(path: Path) -> Table:
    text = read_utf8(path)
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        records = json.loads(text)
    else:
        # At line feeds only: other separators may stand within a string.
        records = list(_json_lines(path, text.split("\n")))
    if not records:
        raise ValueError(f"files: {path} has no row; add some or leave it out.")
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ValueError(f"files: {path} has {type(record).__name__} as record {number}, not a JSON object.")

    def read(column: Column) -> list:
        for number, record in enumerate(records, 1):
            if column not in record:
                raise ValueError(
                    f"files: record {number} of {path} has no {column!r}, only {', '.join(record)}; all records need "
                    "it."
                )
        return [record[column] for record in records]

    return Table(str(path), list(records[0]), read, {})


def _from_first_row(path: Path) -> str:
    """The text of a CSV or TSV file, without blank lines before its first row, which would be taken for the header."""
    text = re.sub(r"\A\s*[\r\n]", "", read_utf8(path))
    if path.suffix.lower() != ".tsv":
        return text
    # Arrow ends a row at a carriage return, but in a TSV file that is white space unless it ends a line.
    return re.sub(r"(?m)\r(?!\r*$)", " ", text) if "\n" in text else text.replace("\r", "\n")


def _open_csv(path: Path, kind: str, has_header: bool, skip_torn: bool) -> Table:
    first = first_cells(path)
    columns = first if has_header else list(range(len(first)))
    if len(set(columns)) < len(columns):
        raise ValueError(f"files: {path} names a column twice in its header: {', '.join(first)}; rename it.")
    content = _from_first_row(path).encode()
    names = [str(column) for column in columns]
    torn: list[pa.csv.InvalidRow] = []
    with refuse_torn_rows(path) as refuse:
        table = pa.csv.read_csv(
            pa.BufferReader(content),
            # One block, read by one thread: so that any row fits, and messages have the numbers of rows.
            read_options=pa.csv.ReadOptions(
                use_threads=False,
                block_size=len(content) + 1,
                column_names=names,
                skip_rows_after_names=int(has_header),
            ),
            parse_options=pa.csv.ParseOptions(
                **({"delimiter": "\t", "quote_char": False} if kind == ".tsv" else {"newlines_in_values": True}),
                invalid_row_handler=(lambda row: torn.append(row) or "skip") if skip_torn else refuse,
            ),
            # Nothing is taken for a number or for missing.
            convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
    if torn:
        rows = table.num_rows + len(torn)
        logger.warning("%d of %d rows of %s have not %d cells and are left out.", len(torn), rows, path, len(columns))
    if not table.num_rows:
        raise ValueError(f"files: {path} has no row; add some or leave it out.")
    return Table(str(path), columns, lambda column: table.column(str(column)).to_pylist(), {})
