# Licensed under the Apache License, Version 2.0.
"""Synthetic tasks of copying sentences and detecting a keyword (Snell et al. 2021, sections 3.3 and 6).

Words are numbers, and 0 is padding.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from datasets import Dataset  # slow to import

from .checks import check_positive


FIRST_WORD = 3  # in the copying task; 0, 1 and 2 are padding, start and end
KEYWORD = 1


@dataclass(frozen=True)
class CopyingTask:
    """Task of copying or permuting sentences of distinct words.

    If `words == length`, every sentence is a permutation of the same words, and co-occurrence counts carry no
    information about translations (section 3.3).

    Args:
        words (`int`): Number of words of a vocabulary.
        length (`int`): Number of words in a sentence, drawn without replacement.
        vocabularies (`int`): Number of disjoint vocabularies; each sentence belongs to one (appendix A.3).
        order (`tuple[int, ...]`, *optional*): Permutation π of the indices 0, 1, …; the target is x_π(1), x_π(2), …
            (equation 26), or the source if `None`.

    Raises:
        ValueError: if a number is less than 1, `length` is greater than `words`, or `order` is not a permutation of
            the indices.

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
        check_positive(words=self.words, length=self.length, vocabularies=self.vocabularies)
        if self.length > self.words:
            raise ValueError(f"length must be at most words={self.words}, got {self.length}; raise words.")
        if self.order is not None and sorted(self.order) != list(range(self.length)):
            raise ValueError(f"order must be a permutation of 0 … {self.length - 1}, got {self.order}.")

    @property
    def vocab_size(self) -> int:
        """Number of words of all vocabularies, including padding, start and end."""
        return FIRST_WORD + self.words * self.vocabularies

    def draw(self, size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws sources and targets, each of shape `(size, length)`.

        Args:
            size (`int`): Number of sentences.
            generator (`numpy.random.Generator`): Random generator.
        """
        check_positive(size=size)
        rows = np.tile(np.arange(FIRST_WORD, FIRST_WORD + self.words), (size, 1))
        sources = generator.permuted(rows, axis=1)[:, : self.length]
        sources = sources + self.words * generator.integers(self.vocabularies, size=(size, 1))
        return sources, sources if self.order is None else sources[:, list(self.order)]

    def dataset(self, size: int, seed: int = 0) -> "Dataset":
        """Random sentences with the columns `input_ids` and `labels`."""
        from datasets import Dataset, Features, List, Value

        sources, targets = self.draw(size, np.random.default_rng(seed))
        features = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
        return Dataset.from_dict({"input_ids": sources.tolist(), "labels": targets.tolist()}, features=features)


@dataclass(frozen=True)
class KeywordTask:
    """Task of classifying random sentences by whether they contain the keyword, word 1 (section 6.1).

    Both classes are equally likely. The keyword occurs once, at a random index; all other words are drawn with
    replacement.

    Args:
        words (`int`): Number of words, the keyword included.
        length (`int`): Number of words in a sentence.

    Raises:
        ValueError: if `words` is less than 2, or `length` less than 1.

    Example:
        >>> sentences, labels = KeywordTask(words=5, length=4).draw(3, np.random.default_rng(1))
        >>> sentences.tolist(), labels.tolist()
        ([[3, 4, 5, 5], [2, 1, 5, 5], [2, 3, 5, 3]], [0, 1, 0])
    """

    words: int = 40
    length: int = 40

    def __post_init__(self):
        check_positive(length=self.length)
        if self.words < 2:
            raise ValueError(f"words must be at least 2, the keyword and another one, got {self.words}.")

    @property
    def vocab_size(self) -> int:
        """Number of words, including padding."""
        return 1 + self.words

    def draw(self, size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws sentences of shape `(size, length)` and labels of shape `(size,)`.

        Args:
            size (`int`): Number of sentences.
            generator (`numpy.random.Generator`): Random generator.
        """
        check_positive(size=size)
        # Equivalent to rejection sampling of uniform sentences with the keyword at most once, for each label.
        sentences = generator.integers(KEYWORD + 1, KEYWORD + self.words, size=(size, self.length))
        labels = generator.integers(2, size=size)
        positive = labels.nonzero()[0]
        sentences[positive, generator.integers(self.length, size=len(positive))] = KEYWORD
        return sentences, labels

    def dataset(self, size: int, seed: int = 0) -> "Dataset":
        """Random sentences with the columns `input_ids` and `label` (`ClassLabel`)."""
        from datasets import ClassLabel, Dataset, Features, List, Value

        sentences, labels = self.draw(size, np.random.default_rng(seed))
        features = Features({"input_ids": List(Value("int32")), "label": ClassLabel(names=["without", "with"])})
        return Dataset.from_dict({"input_ids": sentences.tolist(), "label": labels.tolist()}, features=features)
