# Licensed under the Apache License, Version 2.0.
"""Datasets for text classification: from installed documentation, local files or the Hub."""

import functools
import importlib.util
import logging
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Value
from huggingface_hub.utils import tqdm

from .demo.checks import check_positive
from .demo.embedded import _docstrings, _paragraph, _runs, _shingles, _source_files
from .files import kind_of
from .tables import Column, Table, check_strings, declared_class, first_cells, open_tables


logger = logging.getLogger(__name__)

# Dependencies of the recipes; "python" is the standard library.
LIBRARIES = ("matplotlib", "networkx", "numpy", "pandas", "python", "sympy", "torch", "transformers")
LIBRARY_NAME = re.compile(
    r"\b\w*(?:matplotlib|networkx|numpy|pandas|python|sympy|torch|transformers|hugging ?face)\w*|"
    r"\b(?:mpl|nx|np|pd|plt)\b",
    re.IGNORECASE,
)
STAND_IN = "LIBRARY"
WORDS = 25  # paragraphs of a docstring are joined until they have this number of words
MOST_OF_TRAINING_FILE = 30  # texts, so that no single file dominates its library
MOST_OF_VALIDATION_FILE = 10

# In order of preference; compared case-insensitively.
TEXT_COLUMNS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("text1", "text2"),
    ("#1 string", "#2 string"),
    ("text",),
    ("sentence",),
    ("tweet",),
    ("review",),
    ("content",),
)
LABEL_COLUMNS = ("label", "gold_label", "labels", "is_duplicate", "quality", "class", "category", "sentiment")
UNLABELLED = (None, "", "-", -1)  # "-": annotators of SNLI and MNLI disagree; -1: test sets of GLUE
FEW_CLASSES = 100  # more values than this, and than half the rows, are not classes

_tell_once = functools.cache(logger.warning)


def embedded_classification(
    train_per_class: int = 500, validation_per_class: int = 100, seed: int = 0
) -> tuple[Dataset, Dataset]:
    """Classification of installed documentation by its library, with eight classes; needs no download.

    A text is one or more consecutive paragraphs of a docstring of Python's standard library or a dependency of the
    recipes: whole sentences with at least 25 words. Names of these libraries are replaced by `"LIBRARY"`. Texts are
    unique, and no source file has texts in both splits.

    Args:
        train_per_class (`int`): Training texts per class.
        validation_per_class (`int`): Validation texts per class.
        seed (`int`): Determines the files and the order of the texts.

    Returns:
        `tuple[datasets.Dataset, datasets.Dataset]`: training and validation, with the columns `text` and `label`
        (`ClassLabel`). Seed and versions of the libraries determine the texts.

    Raises:
        ValueError: if a number is less than 1, or a library is not installed or has too few texts.

    Example:
        >>> train, validation = embedded_classification(train_per_class=2, validation_per_class=1)
        >>> train.features["label"].names[:3], len(train), len(validation)
        (['matplotlib', 'networkx', 'numpy'], 16, 8)
    """
    check_positive(train_per_class=train_per_class, validation_per_class=validation_per_class)
    roots = {library: _folder(library) for library in LIBRARIES}
    train: list[tuple[str, int]] = []
    validation: list[tuple[str, int]] = []
    seen: set[int] = set()
    with tqdm(roots.items(), desc="Reading documentation", unit=" libraries", leave=False) as progress:
        for label, (library, root) in enumerate(progress):
            texts = _texts_of_files(library, root, seed, seen)
            for split, wanted, most in (
                (validation, validation_per_class, MOST_OF_VALIDATION_FILE),
                (train, train_per_class, MOST_OF_TRAINING_FILE),
            ):
                chosen: list[str] = []
                while len(chosen) < wanted and (of_file := next(texts, None)) is not None:
                    chosen += of_file[: min(most, wanted - len(chosen))]
                if len(chosen) < wanted:
                    raise ValueError(
                        f"the documentation of {library} has too few texts for train_per_class={train_per_class} and "
                        f"validation_per_class={validation_per_class}; lower them."
                    )
                split += [(text, label) for text in chosen]
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(LIBRARIES))})
    shuffle = random.Random(seed).shuffle
    datasets = []
    for split in (train, validation):
        shuffle(split)
        columns = dict(zip(("text", "label"), map(list, zip(*split, strict=True)), strict=True))
        datasets.append(Dataset.from_dict(columns, features=features))
    return datasets[0], datasets[1]


