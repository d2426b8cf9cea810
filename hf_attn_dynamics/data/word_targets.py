# Licensed under the Apache License, Version 2.0.
"""Targets of attention that are given for words: from trees, alignments, spans and coreference, to keys of tokens."""

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import BatchEncoding

from ..models.ignored_labels import IGNORED
from .words import Spans, words_at_offsets


if TYPE_CHECKING:
    from .conllu import Tree
    from .coreference import CoreferenceItem, Mention


logger = logging.getLogger(__name__)

Targets = Sequence[int | None]  # of the words of a text
Pair = tuple[Targets, Targets]
WordIndices = Sequence[int | None]  # of the tokens of a text

SUBWORDS = ("first", "last", "all")
LOST = ("warn", "error", "ignore")
DIRECTIONS = ("head", "dependent")
SEVERAL = ("first", "last", "none")
MENTION_WORDS = ("head", "all")


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
        ValueError: if a setting is unknown, the numbers of texts or words differ, an index is not that of a word, the
            words of a tokenizer's output are unknown, or targets are lost with `lost="error"`.

    Example:
        >>> from hf_attn_dynamics.data import Tree, train_byte_level_bpe
        >>> tokenizer = train_byte_level_bpe(["Dogs bark"], vocab_size=265)
        >>> trees = [Tree(("Dogs", "bark"), (1, None), ("nsubj", "root"))]
        >>> encoding = tokenizer([tree.words for tree in trees], is_split_into_words=True)
        >>> encoding.word_ids(0)
        [None, 0, 0, 1, 1, None]
        >>> align_targets(encoding, [tree_targets(tree) for tree in trees])
        [[-100, 3, -100, -100, -100, -100]]
    """
    _check_settings(subword, lost)
    rows = _tokens("encoding", encoding, spans)
    texts = [word_targets] if rows.is_single else word_targets
    key_rows = rows if keys is None else _tokens("keys", keys, key_spans)
    _check_numbers(rows, key_rows, len(texts), keys is not None)
    sizes = [_sizes(text) for text in texts]
    checked = []
    for number, text in enumerate(texts):
        _check_spans(rows, number, sizes[number])
        limit = sum(sizes[number]) if keys is None else key_rows.num_words(number)
        checked.append(_checked(text, number, limit))

    aligned, found = [], set()
    for number, text in enumerate(rows.texts):
        targets = checked[text]
        words = _counted(rows, number, sizes[text])
        key_words = words if keys is None else _single(key_rows, text)
        key_of = {word: key for key, word in _ordered(key_words, subword)}
        representative = {word: token for token, word in _ordered(words, subword)}
        aligned.append([IGNORED] * len(words))
        for token, word in enumerate(words):
            target = None if word is None else targets[word]
            if target is not None and target in key_of and (subword == "all" or representative[word] == token):
                aligned[-1][token] = key_of[target]
                found.add((text, word))
    _report_lost(checked, found, lost)
    return aligned[0] if rows.is_single else aligned


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
        ValueError: as [`align_targets`], and if a weight is negative, not finite or no number.

    Example:
        >>> align_weights([[None, 0, 1, 1, None]], [[1, 3]])
        [[0.0, 1.0, 1.5, 1.5, 0.0]]
    """
    _check_settings(subword, lost)
    rows = _tokens("encoding", encoding, spans)
    texts = [word_weights] if rows.is_single else word_weights
    _check_numbers(rows, rows, len(texts), False)
    sizes = [_sizes(text) for text in texts]
    for number, size in enumerate(sizes):
        _check_spans(rows, number, size)
    weights = [_checked_weights(text, number) for number, text in enumerate(texts)]

    aligned, found = [], set()
    for number, text in enumerate(rows.texts):
        words = _counted(rows, number, sizes[text])
        tokens: dict[int, list[int]] = {}
        for token, word in enumerate(words):
            if word is not None:
                tokens.setdefault(word, []).append(token)
        aligned.append([0.0] * len(words))
        for word, own in tokens.items():
            kept = {"first": own[:1], "last": own[-1:], "all": own}[subword]
            for token in kept:
                aligned[-1][token] = weights[text][word] / len(kept)
            found.add((text, word))
    _report_lost([[weight or None for weight in row] for row in weights], found, lost)
    return aligned[0] if rows.is_single else aligned


