# Licensed under the Apache License, Version 2.0.
"""The precision of sums and losses: single where weights are in half precision, double where they are in double."""

import torch


def at_least_single(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in float32, or in float64 if they are.

    Example:
        >>> at_least_single(torch.ones(1, dtype=torch.bfloat16)).dtype, at_least_single(torch.ones(1).double()).dtype
        (torch.float32, torch.float64)
    """
    return tensor if tensor.dtype == torch.float64 else tensor.float()
