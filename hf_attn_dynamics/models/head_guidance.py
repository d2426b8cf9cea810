# Licensed under the Apache License, Version 2.0.
"""Attention patterns and the guidance loss (Deshpande & Narasimhan 2020).

A *pattern* names the keys that each query row should attend to. The guidance loss is the squared distance between a
head's attention and its pattern. It is computed exactly, value and gradient, without keeping an attention matrix:
blocks of rows are formed, used and forgotten while the forward pass has them in cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


REDUCTIONS = ("row_mean", "paper", "code")
EDGE_ROWS = ("uniform", "zero")

# Attention weights of one block (sentences x heads x rows x keys) formed at a time. On the CPU a block, its squares
# and its gradient should share the last-level cache; an accelerator wants fewer, larger products.
_BLOCK_ELEMENTS = {"cpu": 2**20, "accelerator": 2**23}


# ---------------------------------------------------------------------------------------------------------------------
# Patterns
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatternRows:
    """Target distributions P of one pattern for a batch, row by row, as a few weighted keys.

    Args:
        keys (`torch.LongTensor` of shape `(batch, rows, k)`): Attended key positions; `rows` is the length of the
            batch, or 1 if all rows of a sentence share one target.
        weights (`torch.FloatTensor` of the same shape): Target weight of each key, 0 for unused slots. The keys of a
            row must differ wherever their weights are not 0.
        uniform (`torch.BoolTensor` of shape `(batch, rows)`, *optional*): Rows whose target is uniform over the real
            tokens of the sentence (the last row of `next`); their `weights` are 0.
        included (`torch.BoolTensor` of shape `(batch,)`, *optional*): Sentences the pattern applies to; the others
            (no "." for `period`) add nothing to the loss.
    """

    keys: torch.Tensor
    weights: torch.Tensor
    uniform: torch.Tensor | None = None
    included: torch.Tensor | None = None


def _exact_dtype(device: torch.device) -> torch.dtype:
    """Precision of the small per-row tensors; they are rounded once, where they meet the attention."""
    return torch.float32 if device.type == "mps" else torch.float64


PatternFunction = Callable[[torch.Tensor | None, torch.Tensor], PatternRows]


def _one_hot_rows(keys: torch.Tensor, edge: torch.Tensor | None = None) -> PatternRows:
    """Rows that attend to the single key `keys` (batch, rows); rows marked as `edge` are uniform instead."""
    weights = torch.ones_like(keys, dtype=torch.float32) if edge is None else (~edge).float()
    return PatternRows(keys.unsqueeze(-1), weights.unsqueeze(-1), uniform=edge)


def next_token(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
    """Each token attends to the following real token; the last one uniformly."""
    length = attention_mask.shape[1]
    positions = torch.arange(length, device=attention_mask.device)
    nearest = torch.where(attention_mask, positions, length).flip(1).cummin(1).values.flip(1)
    following = nn.functional.pad(nearest[:, 1:], (0, 1), value=length)
    return _one_hot_rows(following.clamp(max=length - 1), edge=following == length)


def previous_token(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
    """Each token attends to the preceding real token; the first one uniformly."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    nearest = torch.where(attention_mask, positions, -1).cummax(1).values
    preceding = nn.functional.pad(nearest[:, :-1], (1, 0), value=-1)
    return _one_hot_rows(preceding.clamp(min=0), edge=preceding == -1)