def load_classification(
    files: str | Path | Iterable[str | Path] | None = None,
    text_column: Column | Sequence[Column] | None = None,
    label_column: Column | None = None,
    label_names: Sequence[str] | None = None,
    *,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    split: str = "train",
    encoding: str = "utf-8",
    first_label: int | None = None,
) -> Dataset:
    """Loads labelled texts or text pairs from local files or a dataset on the Hub.

    Args:
        files (`str`, `Path` or a list of these, *optional*):
            Files, folders (all tables below them, sorted) or glob patterns: `.tsv` (no quoting), `.csv`, `.jsonl`,
            `.json` (an array of objects, or lines), `.parquet`, each also compressed, as `.gz`. A CSV or TSV file with
            two columns and no header has the columns text and label.
        text_column (`str` or `int`, or two of them, *optional*):
            Column of the texts, or two columns of text pairs. By default a column with a common name: `text`,
            `sentence`, `sentence1` and `sentence2`, `premise` and `hypothesis`, and so on. Integers are column indices
            for CSV and TSV files without header; negative ones count from the last column.
        label_column (`str` or `int`, *optional*): Column of the labels; by default a column with a common name.
        label_names (`list[str]`, *optional*):
            Ordered names of the classes, needed if labels are numbers with a meaning, or if a file lacks a class. By
            default the sorted labels, or the declared order of a `ClassLabel` column. Numbers (also `1.0`) are their
            own names, with a warning if a number up to the largest has no row, or if they start at 1.
        dataset_name (`str`, *optional*): Dataset for `datasets.load_dataset`, instead of `files`.
        dataset_config (`str`, *optional*): Configuration of that dataset.
        split (`str`): Split of that dataset.
        encoding (`str`): Encoding of the files, except `.parquet`.
        first_label (`int`, *optional*): Number of the first of `label_names`, 0 or 1. By default found from the
            labels, which must then include 0 or the largest possible number.

    Returns:
        `datasets.Dataset` with the columns `text`, `text_pair` (for pairs) and `label` (`ClassLabel`), in the order of
        the files. Numeric labels keep their number, unless they start at 1: then class "1" has the number 0. Use
        [`align_labels`] to match the class order of a model or another split.

    Raises:
        ValueError: unless exactly one of `files` and `dataset_name` is given; if a file is empty, damaged, ragged, of
            an unknown type, in another encoding or without these columns; if a text is not a string; or if a label is
            missing (`-1`, `-`, blank), not a class, or not in `label_names`; or if the labels are numbers that
            `label_names` may number from 0 or from 1, and `first_label` is not given.
        FileNotFoundError: if a file is missing or a pattern matches nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "train.tsv")
        ...     _ = path.write_text("sentence\\tlabel\\na fine film\\t1\\na bore\\t0\\n")
        ...     dataset = load_classification(path, label_names=["negative", "positive"])
        >>> dataset[0], dataset.features["label"].names
        ({'text': 'a fine film', 'label': 1}, ['negative', 'positive'])
    """
    wanted = _wanted_columns(text_column, label_column)
    if label_names is not None and (isinstance(label_names, str) or len(set(label_names)) < len(label_names)):
        raise ValueError(f"label_names must be a list of unique names, got {label_names!r}.")
    if first_label is not None and (label_names is None or first_label not in (0, 1)):
        raise ValueError(f"first_label must be 0 or 1, beside label_names, got {first_label!r}.")
    tables = open_tables(
        files, dataset_name, dataset_config, split, lambda path: _has_header(path, *wanted, encoding), encoding
    )
    texts: list[list[str]] = []
    labels: list[str | int] = []
    declared = []
    for table in tables:
        columns, column = _choose_columns(table, *wanted)
        if texts and len(columns) != len(texts):
            raise ValueError(
                f"{table.origin} has {len(columns)} texts per row, but {tables[0].origin} has {len(texts)}."
            )
        texts = texts or [[] for _ in columns]
        for collected, text in zip(texts, columns, strict=True):
            cells = table.cells("text_column", text)
            check_strings("text_column", text, table.origin, cells)
            collected += cells
        cells = table.cells("label_column", column)
        declared.append(table.class_names.get(column))
        labels += _labels(table.origin, column, cells, declared[-1])
    if label_names is None and declared[0] and all(names == declared[0] for names in declared):
        label_names = declared[0]
    names, ids = _classes(labels, label_names, column, first_label)
    return Dataset.from_dict(
        {**dict(zip(("text", "text_pair"), texts)), "label": ids},
        features=Features(
            {**dict.fromkeys(("text", "text_pair")[: len(texts)], Value("string")), "label": ClassLabel(names=names)}
        ),
    )


