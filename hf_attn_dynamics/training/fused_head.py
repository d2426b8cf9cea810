# Licensed under the Apache License, Version 2.0.
"""Head losses for trl trainers that fuse the output layer with the loss."""

from functools import wraps
from types import MethodType

from torch import nn

from ..models.compat import is_fused_by_trl


def add_head_losses_to_fused_head(model: nn.Module) -> None:
    """Adds guidance and gates to `model(…, fused_lm_head=True)`, in place.

    trl replaces the forward method of the trained model. With this keyword, its method bypasses the headwise forward
    pass: it calls the body, and computes log-probabilities of labels without all logits.

    Args:
        model (`nn.Module`): A headwise model; unchanged if trl has not replaced its forward method.
    """
    if not is_fused_by_trl(model.forward):
        return
    # Unbound, since copies and views of the model have this method too.
    fused = model.forward.__func__

    @wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, **kwargs):
        if not fused_lm_head:
            return type(self).forward(self, *args, **kwargs)
        return self._forward(lambda self, **inputs: fused(self, **inputs, fused_lm_head=True), kwargs)

    forward.has_heads = True
    model.forward = MethodType(forward, model)
