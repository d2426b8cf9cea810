# Licensed under the Apache License, Version 2.0.
"""Observers of where attention goes, and how surely: confidence, entropy, distances of heads, relative positions."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..models.head_guidance import elements_on
from ..models.head_roles import HeadLayer
from ..models.head_sites import SITE_KINDS, HeadSite, is_integer, kinds_of
from .head_scores import HeadScores
from .observers import AttentionCall, HeadMeans, ObservedBatch, ObservedTokens, Observer, check_seen
from .observing import MAX_WEIGHTS
from .results import Result, as_lists, as_tensor


logger = logging.get_logger(__name__)

END_OF_SENTENCE = ("eos_token_id", "sep_token_id")  # what configurations call it


# ---------------------------------------------------------------------------------------------------------------------
# Numbers of heads
# ---------------------------------------------------------------------------------------------------------------------


class HeadConfidence(Observer):
    """Confidence of heads: the mean over tokens of the largest attention weight (Voita et al. 2019, section 4.1).

    The end of sentence does not count as a target, since it is no real token; as a query, it counts. The weights of
    other tokens are not divided by what it leaves. The result is [`HeadScores`], from 0 to 1.

    Args:
        excluded_ids (`list[int]`, *optional*): Token ids that do not count as targets; `[]` for none. By default
            `eos_token_id` and `sep_token_id` of the model's configuration; if it names neither, all tokens count, and
            a warning says so.
        name (`str`): Under which the result is found.

    Raises:
        ValueError: if `excluded_ids` are no token ids; while observing, if tokens are excluded, but the model reads
            no token ids, or a cache holds earlier ones outside of `generate()`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import observe
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = BertModel(config)
        >>> with torch.no_grad(), observe(model, HeadConfidence(excluded_ids=[3])) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 3], [9, 6, 4, 3]]))
        >>> seen.confidence["encoder"].shape
        torch.Size([2, 4])
    """

    def __init__(self, excluded_ids: Iterable[int] | None = None, *, name: str = "confidence"):
        self.name = name
        self.excluded = _ExcludedTokens(excluded_ids, type(self).__name__)
        self.means = HeadMeans(type(self).__name__)

    def begin(self, batch: ObservedBatch) -> None:
        self.excluded.begin(batch)

    def update(self, call: AttentionCall) -> None:
        weights, _ = call.largest(self.excluded.ids)
        self.means.add(call, weights)

    def compute(self) -> HeadScores:
        return self.means.compute()


class HeadEntropy(Observer):
    """Mean over tokens of the entropy of their attention weights, `−Σ w ln w`, in nats.

    All tokens count, as queries and as keys. The result is [`HeadScores`], from 0 (one key has all attention) to the
    logarithm of the number of tokens.

    Args:
        name (`str`): Under which the result is found.
    """

    def __init__(self, *, name: str = "entropy"):
        self.name = name
        self.means = HeadMeans(type(self).__name__)

    def update(self, call: AttentionCall) -> None:
        self.means.add(call, -_logs(_above_zero(call.weights)).sum(-1))

    def compute(self) -> HeadScores:
        return self.means.compute()


def _above_zero(weights: torch.Tensor) -> torch.Tensor:
    """Weights whose logarithm is finite; those that are 0 stay so small that w ln w is next to 0."""
    return weights.clamp(min=torch.finfo(weights.dtype).tiny)


def _logs(weights: torch.Tensor) -> torch.Tensor:
    """w ln w of weights above 0."""
    # The logarithm is vectorised, and `torch.special.entr` is not.
    return weights.log().mul_(weights)


class _ExcludedTokens:
    """Tokens that do not count as targets.

    Args:
        ids (`list[int]`, *optional*): Which; by default those that the configuration calls the end of a sentence.
        user (`str`): What asks, for messages.
    """

    def __init__(self, ids: Iterable[int] | None, user: str):
        self.given = None if ids is None else checked_token_ids(ids)
        self.ids = self.given or ()
        self.user = user

    def begin(self, batch: ObservedBatch) -> None:
        """Looks up what the model calls the end of a sentence."""
        if self.given is not None:
            return
        self.ids = end_of_sentence_ids(batch.model.config)
        if not self.ids:
            logger.warning_once(
                f"the configuration of {type(batch.model).__name__} names no end of sentence, so that all tokens "
                f"count as targets; name those that do not, as in {self.user}(excluded_ids=[tokenizer.sep_token_id]), "
                "or pass [] if all do."
            )


def checked_token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Ids that `excluded_ids` names, each once.

    Raises:
        ValueError: if they are no token ids.
    """
    values = list(ids) if isinstance(ids, Iterable) else None
    if values is None or not all(is_integer(one) and one >= 0 for one in values):
        raise ValueError(f"excluded_ids must be a list of token ids, or None, got {ids!r}.")
    return tuple(sorted(set(map(int, values))))


