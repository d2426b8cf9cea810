# Licensed under the Apache License, Version 2.0.
"""One number for each head: how analyses return what they measure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..models.head_roles import HeadLayer
from ..models.head_sites import SITE_KINDS, HeadSite
from .results import Result, from_json, to_json


if TYPE_CHECKING:
    from matplotlib.figure import Figure


Head = tuple[str, int, int]  # kind of site, layer and head


class BestHead(NamedTuple):
    """The head with the highest score, the first of several, in the original numbering."""

    site: str
    layer: int
    head: int
    score: float


@dataclass(frozen=True, eq=False)
class HeadScores(Result, Mapping):
    """One number for each head, by kind of site: `scores["encoder"][layer, head]`, in the original numbering.

    Args:
        scores (`dict[str, torch.Tensor]`): For each kind of site (`encoder`, `decoder`, `cross`) a tensor of shape
            `(layers, heads)`; kept in float64 on the CPU. NaN where a head is removed.

    `numpy.asarray(scores)` is the table where there is one kind of site.

    Raises:
        ValueError: if there is no score, a kind is unknown, or a tensor does not have two dimensions.
        KeyError: for `scores[kind]`, naming the kinds of site that there are.

    Example:
        >>> scores = HeadScores({"encoder": [[3.0, 4.0], [0.0, 2.0]]})
        >>> scores["encoder"][1, 1].item()
        2.0
        >>> scores.normalized().to_dict()
        {'encoder': [[0.6, 0.8], [0.0, 1.0]]}
    """

    scores: dict[str, torch.Tensor]

    def __post_init__(self):
        if not self.scores:
            raise ValueError("scores are empty: they need at least one kind of site.")
        for kind in self.scores:
            if kind not in SITE_KINDS:
                raise ValueError(f"scores name the site {kind!r}, which is not one of {', '.join(SITE_KINDS)}.")
        tables = {
            kind: torch.as_tensor(self.scores[kind], dtype=torch.float64, device="cpu").detach()
            for kind in SITE_KINDS
            if kind in self.scores
        }
        for kind, table in tables.items():
            if table.dim() != 2:
                raise ValueError(f"scores of the {kind} must have shape (layers, heads), got {tuple(table.shape)}.")
        object.__setattr__(self, "scores", tables)

    def __getitem__(self, kind: str) -> torch.Tensor:
        if kind not in self.scores:
            raise KeyError(f"there are no scores of the site {kind!r}, but of {', '.join(self.scores)}.")
        return self.scores[kind]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Scores as an array of shape `(layers, heads)`, where there is one kind of site."""
        if len(self) > 1:
            sites = " or ".join(f"scores[{kind!r}]" for kind in self)
            raise TypeError(f"scores are of {len(self)} kinds of site, not one array; take {sites}.")
        return np.array(self.plain.numpy(), dtype=dtype, copy=copy)

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def plain(self) -> torch.Tensor | dict[str, torch.Tensor]:
        """Without the name of the site if there is only one, as `retain_heads` takes scores: a tensor, or a `dict`."""
        return next(iter(self.scores.values())) if len(self) == 1 else dict(self.scores)

    def best(self) -> BestHead:
        """The head with the highest score.

        Raises:
            ValueError: if all scores are NaN.
        """
        ranked = self.ranked()
        if not ranked:
            raise ValueError("no head has a score: all are NaN.")
        return ranked[0]

    def ranked(self) -> list[BestHead]:
        """Heads that have a score, the highest first; of equal ones, in their order."""
        scored = [head for head in map(BestHead._make, self.records()) if not math.isnan(head.score)]
        return sorted(scored, key=lambda head: -head.score)

    def mean(self) -> float:
        """Mean score of the heads that are there."""
        return torch.cat([table.flatten() for table in self.values()]).nanmean().item()

    def normalized(self) -> "HeadScores":
        """Scores divided by the ℓ2 norm of those of their layer, at each kind of site; layers of zeros stay zero."""
        return HeadScores({kind: _divided_by_norm(scores) for kind, scores in self.items()})

    def plot(self, path: str | Path | None = None, name: str = "score") -> "Figure":
        """Draws a map of layers × heads for each kind of site, and saves it if there is a path.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            name (`str`): What the scores are.
        """
        from .plots.base import plot_head_maps

        scores = torch.cat([table.flatten() for table in self.values()]).nan_to_num(0)
        limits = min(scores.min().item(), 0.0), scores.max().item()
        return plot_head_maps({name: dict(self)}, name, path, limits)

    def to_dict(self) -> dict[str, list[list[float | None]]]:
        """Scores as lists, `{kind: [layer][head]}`; `None` where a head is removed."""
        return to_json(self.scores)

    @classmethod
    def _from_dict(cls, values: dict[str, list[list[float | None]]]) -> "HeadScores":
        return cls(from_json(values, dict[str, torch.Tensor]))

    columns = ["site", "layer", "head", "score"]

    def records(self) -> Iterator[tuple[str, int, int, float]]:
        """Rows of the table, see `columns`."""
        for kind, table in self.items():
            for layer, scores in enumerate(table.tolist()):
                for head, score in enumerate(scores):
                    yield kind, layer, head, score


def _divided_by_norm(scores: torch.Tensor) -> torch.Tensor:
    norm = scores.nan_to_num().norm(dim=-1, keepdim=True)
    return scores / norm.where(norm > 0, torch.ones_like(norm))


def tables_of_heads(layers: list[HeadLayer], values: Mapping[HeadSite, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Numbers of the heads that are left at each site, as tables of all heads.

    Args:
        layers (`list[HeadLayer]`): See `locate_heads`.
        values (`dict[HeadSite, torch.Tensor]`): For each site a tensor of shape `(heads that are left, …)`. Kinds of
            sites without any value have no table; layers without one, of a kind that has, are NaN.

    Returns:
        `dict[str, torch.Tensor]`: for each kind of site a tensor of shape `(layers, heads, …)`, float64 on the CPU.
    """
    tables = {}
    for kind in SITE_KINDS:
        of_kind = [layer for layer in layers if layer.site.kind == kind]
        for layer in of_kind:
            if layer.site in values:
                found = values[layer.site].detach().cpu().double()
                if kind not in tables:
                    shape = max(layer.site.layer for layer in of_kind) + 1, max(layer.num_heads for layer in of_kind)
                    tables[kind] = found.new_full((*shape, *found.shape[1:]), math.nan)
                tables[kind][layer.site.layer, layer.heads] = found
    return tables


def tabulate(layers: list[HeadLayer], values: Mapping[HeadSite, torch.Tensor]) -> HeadScores:
    """[`tables_of_heads`] of one number for each head, as scores."""
    return HeadScores(tables_of_heads(layers, values))
