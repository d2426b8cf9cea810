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

from .block_sizes import BLOCK_ELEMENTS, elements_on
from .token_mask import check_mask_shape, non_padding


REDUCTIONS = ("row_mean", "paper", "code")
EDGE_ROWS = ("uniform", "zero")


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
            keys that they see (the last row of `next`); their `weights` are 0.
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


def _neighbour_rows(offset: int, attention_mask: torch.Tensor, row_mask: torch.Tensor | None) -> PatternRows:
    """Row number i attends to key number i + `offset`, counting real tokens; rows without such a key uniformly.

    Args:
        attention_mask (`torch.BoolTensor` of shape `(batch, keys)`): True for real keys.
        row_mask (`torch.BoolTensor` of shape `(batch, rows)`, *optional*): True for the real tokens that the rows
            belong to, if these are not the keys.
    """
    row_mask = attention_mask if row_mask is None else row_mask
    wanted = row_mask.cumsum(1) - 1 + offset
    missing = (wanted < 0) | (wanted >= attention_mask.sum(1, keepdim=True))
    numbered = attention_mask.int().argsort(dim=1, descending=True, stable=True)
    keys = numbered.gather(1, wanted.clamp(0, attention_mask.shape[1] - 1))
    return PatternRows(keys.unsqueeze(-1), (~missing).float().unsqueeze(-1), uniform=missing)


def next_token(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor, row_mask: torch.Tensor | None = None
) -> PatternRows:
    """Each token attends to the following real token; the last one uniformly."""
    return _neighbour_rows(1, attention_mask, row_mask)


def previous_token(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor, row_mask: torch.Tensor | None = None
) -> PatternRows:
    """Each token attends to the preceding real token; the first one uniformly."""
    return _neighbour_rows(-1, attention_mask, row_mask)


def same_token(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor, row_mask: torch.Tensor | None = None
) -> PatternRows:
    """Each token attends to itself, or to the token of the same number in the sentence that the keys belong to."""
    return _neighbour_rows(0, attention_mask, row_mask)


