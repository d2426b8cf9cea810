# Licensed under the Apache License, Version 2.0.
"""Models that PEFT has wrapped."""

from torch import nn


def without_adapters(model: nn.Module) -> nn.Module:
    """The model in a PEFT model, with adapters still in its modules; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
