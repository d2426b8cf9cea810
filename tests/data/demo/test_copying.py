# Licensed under the Apache License, Version 2.0.
import numpy as np
import pytest

from hf_attn_dynamics.data import CopyingTask, KeywordTask
from hf_attn_dynamics.data.demo.copying import FIRST_WORD, KEYWORD


def draw(task, size=400, seed=0):
    return task.draw(size, np.random.default_rng(seed))


def test_permutations_have_every_word_once():
    sources, targets = draw(CopyingTask(words=6, length=6))
    assert (np.sort(sources, 1) == FIRST_WORD + np.arange(6)).all()
    assert (sources == targets).all()


def test_samples_have_no_word_twice_and_every_word_is_as_likely():
    task = CopyingTask(words=9, length=6)
    sources, _ = draw(task, size=3000)
    assert (np.diff(np.sort(sources, 1), axis=1) > 0).all()
    assert sources.max() == task.vocab_size - 1
    shares = np.bincount(sources.flatten())[FIRST_WORD:] / sources.size
    assert np.abs(shares - 1 / 9).max() < 0.01


def test_every_place_has_every_word():
    sources, _ = draw(CopyingTask(words=5, length=5), size=3000)
    for place in sources.T:
        assert np.abs(np.bincount(place)[FIRST_WORD:] / 3000 - 1 / 5).max() < 0.04


def test_a_sentence_of_a_mixture_is_of_one_vocabulary():
    sources, _ = draw(CopyingTask(words=5, length=5, vocabularies=2))
    second = sources >= FIRST_WORD + 5
    assert (second.all(1) | ~second.any(1)).all()
    assert 0.4 < second[:, 0].mean() < 0.6
    assert (np.sort(sources - 5 * second, 1) == FIRST_WORD + np.arange(5)).all()


def test_an_order_says_where_each_target_word_comes_from():
    sources, targets = draw(CopyingTask(words=8, length=4, order=(2, 0, 3, 1)))
    for source, target in zip(sources.tolist(), targets.tolist()):
        assert target == [source[2], source[0], source[3], source[1]]


def test_the_keyword_comes_once_in_positive_sentences_and_never_in_others():
    sentences, labels = draw(KeywordTask(words=7, length=5), size=4000)
    assert ((sentences == KEYWORD).sum(1) == labels).all()
    assert abs(labels.mean() - 0.5) < 0.03
    places = np.bincount((sentences == KEYWORD).nonzero()[1]) / labels.sum()
    assert np.abs(places - 1 / 5).max() < 0.03
    others = np.bincount(sentences[sentences != KEYWORD], minlength=8)[2:]
    assert np.abs(others / others.sum() - 1 / 6).max() < 0.02


@pytest.mark.parametrize("task", [CopyingTask(8, 5), KeywordTask(8, 5)], ids=["copying", "keyword"])
def test_data_sets_hold_what_is_drawn_with_their_seed(task):
    dataset = task.dataset(6, seed=3)
    first, second = draw(task, 6, seed=3)
    assert dataset["input_ids"][:] == first.tolist()
    assert dataset[dataset.column_names[1]][:] == second.tolist()
    assert dataset["input_ids"][:] != task.dataset(6, seed=4)["input_ids"][:]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CopyingTask(words=0), "words must be at least 1, got 0"),
        (lambda: CopyingTask(words=5, length=6), "length must be at most words=5, got 6"),
        (lambda: CopyingTask(vocabularies=0), "vocabularies must be at least 1, got 0"),
        (lambda: CopyingTask(words=3, length=3, order=(0, 1, 1)), r"order must be a permutation of 0 … 2, got \(0, 1"),
        (lambda: CopyingTask(words=3, length=3, order=(0, 1)), "order must be a permutation of 0 … 2"),
        (lambda: draw(CopyingTask(), 0), "size must be at least 1, got 0"),
        (lambda: KeywordTask(words=1), "words must be at least 2, .* got 1"),
        (lambda: KeywordTask(length=0), "length must be at least 1, got 0"),
    ],
    ids=["words", "length", "vocabularies", "twice", "short", "size", "keyword alone", "no word"],
)
def test_impossible_tasks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
