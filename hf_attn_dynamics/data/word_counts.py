# Licensed under the Apache License, Version 2.0.
"""Which word is how often in which sentence, and sums over either, without a matrix of all words and sentences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import embedding_bag


@dataclass(frozen=True, eq=False)
class WordCounts:
    """Sparse counts of words in sentences. An entry is a word of a sentence, with how often it is there.

    Args:
        sentences, words (`torch.LongTensor` of shape `(entries,)`): Of each entry, sorted by sentence, then by word.
        counts (`torch.LongTensor` of shape `(entries,)`): How often, at least 1.
        sentence_starts (`torch.LongTensor` of shape `(sentences + 1,)`): First entry of each sentence, and their end.
        sentences_by_word, counts_by_word (`torch.LongTensor` of shape `(entries,)`): The same, sorted by word.
        word_starts (`torch.LongTensor` of shape `(vocab_size + 1,)`): First entry of each word among these.

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
        """Whether both count the same words of the same sentences."""
        return isinstance(other, WordCounts) and all(
            torch.equal(mine, theirs) for mine, theirs in zip(vars(self).values(), vars(other).values())
        )

    __hash__ = None

    @classmethod
    def from_sentences(cls, sentences: Iterable[Sequence[int]], vocab_size: int) -> "WordCounts":
        """Counts the words of sentences of any lengths.

        Args:
            sentences (iterable of `list[int]`): Ids of their words, without padding.
            vocab_size (`int`): Number of words; ids are below.

        Raises:
            ValueError: if there is no sentence, one is empty, or an id is out of range.
        """
        tensors = [torch.as_tensor(sentence, dtype=torch.long) for sentence in sentences]
        if not tensors:
            raise ValueError("sentences are empty; give at least one.")
        lengths = torch.tensor([len(tensor) for tensor in tensors])
        if not lengths.all():
            raise ValueError(f"sentence {int(lengths.argmin())} has no word; leave it out.")
        words = torch.cat(tensors)
        if words.min() < 0 or words.max() >= vocab_size:
            wrong = int(words.max() if words.max() >= vocab_size else words.min())
            raise ValueError(f"sentences have the word {wrong}, but vocab_size is {vocab_size}.")
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
        """Number of sentences that each word is in, of shape `(vocab_size,)`."""
        return self.word_starts.diff()

    def to(self, device: torch.device | str) -> "WordCounts":
        """The same counts on another device."""
        return WordCounts(*(getattr(self, field.name).to(device) for field in fields(self)))

    def sum_over_words(self, values: torch.Tensor) -> torch.Tensor:
        """Sums what words have over the words of each sentence, as often as they are there. Differentiable.

        Args:
            values (`torch.Tensor` of shape `(…, vocab_size)`): Of each word.

        Returns:
            `torch.Tensor` of shape `(…, sentences)`.
        """
        return _SumOverWords.apply(values, self)

    def sum_over_sentences(self, values: torch.Tensor) -> torch.Tensor:
        """Sums what sentences have over the sentences with each word, as often as it is there: the transpose.

        Args:
            values (`torch.Tensor` of shape `(…, sentences)`): Of each sentence.

        Returns:
            `torch.Tensor` of shape `(…, vocab_size)`; 0 for words that are in no sentence.
        """
        return _bag(values, self.sentences_by_word, self.word_starts, self.counts_by_word)


def _starts(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Where each number below `size` starts among the sorted numbers, and where the last one ends."""
    return torch.cat([numbers.new_zeros(1), numbers.bincount(minlength=size).cumsum(0)])


def _bag(values: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    # Rows, and not single values, are looked up many times.
    table = values.reshape(-1, values.shape[-1]).T.contiguous()
    weights = counts.to(table.dtype)
    sums = embedding_bag(indices, table, starts, mode="sum", per_sample_weights=weights, include_last_offset=True)
    return sums.T.contiguous().view(*values.shape[:-1], -1)


class _SumOverWords(torch.autograd.Function):
    """Two gathers; the gradient that PyTorch would give would be a scatter, many times slower."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, counts: WordCounts) -> torch.Tensor:
        ctx.counts = counts
        return _bag(values, counts.words, counts.sentence_starts, counts.counts)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.counts.sum_over_sentences(gradient), None
