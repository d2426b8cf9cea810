# Licensed under the Apache License, Version 2.0.
"""One number per head: the result of most analyses."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..models.head_roles import HeadLayer
from ..models.head_sites import SITE_KINDS, HeadSite
from .notebook import heat_grid
from .results import Result, from_json, to_json


if TYPE_CHECKING:
    from matplotlib.figure import Figure


Head = tuple[str, int, int]  # kind of site, layer and head


class BestHead(NamedTuple):
    """The head with the highest score (the first if several are equal), in the original numbering."""

    site: str
    layer: int
    head: int
    score: float


@dataclass(frozen=True, eq=False)
class HeadScores(Result, Mapping):
    """One number per head, by kind of site: `scores["encoder"][layer, head]`, in the original numbering.

    `numpy.asarray(scores)` returns the table if there is a single kind of site.

    Args:
        scores (`dict[str, torch.Tensor]`): A tensor of shape `(layers, heads)` for each kind of site (`encoder`,
            `decoder`, `cross`); stored in float64 on the CPU. NaN for removed heads.

    Raises:
        ValueError: if `scores` is empty, a kind of site is unknown, or a tensor does not have two dimensions.
        KeyError: from `scores[kind]` for a missing kind of site.

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
        """The scores of a single kind of site as an array of shape `(layers, heads)`."""
        if len(self) > 1:
            sites = " or ".join(f"scores[{kind!r}]" for kind in self)
            raise TypeError(f"scores of {len(self)} kinds of sites are not one array; use {sites}.")
        return np.array(self.plain.numpy(), dtype=dtype, copy=copy)

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def plain(self) -> torch.Tensor | dict[str, torch.Tensor]:
        """The tensor of a single kind of site, else the dictionary of tensors; `retain_heads` accepts both."""
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
        """Heads with a score, in descending order; equal ones by site, layer and head."""
        scored = [head for head in map(BestHead._make, self.records()) if not math.isnan(head.score)]
        return sorted(scored, key=lambda head: -head.score)

    def mean(self) -> float:
        """Mean score of the heads that are not removed."""
        return torch.cat([table.flatten() for table in self.values()]).nanmean().item()

    def normalized(self) -> "HeadScores":
        """Scores divided by the ℓ2 norm of the scores of their layer; layers of zeros stay zero."""
        return HeadScores({kind: _divided_by_norm(scores) for kind, scores in self.items()})

    def _repr_html_(self) -> str:
        """A grid of layers × heads for notebooks, with the scores in cells that are darker the higher they are."""
        return heat_grid(self.scores)

    def plot(self, path: str | Path | None = None, name: str = "score", title: str = "") -> "Figure":
        """Draws a map of layers × heads for each kind of site.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            name (`str`): Name of the scores.
            title (`str`): Model and data; the picture itself says what it shows.
        """
        from .plots.base import plot_head_maps

        scores = torch.cat([table.flatten() for table in self.values()]).nan_to_num(0)
        limits = min(scores.min().item(), 0.0), scores.max().item()
        return plot_head_maps({name: dict(self)}, name, path, limits, title)

    def to_dict(self) -> dict[str, list[list[float | None]]]:
        """Scores as lists, `{kind: [layer][head]}`; `None` for removed heads."""
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
    """Arranges values of the remaining heads of each site as tables over all heads.

    Args:
        layers (`list[HeadLayer]`): See `locate_heads`.
        values (`dict[HeadSite, torch.Tensor]`): A tensor of shape `(remaining heads, …)` for each site. Missing layers
            become NaN; kinds of sites without any value get no table.

    Returns:
        `dict[str, torch.Tensor]`: a tensor of shape `(layers, heads, …)` for each kind of site, float64 on the CPU.
    """
    return arranged({layer.site: (layer.num_heads, layer.heads) for layer in layers}, values)


def arranged(
    sites: Mapping[HeadSite, tuple[int, list[int]]], values: Mapping[HeadSite, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """[`tables_of_heads`] of heads or units, given their original number and the remaining ones at each site."""
    tables = {}
    for kind in SITE_KINDS:
        of_kind = {site.layer: own for site, own in sites.items() if site.kind == kind}
        for layer, (_, remaining) in of_kind.items():
            site = HeadSite(kind, layer)
            if site in values:
                found = values[site].detach().cpu().double()
                if kind not in tables:
                    shape = max(of_kind) + 1, max(count for count, _ in of_kind.values())
                    tables[kind] = found.new_full((*shape, *found.shape[1:]), math.nan)
                tables[kind][layer, remaining] = found
    return tables


def tabulate(layers: list[HeadLayer], values: Mapping[HeadSite, torch.Tensor]) -> HeadScores:
    """[`tables_of_heads`] of one number per head, as scores."""
    return HeadScores(tables_of_heads(layers, values))
