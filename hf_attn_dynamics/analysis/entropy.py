# Licensed under the Apache License, Version 2.0.
"""Terms of the entropy and divergence of attention weights, which may be 0."""

import torch


def above_zero(weights: torch.Tensor) -> torch.Tensor:
    """Weights whose logarithm is finite; those that are 0 stay so small that w ln w is next to 0."""
    return weights.clamp(min=torch.finfo(weights.dtype).tiny)


def times_log(weights: torch.Tensor) -> torch.Tensor:
    """w ln w of weights above 0."""
    # The logarithm is vectorised, and `torch.special.entr` is not.
    return weights.log().mul_(weights)
