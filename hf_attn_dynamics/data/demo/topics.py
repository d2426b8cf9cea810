# Licensed under the Apache License, Version 2.0.
"""Sentences whose topic is told by one word, or by one pair of neighbouring words (Lu et al. 2021).

Words are numbers, and 0 is padding.
"""

from collections.abc import Sequence

import numpy as np
from datasets import ClassLabel, Dataset, Features, List, Value


WordPairs = Sequence[Sequence[tuple[int, int]]]


def topic_words(topics: int = 4, words_per_topic: int = 2) -> list[list[int]]:
    """The words that tell each topic, in the sentences of [`topic_sentences`].

    Example:
        >>> topic_words()
        [[1, 2], [3, 4], [5, 6], [7, 8]]
    """
    _check_positive(topics=topics, words_per_topic=words_per_topic)
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
    """Bags of one topic word and many other words (Lu et al. 2021, section 3).

    Args:
        train_size (`int`): Sentences for training.
        test_size (`int`): Sentences for testing, drawn in the same way.
        topics (`int`): Number J of topics, each as likely as the others.
        words_per_topic (`int`): Words that tell a topic, each as likely as the others.
        others (`int`): Number m of other words in a sentence, drawn uniformly and with replacement.
        other_words (`int`): Number M of words to draw these from; they follow the topic words.
        seed (`int`): Draws everything.

    Returns:
        `tuple[datasets.Dataset, datasets.Dataset]`: Training and test, with the columns `input_ids` (the `others + 1`
        words, the topic word at a random place) and `label` (`ClassLabel`). There are
        `1 + topics · words_per_topic + other_words` words, padding included.

    Raises:
        ValueError: if a number is not positive.

    Example:
        >>> train, test = topic_sentences(train_size=3, test_size=1, others=4)
        >>> len(train[0]["input_ids"]), train.features["label"].names
        (5, ['topic 0', 'topic 1', 'topic 2', 'topic 3'])
    """
    _check_positive(train_size=train_size, test_size=test_size, others=others, other_words=other_words)
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
    """Ordered pairs of different words that tell each topic, in the sentences of [`pair_sentences`].

    Args:
        topics (`int`): Number of topics.
        pairs_per_topic (`int`): Pairs of each; no pair tells two topics.
        words (`int`): Number of words, which are 1, 2, ….
        seed (`int`): Draws the pairs.

    Returns:
        `list[list[tuple[int, int]]]`: The pairs of each topic.

    Raises:
        ValueError: if a number is not positive, or there are not as many pairs.

    Example:
        >>> [len(pairs) for pairs in topic_pairs()]
        [2, 2]
    """
    _check_positive(topics=topics, pairs_per_topic=pairs_per_topic, words=words)
    wanted, there_are = topics * pairs_per_topic, words * (words - 1)
    if wanted > there_are:
        raise ValueError(f"words is {words}, which make {there_are} pairs, but {wanted} are needed; raise it.")
    codes = np.random.default_rng(seed).choice(there_are, size=wanted, replace=False)
    first, second = np.divmod(codes, words - 1)
    # The second is one of the words that are not the first.
    second += second >= first
    pairs = [(int(a) + 1, int(b) + 1) for a, b in zip(first, second)]
    return [pairs[start : start + pairs_per_topic] for start in range(0, wanted, pairs_per_topic)]


def pair_sentences(
    pairs: WordPairs, train_size: int = 4000, test_size: int = 1000, length: int = 10, words: int = 200, seed: int = 0
) -> tuple[Dataset, Dataset]:
    """Walks of one Markov chain for each topic, which start with a pair that tells it (Lu et al. 2021, appendix A).

    From the first word of a topic's pair, its chain goes to one of the second words that it has there, with equal
    chances; from any other word to any word. A sentence starts with the first word of a pair of its topic, drawn
    uniformly.

    Args:
        pairs (`list[list[tuple[int, int]]]`): Pairs that tell each topic, such as those of [`topic_pairs`].
        train_size (`int`): Sentences for training.
        test_size (`int`): Sentences for testing, drawn in the same way.
        length (`int`): Words of a sentence, at least 2.
        words (`int`): Number of words, which are 1, 2, ….
        seed (`int`): Draws the sentences.

    Returns:
        `tuple[datasets.Dataset, datasets.Dataset]`: Training and test, with the columns `input_ids` and `label`
        (`ClassLabel`). There are `words + 1` words, padding included.

    Raises:
        ValueError: if a number is out of range, a topic has no pair, or a pair has a word that is not there or tells
            two topics.

    Example:
        >>> train, test = pair_sentences([[(1, 2)], [(3, 4)]], train_size=2, test_size=1)
        >>> {tuple(row["input_ids"][:2]) for row in (*train, *test)} <= {(1, 2), (3, 4)}
        True
    """
    _check_positive(train_size=train_size, test_size=test_size, words=words)
    if length < 2:
        raise ValueError(f"length is {length}; a sentence with a pair has at least 2 words.")
    all_pairs = [pair for of_topic in pairs for pair in of_topic]
    if not all(pairs) or not all_pairs:
        raise ValueError(f"pairs are {pairs}; each topic needs one.")
    for pair in all_pairs:
        if not all(1 <= word <= words for word in pair):
            raise ValueError(f"pairs have {pair}, but words are from 1 to {words}.")
        if all_pairs.count(pair) > 1:
            raise ValueError(f"pairs have {pair} twice; a pair tells one topic.")
    chains = np.full((len(pairs), words + 1, words), 1 / words)
    for chain, of_topic in zip(chains, pairs):
        for first in {first for first, _ in of_topic}:
            seconds = [second for one, second in of_topic if one == first]
            chain[first] = 0
            chain[first, np.array(seconds) - 1] = 1 / len(seconds)
    cumulated = chains.cumsum(-1)
    generator = np.random.default_rng(seed)
    datasets = []
    for size in (train_size, test_size):
        labels = generator.integers(len(pairs), size=size)
        sentences = np.empty((size, length), dtype=int)
        sentences[:, 0] = [pairs[label][generator.integers(len(pairs[label]))][0] for label in labels]
        for place in range(1, length):
            rows = cumulated[labels, sentences[:, place - 1]]
            # Sums of probabilities may end just below 1.
            drawn = generator.random((size, 1)) * rows[:, -1:]
            sentences[:, place] = 1 + (rows <= drawn).sum(-1)
        datasets.append(_dataset(sentences, labels, len(pairs)))
    return datasets[0], datasets[1]


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}.")


def _dataset(sentences: np.ndarray, labels: np.ndarray, topics: int) -> Dataset:
    names = [f"topic {topic}" for topic in range(topics)]
    features = Features({"input_ids": List(Value("int32")), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"input_ids": sentences.tolist(), "label": labels.tolist()}, features=features)
