# Licensed under the Apache License, Version 2.0.
"""How much each head attends to tokens that stand in some relation to the query, beside uniform attention."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...models.number_checks import is_integer
from ..head_scores import HeadScores
from ..results import Result
from .base import AttentionCall, HeadMeans, Observer, neighbour_ids
from .excluded_tokens import SpecialTokens


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class TargetAttention(Result):
    """Mean attention of each head to the targets of an observer.

    Args:
        attention ([`HeadScores`]): Mean over queries of the sum of the weights on their targets, from 0 to 1; NaN for
            removed heads.
        chance (`dict[str, float]`): The same for uniform attention to all visible tokens, by kind of site; the mean
            over layers, which differ if some have a sliding window.
        counts (`dict[str, int]`): Number of queries, by kind of site; the largest one of all layers.
    """

    attention: HeadScores
    chance: dict[str, float]
    counts: dict[str, int]

    columns = ["site", "layer", "head", "attention", "chance"]

    def head_scores(self) -> dict[str, HeadScores]:
        """One number per head, by name: `attention`."""
        return {"attention": self.attention}

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws a map of layers × heads.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
        """
        return self.attention.plot(path, "attention to targets", title)

    def _repr_html_(self) -> str:
        """The map of the heads, for notebooks."""
        return self.attention._repr_html_()

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for site, *rest in self.attention.records():
            yield site, *rest, self.chance[site]


def most_queries(means: HeadMeans) -> dict[str, int]:
    """Number of queries by kind of site, in the layer where most queries count: windows hide some targets."""
    counts: dict[str, int] = {}
    for site, count in means.counts.items():
        counts[site.kind] = max(counts.get(site.kind, 0), int(count))
    return counts


class TargetWeights(Observer):
    """Mean attention to targets in self-attention.

    Args:
        name (`str`): Name of the result.
    """

    def __init__(self, name: str):
        self.name = name
        self._means, self._chance = HeadMeans(type(self).__name__), HeadMeans(type(self).__name__)

    def targets(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Targets of each query, a mask of shape `(sentences, rows, keys)`; and queries that count,
        `(sentences, rows)`."""
        raise NotImplementedError

    def update(self, call: AttentionCall) -> None:
        if call.site.kind == "cross":
            return  # queries and keys are tokens of different sentences
        targets, counted = self.targets(call)
        targets, counted = targets & call.visible_keys, counted & call.real_queries
        attention = (call.weights * targets[:, None]).sum(-1)
        self._means.add(call, attention, counted)
        chance = targets.sum(-1) / call.visible_keys.sum(-1).clamp(min=1)
        self._chance.add(call, chance[:, None].expand(attention.shape), counted)

    def compute(self) -> TargetAttention:
        # Chance is equal for all heads of a layer that are not removed.
        chance = {kind: table.nanmean().item() for kind, table in self._chance.compute().items()}
        return TargetAttention(self._means.compute(), chance, most_queries(self._means))


class InductionScore(TargetWeights):
    """How much each head attends to the token after an earlier occurrence of the query (Olsson et al. 2022).

    This is the prefix-matching score: in `A B … A`, the query is the last `A`, and its target is `B`. Queries count
    if they can attend to such a token. In encoders, the other occurrence may also come later. Random tokens that are
    repeated tell induction from other functions; in text, previous and repeated words raise the score of other heads
    as well. The result is [`TargetAttention`].

    Args:
        excluded_ids (`list[int]`, *optional*): Token ids that do not count as queries; by default
            `tokenizer.all_special_ids` of the tokenizer that [`observe`] is given.
        name (`str`): Name of the result.

    Raises:
        ValueError: while observing, if token ids are unknown, or neither `excluded_ids` nor a tokenizer was given.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from hf_attn_dynamics import observe
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> with torch.no_grad(), observe(model, InductionScore([])) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 5, 7]]))
        >>> seen.induction.counts, round(seen.induction.chance["decoder"], 3)  # targets are 7 and 8
        ({'decoder': 2}, 0.225)
    """

    def __init__(self, excluded_ids: Iterable[int] | None = None, *, name: str = "induction"):
        super().__init__(name)
        self.special = SpecialTokens(excluded_ids, type(self).__name__)

    def targets(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        _ = call.key_ids  # raises an error if ids are unknown
        before = neighbour_ids(call.keys, -1)[call.sentences]
        follows = before[:, None] == call.query_ids[..., None]
        # The token after the query itself comes after no other occurrence.
        distance = call.key_positions[:, None] - call.query_positions[..., None]
        targets = follows & (distance != 1) & call.visible_keys
        return targets, targets.any(-1) & ~self.special.among(call.query_ids)


class PreviousToken(TargetWeights):
    """How much each head attends to the token before the query. The result is [`TargetAttention`].

    The first token of a sentence does not count as a query. [`RelativePositions`] measures all offsets.

    Args:
        name (`str`): Name of the result.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from hf_attn_dynamics import observe
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> with torch.no_grad(), observe(model, PreviousToken()) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8]]))
        >>> seen.previous_token.counts, round(seen.previous_token.chance["decoder"], 3)
        ({'decoder': 2}, 0.417)
    """

    def __init__(self, *, name: str = "previous_token"):
        super().__init__(name)

    def targets(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        targets = call.key_positions[:, None] == call.query_positions[..., None] - 1
        return targets, (targets & call.visible_keys).any(-1)


class LocalAttention(TargetWeights):
    """How much each head attends to the last tokens, and to the first ones (Xiao et al. 2025, *DuoAttention*).

    Heads whose attention stays on the first `sinks` and the last `window` tokens are streaming heads: they need no
    other keys and values in a cache. DuoAttention finds them by gates that it trains, not by their attention. Queries
    count if they can attend to other tokens as well. In encoders, the window reaches in both directions. The result is
    [`TargetAttention`].

    Args:
        window (`int`): Number of tokens up to the query, which is one of them.
        sinks (`int`): Number of tokens at the beginning of the sentence.
        name (`str`): Name of the result.

    Raises:
        ValueError: if `window` is below 1, or `sinks` below 0.
    """

    def __init__(self, window: int = 64, sinks: int = 4, *, name: str = "local_attention"):
        for argument, value, least in (("window", window, 1), ("sinks", sinks, 0)):
            if not (is_integer(value) and value >= least):
                raise ValueError(f"{argument} must be a number of tokens, at least {least}, got {value!r}.")
        super().__init__(name)
        self.window, self.sinks = window, sinks

    def targets(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        distance = call.query_positions[..., None] - call.key_positions[:, None]
        targets = (distance.abs() < self.window) | (call.key_positions < self.sinks)[:, None]
        return targets, (~targets & call.visible_keys).any(-1)
