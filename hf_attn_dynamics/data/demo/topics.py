# Licensed under the Apache License, Version 2.0.
"""Synthetic sentences whose topic is determined by one word, or by one pair of adjacent words (Lu et al. 2021).

Words are numbers, and 0 is padding.
"""

from collections.abc import Sequence

import numpy as np
from datasets import ClassLabel, Dataset, Features, List, Value

from .checks import check_positive


WordPairs = Sequence[Sequence[tuple[int, int]]]


def topic_words(topics: int = 4, words_per_topic: int = 2) -> list[list[int]]:
    """Topic words of each topic in [`topic_sentences`].

    Example:
        >>> topic_words()
        [[1, 2], [3, 4], [5, 6], [7, 8]]
    """
    check_positive(topics=topics, words_per_topic=words_per_topic)
    words = np.arange(1, 1 + topics * words_per_topic).reshape(topics, words_per_topic)
    return words.tolist()


def topic_sentences(
    train_size: int = 800,
    test_size: int = 200,
    topics: int = 4,
    words_per_topic: int = 2,
    others: int = 20,
    other_words: int = 5000,
    seed: int = 0,
) -> tuple[Dataset, Dataset]:
    """Sentences of one topic word and many non-topic words (Lu et al. 2021, section 3).

    Args:
        train_size (`int`): Number of training sentences.
        test_size (`int`): Number of test sentences from the same distribution.
        topics (`int`): Number J of topics, equally likely.
        words_per_topic (`int`): Number of topic words per topic, equally likely.
        others (`int`): Number m of non-topic words in a sentence, drawn uniformly with replacement.
        other_words (`int`): Number M of non-topic words in the vocabulary; they follow the topic words.
        seed (`int`): Random seed.

    Returns:
        `tuple[datasets.Dataset, datasets.Dataset]`: training and test, with the columns `input_ids` (`others + 1`
        words, the topic word at a random index) and `label` (`ClassLabel`). The vocabulary has
        `1 + topics · words_per_topic + other_words` words, padding included.

    Raises:
        ValueError: if a number is less than 1.

    Example:
        >>> train, test = topic_sentences(train_size=3, test_size=1, others=4)
        >>> len(train[0]["input_ids"]), train.features["label"].names
        (5, ['topic 0', 'topic 1', 'topic 2', 'topic 3'])
    """
    check_positive(train_size=train_size, test_size=test_size, others=others, other_words=other_words)
    words = np.array(topic_words(topics, words_per_topic))
    generator = np.random.default_rng(seed)
    datasets = []
    for size in (train_size, test_size):
        labels = generator.integers(topics, size=size)
        telling = words[labels, generator.integers(words_per_topic, size=size)]
        sentences = words.size + 1 + generator.integers(other_words, size=(size, others + 1))
        sentences[np.arange(size), generator.integers(others + 1, size=size)] = telling
        datasets.append(_dataset(sentences, labels, topics))
    return datasets[0], datasets[1]


def topic_pairs(
    topics: int = 2, pairs_per_topic: int = 2, words: int = 200, seed: int = 0
) -> list[list[tuple[int, int]]]:
    """Draws the topic pairs of each topic in [`pair_sentences`]: ordered pairs of different words.

    Args:
        topics (`int`): Number of topics.
        pairs_per_topic (`int`): Number of pairs per topic; pairs are unique.
        words (`int`): Number of words, which are 1, 2, ….
        seed (`int`): Random seed.

    Returns:
        `list[list[tuple[int, int]]]`: the pairs of each topic.

    Raises:
        ValueError: if a number is less than 1, or there are too few pairs.

    Example:
        >>> [len(pairs) for pairs in topic_pairs()]
        [2, 2]
    """
    check_positive(topics=topics, pairs_per_topic=pairs_per_topic, words=words)
    wanted, possible = topics * pairs_per_topic, words * (words - 1)
    if wanted > possible:
        raise ValueError(f"words={words} give {possible} pairs, but {wanted} are needed; raise it.")
    codes = np.random.default_rng(seed).choice(possible, size=wanted, replace=False)
    first, second = np.divmod(codes, words - 1)
    # The second word differs from the first.
    second += second >= first
    pairs = [(int(a) + 1, int(b) + 1) for a, b in zip(first, second)]
    return [pairs[start : start + pairs_per_topic] for start in range(0, wanted, pairs_per_topic)]


