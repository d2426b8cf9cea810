# Licensed under the Apache License, Version 2.0.
"""Texts that are sorted by class into files or folders."""

from collections.abc import Mapping
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, Value

from .files import kind_of, read_lines


def load_class_files(paths: Mapping[str, str | Path], encoding: str = "utf-8") -> Dataset:
    """Texts with classes, from a file or a folder for each class, such as the movie reviews of NLTK.

    Args:
        paths (`dict[str, str | Path]`): By the name of a class: a file of any suffix (`.gz` is unpacked) with a text a
            line; or a folder whose files are a text each: those with the suffix `.txt` or, if there are none, all but
            hidden ones. Blank texts are left out.
        encoding (`str`): The encoding of the files.

    Returns:
        `datasets.Dataset` with the columns `text` and `label` (`ClassLabel`, in the order given).

    Raises:
        ValueError: if a class has no text, or a file is in another encoding.
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
            raise FileNotFoundError(f"class {name}: there is no {path}.")
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            files = [file for file in files if kind_of(file) == ".txt"] or files
            found = [" ".join(" ".join(read_lines(file, encoding)).split()) for file in files]
        else:
            found = [line.strip() for line in read_lines(path, encoding)]
        found = list(filter(None, found))
        if not found:
            raise ValueError(
                f"class {name}: {path} holds no text; name a file of a text a line, or a folder of files of one text."
            )
        texts += found
        labels += [label] * len(found)
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(paths))})
    return Dataset.from_dict({"text": texts, "label": labels}, features=features)
