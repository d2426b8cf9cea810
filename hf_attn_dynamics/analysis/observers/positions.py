# Licensed under the Apache License, Version 2.0.
"""Where heads look, seen from the token that attends: attention by relative position."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from ...models.number_checks import is_integer
from ..head_scores import HeadScores
from ..results import Result
from .base import AttentionCall, HeadMeans, ObservedBatch, Observer
from .excluded_tokens import ExcludedTokens


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PositionalHead(NamedTuple):
    """A head whose largest weight is mostly at one offset, key − query; `share` of its rows."""

    site: str
    layer: int
    head: int
    offset: int
    share: float


@dataclass(frozen=True, eq=False)
class RelativeAttention(Result):
    """Attention by relative position, see [`RelativePositions`].

    All by kind of site, as tensors of shape `(layers, heads, 2 * limit + 1)`: at index `limit + offset` the offset
    of the key from the query, −1 for the token before. In the original numbering, float64 on the CPU; NaN where a head
    is removed.

    Args:
        attention (`dict[str, torch.Tensor]`): Mean attention weight over the tokens that have a token at this offset;
            NaN where none has.
        largest (`dict[str, torch.Tensor]`): Share of tokens whose largest weight is at this offset; those beyond the
            limit are missing from a sum of 1.
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
        """The largest offset that is told apart."""
        return next(iter(self.attention.values())).shape[-1] // 2

    @property
    def offsets(self) -> torch.Tensor:
        """Offsets along the last dimension, from −limit to limit."""
        return torch.arange(-self.limit, self.limit + 1)

    def plot(self, path: str | Path | None = None, heads: Sequence[tuple] | None = None) -> "Figure":
        """Draws mean attention by offset, and saves it if there is a path.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            heads (`list`, *optional*): Heads (site, layer, head); by default the eight most positional ones.
        """
        from ..plots.heads import plot_relative_attention

        heads = self.best_offset_share().ranked()[:8] if heads is None else heads
        return plot_relative_attention(self, heads, path, min(6, self.limit))

    def positional(self, threshold: float = 0.9) -> list[PositionalHead]:
        """Positional heads: the largest weight is at one offset for most tokens (Voita et al. 2019, section 5.1).

        Args:
            threshold (`float`): Share of tokens, > 0 and ≤ 1.

        Returns:
            `list[PositionalHead]`: with at least this share, by kind, layer and head.

        Raises:
            ValueError: if `threshold` is no such share.
        """
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, got {threshold}.")
        found = []
        for kind, table in self.largest.items():
            shares, places = table.nan_to_num().max(-1)
            for layer, head in (shares >= threshold).nonzero().tolist():
                offset = places[layer, head].item() - self.limit
                found.append(PositionalHead(kind, layer, head, offset, shares[layer, head].item()))
        return found

    def best_offset_share(self) -> HeadScores:
        """Share of tokens whose largest weight is at the head's most frequent offset: how positional it is."""
        return HeadScores({kind: table.amax(-1) for kind, table in self.largest.items()})

    def center_of_mass(self) -> HeadScores:
        """`Σ offset · attention / Σ attention` over the offsets (Pascal et al. 2021, section 7).

        Below zero, a head attends more to what comes before. Attention beyond the limit does not enter.
        """
        tables = {}
        for kind, table in self.attention.items():
            attention = table.nan_to_num()
            # No attention within the limit has no center: 0 / 0.
            tables[kind] = (attention * self.offsets).sum(-1) / attention.sum(-1)
        return HeadScores(tables)

    def head_scores(self) -> dict[str, HeadScores]:
        """What there is to say in one number for each head: `best_offset_share` and `center_of_mass`."""
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
    """Attention by relative position: where heads look, seen from the token that attends.

    For each head and offset (key − query, counted in tokens, sub-words apart): the mean attention weight over the
    tokens for which a token at that offset exists (Pascal et al. 2021, section 7), and the share of tokens whose
    largest weight is there (Voita et al. 2019, section 5.1). The result is [`RelativeAttention`].

    In cross-attention, offsets are taken from the token of the same number. Where attention is causal, keys after the
    query exist and get none.

    Args:
        limit (`int`): The largest offset that is told apart, ≥ 1. Larger ones count in the number of tokens only.
        excluded_ids (`list[int]`, *optional*): Tokens that do not count as targets when the largest weight is sought,
            as in [`HeadConfidence`]; rows that attend to no other do not count.
        name (`str`): Under which the result is found.

    Raises:
        ValueError: if `limit` is below 1, or `excluded_ids` are no token ids; while observing, if tokens are
            excluded, but the model reads no token ids, or a cache holds earlier ones outside of `generate()`.

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
        self.excluded = ExcludedTokens(excluded_ids, type(self).__name__)
        self.attention, self.largest = HeadMeans(type(self).__name__), HeadMeans(type(self).__name__)

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.excluded.use_tokenizer(tokenizer)

    def begin(self, batch: ObservedBatch) -> None:
        self.excluded.begin(batch)

    def update(self, call: AttentionCall) -> None:
        self._add_attention(call)
        self._add_largest(call)

    def _add_attention(self, call: AttentionCall) -> None:
        """Looks up the keys at all offsets that can occur: a band of the matrix."""
        _, heads, _, keys = call.weights.shape
        span = min(self.limit, max(call.keys.reach, call.queries.reach) - 1)
        offsets = torch.arange(-span, span + 1, device=call.weights.device)
        wanted = call.query_positions[..., None] + offsets  # (sentences, rows, offsets)
        first = call.keys.before[call.sentences, None]  # keys before it are no longer there, and get nothing
        exists = (
            (wanted >= 0) & (wanted < first + call.real_keys.sum(-1)[:, None, None]) & call.real_queries[..., None]
        )
        places = (wanted - first).clamp(0, keys - 1)
        index = call.keys.tokens_first[call.sentences].gather(1, places.flatten(1)).view_as(wanted)
        band = call.weights.gather(-1, index[:, None].expand(-1, heads, -1, -1))
        band.mul_((exists & (wanted >= first))[:, None].to(band.dtype))
        sums = band.sum(0).sum(1, dtype=torch.float64)  # ten times as fast as both at once
        beyond = [self.limit - span] * 2
        self.attention.add_sums(call, F.pad(sums, beyond), F.pad(exists.sum((0, 1)), beyond))

    def _add_largest(self, call: AttentionCall) -> None:
        weights, index = call.largest(self.excluded.ids)
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
