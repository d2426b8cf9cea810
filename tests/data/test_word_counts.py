# Licensed under the Apache License, Version 2.0.
import pytest
import torch
from slow_score_norm import ragged_words

from hf_attn_dynamics.data.word_counts import WordCounts


SENTENCES = ragged_words(20, 9)
COUNTS = WordCounts.from_sentences(SENTENCES, 9)
DENSE = torch.tensor([[words.count(word) for word in range(9)] for words in SENTENCES])


def test_entries_are_the_dense_counts_without_zeros():
    dense = torch.zeros_like(DENSE)
    dense[COUNTS.sentences, COUNTS.words] = COUNTS.counts
    assert torch.equal(dense, DENSE)
    assert len(COUNTS.counts) == int((DENSE > 0).sum())
    assert DENSE.max() > 1
    assert (COUNTS.num_sentences, COUNTS.vocab_size) == DENSE.shape
    assert torch.equal(COUNTS.lengths, DENSE.sum(1))
    assert torch.equal(COUNTS.occurrences, (DENSE > 0).sum(0))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_sums_are_products_with_the_dense_counts(shape):
    of_words, of_sentences = (torch.randn(*shape, size).double() for size in reversed(DENSE.shape))
    dense = DENSE.double()
    torch.testing.assert_close(COUNTS.sum_over_words(of_words), of_words @ dense.T)
    torch.testing.assert_close(COUNTS.sum_over_sentences(of_sentences), of_sentences @ dense)


def test_sums_over_words_have_their_gradient():
    values = torch.randn(2, 2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(COUNTS.sum_over_words, values)


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ([], "sentences are empty"),
        ([[1], []], "sentence 1 is empty"),
        ([[1, 9]], r"word ids must be from 0 to 8 \(vocab_size is 9\), got 9"),
        ([[-1]], "word ids must be from 0 to 8 .* got -1"),
    ],
)
def test_impossible_sentences_are_refused(sentences, message):
    with pytest.raises(ValueError, match=message):
        WordCounts.from_sentences(sentences, 9)


def test_counts_are_equal_if_they_are_of_the_same_sentences():
    assert WordCounts.from_sentences(SENTENCES, 9) == COUNTS
    assert WordCounts.from_sentences(SENTENCES[:-1], 9) != COUNTS
    assert WordCounts.from_sentences(SENTENCES, 10) != COUNTS
    assert COUNTS != SENTENCES
