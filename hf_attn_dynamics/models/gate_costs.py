# Licensed under the Apache License, Version 2.0.
"""Cost of a model with gates, as a fraction of the cost of the model without pruning."""

import math
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from .cost_table import CostTable, Expected
from .hard_concrete import HardConcreteGate
from .head_sites import HeadSite


def expected_cost(
    model: PreTrainedModel,
    table: CostTable,
    counts: Callable[[HardConcreteGate], Expected] = HardConcreteGate.expected_counts,
) -> torch.Tensor:
    """Expected cost of a model with gates as a fraction of the dense model's cost, a differentiable scalar.

    Args:
        model (`PreTrainedModel`): A headwise model with gates.
        table ([`CostTable`]): Costs of its architecture.
        counts (callable): Number of open heads or units of an open block, and how open the block is;
            `HardConcreteGate.approximate_counts` for gates outside training.

    Raises:
        ValueError: if the table has no costs of a site with gates.
    """
    left_heads, left_units = counts_left(model, table)
    found = [
        {site: counts(gate) for site, gate in gates.items()} for gates in (model.head_gates(), model.unit_gates())
    ]
    # On the device of the first gate: layers may be on several ones.
    zero = next(count.new_zeros(()) for of_part in found for count, _ in of_part.values())
    heads, units = (
        {site: (count.to(zero), None if block is None else block.to(zero)) for site, (count, block) in one.items()}
        for one in found
    )
    ungated_heads = {site: (zero + count, None) for site, count in left_heads.items() if site not in heads}
    ungated_units = {site: (zero + count, None) for site, count in left_units.items() if site not in units}
    return table.expected_from({**heads, **ungated_heads}, {**units, **ungated_units})


def counts_left(model: PreTrainedModel, table: CostTable) -> tuple[dict[HeadSite, int], dict[HeadSite, int]]:
    """Number of heads and of units at sites from which some have been removed."""
    settings = model.head_settings
    heads = {site: settings.sites[site] - len(removed) for site, removed in settings.removed.items()}
    sizes = {kind: int(grid[-1][0]) for kind, grid in table.feed_forward.items()}
    units = {site: sizes[site.kind] - len(gone) for site, gone in settings.removed_units.items() if site.kind in sizes}
    return heads, units


def largest_speedup(model: PreTrainedModel, table: CostTable) -> float:
    """Speed-up of a model whose gates are all closed."""
    heads, units = counts_left(model, table)
    heads |= dict.fromkeys(model.head_gates(), 0)
    units |= dict.fromkeys(model.unit_gates(), 0)
    lowest = table.cost(heads, units)
    return table.dense / lowest if lowest else math.inf
