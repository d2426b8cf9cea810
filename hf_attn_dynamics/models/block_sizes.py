# Licensed under the Apache License, Version 2.0.
"""Number of attention weights computed at a time, where the whole matrix would not fit into memory."""

from collections.abc import Mapping

import torch


# Attention weights of one block (sentences x heads x rows x keys). On the CPU a block, its squares and its gradient
# should fit into the last-level cache; accelerators are faster with fewer, larger products.
BLOCK_ELEMENTS = {"cpu": 2**20, "accelerator": 2**23}


def elements_on(device: torch.device, sizes: Mapping[str, int]) -> int:
    """Number of weights to compute at a time on a device, given the numbers for `cpu` and `accelerator`.

    Example:
        >>> elements_on(torch.device("cpu"), BLOCK_ELEMENTS) == 2**20
        True
    """
    return sizes["cpu" if device.type == "cpu" else "accelerator"]
