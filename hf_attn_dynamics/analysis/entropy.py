# Licensed under the Apache License, Version 2.0.
"""Terms of the entropy of attention weights, finite for weights of 0."""

import torch


def above_zero(weights: torch.Tensor) -> torch.Tensor:
    """Clamps weights to the smallest positive number: their logarithm is finite, and w ln w of 0 stays close to 0."""
    return weights.clamp(min=torch.finfo(weights.dtype).tiny)


def times_log(weights: torch.Tensor) -> torch.Tensor:
    """w ln w of weights above 0."""
    # The logarithm is vectorised, and `torch.special.entr` is not.
    return weights.log().mul_(weights)
