# Licensed under the Apache License, Version 2.0.
"""Texts with one file or folder per class."""

from collections.abc import Mapping
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, Value

from .files import kind_of, read_lines, visible_files


def load_class_files(paths: Mapping[str, str | Path], encoding: str = "utf-8") -> Dataset:
    """Loads labelled texts from a file or folder per class, such as the movie reviews of NLTK.

    Args:
        paths (`dict[str, str | Path]`): For each class name, a file with any suffix (`.gz` is decompressed) and one
            text per line; or a folder with one text per file: all `.txt` files or, if there are none, all files that
            are not hidden. Blank texts are skipped.
        encoding (`str`): Encoding of the files.

    Returns:
        `datasets.Dataset` with the columns `text` and `label` (`ClassLabel`, in the order given).

    Raises:
        ValueError: if a class has no texts, or a file has another encoding.
        FileNotFoundError: if a path is missing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bad, good = Path(folder, "bad.txt"), Path(folder, "good.txt")
        ...     _ = bad.write_text("what a mess\\n"), good.write_text("a solid film\\n")
        ...     load_class_files({"bad": bad, "good": good})["label"][:]
        [0, 1]
    """
    texts: list[str] = []
    labels: list[int] = []
    for label, (name, path) in enumerate(paths.items()):
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"class {name}: {path} does not exist.")
        if path.is_dir():
            files = visible_files(path)
            files = [file for file in files if kind_of(file) == ".txt"] or files
            found = [" ".join(" ".join(read_lines(file, encoding)).split()) for file in files]
        else:
            found = [line.strip() for line in read_lines(path, encoding)]
        found = list(filter(None, found))
        if not found:
            raise ValueError(
                f"class {name}: {path} has no texts; pass a file with one text per line, or a folder of text files."
            )
        texts += found
        labels += [label] * len(found)
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(paths))})
    return Dataset.from_dict({"text": texts, "label": labels}, features=features)
