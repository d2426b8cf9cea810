# Licensed under the Apache License, Version 2.0.
"""Which heads and units a model keeps, so that it is as fast as requested and keeps the most important ones."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ...models.cost_table import CostTable
from ...models.head_sites import HeadSite, config_value, kinds_of
from ...models.number_checks import is_finite
from ...models.prunable_models import Model
from ...models.unit_pruning import prune_heads_and_units
from ...models.unit_ranges import format_units, parse_units
from ..model_parts import PARTS, ModelPart, PartSite, parts_of_model
from ..results import Result
from .unit_scores import UnitScores


if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kept = dict[str, list[list[int]]]  # heads or units that stay, by kind of site and layer
HALVINGS = 100  # of the interval of the multiplier, beyond the precision of floats
CANDIDATES = 1024  # removed and remaining elements among which the best exchange is searched


@dataclass(frozen=True, eq=False)
class Selection(Result):
    """Heads and units that stay, see [`select_parts`]; the original numbering.

    Args:
        heads (`dict[str, list[list[int]]]`): Remaining heads of each layer, by kind of site.
        units (`dict[str, list[list[int]]]`): Remaining units of each layer; empty if units cannot be pruned.
        num_heads, num_units (`dict[str, int]`): Number of heads or units of a dense layer, by kind of site.
        target (`float`): Requested speed-up.
        speedup (`float`): Predicted speed-up over the dense model, at least `target`.
        quantity (`str`): What the cost table predicts, `seconds` or `flops`.
        retained (`float`): Fraction of the importance of all heads and units that could be removed which stays.
        bound (`float`): No selection with this target retains more than this fraction (Lagrangian dual).
    """

    heads: Kept
    units: Kept
    num_heads: dict[str, int]
    num_units: dict[str, int]
    target: float
    speedup: float
    quantity: str
    retained: float
    bound: float

    columns: ClassVar[list[str]] = ["part", "site", "layer", "left", "of"]

    def apply(self, model: Model) -> Model:
        """Removes all other heads and units, in place; see [`prune_heads`] and [`prune_units`].

        Args:
            model (`PreTrainedModel`): The model for which the selection was made.

        Returns:
            `PreTrainedModel`: `model`.

        Raises:
            ValueError: if the model has other layers, or lacks heads or units that stay; or for the reasons given in
                [`prune_heads`] and [`prune_units`]. The model is then unchanged.
        """
        removed: dict[str, dict[HeadSite, list[int]]] = {part: {} for part in PARTS}
        for own in parts_of_model(model, ["heads", *(["units"] if self.units else [])]):
            part, (kind, layer) = own.key
            layers = self._of(part).get(kind, [])
            if layer >= len(layers) or own.count != self._counts(part)[kind]:
                raise ValueError(
                    f"the selection is for another model: {type(model).__name__} has {own.count} {part} in "
                    f"{own.key.site}."
                )
            stays = set(layers[layer])
            if not stays <= set(own.elements):
                missing = min(stays - set(own.elements))
                raise ValueError(
                    f"the selection keeps {part[:-1]} {missing} of {own.key.site}, which has been removed from the "
                    "model; select again."
                )
            removed[part][own.key.site] = [element for element in own.elements if element not in stays]
        by_kind = {part: config_value(sites, kinds_of(sites)) or {} for part, sites in removed.items()}
        return prune_heads_and_units(model, by_kind["heads"], by_kind["units"])

    def _of(self, part: str) -> Kept:
        return self.heads if part == "heads" else self.units

    def _counts(self, part: str) -> dict[str, int]:
        return self.num_heads if part == "heads" else self.num_units

    def left(self, part: str) -> dict[str, list[int]]:
        """Number of `heads` or `units` that stay in each layer, by kind of site."""
        return {kind: [len(own) for own in layers] for kind, layers in self._of(part).items()}

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types; units as ranges, such as `"0-3,17"`."""
        units = {kind: [format_units(own) for own in layers] for kind, layers in self.units.items()}
        return {**super().to_dict(), "units": units}

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "Selection":
        units = {
            kind: [parse_units(own, "units") if own else [] for own in layers]
            for kind, layers in values["units"].items()
        }
        return super()._from_dict({**values, "units": units})

    def records(self) -> Iterator[tuple[str, str, int, int, int]]:
        """Rows of the table, see `columns`: attention blocks, then feed-forward blocks."""
        for part in PARTS:
            for kind, layers in self.left(part).items():
                for layer, left in enumerate(layers):
                    yield part, kind, layer, left, self._counts(part)[kind]

    def __str__(self) -> str:
        lines = [
            f"Predicted speed-up {self.speedup:.2f} × by {self.quantity} (target {self.target:g} ×); "
            f"{100 * self.retained:.1f} % of the importance stays, at most {100 * self.bound:.1f} % could."
        ]
        for part in PARTS:
            for kind, left in self.left(part).items():
                total = len(left) * self._counts(part)[kind]
                cells = " ".join(str(count or "·") for count in left)
                lines.append(f"  {part} of {kind:<8} {cells}   = {sum(left)} of {total}")
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws the number of heads and units that stay in each layer.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
        """
        from ..plots.parts import plot_parts_per_layer

        left = {part: self.left(part) for part in PARTS}
        heads, units = (
            {kind: [self._counts(part)[kind]] * len(layers) for kind, layers in left[part].items()} for part in PARTS
        )
        return plot_parts_per_layer({f"{self.speedup:.2f} × predicted": left}, path, heads, units, title)


def select_parts(
    model: PreTrainedModel,
    scores: UnitScores,
    table: CostTable,
    speedup: float,
    parts: Iterable[str] = PARTS,
    rearrange: bool = False,
) -> Selection:
    """Selects the heads and units that stay, so that the predicted speed-up is at least as requested.

    Maximizes the sum of the scores that stay, subject to the cost of the table. Since the cost of a block depends only
    on the number of its heads or units, the best choice for a block are those with the highest scores. Their numbers
    follow from Lagrangian relaxation: for a penalty coefficient λ, each block independently maximizes its score minus
    λ times its cost; bisection finds the smallest λ that meets the target. Heads and units that still fit are then
    added, those with the highest score per cost first, until none fits. A block may lose everything. Query heads that
    share a key/value head stay or go together, by the sum of their scores. Ties are broken by kind of site (encoder,
    decoder, cross), layer and index.

    Args:
        model (`PreTrainedModel`): The model; it is not changed. What has been removed stays removed, and counts toward
            the speed-up.
        scores ([`UnitScores`]): Scores of all heads and units, at least 0 and not divided by cost.
        table ([`CostTable`]): Cost of the model by number of heads and units.
        speedup (`float`): Cost of the dense model over the cost of the pruned model, greater than 1.
        parts (`list[str]`): What may be removed: `heads`, `units`, or both.
        rearrange (`bool`): Whether to exchange removed and remaining heads or units within each block, as long as this
            lowers `mᵀFm` (Kwon et al. 2022, mask rearrangement), where m is 1 for what is removed, and F is the
            empirical Fisher information of the block with its off-diagonal elements. Needs
            `unit_importance(…, keep_gradients=True)`.

    Returns:
        [`Selection`]: call its `apply(model)`.

    Raises:
        ValueError: if the target cannot be reached, and the message says what can be; if the table belongs to another
            architecture; if scores are missing, NaN, negative or of another shape; or if `rearrange` lacks gradients.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import count_flops_table, unit_importance
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = BertModel(config)
        >>> table = count_flops_table(model, length=8)
        >>> selection = select_parts(model, unit_importance(model, method="random"), table, speedup=1.5)
        >>> _ = selection.apply(model)
        >>> table.speedup_of(model) >= 1.5
        True
    """
    parts = [parts] if isinstance(parts, str) else list(parts)
    located = parts_of_model(model, ["heads", *(["units"] if table.feed_forward or "units" in parts else [])])
    chosen = [own for own in located if own.part in parts]
    if not chosen or not set(parts) <= set(PARTS):
        raise ValueError(f"parts must be one or both of {', '.join(PARTS)}, got {parts!r}.")
    table.check_fits(model)
    if not is_finite(speedup) or speedup <= 1:
        raise ValueError(f"speedup must be a number greater than 1, got {speedup!r}.")
    values = _checked_scores(scores, chosen)
    gradients = _checked_gradients(scores, chosen) if rearrange else {}
    groups = {own.key: _ranked_groups(own, values[own.key]) for own in chosen}
    sites = [_site(own, groups[own.key], values[own.key], table) for own in chosen]
    kept, bound = _within_budget(located, chosen, sites, groups, table, speedup, parts)
    for own in chosen:
        if own.key in gradients:
            kept[own.key] = _rearranged(own, kept[own.key], gradients[own.key])
    whole = sum(float(values[own.key][own.elements].sum()) for own in chosen)
    retained = min(sum(float(values[own.key][kept[own.key]].sum()) for own in chosen), whole)
    retained, bound = (retained / whole, bound / whole) if whole else (1.0, 1.0)
    return Selection(
        heads=_by_layer(located, kept, "heads"),
        units=_by_layer(located, kept, "units"),
        num_heads={own.key.site.kind: own.count for own in located if own.part == "heads"},
        num_units={own.key.site.kind: own.count for own in located if own.part == "units"},
        target=float(speedup),
        speedup=_speedup(table, located, kept),
        quantity=table.quantity,
        retained=retained,
        bound=max(min(bound, 1.0), retained),
    )


def _checked_scores(scores: Any, parts: list[ModelPart]) -> dict[PartSite, torch.Tensor]:
    """Scores of the layers of a model, checked for what is left."""
    if not isinstance(scores, UnitScores):
        raise ValueError(f"scores must be the UnitScores of unit_importance(), got {type(scores).__name__}.")
    if scores.per:
        raise ValueError(
            f"scores are divided by cost, per {scores.per}; pass those before per_cost(): the table has the cost."
        )
    found = {}
    for own in parts:
        part, (kind, layer) = own.key
        table = scores.of(part).get(kind)
        layers = 1 + max(other.key.site.layer for other in parts if other.key.site.kind == kind)
        if table is None:
            raise ValueError(f"scores of the {part} of {kind} are missing.")
        if tuple(table.shape) != (layers, own.count):
            raise ValueError(
                f"scores of {kind} must have shape (layers, {part}) {(layers, own.count)}, got {tuple(table.shape)}."
            )
        left = table[layer, own.elements]
        if not (left.isfinite() & (left >= 0)).all():
            place = int((~(left.isfinite() & (left >= 0))).nonzero()[0])
            raise ValueError(
                f"scores must be numbers of at least 0, but the score of {own.key.site}, {part[:-1]} "
                f"{own.elements[place]} is {left[place].item()}."
            )
        found[own.key] = table[layer]
    return found


def _checked_gradients(scores: UnitScores, parts: list[ModelPart]) -> dict[PartSite, torch.Tensor]:
    """Gradients of the masks of what is left, `(sentences, elements)`, in float64."""
    if scores.gradients is None:
        raise ValueError(
            "rearrange=True needs scores of unit_importance(…, keep_gradients=True) with the method fisher or margin; "
            "saved scores have no gradients."
        )
    return {own.key: scores.gradients[own.part][own.key.site.kind][:, own.key.site.layer].double() for own in parts}


def _groups(own: ModelPart) -> list[list[int]]:
    size = own.group_size
    return [own.elements[start : start + size] for start in range(0, len(own.elements), size)]


def _ranked_groups(own: ModelPart, scores: torch.Tensor) -> list[list[int]]:
    """Heads that are removed together, or single units, the most important first."""
    # Sorting is stable: the first of equal groups comes first.
    return sorted(_groups(own), key=lambda group: -sum(scores[group].tolist()))


class _Site(NamedTuple):
    """Score and cost of a block by the number of its groups, from 0 to all."""

    values: np.ndarray
    costs: np.ndarray


def _site(own: ModelPart, groups: list[list[int]], scores: torch.Tensor, table: CostTable) -> _Site:
    cost = table.attention_cost if own.part == "heads" else table.feed_forward_cost
    counts = torch.arange(len(groups) + 1, dtype=torch.float64) * own.group_size
    values = np.cumsum([0.0, *(sum(scores[group].tolist()) for group in groups)])
    return _Site(values, cost(own.key.site.kind, counts).numpy())


def _within_budget(
    located: list[ModelPart],
    chosen: list[ModelPart],
    sites: list[_Site],
    groups: Mapping[PartSite, list[list[int]]],
    table: CostTable,
    speedup: float,
    parts: list[str],
) -> tuple[dict[PartSite, list[int]], float]:
    """Heads and units that stay, and the bound of their score; [`best_counts`] for the cost that is left for them."""
    fixed = {own.key: list(own.elements) for own in located}
    empty = fixed | {own.key: [] for own in chosen}
    # Cost of everything else: a block without heads or units may cost something.
    others = _cost(table, located, empty) - sum(float(site.costs[0]) for site in sites)
    # The sums of the table and of this module may differ by rounding, which must not miss the target.
    for margin in (0.0, 1e-12, 1e-9, 1e-6):
        budget = table.dense / speedup * (1 - margin) - others
        if sum(site.costs.min() for site in sites) > budget:
            break
        counts, bound = best_counts(sites, budget)
        kept = {
            own.key: sorted(element for group in groups[own.key][:count] for element in group)
            for own, count in zip(chosen, counts)
        }
        if _speedup(table, located, fixed | kept) >= speedup:
            return fixed | kept, bound
    table.check_target(speedup, parts)
    most = table.dense / _cost(table, located, empty)
    raise ValueError(f"speedup={speedup:g} cannot be reached by removing {' and '.join(parts)}: at most {most:.4g} ×.")


def _cost(table: CostTable, located: list[ModelPart], kept: Mapping[PartSite, list[int]]) -> float:
    counts = {part: {own.key.site: len(kept[own.key]) for own in located if own.part == part} for part in PARTS}
    return table.cost(counts["heads"], counts["units"])


def _speedup(table: CostTable, located: list[ModelPart], kept: Mapping[PartSite, list[int]]) -> float:
    cost = _cost(table, located, kept)
    return table.dense / cost if cost else math.inf


def _by_layer(located: list[ModelPart], kept: Mapping[PartSite, list[int]], part: str) -> Kept:
    tables: Kept = {}
    for own in located:
        if own.part == part:
            tables.setdefault(own.key.site.kind, []).append(kept[own.key])
    return tables


def best_counts(sites: list[_Site], budget: float) -> tuple[list[int], float]:
    """Numbers with a high sum of values whose sum of costs is at most a budget.

    Args:
        sites (`list`): For each site, values and costs of the numbers 0, 1, 2 and so on; neither need be monotone.
        budget (`float`): At least the sum of the smallest costs.

    Returns:
        `tuple[list[int], float]`: a number for each site, such that no larger one fits into the budget without
        lowering the value; and an upper bound of the value of all numbers within the budget.
    """
    counts = _relaxed(sites, 0.0)
    bound = _total(sites, counts).values
    if _total(sites, counts).costs > budget:
        counts, bound = _bisected(sites, budget)
    return _filled(sites, counts, budget), float(bound)


def _relaxed(sites: list[_Site], multiplier: float) -> list[int]:
    """For each site, the number that maximizes value minus `multiplier` times cost, the smallest of equal ones."""
    return [int(np.argmax(site.values - multiplier * site.costs)) for site in sites]


def _total(sites: list[_Site], counts: Iterable[int]) -> _Site:
    pairs = [(site.values[count], site.costs[count]) for site, count in zip(sites, counts)]
    return _Site(*map(math.fsum, zip(*pairs)))


def _bisected(sites: list[_Site], budget: float) -> tuple[list[int], float]:
    """Numbers of the smallest multiplier whose cost is within the budget, and the smallest bound that was found."""
    cheapest = [int(np.lexsort((-site.values, site.costs))[0]) for site in sites]
    span = max(math.fsum(np.ptp(site.costs) for site in sites), np.finfo(float).tiny)
    low, high = 0.0, max(math.fsum(np.ptp(site.values) for site in sites) / span, np.finfo(float).tiny)
    best, bound = cheapest, math.inf

    def evaluate(multiplier: float) -> tuple[list[int], bool]:
        nonlocal bound
        counts = _relaxed(sites, multiplier)
        value, cost = _total(sites, counts)
        bound = min(bound, value + multiplier * (budget - cost))
        return counts, cost <= budget

    for _ in range(HALVINGS):
        counts, fits = evaluate(high)
        if fits:
            best = counts
            break
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        counts, fits = evaluate(middle)
        if fits:
            best, high = counts, middle
        else:
            low = middle
    return best, bound


def _filled(sites: list[_Site], counts: list[int], budget: float) -> list[int]:
    """Raises numbers while a larger one fits, those with the highest value per cost first."""
    counts = list(counts)
    slack = budget - _total(sites, counts).costs
    steps = [_steps(site, count) for site, count in zip(sites, counts)]
    while True:
        best = None
        for index, (rates, gains, costs) in enumerate(steps):
            fits = (costs <= slack) & (gains >= 0)
            if fits.any():
                step = int(np.lexsort((-np.where(fits, gains, -1), -np.where(fits, rates, -1)))[0])
                if best is None or (rates[step], gains[step]) > best[:2]:
                    best = rates[step], gains[step], index, step
        if best is None:
            return counts
        _, _, index, step = best
        counts[index] += step + 1
        slack = budget - _total(sites, counts).costs
        steps[index] = _steps(sites[index], counts[index])


def _steps(site: _Site, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Value per cost, value and cost of all larger numbers, beyond the present one."""
    gains = site.values[count + 1 :] - site.values[count]
    costs = site.costs[count + 1 :] - site.costs[count]
    rates = np.divide(gains, costs, out=np.full_like(gains, np.inf), where=costs > 0)
    return rates, gains, costs


