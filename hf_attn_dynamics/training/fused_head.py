# Licensed under the Apache License, Version 2.0.
"""Losses of heads beside the output layers that trl fuses with its losses."""

import inspect
from types import MethodType

from torch import nn


FUSED = "fused_lm_head"  # keyword of the forward pass that trl gives to a model


def ask_fused_head(model: nn.Module) -> None:
    """Lets a headwise model guide and gate heads under `model(…, fused_lm_head=True)`, too; changed in place.

    trl replaces the forward pass of the model that it trains: with this keyword it calls the model without its head
    and computes log-probabilities of labels without all logits, past the forward pass of the headwise model.

    Args:
        model (`nn.Module`): A headwise model; nothing happens if its forward pass takes no such keyword.
    """
    fused = model.forward
    if FUSED not in inspect.signature(fused, follow_wrapped=False).parameters:
        return

    def forward(self, *args, fused_lm_head=False, **kwargs):
        if not fused_lm_head:
            return fused(*args, **kwargs)
        return self._forward(lambda self, **inputs: fused(**inputs, fused_lm_head=True), **kwargs)

    # `generate` compares its keywords with those of the model's class.
    forward.__wrapped__ = fused
    model.forward = MethodType(forward, model)