def pair_sentences(
    pairs: WordPairs, train_size: int = 4000, test_size: int = 1000, length: int = 10, words: int = 200, seed: int = 0
) -> tuple[Dataset, Dataset]:
    """Samples sentences from one Markov chain per topic that start with a topic pair (Lu et al. 2021, appendix A).

    From the first word of a topic pair, the chain of this topic moves uniformly to a second word of its pairs; from
    any other word, uniformly to any word. A sentence starts with the first word of a random pair of its topic.

    Args:
        pairs (`list[list[tuple[int, int]]]`): Pairs of each topic, such as [`topic_pairs`].
        train_size (`int`): Number of training sentences.
        test_size (`int`): Number of test sentences from the same distribution.
        length (`int`): Number of words in a sentence, at least 2.
        words (`int`): Number of words, which are 1, 2, ….
        seed (`int`): Random seed.

    Returns:
        `tuple[datasets.Dataset, datasets.Dataset]`: training and test, with the columns `input_ids` and `label`
        (`ClassLabel`). The vocabulary has `words + 1` words, padding included.

    Raises:
        ValueError: if a number is out of range, a topic has no pair, a word is out of range, or pairs are not unique.

    Example:
        >>> train, test = pair_sentences([[(1, 2)], [(3, 4)]], train_size=2, test_size=1)
        >>> {tuple(row["input_ids"][:2]) for row in (*train, *test)} <= {(1, 2), (3, 4)}
        True
    """
    check_positive(train_size=train_size, test_size=test_size, words=words)
    if length < 2:
        raise ValueError(f"length must be at least 2 for a pair, got {length}.")
    all_pairs = [pair for own_pairs in pairs for pair in own_pairs]
    if not all(pairs) or not all_pairs:
        raise ValueError(f"pairs must have at least one pair for each topic, got {pairs}.")
    for pair in all_pairs:
        if not all(1 <= word <= words for word in pair):
            raise ValueError(f"pairs must have words from 1 to {words}, got {pair}.")
        if all_pairs.count(pair) > 1:
            raise ValueError(f"pairs must be unique, got {pair} twice.")
    chains = np.full((len(pairs), words + 1, words), 1 / words)
    for chain, own_pairs in zip(chains, pairs):
        for first in {first for first, _ in own_pairs}:
            seconds = [second for one, second in own_pairs if one == first]
            chain[first] = 0
            chain[first, np.array(seconds) - 1] = 1 / len(seconds)
    cumulative = chains.cumsum(-1)
    generator = np.random.default_rng(seed)
    datasets = []
    for size in (train_size, test_size):
        labels = generator.integers(len(pairs), size=size)
        sentences = np.empty((size, length), dtype=int)
        sentences[:, 0] = [pairs[label][generator.integers(len(pairs[label]))][0] for label in labels]
        for index in range(1, length):
            rows = cumulative[labels, sentences[:, index - 1]]
            # Rounded sums of probabilities may be just below 1.
            drawn = generator.random((size, 1)) * rows[:, -1:]
            sentences[:, index] = 1 + (rows <= drawn).sum(-1)
        datasets.append(_dataset(sentences, labels, len(pairs)))
    return datasets[0], datasets[1]


def _dataset(sentences: np.ndarray, labels: np.ndarray, topics: int) -> Dataset:
    names = [f"topic {topic}" for topic in range(topics)]
    features = Features({"input_ids": List(Value("int32")), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"input_ids": sentences.tolist(), "label": labels.tolist()}, features=features)
