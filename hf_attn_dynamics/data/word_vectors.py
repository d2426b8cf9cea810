# Licensed under the Apache License, Version 2.0.
"""Pretrained word vectors, such as GloVe."""

import zlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from .files import read_lines


# Errors that NumPy raises for damaged files and files of other formats.
_NO_ARRAYS = (KeyError, TypeError, ValueError, BadZipFile, EOFError, MemoryError, OSError, RuntimeError, zlib.error)


def load_word_vectors(path: str | Path, words: Iterable[str]) -> dict[str, np.ndarray]:
    """Loads the vectors of some words from a file.

    Args:
        path (`str` or `Path`): GloVe's text format (one word and its values per line, separated by spaces; also
            `.gz`), with or without word2vec's header; or an `.npz` file with the arrays `words` and `vectors`.
        words (`Iterable[str]`): The words to load.

    Returns:
        `dict[str, numpy.ndarray]`: float32 vectors of equal length, for the words in the file.

    Raises:
        ValueError: if the file has another format, has none of the words, or values that are not finite.
        FileNotFoundError: if it is missing.
    """
    path, wanted = Path(path), set(words)
    with np.errstate(over="ignore"):  # values out of range become infinite, which is checked below
        vectors = _from_arrays(path, wanted) if path.suffix == ".npz" else _from_lines(path, wanted)
    if not vectors:
        raise ValueError(f"{path} has none of the {len(wanted)} words; check its language and its case.")
    for word, vector in vectors.items():
        if not np.isfinite(vector).all():
            raise ValueError(f"{path} has a non-finite value in the vector of {word!r}; leave out the word.")
    return vectors


def _from_arrays(path: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            words, table = arrays["words"], arrays["vectors"]
    except FileNotFoundError:
        raise
    except _NO_ARRAYS as error:
        raise ValueError(f"{path} must be a file with the arrays words and vectors: {error}") from error
    if words.ndim != 1 or table.ndim != 2 or len(table) != len(words) or table.dtype.kind not in "fiu":
        raise ValueError(
            f"{path} must have a row of numbers for each word, got words of shape {words.shape} and vectors of shape "
            f"{table.shape} and type {table.dtype}."
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
        # Words in GloVe may have spaces, such as ". . .".
        word, numbers = " ".join(cells[:-size]), cells[-size:]
        if len(cells) <= size or any(map(_is_number, cells[1:-size])):
            raise ValueError(f"{path}, line {number}: {len(cells) - 1} numbers, but {size} in preceding lines.")
        if word in wanted:
            try:
                vectors[word] = np.array(numbers, dtype=np.float32)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} must have a word and {size} numbers: {error}") from error
    return vectors


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
