# Licensed under the Apache License, Version 2.0.
"""Losses of heads beside the output layers that trl fuses with its losses."""

from functools import wraps
from types import MethodType

from torch import nn


def ask_fused_head(model: nn.Module) -> None:
    """Lets a headwise model guide and gate heads under `model(…, fused_lm_head=True)`, too; changed in place.

    trl replaces the forward pass of the model that it trains: with this keyword it calls the model without its head
    and computes log-probabilities of labels without all logits, past the forward pass of the headwise model.

    Args:
        model (`nn.Module`): A headwise model; nothing happens if trl has not replaced its forward pass.
    """
    replaced = model.forward
    # Not by its signature, which is made to be that of the class.
    if "fused_lm_head" not in (getattr(replaced, "__kwdefaults__", None) or {}) or hasattr(replaced, "asks_heads"):
        return

    @wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, **kwargs):
        if not fused_lm_head:
            return replaced(*args, **kwargs)
        return self._forward(lambda self, **inputs: replaced(**inputs, fused_lm_head=True), kwargs)

    forward.asks_heads = True
    model.forward = MethodType(forward, model)