def first_token(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
    """Each token attends to the first real token."""
    return _one_hot_rows(attention_mask.int().argmax(1, keepdim=True))


def same_token(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
    """Each token attends to itself."""
    return _one_hot_rows(torch.arange(attention_mask.shape[1], device=attention_mask.device).expand_as(attention_mask))


def token_set(token_ids: Sequence[int]) -> PatternFunction:
    """Pattern whose rows are uniform over the tokens of the sentence whose id is in `token_ids`.

    Args:
        token_ids (`Sequence[int]`): Ids of the attended tokens, such as the delimiters of a tokenizer.

    Returns:
        `PatternFunction`: leaves out sentences without any such token.
    """

    def pattern(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
        if input_ids is None:
            raise ValueError(
                "guidance patterns `delim` and `period` read token ids: pass `input_ids`, not embeddings."
            )
        wanted = torch.tensor(token_ids, device=input_ids.device)
        members = torch.isin(input_ids, wanted) & attention_mask
        count = members.sum(1, keepdim=True)
        # Compiled graphs have no data-dependent shapes: there every position keeps a slot, most with weight 0.
        slots = members.shape[1] if torch.compiler.is_compiling() else max(int(count.max()), 1)
        found, keys = members.int().sort(dim=1, descending=True, stable=True)
        weights = found[:, :slots].to(_exact_dtype(found.device)) / count.clamp(min=1)
        return PatternRows(keys[:, None, :slots], weights[:, None], included=count.squeeze(1) > 0)

    return pattern


_PATTERNS: dict[str, PatternFunction] = {
    "next": next_token,
    "prev": previous_token,
    "first": first_token,
    "self": same_token,
}
# Built for each model from the token ids of this configuration key.
TOKEN_SET_PATTERNS = {"delim": "delimiter_token_ids", "period": "period_token_ids"}
_BUILT_IN = frozenset([*_PATTERNS, *TOKEN_SET_PATTERNS])


def register_pattern(name: str, pattern: PatternFunction) -> None:
    """Make an attention pattern available to `guidance` configurations under `name`.

    Args:
        name (`str`): Name used in configurations.
        pattern (`PatternFunction`): Called with `input_ids` (`(batch, length)`, or `None` if the model was given
            embeddings) and the boolean `attention_mask` (`(batch, length)`, True for real tokens); returns
            [`PatternRows`]. It must depend on the inputs alone.

    Raises:
        ValueError: if `name` belongs to a built-in pattern, or is not a non-empty string.

    Example:
        >>> def second_token(input_ids, attention_mask):
        ...     keys = torch.ones(len(attention_mask), 1, 1, dtype=torch.long)
        ...     return PatternRows(keys, torch.ones_like(keys, dtype=torch.float32))
        >>> register_pattern("second", second_token)
        >>> "second" in pattern_names()
        True
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"pattern name must be a non-empty string, got {name!r}.")
    if name in _BUILT_IN:
        raise ValueError(f"pattern name {name!r} is built in; choose another one.")
    _PATTERNS[name] = pattern


def pattern_names() -> list[str]:
    """Names that a `guidance` configuration may use: the built-in patterns and the registered ones."""
    return [*_PATTERNS, *TOKEN_SET_PATTERNS]


# ---------------------------------------------------------------------------------------------------------------------
# What one forward pass asks of its layers
# ---------------------------------------------------------------------------------------------------------------------


def count_sentences(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number of sentences that the guidance loss is the mean over, a scalar: those of pure padding do not count.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, length)`): Not 0 for real tokens.
    """
    return attention_mask.bool().any(-1).sum()


@dataclass(frozen=True)
class LayerTargets:
    """What the guided heads of a layer are compared with, in the precision and on the device of its queries.

    Args:
        heads (`slice` or `torch.LongTensor`): The guided heads, pattern by pattern.
        starts (`list[int]`): Where each pattern starts among them, and their number at the end.
        groups (`list[torch.Tensor]`): For each pattern in turn: `keys` and `weights` of shape `(batch, rows, k)`, see
            [`PatternRows`]; `constant` of shape `(batch, rows)`, what is left of a row's squared error without the
            terms that depend on attention (`Σ P²`, less twice the overlap of uniform rows); `coefficient` of shape
            `(batch, length)`, the weight of each row's squared error in units of `unit`, 0 at padding and in
            sentences left out.
        unit (`torch.Tensor`): Largest weight of a row. Gradients are kept in units of it: as they are formed before
            the scale of the loss is known, half precision would lose them otherwise.
        key_mask (`torch.BoolTensor` of shape `(batch, length)`, *optional*): True for keys that may be attended to.
    """

    heads: slice | torch.Tensor
    starts: list[int]
    groups: list[torch.Tensor]
    unit: torch.Tensor
    key_mask: torch.Tensor | None


class GuidanceTargets:
    """Patterns, masks and row weights of one batch, shared by all layers of a forward pass.

    Args:
        guidance (`dict`): The `guidance` entry of a headwise configuration, validated.
        guided_heads (`dict[int, dict[str, list[int]]]`): Heads of each pattern in each guided layer.
        input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Token ids.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 1 for real tokens; all real if `None`.
        shape (`tuple[int, int]`): `(batch, length)`.
        device (`torch.device`): Where the model's inputs are.

    Raises:
        ValueError: if the mask is not of shape `(batch, length)`, or a pattern needs token ids that were not given.
    """

    def __init__(
        self,
        guidance: dict,
        guided_heads: dict[int, dict[str, list[int]]],
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        shape: tuple[int, int],
        device: torch.device,
    ):
        if attention_mask is None:
            real = torch.ones(shape, dtype=torch.bool, device=device)
        elif attention_mask.shape == shape:
            real = attention_mask.to(device).bool()
        else:
            raise ValueError(
                f"guidance needs an attention_mask of shape (batch, length) = {tuple(shape)}, "
                f"got {tuple(attention_mask.shape)}."
            )
        self.reduction = guidance["reduction"]
        self.guided_heads = guided_heads
        self.lengths = real.sum(1)
        self.num_sentences = count_sentences(real).clamp(min=1)
        self.real = real
        # The softmax of a sentence of pure padding is never used, but must not be NaN.
        self.key_mask = real | (self.lengths == 0).unsqueeze(1)
        if attention_mask is None or (not torch.compiler.is_compiling() and bool(self.key_mask.all())):
            self.key_mask = None
        names = {name for layer in guided_heads.values() for name in layer}
        self.rows = {name: self._pattern(name, guidance)(input_ids, real) for name in sorted(names)}
        self.uniform_weight = 1.0 if guidance["edge_rows"] == "uniform" else 0.0
        self._layers: dict[tuple, LayerTargets] = {}

    @staticmethod
    def _pattern(name: str, guidance: dict) -> PatternFunction:
        return token_set(guidance[TOKEN_SET_PATTERNS[name]]) if name in TOKEN_SET_PATTERNS else _PATTERNS[name]

    def layer(self, layer: int, dtype: torch.dtype, device: torch.device) -> LayerTargets | None:
        """Targets of one layer, for queries of this precision on this device; `None` if no head is guided there."""
        layout = self.guided_heads.get(layer)
        if not layout:
            return None
        key = (tuple((name, tuple(heads)) for name, heads in layout.items()), dtype, device)
        if key not in self._layers:
            self._layers[key] = self._layer_targets(layout, torch.promote_types(dtype, torch.float32), device)
        return self._layers[key]

    def _layer_targets(self, layout: dict[str, list[int]], dtype: torch.dtype, device: torch.device) -> LayerTargets:
        heads, starts, groups = [], [0], []
        for name, of_pattern in layout.items():
            heads += of_pattern
            starts.append(len(heads))
            groups.append(self._group(name, len(of_pattern)))
        largest = torch.stack([coefficient.max() for *_, coefficient in groups]).max()
        unit = torch.where(largest > 0, largest, 1.0)
        tensors = []
        for keys, weights, constant, coefficient in groups:
            tensors += [keys.to(device), *(t.to(device, dtype) for t in (weights, constant, coefficient / unit))]
        adjacent = heads == list(range(heads[0], heads[0] + len(heads)))
        index = slice(heads[0], heads[0] + len(heads)) if adjacent else torch.tensor(heads, device=device)
        key_mask = self.key_mask if self.key_mask is None else self.key_mask.to(device)
        return LayerTargets(index, starts, tensors, unit.to(device, dtype), key_mask)

    def _group(self, name: str, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`keys, weights, constant, coefficient` of a pattern with so many heads, before `unit` is taken out."""
        rows = self.rows[name]
        exact = _exact_dtype(self.real.device)
        constant = rows.weights.to(exact).square().sum(-1)
        lengths = self.lengths.clamp(min=1).unsqueeze(1).to(exact)
        if rows.uniform is not None:
            # ‖H − 1/n‖² = ΣH² − 2/n + 1/n; a row of zeros instead (`edge_rows: zero`) leaves ΣH².
            constant = constant - self.uniform_weight * rows.uniform / lengths
        coefficient = self.real / self.num_sentences.to(exact)
        if self.reduction != "paper":
            columns = lengths.square() if self.reduction == "code" else lengths
            coefficient = coefficient / (num_heads * columns)
        if rows.included is not None:
            coefficient = coefficient * rows.included.unsqueeze(1)
        return rows.keys, rows.weights, constant, coefficient


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------


def _guidance_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    key_mask: torch.Tensor | None,
    starts: Sequence[int],
    groups: Sequence[torch.Tensor],
    needs_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Guidance loss of one layer and its gradients by query and key, block of rows by block of rows.

    With H the attention of a row, its squared error is `ΣH² − 2·Σ P⊙H + constant`, and the gradient of that by the
    scores is `2·H² − 2·(ΣH² − Σ P⊙H)·H − 2·P⊙H`. Uniform rows are in `constant` alone: `Σ P⊙H` is 1/n for any H.

    Args:
        query, key (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): Guided heads only, in group order.
        scaling (`float`): Factor of the scores.
        key_mask (`torch.BoolTensor` of shape `(batch, length)`, *optional*): True for keys that may be attended to.
        starts (`Sequence[int]`): First head of each group, and the number of heads at the end.
        groups (`Sequence[torch.Tensor]`): `keys, weights, constant, coefficient` of each group, one after the other.
        needs_gradient (`bool`): Whether to form the gradients.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: the loss (scalar, float32, or float64 for float64 inputs)
        and both gradients, in the dtypes of `query` and `key`; empty tensors if `needs_gradient` is False.
    """
    batch, heads, length, head_dim = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    device = query.device
    budget = _BLOCK_ELEMENTS["cpu" if device.type == "cpu" else "accelerator"]
    row_block = max(1, min(length, budget // (heads * length)))
    sentence_block = max(1, min(batch, budget // (heads * length * row_block))) if row_block == length else 1
    scratch = torch.empty(2, sentence_block * heads, row_block, length, dtype=dtype, device=device)

    layout = [
        (slice(start, stop), *groups[4 * i : 4 * i + 4]) for i, (start, stop) in enumerate(zip(starts, starts[1:]))
    ]
    value = torch.zeros((), dtype=dtype, device=device)
    query_grad = torch.empty(query.shape if needs_gradient else 0, dtype=query.dtype, device=device)
    key_grad = torch.empty(key.shape if needs_gradient else 0, dtype=key.dtype, device=device)
    for first in range(0, batch, sentence_block):
        sentences = slice(first, min(first + sentence_block, batch))
        size = sentences.stop - sentences.start
        block_key = key[sentences].to(dtype).reshape(size * heads, length, head_dim)
        block_key_grad = torch.zeros_like(block_key) if needs_gradient else None
        for top in range(0, length, row_block):
            rows = slice(top, min(top + row_block, length))
            shape = (size, heads, rows.stop - rows.start, length)
            scores, attention = (buffer[: size * heads, : shape[2]] for buffer in scratch)
            block_query = (query[sentences, :, rows].to(dtype) * scaling).reshape(size * heads, shape[2], head_dim)

            torch.bmm(block_query, block_key.transpose(1, 2), out=scores)
            if key_mask is not None:
                scores.view(shape).masked_fill_(~key_mask[sentences, None, None], float("-inf"))
            torch.softmax(scores, dim=-1, out=attention)
            squares = torch.mul(attention, attention, out=scores)  # the scores are no longer needed
            square_sum = squares.sum(-1).view(shape[:3])
            row_weight = torch.empty(shape[:3], dtype=dtype, device=device)

            for group, keys, weights, constant, coefficient in layout:
                group_rows = slice(None) if keys.shape[1] == 1 else rows
                index = keys[sentences, None, group_rows].expand(
                    size, group.stop - group.start, shape[2], keys.shape[2]
                )
                target = attention.view(shape)[:, group].gather(-1, index)
                target *= weights[sentences, None, group_rows]
                overlap = target.sum(-1)
                row_weight[:, group] = coefficient[sentences, None, rows]
                error = square_sum[:, group] - 2 * overlap + constant[sentences, None, group_rows]
                value += (error * row_weight[:, group]).sum()
                if needs_gradient:
                    slope = squares.view(shape)[:, group]
                    slope.addcmul_(
                        attention.view(shape)[:, group], (square_sum[:, group] - overlap).unsqueeze(-1), value=-1
                    )
                    slope.scatter_add_(-1, index, target.neg_())

            if needs_gradient:
                gradient = squares  # by the scores, still without the factor 2 · row_weight
                weight = (2 * row_weight).view(size * heads, shape[2], 1)
                block_key_grad.baddbmm_(gradient.transpose(1, 2), block_query * weight)
                by_query = torch.bmm(gradient, block_key).mul_(weight * scaling)
                query_grad[sentences, :, rows] = by_query.view(*shape[:3], head_dim)
        if needs_gradient:
            key_grad[sentences] = block_key_grad.view(size, heads, length, head_dim)
    return value, query_grad, key_grad


# In a compiled graph the loop over blocks stays one opaque operator: its length depends on the batch, and there is
# nothing in it to fuse. The namespace is this module's, since a checkpoint's own copy of this file may be loaded too.
_NAMESPACE = re.sub(r"\W", "_", __name__, flags=re.ASCII)


_compiled_guidance_blocks = torch.library.custom_op(
    f"{_NAMESPACE}::guidance_blocks", _guidance_blocks, mutates_args=()
)


@_compiled_guidance_blocks.register_fake
def _(query, key, scaling, key_mask, starts, groups, needs_gradient):
    dtype = torch.promote_types(query.dtype, torch.float32)
    sizes = (query.shape, key.shape) if needs_gradient else (0, 0)
    return (
        query.new_empty((), dtype=dtype),
        torch.empty(sizes[0], dtype=query.dtype, device=query.device),
        torch.empty(sizes[1], dtype=key.dtype, device=key.device),
    )


class _GuideHeads(torch.autograd.Function):
    """Passes query and key through and returns the guidance loss beside them, in units of [`LayerTargets`].

    Query and key go through whole, so that backward can add the loss's gradient to the one that comes from attention
    instead of having autograd pad it to all heads and sum.
    """

    @staticmethod
    def forward(ctx, query, key, scaling, key_mask, heads, starts, unit, replay, *groups):
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        blocks = _compiled_guidance_blocks if torch.compiler.is_compiling() else _guidance_blocks
        # The loss is float32 inside autocast too.
        with torch.autocast(query.device.type, enabled=False):
            value, *gradients = blocks(
                query[:, heads], key[:, heads], scaling, key_mask, starts, groups, needs_gradient
            )
        ctx.save_for_backward(unit, *gradients)
        ctx.heads, ctx.num_heads, ctx.num_groups, ctx.replay = heads, query.shape[1], len(starts) - 1, replay
        ctx.set_materialize_grads(False)
        return query.view_as(query), key.view_as(key), value * unit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_query, grad_key, grad_value):
        if ctx.replay is not None:
            # This pass recomputes a layer whose loss was already handed in, detached (reentrant checkpointing).
            grad_value = ctx.replay.loss_gradient
        unit, *own_grads = ctx.saved_tensors
        grads = []
        for grad, own in zip((grad_query, grad_key), own_grads):
            if grad_value is not None:
                own = own * (grad_value.to(unit.device) * unit)
                if grad is None:
                    shape = list(own.shape)
                    shape[1] = ctx.num_heads
                    grad = own.new_zeros(shape)
                else:
                    grad = grad.clone()
                grad[:, ctx.heads] += own.to(grad.dtype)
            grads.append(grad)
        return (*grads, *[None] * (6 + 4 * ctx.num_groups))


def guide_heads(
    query: torch.Tensor, key: torch.Tensor, scaling: float, targets: LayerTargets, replay=None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Guidance loss of one attention layer: the weighted sum of `‖H − P‖²` over the rows of its guided heads.

    Args:
        query, key (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): All heads of the layer.
        scaling (`float`): Factor of the scores before the softmax.
        targets (`LayerTargets`): Guided heads, their patterns, and the weights of the rows.
        replay (*optional*): Object whose `loss_gradient` stands in for the gradient of the returned loss, for layers
            recomputed by reentrant gradient checkpointing.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: query and key, to be used in place of the inputs, and the
        loss, a float32 scalar (float64 for float64 inputs). Memory is linear in the length.
    """
    return _GuideHeads.apply(
        query, key, scaling, targets.key_mask, targets.heads, targets.starts, targets.unit, replay, *targets.groups
    )
