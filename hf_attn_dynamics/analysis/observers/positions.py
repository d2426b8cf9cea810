# Licensed under the Apache License, Version 2.0.
"""Attention by relative position."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from ...models.number_checks import is_integer
from ..head_scores import HeadScores
from ..results import Result
from .base import AttentionCall, HeadMeans, Observer
from .excluded_tokens import ExcludedTokens


if TYPE_CHECKING:
    from matplotlib.figure import Figure


POSITIONAL_THRESHOLD = 0.9  # fraction of queries whose largest weight is at one offset, of a positional head


class PositionalHead(NamedTuple):
    """A head whose largest weight is mostly at one offset, key − query; `share` is the fraction of its queries."""

    site: str
    layer: int
    head: int
    offset: int
    share: float


@dataclass(frozen=True, eq=False)
class RelativeAttention(Result):
    """Attention by relative position, see [`RelativePositions`].

    Both fields hold tensors of shape `(layers, heads, 2 * limit + 1)` by kind of site, float64 on the CPU. Index
    `limit + offset` is the offset key − query: −1 is the previous token. Heads have their original numbering; removed
    heads are NaN.

    Args:
        attention (`dict[str, torch.Tensor]`): Mean attention weight over the queries that have a token at this offset;
            NaN if none has.
        largest (`dict[str, torch.Tensor]`): Fraction of queries whose largest weight is at this offset; the sum is
            less than 1 if some are beyond the limit.
    """

    attention: dict[str, torch.Tensor]
    largest: dict[str, torch.Tensor]

    columns = ["site", "layer", "head", "offset", "attention", "largest"]

    def __post_init__(self):
        attention, largest = ({kind: one.shape for kind, one in tables.items()} for tables in vars(self).values())
        if not attention or attention != largest:
            raise ValueError("attention and largest weights differ in shape, or are empty")

    @property
    def limit(self) -> int:
        """The largest offset of the tables."""
        return next(iter(self.attention.values())).shape[-1] // 2

    @property
    def offsets(self) -> torch.Tensor:
        """Offsets along the last dimension, from −limit to limit."""
        return torch.arange(-self.limit, self.limit + 1)

    def plot(self, path: str | Path | None = None, heads: Sequence[tuple] | None = None, title: str = "") -> "Figure":
        """Draws the mean attention by offset.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            heads (`list`, *optional*): Heads (site, layer, head); by default the eight most positional ones.
            title (`str`): Model and data; the picture itself says what it shows.
        """
        from ..plots.heads import plot_relative_attention

        heads = self.best_offset_share().ranked()[:8] if heads is None else heads
        return plot_relative_attention(self, heads, path, min(6, self.limit), title)

    def positional(self, threshold: float = POSITIONAL_THRESHOLD) -> list[PositionalHead]:
        """Positional heads: the largest weight is at one offset for most tokens (Voita et al. 2019, section 5.1).

        Args:
            threshold (`float`): Minimum fraction of queries, > 0 and ≤ 1.

        Returns:
            `list[PositionalHead]`: by kind of site, layer and head.

        Raises:
            ValueError: if `threshold` is out of range.
        """
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, got {threshold}.")
        found = []
        for kind, table in self.largest.items():
            fractions, indices = table.nan_to_num().max(-1)
            for layer, head in (fractions >= threshold).nonzero().tolist():
                offset = indices[layer, head].item() - self.limit
                found.append(PositionalHead(kind, layer, head, offset, fractions[layer, head].item()))
        return found

    def best_offset_share(self) -> HeadScores:
        """Fraction of queries whose largest weight is at the most frequent offset of the head."""
        return HeadScores({kind: table.amax(-1) for kind, table in self.largest.items()})

    def center_of_mass(self) -> HeadScores:
        """`Σ offset · attention / Σ attention` over the offsets (Pascal et al. 2021, section 7).

        Negative values mean that a head attends more to earlier tokens. Attention beyond the limit is left out.
        """
        tables = {}
        for kind, table in self.attention.items():
            attention = table.nan_to_num()
            # 0 / 0 without attention within the limit.
            tables[kind] = (attention * self.offsets).sum(-1) / attention.sum(-1)
        return HeadScores(tables)

    def head_scores(self) -> dict[str, HeadScores]:
        """One number per head, by name: `best_offset_share` and `center_of_mass`."""
        return {"best_offset_share": self.best_offset_share(), "center_of_mass": self.center_of_mass()}

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for kind, attention in self.attention.items():
            layers, heads, _ = attention.shape
            for layer in range(layers):
                for head in range(heads):
                    columns = self.offsets, attention[layer, head], self.largest[kind][layer, head]
                    for row in zip(*(column.tolist() for column in columns)):
                        yield kind, layer, head, *row


class RelativePositions(Observer):
    """Attention by relative position.

    For each head and offset (key − query, in tokens): the mean attention weight over the queries with a token at that
    offset (Pascal et al. 2021, section 7), and the fraction of queries whose largest weight is there (Voita et al.
    2019, section 5.1). The result is [`RelativeAttention`].

    In cross-attention, offset 0 is the key with the same index as the query. Under a causal mask, later tokens count
    with weight 0.

    Args:
        limit (`int`): The largest offset of the tables, ≥ 1. Queries whose largest weight is farther away count in the
            denominator only.
        excluded_ids (`list[int]`, *optional*): Tokens that do not count as targets of the largest weight, as in
            [`HeadConfidence`]; queries without attention to other tokens do not count.
        name (`str`): Name of the result.

    Raises:
        ValueError: if `limit` is below 1 or `excluded_ids` does not hold token ids; while observing, if tokens are
            excluded but the token ids are unknown: without `input_ids`, or with a cache filled outside of
            `generate()`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import observe
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertModel(config)
        >>> with torch.no_grad(), observe(model, RelativePositions(limit=5, excluded_ids=[3])) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 3], [9, 6, 4, 3]]))
        >>> seen.relative_positions.attention["encoder"].shape
        torch.Size([2, 4, 11])
    """

    def __init__(
        self, limit: int = 63, excluded_ids: Iterable[int] | None = None, *, name: str = "relative_positions"
    ):
        if not is_integer(limit) or limit < 1:
            raise ValueError(f"limit must be an integer of at least 1, got {limit!r}.")
        self.name = name
        self.limit = limit
        self.special = ExcludedTokens(excluded_ids, type(self).__name__)
        self.attention, self.largest = HeadMeans(type(self).__name__), HeadMeans(type(self).__name__)

    def update(self, call: AttentionCall) -> None:
        self._add_attention(call)
        self._add_largest(call)

    def _add_attention(self, call: AttentionCall) -> None:
        """Adds the weights at all offsets within the limit, a band of the attention matrix."""
        _, heads, _, keys = call.weights.shape
        span = min(self.limit, max(call.keys.reach, call.queries.reach) - 1)
        offsets = torch.arange(-span, span + 1, device=call.weights.device)
        wanted = call.query_positions[..., None] + offsets  # (sentences, rows, offsets)
        first = call.keys.before[call.sentences, None]  # earlier keys have left the cache: their weight is 0
        exists = (
            (wanted >= 0) & (wanted < first + call.real_keys.sum(-1)[:, None, None]) & call.real_queries[..., None]
        )
        order = (wanted - first).clamp(0, keys - 1)
        index = call.keys.tokens_first[call.sentences].gather(1, order.flatten(1)).view_as(wanted)
        band = call.weights.gather(-1, index[:, None].expand(-1, heads, -1, -1))
        band.mul_((exists & (wanted >= first))[:, None].to(band.dtype))
        sums = band.sum(0).sum(1, dtype=torch.float64)  # ten times as fast as both at once
        beyond = [self.limit - span] * 2
        self.attention.add_sums(call, F.pad(sums, beyond), F.pad(exists.sum((0, 1)), beyond))

    def _add_largest(self, call: AttentionCall) -> None:
        weights, index = call.largest(self.special.ids)
        heads = weights.shape[1]
        counted = call.real_queries[:, None] & (weights > 0)
        offset = call.key_positions[:, None].expand(-1, heads, -1).gather(2, index) - call.query_positions[:, None]
        counted_here = counted & (offset.abs() <= self.limit)
        bins = (offset + self.limit).clamp_(0, 2 * self.limit)
        sums = torch.zeros(heads, 2 * self.limit + 1, dtype=torch.float64, device=weights.device)
        sums.scatter_add_(1, bins.transpose(0, 1).flatten(1), counted_here.double().transpose(0, 1).flatten(1))
        self.largest.add_sums(call, sums, counted.sum((0, 2))[:, None])

    def compute(self) -> RelativeAttention:
        return RelativeAttention(self.attention.tables(), self.largest.tables())
