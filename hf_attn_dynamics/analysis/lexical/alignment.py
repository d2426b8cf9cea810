# Licensed under the Apache License, Version 2.0.
"""Word alignments: both directions symmetrized, from attention, Pharaoh files, alignment error rate."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from ..._files import read_text, write_text
from ...models.token_mask import non_padding
from .diagonal_prior import DiagonalPrior
from .ibm_model import IbmModel1, Link, Links, Pair, sides_of


METHODS = ("intersection", "union", "grow-diag", "grow-diag-final", "grow-diag-final-and")
# Steps (target, source) to neighbouring links, in the order of Moses: first those that share a word with the link.
NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def symmetrize(
    forward: Sequence[Iterable[Link]], backward: Sequence[Iterable[Link]], method: str = "grow-diag"
) -> list[Links]:
    """Combines the alignments of both translation directions (Och & Ney 2003; Koehn et al. 2003, section 3.1).

    With F the links of the forward and B those of the backward alignment of a sentence pair:

    - `"intersection"`: F ∩ B. Two models that link each word once give one-to-one links.
    - `"union"`: F ∪ B.
    - `"grow-diag"`: starts with F ∩ B and adds links of F ∪ B that neighbour a link, horizontally, vertically or
      diagonally, if the source word or the target word has no link yet; until there is nothing to add.
    - `"grow-diag-final"`: then adds links of F, and after them of B, whose source word or target word has no link.
    - `"grow-diag-final-and"`: the same for links both of whose words have none.

    The order of additions is that of Moses (`symal`): links are visited by target position, then source position;
    those that are added behind the current one are visited in the same pass. Neighbours (target, source) are tried in
    the order (-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1). All methods but the last two give
    the same links with `forward` and `backward` exchanged. Since the order begins with the target side, growing can
    give other links if source and target exchange roles.

    Args:
        forward (list of links for each pair): Links `(source position, target position)` of a model of the target
            words given the source words, such as `IbmModel1().fit(pairs).align(pairs)`.
        backward (list of links for each pair): Links of a model of the opposite direction, also as `(source position,
            target position)`: reverse the links of an [`IbmModel1`] that was fitted with source and target exchanged.
            [`align_both_directions`] does both.
        method (`str`): One of the above.

    Returns:
        `list` of `list[tuple[int, int]]`: for each pair the links `(source position, target position)`, sorted.

    Raises:
        ValueError: if the method is unknown, or the numbers of pairs differ.

    Example:
        >>> forward, backward = [[(0, 0), (0, 1), (2, 2)]], [[(0, 0), (1, 1), (2, 2), (3, 5)]]
        >>> symmetrize(forward, backward, "intersection")
        [[(0, 0), (2, 2)]]
        >>> symmetrize(forward, backward, "grow-diag")
        [[(0, 0), (0, 1), (1, 1), (2, 2)]]
        >>> symmetrize(forward, backward, "union")
        [[(0, 0), (0, 1), (1, 1), (2, 2), (3, 5)]]
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if len(forward) != len(backward):
        raise ValueError(
            f"forward has alignments of {len(forward)} sentence pairs, backward of {len(backward)}; give both for the "
            "same pairs, with an empty list where there is no link."
        )
    return [_symmetrized(set(one), set(other), method) for one, other in zip(forward, backward)]


def _symmetrized(forward: set[Link], backward: set[Link], method: str) -> Links:
    if method == "intersection":
        return sorted(forward & backward)
    if method == "union":
        return sorted(forward | backward)
    links = _grown(forward & backward, forward | backward)
    if method != "grow-diag":
        covered = any if method == "grow-diag-final-and" else all
        sources, targets = {source for source, _ in links}, {target for _, target in links}
        for candidates in (forward - backward, backward - forward):
            for source, target in sorted(candidates - links, key=_by_target):
                if not covered((source in sources, target in targets)):
                    links.add((source, target))
                    sources.add(source)
                    targets.add(target)
    return sorted(links)


