# Licensed under the Apache License, Version 2.0.
"""Attention sinks: attention to the first token of a sentence, and to nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..head_scores import HeadScores
from ..results import Result
from .base import AttentionCall, HeadMeans, Observer


if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 24  # of the number of visible tokens, by powers of two


@dataclass(frozen=True, eq=False)
class SinkAttention(Result):
    """Attention of each head to the first token, and to nothing, see [`AttentionSink`].

    Args:
        first ([`HeadScores`]): Mean attention to the first token of the sentence, from 0 to 1.
        nothing ([`HeadScores`]): Mean attention that falls on no token; 0 in models without learnt sinks.
        chance (`dict[str, float]`): `first` of uniform attention to all visible tokens, by kind of site.
        by_length (`dict[str, torch.Tensor]`): `first` of queries that see at least `lengths[i]` and fewer than
            `2 * lengths[i]` tokens, of shape `(layers, heads, lengths)` by kind of site; NaN without such queries.
    """

    first: HeadScores
    nothing: HeadScores
    chance: dict[str, float]
    by_length: dict[str, torch.Tensor]

    columns = ["site", "layer", "head", "first", "nothing", "chance"]

    @property
    def lengths(self) -> list[int]:
        """Numbers of visible tokens at which the columns of `by_length` begin: 1, 2, 4, …"""
        return [2**i for i in range(next(iter(self.by_length.values())).shape[-1])]

    def head_scores(self) -> dict[str, HeadScores]:
        """One number per head, by name: `first` and `nothing`."""
        return {"first": self.first, "nothing": self.nothing}

    def pictures(self) -> "dict[str, Callable[..., Figure]]":
        """`first`: a map of layers × heads; `by_length`: lines over the number of visible tokens."""
        from ..plots.heads import plot_sinks

        return {
            "first": partial(self.first.plot, name="attention to the first token"),
            "by_length": partial(plot_sinks, self),
        }

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for (site, *rest), (*_, nothing) in zip(self.first.records(), self.nothing.records()):
            yield site, *rest, nothing, self.chance[site]


class AttentionSink(Observer):
    """How much each head attends to the first token of the sentence, and to nothing (Xiao et al. 2024).

    Many heads attend to the first token where their own function does not apply; models with learnt sinks, such as
    gpt-oss, attend to no token instead. The first token itself does not count as a query, nor do queries that cannot
    see it, as under a sliding window. For other tokens without content see [`DelimiterAttention`]. Cross-attention is
    not measured. The result is [`SinkAttention`].

    Args:
        name (`str`): Name of the result.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from hf_attn_dynamics import observe
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> with torch.no_grad(), observe(model, AttentionSink()) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 9]]))
        >>> seen.sink.lengths, round(seen.sink.chance["decoder"], 3), seen.sink.by_length["decoder"].shape
        ([1, 2, 4], 0.361, torch.Size([2, 4, 3]))
    """

    def __init__(self, *, name: str = "sink"):
        self.name = name
        self._first, self._nothing, self._chance, self._lengths = (HeadMeans(type(self).__name__) for _ in range(4))

    def update(self, call: AttentionCall) -> None:
        if call.site.kind == "cross":
            return
        is_first = call.visible_keys & (call.key_positions == 0)[:, None]
        counted = call.real_queries & is_first.any(-1) & (call.query_positions > 0)
        first = (call.weights * is_first[:, None]).sum(-1)
        visible = call.visible_keys.sum(-1).clamp(min=1)
        self._first.add(call, first, counted)
        self._nothing.add(call, 1 - call.weights.sum(-1), counted)
        self._chance.add(call, (1 / visible)[:, None].expand(first.shape), counted)
        bins = F.one_hot(visible.log2().long().clamp(max=BINS - 1), BINS) * counted[..., None]
        sums = torch.einsum("shr,srb->hb", first.double(), bins.double())
        self._lengths.add_sums(call, sums, bins.sum((0, 1)))

    def compute(self) -> SinkAttention:
        tables = self._lengths.tables()
        seen = torch.stack([~table.isnan().flatten(0, 1).all(0) for table in tables.values()]).any(0)
        longest = 1 + max((i for i, one in enumerate(seen.tolist()) if one), default=0)
        return SinkAttention(
            self._first.compute(),
            self._nothing.compute(),
            {kind: table.nanmean().item() for kind, table in self._chance.compute().items()},
            {kind: table[..., :longest] for kind, table in tables.items()},
        )
