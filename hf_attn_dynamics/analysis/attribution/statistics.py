# Licensed under the Apache License, Version 2.0.
"""What maps of attention and of contributions have in common, and what they look like.

Maps are tensors of shape `(layers, batch, heads, query, key)` as `attention_maps` has them for each kind of site, and
`local_contribution` and `global_contribution` return them: rows of tokens sum to 1, padding is 0, removed heads are
NaN. Tokens are the positions whose rows are not all zero.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.head_roles import HeadLayer, locate_heads
from ...models.head_sites import HeadSite
from ..head_scores import HeadScores
from ..observers.base import AttentionCall, ObservedBatch, Observer, check_observers, tell_tokenizer
from ..results import Result
from .trace import reader_of


if TYPE_CHECKING:
    from matplotlib.figure import Figure


MAP_TYPES = ("vertical", "diagonal", "vertical+diagonal", "block", "heterogeneous")


def tokens_of_maps(maps: torch.Tensor) -> torch.Tensor:
    """Which positions of maps are tokens, `(batch, length)`.

    Raises:
        ValueError: if `maps` do not have five dimensions, or are not square.
    """
    if maps.dim() != 5 or maps.shape[-1] != maps.shape[-2]:
        raise ValueError(f"maps must have the shape (layers, batch, heads, query, key), got {tuple(maps.shape)}.")
    return maps.nan_to_num().abs().sum((0, 2, 4)) > 0


def look_back(*maps: torch.Tensor) -> bool:
    """Whether no token of any map attends to what comes after it, as in decoders; False if no token has another."""
    after = [(one.nan_to_num().triu(1) != 0).any() for one in maps]
    return bool((tokens_of_maps(maps[0]).sum(-1) > 1).any()) and not any(after)


@dataclass(frozen=True, eq=False)
class MapCorrelation(Result):
    """How alike the rows of two maps are, head by head, see [`correlate`]. Results of several batches can be added.

    Args:
        pearson, spearman (`HeadScores`): Mean over rows; NaN where no row counts or a head is removed.
        rows (`HeadScores`): Number of rows in the mean.
        constant (`HeadScores`): Number of rows that are left out, since one of the two is constant.
    """

    pearson: HeadScores
    spearman: HeadScores
    rows: HeadScores
    constant: HeadScores

    def __add__(self, other: "MapCorrelation") -> "MapCorrelation":
        rows = _combined(lambda one, two: one + two, self.rows, other.rows)
        means = [
            _combined(
                lambda one, n, two, m: (one.nan_to_num() * n + two.nan_to_num() * m) / (n + m),
                *(mine, self.rows, theirs, other.rows),
            )
            for mine, theirs in ((self.pearson, other.pearson), (self.spearman, other.spearman))
        ]
        return MapCorrelation(*means, rows, _combined(lambda one, two: one + two, self.constant, other.constant))

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws the correlations of all heads by layer, and saves it if there is a path.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Title of the picture.
        """
        from ..plots.attribution import plot_map_correlation

        return plot_map_correlation(self, path, title)

    columns = ["statistic", "site", "layer", "head", "value"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for name, scores in vars(self).items():
            for record in scores.records():
                yield name, *record


def _combined(function: Any, *scores: HeadScores) -> HeadScores:
    """A function of tables, kind by kind."""
    if len(kinds := {tuple(one) for one in scores}) > 1:
        names = " and ".join(sorted(", ".join(one) for one in kinds))
        raise ValueError(f"correlations are filed under {names}; name the `kind` in correlate().")
    return HeadScores({kind: function(*(one[kind] for one in scores)) for kind in scores[0]})


def correlate(
    attention: torch.Tensor, contribution: torch.Tensor, causal: bool | None = None, kind: str | None = None
) -> MapCorrelation:
    """Mean correlation of attention with contributions, row by row, of each head (Pascal et al. 2021, section 6).

    A row is correlated over the tokens of its sentence. Rows that are constant in one of the two have no correlation:
    they are counted and left out. Ties have the mean of their ranks.

    Args:
        attention, contribution (`torch.Tensor` of shape `(layers, batch, heads, query, key)`): Two maps of the same
            tokens.
        causal (`bool`, *optional*): Whether rows are correlated over the tokens up to their own only; by default,
            whether both maps are zero after it, as those of decoders are.
        kind (`str`, *optional*): Kind of site under which the scores are filed; by default `decoder` if causal, else
            `encoder`. Sentences of one token do not tell: name it there.

    Returns:
        [`MapCorrelation`]

    Raises:
        ValueError: if the maps have different shapes or different tokens.

    Example:
        >>> maps = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]).view(1, 1, 1, 3, 3)
        >>> same = correlate(maps, maps)
        >>> same.pearson["encoder"].item(), same.rows["encoder"].item()
        (1.0, 3.0)
        >>> correlate(maps, torch.full_like(maps, 1 / 3)).constant["encoder"].item()
        3.0
    """
    if attention.shape != contribution.shape:
        raise ValueError(
            f"attention and contribution must have one shape, got {tuple(attention.shape)} and "
            f"{tuple(contribution.shape)}."
        )
    real = tokens_of_maps(attention)
    if not torch.equal(real, tokens_of_maps(contribution)):
        raise ValueError("attention and contribution have different tokens; compute both from the same batch.")
    causal = look_back(attention, contribution) if causal is None else causal
    kind = kind or ("decoder" if causal else "encoder")
    pairs = real[:, None, :, None] & real[:, None, None, :]  # (batch, 1, query, key)
    pairs = pairs.tril() if causal else pairs
    tables = [[], [], [], []]
    # Layer by layer: ranks take memory.
    for one, two in zip(attention, contribution):
        rows = real[:, None] & ~(one.isnan() | two.isnan()).any(-1)
        correlations = correlate_rows(one, two, pairs)
        counted = rows & ~correlations[0].isnan()
        for table, values in zip(tables, correlations):
            table.append(values.where(counted, 0).sum((0, 2)) / counted.sum((0, 2)))
        tables[2].append(counted.sum((0, 2)))
        tables[3].append((rows & ~counted).sum((0, 2)))
    return MapCorrelation(*(HeadScores({kind: torch.stack(table)}) for table in tables))


def correlate_rows(
    left: torch.Tensor, right: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pearson and Spearman correlation of rows.

    Args:
        left, right (`torch.Tensor` of shape `(…, length)`): The rows.
        counted (`torch.Tensor`): Which of their values count; boolean, of a shape that can be expanded to theirs.

    Returns:
        Two `torch.Tensor` of shape `(…)`, float64. Ties have the mean of their ranks. NaN where one of the two rows
        does not vary by more than rounding.
    """
    varies = _varies(left, counted) & _varies(right, counted)
    left, right = left.double(), right.double()
    pairs = (left, right), (_ranks(left, counted), _ranks(right, counted))
    return tuple(_pearson(*pair, counted).where(varies, torch.nan) for pair in pairs)


def _varies(rows: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Which rows have values that differ by more than rounding."""
    largest = rows.masked_fill(~counted, -torch.inf).amax(-1)
    smallest = rows.masked_fill(~counted, torch.inf).amin(-1)
    return largest - smallest > 16 * torch.finfo(rows.dtype).eps * largest


def _ranks(rows: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Rank of each value among those of its row, from 1; equal ones have the mean of their ranks."""
    values = rows.masked_fill(~counted, torch.inf).contiguous()
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    return (below + up_to + 1).double() / 2


def _pearson(left: torch.Tensor, right: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Correlation of rows over the values that count."""
    count = counted.sum(-1, keepdim=True).clamp(min=1)
    left, right = (
        (one - one.where(counted, 0).sum(-1, keepdim=True) / count).where(counted, 0) for one in (left, right)
    )
    return torch.nn.functional.cosine_similarity(left, right, dim=-1, eps=1e-300)


def show_maps(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    maps: torch.Tensor,
    *observers: Observer,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Shows maps to observers of attention, as if a forward pass had just attended so.

    What can be known of attention can be known of contributions: with [`RelativePositions`], their histograms by
    relative position, and the centers of these (Pascal et al. 2021, section 8).

    Args:
        model (`PreTrainedModel`): The model that the maps are of.
        batch (`dict`): What they were computed from.
        maps (`torch.Tensor` of shape `(layers, batch, heads, query, key)`): Attention or contributions.
        observers (`Observer`): What looks on; each has its result as `compute()`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): As of [`observe`].

    Raises:
        ValueError: if the maps and the batch do not fit, there is no observer, or `tokenizer` is none.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import RelativePositions, local_contribution
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model, batch = BertModel(config), {"input_ids": torch.tensor([[5, 7, 8, 3]])}
        >>> positions = RelativePositions(limit=3)
        >>> show_maps(model, batch, local_contribution(model, batch), positions)
        >>> positions.compute().center_of_mass()["encoder"].shape
        torch.Size([2, 4])
    """
    check_observers(observers, "show_maps(model, batch, maps, RelativePositions())")
    tell_tokenizer(observers, tokenizer)
    tokens_of_maps(maps)
    reader = reader_of(model)
    kind = locate_heads(reader)[0].site.kind
    seen = ObservedBatch(reader, dict(batch))
    tokens = seen.tokens(kind, (maps.shape[1], maps.shape[3]), maps.device)
    present = [(~table.isnan().flatten(2).any(-1).any(0)).nonzero().flatten().tolist() for table in maps]
    layers = [
        HeadLayer(HeadSite(kind, number), "", reader, reader, maps.shape[2], heads, 0, 1)
        for number, heads in enumerate(present)
    ]
    for observer in observers:
        observer.begin(seen)
    for layer, table in zip(layers, maps):
        if layer.heads:
            whole = slice(0, maps.shape[1]), slice(0, maps.shape[3])
            call = AttentionCall(
                seen, layer, layers, table[:, layer.heads], tokens, tokens, *whole, causal=kind == "decoder"
            )
            for observer in observers:
                observer.update(call)
    for observer in observers:
        observer.end(seen)


def map_types(maps: torch.Tensor, segments: torch.Tensor | None = None, threshold: float = 0.5) -> torch.Tensor:
    """Which of the five types of Kovaleva et al. (2019) each map is, by a rule.

    Three shares of the mass of a map, each less what uniform rows would have there (of decoders, whose maps are zero
    after the query: rows that are uniform up to it), and scaled so that all of it is 1:
        v   in the two columns with the most mass (vertical)
        d   within one token of the query, outside these columns (diagonal), less a uniform part of what is outside
        b   in the segment of the query, where there are two or more segments (block)

    If v + d reaches the threshold, a map is vertical or diagonal, whichever is greater, or both if the smaller is at
    least a third of the greater. Otherwise it is block if b reaches the threshold, and heterogeneous if not.

    Args:
        maps (`torch.Tensor` of shape `(layers, batch, heads, query, key)`): Attention or contributions.
        segments (`torch.Tensor` of shape `(batch, length)`, *optional*): Segment of each token, e.g. `token_type_ids`;
            without them no map is a block.
        threshold (`float`): In (0, 1).

    Returns:
        `torch.Tensor` of shape `(layers, batch, heads)`: indices into `MAP_TYPES` (vertical, diagonal,
        vertical+diagonal, block, heterogeneous); -1 where a head is removed or a sentence has no token.

    Raises:
        ValueError: if `segments` or `threshold` does not fit.

    Example:
        >>> to_first = torch.eye(1, 8).expand(8, 8)
        >>> to_next = torch.eye(8).roll(1, 1)
        >>> maps = torch.stack([to_first, to_next, (to_first + to_next) / 2, torch.full((8, 8), 1 / 8)])
        >>> [MAP_TYPES[index] for index in map_types(maps[None, None])[0, 0]]
        ['vertical', 'diagonal', 'vertical+diagonal', 'heterogeneous']
    """
    real = tokens_of_maps(maps)
    if segments is not None and segments.shape != real.shape:
        raise ValueError(f"segments must have the shape {tuple(real.shape)}, got {tuple(segments.shape)}.")
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must lie between 0 and 1, got {threshold}.")
    causal = look_back(maps)
    types = torch.full(maps.shape[:3], -1, device=maps.device)
    for sentence, tokens in _tokens(real):
        own = maps[:, sentence][:, :, tokens[:, None], tokens].double()
        uniform = torch.ones_like(own[0, 0])
        uniform = uniform.tril() if causal else uniform
        uniform = uniform / uniform.sum(-1, keepdim=True)
        vertical, diagonal = _line_shares(own, uniform)
        block = torch.zeros_like(vertical)
        if segments is not None:
            parts = segments[sentence].to(maps.device)[tokens]
            same = (parts[:, None] == parts).expand_as(own)
            block = _share(own, same, torch.ones_like(same), uniform)
        smaller, greater = torch.minimum(vertical, diagonal), torch.maximum(vertical, diagonal)
        found = torch.where(block >= threshold, MAP_TYPES.index("block"), MAP_TYPES.index("heterogeneous"))
        lines = torch.where(vertical > diagonal, MAP_TYPES.index("vertical"), MAP_TYPES.index("diagonal"))
        lines = torch.where(3 * smaller >= greater, MAP_TYPES.index("vertical+diagonal"), lines)
        found = torch.where(vertical + diagonal >= threshold, lines, found)
        types[:, sentence] = found.masked_fill(own.isnan().any(-1).any(-1), -1)
    return types


def _tokens(real: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for sentence, of_sentence in enumerate(real):
        if of_sentence.any():
            yield sentence, of_sentence.nonzero().squeeze(-1)


def _line_shares(maps: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """v and d of maps `(…, query, key)`; `uniform` is the map of uniform rows."""
    length = maps.shape[-1]
    heaviest = maps.nan_to_num().sum(-2).topk(min(2, length), dim=-1).indices
    columns = torch.zeros(*maps.shape[:-2], length, dtype=torch.bool, device=maps.device).scatter_(-1, heaviest, True)
    columns = columns[..., None, :].expand_as(maps)
    places = torch.arange(length, device=maps.device)
    near = (places - places[:, None]).abs() <= 1
    everywhere = torch.ones_like(near).expand_as(maps)
    return _share(maps, columns, everywhere, uniform), _share(maps, near & ~columns, ~columns, uniform)


def _share(maps: torch.Tensor, where: torch.Tensor, among: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Share of all mass in some places, in excess of a uniform part of what is `among` others; at most 1."""
    mass, there = (maps.where(places, 0).sum((-2, -1)) / maps.shape[-1] for places in (where, among))
    expected, of = ((uniform * places).sum((-2, -1)) for places in (where, among))
    part = expected / of.where(of > 0, 1)
    # Where the places are all there are, nothing is told.
    return ((mass - part * there) / (1 - part)).where(part < 1 - 1e-9, 0).clamp(min=0)
