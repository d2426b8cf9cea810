# Licensed under the Apache License, Version 2.0.
"""From targets of words to targets of tokens: columns of a dataset for heads that are guided to targets."""

import logging
import math
from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, NamedTuple

from transformers import BatchEncoding

from ..models.ignored_labels import IGNORED
from .words import words_at_offsets


logger = logging.getLogger(__name__)

Targets = Sequence[int | None]  # of the words of a text
Pair = tuple[Targets, Targets]
WordIndices = Sequence[int | None]  # of the tokens of a text

SUBWORDS = ("first", "last", "all")
LOST = ("warn", "error", "ignore")


def align_targets(
    encoding: BatchEncoding | Sequence[WordIndices] | WordIndices,
    word_targets: Sequence[Targets | Pair] | Targets | Pair,
    subword: str = "first",
    *,
    keys: BatchEncoding | Sequence[WordIndices] | WordIndices | None = None,
    spans: Sequence[Any] | None = None,
    key_spans: Sequence[Any] | None = None,
    lost: str = "warn",
) -> list[list[int]] | list[int]:
    """From words to tokens: the key that each row of attention should attend to, for a target with the form `"keys"`.

    A row is a token of `encoding`, a key a token of `keys`. The rows that count and their keys are

    | `subword` | rows that count | key |
    |---|---|---|
    | `"first"` | the first token of each word with a target | the first token of the target word |
    | `"last"` | the last token of each word with a target | the last token of the target word |
    | `"all"` | all tokens of each word with a target | the first token of the target word |

    where first and last refer to the tokens that truncation has left. Causal models have read a whole word at its last
    token. All other rows, those of special tokens and padding among them, have -100.

    A target is lost if the word or its target word has no token: because it was truncated, or the tokenizer has no
    token for it. If `encoding` has several windows of a text (`return_overflowing_tokens`), it is lost if no window
    has both.

    Args:
        encoding ([`BatchEncoding`] or word indices): One or several texts, padded or not:

            - the output of a fast tokenizer for words (`is_split_into_words=True`); byte-level ones expect the space
              before a word as part of it,
            - the output of a fast tokenizer for texts, together with `spans`,
            - the index of the word of each token, `None` for tokens without one, such as `encode_words(tree,
              tokenizer)[1]`, for all other tokenizers.
        word_targets (list of `list[int | None]`): For each text and each of its words the index of the word that it
            should attend to; `None` or -100 for words without a target. A single list for a single text. For pairs of
            texts, tuples of two lists, whose indices count the words of both texts, see [`pair_targets`].
        subword (`str`): `"first"`, `"last"` or `"all"`, see above.
        keys (as `encoding`, *optional*): The texts that are attended to, such as the source of a translation whose
            target is `encoding`; by default `encoding` itself. For labels, row t is the decoder's row that predicts
            label t.
        spans (list of `tuple[tuple[int, int], ...]`, *optional*): Character spans of the words in each text, such as
            those of a [`Tree`]; for pairs of texts, tuples of both. A token belongs to the first word that ends after
            its start, as in [`encode_words`].
        key_spans (as `spans`, *optional*): Those of `keys`.
        lost (`str`): For lost targets, `"warn"` logs a warning with their number, `"error"` raises an error, and
            `"ignore"` does nothing.

    Returns:
        `list[list[int]]` (`list[int]` for a single text): keys of shape `(batch, rows)`, as long as the texts in
        `encoding`, -100 for rows that do not count. It is a column of a dataset for [`GuidanceCollator`].

    Raises:
        ValueError: if a setting is unknown, the numbers of texts or words differ, a target is not the index of a word,
            the words of a tokenizer's output are unknown, or targets are lost with `lost="error"`.

    Example:
        >>> from hf_attn_dynamics.data import Tree, train_byte_level_bpe, tree_targets
        >>> tokenizer = train_byte_level_bpe(["Dogs bark"], vocab_size=265)
        >>> trees = [Tree(("Dogs", "bark"), (1, None), ("nsubj", "root"))]
        >>> encoding = tokenizer([tree.words for tree in trees], is_split_into_words=True)
        >>> encoding.word_ids(0)
        [None, 0, 0, 1, 1, None]
        >>> align_targets(encoding, [tree_targets(tree) for tree in trees])
        [[-100, 3, -100, -100, -100, -100]]
    """
    _check_settings(subword, lost)
    texts = _Texts(encoding, word_targets, spans, keys, key_spans)
    targets = [
        [_checked_target(target, text, word, texts.limit(text)) for word, target in enumerate(values)]
        for text, values in enumerate(texts.values)
    ]
    aligned, found = [], set()
    for window in texts.windows():
        aligned.append([IGNORED] * window.length)
        for word, tokens in window.rows.items():
            target = targets[window.text][word]
            if target in window.keys:
                for token in _kept(tokens, subword):
                    aligned[-1][token] = window.keys[target][-1 if subword == "last" else 0]
                found.add((window.text, word))
    given = [(text, word) for text, row in enumerate(targets) for word, one in enumerate(row) if one is not None]
    _report_lost(given, found, len(texts.values), lost)
    return aligned[0] if texts.is_single else aligned