def pair_targets(first: Targets, second: Targets) -> Pair:
    """Targets of the words of two texts that are encoded as a pair, for [`align_targets`].

    Args:
        first, second (`list[int | None]`): Targets within each text.

    Returns:
        `tuple[list[int | None], list[int | None]]`: the same, with indices that count the words of both texts.

    Example:
        >>> pair_targets([1, None], [None, 0])
        ([1, None], [None, 2])
    """
    shifted = [None if _is_none(target) else target + len(first) for target in second]
    return list(first), shifted


def tree_targets(
    tree: "Tree",
    relations: Collection[str] | None = None,
    direction: str = "head",
    subtypes: bool = False,
) -> list[int | None]:
    """Targets from a dependency tree: the head of each word, or a dependent.

    Words of a multiword token that share the span of the token, as "de" and "le" in French "du", also share its
    tokens: the first of them stands for all, with the head of the first whose head is outside of the token. If each
    word is to have its own tokens, pass `tree.spaced()`.

    Args:
        tree ([`Tree`]): The tree, see [`load_conllu`].
        relations (list of `str`, *optional*): Only dependencies with these relations; all by default.
        direction (`str`): `"head"`: each word attends to its head; the root has no target. `"dependent"`: each head
            attends to its dependent; to the nearest if there are several, and to the earlier of two.
        subtypes (`bool`): Whether a relation includes its subtypes, `nsubj` also `nsubj:pass`.

    Returns:
        `list[int | None]`: target of each word.

    Raises:
        ValueError: if the direction is unknown, or `relations` is a string or empty.

    Example:
        >>> from hf_attn_dynamics.data import embedded_trees
        >>> tree = embedded_trees()[0]
        >>> tree.text
        'The dog chased the black cat.'
        >>> tree_targets(tree)
        [1, 2, None, 5, 5, 2, 2]
        >>> tree_targets(tree, relations=["nsubj"], direction="dependent")
        [None, None, 1, None, None, None, None]
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be {' or '.join(map(repr, DIRECTIONS))}, got {direction!r}.")
    if relations is not None and (isinstance(relations, str) or not relations):
        raise ValueError(f"relations must be a non-empty list, such as ['nsubj', 'obj'], got {relations!r}.")
    first_with: dict[tuple[int, int], int] = {}
    unit_of = [first_with.setdefault(span, word) for word, span in enumerate(tree.spans or ())]
    targets: list[int | None] = [None] * len(tree.words)
    for word, (head, relation) in enumerate(zip(tree.heads, tree.relations)):
        names = {relation, relation.partition(":")[0]} if subtypes else {relation}
        if head is None or unit_of[head] == unit_of[word] or (relations is not None and names.isdisjoint(relations)):
            continue
        at, to = unit_of[word], unit_of[head]
        if direction == "dependent":
            at, to = to, at
        before = targets[at]
        if before is None or (direction == "dependent" and abs(to - at) < abs(before - at)):
            targets[at] = to
    return targets


def pharaoh_targets(links: Iterable[tuple[int, int]], num_words: int, several: str = "first") -> list[int | None]:
    """Targets from a word alignment: the source word of each target word, for cross-attention.

    Pass the tokens of the source as `keys` to [`align_targets`].

    Args:
        links (iterable of `tuple[int, int]`): Links `(source position, target position)` of a sentence pair, as from
            [`read_pharaoh`] or [`symmetrize`].
        num_words (`int`): Number of target words.
        several (`str`): Which source word a target word with several links attends to: the `"first"`, the `"last"`,
            or `"none"`.

    Returns:
        `list[int | None]`: the source word of each target word, `None` without a link.

    Raises:
        ValueError: if `several` is unknown, or a link is not that of a target word.

    Example:
        >>> pharaoh_targets([(0, 1), (2, 0), (3, 0)], num_words=3)
        [2, 0, None]
    """
    if several not in SEVERAL:
        raise ValueError(f"several must be one of {', '.join(SEVERAL)}, got {several!r}.")
    found: list[list[int]] = [[] for _ in range(num_words)]
    for source, target in sorted(set(links)):
        if source < 0 or not 0 <= target < num_words:
            raise ValueError(
                f"the link {source}-{target} does not fit {num_words} target words; links are (source, target)."
            )
        found[target].append(source)
    chosen = -1 if several == "last" else 0
    return [None if not words or (several == "none" and len(words) > 1) else words[chosen] for words in found]


def span_targets(
    word_spans: Spans, pairs: Iterable[tuple[tuple[int, int], tuple[int, int]]], head: str = "last"
) -> list[int | None]:
    """Targets from character spans: all words of one span attend to a word of another.

    A word belongs to a span if they overlap.

    Args:
        word_spans (`tuple[tuple[int, int], ...]`): Character spans of the words, see [`find_words`].
        pairs (iterable of `((start, stop), (start, stop))`): The span that attends, and the span that it should attend
            to. A word that is in several spans that attend has the target of the first pair.
        head (`str`): Which word of the second span is the target, the `"first"` or the `"last"`.

    Returns:
        `list[int | None]`: target of each word.

    Raises:
        ValueError: if `head` is unknown, or a span has no word.

    Example:
        >>> from hf_attn_dynamics.data import find_words
        >>> text = "the old king hurt himself"
        >>> span_targets(find_words(text.split(), text, "an example"), [((18, 25), (0, 12))])
        [None, None, None, None, 2]
    """
    if head not in ("first", "last"):
        raise ValueError(f"head must be 'first' or 'last', got {head!r}.")
    targets: list[int | None] = [None] * len(word_spans)
    for one, other in pairs:
        queries, candidates = (_words_in(word_spans, span) for span in (one, other))
        for word in queries:
            if targets[word] is None:
                targets[word] = candidates[0 if head == "first" else -1]
    return targets


def cluster_targets(clusters: Iterable[Iterable["Mention"]], num_words: int, words: str = "head") -> list[int | None]:
    """Targets from coreference clusters: each mention attends to the nearest earlier mention of its cluster.

    A mention is earlier if its head precedes the first word of the other; the nearest has the last head. The target is
    its head. The first mention of a cluster has no target.

    Args:
        clusters (iterable of lists of [`Mention`]): Coreferent mentions.
        num_words (`int`): Number of words of the text.
        words (`str`): Which words of a mention attend: its `"head"`, or `"all"`. A word of several mentions has the
            target of the shortest with an antecedent.

    Returns:
        `list[int | None]`: target of each word.

    Raises:
        ValueError: if `words` is unknown, or a mention is not within the text.

    Example:
        >>> from hf_attn_dynamics.data import Mention
        >>> cluster_targets([[Mention(0, 2, 1), Mention(3, 4, 3), Mention(5, 6, 5)]], num_words=6)
        [None, None, None, 1, None, 3]
    """
    if words not in MENTION_WORDS:
        raise ValueError(f"words must be {' or '.join(map(repr, MENTION_WORDS))}, got {words!r}.")
    mentions: list[tuple[Mention, int]] = []
    for cluster in clusters:
        members = list(cluster)
        for mention in members:
            if not 0 <= mention.start <= mention.head < mention.stop <= num_words:
                raise ValueError(f"{mention} does not fit a text of {num_words} words.")
            earlier = [other.head for other in members if other.head < mention.start]
            if earlier:
                mentions.append((mention, max(earlier)))
    targets: list[int | None] = [None] * num_words
    for mention, antecedent in sorted(mentions, key=lambda one: one[0].stop - one[0].start):
        for word in [mention.head] if words == "head" else range(mention.start, mention.stop):
            if targets[word] is None:
                targets[word] = antecedent
    return targets


def coreference_targets(item: "CoreferenceItem", words: str = "head") -> list[int | None]:
    """Targets from a coreference item: its mention attends to the nearest earlier antecedent.

    Args:
        item ([`CoreferenceItem`]): A mention with its antecedents, see [`load_coreference`].
        words (`str`): Which words of the mention attend, see [`cluster_targets`].

    Returns:
        `list[int | None]`: target of each word; only `None` if no antecedent is earlier.

    Raises:
        ValueError: if `words` is unknown.

    Example:
        >>> from hf_attn_dynamics.data import CoreferenceItem, Mention
        >>> item = CoreferenceItem(("the", "king", "hurt", "himself"), Mention(3, 4, 3), (Mention(0, 2, 1),))
        >>> coreference_targets(item)
        [None, None, None, 1]
    """
    earlier = [other for other in item.antecedents if other.head < item.mention.start]
    nearest = [max(earlier, key=lambda mention: mention.head)] if earlier else []
    return cluster_targets([[*nearest, item.mention]], len(item.words), words)


def _check_settings(subword: str, lost: str) -> None:
    for name, value, known in (("subword", subword, SUBWORDS), ("lost", lost, LOST)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.")


def _words_in(word_spans: Spans, span: tuple[int, int]) -> list[int]:
    start, stop = span
    words = [word for word, (begin, end) in enumerate(word_spans) if begin < stop and end > start]
    if not words:
        raise ValueError(f"the span {(start, stop)} has no word; spans are (start, stop) in characters of the text.")
    return words


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
    words = [[None if _is_none(word) else index(word) for word in row] for row in words]
    return _Tokens(words, [[False] * len(row) for row in words], list(range(len(words))), None, is_single)


def _is_none(target: int | None) -> bool:
    return target is None or target == IGNORED


def _are_of_pair(spans) -> bool:
    """Whether spans are those of two texts, not of two words."""
    return len(spans) == 2 and all(not len(one) or hasattr(one[0], "__len__") for one in spans)


def _check_numbers(rows: _Tokens, keys: _Tokens, num_targets: int, has_keys: bool) -> None:
    num_texts = max(rows.texts, default=-1) + 1
    if num_texts != num_targets:
        raise ValueError(
            f"encoding has {num_texts} texts, but {num_targets} lists of targets; each text needs one, also without "
            "targets."
        )
    if has_keys and (keys.texts != list(range(num_texts)) or keys.is_single != rows.is_single):
        raise ValueError(f"encoding has {num_texts} texts, keys {len(keys.words)} rows; keys needs one for each text.")


def _sizes(targets) -> tuple[int, ...]:
    """Number of words of a text, or of both texts of a pair, that targets are given for."""
    is_pair = len(targets) == 2 and all(isinstance(one, (tuple, list)) for one in targets)
    return tuple(map(len, targets)) if is_pair else (len(targets),)


def _flat(values):
    """Values of all words of a text or of a pair of texts."""
    return [*values[0], *values[1]] if len(_sizes(values)) == 2 else values


def _check_spans(rows: _Tokens, text: int, sizes: tuple[int, ...]) -> None:
    if rows.sizes is not None and rows.sizes[text] != sizes:
        spans, targets = (" and ".join(map(str, one)) for one in (rows.sizes[text], sizes))
        raise ValueError(f"text {text} has spans of {spans} words, but targets of {targets}; each word needs one.")


def _checked(targets, text: int, limit: int | None) -> list[int | None]:
    """Targets of all words of a text or of a pair of texts, which must be below the limit if there is one."""
    checked = []
    for word, target in enumerate(_flat(targets)):
        try:
            target = None if _is_none(target) else index(target)
        except TypeError:
            raise ValueError(
                f"text {text}: the target of word {word} must be an index or None, got {target!r}."
            ) from None
        if target is not None and (target < 0 or (limit is not None and target >= limit)):
            known = "words count from 0" if limit is None else f"there are {limit} words"
            raise ValueError(f"text {text}: the target of word {word} is word {target}, but {known}.")
        checked.append(target)
    return checked


def _checked_weights(weights, text: int) -> list[float]:
    """Weights of all words of a text or of a pair of texts."""
    checked = []
    for word, weight in enumerate(_flat(weights)):
        try:
            checked.append(0.0 if weight is None else float(weight))
        except (TypeError, ValueError):
            raise ValueError(f"text {text}: the weight of word {word} must be a number, got {weight!r}.") from None
        if not 0 <= checked[-1] < math.inf:
            raise ValueError(
                f"text {text}: the weight of word {word} must be finite and at least 0, got {checked[-1]}."
            )
    return checked


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


def _ordered(words: list[int | None], subword: str) -> list[tuple[int, int]]:
    """Tokens with their words, the token that represents a word after its other tokens."""
    tokens = [(token, word) for token, word in enumerate(words) if word is not None]
    return tokens if subword == "last" else tokens[::-1]


def _report_lost(targets: Sequence[Sequence[float | None]], found: set[tuple[int, int]], lost: str) -> None:
    if lost == "ignore":
        return
    given = [(text, word) for text, row in enumerate(targets) for word, target in enumerate(row) if target is not None]
    missing = [one for one in given if one not in found]
    if not missing:
        return
    message = (
        f"{len(missing)} of {len(given)} targets in {len({text for text, _ in missing})} of {len(targets)} texts are "
        "lost: a word has no token, because it was truncated, or shares its tokens with another word"
    )
    if lost == "error":
        raise ValueError(f"{message}; the first is word {missing[0][1]} of text {missing[0][0]}.")
    logger.warning("%s.", message)
