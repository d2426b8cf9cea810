# Licensed under the Apache License, Version 2.0.
"""Distances between heads: Jensen–Shannon divergences of their attention."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ...models.block_sizes import elements_on
from ...models.head_roles import HeadLayer
from ...models.head_sites import SITE_KINDS, HeadSite, kinds_of
from ...models.number_checks import is_integer
from ..entropy import above_zero, times_log
from ..head_scores import HeadScores
from ..results import Result
from .base import AttentionCall, ObservedBatch, ObservedTokens, Observer, check_seen
from .observation import MAX_WEIGHTS


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class HeadDistances(Result):
    """Distances between heads by kind of site (`encoder`, `decoder`, `cross`), see [`HeadDistance`].

    Args:
        heads (`dict[str, list[tuple[int, int]]]`): The heads as (layer, head) in the original numbering, in the order
            of the rows and columns of `distances`.
        distances (`dict[str, torch.Tensor]`): Mean Jensen–Shannon divergences of shape `(heads, heads)`, float64 on
            the CPU, in nats: symmetric, from 0 to ln 2, 0 on the diagonal.
        shapes (`dict[str, tuple[int, int]]`, *optional*): Original number of layers and of heads in a layer; by
            default up to the last ones of `heads`.
    """

    heads: dict[str, list[tuple[int, int]]]
    distances: dict[str, torch.Tensor]
    shapes: dict[str, tuple[int, int]] | None = None

    columns = ["site", "layer", "head", "other_layer", "other_head", "distance"]

    def __post_init__(self):
        for kind, labels in self.heads.items():
            if self.distances[kind].shape != (len(labels), len(labels)):
                raise ValueError(f"{len(labels)} heads, but distances of shape {tuple(self.distances[kind].shape)}")
        if self.shapes is not None:
            # Lists, in a file.
            object.__setattr__(self, "shapes", {kind: tuple(shape) for kind, shape in self.shapes.items()})

    def embedding(self, kind: str, dimensions: int = 2) -> torch.Tensor:
        """Embeds the heads by classical multidimensional scaling: squared distances approximate the divergences.

        The Jensen–Shannon divergence is a squared Euclidean distance (Fuglede & Topsøe 2004), so the distances are
        exact with as many dimensions as heads.

        Args:
            kind (`str`): Kind of site.
            dimensions (`int`): Dimensions of the points.

        Returns:
            `torch.Tensor` of shape `(heads, dimensions)`, float64: centered, along the principal axes; the coordinate
            with the largest absolute value on each axis is positive.

        Raises:
            ValueError: if there are no heads of this kind, or `dimensions` is not from 1 to their number.
        """
        if kind not in self.distances:
            raise ValueError(f"kind must be one of {', '.join(map(repr, self.distances))}, got {kind!r}.")
        squared = self.distances[kind]
        if not 1 <= dimensions <= len(squared):
            raise ValueError(f"dimensions must be from 1 to {len(squared)}, the number of heads, got {dimensions}.")
        centered = squared - squared.mean(0)
        products = (centered - centered.mean(1, keepdim=True)) / -2
        values, vectors = torch.linalg.eigh(products)
        # Eigenvalues are in ascending order; rounding can make them negative.
        points = vectors[:, -dimensions:].flip(1) * values[-dimensions:].flip(0).clamp(min=0).sqrt()
        extreme = points.gather(0, points.abs().argmax(0, keepdim=True))
        return points * torch.where(extreme < 0, -1.0, 1.0)

    def pictures(self) -> "dict[str, Callable[..., Figure]]":
        """`distances`: heads as points; heads with similar attention are near each other."""
        from ..plots.heads import plot_head_distances

        return {"distances": partial(plot_head_distances, self)}

    def head_scores(self) -> dict[str, HeadScores]:
        """One number per head: `mean`, the mean distance to the other heads of its kind; NaN for a single head and for
        removed heads."""
        tables = {}
        for kind, labels in self.heads.items():
            shape = (self.shapes or {}).get(kind) or [max(numbers) + 1 for numbers in zip(*labels)]
            tables[kind] = torch.full([*shape], math.nan, dtype=torch.float64)
            means = self.distances[kind].sum(1) / (len(labels) - 1)
            for (layer, head), mean in zip(labels, means):
                tables[kind][layer, head] = mean
        return {"mean": HeadScores(tables)}

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for kind, labels in self.heads.items():
            for label, distances in zip(labels, self.distances[kind].tolist()):
                for other, distance in zip(labels, distances):
                    yield kind, *label, *other, distance


class HeadDistance(Observer):
    """Distances between the attention of all pairs of heads of a kind of site (Clark et al. 2019, section 6).

    Computes the mean over tokens of the Jensen–Shannon divergence of two heads' attention weights,
    `H((p + q) / 2) − (H(p) + H(q)) / 2`, in nats, for all pairs of heads of all layers. Attention to learnt sinks
    counts as attention to one more token. Since pairs are many, the mean
    is estimated from a sample of the tokens of each sentence; with two thousand sentences, the error is about 0.01.
    The sample depends only on `seed` and the tokens of the sentence, not on batching or padding. The sampled rows are
    kept in memory during the forward pass. The result is [`HeadDistances`].

    Args:
        rows_per_sentence (`int`, *optional*): Number of tokens to sample from each sentence; `None` for all, which
            keeps whole attention maps in memory during the forward pass.
        seed (`int`): Random seed of the sample.
        name (`str`): Name of the result.

    Raises:
        ValueError: if `rows_per_sentence` is below 1; while observing, if heads have been removed in between.
    """

    def __init__(self, rows_per_sentence: int | None = 1, seed: int = 0, *, name: str = "distance"):
        self.name = name
        self.rows = SampledRows(rows_per_sentence, seed)
        self.heads: dict[str, list[tuple[int, int]]] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}

    def begin(self, batch: ObservedBatch) -> None:
        self.rows.forget()

    def update(self, call: AttentionCall) -> None:
        self.rows.add(call)

    def end(self, batch: ObservedBatch) -> None:
        for kind, (heads, weights, row_weights) in self.rows.collect().items():
            if self.heads.setdefault(kind, heads) != heads:
                raise ValueError(
                    f"{type(self).__name__} has seen other heads at the {kind} before; create a new one after heads "
                    "have been removed."
                )
            self.sums[kind] = self.sums.get(kind, 0) + weighted_divergences(weights, row_weights, self.rows.has_sink)
            self.counts[kind] = self.counts.get(kind, 0) + row_weights.sum()

    def compute(self) -> HeadDistances:
        check_seen(type(self).__name__, self.sums)
        kinds = [kind for kind in SITE_KINDS if kind in self.sums]
        upper = {kind: self.sums[kind].cpu() / self.counts[kind].cpu() for kind in kinds}
        return HeadDistances(
            {kind: list(self.heads[kind]) for kind in kinds},
            {kind: table + table.T for kind, table in upper.items()},
            dict(self.rows.shapes),
        )


class SampledRows:
    """Attention weights of some queries of each sentence, the same ones in all layers, of one forward pass.

    Args:
        count (`int`, *optional*): Queries per sentence; `None` for all.
        seed (`int`): Random seed of the sample, see [`sample_tokens`].

    Attributes:
        shapes (`dict[str, tuple[int, int]]`): Original number of layers and of heads in a layer, by kind of site.
        has_sink (`bool`): Whether any layer has a learnt sink, to which attention falls that falls on no token.

    Raises:
        ValueError: if `count` is below 1.
    """

    def __init__(self, count: int | None, seed: int):
        if count is not None and not (is_integer(count) and count >= 1):
            raise ValueError(f"rows_per_sentence must be an integer of at least 1, or None for all, got {count!r}.")
        self.count, self.seed = count, seed
        self.shapes: dict[str, tuple[int, int]] = {}
        self.has_sink = False
        self.forget()

    def forget(self) -> None:
        """Begins another forward pass."""
        self._rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind of site: see `sample_tokens`
        self._layers: dict[HeadSite, HeadLayer] = {}
        self._weights: dict[HeadSite, torch.Tensor] = {}  # `(heads, batch, rows, keys)` in this pass
        self._starts: dict[HeadSite, int] = {}  # index of the first key

    def add(self, call: AttentionCall) -> None:
        """Adds the sampled rows among a block of the attention weights."""
        kind, self.has_sink = call.site.kind, self.has_sink or call.has_sink
        if kind not in self._rows:
            self._rows[kind] = sample_tokens(call.queries, self.count, self.seed)
        # Of layers without heads, and of shared layers, which are known once they run.
        every = [layer for site, layer in call.layers_by_site.items() if site.kind == kind]
        sizes = max(one.site.layer for one in every) + 1, max(one.num_heads for one in every)
        self.shapes[kind] = tuple(map(max, zip(sizes, self.shapes.get(kind, sizes))))
        chosen = self._rows[kind][0].to(call.weights.device)
        _, heads, height, keys = call.weights.shape
        if call.site not in self._weights:
            self._layers[call.site] = call.layer
            self._starts[call.site] = call.keys.start
            self._weights[call.site] = call.weights.new_zeros(heads, *chosen.shape, keys)
        indices = chosen[call.sentences] - call.rows.start
        within = (indices >= 0) & (indices < height)  # the other rows are in other calls
        index = indices.clamp(0, height - 1)[:, None, :, None].expand(-1, heads, -1, keys)
        rows = call.weights.gather(2, index).mul_(within[:, None, :, None])
        self._weights[call.site][:, call.sentences] += rows.transpose(0, 1)

    def collect(self) -> dict[str, tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]]:
        """Ends the pass: heads, their weights `(heads, rows, keys)`, and weights of the rows, by kind of site."""
        found = {}
        for kind in kinds_of(self._weights):
            layers = [self._layers[site] for site in sorted(self._weights) if site.kind == kind]
            heads = [(layer.site.layer, head) for layer in layers for head in layer.heads]
            _, row_weights = self._rows[kind]
            # Layers may be on several devices, and their caches may differ in length.
            starts = [self._starts[layer.site] for layer in layers]
            weights = [self._weights[layer.site].to(row_weights.device) for layer in layers]
            weights = [F.pad(one, (start - min(starts), 0)) for one, start in zip(weights, starts)]
            keys = max(one.shape[-1] for one in weights)
            weights = torch.cat([F.pad(one, (0, keys - one.shape[-1])) for one in weights]).flatten(1, 2)
            found[kind] = heads, weights, row_weights.flatten()
        self.forget()
        return found


def sample_tokens(tokens: ObservedTokens, count: int | None, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples tokens of each sentence, with weights.

    Args:
        tokens ([`ObservedTokens`]): The sentences; without token ids, the sample depends on their lengths alone.
        count (`int`, *optional*): Tokens per sentence; all tokens of shorter sentences, and with `None`.
        seed (`int`): Random seed; the sample is a function of the seed and the tokens of the sentence.

    Returns:
        Indices and weights (float64), both of shape `(batch, count)`: the weight is the length of the sentence over
        the number of sampled tokens, and 0 in excess of the length.
    """
    real = tokens.real
    count = min(count or real.shape[1], real.shape[1])
    ids = torch.zeros_like(tokens.positions) if tokens.ids is None else tokens.ids.long()
    sentence = _scrambled(_scrambled(ids + seed) + tokens.positions).where(real, 0).sum(1, keepdim=True)
    largest = torch.iinfo(torch.int64).max
    order = _scrambled(sentence + tokens.positions).masked_fill(~real, largest)
    chosen = order.topk(count, largest=False).indices
    lengths = real.sum(1, keepdim=True)
    weights = lengths.double() / lengths.clamp(1, count)
    return chosen, weights * real.gather(1, chosen)