def align_sparse_targets(
    encoding: BatchEncoding | Sequence[WordIndices] | WordIndices,
    word_targets: Sequence[Any],
    subword: str = "first",
    *,
    weights: Sequence[Any] | None = None,
    keys: BatchEncoding | Sequence[WordIndices] | WordIndices | None = None,
    spans: Sequence[Any] | None = None,
    key_spans: Sequence[Any] | None = None,
    lost: str = "warn",
) -> tuple[list[Any], list[Any]]:
    """From words to tokens: several keys for each row and their weights, for a target with the form `"sparse"`.

    The rows that count and their keys are

    | `subword` | rows that count | keys |
    |---|---|---|
    | `"first"` | the first token of each word with a target | the first token of each target word |
    | `"last"` | the last token of each word with a target | the last token of each target word |
    | `"all"` | all tokens of each word with a target | all tokens of each target word |

    With `"all"`, the tokens of a target word share its weight equally.

    A target is lost as in [`align_targets`]; the other targets of the word keep their weights, and the row counts as
    long as one target is left.

    Args:
        encoding ([`BatchEncoding`] or word indices): One or several texts, see [`align_targets`].
        word_targets (list of `list[list[int] | None]`): For each text and each of its words the indices of the words
            that it should attend to; an empty list or `None` for words without a target, and -100 for unused entries.
            For a single text and for pairs of texts as in [`align_targets`].
        subword (`str`): `"first"`, `"last"` or `"all"`, see above.
        weights (list of `list[list[float] | None]`, *optional*): The weight of each target word, nested as
            `word_targets`; `None` for equal weights. Models normalise the weights of a row. Targets with the weight 0
            are left out.
        keys, spans, key_spans, lost (*optional*): As in [`align_targets`].

    Returns:
        `tuple[list, list]`: keys and weights of shape `(batch, rows, k)` (`(rows, k)` for a single text), where k is
        the largest number of keys of a row in the text, at least 1. Unused entries have the key -100 and the weight 0.
        They are the columns `guidance_NAME` and `guidance_NAME_weights` of a dataset for [`GuidanceCollator`].

    Raises:
        ValueError: as [`align_targets`], and if weights are negative, not finite or not numbers, or are not as many as
            targets.

    Example:
        >>> keys, weights = align_sparse_targets([[None, 0, 1, 1, None]], [[[1], [0, 1]]], "all")
        >>> keys
        [[[-100, -100, -100], [2, 3, -100], [1, 2, 3], [1, 2, 3], [-100, -100, -100]]]
        >>> weights
        [[[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1.0, 0.5, 0.5], [1.0, 0.5, 0.5], [0.0, 0.0, 0.0]]]
    """
    _check_settings(subword, lost)
    texts = _Texts(encoding, word_targets, spans, keys, key_spans, nested=True)
    targets = _weighted_targets(texts, weights)
    all_keys, all_weights, found = [], [], set()
    for window in texts.windows():
        in_rows: list[list[tuple[int, float]]] = [[] for _ in range(window.length)]
        for word, tokens in window.rows.items():
            own = []
            for target, weight in targets[window.text][word]:
                if target in window.keys:
                    of_target = _kept(window.keys[target], subword)
                    own += [(key, weight / len(of_target)) for key in of_target]
                    found.add((window.text, word, target))
            for token in _kept(tokens, subword):
                in_rows[token] = own
        slots = max([1, *map(len, in_rows)])
        filled = [[*row, *[(IGNORED, 0.0)] * (slots - len(row))] for row in in_rows]
        all_keys.append([[key for key, _ in row] for row in filled])
        all_weights.append([[weight for _, weight in row] for row in filled])
    given = [(text, word, one) for text, row in enumerate(targets) for word, own in enumerate(row) for one, _ in own]
    _report_lost(given, found, len(texts.values), lost)
    return (all_keys[0], all_weights[0]) if texts.is_single else (all_keys, all_weights)


