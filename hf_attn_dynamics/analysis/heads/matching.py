# Licensed under the Apache License, Version 2.0.
"""Which head of one model does what a head of another does."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..head_scores import HeadScores
from ..notebook import html_table
from ..observers.base import AttentionCall, Observer
from ..observers.distances import SampledRows, weighted_divergences
from ..observers.observation import observe
from ..results import Result
from ..running import arguments_of, batches_of, reader_of


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HeadPair(NamedTuple):
    """A head of one model and its counterpart in another, and the distance of their attention."""

    site: str
    layer: int
    head: int
    other_layer: int
    other_head: int
    distance: float


@dataclass(frozen=True, eq=False)
class HeadMatching(Result):
    """Heads of two models, see [`compare_heads`]. All fields are by kind of site.

    Args:
        heads (`dict[str, list[tuple[int, int]]]`): Heads of the first model as (layer, head), in the original
            numbering: the rows of `distances`.
        others (`dict[str, list[tuple[int, int]]]`): Heads of the second model: the columns.
        distances (`dict[str, torch.Tensor]`): Mean Jensen–Shannon divergences, in nats: from 0 to ln 2.
        matched (`dict[str, list[tuple[int, int]]]`): Rows and columns of the counterparts: each head has at most one,
            and the sum of their distances is minimal.
        shapes, other_shapes (`dict[str, tuple[int, int]]`, *optional*): Original number of layers and of heads in a
            layer of each model; by default up to the last ones of `heads` and `others`.
    """

    heads: dict[str, list[tuple[int, int]]]
    others: dict[str, list[tuple[int, int]]]
    distances: dict[str, torch.Tensor]
    matched: dict[str, list[tuple[int, int]]]
    shapes: dict[str, tuple[int, int]] | None = None
    other_shapes: dict[str, tuple[int, int]] | None = None

    columns = list(HeadPair._fields)

    def __post_init__(self):
        for name in ("shapes", "other_shapes"):
            if (given := getattr(self, name)) is not None:
                # Lists, in a file.
                object.__setattr__(self, name, {kind: tuple(shape) for kind, shape in given.items()})

    def pairs(self, kind: str | None = None) -> list[HeadPair]:
        """Heads and their counterparts, the most similar ones first.

        Args:
            kind (`str`, *optional*): Kind of site; all by default.
        """
        found = [
            HeadPair(
                site, *self.heads[site][row], *self.others[site][column], self.distances[site][row][column].item()
            )
            for site, places in self.matched.items()
            for row, column in places
            if kind in (None, site)
        ]
        return sorted(found, key=lambda pair: pair.distance)

    def nearest(self, kind: str, layer: int, head: int) -> HeadPair:
        """The head of the second model that is nearest to a head of the first, whatever its counterpart.

        Raises:
            ValueError: if there is no such head.
        """
        if (layer, head) not in [tuple(one) for one in self.heads.get(kind, ())]:
            raise ValueError(f"there is no head {layer}.{head} of the {kind}.")
        row = [tuple(one) for one in self.heads[kind]].index((layer, head))
        distance, column = self.distances[kind][row].min(0)
        return HeadPair(kind, layer, head, *self.others[kind][column], distance.item())

    def layers(self, kind: str) -> torch.Tensor:
        """How many heads of each layer have their counterpart in each layer of the second model.

        Returns:
            `torch.LongTensor` of shape `(layers, layers of the second model)`
        """
        rows, columns = self._shape(kind)[0], self._shape(kind, of_others=True)[0]
        table = torch.zeros(rows, columns, dtype=torch.long)
        for pair in self.pairs(kind):
            table[pair.layer, pair.other_layer] += 1
        return table

    def head_scores(self) -> dict[str, HeadScores]:
        """One number per head of the first model: `distance` to its counterpart; NaN without one."""
        tables = {}
        for kind in self.heads:
            tables[kind] = torch.full(self._shape(kind), torch.nan, dtype=torch.float64)
            for pair in self.pairs(kind):
                tables[kind][pair.layer, pair.head] = pair.distance
        return {"distance": HeadScores(tables)}

    def _shape(self, kind: str, of_others: bool = False) -> tuple[int, ...]:
        heads, shapes = (self.others, self.other_shapes) if of_others else (self.heads, self.shapes)
        return (shapes or {}).get(kind) or tuple(max(numbers) + 1 for numbers in zip(*heads[kind]))

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws the distance of each head to its counterpart, a map of layers × heads.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): The models and the data; the picture itself says what it shows.
        """
        return self.head_scores()["distance"].plot(path, "distance to the counterpart", title)

    def _repr_html_(self) -> str:
        """The most similar pairs, for notebooks."""
        rows = [
            [pair.site, f"{pair.layer}.{pair.head}", f"{pair.other_layer}.{pair.other_head}", pair.distance]
            for pair in self.pairs()[:20]
        ]
        return html_table(["site", "head", "counterpart", "distance (nats)"], rows, "Heads and their counterparts")

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        yield from self.pairs()


