# Licensed under the Apache License, Version 2.0.
"""Sparse counts of words in sentences, and sums over words or sentences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import embedding_bag


@dataclass(frozen=True, eq=False)
class WordCounts:
    """Sparse counts of words in sentences, with one entry for each word in each sentence.

    Args:
        sentences, words (`torch.LongTensor` of shape `(entries,)`): Sentence and word of each entry, sorted in this
            order.
        counts (`torch.LongTensor` of shape `(entries,)`): Number of occurrences, at least 1.
        sentence_starts (`torch.LongTensor` of shape `(sentences + 1,)`): First entry of each sentence, and their end.
        sentences_by_word, counts_by_word (`torch.LongTensor` of shape `(entries,)`): The same, sorted by word.
        word_starts (`torch.LongTensor` of shape `(vocab_size + 1,)`): First entry of each word in this order.

    Example:
        >>> counts = WordCounts.from_sentences([[3, 1, 3], [1]], vocab_size=4)
        >>> counts.sum_over_words(torch.tensor([0.0, 1.0, 10.0, 100.0])).tolist()
        [201.0, 1.0]
        >>> counts.occurrences.tolist()
        [0, 2, 0, 1]
    """

    sentences: torch.Tensor
    words: torch.Tensor
    counts: torch.Tensor
    sentence_starts: torch.Tensor
    sentences_by_word: torch.Tensor
    counts_by_word: torch.Tensor
    word_starts: torch.Tensor

    def __eq__(self, other: object) -> bool:
        """Whether all counts are equal."""
        return isinstance(other, WordCounts) and all(
            torch.equal(mine, theirs) for mine, theirs in zip(vars(self).values(), vars(other).values())
        )

    __hash__ = None

    @classmethod
    def from_sentences(cls, sentences: Iterable[Sequence[int]], vocab_size: int) -> "WordCounts":
        """Counts the words of sentences.

        Args:
            sentences (iterable of `list[int]`): Word ids of each sentence, without padding.
            vocab_size (`int`): Size of the vocabulary.

        Raises:
            ValueError: if there are no sentences, one is empty, or an id is out of range.
        """
        tensors = [torch.as_tensor(sentence, dtype=torch.long) for sentence in sentences]
        if not tensors:
            raise ValueError("sentences are empty; pass at least one.")
        lengths = torch.tensor([len(tensor) for tensor in tensors])
        if not lengths.all():
            raise ValueError(f"sentence {int(lengths.argmin())} is empty; leave it out.")
        words = torch.cat(tensors)
        if words.min() < 0 or words.max() >= vocab_size:
            wrong = int(words.max() if words.max() >= vocab_size else words.min())
            raise ValueError(f"word ids must be from 0 to {vocab_size - 1} (vocab_size is {vocab_size}), got {wrong}.")
        rows = torch.arange(len(tensors)).repeat_interleave(lengths)
        entries, counts = (rows * vocab_size + words).unique(return_counts=True)
        rows, words = entries // vocab_size, entries % vocab_size
        order = words.argsort(stable=True)
        sentence_starts, word_starts = _starts(rows, len(tensors)), _starts(words, vocab_size)
        return cls(rows, words, counts, sentence_starts, rows[order], counts[order], word_starts)

    @property
    def num_sentences(self) -> int:
        return len(self.sentence_starts) - 1

    @property
    def vocab_size(self) -> int:
        return len(self.word_starts) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """Number of words of each sentence, repeated ones included, of shape `(sentences,)`."""
        return self.counts.new_zeros(self.num_sentences).index_add_(0, self.sentences, self.counts)

    @property
    def occurrences(self) -> torch.Tensor:
        """Number of sentences with each word, of shape `(vocab_size,)`."""
        return self.word_starts.diff()

    def to(self, device: torch.device | str) -> "WordCounts":
        """Copies the counts to another device."""
        return WordCounts(*(getattr(self, field.name).to(device) for field in fields(self)))

    def sum_over_words(self, values: torch.Tensor) -> torch.Tensor:
        """Sums the values of the words of each sentence, weighted by counts; differentiable.

        Args:
            values (`torch.Tensor` of shape `(…, vocab_size)`): Value of each word.

        Returns:
            `torch.Tensor` of shape `(…, sentences)`.
        """
        return _SumOverWords.apply(values, self)

    def sum_over_sentences(self, values: torch.Tensor) -> torch.Tensor:
        """Sums the values of the sentences with each word, weighted by counts: the transpose of `sum_over_words`.

        Args:
            values (`torch.Tensor` of shape `(…, sentences)`): Value of each sentence.

        Returns:
            `torch.Tensor` of shape `(…, vocab_size)`; 0 for words that do not occur.
        """
        return _bag(values, self.sentences_by_word, self.word_starts, self.counts_by_word)


def _starts(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Index of the first occurrence of each number below `size` in sorted numbers, and the end of the last one."""
    return torch.cat([numbers.new_zeros(1), numbers.bincount(minlength=size).cumsum(0)])


def _bag(values: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    # With the leading dimensions last, each lookup reads a contiguous row.
    table = values.reshape(-1, values.shape[-1]).T.contiguous()
    weights = counts.to(table.dtype)
    sums = embedding_bag(indices, table, starts, mode="sum", per_sample_weights=weights, include_last_offset=True)
    return sums.T.contiguous().view(*values.shape[:-1], -1)


class _SumOverWords(torch.autograd.Function):
    """Computes the gradient by a gather, which is many times faster than PyTorch's scatter."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, counts: WordCounts) -> torch.Tensor:
        ctx.counts = counts
        return _bag(values, counts.words, counts.sentence_starts, counts.counts)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.counts.sum_over_sentences(gradient), None
