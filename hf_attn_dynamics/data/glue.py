# Licensed under the Apache License, Version 2.0.
"""Datasets and submissions of GLUE (Wang et al. 2019), from the benchmark's files, other tables or the Hub."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, Value

from .._files import write_text
from .classification import UNLABELLED, _plain, _whole_number
from .files import TABLES, kind_of
from .glue_tasks import GLUE, GlueTask, _folder_key, glue_task
from .tables import Table, check_strings, declared_class, first_cells, open_hub_table, open_table


logger = logging.getLogger(__name__)


# File names of each split. The diagnostic test set (AX) has its own folder, and belongs to MNLI.
_FILES = {
    "train": ("train",),
    "validation": ("dev", "validation"),
    "validation_matched": ("dev_matched", "validation_matched"),
    "validation_mismatched": ("dev_mismatched", "validation_mismatched"),
    "test": ("test",),
    "test_matched": ("test_matched",),
    "test_mismatched": ("test_mismatched",),
    "ax": ("ax", "diagnostic", "test"),
}
_AX_FOLDERS = ("ax", "diagnostic")
_INDEX = ("index", "idx", "id")


def load_glue(task: str, split: str = "train", folder: str | Path | None = None, dataset_name: str = GLUE) -> Dataset:
    """Loads a split of a task of GLUE.

    Args:
        task (`str`): Name of the task, see [`glue_task`].
        split (`str`): `train`, a split of `validation`, or one of `test`, see [`GlueTask`].
        folder (`str` or `Path`, *optional*):
            Folder of the files, see [`find_glue_file`]: GLUE's TSV files, without quoting; or `.jsonl`, `.json`,
            `.csv` or `.parquet` with the same columns or those of the Hub; each also compressed, as `.gz`. By default
            the dataset on the Hub.
        dataset_name (`str`): That dataset, if there is no `folder`.

    Returns:
        `datasets.Dataset` with the columns `text` and `text_pair` (for pairs); then `label`, a `ClassLabel` in the
        order of the task's classes, or a score from 0 to 5; or, in a split of `test`, `index` (by default the number
        of the row). Damaged rows, as in the files of QQP, and rows without an agreed label (`-`) are skipped with a
        warning.

    Raises:
        ValueError: if the task or split is unknown, a file or column is missing, a text is not a string, or a label is
            missing or unknown; in a test set, if a row is damaged or its index is not an integer.

    Example:
        >>> import tempfile
        >>> rows = ["index\\tsentence1\\tsentence2\\tlabel", "0\\tA b.\\tB.\\tentailment"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "train.tsv").write_text("\\n".join(rows))
        ...     load_glue("RTE", folder=folder)[0]
        {'text': 'A b.', 'text_pair': 'B.', 'label': 0}
    """
    task = glue_task(task)
    table = _open_split(task, split, folder, dataset_name)
    columns = dict(zip(("text", "text_pair"), (_read(table, task, names, "texts") for names in task.texts)))
    for name, cells in columns.items():
        check_strings("the column of the", name, table.origin, cells)
    features = dict.fromkeys(columns, Value("string"))
    if split in task.test.values():
        columns["index"], features["index"] = _indices(table, len(columns["text"])), Value("int64")
    else:
        labels = _labels(task, table)
        agreed = [row for row, label in enumerate(labels) if label is not None]
        if len(agreed) < len(labels):
            logger.warning(
                "%d of %d rows of %s have no agreed label (-) and are skipped.",
                len(labels) - len(agreed),
                len(labels),
                table.origin,
            )
            columns = {name: [cells[row] for row in agreed] for name, cells in columns.items()}
            labels = [labels[row] for row in agreed]
        columns["label"] = labels
        features["label"] = Value("float32") if task.labels is None else ClassLabel(names=list(task.labels))
    return Dataset.from_dict(columns, features=Features(features))


def find_glue_file(task: str, split: str, folder: str | Path) -> Path | None:
    """Finds the file of a split.

    Args:
        task (`str`): The task, see [`glue_task`].
        split (`str`): The split.
        folder (`str` or `Path`): The folder of all tasks, which contains `CoLA` and `SST-2` (or `cola` and `sst2`);
            or that of the task.

    Returns:
        `Path`: such as `SST-2/dev.tsv`, `sst2/validation.jsonl`, and `diagnostic/diagnostic.tsv` or `AX/AX.tsv` for
        the split `ax`; `None` if there is none.

    Raises:
        ValueError: if `folder` does not exist, or there are several such files.
    """
    task, folder = glue_task(task), Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder {str(folder)!r} does not exist; pass one with files of GLUE.")
    wanted = _AX_FOLDERS if split == "ax" else (task.name,)
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and _folder_key(path.name) in wanted]
    folders = below or ([] if split == "ax" else [folder])
    found = [
        path
        for one in folders
        for path in sorted(one.iterdir())
        if kind_of(path) in TABLES
        and path.name.lower().removesuffix(".gz").removesuffix(kind_of(path)) in _FILES[split]
    ]
    if len(found) > 1:
        raise ValueError(
            f"the {split} split of {task.name} could be {' or '.join(map(str, found))}; keep only one of them."
        )
    return found[0] if found else None


def class_order(labels: Sequence[str], id2label: Mapping[int | str, str]) -> list[str] | None:
    """Classes of a task in the order of a model.

    Args:
        labels (sequence of `str`): Names of the task's classes; empty for a task with scores.
        id2label (`dict`): Names of the model's classes, as in its configuration.

    Returns:
        `list[str]`: the names in the order of the model, compared as in [`align_labels`]; in the order of the task if
        the model's classes are only numbered; `None` if the model has other classes.

    Example:
        >>> class_order(("entailment", "neutral"), {0: "NEUTRAL", 1: "ENTAILMENT"})
        ['neutral', 'entailment']
        >>> class_order(("negative", "positive"), {0: "LABEL_0", 1: "LABEL_1"})
        ['negative', 'positive']
    """
    names = [_plain(name) for _, name in sorted((int(number), name) for number, name in id2label.items())]
    if len(names) != len(labels or ("score",)):
        return None
    if not labels or all(map(str.isdecimal, names)):
        return list(labels)
    plain = {_plain(label): label for label in labels}
    return [plain[name] for name in names] if set(names) == set(plain) else None


def write_submission(
    path: str | Path, task: str, indices: Sequence[int], answers: Sequence[int] | Sequence[float]
) -> None:
    """Writes predictions for a test set in the format of GLUE's server, a TSV file with `index` and `prediction`.

    Args:
        path (`str` or `Path`): The file, which the server expects to have the name of the key in [`GlueTask`]'s
            `test`.
        task (`str`): The task, see [`glue_task`].
        indices (sequence of `int`): The column `index` of the test set.
        answers (sequence): For each row, the class id in the order of the task's classes, or the score, which is
            clipped to 0–5.

    Raises:
        ValueError: if the numbers of indices and answers differ.
    """
    task = glue_task(task)
    if len(indices) != len(answers):
        raise ValueError(f"answers must have one value for each of {len(indices)} indices, got {len(answers)}.")
    if task.labels is None:
        cells = [f"{min(max(float(answer), 0.0), 5.0):.3f}" for answer in answers]
    else:
        cells = [task.labels[answer] if task.answers_by_name else str(int(answer)) for answer in answers]
    lines = ["index\tprediction", *(f"{index}\t{cell}" for index, cell in zip(indices, cells))]
    write_text(path, "\n".join(lines) + "\n")


def _open_split(task: GlueTask, split: str, folder: str | Path | None, dataset_name: str) -> Table:
    splits = ("train", *task.validation, *task.test.values())
    if split not in splits:
        raise ValueError(f"split {split!r} is not one of {task.name}: {', '.join(splits)}.")
    if folder is None:
        return open_hub_table(dataset_name, *(("ax", "test") if split == "ax" else (task.name, split)))
    path = find_glue_file(task.name, split, folder)
    if path is None:
        raise ValueError(
            f"folder {str(folder)!r} has no file of the {split} split of {task.name}, such as "
            f"{task.title}/{_FILES[split][0]}.tsv (or {', '.join(TABLES)}, each also as .gz)."
        )
    return _open_file(path, task, split)


def _open_file(path: Path, task: GlueTask, split: str) -> Table:
    """Opens a file of GLUE; a TSV file may have no header, and rows that are split by line breaks.

    No row of a test set is skipped, since submissions must be complete.
    """
    names = task.without_header
    first = first_cells(path) if names and kind_of(path) == ".tsv" else []
    has_header = not first or len(first) != len(names) or any(cell.casefold() in task.texts[0] for cell in first)
    table = open_table(path, has_header, skip_torn=split not in task.test.values())
    if has_header:
        return table
    return replace(table, columns=list(names), read=lambda name: table.read(names.index(name)))


def _column(table: Table, names: Sequence[str]) -> str | None:
    """The first of these columns that the table has."""
    return next((column for column in map(table.find, names) if column is not None), None)


def _read(table: Table, task: GlueTask, names: Sequence[str], what: str) -> list:
    column = _column(table, names)
    if column is None:
        raise ValueError(
            f"{table.origin} has no column {' or '.join(names)} for the {what} of {task.name}, only {table.listed()}."
        )
    return table.cells("column", column)


def _indices(table: Table, rows: int) -> list[int]:
    column = _column(table, _INDEX)
    if column is None:
        return list(range(rows))
    cells = table.cells("column", column)
    try:
        return [int(cell) for cell in cells]
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {column!r} of {table.origin} must have integers: {error}.") from error


def _labels(task: GlueTask, table: Table) -> list[int | float | None]:
    """Class ids or scores; `None` where annotators disagree."""
    cells = _read(table, task, task.label_column, "labels")
    declared = table.class_names.get(_column(table, task.label_column))
    numbers = None if task.labels is None else {_plain(name): number for number, name in enumerate(task.labels)}
    labels: list[int | float | None] = []
    for row, cell in enumerate(cells, 1):
        cell = cell.strip() if isinstance(cell, str) else cell
        if cell == "-":
            labels.append(None)
            continue
        if cell in (*UNLABELLED, "-1"):
            raise ValueError(
                f"{table.origin} has {cell!r} in row {row}, a missing label: test sets are published without labels."
            )
        label = declared_class(declared, cell) if declared else cell
        label = _score(label) if numbers is None else _class(label, numbers)
        if label is None:
            known = "scores from 0 to 5" if numbers is None else f"the labels {', '.join(task.labels)}, or their ids"
            raise ValueError(f"{table.origin} has the label {cell!r} in row {row}, but {task.name} has {known}.")
        labels.append(label)
    return labels


def _class(cell: str | float | None, numbers: Mapping[str, int]) -> int | None:
    """Class id of a name or number; `None` for other cells."""
    name = _plain(str(cell))
    number = numbers.get(name, _whole_number(name))
    return number if number in numbers.values() else None


def _score(cell: str | float) -> float | None:
    try:
        score = float(cell)
    except (TypeError, ValueError):
        return None
    return score if 0 <= score <= 5 else None