def align_weights(
    encoding: BatchEncoding | Sequence[WordIndices] | WordIndices,
    word_weights: Sequence[Any],
    subword: str = "all",
    *,
    spans: Sequence[Any] | None = None,
    lost: str = "warn",
) -> list[list[float]] | list[float]:
    """From words to tokens: the weight of each key in all rows, for a target with the form `"weights"`.

    The weight of a word is that of its first or last token, or is divided equally among all of its tokens.

    Args:
        encoding ([`BatchEncoding`] or word indices): One or several texts, see [`align_targets`].
        word_weights (list of `list[float | None]`): For each text the weight of each of its words, such as 1 for words
            of a rationale and 0 or `None` for others. A single list for a single text, tuples of two lists for pairs.
        subword (`str`): `"first"`, `"last"` or `"all"`.
        spans (list of `tuple[tuple[int, int], ...]`, *optional*): Character spans of the words, see [`align_targets`].
        lost (`str`): For words with a weight, but without a token: `"warn"`, `"error"` or `"ignore"`.

    Returns:
        `list[list[float]]` (`list[float]` for a single text): weights of shape `(batch, keys)`, 0 for special tokens
        and padding, not normalised. It is a column of a dataset for [`GuidanceCollator`].

    Raises:
        ValueError: as [`align_targets`], and if a weight is negative, not finite or not a number.

    Example:
        >>> align_weights([[None, 0, 1, 1, None]], [[1, 3]])
        [[0.0, 1.0, 1.5, 1.5, 0.0]]
    """
    _check_settings(subword, lost)
    texts = _Texts(encoding, word_weights, spans)
    weights = [
        [_checked_weight(weight, text, word) for word, weight in enumerate(values)]
        for text, values in enumerate(texts.values)
    ]
    aligned, found = [], set()
    for window in texts.windows():
        aligned.append([0.0] * window.length)
        for word, tokens in window.rows.items():
            kept = _kept(tokens, subword)
            for token in kept:
                aligned[-1][token] = weights[window.text][word] / len(kept)
            found.add((window.text, word))
    given = [(text, word) for text, row in enumerate(weights) for word, weight in enumerate(row) if weight]
    _report_lost(given, found, len(texts.values), lost)
    return aligned[0] if texts.is_single else aligned