def first_token(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
    """Each token attends to the first real token."""
    keys = attention_mask.int().argmax(1, keepdim=True).unsqueeze(-1)
    return PatternRows(keys, torch.ones_like(keys, dtype=torch.float32))


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
                "guidance patterns `delim` and `period` read the ids of the tokens attended to: pass `input_ids`, not "
                "embeddings (`decoder_input_ids` to a decoder); other models' hidden states come without any."
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
# Those that take the rows of another sentence than that of the keys, `row_mask`.
_NEIGHBOURS = ("next", "prev", "self")
# Built for each model from the token ids of this configuration key.
TOKEN_SET_PATTERNS = {"delim": "delimiter_token_ids", "period": "period_token_ids"}
_BUILT_IN = frozenset([*_PATTERNS, *TOKEN_SET_PATTERNS])


def register_pattern(name: str, pattern: PatternFunction) -> None:
    """Make an attention pattern available to `guidance` configurations under `name`.

    Args:
        name (`str`): Name used in configurations.
        pattern (`PatternFunction`): Called with `input_ids` (`(batch, length)`, or `None` if the model was given
            embeddings) and the boolean `attention_mask` (`(batch, length)`, True for real tokens), both of the
            sentence attended to; returns [`PatternRows`]. It must depend on the inputs alone. In a decoder, its
            targets are cut down to what each row sees (see [`GuidanceTargets`]); for attention between two
            sentences, it must return one row for all.

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


@dataclass(frozen=True)
class Tokens:
    """One side of attention: the tokens of a batch of sentences.

    Args:
        ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): `None` if there are only embeddings.
        mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Not 0 for real tokens; all are if `None`.
        shape (`tuple[int, int]`): `(batch, length)`.
        device (`torch.device`): Where the model's inputs are.
        mask_name (`str`): What the mask is called, for messages.

    Raises:
        ValueError: if the mask is not of shape `(batch, length)`.
    """

    ids: torch.Tensor | None
    mask: torch.Tensor | None
    shape: tuple[int, int]
    device: torch.device
    mask_name: str = "attention_mask"

    def __post_init__(self):
        # The model itself takes masks with a row for each token, too.
        check_mask_shape(self.mask_name, self.mask, self.shape, needed_by="guidance")

    def real(self) -> torch.Tensor:
        """True for real tokens, a boolean tensor of shape `(batch, length)`."""
        return non_padding(self.mask, self.shape, self.device)


@dataclass(frozen=True)
class LayerTargets:
    """What the guided heads of a layer are compared with, in the precision and on the device of its queries.

    Args:
        heads (`slice` or `torch.LongTensor`): The guided heads, pattern by pattern.
        starts (`list[int]`): Where each pattern starts among them, and their number at the end.
        groups (`list[torch.Tensor]`): For each pattern in turn: `keys` and `weights` of shape `(batch, rows, k)`, see
            [`PatternRows`]; `scale` of shape `(batch, rows)`, a factor of the weights; `constant` of shape
            `(batch, rows)`, what is left of a row's squared error without the terms that depend on attention
            (`Σ P²`, less twice the overlap of uniform rows); `coefficient` of shape `(batch, rows)`, the weight of
            each row's squared error in units of `unit`, 0 where a row does not count. All but the last may have a
            single row for all.
        unit (`torch.Tensor`): Largest weight of a row. Gradients are kept in units of it: as they are formed before
            the scale of the loss is known, half precision would lose them otherwise.
        key_mask (`torch.BoolTensor` of shape `(batch, keys)`, *optional*): True for keys that may be attended to.
        causal (`bool`): Whether rows see no keys after their own position.
    """

    heads: slice | torch.Tensor
    starts: list[int]
    groups: list[torch.Tensor]
    unit: torch.Tensor
    key_mask: torch.Tensor | None
    causal: bool


class GuidanceTargets:
    """Patterns, masks and row weights of one batch, shared by all layers of a forward pass at one kind of site.

    Where rows see some keys only (`causal`), a pattern's target is cut down to the keys that a row sees, and scaled
    back to the sum it had. A row that sees none of its target adds nothing to the loss of that pattern, as a sentence
    without "." adds nothing to that of `period`; the means are still over all rows and sentences that count.

    Args:
        guidance (`dict`): Settings of this kind of site in a headwise configuration, validated.
        guided_heads (`dict[int, dict[str, list[int]]]`): Heads of each pattern in each guided layer.
        keys (`Tokens`): Tokens that are attended to.
        queries (`Tokens`, *optional*): Tokens that attend, if these are others.
        causal (`bool`): Whether row p sees keys up to p only.
        counted (`torch.BoolTensor` of shape `(batch, rows)`, *optional*): Rows that the loss is the mean over; the
            real tokens if not given.
        sentences (`torch.BoolTensor` of shape `(batch,)`, *optional*): Sentences that the loss is the mean over;
            those with real keys if not given.

    Raises:
        ValueError: if a pattern needs token ids that were not given, or one row for all and has several.
    """

    def __init__(
        self,
        guidance: dict,
        guided_heads: dict[int, dict[str, list[int]]],
        keys: Tokens,
        queries: Tokens | None = None,
        *,
        causal: bool = False,
        counted: torch.Tensor | None = None,
        sentences: torch.Tensor | None = None,
    ):
        self.reduction = guidance["reduction"]
        self.uniform_weight = 1.0 if guidance["edge_rows"] == "uniform" else 0.0
        self.guided_heads = guided_heads
        self.causal = causal
        self.real = keys.real()
        row_mask = None if queries is None else queries.real()
        names = {name for layer in guided_heads.values() for name in layer}
        self.rows = {name: self._rows(name, guidance, keys.ids, row_mask) for name in sorted(names)}

        with_keys = self.real.any(1)
        sentences = with_keys if sentences is None else sentences
        self.num_sentences = sentences.sum().clamp(min=1)
        if counted is None:
            counted = self.real if row_mask is None else row_mask
        self.counted = counted & (sentences & with_keys).unsqueeze(1)
        # Number of keys that a row sees.
        visible = self.real.cumsum(1) if causal else self.real.sum(1, keepdim=True)
        self.visible = visible.clamp(min=1).to(_exact_dtype(keys.device))
        self.key_mask = self.real
        if keys.mask is None or (not torch.compiler.is_compiling() and bool(self.real.all())):
            self.key_mask = None
        self._layers: dict[tuple, LayerTargets] = {}

    def _rows(
        self, name: str, guidance: dict, key_ids: torch.Tensor | None, row_mask: torch.Tensor | None
    ) -> PatternRows:
        if row_mask is not None and name in _NEIGHBOURS:
            return _PATTERNS[name](key_ids, self.real, row_mask)
        of_ids = name in TOKEN_SET_PATTERNS
        pattern = token_set(guidance[TOKEN_SET_PATTERNS[name]]) if of_ids else _PATTERNS[name]
        rows = pattern(key_ids, self.real)
        if row_mask is not None and rows.keys.shape[1] != 1:
            raise ValueError(
                f"guidance pattern {name!r} describes {rows.keys.shape[1]} rows, those of the sentence attended to; "
                "at the cross site it must return one row for all, keys of shape (batch, 1, k)."
            )
        return rows

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
        for keys, *numbers, coefficient in groups:
            tensors += [keys.to(device), *(t.to(device, dtype) for t in (*numbers, coefficient / unit))]
        adjacent = heads == list(range(heads[0], heads[0] + len(heads)))
        index = slice(heads[0], heads[0] + len(heads)) if adjacent else torch.tensor(heads, device=device)
        key_mask = self.key_mask if self.key_mask is None else self.key_mask.to(device)
        return LayerTargets(index, starts, tensors, unit.to(device, dtype), key_mask, self.causal)

    def _group(self, name: str, num_heads: int) -> tuple[torch.Tensor, ...]:
        """Tensors of a pattern with so many heads, as in `LayerTargets.groups`, before `unit` is taken out."""
        rows = self.rows[name]
        exact = self.visible.dtype
        weights = rows.weights.to(exact)
        constant = weights.square().sum(-1)
        scale = torch.ones_like(constant)
        counted = self.counted
        if self.causal:
            whole, seen = weights.sum(-1), self._seen(rows.keys, weights)
            unseen = (whole != 0) & (seen == 0)
            scale = torch.where(seen == 0, 0, whole / torch.where(seen == 0, 1, seen))
            constant = self._seen(rows.keys, weights.square()) * scale.square()
            counted = counted & ~unseen
        if rows.uniform is not None:
            # ‖H − 1/n‖² = ΣH² − 2/n + 1/n; a row of zeros instead (`edge_rows: zero`) leaves ΣH².
            constant = constant - self.uniform_weight * rows.uniform / self.visible
        coefficient = counted / self.num_sentences.to(exact)
        if self.reduction != "paper":
            elements = self.counted.sum(1, keepdim=True).clamp(min=1).to(exact)
            if self.reduction == "code":
                elements = elements * (self.visible * self.counted).amax(1, keepdim=True).clamp(min=1)
            coefficient = coefficient / (num_heads * elements)
        if rows.included is not None:
            coefficient = coefficient * rows.included.unsqueeze(1)
        return rows.keys, rows.weights, scale, constant, coefficient

    def _seen(self, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum of the weights over the real keys up to each row's own position, of shape `(batch, rows)`."""
        weights = weights * self.real.gather(1, keys.flatten(1)).view_as(keys)
        if keys.shape[1] == 1:
            # One row for all, of up to as many keys as there are rows: no tensor of all pairs.
            by_key = weights.new_zeros(self.real.shape).scatter_add(1, keys[:, 0], weights[:, 0])
            return by_key.cumsum(1)
        own = torch.arange(keys.shape[1], device=keys.device)
        return (weights * (keys <= own[:, None])).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------


