# Licensed under the Apache License, Version 2.0.
"""Statistics of maps of attention and of contributions: correlation, observers, types.

Maps are tensors of shape `(layers, batch, heads, query, key)`, as `local_contribution` and `global_contribution`
return them, and `attention_maps` for each kind of site: rows of tokens sum to 1, padding is 0, removed heads are NaN.
Tokens are the positions whose rows are not all zero.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.head_roles import HeadLayer, locate_heads
from ...models.head_sites import HeadSite, kinds_of
from ..head_scores import HeadScores
from ..observers.base import (
    AttentionCall,
    ObservedBatch,
    Observer,
    begin_pass,
    check_observers,
    end_pass,
    tell_tokenizer,
)
from ..results import Result
from ..running import unwrapped


if TYPE_CHECKING:
    from matplotlib.figure import Figure


MAP_TYPES = ("vertical", "diagonal", "vertical+diagonal", "block", "heterogeneous")


def tokens_of_maps(maps: torch.Tensor) -> torch.Tensor:
    """Padding mask of maps, `(batch, length)`: True at tokens.

    Raises:
        ValueError: if `maps` do not have five dimensions, or are not square.
    """
    if maps.dim() != 5 or maps.shape[-1] != maps.shape[-2]:
        raise ValueError(f"maps must have the shape (layers, batch, heads, query, key), got {tuple(maps.shape)}.")
    return maps.nan_to_num().abs().sum((0, 2, 4)) > 0


def look_back(*maps: torch.Tensor) -> bool:
    """Whether all maps are causal; False if no sentence has more than one token."""
    after = [(one.nan_to_num().triu(1) != 0).any() for one in maps]
    return bool((tokens_of_maps(maps[0]).sum(-1) > 1).any()) and not any(after)


@dataclass(frozen=True, eq=False)
class MapCorrelation(Result):
    """Correlation of two maps for each head, see [`correlate`]. Results of several batches can be added.

    Args:
        pearson, spearman (`HeadScores`): Mean over rows; NaN for removed heads and if no row counts.
        rows (`HeadScores`): Number of rows in the mean.
        constant (`HeadScores`): Number of rows left out because one of the two is constant.
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
        """Draws the correlations of all heads by layer.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
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
    """Applies a function to the tables of each kind of site."""
    if len(kinds := {tuple(one) for one in scores}) > 1:
        names = " and ".join(sorted(", ".join(one) for one in kinds))
        raise ValueError(f"correlations are of {names}; name the `kind` in correlate().")
    return HeadScores({kind: function(*(one[kind] for one in scores)) for kind in scores[0]})


def correlate(
    attention: torch.Tensor, contribution: torch.Tensor, causal: bool | None = None, kind: str | None = None
) -> MapCorrelation:
    """Correlation of attention with contributions for each head, averaged over rows (Pascal et al. 2021, section 6).

    Each row is correlated over the tokens of its sentence. Rows that are constant in one of the maps are counted and
    left out. Ties get the mean of their ranks.

    Args:
        attention, contribution (`torch.Tensor` of shape `(layers, batch, heads, query, key)`): Two maps of the same
            tokens.
        causal (`bool`, *optional*): Whether to correlate over the tokens up to the query only; by default, whether
            both maps are causal.
        kind (`str`, *optional*): Kind of site of the scores; by default `decoder` if causal, else `encoder`. Name it
            for batches in which every sentence has a single token.

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
    # Layer by layer, since ranks need memory.
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
        counted (`torch.Tensor`): Boolean mask of the values that count; broadcasts to the shape of the rows.

    Returns:
        Two `torch.Tensor` of shape `(…)`, float64. Ties get the mean of their ranks. NaN if one of the two rows is
        constant up to rounding.
    """
    varies = _varies(left, counted) & _varies(right, counted)
    left, right = left.double(), right.double()
    pairs = (left, right), (_ranks(left, counted), _ranks(right, counted))
    return tuple(_pearson(*pair, counted).where(varies, torch.nan) for pair in pairs)


def _varies(rows: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Which rows are not constant up to rounding."""
    largest = rows.masked_fill(~counted, -torch.inf).amax(-1)
    smallest = rows.masked_fill(~counted, torch.inf).amin(-1)
    return largest - smallest > 16 * torch.finfo(rows.dtype).eps * largest


