# Licensed under the Apache License, Version 2.0.
"""Pretrained word vectors, such as GloVe."""

from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from .tables import read_utf8


def load_word_vectors(path: str | Path, words: Iterable[str]) -> dict[str, np.ndarray]:
    """Vectors of those words that a file has.

    Args:
        path (`str` or `Path`): GloVe's text (a word and its numbers a line, parted by spaces; `.gz` as well), with or
            without word2vec's first line; or an `.npz` file with the arrays `words` and `vectors`.
        words (`Iterable[str]`): The words that are wanted.

    Returns:
        `dict[str, numpy.ndarray]`: float32 vectors of one length, by word.

    Raises:
        ValueError: if the file is of another form, or has none of the words.
        FileNotFoundError: if it is missing.
    """
    path, wanted = Path(path), set(words)
    vectors = _from_arrays(path, wanted) if path.suffix == ".npz" else _from_lines(path, wanted)
    if not vectors:
        raise ValueError(f"{path} has none of the {len(wanted)} words; is it of another language, or in capitals?")
    return vectors


def _from_arrays(path: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            words, table = arrays["words"].tolist(), arrays["vectors"]
    except (KeyError, BadZipFile, ValueError) as error:
        raise ValueError(f"{path} is no file with the arrays words and vectors: {error}") from error
    if table.ndim != 2 or len(table) != len(words):
        raise ValueError(
            f"{path} has {len(words)} words and vectors of shape {table.shape}; it must have a row for each."
        )
    return {word: table[row].astype(np.float32) for row, word in enumerate(words) if word in wanted}


def _from_lines(path: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    vectors: dict[str, np.ndarray] = {}
    size = None
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        word, *numbers = line.rstrip().split(" ")
        if not numbers or (number == 1 and len(numbers) == 1):
            continue
        size = size or len(numbers)
        if len(numbers) != size:
            raise ValueError(f"{path}, line {number}: {len(numbers)} numbers, but {size} in the lines before.")
        if word in wanted:
            try:
                vectors[word] = np.array(numbers, dtype=np.float32)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is no word and {size} numbers: {error}") from error
    return vectors