def compare_heads(
    model: PreTrainedModel,
    other: PreTrainedModel,
    data: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    rows_per_sentence: int | None = 1,
    seed: int = 0,
    progress: bool = False,
) -> HeadMatching:
    """Which head of a model attends as a head of another does: seeds of a model, a teacher and its student, a pruned
    model, two steps of training.

    Both models read the same tokens. The distance of two heads is the mean Jensen–Shannon divergence of their
    attention, as in [`HeadDistance`], on a sample of the queries. Counterparts are assigned so that their distances
    have the smallest sum (Hungarian method); if one model has more heads, some have no counterpart. Of encoder–decoder
    models, the encoders are compared.

    Args:
        model, other (`PreTrainedModel`): Models with the same tokens; their layers, heads and sizes may differ.
        data (iterable of `dict`): Batches, or a single batch: arguments of both forward passes.
        rows_per_sentence (`int`, *optional*): Queries to sample from each sentence; `None` for all.
        seed (`int`): Random seed of the sample.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`HeadMatching`]

    Raises:
        ValueError: if `rows_per_sentence` is below 1, or the models attend at different kinds of sites or to different
            numbers of tokens, or cannot be observed.
        ImportError: if SciPy is not installed.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model, batch = BertModel(config), {"input_ids": torch.tensor([[5, 7, 8, 3], [9, 6, 4, 3]])}
        >>> matching = compare_heads(model, model, batch)
        >>> all(pair[1:3] == pair[3:5] for pair in matching.pairs())
        True
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ImportError("compare_heads() needs SciPy: pip install scipy.") from error
    readers = [reader_of(one) for one in (model, other)]
    heads: list[dict[str, list[tuple[int, int]]]] = [{}, {}]
    samples = [SampledRows(rows_per_sentence, seed) for _ in readers]
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    for number, batch in batches_of(data, model, "matching heads", progress):
        found = [_rows(reader, batch, rows) for reader, rows in zip(readers, samples)]
        if found[0].keys() != found[1].keys():
            sites = " and ".join(", ".join(one) for one in found)
            raise ValueError(f"the models attend at different sites, {sites}; compare models of one kind.")
        for kind, (own, weights, row_weights) in found[0].items():
            theirs, other_weights, _ = found[1][kind]
            if weights.shape[1:] != other_weights.shape[1:]:
                raise ValueError(
                    f"batch {number} has rows of {weights.shape[-1]} tokens in one model and "
                    f"{other_weights.shape[-1]} in the other; both must read the same tokens."
                )
            heads[0][kind], heads[1][kind] = own, theirs
            together = torch.cat([weights, other_weights.to(weights)])
            has_sink = any(rows.has_sink for rows in samples)
            divergences = weighted_divergences(together, row_weights, has_sink)[: len(own), len(own) :]
            sums[kind] = sums.get(kind, 0) + divergences.cpu()
            counts[kind] = counts.get(kind, 0) + row_weights.sum().cpu()
    distances = {kind: total / counts[kind] for kind, total in sums.items()}
    matched = {
        kind: list(zip(*(one.tolist() for one in linear_sum_assignment(table.numpy()))))
        for kind, table in distances.items()
    }
    return HeadMatching(*heads, distances, matched, *(dict(rows.shapes) for rows in samples))


class _Sample(Observer):
    """Attention weights of some queries, see [`SampledRows`]."""

    name = "rows"

    def __init__(self, rows: SampledRows):
        self.rows = rows

    def update(self, call: AttentionCall) -> None:
        self.rows.add(call)

    def compute(self) -> dict[str, tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]]:
        return self.rows.collect()


@torch.no_grad()
def _rows(
    reader: PreTrainedModel, batch: Mapping[str, Any], rows: SampledRows
) -> dict[str, tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]]:
    """Heads of a model, their attention weights and the weights of the rows, by kind of site."""
    with observe(reader, _Sample(rows)) as seen:
        reader(**arguments_of(reader, batch))
    return seen.rows