def _by_target(link: Link) -> Link:
    return link[1], link[0]


def _grown(links: set[Link], union: Collection[Link]) -> set[Link]:
    """Adds the neighbours of links that are in the union and have a word without a link."""
    queue = sorted(map(_by_target, links))  # (target, source)
    targets, sources = {target for target, _ in queue}, {source for _, source in queue}
    has_grown = True
    while has_grown:
        has_grown = False
        index = 0
        while index < len(queue):
            target, source = queue[index]
            for step_target, step_source in NEIGHBOURS:
                point = target + step_target, source + step_source
                is_covered = point[0] in targets and point[1] in sources
                if _by_target(point) in union and not is_covered:
                    position = bisect_left(queue, point)
                    queue.insert(position, point)
                    index += position <= index
                    targets.add(point[0])
                    sources.add(point[1])
                    has_grown = True
            index += 1
    return {_by_target(point) for point in queue}


def align_both_directions(
    pairs: Iterable[Pair],
    method: str = "grow-diag",
    iterations: int = 5,
    null_word: bool = True,
    training_pairs: Iterable[Pair] | None = None,
    prior: DiagonalPrior | None = None,
) -> list[Links]:
    """Fits an [`IbmModel1`] in each direction, aligns sentence pairs with both, and combines the alignments.

    Args:
        pairs (iterable of `(source, target)`): Tokens of each sentence and of its translation.
        method (`str`): How the directions are combined, see [`symmetrize`].
        iterations (`int`): Number of E and M steps of each model.
        null_word (`bool`): Whether words of either side can align to the NULL word.
        training_pairs (iterable of `(source, target)`, *optional*): Pairs to fit the models on; defaults to `pairs`.
        prior ([`DiagonalPrior`], *optional*): Prior of the positions in both models.

    Returns:
        `list` of `list[tuple[int, int]]`: for each pair the links `(source position, target position)`, sorted.

    Raises:
        ValueError: if the method is unknown, or as [`IbmModel1`] does.

    Example:
        >>> pairs = [("das Haus", "the house"), ("das Buch", "the book"), ("ein Buch", "a book")]
        >>> align_both_directions([(source.split(), target.split()) for source, target in pairs], "intersection")
        [[(0, 0), (1, 1)], [(0, 0), (1, 1)], [(0, 0), (1, 1)]]
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    pairs = list(zip(*sides_of(pairs)))
    training = pairs if training_pairs is None else list(zip(*sides_of(training_pairs)))
    forward = IbmModel1(null_word, prior).fit(training, iterations).align(pairs)
    exchanged = [(target, source) for source, target in pairs]
    training = [(target, source) for source, target in training]
    backward = IbmModel1(null_word, prior).fit(training, iterations).align(exchanged)
    return symmetrize(forward, [[(source, target) for target, source in links] for links in backward], method)


def attention_alignment(
    attention: torch.Tensor, source_mask: torch.Tensor | None = None, target_mask: torch.Tensor | None = None
) -> list[Links]:
    """Alignment from attention: each target token with the source token of the largest weight.

    Args:
        attention (`torch.Tensor` of shape `(batch, target length, source length)`): Weights of one head; row t
            predicts target token t.
        source_mask (`torch.Tensor` of shape `(batch, source length)`, *optional*): 0 at source tokens without links.
        target_mask (`torch.Tensor` of shape `(batch, target length)`, *optional*): 0 at target tokens without links.

    Returns:
        `list` of `list[tuple[int, int]]`: for each sentence the links `(source position, target position)`, from 0,
        sorted. The first of several equal weights is chosen; target tokens with NaN weights, as from
        [`optimal_attention`] without a label, have no link.

    Raises:
        ValueError: if the shapes do not match.

    Example:
        >>> attention_alignment(torch.tensor([[[0.2, 0.8], [0.9, 0.1]]]))
        [[(0, 1), (1, 0)]]
    """
    if attention.dim() != 3:
        raise ValueError(f"attention must have shape (batch, target, source), got {tuple(attention.shape)}.")
    batch, targets, sources = attention.shape
    masks = {}
    for name, mask, length in (("source_mask", source_mask, sources), ("target_mask", target_mask, targets)):
        if mask is not None and mask.shape != (batch, length):
            raise ValueError(f"{name} must have shape {(batch, length)}, got {tuple(mask.shape)}.")
        masks[name] = non_padding(mask, (batch, length), attention.device)
    source_mask, target_mask = masks["source_mask"], masks["target_mask"]
    weights = attention.masked_fill(~source_mask[:, None], -torch.inf)
    best = weights.argmax(-1)
    has_link = target_mask & source_mask.any(-1, keepdim=True) & ~weights.isnan().any(-1)
    return [
        sorted((source, target) for target, source in enumerate(row) if linked[target])
        for row, linked in zip(best.tolist(), has_link.tolist())
    ]


def alignment_error_rate(
    predicted: Sequence[Iterable[tuple[int, int]]],
    sure: Sequence[Iterable[tuple[int, int]]],
    possible: Sequence[Iterable[tuple[int, int]]] | None = None,
) -> float:
    """Alignment error rate of a corpus: `1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|)` (Och & Ney 2003).

    Links are counted over all sentence pairs together; duplicates count once.

    Args:
        predicted (list of links for each pair): A, links `(source position, target position)`.
        sure (list of links for each pair): S, the sure links.
        possible (list of links for each pair, *optional*): P, the possible links, which always include the sure
            links; only these by default.

    Returns:
        `float`: from 0 (all sure links and only possible links are predicted) to 1.

    Raises:
        ValueError: if the numbers of pairs differ, or there are neither predicted nor sure links.

    Example:
        >>> alignment_error_rate([[(0, 0), (1, 2)]], sure=[[(0, 0), (1, 1)]], possible=[[(1, 2)]])
        0.25
    """
    possible = sure if possible is None else possible
    for name, links in (("sure", sure), ("possible", possible)):
        if len(links) != len(predicted):
            raise ValueError(
                f"predicted has alignments of {len(predicted)} sentence pairs, {name} of {len(links)}; give both for "
                "the same pairs, with an empty list where there is no link."
            )
    hits = total = 0
    for links, must, may in zip(map(set, predicted), map(set, sure), map(set, possible)):
        hits += len(links & must) + len(links & (may | must))
        total += len(links) + len(must)
    if not total:
        raise ValueError("predicted and sure hold no link at all; the error rate is undefined.")
    return 1 - hits / total


def write_pharaoh(path: str | Path, alignments: Iterable[Iterable[tuple[int, int]]]) -> None:
    """Writes alignments in the Pharaoh format: a line for each sentence pair with links such as `0-0 1-2`.

    Args:
        path (`str` or `Path`): The file.
        alignments (list of links for each pair): Links `(source position, target position)` from 0, in any order.
    """
    lines = (" ".join(f"{source}-{target}" for source, target in sorted(links)) + "\n" for links in alignments)
    write_text(path, "".join(lines))


def read_pharaoh(path: str | Path, possible: bool = False) -> list[Links]:
    """Reads alignments in the Pharaoh format.

    Gold alignments can mark links as possible, by `?` or `p` in place of the hyphen, as in `0-0 1?2`.

    Args:
        path (`str` or `Path`): A file with a line for each sentence pair; a blank line is a pair without links.
        possible (`bool`): Whether to include possible links.

    Returns:
        `list` of `list[tuple[int, int]]`: for each line the links `(source position, target position)`, sorted.

    Raises:
        ValueError: if a word of the file is not a link.
    """
    alignments = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        links = []
        for word in line.split():
            match = re.fullmatch(r"(\d+)([-?p])(\d+)", word)
            if not match:
                raise ValueError(f"{path}, line {number}: {word!r} is not a link; write source-target, such as 0-1.")
            if possible or match[2] == "-":
                links.append((int(match[1]), int(match[3])))
        alignments.append(sorted(links))
    return alignments
