# Licensed under the Apache License, Version 2.0.
"""The distillation loss in Triton: value and gradient of `distillation_loss` from tiles that stay on the chip.

As for guidance, a first kernel goes over tiles of the scores of student and teacher with an online softmax, and keeps
a few numbers of each row: LSE(s), LSE(t), and Σ T log(T/S), or Σ S², Σ S⊙T and Σ T². Two more kernels multiply the
gradient with respect to the scores, S − T or 2·S⊙(S − T − Σ S⊙(S − T)), with the vectors of either side.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .guidance_kernel import block_dim_of, block_of, on_its_device, unrounded
from .teacher_settings import TEACHER_LOSSES


# Numbers of each row that the first kernel writes; those after the second one depend on the loss.
LSE, OTHER_LSE, DIVERGENCE, SQUARES, PRODUCTS, OTHER_SQUARES, NUM_SUMS = 0, 1, 2, 2, 3, 4, 5


@on_its_device
def kernel_distillation(
    left: torch.Tensor,
    right: torch.Tensor,
    scaling: float,
    softcap: float,
    band: Sequence[int],
    teacher_left: torch.Tensor,
    teacher_right: torch.Tensor,
    teacher_scaling: float,
    teacher_softcap: float,
    teacher_band: Sequence[int],
    key_mask: torch.Tensor | None,
    coefficient: torch.Tensor,
    loss: int,
    needs_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distillation loss of one layer and its gradients: arguments and results of `_distillation_blocks`."""
    from .distillation_triton import pair_gradients, pair_statistics

    batch, heads, num_rows, size = left.shape
    length, is_squared = right.shape[2], TEACHER_LOSSES[loss] == "squared"
    student = _Side(left, right, scaling, softcap, band)
    teacher = _Side(teacher_left, teacher_right, teacher_scaling, teacher_softcap, teacher_band)
    block = min(block_of(one.block_size) for one in (student, teacher))
    mask = student.left if key_mask is None else key_mask.to(torch.int8).contiguous()
    arguments = {
        **student.arguments("", ""), **teacher.arguments("other_", "OTHER_"), "key_mask": mask, "heads": heads,
        "num_rows": num_rows, "length": length, "plane": batch * heads * num_rows, "IS_SQUARED": is_squared,
        "HAS_MASK": key_mask is not None, "BLOCK_ROWS": block, "BLOCK_KEYS": block,
    }  # fmt: skip
    sums = left.new_zeros(NUM_SUMS, batch, heads, num_rows, dtype=torch.float32)
    pair_statistics[-(-num_rows // block), batch * heads](**arguments, sums=sums)
    weight = coefficient[:, None].expand(batch, heads, num_rows)
    if is_squared:
        error = sums[SQUARES] - 2 * sums[PRODUCTS] + sums[OTHER_SQUARES]
    else:
        error = sums[DIVERGENCE]
    # Rows without a visible key have no loss.
    value = torch.where(weight > 0, error * weight, 0).sum()
    if not needs_gradient:
        return value, left.new_empty(0), right.new_empty(0)
    overlap = sums[SQUARES] - sums[PRODUCTS] if is_squared else torch.zeros_like(error)
    coefficients = torch.stack([sums[LSE], sums[OTHER_LSE], weight, overlap])
    gradients = []
    for of_keys, one in ((False, left), (True, right)):
        # Sums are rounded once, at the end.
        gradient = one.new_empty(one.shape, dtype=torch.float32).contiguous()
        grid = -(-one.shape[2] // block), batch * heads
        pair_gradients[grid](**arguments, coefficients=coefficients, gradient=gradient, OF_KEYS=of_keys)
        gradients.append(gradient.to(one.dtype))
    return value, *gradients


class _Side:
    """The scores of the student, or of the teacher, as the kernels take them."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor, scaling: float, softcap: float, band: Sequence[int]):
        self.left, self.right = (unrounded(one).contiguous() for one in (left, right))
        self.scaling, self.softcap, self.band, self.size = scaling, softcap, band, left.shape[3]
        self.block_size = block_dim_of(self.size)

    def arguments(self, small: str, large: str) -> dict[str, Any]:
        """Arguments by name, with a prefix for those of the call and for constants."""
        call = {
            "left": self.left, "right": self.right, "scaling": self.scaling, "softcap": self.softcap or 1.0,
        }  # fmt: skip
        constants = {
            "BEFORE": self.band[0], "AFTER": self.band[1], "HAS_CAP": bool(self.softcap), "SIZE": self.size,
            "BLOCK_SIZE": self.block_size, "PRECISION": "ieee" if self.left.dtype == torch.float32 else "tf32",
        }  # fmt: skip
        return {f"{small}{k}": v for k, v in call.items()} | {f"{large}{k}": v for k, v in constants.items()}
