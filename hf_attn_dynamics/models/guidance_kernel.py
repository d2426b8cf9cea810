# Licensed under the Apache License, Version 2.0.
"""The guidance loss in Triton: value and gradient of `guidance_loss` from tiles that stay on the chip.

With s the scores of a row and B = LSE(s), attention is H = exp(s − B). A first kernel goes over tiles of scores with
an online softmax, and keeps a few sums of each row: B, Σ H², and sums over the target. From these follow, in plain
PyTorch, the loss and numbers a, b, … of each row with which the gradient with respect to the scores is
H⊙(a·H + b + …) plus terms of the target, which two more kernels multiply with keys and queries. Nothing of size
rows × keys is written to memory, and no sum depends on the order of threads.

Triton is optional, and imported only where the kernels are used.
"""

import logging
import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from .guidance_settings import LOSSES


logger = logging.getLogger(__name__)
LARGEST_HEAD = 256
# Sums of each row that the first kernel writes.
LSE, SQUARES, ON_TARGET, TARGET_SCORES, TARGET_SEEN, TARGET_LSE, SCORES, COUNT = range(8)
# Numbers of each row that the gradient kernels read.
NUM_COEFFICIENTS = 8


def use_triton(kernel: str, agrees: Callable[[torch.device, torch.dtype, int], bool], *vectors: torch.Tensor) -> bool:
    """Whether Triton computes a loss, and not a loop over blocks.

    Args:
        kernel (`str`): One of `GUIDANCE_KERNELS`. `auto` takes Triton on GPUs where it is installed, compiles, and
            agrees with the blocks on a small example.
        agrees (callable): Whether it does, for a device, a precision, and the largest size of the vectors.
        vectors (`torch.Tensor` of shape `(…, size)`): Queries, of the student first if there is a teacher.

    Raises:
        ValueError: if `triton` cannot take these queries.
    """
    own = vectors[0]
    if kernel == "blocks" or (kernel == "auto" and not own.is_cuda):
        return False
    reason = next(filter(None, map(why_not_triton, vectors)), None)
    if kernel == "auto":
        return reason is None and agrees(own.device, own.dtype, max(one.shape[-1] for one in vectors))
    if reason is not None:
        raise ValueError(f"guidance_kernel='triton', but {reason}; set it to 'auto' or 'blocks'.")
    return True


