# Licensed under the Apache License, Version 2.0.
"""Targets of words: from dependency trees, word alignments, character spans and coreference."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

# These two can also be imported from here until 0.2.
from .relations import is_relation
from .token_targets import align_targets as align_targets
from .token_targets import align_weights as align_weights
from .token_targets import is_no_target
from .words import Spans


if TYPE_CHECKING:
    from .conllu import Tree
    from .coreference import CoreferenceItem, Mention


DIRECTIONS = ("head", "dependent")
SEVERAL = ("nearest", "all")
SEVERAL_LINKS = ("first", "last", "none", "all")
MENTION_WORDS = ("head", "all")

Value = TypeVar("Value")


def pair_targets(first: Sequence[Value], second: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Targets of the words of two texts that are encoded as a pair, for [`align_targets`].

    Args:
        first, second (`list[int | None]` or `list[list[int]]`): Targets of each word, within each text.

    Returns:
        `tuple[list, list]`: the same, with indices that count the words of both texts.

    Example:
        >>> pair_targets([1, None], [None, 0])
        ([1, None], [None, 2])
        >>> pair_targets([[1], []], [[], [0, 1]])
        ([[1], []], [[], [2, 3]])
    """

    def shifted(target: Any) -> Any:
        if isinstance(target, (list, tuple)):
            return [shifted(one) for one in target]
        return None if is_no_target(target) else target + len(first)

    return list(first), [shifted(target) for target in second]


@overload
def tree_targets(
    tree: "Tree",
    relations: Collection[str] | None = None,
    direction: str = "head",
    subtypes: bool = False,
    several: Literal["nearest"] = "nearest",
) -> list[int | None]: ...


@overload
def tree_targets(
    tree: "Tree",
    relations: Collection[str] | None = None,
    direction: str = "head",
    subtypes: bool = False,
    *,
    several: Literal["all"],
) -> list[list[int]]: ...


def tree_targets(
    tree: "Tree",
    relations: Collection[str] | None = None,
    direction: str = "head",
    subtypes: bool = False,
    several: str = "nearest",
) -> list[Any]:
    """Targets from a dependency tree: the head of each word, or its dependents.

    Words of a multiword token that share the span of the token, as "de" and "le" in French "du", also share its
    tokens: the first of them stands for all, with the head of the first whose head is outside of the token. If each
    word is to have its own tokens, pass `tree.spaced()`.

    Args:
        tree ([`Tree`]): The tree, see [`load_conllu`].
        relations (list of `str`, *optional*): Only dependencies with these relations; all by default.
        direction (`str`): `"head"`: each word attends to its head; the root has no target. `"dependent"`: each head
            attends to its dependents.
        subtypes (`bool`): Whether a relation includes its subtypes, `nsubj` also `nsubj:pass`.
        several (`str`): Which dependents of a head are targets: the `"nearest"`, the earlier of two, for
            [`align_targets`], or `"all"`, for [`align_sparse_targets`]. With `"all"`, a multiword token also attends
            to all heads outside of it.

    Returns:
        `list[int | None]`: target of each word; with `several="all"` `list[list[int]]`: targets of each word, in
        ascending order.

    Raises:
        ValueError: if the direction or `several` is unknown, or `relations` is a string or empty.

    Example:
        >>> from hf_attn_dynamics.data import embedded_trees
        >>> tree = embedded_trees()[0]
        >>> tree.text
        'The dog chased the black cat.'
        >>> tree_targets(tree)
        [1, 2, None, 5, 5, 2, 2]
        >>> tree_targets(tree, relations=["nsubj"], direction="dependent")
        [None, None, 1, None, None, None, None]
        >>> tree_targets(tree, direction="dependent", several="all")
        [[], [0], [1, 5, 6], [], [], [3, 4], []]
    """
    if several not in SEVERAL:
        raise ValueError(f"several must be {' or '.join(map(repr, SEVERAL))}, got {several!r}.")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be {' or '.join(map(repr, DIRECTIONS))}, got {direction!r}.")
    if relations is not None and (isinstance(relations, str) or not relations):
        raise ValueError(f"relations must be a non-empty list, such as ['nsubj', 'obj'], got {relations!r}.")
    first_with: dict[tuple[int, int], int] = {}
    unit_of = [first_with.setdefault(span, word) for word, span in enumerate(tree.spans or ())]
    found: list[list[int]] = [[] for _ in tree.words]
    for word, (head, relation) in enumerate(zip(tree.heads, tree.relations)):
        if head is None or unit_of[head] == unit_of[word]:
            continue
        if relations is not None and not any(is_relation(relation, one, subtypes) for one in relations):
            continue
        at, to = unit_of[word], unit_of[head]
        if direction == "dependent":
            at, to = to, at
        found[at].append(to)
    if several == "all":
        return [sorted({*own}) for own in found]
    if direction == "head":
        return [own[0] if own else None for own in found]
    return [min(own, key=lambda to, at=at: abs(to - at)) if own else None for at, own in enumerate(found)]


@overload
def pharaoh_targets(
    links: Iterable[tuple[int, int]], num_words: int, several: Literal["first", "last", "none"] = "first"
) -> list[int | None]: ...