def _check_settings(subword: str, lost: str) -> None:
    for name, value, known in (("subword", subword, SUBWORDS), ("lost", lost, LOST)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.")


class _Window(NamedTuple):
    """Tokens of the words of one row of `encoding`, and those of its keys."""

    text: int
    length: int
    rows: dict[int, list[int]]  # of each word that has any
    keys: dict[int, list[int]]


class _Texts:
    """Texts with values of their words, such as targets, and the tokens of the words.

    Args:
        encoding, spans, keys, key_spans: See [`align_targets`].
        values (list): The values of each text.
        nested (`bool`): Whether the value of a word is a list.

    Raises:
        ValueError: if the numbers of texts or words differ, or the words of the tokens are unknown.
    """

    def __init__(self, encoding, values, spans, keys=None, key_spans=None, nested: bool = False):
        self._rows = _tokens("encoding", encoding, spans)
        self._keys = None if keys is None else _tokens("keys", keys, key_spans)
        self.is_single = self._rows.is_single
        values = [values] if self.is_single else values
        _check_numbers(self._rows, self._keys, len(values))
        parts = [_parts(text, nested) for text in values]
        self._sizes = [tuple(map(len, part)) for part in parts]
        for number, sizes in enumerate(self._sizes):
            _check_spans(self._rows, number, sizes)
        self.values = [[value for part in both for value in part] for both in parts]

    def limit(self, text: int) -> int | None:
        """Number of words that can be targets; `None` if it is unknown."""
        return sum(self._sizes[text]) if self._keys is None else self._keys.num_words(text)

    def windows(self) -> Iterator[_Window]:
        """The rows of `encoding`, which are texts or windows of texts."""
        for number, text in enumerate(self._rows.texts):
            words = _counted(self._rows, number, self._sizes[text])
            own = _tokens_of_words(words)
            of_keys = own if self._keys is None else _tokens_of_words(_single(self._keys, text))
            yield _Window(text, len(words), own, of_keys)


class _Tokens(NamedTuple):
    """Words of the tokens of all rows, which are texts or windows of texts."""

    words: list[list[int | None]]  # of each token, counted in its text
    second: list[list[bool]]  # whether the token is in the second text of a pair
    texts: list[int]  # of each row
    sizes: list[tuple[int, ...]] | None  # number of spans in each text, or in both texts of a pair
    is_single: bool

    def num_words(self, text: int) -> int | None:
        """Number of words of a text, if spans were given."""
        return None if self.sizes is None else sum(self.sizes[text])


def _tokens(name: str, encoding, spans) -> _Tokens:
    if not isinstance(encoding, BatchEncoding):
        return _given_words(name, encoding, spans)
    if not encoding.encodings:
        if encoding.encodings is not None:
            return _Tokens([], [], [], None, False)
        raise ValueError(
            f"{name} is not the output of a fast tokenizer, which has the word of each token; pass the word indices "
            "of encode_words()."
        )
    column = next(iter(encoding.values()))
    is_single = not hasattr(column, "shape") and not (len(column) and hasattr(column[0], "__len__"))
    lengths = [len(column)] if is_single else [len(row) for row in column]
    if lengths != [len(one.ids) for one in encoding.encodings]:
        raise ValueError(
            f"{name} was padded or truncated after tokenization; pass the tokenizer's output as it is, and let the "
            "collator pad."
        )
    texts = [int(text) for text in encoding.get("overflow_to_sample_mapping", range(len(lengths)))]
    second = [[sequence == 1 for sequence in one.sequence_ids] for one in encoding.encodings]
    if spans is None:
        return _Tokens([list(one.word_ids) for one in encoding.encodings], second, texts, None, is_single)
    spans = [one if _are_of_pair(one) else (one,) for one in ([spans] if is_single else spans)]
    if len(spans) != max(texts, default=-1) + 1:
        raise ValueError(f"{name} has {max(texts) + 1} texts, but {len(spans)} lists of spans were given.")
    words = []
    for one, text in zip(encoding.encodings, texts):
        row: list[int | None] = [None] * len(one.ids)
        for is_second, of_text in enumerate(spans[text]):
            if not len(of_text):
                continue
            found = words_at_offsets(one.offsets, of_text)
            for token, (sequence, special) in enumerate(zip(one.sequence_ids, one.special_tokens_mask)):
                if sequence == is_second and not special:
                    row[token] = found[token]
        words.append(row)
    return _Tokens(words, second, texts, [tuple(map(len, one)) for one in spans], is_single)


def _given_words(name: str, encoding, spans) -> _Tokens:
    if spans is not None:
        raise ValueError(f"spans need the output of a fast tokenizer as {name}; word indices have the words already.")
    if isinstance(encoding, (str, dict)):
        raise ValueError(f"{name} must be the output of a tokenizer or word indices, got {type(encoding).__name__}.")
    is_single = bool(len(encoding)) and not hasattr(encoding[0], "__len__")
    words = [list(row) for row in ([encoding] if is_single else encoding)]
    words = [[None if is_no_target(word) else index(word) for word in row] for row in words]
    return _Tokens(words, [[False] * len(row) for row in words], list(range(len(words))), None, is_single)


def is_no_target(target: int | None) -> bool:
    return target is None or target == IGNORED


def _are_of_pair(spans) -> bool:
    """Whether spans are those of two texts, not of two words."""
    return len(spans) == 2 and all(not len(one) or hasattr(one[0], "__len__") for one in spans)


def _check_numbers(rows: _Tokens, keys: _Tokens | None, num_targets: int) -> None:
    num_texts = max(rows.texts, default=-1) + 1
    if num_texts != num_targets:
        raise ValueError(
            f"encoding has {num_texts} texts, but {num_targets} lists of targets; each text needs one, also without "
            "targets."
        )
    if keys is not None and (keys.texts != list(range(num_texts)) or keys.is_single != rows.is_single):
        raise ValueError(f"encoding has {num_texts} texts, keys {len(keys.words)} rows; keys needs one for each text.")


def _parts(values, nested: bool) -> tuple[Sequence[Any], ...]:
    """Values of the words of a text, or of both texts of a pair; the value of a word may be a list (`nested`)."""
    is_pair = len(values) == 2 and all(isinstance(one, (tuple, list)) for one in values)
    if is_pair and nested:
        # Two lists of indices are those of two words.
        is_pair = any(word is None or isinstance(word, (tuple, list)) for one in values for word in one)
    return tuple(values) if is_pair else (values,)


def _check_spans(rows: _Tokens, text: int, sizes: tuple[int, ...]) -> None:
    if rows.sizes is not None and rows.sizes[text] != sizes:
        spans, targets = (" and ".join(map(str, one)) for one in (rows.sizes[text], sizes))
        raise ValueError(f"text {text} has spans of {spans} words, but targets of {targets}; each word needs one.")


def _checked_target(target: Any, text: int, word: int, limit: int | None) -> int | None:
    """A target of a word, which must be below the limit if there is one."""
    try:
        target = None if is_no_target(target) else index(target)
    except TypeError:
        raise ValueError(f"text {text}: the target of word {word} must be an index or None, got {target!r}.") from None
    if target is not None and (target < 0 or (limit is not None and target >= limit)):
        known = "words count from 0" if limit is None else f"there are {limit} words"
        raise ValueError(f"text {text}: the target of word {word} is word {target}, but {known}.")
    return target


def _checked_weight(weight: Any, text: int, word: int) -> float:
    """The weight of a word, or of a target of a word."""
    try:
        checked = 0.0 if weight is None else float(weight)
    except (TypeError, ValueError):
        raise ValueError(f"text {text}: the weight of word {word} must be a number, got {weight!r}.") from None
    if not 0 <= checked < math.inf:
        raise ValueError(f"text {text}: the weight of word {word} must be finite and at least 0, got {checked}.")
    return checked


def _weighted_targets(texts: _Texts, weights: Sequence[Any] | None) -> list[list[list[tuple[int, float]]]]:
    """Targets of each word of each text with their weights, without those of weight 0."""
    of_texts = [[None] * len(values) for values in texts.values]
    if weights is not None:
        given = [weights] if texts.is_single else weights
        of_texts = [[one for part in _parts(text, nested=True) for one in part] for text in given]
    if (counts := [*map(len, of_texts)]) != (expected := [*map(len, texts.values)]):
        raise ValueError(f"weights of texts with {counts} words were given, but targets of texts with {expected}.")
    return [
        [
            _checked_several(several, own, text, word, texts.limit(text))
            for word, (several, own) in enumerate(zip(values, of_words))
        ]
        for text, (values, of_words) in enumerate(zip(texts.values, of_texts))
    ]


def _checked_several(targets: Any, weights: Any, text: int, word: int, limit: int | None) -> list[tuple[int, float]]:
    """Targets of a word with their weights."""
    targets = [] if targets is None else targets
    if not hasattr(targets, "__len__") or isinstance(targets, str):
        raise ValueError(
            f"text {text}: the targets of word {word} must be a list of indices or None, got {targets!r}; "
            "align_targets() takes one target for each word."
        )
    weights = [1.0] * len(targets) if weights is None else weights
    if not hasattr(weights, "__len__") or len(weights) != len(targets):
        raise ValueError(
            f"text {text}: word {word} has {len(targets)} targets, but the weights {weights!r}; each target needs one."
        )
    checked = [
        (_checked_target(target, text, word, limit), _checked_weight(weight, text, word))
        for target, weight in zip(targets, weights)
    ]
    return [(target, weight) for target, weight in checked if target is not None and weight]


def _counted(rows: _Tokens, number: int, sizes: tuple[int, ...]) -> list[int | None]:
    """Words of the tokens of a row, counted through both texts of a pair."""
    text, second = rows.texts[number], rows.second[number]
    if any(second) and len(sizes) == 1:
        raise ValueError(f"text {text} is a pair; its targets must be two lists, see pair_targets().")
    counted: list[int | None] = []
    for word, is_second in zip(rows.words[number], second):
        if word is not None and word >= sizes[is_second]:
            raise ValueError(
                f"text {text} has a token of word {word}, but targets of {sizes[is_second]} words; tokenize words "
                "with is_split_into_words=True, or pass the spans of the words."
            )
        counted.append(word + sizes[0] * is_second if word is not None else None)
    return counted


def _single(keys: _Tokens, number: int) -> list[int | None]:
    if any(keys.second[number]):
        raise ValueError(f"text {number} of keys is a pair; keys must be single texts.")
    return keys.words[number]


def _tokens_of_words(words: list[int | None]) -> dict[int, list[int]]:
    """Tokens of each word that has any."""
    tokens: dict[int, list[int]] = {}
    for token, word in enumerate(words):
        if word is not None:
            tokens.setdefault(word, []).append(token)
    return tokens


def _kept(tokens: list[int], subword: str) -> list[int]:
    """The tokens of a word that count."""
    return {"first": tokens[:1], "last": tokens[-1:], "all": tokens}[subword]


def _report_lost(given: list[tuple[int, ...]], found: set[tuple[int, ...]], num_texts: int, lost: str) -> None:
    """Reports targets, as tuples of text, word and others, that no window has."""
    missing = [one for one in given if one not in found]
    if lost == "ignore" or not missing:
        return
    message = (
        f"{len(missing)} of {len(given)} targets in {len({text for text, *_ in missing})} of {num_texts} texts are "
        "lost: a word has no token, because it was truncated, or shares its tokens with another word"
    )
    if lost == "error":
        raise ValueError(f"{message}; the first is word {missing[0][1]} of text {missing[0][0]}.")
    logger.warning("%s.", message)
