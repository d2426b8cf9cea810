# Licensed under the Apache License, Version 2.0.
"""Pretrained word vectors, such as GloVe."""

import zlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from .files import read_lines


# What NumPy raises for files that are no archives of arrays, or are damaged.
_NO_ARRAYS = (KeyError, TypeError, ValueError, BadZipFile, EOFError, MemoryError, OSError, RuntimeError, zlib.error)


def load_word_vectors(path: str | Path, words: Iterable[str]) -> dict[str, np.ndarray]:
    """Vectors of those words that a file has.

    Args:
        path (`str` or `Path`): GloVe's text (a word and its numbers a line, parted by spaces; `.gz` as well), with or
            without word2vec's first line; or an `.npz` file with the arrays `words` and `vectors`.
        words (`Iterable[str]`): The words that are wanted.

    Returns:
        `dict[str, numpy.ndarray]`: float32 vectors of one length, by word.

    Raises:
        ValueError: if the file is of another form, has none of the words, or numbers of them that are not finite.
        FileNotFoundError: if it is missing.
    """
    path, wanted = Path(path), set(words)
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        vectors = _from_arrays(path, wanted) if path.suffix == ".npz" else _from_lines(path, wanted)
    if not vectors:
        raise ValueError(f"{path} has none of the {len(wanted)} words; is it of another language, or in capitals?")
    for word, vector in vectors.items():
        if not np.isfinite(vector).all():
            raise ValueError(f"{path} has a number in the vector of {word!r} that is not finite; leave the word out.")
    return vectors


def _from_arrays(path: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            words, table = arrays["words"], arrays["vectors"]
    except FileNotFoundError:
        raise
    except _NO_ARRAYS as error:
        raise ValueError(f"{path} is no file with the arrays words and vectors: {error}") from error
    if words.ndim != 1 or table.ndim != 2 or len(table) != len(words) or table.dtype.kind not in "fiu":
        raise ValueError(
            f"{path} has words of shape {words.shape} and vectors of shape {table.shape} and type {table.dtype}; it "
            "must have a row of numbers for each word."
        )
    return {word: table[row].astype(np.float32) for row, word in enumerate(words.tolist()) if word in wanted}


def _from_lines(path: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    vectors: dict[str, np.ndarray] = {}
    size = None
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.rstrip().split(" ")
        if len(cells) < 2 or (number == 1 and len(cells) == 2):
            continue
        size = size or len(cells) - 1
        # Words of GloVe may have spaces, as ". . .".
        word, numbers = " ".join(cells[:-size]), cells[-size:]
        if len(cells) <= size or any(map(_is_number, cells[1:-size])):
            raise ValueError(f"{path}, line {number}: {len(cells) - 1} numbers, but {size} in the lines before.")
        if word in wanted:
            try:
                vectors[word] = np.array(numbers, dtype=np.float32)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is no word and {size} numbers: {error}") from error
    return vectors


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
