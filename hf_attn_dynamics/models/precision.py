# Licensed under the Apache License, Version 2.0.
"""Precision of sums and losses: float32, or float64 in double precision."""

import torch


def at_least_single(tensor: torch.Tensor) -> torch.Tensor:
    """Converts a tensor to float32, unless it is float64.

    Example:
        >>> at_least_single(torch.ones(1, dtype=torch.bfloat16)).dtype, at_least_single(torch.ones(1).double()).dtype
        (torch.float32, torch.float64)
    """
    return tensor if tensor.dtype == torch.float64 else tensor.float()