def _guidance_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    key_mask: torch.Tensor | None,
    causal: bool,
    starts: Sequence[int],
    groups: Sequence[torch.Tensor],
    needs_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Guidance loss of one layer and its gradients by query and key, block of rows by block of rows.

    With H the attention of a row, its squared error is `ΣH² − 2·Σ P⊙H + constant`, and the gradient of that by the
    scores is `2·H² − 2·(ΣH² − Σ P⊙H)·H − 2·P⊙H`. Uniform rows are in `constant` alone: `Σ P⊙H` is 1/n for any H.

    Args:
        query (`torch.Tensor` of shape `(batch, heads, rows, head_dim)`), key (the same with its own length): Guided
            heads only, in group order.
        scaling (`float`): Factor of the scores.
        key_mask (`torch.BoolTensor` of shape `(batch, length)`, *optional*): True for keys that may be attended to.
        causal (`bool`): Whether rows see no keys after their own position.
        starts (`Sequence[int]`): First head of each group, and the number of heads at the end.
        groups (`Sequence[torch.Tensor]`): `keys, weights, scale, constant, coefficient` of each group, one after the
            other, as [`LayerTargets`] has them.
        needs_gradient (`bool`): Whether to form the gradients.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: the loss (scalar, float32, or float64 for float64 inputs)
        and both gradients, in the dtypes of `query` and `key`; empty tensors if `needs_gradient` is False.
    """
    batch, heads, num_rows, head_dim = query.shape
    length = key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    device = query.device
    budget = elements_on(device, BLOCK_ELEMENTS)
    row_block = max(1, min(num_rows, budget // (heads * length)))
    sentence_block = max(1, min(batch, budget // (heads * length * row_block))) if row_block == num_rows else 1
    scratch = torch.empty(2, sentence_block * heads, row_block, length, dtype=dtype, device=device)

    layout = [
        (slice(start, stop), *groups[5 * i : 5 * i + 5]) for i, (start, stop) in enumerate(zip(starts, starts[1:]))
    ]
    # A row that sees no key does not count, but must not be NaN.
    lowest = torch.finfo(dtype).min
    value = torch.zeros((), dtype=dtype, device=device)
    query_grad = torch.empty(query.shape if needs_gradient else 0, dtype=query.dtype, device=device)
    key_grad = torch.empty(key.shape if needs_gradient else 0, dtype=key.dtype, device=device)
    for first in range(0, batch, sentence_block):
        sentences = slice(first, min(first + sentence_block, batch))
        size = sentences.stop - sentences.start
        block_key = key[sentences].to(dtype).reshape(size * heads, length, head_dim)
        block_key_grad = torch.zeros_like(block_key) if needs_gradient else None
        for top in range(0, num_rows, row_block):
            rows = slice(top, min(top + row_block, num_rows))
            shape = (size, heads, rows.stop - rows.start, length)
            scores, attention = (buffer[: size * heads, : shape[2]] for buffer in scratch)
            block_query = (query[sentences, :, rows].to(dtype) * scaling).reshape(size * heads, shape[2], head_dim)

            torch.bmm(block_query, block_key.transpose(1, 2), out=scores)
            if key_mask is not None:
                scores.view(shape).masked_fill_(~key_mask[sentences, None, None], lowest)
            if causal:
                own = torch.arange(rows.start, rows.stop, device=device)
                scores.view(shape).masked_fill_(torch.arange(length, device=device) > own[:, None], lowest)
            torch.softmax(scores, dim=-1, out=attention)
            squares = torch.mul(attention, attention, out=scores)  # the scores are no longer needed
            square_sum = squares.sum(-1).view(shape[:3])
            row_weight = torch.empty(shape[:3], dtype=dtype, device=device)

            for group, *tensors in layout:
                keys, weights, scale, constant, coefficient = (
                    tensor[sentences, None] if tensor.shape[1] == 1 else tensor[sentences, None, rows]
                    for tensor in tensors
                )
                index = keys.expand(size, group.stop - group.start, shape[2], keys.shape[-1])
                # Attention to keys that the row does not see is 0.
                target = attention.view(shape)[:, group].gather(-1, index)
                target *= weights * scale.unsqueeze(-1)
                overlap = target.sum(-1)
                row_weight[:, group] = coefficient
                error = square_sum[:, group] - 2 * overlap + constant
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
def _(query, key, scaling, key_mask, causal, starts, groups, needs_gradient):
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
    def forward(ctx, query, key, scaling, key_mask, causal, heads, starts, unit, replay, *groups):
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        blocks = _compiled_guidance_blocks if torch.compiler.is_compiling() else _guidance_blocks
        # The loss is float32 inside autocast too.
        with torch.autocast(query.device.type, enabled=False):
            value, *gradients = blocks(
                query[:, heads], key[:, heads], scaling, key_mask, causal, starts, groups, needs_gradient
            )
        ctx.save_for_backward(unit, *gradients)
        ctx.heads, ctx.num_heads, ctx.num_targets, ctx.replay = heads, query.shape[1], len(groups), replay
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
        return (*grads, *[None] * (7 + ctx.num_targets))


def guide_heads(
    query: torch.Tensor, key: torch.Tensor, scaling: float, targets: LayerTargets, replay=None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Guidance loss of one attention layer: the weighted sum of `‖H − P‖²` over the rows of its guided heads.

    Args:
        query, key (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): All heads of the layer; each with its
            own length.
        scaling (`float`): Factor of the scores before the softmax.
        targets (`LayerTargets`): Guided heads, their patterns, and the weights of the rows.
        replay (*optional*): Object whose `loss_gradient` stands in for the gradient of the returned loss, for layers
            recomputed by reentrant gradient checkpointing.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: query and key, to be used in place of the inputs, and the
        loss, a float32 scalar (float64 for float64 inputs). Memory is linear in the length.
    """
    return _GuideHeads.apply(
        query,
        key,
        scaling,
        targets.key_mask,
        targets.causal,
        targets.heads,
        targets.starts,
        targets.unit,
        replay,
        *targets.groups,
    )
