# Licensed under the Apache License, Version 2.0.
"""The guidance loss in Triton: value and gradient of `guidance_loss` from tiles that stay on the chip.

With s the scores of a row and B = LSE(s), attention is H = exp(s − B). A first kernel goes over tiles of scores with
an online softmax, and keeps a few sums of each row: B, Σ H², and sums over the target. From these follow, in plain
PyTorch, the loss and numbers a, b, … of each row with which the gradient with respect to the scores is
H⊙(a·H + b + …) plus terms of the target, which two more kernels multiply with keys and queries. Nothing of size
rows × keys is written to memory, and no sum depends on the order of threads.

Triton is optional, and is not needed to load this file, which is saved with checkpoints.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from .guidance_settings import LOSSES


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LARGEST_HEAD = 256
# Sums of each row that the first kernel writes.
LSE, SQUARES, ON_TARGET, TARGET_SCORES, TARGET_SEEN, TARGET_LSE, SCORES, COUNT = range(8)
# Numbers of each row that the gradient kernels read.
NUM_COEFFICIENTS = 8

if triton is not None:

    @triton.jit
    def _tile(
        query,
        key,
        rows,
        keys,
        key_mask,
        num_rows,
        length,
        scaling,
        softcap,
        BEFORE: tl.constexpr,
        AFTER: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_MASK: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """Scores of a tile, and which of them are visible."""
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
        if HAS_CAP:
            small = tl.exp(-2 * tl.abs(scores) / softcap)
            capped = softcap * (1 - small) / (1 + small)
            scores = tl.where(scores < 0, -capped, capped)
        visible = (rows < num_rows)[:, None] & (keys < length)[None, :]
        if BEFORE >= 0:
            visible = visible & (keys[None, :] >= rows[:, None] - BEFORE)
        if AFTER >= 0:
            visible = visible & (keys[None, :] <= rows[:, None] + AFTER)
        if HAS_MASK:
            real = tl.load(key_mask + keys, mask=keys < length, other=0)
            visible = visible & (real != 0)[None, :]
        return scores, visible

    @triton.jit
    def _statistics(
        query,
        key,
        key_mask,
        column_weights,
        targets,
        group_of_head,
        sums,
        target_scores,
        query_batch,
        query_head,
        query_row,
        query_dim,
        key_batch,
        key_head,
        key_row,
        key_dim,
        heads,
        num_groups,
        num_rows,
        length,
        num_targets,
        plane,
        scaling,
        softcap,
        BEFORE: tl.constexpr,
        AFTER: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_MASK: tl.constexpr,
        HAS_COLUMNS: tl.constexpr,
        HAS_MASS: tl.constexpr,
        HAS_UNIFORM: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
        sentence, head = place // heads, place % heads
        group = sentence * num_groups + tl.load(group_of_head + head)
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, BLOCK_DIM)
        is_row = rows < num_rows
        query += sentence * query_batch + head * query_head
        key += sentence * key_batch + head * key_head
        key_mask += sentence * length
        column_weights += group * length
        targets += group * num_rows * num_targets
        target_scores += place * num_rows * num_targets
        own = tl.load(
            query + rows[:, None] * query_row + dims[None, :] * query_dim,
            mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        top = tl.full([BLOCK_ROWS], -3.0e38, tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        squares = tl.zeros([BLOCK_ROWS], tl.float32)
        on_target = tl.zeros([BLOCK_ROWS], tl.float32)
        score_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        seen = tl.zeros([BLOCK_ROWS], tl.float32)
        mass_top = tl.full([BLOCK_ROWS], -3.0e38, tl.float32)
        mass = tl.zeros([BLOCK_ROWS], tl.float32)
        all_scores = tl.zeros([BLOCK_ROWS], tl.float32)
        count = tl.zeros([BLOCK_ROWS], tl.float32)
        low, high = 0, length
        if BEFORE >= 0:
            low = tl.maximum(0, block * BLOCK_ROWS - BEFORE) // BLOCK_KEYS * BLOCK_KEYS
        if AFTER >= 0:
            high = tl.minimum(length, block * BLOCK_ROWS + BLOCK_ROWS + AFTER)
        for start in range(low, high, BLOCK_KEYS):
            keys = start + tl.arange(0, BLOCK_KEYS)
            others = tl.load(
                key + keys[:, None] * key_row + dims[None, :] * key_dim,
                mask=(keys < length)[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
            )
            scores, visible = _tile(
                own, others, rows, keys, key_mask, num_rows, length, scaling, softcap, BEFORE, AFTER, HAS_CAP,
                HAS_MASK, PRECISION,
            )  # fmt: skip
            masked = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(masked, 1))
            weights = tl.exp(masked - new_top[:, None])
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            squares = squares * shrink * shrink + tl.sum(weights * weights, 1)
            if HAS_COLUMNS:
                wanted = tl.load(column_weights + keys, mask=keys < length, other=0.0)
                on_target = on_target * shrink + tl.sum(weights * wanted[None, :], 1)
                score_sum += tl.sum(tl.where(visible, scores * wanted[None, :], 0.0), 1)
                seen += tl.sum(tl.where(visible, wanted[None, :], 0.0), 1)
                if HAS_MASS:
                    inside = tl.where(visible & (wanted != 0)[None, :], scores, float("-inf"))
                    new_mass_top = tl.maximum(mass_top, tl.max(inside, 1))
                    mass = mass * tl.exp(mass_top - new_mass_top) + tl.sum(tl.exp(inside - new_mass_top[:, None]), 1)
                    mass_top = new_mass_top
            if HAS_UNIFORM:
                all_scores += tl.sum(tl.where(visible, scores, 0.0), 1)
                count += tl.sum(tl.where(visible, 1.0, 0.0), 1)
            for number in range(num_targets):
                target = tl.load(targets + rows * num_targets + number, mask=is_row, other=-1)
                hit = visible & (target[:, None] == keys[None, :])
                is_hit = tl.max(tl.where(hit, 1, 0), 1) > 0
                score = tl.sum(tl.where(hit, scores, 0.0), 1)
                tl.store(target_scores + rows * num_targets + number, score, mask=is_hit)
            top = new_top
        sums += place * num_rows + rows
        inverse = 1 / tl.where(total > 0, total, 1.0)
        tl.store(sums, top + tl.log(total), mask=is_row)
        tl.store(sums + plane, squares * inverse * inverse, mask=is_row)
        if HAS_COLUMNS:
            tl.store(sums + 2 * plane, on_target * inverse, mask=is_row)
            tl.store(sums + 3 * plane, score_sum, mask=is_row)
            tl.store(sums + 4 * plane, seen, mask=is_row)
            if HAS_MASS:
                tl.store(sums + 5 * plane, mass_top + tl.log(mass), mask=is_row)
        if HAS_UNIFORM:
            tl.store(sums + 6 * plane, all_scores, mask=is_row)
            tl.store(sums + 7 * plane, count, mask=is_row)

    @triton.jit
    def _score_gradient(
        scores,
        visible,
        rows,
        keys,
        coefficients,
        column_weights,
        targets,
        target_gradients,
        num_rows,
        length,
        num_targets,
        plane,
        softcap,
        HAS_CAP: tl.constexpr,
        HAS_COLUMNS: tl.constexpr,
        HAS_MASS: tl.constexpr,
        HAS_UNIFORM: tl.constexpr,
    ):
        """Gradient of the loss with respect to the scores of a tile, before they are scaled."""
        is_row = rows < num_rows
        by_row = coefficients + rows
        lse = tl.load(by_row, mask=is_row, other=0.0)
        squared = tl.load(by_row + plane, mask=is_row, other=0.0)
        linear = tl.load(by_row + 2 * plane, mask=is_row, other=0.0)
        attention = tl.where(visible, tl.exp(tl.where(visible, scores - lse[:, None], 0.0)), 0.0)
        gradient = attention * (squared[:, None] * attention + linear[:, None])
        if HAS_COLUMNS:
            wanted = tl.load(column_weights + keys, mask=keys < length, other=0.0)
            on_attention = tl.load(by_row + 3 * plane, mask=is_row, other=0.0)
            on_target = tl.load(by_row + 4 * plane, mask=is_row, other=0.0)
            by_column = attention * on_attention[:, None] + tl.where(visible, on_target[:, None], 0.0)
            gradient += by_column * wanted[None, :]
            if HAS_MASS:
                share = tl.load(by_row + 5 * plane, mask=is_row, other=0.0)
                mass_lse = tl.load(by_row + 6 * plane, mask=is_row, other=0.0)
                inside = visible & (wanted != 0)[None, :] & (share != 0)[:, None]
                fraction = tl.exp(tl.where(inside, scores - mass_lse[:, None], 0.0))
                gradient += tl.where(inside, share[:, None] * fraction, 0.0)
        if HAS_UNIFORM:
            uniform = tl.load(by_row + 7 * plane, mask=is_row, other=0.0)
            gradient += tl.where(visible, uniform[:, None], 0.0)
        for number in range(num_targets):
            target = tl.load(targets + rows * num_targets + number, mask=is_row, other=-1)
            own = tl.load(target_gradients + rows * num_targets + number, mask=is_row, other=0.0)
            gradient += tl.where(visible & (target[:, None] == keys[None, :]), own[:, None], 0.0)
        if HAS_CAP:
            bent = scores / softcap
            gradient = gradient * (1 - bent * bent)
        return gradient

    @triton.jit
    def _gradients(
        query,
        key,
        key_mask,
        column_weights,
        targets,
        group_of_head,
        coefficients,
        target_gradients,
        gradient,
        query_batch,
        query_head,
        query_row,
        query_dim,
        key_batch,
        key_head,
        key_row,
        key_dim,
        heads,
        num_groups,
        num_rows,
        length,
        num_targets,
        plane,
        scaling,
        softcap,
        OF_KEYS: tl.constexpr,
        BEFORE: tl.constexpr,
        AFTER: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_MASK: tl.constexpr,
        HAS_COLUMNS: tl.constexpr,
        HAS_MASS: tl.constexpr,
        HAS_UNIFORM: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_KEYS: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """Gradient with respect to a block of queries, or of keys: each program owns one, and goes over the others."""
        block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
        sentence, head = place // heads, place % heads
        group = sentence * num_groups + tl.load(group_of_head + head)
        dims = tl.arange(0, BLOCK_DIM)
        query += sentence * query_batch + head * query_head
        key += sentence * key_batch + head * key_head
        key_mask += sentence * length
        column_weights += group * length
        targets += group * num_rows * num_targets
        target_gradients += place * num_rows * num_targets
        coefficients += place * num_rows
        if OF_KEYS:
            OWN: tl.constexpr = BLOCK_KEYS
            OTHER: tl.constexpr = BLOCK_ROWS
            last = num_rows
            low, high = 0, num_rows
            if AFTER >= 0:
                low = tl.maximum(0, block * BLOCK_KEYS - AFTER) // BLOCK_ROWS * BLOCK_ROWS
            if BEFORE >= 0:
                high = tl.minimum(num_rows, block * BLOCK_KEYS + BLOCK_KEYS + BEFORE)
        else:
            OWN: tl.constexpr = BLOCK_ROWS
            OTHER: tl.constexpr = BLOCK_KEYS
            last = length
            low, high = 0, length
            if BEFORE >= 0:
                low = tl.maximum(0, block * BLOCK_ROWS - BEFORE) // BLOCK_KEYS * BLOCK_KEYS
            if AFTER >= 0:
                high = tl.minimum(length, block * BLOCK_ROWS + BLOCK_ROWS + AFTER)
        mine = block * OWN + tl.arange(0, OWN)
        is_dim = (dims < HEAD_DIM)[None, :]
        if OF_KEYS:
            is_mine = mine < length
            own = tl.load(
                key + mine[:, None] * key_row + dims[None, :] * key_dim, mask=is_mine[:, None] & is_dim, other=0.0
            )
        else:
            is_mine = mine < num_rows
            own = tl.load(
                query + mine[:, None] * query_row + dims[None, :] * query_dim,
                mask=is_mine[:, None] & is_dim,
                other=0.0,
            )
        result = tl.zeros([OWN, BLOCK_DIM], tl.float32)
        for start in range(low, high, OTHER):
            theirs = start + tl.arange(0, OTHER)
            is_theirs = (theirs < last)[:, None] & is_dim
            if OF_KEYS:
                others = tl.load(
                    query + theirs[:, None] * query_row + dims[None, :] * query_dim, mask=is_theirs, other=0.0
                )
                scores, visible = _tile(
                    others, own, theirs, mine, key_mask, num_rows, length, scaling, softcap, BEFORE, AFTER, HAS_CAP,
                    HAS_MASK, PRECISION,
                )  # fmt: skip
                slope = _score_gradient(
                    scores, visible, theirs, mine, coefficients, column_weights, targets, target_gradients, num_rows,
                    length, num_targets, plane, softcap, HAS_CAP, HAS_COLUMNS, HAS_MASS, HAS_UNIFORM,
                )  # fmt: skip
                result += tl.dot(tl.trans(slope).to(others.dtype), others, input_precision=PRECISION)
            else:
                others = tl.load(key + theirs[:, None] * key_row + dims[None, :] * key_dim, mask=is_theirs, other=0.0)
                scores, visible = _tile(
                    own, others, mine, theirs, key_mask, num_rows, length, scaling, softcap, BEFORE, AFTER, HAS_CAP,
                    HAS_MASK, PRECISION,
                )  # fmt: skip
                slope = _score_gradient(
                    scores, visible, mine, theirs, coefficients, column_weights, targets, target_gradients, num_rows,
                    length, num_targets, plane, softcap, HAS_CAP, HAS_COLUMNS, HAS_MASS, HAS_UNIFORM,
                )  # fmt: skip
                result += tl.dot(slope.to(others.dtype), others, input_precision=PRECISION)
        gradient += (place * (length if OF_KEYS else num_rows) + mine[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(gradient, result * scaling, mask=is_mine[:, None] & is_dim)


def why_not_triton(query: torch.Tensor) -> str | None:
    """Why the kernels cannot compute the loss of these queries; `None` if they can."""
    if triton is None:
        return "Triton is not installed"
    if query.device.type == "cpu" and not _is_interpreted():
        return "the tensors are on a CPU"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernels take float32, float16 and bfloat16, not {str(query.dtype).removeprefix('torch.')}"
    if query.shape[-1] > LARGEST_HEAD:
        return f"heads have {query.shape[-1]} dimensions, more than {LARGEST_HEAD}"
    return None


def _is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which takes tensors on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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
        if query.dtype == torch.bfloat16 and _is_interpreted():
            # The interpreter would multiply the bits of bfloat16 as integers.
            query, key = query.float(), key.float()
        self.query, self.key, self.scaling, self.softcap, self.key_mask = query, key, scaling, softcap, key_mask
        self.before, self.after = band
        device, (batch, self.heads, self.num_rows, self.head_dim) = query.device, query.shape
        self.length = key.shape[2]
        self.layout = [
            (LOSSES[losses[i]], slice(start, stop), groups[6 * i : 6 * i + 6])
            for i, (start, stop) in enumerate(zip(starts, starts[1:]))
        ]
        sizes = torch.tensor([stop - start for start, stop in zip(starts, starts[1:])], device=device)
        self.group_of_head = torch.arange(len(losses), device=device, dtype=torch.int32).repeat_interleave(sizes)
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
        self.block_dim = triton.next_power_of_2(max(16, self.head_dim))
        # What a program holds has to fit on the chip.
        self.block = 64 if self.block_dim <= 64 else 32

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
        return triton.cdiv(size, self.block), self.query.shape[0] * self.heads

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of each row, `(8, batch, heads, rows)`, and the scores of its targets, −∞ for invisible ones."""
        batch = self.query.shape[0]
        sums = self.query.new_zeros(8, batch, self.heads, self.num_rows, dtype=torch.float32)
        target_scores = self.query.new_full(
            (batch, self.heads, self.num_rows, self.num_targets), -torch.inf, dtype=torch.float32
        )
        _statistics[self._grid(self.num_rows)](**self._arguments(), sums=sums, target_scores=target_scores)
        return sums, target_scores

    def gradients(
        self, coefficients: torch.Tensor, target_gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients with respect to query and key, given the numbers of each row."""
        by_query, by_key = (one.new_empty(one.shape) for one in (self.query, self.key))
        arguments = {**self._arguments(), "coefficients": coefficients, "target_gradients": target_gradients}
        _gradients[self._grid(self.num_rows)](**arguments, gradient=by_query, OF_KEYS=False)
        _gradients[self._grid(self.length)](**arguments, gradient=by_key, OF_KEYS=True)
        return by_query, by_key
