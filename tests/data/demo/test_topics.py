# Licensed under the Apache License, Version 2.0.
import numpy as np
import pytest

from hf_attn_dynamics.data import pair_sentences, topic_pairs, topic_sentences, topic_words


def test_a_sentence_has_one_topic_word_and_it_tells_the_label():
    topic_of = {word: topic for topic, words in enumerate(topic_words()) for word in words}
    places = set()
    for dataset, size in zip(topic_sentences(seed=3), (800, 200)):
        assert len(dataset) == size
        for row in dataset:
            telling = [(place, word) for place, word in enumerate(row["input_ids"]) if word in topic_of]
            assert [topic_of[word] for _, word in telling] == [row["label"]]
            assert len(row["input_ids"]) == 21
            assert all(9 <= word < 5009 for word in row["input_ids"] if word not in topic_of)
            places.add(telling[0][0])
    assert places == set(range(21))


def test_topics_and_words_are_equally_likely():
    train, _ = topic_sentences(train_size=20_000, others=2, other_words=10, seed=1)
    words = np.bincount(np.array(train["input_ids"][:]).ravel(), minlength=19)
    assert words[0] == 0
    np.testing.assert_allclose(words[1:9] / 20_000, 1 / 8, rtol=0.06)
    np.testing.assert_allclose(words[9:] / 40_000, 1 / 10, rtol=0.06)


def test_the_same_seed_gives_the_same_sentences():
    first, again, other = (topic_sentences(20, 5, seed=seed)[0][:] for seed in (0, 0, 1))
    assert first == again != other
    pairs = topic_pairs(seed=1)
    first, again, other = (pair_sentences(pairs, 20, 5, seed=seed)[1][:] for seed in (0, 0, 1))
    assert first == again != other


def test_pairs_are_of_different_words_and_tell_one_topic():
    drawn = topic_pairs(topics=3, pairs_per_topic=2, words=3)
    assert sorted(pair for pairs in drawn for pair in pairs) == [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)]
    assert topic_pairs(seed=1) != topic_pairs(seed=2)


def test_walks_follow_the_chain_of_their_topic():
    pairs = [[(1, 2), (1, 3), (4, 1)], [(5, 1)]]
    train, _ = pair_sentences(pairs, train_size=4000, test_size=1, length=6, words=5, seed=0)
    steps = np.zeros((2, 6, 6))
    starts = np.zeros((2, 6))
    for words, label in zip(train["input_ids"], train["label"]):
        starts[label, words[0]] += 1
        for step in zip(words, words[1:]):
            steps[label][step] += 1
    steps /= steps.sum(-1, keepdims=True).clip(1)
    starts /= starts.sum(-1, keepdims=True)
    uniform = [0] + [1 / 5] * 5
    expected = np.array(
        [
            [[0] * 6, [0, 0, 0.5, 0.5, 0, 0], uniform, uniform, [0, 1, 0, 0, 0, 0], uniform],
            [[0] * 6, uniform, uniform, uniform, uniform, [0, 1, 0, 0, 0, 0]],
        ]
    )
    np.testing.assert_allclose(steps, expected, atol=0.03)
    np.testing.assert_allclose(starts, [[0, 2 / 3, 0, 0, 1 / 3, 0], [0, 0, 0, 0, 0, 1]], atol=0.03)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topic_words(topics=0), "topics must be at least 1, got 0"),
        (lambda: topic_sentences(train_size=0), "train_size must be at least 1, got 0"),
        (lambda: topic_sentences(others=0), "others must be at least 1, got 0"),
        (lambda: topic_pairs(words=2, pairs_per_topic=2), "words=2 give 2 pairs, but 4 are needed"),
        (lambda: pair_sentences([[(1, 2)]], length=1), "length must be at least 2 for a pair, got 1"),
        (lambda: pair_sentences([[(1, 2)], []]), "pairs must have at least one pair for each topic"),
        (lambda: pair_sentences([[(1, 201)]]), r"pairs must have words from 1 to 200, got \(1, 201\)"),
        (lambda: pair_sentences([[(1, 2)], [(1, 2)]]), r"pairs must be unique, got \(1, 2\) twice"),
    ],
    ids=["topics", "size", "others", "few words", "length", "no pair", "unknown word", "twice"],
)
def test_impossible_tasks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
