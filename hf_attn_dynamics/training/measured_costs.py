# Licensed under the Apache License, Version 2.0.
"""Costs of a model for a target speed-up, measured or counted by one process for all."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..models.cost_table import CostTable


if TYPE_CHECKING:
    from accelerate import Accelerator


def costs_of(
    model: PreTrainedModel, argument: Callable[[str], Any], device: torch.device, accelerator: "Accelerator"
) -> CostTable:
    """Measures the costs for `target_speedup` on a device, or counts the FLOPs for `target_flops`.

    The main process measures, and the others get its costs.

    Args:
        model (`PreTrainedModel`): A headwise model.
        argument (callable): Returns an argument of [`HeadwiseArguments`] by name: `latency_batch` and
            `latency_length` are the shape of a batch. Lengths are at most the number of the model's positions.
        device (`torch.device`): Device to measure on.
        accelerator (`Accelerator`): Accelerator of the trainer.

    Raises:
        ValueError: if the costs of this model cannot be determined, in all processes.
    """
    from accelerate.utils import broadcast_object_list

    # The package of analyses is not needed by other trainings.
    from ..analysis.heads.latency import count_flops_table, measure_latency_table

    batch, length = argument("latency_batch"), argument("latency_length")
    is_text = model.main_input_name == "input_ids"
    limit = model.config.max_positions() if is_text else None
    length = (min(length, limit) if limit else length) if is_text else None
    found: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            if argument("target_flops") is not None:
                table = count_flops_table(model, batch, length)
            else:
                table = measure_latency_table(model, batch, length, device)
            found = [table.to_dict()]
        except ValueError as error:
            found = [str(error)]
    broadcast_object_list(found)
    if isinstance(found[0], str):
        raise ValueError(found[0])
    return CostTable.from_dict(found[0])
