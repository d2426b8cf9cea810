# Licensed under the Apache License, Version 2.0.
"""Words that decide: a lexicon with the class of each word, and the rationales of sentences that follow from it."""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .classification import load_classification
from .tables import Column
from .words import Spans


Lexicon = Mapping[str, str]  # the class of each word, which is in lower case and without punctuation around it

_WORD = re.compile(r"\S+")
_PUNCTUATION = string.punctuation + "“”‘’…–—"


def load_lexicon(
    files: str | Path | Iterable[str | Path],
    text_column: Column | None = None,
    label_column: Column | None = None,
    label_names: Sequence[str] | None = None,
    *,
    encoding: str = "utf-8",
) -> dict[str, str]:
    """Reads the single words of a table of phrases and classes, such as the polar phrases of a sentiment treebank.

    Case and punctuation around a word are ignored. Words that occur with several classes are left out.

    Args:
        files, text_column, label_column, label_names, encoding: See [`load_classification`].

    Returns:
        `dict[str, str]`: name of the class of each word.

    Raises:
        ValueError: as [`load_classification`], and if no phrase is a single word.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "phrases.tsv")
        ...     _ = path.write_text("fine\\t1\\na fine film\\t1\\nBore\\t0\\n")
        ...     load_lexicon(path)
        {'fine': '1', 'bore': '0'}
    """
    phrases = load_classification(files, text_column, label_column, label_names, encoding=encoding)
    names = phrases.features["label"].names
    classes: dict[str, set[str]] = defaultdict(set)
    for phrase, label in zip(phrases["text"], phrases["label"]):
        if len(words := phrase.split()) == 1 and (word := plain_word(words[0])):
            classes[word].add(names[label])
    if not classes:
        raise ValueError(f"the {len(phrases)} phrases of the lexicon have no single word; name a file with some.")
    return {word: next(iter(own)) for word, own in classes.items() if len(own) == 1}


def learn_lexicon(
    texts: Iterable[str],
    labels: Iterable[str],
    min_count: int = 5,
    min_fraction: float = 0.6,
    known: Lexicon | None = None,
) -> dict[str, str]:
    """Finds words that occur mostly in texts of one class, or leaves out words of a lexicon that do not.

    Args:
        texts (iterable of `str`): Texts; a word counts once in each.
        labels (iterable of `str`): Name of the class of each text.
        min_count (`int`): Number of texts that a word occurs in, at least.
        min_fraction (`float`): Fraction of these texts that have the class of the word, at least.
        known (`dict[str, str]`, *optional*): A lexicon. Its words keep their classes, and words that occur in fewer
            than `min_count` texts are kept; no word is added.

    Returns:
        `dict[str, str]`: name of the class of each word.

    Raises:
        ValueError: if there are not as many labels as texts.

    Example:
        >>> texts, labels = ["a fine film", "a fine plot", "a bore"], ["1", "1", "0"]
        >>> learn_lexicon(texts, labels, min_count=2)
        {'a': '1', 'fine': '1'}
        >>> learn_lexicon(texts, labels, min_count=2, known={"fine": "1", "a": "0", "bore": "0"})
        {'fine': '1', 'bore': '0'}
    """
    texts, labels = list(texts), list(labels)
    if len(texts) != len(labels):
        raise ValueError(f"there are {len(texts)} texts, but {len(labels)} labels; give one label for each text.")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for text, label in zip(texts, labels):
        # In the order of the text, so that ties do not depend on hashes.
        for word in dict.fromkeys(plain_word(text[start:end]) for start, end in word_spans(text)):
            counts[word][label] += 1
    if known is None:
        classes = {word: of_class.most_common(1)[0][0] for word, of_class in counts.items() if word}
        frequent = {word: label for word, label in classes.items() if counts[word].total() >= min_count}
    else:
        frequent = dict(known)

    def is_decisive(word: str) -> bool:
        total = counts[word].total()
        return total < min_count or counts[word][frequent[word]] >= min_fraction * total

    return {word: label for word, label in frequent.items() if is_decisive(word)}


def rationale(text: str, label: str, lexicon: Lexicon) -> tuple[Spans, list[float]]:
    """The words of a text that speak for a class, for [`align_weights`].

    Args:
        text (`str`): The text; its words are separated by spaces.
        label (`str`): Name of the class.
        lexicon (`dict[str, str]`): See [`load_lexicon`].

    Returns:
        `tuple[tuple[tuple[int, int], ...], list[float]]`: the character span of each word, and its weight: 1 for words
        that have this class in the lexicon, 0 for others.

    Example:
        >>> rationale("A fine film.", "1", {"fine": "1", "bore": "0"})
        (((0, 1), (2, 6), (7, 12)), [0.0, 1.0, 0.0])
    """
    spans = word_spans(text)
    return spans, [float(lexicon.get(plain_word(text[start:end])) == label) for start, end in spans]


def word_spans(text: str) -> Spans:
    """Character spans of the words of a text, which are separated by spaces."""
    return tuple(found.span() for found in _WORD.finditer(text))


def plain_word(word: str) -> str:
    """A word in lower case, without punctuation around it."""
    return word.strip(_PUNCTUATION).lower()