def _scrambled(numbers: torch.Tensor) -> torch.Tensor:
    """Hashes integers to pseudorandom integers from 0 to 2⁶³ − 1 (as in SplitMix64)."""
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB), (31, 0x1E3779B97F4A7C15)):
        numbers = ((numbers ^ (numbers >> shift)) + 1) * factor  # modulo 2⁶⁴
    return (numbers ^ (numbers >> 32)) & torch.iinfo(torch.int64).max


def weighted_divergences(weights: torch.Tensor, row_weights: torch.Tensor, has_sink: bool = False) -> torch.Tensor:
    """Weighted sum over rows of the Jensen–Shannon divergences of all pairs of heads.

    Args:
        weights (`torch.Tensor` of shape `(heads, rows, keys)`): Attention weights.
        row_weights (`torch.Tensor` of shape `(rows,)`): Weights of the rows, float64.
        has_sink (`bool`): Whether some heads attend to a learnt sink with what is left of their weight.

    Returns:
        `torch.Tensor` of shape `(heads, heads)`, float64: upper triangular with zeros on the diagonal.
    """
    if has_sink:
        # What falls on no token is one more key.
        rest = (1 - weights.sum(-1)).clamp(min=0) * (row_weights > 0)
        weights = torch.cat([weights, rest[..., None]], -1)
    heads, _, keys = weights.shape
    total = row_weights.sum()
    # Entropies are sums over rows and keys: each attention weight gets the weight of its row.
    weights, row_weights = weights.flatten(1), row_weights.to(weights.dtype).repeat_interleave(keys)
    alone, both = total.new_zeros(heads), total.new_zeros(heads, heads)
    most = elements_on(weights.device, MAX_WEIGHTS)
    size = max(1, most // heads)
    for some, counted in zip(weights.split(size, 1), row_weights.split(size)):
        some = above_zero(some)
        alone += times_log(some) @ counted
        step = max(1, most // some.numel())
        for start in range(0, heads, step):
            pairs = some[start : start + step, None] + some[start:]
            both[start : start + step, start:] += times_log(pairs) @ counted
    # The entropy of m = (p + q) / 2 is ln 2 − Σ (p + q) ln(p + q) / 2; rounding can make it negative.
    divergences = total * math.log(2) - (both - alone[:, None] - alone) / 2
    return divergences.clamp_(min=0).triu_(1)
