# Licensed under the Apache License, Version 2.0.
"""Biases of output projections whose stock class has none, for what removed heads and units gave on average."""

import torch
from torch import nn
from transformers import PreTrainedModel

from .head_roles import locate_heads
from .projections import outputs_of
from .unit_roles import prunable_units


def add_output_biases(model: PreTrainedModel) -> None:
    """Adds a bias of zeros to each output projection of attention and feed-forward blocks that has none, in place.

    Feed-forward blocks whose units cannot be pruned, as in mixtures of experts, get none.

    Outputs do not change. If any bias was added, `model.config.added_biases` becomes `True`, so that checkpoints can
    be loaded; copy a shared configuration before. `nn.Linear` without a bias is the only class concerned.
    """
    outputs = [layer.output for layer in (*locate_heads(model), *prunable_units(model))]
    bare = [output for output in outputs if isinstance(output, nn.Linear) and output.bias is None]
    for output in bare:
        zeros = torch.zeros(outputs_of(output), dtype=output.weight.dtype, device=output.weight.device)
        output.bias = nn.Parameter(zeros, requires_grad=output.weight.requires_grad)
    if bare:
        model.config.added_biases = True