def end_of_sentence_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Token ids that a configuration names as the end of a sentence: `eos_token_id` and `sep_token_id`."""
    named = [getattr(config, name, None) for name in END_OF_SENTENCE]
    lists = [ids if isinstance(ids, (list, tuple)) else [ids] for ids in named if ids is not None]
    return tuple(sorted({one for ids in lists for one in ids}))


# ---------------------------------------------------------------------------------------------------------------------
# Distances of heads
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadDistances(Result):
    """How differently heads attend, see [`HeadDistance`]. All by kind of site: `encoder`, `decoder`, `cross`.

    Args:
        heads (`dict[str, list[tuple[int, int]]]`): The heads that are there, as (layer, head) in the original
            numbering, in this order.
        distances (`dict[str, torch.Tensor]`): Mean Jensen–Shannon divergences of shape `(heads, heads)`, float64 on
            the CPU, in nats: symmetric, from 0 to ln 2, 0 on the diagonal.
    """

    heads: dict[str, list[tuple[int, int]]]
    distances: dict[str, torch.Tensor]

    columns = ["site", "layer", "head", "other_layer", "other_head", "distance"]

    def embedding(self, kind: str, dimensions: int = 2) -> torch.Tensor:
        """Points whose squared distances are as close to those of the heads as can be: classical scaling.

        The Jensen–Shannon divergence is the square of a distance in Euclidean space (Fuglede & Topsøe 2004), so that
        with as many dimensions as heads the distances are exact.

        Args:
            kind (`str`): Which heads.
            dimensions (`int`): Dimensions of the points.

        Returns:
            `torch.Tensor` of shape `(heads, dimensions)`, float64: centred, along the principal axes; the coordinate
            of largest size on each axis is positive.

        Raises:
            ValueError: if there are no heads of this kind, or `dimensions` is not from 1 to their number.
        """
        if kind not in self.distances:
            raise ValueError(f"kind must be one of {', '.join(map(repr, self.distances))}, got {kind!r}.")
        squared = self.distances[kind]
        if not 1 <= dimensions <= len(squared):
            raise ValueError(f"dimensions must be from 1 to {len(squared)}, the number of heads, got {dimensions}.")
        centred = squared - squared.mean(0)
        products = (centred - centred.mean(1, keepdim=True)) / -2
        values, vectors = torch.linalg.eigh(products)
        # Eigenvalues ascend, and may be below zero by rounding.
        points = vectors[:, -dimensions:].flip(1) * values[-dimensions:].flip(0).clamp(min=0).sqrt()
        extreme = points.gather(0, points.abs().argmax(0, keepdim=True))
        return points * torch.where(extreme < 0, -1.0, 1.0)

    def head_scores(self) -> dict[str, HeadScores]:
        """One number for each head: `mean`, the mean distance to the other heads of its kind; NaN if there is none."""
        tables = {}
        for kind, labels in self.heads.items():
            layers, heads = (max(numbers) + 1 for numbers in zip(*labels))
            tables[kind] = torch.full((layers, heads), math.nan, dtype=torch.float64)
            means = self.distances[kind].sum(1) / (len(labels) - 1)
            for (layer, head), mean in zip(labels, means):
                tables[kind][layer, head] = mean
        return {"mean": HeadScores(tables)}

    def to_dict(self) -> dict[str, Any]:
        """Everything in a form that JSON can hold."""
        return {
            "heads": {kind: [list(label) for label in labels] for kind, labels in self.heads.items()},
            "distances": {kind: as_lists(table) for kind, table in self.distances.items()},
        }

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "HeadDistances":
        heads = {kind: [(layer, head) for layer, head in labels] for kind, labels in values["heads"].items()}
        distances = {kind: as_tensor(table) for kind, table in values["distances"].items()}
        for kind, labels in heads.items():
            if distances[kind].shape != (len(labels), len(labels)):
                raise ValueError(f"{len(labels)} heads, but distances of shape {tuple(distances[kind].shape)}")
        return cls(heads, distances)

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for kind, labels in self.heads.items():
            for label, distances in zip(labels, self.distances[kind].tolist()):
                for other, distance in zip(labels, distances):
                    yield kind, *label, *other, distance


class HeadDistance(Observer):
    """How differently every two heads of a kind of site attend (Clark et al. 2019, section 6).

    The mean over tokens of the Jensen–Shannon divergence of two heads' attention weights,
    `H((p + q) / 2) − (H(p) + H(q)) / 2`, in nats, for all pairs of heads of all layers. Pairs are many: instead of all
    tokens, one or some of each sentence are looked at, which stand for the others: an estimate from two thousand
    sentences is within about 0.01. Which ones, follows from `seed` and the tokens of the sentence, so that batches and
    padding change nothing. Their rows are kept until the pass ends. The result is [`HeadDistances`].

    Args:
        rows_per_sentence (`int`, *optional*): How many tokens of a sentence to look at; `None` for all, which keeps
            the attention maps of one pass.
        seed (`int`): Chooses the tokens.
        name (`str`): Under which the result is found.

    Raises:
        ValueError: if `rows_per_sentence` is below 1; while observing, if heads have been removed meanwhile.
    """

    def __init__(self, rows_per_sentence: int | None = 1, seed: int = 0, *, name: str = "distance"):
        if rows_per_sentence is not None and not (is_integer(rows_per_sentence) and rows_per_sentence >= 1):
            raise ValueError(
                f"rows_per_sentence must be an integer of at least 1, or None for all, got {rows_per_sentence!r}."
            )
        self.name = name
        self.rows_per_sentence = rows_per_sentence
        self.seed = seed
        self.heads: dict[str, list[tuple[int, int]]] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        self._rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # of each kind: see `sample_tokens`
        self._layers: dict[HeadSite, HeadLayer] = {}
        self._weights: dict[HeadSite, torch.Tensor] = {}  # `(heads, batch, rows, keys)`, of this pass
        self._starts: dict[HeadSite, int] = {}  # places of their first keys

    def begin(self, batch: ObservedBatch) -> None:
        self._forget()

    def update(self, call: AttentionCall) -> None:
        kind = call.site.kind
        if kind not in self._rows:
            self._rows[kind] = sample_tokens(call.queries, self.rows_per_sentence, self.seed)
        chosen = self._rows[kind][0].to(call.weights.device)
        _, heads, height, keys = call.weights.shape
        if call.site not in self._weights:
            self._layers[call.site] = call.layer
            self._starts[call.site] = call.keys.start
            self._weights[call.site] = call.weights.new_zeros(heads, *chosen.shape, keys)
        places = chosen[call.sentences] - call.rows.start
        within = (places >= 0) & (places < height)  # other rows come with other calls
        index = places.clamp(0, height - 1)[:, None, :, None].expand(-1, heads, -1, keys)
        rows = call.weights.gather(2, index).mul_(within[:, None, :, None])
        self._weights[call.site][:, call.sentences] += rows.transpose(0, 1)

    def end(self, batch: ObservedBatch) -> None:
        for kind in kinds_of(self._weights):
            layers = [self._layers[site] for site in sorted(self._weights) if site.kind == kind]
            heads = [(layer.site.layer, head) for layer in layers for head in layer.heads]
            if self.heads.setdefault(kind, heads) != heads:
                raise ValueError(
                    f"{type(self).__name__} has seen other heads at the {kind} before; use a new one where heads have "
                    "been removed."
                )
            _, share = self._rows[kind]
            # Layers may be on several devices, and their caches hold more or less of what came before.
            starts = [self._starts[layer.site] for layer in layers]
            weights = [self._weights[layer.site].to(share.device) for layer in layers]
            weights = [F.pad(one, (start - min(starts), 0)) for one, start in zip(weights, starts)]
            keys = max(one.shape[-1] for one in weights)
            weights = torch.cat([F.pad(one, (0, keys - one.shape[-1])) for one in weights]).flatten(1, 2)
            self.sums[kind] = self.sums.get(kind, 0) + _weighted_divergences(weights, share.flatten())
            self.counts[kind] = self.counts.get(kind, 0) + share.sum()
        self._forget()

    def compute(self) -> HeadDistances:
        check_seen(type(self).__name__, self.sums)
        kinds = [kind for kind in SITE_KINDS if kind in self.sums]
        upper = {kind: self.sums[kind].cpu() / self.counts[kind].cpu() for kind in kinds}
        return HeadDistances(
            {kind: list(self.heads[kind]) for kind in kinds}, {kind: table + table.T for kind, table in upper.items()}
        )


def sample_tokens(tokens: ObservedTokens, count: int | None, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of each sentence, and how many each stands for.

    Args:
        tokens ([`ObservedTokens`]): Sentences; where their token ids are not known, all of one length are alike.
        count (`int`, *optional*): How many to choose; of shorter sentences, and with `None`, all.
        seed (`int`): The choice is a function of it and of the tokens of the sentence, wherever it stands.

    Returns:
        Indices, and numbers of tokens, float64: the length of the sentence over the number that was chosen, 0 where
        that is exceeded. Both have the shape `(batch, chosen)`.
    """
    real = tokens.real
    count = min(count or real.shape[1], real.shape[1])
    ids = torch.zeros_like(tokens.positions) if tokens.ids is None else tokens.ids.long()
    sentence = _scrambled(_scrambled(ids + seed) + tokens.positions).where(real, 0).sum(1, keepdim=True)
    largest = torch.iinfo(torch.int64).max
    order = _scrambled(sentence + tokens.positions).masked_fill(~real, largest)
    chosen = order.topk(count, largest=False).indices
    lengths = real.sum(1, keepdim=True)
    share = lengths.double() / lengths.clamp(1, count)
    return chosen, share * real.gather(1, chosen)


