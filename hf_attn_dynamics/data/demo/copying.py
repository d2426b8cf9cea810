# Licensed under the Apache License, Version 2.0.
"""Sentences to be copied, and sentences with a keyword or without it (Snell et al. 2021, sections 3.3 and 6).

Words are numbers, and 0 is padding.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from datasets import Dataset  # slow to import


FIRST_WORD = 3  # of sentences to copy; 0, 1 and 2 are padding, start and end
KEYWORD = 1


@dataclass(frozen=True)
class CopyingTask:
    """Sentences of different words, to be copied or put into another order.

    With as many words in the vocabulary as in a sentence, every sentence is a permutation of the same words, and
    counts of co-occurrence tell nothing about which word becomes which (section 3.3).

    Args:
        words (`int`): Number of words of a vocabulary.
        length (`int`): Number of words in a sentence, drawn without replacement.
        vocabularies (`int`): Number of disjoint vocabularies, of one of which each sentence is (appendix A.3).
        order (`tuple[int, ...]`, *optional*): The target is x_π(1), x_π(2), … for this permutation π of the places
            0, 1, … (equation 26); the source itself without it.

    Raises:
        ValueError: if a number is not positive, a sentence is longer than the vocabulary, or `order` is not a
            permutation of its places.

    Example:
        >>> task = CopyingTask(words=4, length=4, order=(3, 2, 1, 0))
        >>> sources, targets = task.draw(2, np.random.default_rng(0))
        >>> sources.tolist(), targets.tolist()
        ([[5, 3, 4, 6], [6, 5, 4, 3]], [[6, 4, 3, 5], [3, 4, 5, 6]])
        >>> task.vocab_size
        7
    """

    words: int = 40
    length: int = 40
    vocabularies: int = 1
    order: tuple[int, ...] | None = None

    def __post_init__(self):
        _check_positive(words=self.words, length=self.length, vocabularies=self.vocabularies)
        if self.length > self.words:
            raise ValueError(f"length is {self.length}, but there are only {self.words} different words; raise words.")
        if self.order is not None and sorted(self.order) != list(range(self.length)):
            raise ValueError(f"order must be a permutation of 0 … {self.length - 1}, got {self.order}.")

    @property
    def vocab_size(self) -> int:
        """Number of words of all vocabularies, with padding, start and end."""
        return FIRST_WORD + self.words * self.vocabularies

    def draw(self, size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """New sentences: sources and targets, each of shape `(size, length)`.

        Args:
            size (`int`): How many.
            generator (`numpy.random.Generator`): Draws them.
        """
        _check_positive(size=size)
        rows = np.tile(np.arange(FIRST_WORD, FIRST_WORD + self.words), (size, 1))
        sources = generator.permuted(rows, axis=1)[:, : self.length]
        sources = sources + self.words * generator.integers(self.vocabularies, size=(size, 1))
        return sources, sources if self.order is None else sources[:, list(self.order)]

    def dataset(self, size: int, seed: int = 0) -> "Dataset":
        """Sentences of a seed, with the columns `input_ids` and `labels`."""
        from datasets import Dataset, Features, List, Value

        sources, targets = self.draw(size, np.random.default_rng(seed))
        features = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
        return Dataset.from_dict({"input_ids": sources.tolist(), "labels": targets.tolist()}, features=features)


@dataclass(frozen=True)
class KeywordTask:
    """Sentences of random words; those with the keyword, which is the word 1, are positive (section 6.1).

    Each class is as likely as the other. The keyword comes once, at any place; all other words are drawn with
    replacement.

    Args:
        words (`int`): Number of words, the keyword included.
        length (`int`): Number of words in a sentence.

    Raises:
        ValueError: if there is no other word than the keyword, or no word in a sentence.

    Example:
        >>> sentences, labels = KeywordTask(words=5, length=4).draw(3, np.random.default_rng(1))
        >>> sentences.tolist(), labels.tolist()
        ([[3, 4, 5, 5], [2, 1, 5, 5], [2, 3, 5, 3]], [0, 1, 0])
    """

    words: int = 40
    length: int = 40

    def __post_init__(self):
        _check_positive(length=self.length)
        if self.words < 2:
            raise ValueError(f"words is {self.words}; there must be another one beside the keyword.")

    @property
    def vocab_size(self) -> int:
        """Number of words, with padding."""
        return 1 + self.words

    def draw(self, size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """New sentences of shape `(size, length)`, and labels of shape `(size,)`.

        Args:
            size (`int`): How many.
            generator (`numpy.random.Generator`): Draws them.
        """
        _check_positive(size=size)
        # What is left of uniform sentences if those are rejected that have the keyword twice, or the wrong class.
        sentences = generator.integers(KEYWORD + 1, KEYWORD + self.words, size=(size, self.length))
        labels = generator.integers(2, size=size)
        positive = labels.nonzero()[0]
        sentences[positive, generator.integers(self.length, size=len(positive))] = KEYWORD
        return sentences, labels

    def dataset(self, size: int, seed: int = 0) -> "Dataset":
        """Sentences of a seed, with the columns `input_ids` and `label` (`ClassLabel`)."""
        from datasets import ClassLabel, Dataset, Features, List, Value

        sentences, labels = self.draw(size, np.random.default_rng(seed))
        features = Features({"input_ids": List(Value("int32")), "label": ClassLabel(names=["without", "with"])})
        return Dataset.from_dict({"input_ids": sentences.tolist(), "label": labels.tolist()}, features=features)


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}.")