def align_labels(
    dataset: Dataset, names: Sequence[str] | Mapping[int | str, str], label_column: str = "label"
) -> Dataset:
    """Renumbers the classes of a dataset to match a model by name.

    Names are compared without case and word separators: `"NOT_ENTAILMENT"` matches `"not entailment"`. A number
    matches Transformers' default name `"LABEL_…"`.

    Args:
        dataset (`datasets.Dataset`): Examples with a `ClassLabel` column.
        names (`list[str]` or `dict`): Ordered names of the model's classes, or its `config.id2label`.
        label_column (`str`): Column of the labels.

    Returns:
        `datasets.Dataset`: the same examples, with the numbers and names of the model. The model may have further
        classes.

    Raises:
        ValueError: if the column is missing or not a `ClassLabel`, a label is missing, names are not unique, or a
            class of the dataset is not in `names`.

    Example:
        >>> features = Features({"label": ClassLabel(names=["entailment", "neutral"])})
        >>> dataset = Dataset.from_dict({"label": [0, 1]}, features=features)
        >>> align_labels(dataset, {0: "NEUTRAL", 1: "ENTAILMENT"})["label"][:]
        [1, 0]
    """
    if isinstance(names, Mapping):
        numbers = {int(number): name for number, name in names.items()}
        if sorted(numbers) != list(range(len(numbers))):
            raise ValueError(f"names must be numbered from 0 without gaps, got {sorted(numbers)}.")
        names = [numbers[number] for number in range(len(numbers))]
    names = list(names)
    if label_column not in dataset.column_names:
        raise ValueError(
            f"label_column {label_column!r} is not a column of the dataset; choose one of "
            f"{', '.join(dataset.column_names)}."
        )
    feature = dataset.features[label_column]
    if not isinstance(feature, ClassLabel):
        raise ValueError(
            f"label_column {label_column!r} has the type {feature}, not ClassLabel; name its classes with "
            f"dataset.cast_column({label_column!r}, ClassLabel(names=…))."
        )
    own, models = ([_plain(name) for name in side] for side in (feature.names, names))
    for argument, side in (("the dataset", own), ("names", models)):
        if len(set(side)) < len(side):
            raise ValueError(f"classes of {argument} must have unique names, got {', '.join(side)}; rename one.")
    unmatched = {name: number for number, name in enumerate(own) if name not in models}
    if all(map(str.isdigit, own)):
        # Numbers without rows need not be classes.
        numbers = set(dataset.unique(label_column)) if unmatched else ()
        unmatched = {name: number for name, number in unmatched.items() if number in numbers}
    if unmatched:
        if all(map(str.isdigit, own + models)):
            extra = ", ".join(sorted(unmatched, key=int))
            way_out = f"Leave out the rows of {extra}, or choose a model or training data with these classes."
        elif all(map(str.isdigit, models)):
            way_out = "Name the latter in config.id2label or in the training data."
        elif all(map(str.isdigit, own)):
            way_out = "Name the classes of the dataset in label_names or a ClassLabel."
        else:
            way_out = "Rename the classes of the dataset if they mean the same, or choose another model."
        raise ValueError(
            f"The dataset has the classes {', '.join(feature.names)}, but the model or the training data has "
            f"{', '.join(names)}; they cannot be matched by name. {way_out}"
        )
    ids = np.array([models.index(name) if name in models else -1 for name in own])
    features = dataset.features.copy()
    features[label_column] = ClassLabel(names=names)

    def align(batch: dict) -> dict:
        labels = batch[label_column]
        missing = [label for label in labels if label is None or label < 0]
        if missing:
            raise ValueError(
                f"label_column {label_column!r} has {missing[0]}, a missing label; leave out rows without labels."
            )
        return {label_column: ids[labels]}

    return (
        dataset.with_format(None)
        .map(align, batched=True, features=features, desc="Aligning labels")
        .with_format(**dataset.format)
    )


