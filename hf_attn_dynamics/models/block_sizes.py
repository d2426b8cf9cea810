# Licensed under the Apache License, Version 2.0.
"""How many attention weights to form at a time, where the whole matrix would not fit."""

from collections.abc import Mapping

import torch


# Attention weights of one block (sentences x heads x rows x keys) formed at a time. On the CPU a block, its squares
# and its gradient should share the last-level cache; an accelerator wants fewer, larger products.
BLOCK_ELEMENTS = {"cpu": 2**20, "accelerator": 2**23}


def elements_on(device: torch.device, sizes: Mapping[str, int]) -> int:
    """How many weights to form at a time on a device, of numbers for `cpu` and `accelerator`.

    Example:
        >>> elements_on(torch.device("cpu"), BLOCK_ELEMENTS) == 2**20
        True
    """
    return sizes["cpu" if device.type == "cpu" else "accelerator"]