def _rearranged(own: ModelPart, kept: list[int], gradients: torch.Tensor) -> list[int]:
    """Exchanges removed and remaining groups of a block while this lowers `mᵀFm`."""
    groups = _groups(own)
    # The gradient of the mask of a group is the sum over its heads.
    of_groups = torch.stack([gradients[:, group].sum(1) for group in groups], 1) if groups else gradients[:, :0]
    removed = torch.tensor([group[0] not in kept for group in groups], dtype=torch.bool)
    after = exchanged(of_groups.T @ of_groups / max(len(of_groups), 1), removed)
    return [element for group, gone in zip(groups, after.tolist()) if not gone for element in group]


def _lowest(elements: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The elements with the lowest values, in ascending order; all if there are at most `CANDIDATES`."""
    if len(elements) <= CANDIDATES:
        return elements
    return elements[values[elements].topk(CANDIDATES, largest=False).indices.sort().values]


def exchanged(fisher: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """Exchanges pairs of removed and remaining elements, the best pair first, while this lowers `mᵀFm`.

    In large blocks, pairs are of the `CANDIDATES` elements on each side whose single exchange would be best.

    Args:
        fisher (`torch.Tensor` of shape `(elements, elements)`): F, symmetric.
        removed (`torch.BoolTensor` of shape `(elements,)`): m, True for removed elements.

    Returns:
        `torch.BoolTensor`: m with the same number of removed elements.
    """
    removed = removed.clone()
    diagonal = fisher.diagonal()
    products = fisher @ removed.to(fisher)
    tolerance = 1e-12 * float(diagonal.abs().sum())
    # As many exchanges as elements are enough in practice, and bound the time.
    for _ in range(len(removed)):
        gone, stays = removed.nonzero().flatten(), (~removed).nonzero().flatten()
        if not len(gone) or not len(stays):
            break
        returns, leaves = diagonal - 2 * products, diagonal + 2 * products
        gone, stays = _lowest(gone, returns), _lowest(stays, leaves)
        changes = returns[gone, None] + leaves[stays] - 2 * fisher[gone[:, None], stays]
        place = int(changes.argmin())
        if float(changes.flatten()[place]) >= -tolerance:
            break
        back, out = gone[place // len(stays)], stays[place % len(stays)]
        removed[back], removed[out] = False, True
        products += fisher[:, out] - fisher[:, back]
    return removed