def _plain(name: str) -> str:
    name = re.sub(r"[\s_-]+", "_", name.strip().casefold())
    return re.sub(r"^label_(?=\d+$)", "", name)


def _folder(library: str) -> Path:
    if library == "python":
        return Path(sysconfig.get_path("stdlib"))
    # Found without importing it.
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.origin:
        raise ValueError(
            f"{library}, whose documentation is one of the classes, is not installed; install "
            '"hf_attn_dynamics[recipes]".'
        )
    return Path(spec.origin).parent


def _texts_of_files(library: str, root: Path, seed: int, seen: set[int]) -> Iterator[list[str]]:
    """Yields the texts of each file with texts, in random order by the seed; adds their shingles to `seen`."""
    # Without the version, so that the order only depends on file names.
    files = _source_files([(library, root)])
    random.Random(f"{seed}-{library}").shuffle(files)
    for path in files:
        texts = []
        for docstring in _docstrings(path):
            for text in _texts(docstring):
                shingles = _shingles(text)
                if 2 * len(shingles & seen) <= len(shingles):
                    seen |= shingles
                    texts.append(text)
        if texts:
            yield texts


def _texts(docstring: str) -> Iterator[str]:
    joined = ""
    for paragraph in filter(None, map(_paragraph, _runs(docstring))):
        joined = f"{joined} {paragraph}".lstrip()
        if len(joined.split()) >= WORDS:
            yield LIBRARY_NAME.sub(STAND_IN, joined)
            joined = ""


def _wanted_columns(
    text_column: Column | Sequence[Column] | None, label_column: Column | None
) -> tuple[tuple[Column, ...] | None, Column | None]:
    if text_column is None:
        texts = None
    else:
        texts = (text_column,) if isinstance(text_column, (str, int)) else tuple(text_column)
        if len(texts) not in (1, 2):
            raise ValueError(f"text_column must be one column, or two for pairs, got {text_column!r}.")
    given = [column for column in (*(texts or ()), label_column) if column is not None]
    if len(set(given)) < len(given):
        raise ValueError(f"text_column {text_column!r} and label_column {label_column!r} must be different columns.")
    if len({isinstance(column, int) for column in given}) > 1:
        raise ValueError(
            f"text_column is {text_column!r} and label_column {label_column!r}; pass names for files with a header, "
            "or column indices for files without one."
        )
    if texts is None and isinstance(label_column, int) or texts and isinstance(texts[0], int) and label_column is None:
        raise ValueError(
            f"text_column is {text_column!r} and label_column {label_column!r}; for a file without header pass both "
            "column indices."
        )
    return texts, label_column


def _has_header(path: Path, texts: tuple[Column, ...] | None, label: Column | None, encoding: str) -> bool:
    if isinstance(label, int):
        return False
    if texts is not None or label is not None or kind_of(path) not in (".csv", ".tsv"):
        return True
    cells = first_cells(path, encoding)
    known = {name for names in (*TEXT_COLUMNS, LABEL_COLUMNS) for name in names}
    return len(cells) != 2 or any(cell.casefold() in known for cell in cells)


def _choose_columns(
    table: Table, texts: tuple[Column, ...] | None, label: Column | None
) -> tuple[tuple[Column, ...], Column]:
    if texts is None and label is None and table.columns == [0, 1]:
        labels = table.cells("label_column", 1)
        if len(labels) > 1 and labels.count(labels[0]) == 1 and not re.fullmatch(r"-?\d+", labels[0]):
            raise ValueError(
                f"The first row of {table.origin} may be a header, since {labels[0][:60]!r} occurs only once; pass "
                "text_column and label_column: names if it is a header, otherwise column indices, from 0."
            )
        return (0,), 1
    if texts is None:
        by_name = (tuple(table.find(name, [label]) for name in names) for names in TEXT_COLUMNS)
        texts = next((columns for columns in by_name if None not in columns), None)
        if texts is None:
            raise _unnamed(table, "texts", "text_column")
    if label is None:
        by_name = (table.find(name, texts) for name in LABEL_COLUMNS)
        label = next((column for column in by_name if column is not None), None)
        if label is None:
            raise _unnamed(table, "labels", "label_column")
    return texts, label


def _unnamed(table: Table, what: str, argument: str) -> ValueError:
    return ValueError(
        f"{table.origin} has no column with a common name for {what}, only {table.listed()}; pass it as "
        f"{argument} (for a file without header, pass the indices of all columns, from 0)."
    )