def _ranks(rows: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Ranks of the values in their rows, from 1; ties get the mean of their ranks."""
    values = rows.masked_fill(~counted, torch.inf).contiguous()
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    return (below + up_to + 1).double() / 2


def _pearson(left: torch.Tensor, right: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Pearson correlation of rows over the values that count."""
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
    kind: str | None = None,
) -> None:
    """Passes maps to observers as if they were the attention weights of a forward pass.

    Every observer of attention can thus be applied to contributions: [`RelativePositions`] computes their histograms
    by relative position and the centers of mass (Pascal et al. 2021, section 8).

    Args:
        model (`PreTrainedModel`): The model of the maps.
        batch (`dict`): The batch of the maps.
        maps (`torch.Tensor` of shape `(layers, batch, heads, query, key)`): Attention or contributions.
        observers (`Observer`): The observers; each returns its result from `compute()`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): See [`observe`].
        kind (`str`, *optional*): Kind of site of the maps, `encoder` or `decoder`; only needed for encoder–decoders.

    Raises:
        ValueError: if the maps do not belong to the batch, there is no observer, `tokenizer` is not a tokenizer, or
            the model has no such kind, or several.

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
    model = unwrapped(model)
    kinds = [one for one in kinds_of({layer.site: 1 for layer in locate_heads(model)}) if one != "cross"]
    if kind not in kinds and (kind is not None or len(kinds) > 1):
        raise ValueError(f"kind must be {' or '.join(kinds)}, the site of the maps, got {kind!r}.")
    kind = kind or kinds[0]
    seen = ObservedBatch(model, dict(batch))
    tokens = seen.tokens(kind, (maps.shape[1], maps.shape[3]), maps.device)
    present = [(~table.isnan().flatten(2).any(-1).any(0)).nonzero().flatten().tolist() for table in maps]
    layers = [
        HeadLayer(HeadSite(kind, number), "", model, model, maps.shape[2], heads, 0, 1)
        for number, heads in enumerate(present)
    ]
    begin_pass(observers, seen)
    for layer, table in zip(layers, maps):
        if layer.heads:
            whole = slice(0, maps.shape[1]), slice(0, maps.shape[3])
            call = AttentionCall(
                seen, layer, layers, table[:, layer.heads], tokens, tokens, *whole, causal=kind == "decoder"
            )
            for observer in observers:
                observer.update(call)
    end_pass(observers, seen)


def map_types(maps: torch.Tensor, segments: torch.Tensor | None = None, threshold: float = 0.5) -> torch.Tensor:
    """Classifies maps into the five types of Kovaleva et al. (2019) by a rule.

    The rule computes three fractions of the mass of a map, each in excess of the mass of uniform rows (in decoders,
    rows that are uniform up to the query), and scaled so that the maximum is 1:
        v   in the two columns with the most mass (vertical)
        d   within one token of the query, outside of these columns (diagonal), in excess of uniform rows there
        b   in the segment of the query, if there are two or more segments (block)

    If v + d reaches the threshold, a map is vertical or diagonal, whichever is greater, or both if the smaller is at
    least a third of the greater. Otherwise it is block if b reaches the threshold, and else heterogeneous.

    Args:
        maps (`torch.Tensor` of shape `(layers, batch, heads, query, key)`): Attention or contributions.
        segments (`torch.Tensor` of shape `(batch, length)`, *optional*): Segment of each token, e.g. `token_type_ids`;
            without it, no map is a block.
        threshold (`float`): Threshold, in (0, 1).

    Returns:
        `torch.Tensor` of shape `(layers, batch, heads)`: indices into `MAP_TYPES` (vertical, diagonal,
        vertical+diagonal, block, heterogeneous); -1 for removed heads and sentences without tokens.

    Raises:
        ValueError: if `segments` has another shape, or `threshold` is out of range.

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
        vertical, diagonal = _line_fractions(own, uniform)
        block = torch.zeros_like(vertical)
        if segments is not None:
            parts = segments[sentence].to(maps.device)[tokens]
            same = (parts[:, None] == parts).expand_as(own)
            block = _excess_fraction(own, same, torch.ones_like(same), uniform)
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


def _line_fractions(maps: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """v and d of maps `(…, query, key)`; `uniform` is the map of uniform rows."""
    length = maps.shape[-1]
    heaviest = maps.nan_to_num().sum(-2).topk(min(2, length), dim=-1).indices
    columns = torch.zeros(*maps.shape[:-2], length, dtype=torch.bool, device=maps.device).scatter_(-1, heaviest, True)
    columns = columns[..., None, :].expand_as(maps)
    indices = torch.arange(length, device=maps.device)
    near = (indices - indices[:, None]).abs() <= 1
    everywhere = torch.ones_like(near).expand_as(maps)
    vertical = _excess_fraction(maps, columns, everywhere, uniform)
    return vertical, _excess_fraction(maps, near & ~columns, ~columns, uniform)


def _excess_fraction(
    maps: torch.Tensor, region: torch.Tensor, whole: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Fraction of the mass in a region, in excess of what uniform rows would have there out of `whole`; at most 1."""
    mass, available = (maps.where(cells, 0).sum((-2, -1)) / maps.shape[-1] for cells in (region, whole))
    expected, total = ((uniform * cells).sum((-2, -1)) for cells in (region, whole))
    part = expected / total.where(total > 0, 1)
    # 0 where the region is all of `whole`.
    return ((mass - part * available) / (1 - part)).where(part < 1 - 1e-9, 0).clamp(min=0)
