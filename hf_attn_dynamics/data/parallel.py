# Licensed under the Apache License, Version 2.0.
"""Parallel text: sentences and their translations."""

import logging
from collections.abc import Iterable
from pathlib import Path

from datasets import Dataset, Features, Value

from .files import read_lines
from .tables import Column, Table, check_strings, open_tables


logger = logging.getLogger(__name__)

PAIRS = Features({"source": Value("string"), "target": Value("string")})
COLUMNS = (("source", "target"), ("src", "tgt"))


def load_parallel(
    source_files: str | Path | Iterable[str | Path] | None = None,
    target_files: str | Path | Iterable[str | Path] | None = None,
    source_column: Column | None = None,
    target_column: Column | None = None,
    *,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    split: str = "train",
    encoding: str = "utf-8",
) -> Dataset:
    """Loads sentences and translations from line-aligned files, tables, or a dataset on the Hub.

    White space around sentences is removed, and pairs with a blank side are skipped.

    Args:
        source_files (`str`, `Path` or a list of these, *optional*):
            With `target_files`: plain text files with any suffix and one sentence per line, compressed if the name
            ends in `.gz`. Without: tables with both sides, see [`load_classification`].
        target_files (`str`, `Path` or a list of these, *optional*):
            Translations: one file for each of `source_files`, in the same order and with the same number of lines.
        source_column (`str` or `int`, *optional*):
            Column of the sentences in a table: a name, or an index, from 0, in a CSV or TSV file without header.
            Defaults to `source` or `src`. Also a key of the dictionaries in a column `translation`.
        target_column (`str` or `int`, *optional*): Column of the translations; defaults to `target` or `tgt`.
        dataset_name (`str`, *optional*): Dataset for `datasets.load_dataset`, instead of files.
        dataset_config (`str`, *optional*): Configuration of that dataset.
        split (`str`): Split of that dataset.
        encoding (`str`): Encoding of the files, except `.parquet`.

    Returns:
        `datasets.Dataset` with the columns `source` and `target`.

    Raises:
        ValueError: if numbers of files or lines differ; if a file is empty, damaged, ragged, in another encoding or
            without these columns; if a cell is not a string; if arguments exclude each other.
        FileNotFoundError: if a file is missing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     de, en = Path(folder, "a.de"), Path(folder, "a.en")
        ...     _ = de.write_text("Guten Tag!\\n\\nDanke.\\n"), en.write_text("Hello!\\n\\nThanks.\\n")
        ...     load_parallel(de, en)[1]
        {'source': 'Danke.', 'target': 'Thanks.'}
    """
    if target_files is not None:
        unused = {
            "source_column": source_column,
            "target_column": target_column,
            "dataset_name": dataset_name,
            "dataset_config": dataset_config,
        }
        given = [name for name, value in unused.items() if value is not None] + ["split"] * (split != "train")
        if given:
            raise ValueError(f"{', '.join(given)} cannot be combined with target_files; leave out one or the other.")
        sides = _listed("source_files", source_files), _listed("target_files", target_files)
        return _pairs(_aligned(*sides, encoding))
    if (source_column is None) != (target_column is None) or source_column == target_column is not None:
        raise ValueError(
            f"source_column is {source_column!r} and target_column {target_column!r}; pass two different columns, or "
            "neither."
        )
    if isinstance(source_column, int) != isinstance(target_column, int):
        raise ValueError(
            f"source_column is {source_column!r} and target_column {target_column!r}; pass names for files with a "
            "header, or column indices for files without one."
        )
    has_header = not isinstance(source_column, int)
    tables = open_tables(source_files, dataset_name, dataset_config, split, lambda path: has_header, encoding)
    return _pairs(_columns(table, source_column, target_column) for table in tables)


def _listed(argument: str, files: str | Path | Iterable[str | Path] | None) -> list[Path]:
    paths = [] if files is None else [files] if isinstance(files, (str, Path)) else list(files)
    if not paths:
        raise ValueError(f"{argument} must have one file for each file of the other side, got {files!r}.")
    for path in paths:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{argument}: {path} is not a file.")
    return [Path(path) for path in paths]


def _lines(argument: str, path: Path, encoding: str) -> list[str]:
    lines = list(read_lines(path, encoding))
    if not any(map(str.strip, lines)):
        raise ValueError(f"{argument}: {path} is empty; leave it out.")
    return lines


def _aligned(sources: list[Path], targets: list[Path], encoding: str) -> Iterable[tuple[str, list[str], list[str]]]:
    if len(sources) != len(targets):
        raise ValueError(
            f"source_files and target_files must correspond, got {len(sources)} and {len(targets)} files; pass the "
            "same number in the same order."
        )
    for source, target in zip(sources, targets, strict=True):
        sides = _lines("source_files", source, encoding), _lines("target_files", target, encoding)
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{source} has {len(sides[0])} lines and {target} {len(sides[1])}; they must be aligned by line."
            )
        yield f"{source} and {target}", *sides


def _columns(
    table: Table, source_column: Column | None, target_column: Column | None
) -> tuple[str, list[str], list[str]]:
    if source_column is None:
        found = next((pair for pair in COLUMNS if set(pair) <= set(table.columns)), None)
        if found is None:
            raise ValueError(
                f"{table.origin} has no columns source and target, only {table.listed()}; pass source_column and "
                "target_column (indices, from 0, for a file without header)."
            )
        source_column, target_column = found
    sides = []
    for argument, column in (("source_column", source_column), ("target_column", target_column)):
        if column not in table.columns and "translation" in table.columns:
            translations = table.cells(argument, "translation")
            cells = [cell.get(column) if isinstance(cell, dict) else None for cell in translations]
        else:
            cells = table.cells(argument, column)
        check_strings(argument, column, table.origin, cells)
        sides.append(cells)
    return table.origin, sides[0], sides[1]


def _pairs(parts: Iterable[tuple[str, list[str], list[str]]]) -> Dataset:
    sources: list[str] = []
    targets: list[str] = []
    for origin, source, target in parts:
        pairs = [(one.strip(), other.strip()) for one, other in zip(source, target, strict=True)]
        kept = [pair for pair in pairs if all(pair)]
        if not kept:
            raise ValueError(f"{origin}: one side of every pair is blank; leave it out.")
        if len(kept) < len(pairs):
            logger.warning("%s: %d pairs with a blank side were skipped.", origin, len(pairs) - len(kept))
        sources += [pair[0] for pair in kept]
        targets += [pair[1] for pair in kept]
    return Dataset.from_dict({"source": sources, "target": targets}, features=PAIRS)