def _labels(origin: str, column: Column, cells: list, declared: list[str] | None) -> list[str | int]:
    """Class names or numbers from the cells of one table."""
    numbers = not any(isinstance(cell, str) and cell.strip() and _whole_number(cell) is None for cell in cells)
    labels: list[str | int] = []
    for row, cell in enumerate(cells, 1):
        if isinstance(cell, str):
            cell = cell.strip()
            cell = _whole_number(cell) if numbers and cell else cell
        elif isinstance(cell, bool):
            cell = str(cell).lower()
        elif isinstance(cell, float) and cell.is_integer():
            cell = int(cell)
        if cell in UNLABELLED or cell != cell:
            raise ValueError(
                f"label_column {column!r} of {origin} has {cell!r} in row {row}, a missing label: test sets are often "
                "published without labels. Choose another file, or leave out the row."
            )
        if not isinstance(cell, (str, int)) or isinstance(cell, int) and cell < 0:
            raise ValueError(
                f"label_column {column!r} of {origin} has {cell!r} in row {row}; a label must be a class name or a "
                "number from 0."
            )
        label = cell if declared is None else declared_class(declared, cell)
        if label is None:
            raise ValueError(
                f"label_column {column!r} of {origin} has {cell!r} in row {row}, but declares only {len(declared)} "
                f"classes: {', '.join(declared)}; leave out the row."
            )
        labels.append(label)
    return labels


def _whole_number(cell: str) -> int | None:
    """The integer in a cell, also in the form 1.0; `None` for other cells."""
    match = re.fullmatch(r"(-?\d+)(\.0*)?", cell.strip())
    return int(match[1]) if match else None


def _first_label(labels: set[int], names: Sequence[str] | None, label_column: Column) -> int:
    """Number of the first class, if no label is 0."""
    if names is None:
        # A single number may be one of two classes, of which the other has no row.
        return int(max(labels) == len(labels) > 1)
    if max(labels) < len(names):
        raise ValueError(
            f"label_column {label_column!r} has the numbers {', '.join(map(str, sorted(labels)))}, neither 0 nor "
            f"{len(names)}, so that label_names {', '.join(map(str, names))} may be numbered from 0 or from 1: set "
            "first_label to one of them, or write the names instead of the numbers."
        )
    return int(max(labels) == len(names) > 1)


def _classes(
    labels: list[str | int], names: Sequence[str] | None, label_column: Column, start: int | None
) -> tuple[list[str], list[int]]:
    """Class names, and the class id of each label; `start` is the number of the first class, if it is known."""
    kinds = {type(label) for label in labels}
    if len(kinds) > 1:
        raise ValueError(
            f"label_column {label_column!r} has both names and numbers, "
            f"{next(label for label in labels if isinstance(label, str))!r} and "
            f"{next(label for label in labels if isinstance(label, int))!r}; use one of them."
        )
    different = set(labels)
    if start is None or kinds != {int}:
        start = 0 if kinds != {int} or 0 in different else _first_label(different, names, label_column)
    if names is not None:
        names = list(names)
        known = set(names) if kinds == {str} else set(range(start, len(names) + start))
        unknown = sorted(different - known)
        if unknown:
            raise ValueError(
                f"label_names is {names}, but the files have the labels {', '.join(map(str, sorted(different)))}; add "
                f"names for {', '.join(map(str, unknown))}."
            )
    elif kinds == {str}:
        names = sorted(different)
    # Numbers may be too large for a list of names.
    count = len(names) if names is not None else max(labels) + 1
    if count > max(FEW_CLASSES, len(labels) / 2):
        raise ValueError(
            f"label_column {label_column!r} has {count} values in {len(labels)} rows, too many for classes; choose "
            "another column (an index, from 0, in a file without header)."
        )
    if names is None:
        names = range(start, count)
        if missing := sorted(set(names) - different):
            logger.warning(
                "%d of the classes 0 to %d have no rows, such as %d; if they are not classes, number the others from "
                "0 without gaps.",
                len(missing),
                max(labels),
                missing[0],
            )
    names = [str(name) for name in names]
    if kinds == {int}:
        if start:
            _tell_once("label_column %r numbers classes from 1: %s becomes class 0.", label_column, names[0])
        return names, [label - start for label in labels]
    number = {name: index for index, name in enumerate(names)}
    return names, [number[label] for label in labels]
