# Licensed under the Apache License, Version 2.0.
"""Costs of a model for a target speed-up, measured or counted by one process for all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .._files import read_json
from .._processes import from_main_process
from ..models.compat import TRAINER_STATE_NAME
from ..models.cost_table import CostTable
from .gates import TargetCost


def costs_of(model: PreTrainedModel, argument: Callable[[str], Any], device: torch.device) -> CostTable:
    """Measures the costs for `target_speedup` on a device, or counts the FLOPs for `target_flops`.

    The main process measures, and the others get its costs.

    Args:
        model (`PreTrainedModel`): A headwise model.
        argument (callable): Returns an argument of [`HeadwiseArguments`] by name: `latency_batch` and
            `latency_length` are the shape of a batch. Lengths are at most the number of the model's positions.
        device (`torch.device`): Device to measure on.

    Raises:
        ValueError: if the costs of this model cannot be determined, in all processes.
    """
    # The package of analyses is not needed by other trainings.
    from ..analysis.heads.latency import count_flops_table, measure_latency_table

    batch, length = argument("latency_batch"), argument("latency_length")
    is_text = model.main_input_name == "input_ids"
    limit = model.config.max_positions() if is_text else None
    length = (min(length, limit) if limit else length) if is_text else None
    if argument("target_flops") is not None:
        return from_main_process(lambda: count_flops_table(model, batch, length))
    return from_main_process(lambda: measure_latency_table(model, batch, length, device))


def stored_costs(checkpoint: str | None) -> CostTable | None:
    """The costs with which a checkpoint was trained toward a speed-up; `None` without a checkpoint or costs."""
    file = checkpoint and Path(checkpoint) / TRAINER_STATE_NAME
    if not file or not file.is_file():
        return None
    target = read_json(file).get("stateful_callbacks", {}).get(TargetCost.__name__)
    table = target["attributes"]["table"] if isinstance(target, dict) else None
    return None if table is None else CostTable.from_dict(table)