def _scrambled(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers as if drawn at random from 0 to 2⁶³ − 1, but always the same for the same ones (as in SplitMix64)."""
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB), (31, 0x1E3779B97F4A7C15)):
        numbers = ((numbers ^ (numbers >> shift)) + 1) * factor  # what exceeds 64 bits is dropped
    return (numbers ^ (numbers >> 32)) & torch.iinfo(torch.int64).max


def _weighted_divergences(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Sum over rows of share × Jensen–Shannon divergence of all pairs of heads.

    Args:
        weights (`torch.Tensor` of shape `(heads, rows, keys)`): Attention weights.
        share (`torch.Tensor` of shape `(rows,)`): What each row counts, float64.

    Returns:
        `torch.Tensor` of shape `(heads, heads)`: above the diagonal, with 0 elsewhere; float64.
    """
    heads, _, keys = weights.shape
    total = share.sum()
    # All is a sum over rows and keys, with the share of its row for each weight.
    weights, share = weights.flatten(1), share.to(weights.dtype).repeat_interleave(keys)
    alone, both = total.new_zeros(heads), total.new_zeros(heads, heads)
    most = elements_on(weights.device, MAX_WEIGHTS)
    size = max(1, most // heads)
    for some, counted in zip(weights.split(size, 1), share.split(size)):
        some = _above_zero(some)
        alone += _logs(some) @ counted
        step = max(1, most // some.numel())
        for start in range(0, heads, step):
            pairs = some[start : start + step, None] + some[start:]
            both[start : start + step, start:] += _logs(pairs) @ counted
    # The entropy of m = (p + q) / 2 is ln 2 − Σ (p + q) ln(p + q) / 2; rounding may lead below zero.
    divergences = total * math.log(2) - (both - alone[:, None] - alone) / 2
    return divergences.clamp_(min=0).triu_(1)


# ---------------------------------------------------------------------------------------------------------------------
# Relative positions
# ---------------------------------------------------------------------------------------------------------------------


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

    @property
    def limit(self) -> int:
        """The largest offset that is told apart."""
        return next(iter(self.attention.values())).shape[-1] // 2

    @property
    def offsets(self) -> torch.Tensor:
        """Offsets along the last dimension, from −limit to limit."""
        return torch.arange(-self.limit, self.limit + 1)

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

    def to_dict(self) -> dict[str, Any]:
        """Everything in a form that JSON can hold; `None` in place of NaN."""
        return {name: {kind: as_lists(table) for kind, table in tables.items()} for name, tables in vars(self).items()}

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "RelativeAttention":
        result = cls(
            **{name: {kind: as_tensor(table) for kind, table in tables.items()} for name, tables in values.items()}
        )
        shapes = {name: {kind: table.shape for kind, table in tables.items()} for name, tables in vars(result).items()}
        if not result.attention or shapes["attention"] != shapes["largest"]:
            raise ValueError("attention and largest weights differ in shape, or are empty")
        return result

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
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
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
        self.excluded = _ExcludedTokens(excluded_ids, type(self).__name__)
        self.attention, self.largest = HeadMeans(type(self).__name__), HeadMeans(type(self).__name__)

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