def is_as_exact(
    compute: Callable[[], Sequence[torch.Tensor]],
    exact: Callable[[], Sequence[torch.Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    what: str,
) -> bool:
    """Whether kernels run, and give an exact result up to the rounding of a precision; if not, a warning says so.

    Args:
        compute, exact (callable): Return value and gradients.
        device (`torch.device`), dtype (`torch.dtype`): Device and precision of the kernels.
        what (`str`): What they compute, for the warning.
    """
    try:
        errors = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(compute(), exact())]
        error = torch.stack(errors).max().item()
        if error <= max(1e-5, 4 * torch.finfo(dtype).eps):
            return True
        reason = f"they differ by {error:.0e} from the exact loss"
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
    logger.warning(
        f"The Triton kernels of {what} do not work on {device} in {dtype} ({reason}); the loss is computed over "
        "blocks of rows instead, which is slower."
    )
    return False


def why_not_triton(query: torch.Tensor) -> str | None:
    """Why the kernels cannot compute the loss of these queries; `None` if they can."""
    if query.device.type == "cpu" and not _is_interpreted():
        return "the tensors are on a CPU"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernels take float32, float16 and bfloat16, not {str(query.dtype).removeprefix('torch.')}"
    if query.shape[-1] > LARGEST_HEAD:
        return f"heads have {query.shape[-1]} dimensions, more than {LARGEST_HEAD}"
    from .guidance_triton import triton

    return None if triton is not None else "Triton is not installed"


def _is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which takes tensors on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_its_device(function: Callable) -> Callable:
    """Triton launches kernels on the current device, not on that of the first argument."""

    @wraps(function)
    def on_its_device(query: torch.Tensor, *args: Any) -> Any:
        with torch.cuda.device_of(query):
            return function(query, *args)

    return on_its_device


def unrounded(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors in a precision that the kernels can multiply."""
    # The interpreter would multiply the bits of bfloat16 as integers.
    return vectors.float() if vectors.dtype == torch.bfloat16 and _is_interpreted() else vectors


def block_dim_of(size: int) -> int:
    """Size of the blocks that hold vectors of a size: a power of two."""
    return 1 << (max(16, size) - 1).bit_length()


def block_of(block_dim: int) -> int:
    """Number of rows, and of keys, of a tile: what a program holds has to fit on the chip."""
    return 64 if block_dim <= 64 else 32


@on_its_device
def kernel_guidance(
    query: torch.Tensor,
    key: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float,
    key_mask: torch.Tensor | None,
    band: Sequence[int],
    starts: Sequence[int],
    groups: Sequence[torch.Tensor],
    losses: Sequence[int],
    needs_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Guidance loss of one layer and its gradients: arguments and results of `_guidance_blocks`.

    With q the attention to the sink and B including it, Σ H² etc. of the first kernel are those without the sink,
    times powers of 1 − q.
    """
    batch, heads, num_rows, _ = query.shape
    layer = _Layer(query, key, scaling, softcap, key_mask, band, starts, groups, losses)
    sums, target_scores = layer.statistics()
    lse = sums[LSE] if sinks is None else torch.logaddexp(sums[LSE], sinks.float()[:, None])
    keep = (sums[LSE] - lse).exp().nan_to_num(0)  # 1 − q; rows without visible keys have neither
    to_sink = None if sinks is None else torch.sigmoid(sinks.float()[:, None] - sums[LSE])
    squares, on_target = sums[SQUARES] * keep.square(), sums[ON_TARGET] * keep

    value = query.new_zeros(len(losses), dtype=torch.float32)
    coefficients = query.new_zeros(NUM_COEFFICIENTS, batch, heads, num_rows, dtype=torch.float32)
    coefficients[0] = lse
    target_gradients = torch.zeros_like(target_scores)
    sink_grad = query.new_zeros(heads if needs_gradient and sinks is not None else 0, dtype=torch.float32)
    for number, (loss, head, tensors) in enumerate(layer.layout):
        keys, _, scale, constant, uniform, coefficient = (tensor[:, None] for tensor in tensors)
        by_column = keys.shape[2] == 1
        _, squared, linear, on_attention, on_keys, share, share_lse, on_all = (one[:, head] for one in coefficients)
        scores = target_scores[:, head]
        weights = layer.weights[:, None, number] * scale.unsqueeze(-1)
        chosen = (scores > -torch.inf) & (weights != 0)
        logs = (scores - lse[:, head].unsqueeze(-1)).masked_fill(~chosen, -torch.inf)
        at_target = logs.exp()
        by_sum = None  # factor of the attention to the sink, in the gradient with respect to its score
        if loss == "squared":
            overlap = scale * on_target[:, head] if by_column else (at_target * weights).sum(-1)
            error = squares[:, head] - 2 * overlap + constant
            factor = squares[:, head] - overlap
            if to_sink is not None:
                lost = to_sink[:, head] * uniform  # subtracted from the overlap with a uniform row
                error, factor = error + 2 * lost, factor + lost
                by_sum = 2 * (uniform - factor)
            squared.copy_(2 * coefficient.expand_as(error))
            linear.copy_(-2 * factor * coefficient)
            if by_column:
                on_attention.copy_((-2 * scale * coefficient).expand_as(error))
            own = -2 * at_target * weights
        elif loss == "cross_entropy":
            if by_column:
                total = scale * sums[TARGET_SEEN][:, head]
                error = scale * (lse[:, head] * sums[TARGET_SEEN][:, head] - sums[TARGET_SCORES][:, head])
                on_keys.copy_((-scale * coefficient).expand_as(error))
            else:
                weights = weights * chosen
                total, error = weights.sum(-1), -(weights * logs.masked_fill(~chosen, 0)).sum(-1)
            if layer.has_uniform:
                error = error + uniform * (lse[:, head] * sums[COUNT][:, head] - sums[SCORES][:, head])
                total = total + uniform * sums[COUNT][:, head]
                on_all.copy_((-uniform * coefficient).expand_as(error))
            linear.copy_(total * coefficient)
            own, by_sum = -weights, total
        else:
            mass = sums[TARGET_LSE][:, head] - lse[:, head] if by_column else logs.logsumexp(-1)
            if loss == "mass":
                error, by_sum = -mass, torch.ones_like(mass)
                linear.copy_(coefficient.expand_as(error))
                own = -(logs - mass.masked_fill(mass == -torch.inf, 0).unsqueeze(-1)).exp()
                if by_column:
                    share.copy_((-coefficient).expand_as(error).masked_fill(mass == -torch.inf, 0))
                    share_lse.copy_(sums[TARGET_LSE][:, head])
            else:
                error = mass.exp()
                by_sum = -error
                linear.copy_(-error * coefficient)
                if by_column:
                    on_attention.copy_(coefficient.expand_as(error))
                own = at_target
        # Rows without a visible target may have infinite losses.
        value[number] = torch.where(coefficient > 0, error * coefficient, 0).sum()
        if needs_gradient:
            if not by_column:
                target_gradients[:, head] = (own * coefficient.unsqueeze(-1)).masked_fill(~chosen, 0)
            if to_sink is not None and by_sum is not None:
                sink_grad[head] = torch.where(coefficient > 0, by_sum * to_sink[:, head] * coefficient, 0).sum((0, 2))
    if sinks is not None:
        sink_grad = sink_grad.to(sinks.dtype)
    if not needs_gradient:
        return value, query.new_empty(0), key.new_empty(0), sink_grad
    by_query, by_key = layer.gradients(coefficients, target_gradients)
    return value, by_query.to(query.dtype), by_key.to(key.dtype), sink_grad


class _Layer:
    """Tensors and sizes of one layer, as the kernels take them.

    Attributes:
        layout (`list[tuple[str, slice, list[torch.Tensor]]]`): Loss, heads and tensors of each group.
        weights (`torch.Tensor` of shape `(batch, groups, rows, k)`): Weights of the targets that have rows of their
            own; the others are weights of columns.
        has_uniform (`bool`): Whether a cross-entropy has uniform rows.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        scaling: float,
        softcap: float,
        key_mask: torch.Tensor | None,
        band: Sequence[int],
        starts: Sequence[int],
        groups: Sequence[torch.Tensor],
        losses: Sequence[int],
    ):
        query, key = unrounded(query), unrounded(key)
        self.query, self.key, self.scaling, self.softcap, self.key_mask = query, key, scaling, softcap, key_mask
        self.before, self.after = band
        device, (batch, self.heads, self.num_rows, self.head_dim) = query.device, query.shape
        self.length = key.shape[2]
        self.layout = [
            (LOSSES[losses[i]], slice(start, stop), groups[6 * i : 6 * i + 6])
            for i, (start, stop) in enumerate(zip(starts, starts[1:]))
        ]
        # From a list: its size is known without asking the device.
        of_heads = [i for i, (_, heads, _) in enumerate(self.layout) for _ in range(heads.start, heads.stop)]
        self.group_of_head = torch.tensor(of_heads, dtype=torch.int32, device=device)
        self.has_columns = any(tensors[0].shape[1] == 1 for *_, tensors in self.layout)
        self.num_targets = max((t[0].shape[2] for *_, t in self.layout if t[0].shape[1] > 1), default=0)
        self.has_mass = any(loss in ("mass", "avoid") for loss, *_ in self.layout) and self.has_columns
        self.has_uniform = any(
            loss == "cross_entropy" and (tensors[4].shape[1] > 1 or self.num_rows == 1)
            for loss, _, tensors in self.layout
        )
        number = len(losses)
        self.columns = query.new_zeros(batch, number, self.length if self.has_columns else 0, dtype=torch.float32)
        shape = batch, number, self.num_rows, self.num_targets
        self.targets = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.weights = query.new_zeros(shape, dtype=torch.float32)
        for i, (loss, _, (keys, weights, *_)) in enumerate(self.layout):
            if keys.shape[1] == 1:
                if loss in ("mass", "avoid"):
                    weights = (weights != 0).float()
                    self.columns[:, i].scatter_reduce_(1, keys[:, 0], weights[:, 0], "amax")
                else:
                    self.columns[:, i].scatter_add_(1, keys[:, 0], weights[:, 0].float())
            else:
                here = slice(keys.shape[2])
                self.targets[:, i, :, here] = torch.where(weights != 0, keys, -1)
                self.weights[:, i, :, here] = weights
        self.block_dim = block_dim_of(self.head_dim)
        self.block = block_of(self.block_dim)

    def _arguments(self) -> dict[str, Any]:
        mask = self.columns if self.key_mask is None else self.key_mask.to(torch.int8).contiguous()
        query, key = self.query, self.key
        return {
            "query": query, "key": key, "key_mask": mask, "column_weights": self.columns, "targets": self.targets,
            "group_of_head": self.group_of_head,
            "query_batch": query.stride(0), "query_head": query.stride(1), "query_row": query.stride(2),
            "query_dim": query.stride(3), "key_batch": key.stride(0), "key_head": key.stride(1),
            "key_row": key.stride(2), "key_dim": key.stride(3),
            "heads": self.heads, "num_groups": len(self.layout), "num_rows": self.num_rows, "length": self.length,
            "num_targets": self.num_targets, "plane": query.shape[0] * self.heads * self.num_rows,
            "scaling": self.scaling, "softcap": self.softcap or 1.0,
            "BEFORE": self.before, "AFTER": self.after, "HAS_CAP": bool(self.softcap),
            "HAS_MASK": self.key_mask is not None, "HAS_COLUMNS": self.has_columns, "HAS_MASS": self.has_mass,
            "HAS_UNIFORM": self.has_uniform, "HEAD_DIM": self.head_dim, "BLOCK_DIM": self.block_dim,
            "BLOCK_ROWS": self.block, "BLOCK_KEYS": self.block,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        }  # fmt: skip

    def _grid(self, size: int) -> tuple[int, int]:
        return -(-size // self.block), self.query.shape[0] * self.heads

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of each row, `(8, batch, heads, rows)`, and the scores of its targets, −∞ for invisible ones."""
        from .guidance_triton import statistics

        batch = self.query.shape[0]
        sums = self.query.new_zeros(8, batch, self.heads, self.num_rows, dtype=torch.float32)
        target_scores = self.query.new_full(
            (batch, self.heads, self.num_rows, self.num_targets), -torch.inf, dtype=torch.float32
        )
        statistics[self._grid(self.num_rows)](**self._arguments(), sums=sums, target_scores=target_scores)
        return sums, target_scores

    def gradients(
        self, coefficients: torch.Tensor, target_gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients with respect to query and key, given the numbers of each row."""
        from .guidance_triton import gradients

        by_query, by_key = (one.new_empty(one.shape) for one in (self.query, self.key))
        arguments = {**self._arguments(), "coefficients": coefficients, "target_gradients": target_gradients}
        gradients[self._grid(self.num_rows)](**arguments, gradient=by_query, OF_KEYS=False)
        gradients[self._grid(self.length)](**arguments, gradient=by_key, OF_KEYS=True)
        return by_query, by_key