@overload
def pharaoh_targets(links: Iterable[tuple[int, int]], num_words: int, several: Literal["all"]) -> list[list[int]]: ...


def pharaoh_targets(links: Iterable[tuple[int, int]], num_words: int, several: str = "first") -> list[Any]:
    """Targets from a word alignment: the source word of each target word, or its source words, for cross-attention.

    Pass the tokens of the source as `keys` to [`align_targets`] or [`align_sparse_targets`].

    Args:
        links (iterable of `tuple[int, int]`): Links `(source position, target position)` of a sentence pair, as from
            [`read_pharaoh`] or [`symmetrize`].
        num_words (`int`): Number of target words.
        several (`str`): Which source word a target word with several links attends to: the `"first"`, the `"last"`,
            `"none"`, or `"all"`.

    Returns:
        `list[int | None]`: the source word of each target word, `None` without a link; with `several="all"`
        `list[list[int]]`: all source words of each target word, in ascending order.

    Raises:
        ValueError: if `several` is unknown, or a link names no target word.

    Example:
        >>> pharaoh_targets([(0, 1), (2, 0), (3, 0)], num_words=3)
        [2, 0, None]
        >>> pharaoh_targets([(0, 1), (2, 0), (3, 0)], num_words=3, several="all")
        [[2, 3], [0], []]
    """
    if several not in SEVERAL_LINKS:
        raise ValueError(f"several must be one of {', '.join(SEVERAL_LINKS)}, got {several!r}.")
    found: list[list[int]] = [[] for _ in range(num_words)]
    for source, target in sorted(set(links)):
        if source < 0 or not 0 <= target < num_words:
            raise ValueError(
                f"the link {source}-{target} does not fit {num_words} target words; links are (source, target)."
            )
        found[target].append(source)
    if several == "all":
        return found
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


@overload
def cluster_targets(
    clusters: Iterable[Iterable["Mention"]],
    num_words: int,
    words: str = "head",
    several: Literal["nearest"] = "nearest",
) -> list[int | None]: ...


@overload
def cluster_targets(
    clusters: Iterable[Iterable["Mention"]], num_words: int, words: str = "head", *, several: Literal["all"]
) -> list[list[int]]: ...


def cluster_targets(
    clusters: Iterable[Iterable["Mention"]], num_words: int, words: str = "head", several: str = "nearest"
) -> list[Any]:
    """Targets from coreference clusters: each mention attends to earlier mentions, or all others, of its cluster.

    The targets are the heads of mentions.

    Args:
        clusters (iterable of lists of [`Mention`]): Coreferent mentions.
        num_words (`int`): Number of words of the text.
        words (`str`): Which words of a mention attend: its `"head"`, or `"all"`. A word of several mentions has the
            targets of the shortest with targets.
        several (`str`): Which mentions are targets:

            - `"nearest"`: the nearest earlier mention, for [`align_targets`]. A mention is earlier if its head
              precedes the first word of the other; the nearest has the last head. The first mention of a cluster has
              no target.
            - `"all"`: all other mentions whose head is outside of the mention, for [`align_sparse_targets`].

    Returns:
        `list[int | None]`: target of each word; with `several="all"` `list[list[int]]`: targets of each word, in
        ascending order.

    Raises:
        ValueError: if `words` or `several` is unknown, or a mention is not within the text.

    Example:
        >>> from hf_attn_dynamics.data import Mention
        >>> cluster_targets([[Mention(0, 2, 1), Mention(3, 4, 3), Mention(5, 6, 5)]], num_words=6)
        [None, None, None, 1, None, 3]
        >>> cluster_targets([[Mention(0, 2, 1), Mention(3, 4, 3), Mention(5, 6, 5)]], num_words=6, several="all")
        [[], [3, 5], [], [1, 5], [], [1, 3]]
    """
    if several not in SEVERAL:
        raise ValueError(f"several must be {' or '.join(map(repr, SEVERAL))}, got {several!r}.")
    if words not in MENTION_WORDS:
        raise ValueError(f"words must be {' or '.join(map(repr, MENTION_WORDS))}, got {words!r}.")
    mentions: list[tuple[Mention, list[int]]] = []
    for cluster in clusters:
        members = list(cluster)
        for mention in members:
            if not 0 <= mention.start <= mention.head < mention.stop <= num_words:
                raise ValueError(f"{mention} does not fit a text of {num_words} words.")
            heads = {other.head for other in members}
            if several == "all":
                own = sorted(head for head in heads if not mention.start <= head < mention.stop)
            else:
                own = sorted(head for head in heads if head < mention.start)[-1:]
            if own:
                mentions.append((mention, own))
    found: list[list[int]] = [[] for _ in range(num_words)]
    for mention, own in sorted(mentions, key=lambda one: one[0].stop - one[0].start):
        for word in [mention.head] if words == "head" else range(mention.start, mention.stop):
            found[word] = found[word] or [*own]
    return found if several == "all" else [own[0] if own else None for own in found]


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


def _words_in(word_spans: Spans, span: tuple[int, int]) -> list[int]:
    start, stop = span
    words = [word for word, (begin, end) in enumerate(word_spans) if begin < stop and end > start]
    if not words:
        raise ValueError(f"the span {(start, stop)} has no word; spans are (start, stop) in characters of the text.")
    return words
