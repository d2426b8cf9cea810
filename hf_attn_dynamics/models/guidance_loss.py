# Licensed under the Apache License, Version 2.0.
"""The guidance loss: squared distance between a head's attention and its pattern (Deshpande & Narasimhan 2020), or
another loss between them.

Value and gradient are exact, and no attention matrix is stored: the forward pass computes both over blocks of rows, or
in Triton over tiles (`guidance_kernel`).
"""

import re
from collections.abc import Callable, Sequence
from functools import cache

import torch

from .block_sizes import BLOCK_ELEMENTS, elements_on
from .guidance_kernel import is_as_exact, kernel_guidance, use_triton
from .guidance_settings import LOSSES
from .guidance_targets import LayerTargets


def _guidance_blocks(
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
    """Guidance loss of one layer and its gradients with respect to query, key and sinks, over blocks of rows.

    With H the attention of a row, its squared error is `ΣH² − 2·Σ P⊙H + constant`, whose gradient with respect to the
    scores is `2·H² − 2·(ΣH² − Σ P⊙H)·H − 2·P⊙H`. For uniform rows, `Σ P⊙H` is 1/n for any H and part of `constant`.
    With attention q to the sink, it is (1 − q)/n; the gradient with respect to the sink is `−2·(ΣH² − Σ P⊙H)·q`. For
    the other losses, see [`_row_losses`].

    Args:
        query (`torch.Tensor` of shape `(batch, heads, rows, head_dim)`), key (the same with its own length): Guided
            heads only, in group order.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): Score of each head for a key without a value.
        scaling (`float`): Factor of the scores.
        softcap (`float`): Scores s become `softcap · tanh(s / softcap)`; 0 for none.
        key_mask (`torch.BoolTensor` of shape `(batch, length)`, *optional*): True for non-padding keys.
        band (`Sequence[int]`): Largest distance of visible keys before and after a row's position; -1 for no limit.
        starts (`Sequence[int]`): First head of each group, followed by the number of heads.
        groups (`Sequence[torch.Tensor]`): `keys, weights, scale, constant, uniform, coefficient` of each group in
            turn, as in [`LayerTargets`].
        losses (`Sequence[int]`): Loss of each group, as an index into `LOSSES`.
        needs_gradient (`bool`): Whether to compute the gradients.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]`: the loss of each group, of shape `(groups,)`
        (float32, or float64 for float64 inputs), and the gradients of their sum, in the dtypes of `query`, `key` and
        `sinks`; empty tensors if `needs_gradient` is False, or for missing sinks.
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
        (LOSSES[losses[i]], slice(start, stop), *groups[6 * i : 6 * i + 6])
        for i, (start, stop) in enumerate(zip(starts, starts[1:]))
    ]
    # Losses that need the logarithm of attention, also where attention underflows.
    logarithmic = [group for loss, group, *_ in layout if loss in ("cross_entropy", "mass")]
    # A row without visible keys has weight 0, but must not be NaN.
    lowest = torch.finfo(dtype).min
    value = torch.zeros(len(layout), dtype=dtype, device=device)
    query_grad = torch.empty(query.shape if needs_gradient else 0, dtype=query.dtype, device=device)
    key_grad = torch.empty(key.shape if needs_gradient else 0, dtype=key.dtype, device=device)
    # Sums over all rows are formed in the precision of the loss.
    sink_grad = torch.zeros(heads if needs_gradient and sinks is not None else 0, dtype=dtype, device=device)
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
            if softcap:
                scores.div_(softcap).tanh_()
                bend = 1 - scores.square()  # the derivative of the capped scores
                scores.mul_(softcap)
            if key_mask is not None:
                scores.view(shape).masked_fill_(~key_mask[sentences, None, None], lowest)
            if max(band) >= 0:
                scores.view(shape).masked_fill_(hidden_keys(rows, length, band, device), lowest)
            to_sink = None if sinks is None else attention_to_sinks(scores.view(shape), sinks)
            torch.softmax(scores, dim=-1, out=attention)
            logs = {}
            if logarithmic:
                # log H = s − max(s) + log(max(H)), exact for the largest weight.
                shift = scores.amax(-1).sub_(attention.amax(-1).log()).view(shape[:3])
                if sinks is not None:
                    shift = torch.logaddexp(shift, sinks.to(dtype)[:, None])
                for group in logarithmic:
                    own_scores = scores.view(shape)[:, group]
                    masked = own_scores == lowest
                    own_logs = own_scores - shift[:, group].unsqueeze(-1)
                    logs[group.start] = own_logs.masked_fill_(masked, -torch.inf)
            if to_sink is not None:
                attention.view(shape).mul_(1 - to_sink.unsqueeze(-1))
            squares = torch.mul(attention, attention, out=scores)  # the scores are no longer needed
            square_sum = squares.sum(-1).view(shape[:3])
            row_weight = torch.empty(shape[:3], dtype=dtype, device=device)

            for number, (loss, group, *tensors) in enumerate(layout):
                keys, weights, scale, constant, uniform, coefficient = (
                    tensor[sentences, None] if tensor.shape[1] == 1 else tensor[sentences, None, rows]
                    for tensor in tensors
                )
                index = keys.expand(size, group.stop - group.start, shape[2], keys.shape[-1])
                if loss != "squared":
                    own, own_logs = attention.view(shape)[:, group], logs.get(group.start)
                    target = weights * scale.unsqueeze(-1)
                    error, slope, by_sum = _row_losses(loss, own, own_logs, index, target, uniform, needs_gradient)
                    # Rows without a visible target may have infinite losses.
                    value[number] += torch.where(coefficient > 0, error * coefficient, 0).sum()
                    row_weight[:, group] = coefficient
                    if needs_gradient:
                        squares.view(shape)[:, group] = slope.mul_(0.5)  # the factor 2 follows
                        if to_sink is not None:
                            sink_grad[group] += (by_sum * to_sink[:, group] * coefficient).sum((0, 2))
                    continue
                # Attention to keys that are not visible is 0.
                target = attention.view(shape)[:, group].gather(-1, index)
                target *= weights * scale.unsqueeze(-1)
                overlap = target.sum(-1)
                row_weight[:, group] = coefficient
                error = square_sum[:, group] - 2 * overlap + constant
                factor = square_sum[:, group] - overlap  # of −2·H in the gradient
                if to_sink is not None:
                    lost = to_sink[:, group] * uniform  # subtracted from the overlap with a uniform row
                    error += 2 * lost
                    factor += lost
                    if needs_gradient:
                        by_sink = (uniform - factor) * to_sink[:, group] * (2 * coefficient)
                        sink_grad[group] += by_sink.sum((0, 2))
                value[number] += (error * row_weight[:, group]).sum()
                if needs_gradient:
                    slope = squares.view(shape)[:, group]
                    slope.addcmul_(attention.view(shape)[:, group], factor.unsqueeze(-1), value=-1)
                    slope.scatter_add_(-1, index, target.neg_())

            if needs_gradient:
                gradient = squares  # with respect to the scores, without the factor 2 · row_weight
                if softcap:
                    gradient.mul_(bend)
                weight = (2 * row_weight).view(size * heads, shape[2], 1)
                block_key_grad.baddbmm_(gradient.transpose(1, 2), block_query * weight)
                by_query = torch.bmm(gradient, block_key).mul_(weight * scaling)
                query_grad[sentences, :, rows] = by_query.view(*shape[:3], head_dim)
        if needs_gradient:
            key_grad[sentences] = block_key_grad.view(size, heads, length, head_dim)
    return value, query_grad, key_grad, sink_grad if sinks is None else sink_grad.to(sinks.dtype)


def _row_losses(
    loss: str,
    attention: torch.Tensor,
    logs: torch.Tensor | None,
    keys: torch.Tensor,
    weights: torch.Tensor,
    uniform: torch.Tensor,
    needs_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Losses of rows other than the squared error, and their gradients with respect to the scores of the keys.

    With S the keys of non-zero weight, m the attention H on S, and r the attention restricted to S and divided by m:

    | loss | value | gradient |
    |---|---|---|
    | `cross_entropy` | −Σ P log H | ΣP·H − P |
    | `mass` | −log m | H − r |
    | `avoid` | m | H⊙S − m·H |

    Args:
        loss (`str`): One of these.
        attention (`torch.Tensor` of shape `(batch, heads, rows, keys)`): H.
        logs (`torch.Tensor` of the same shape, *optional*): log H, −∞ for invisible keys; not needed by `avoid`.
        keys (`torch.LongTensor` of shape `(batch, heads, rows, k)`), weights (broadcastable to it): The target P.
        uniform (`torch.Tensor`, broadcastable to `(batch, heads, rows)`): Target weight of every visible key in
            uniform rows, 0 in others; only `cross_entropy` reads it.
        needs_gradient (`bool`): Whether to compute the gradient.

    Returns:
        `tuple`: value of each row, of shape `(batch, heads, rows)`; its gradient, of the shape of `attention` (`None`
        unless requested); and the factor of the attention to the sink in the gradient with respect to its score.
    """
    if loss == "avoid":
        on_target = attention.gather(-1, keys) * (weights != 0)
        mass = on_target.sum(-1)
        slope = None
        if needs_gradient:
            slope = (attention * -mass.unsqueeze(-1)).scatter_add_(-1, keys, on_target)
        return mass, slope, -mass
    on_target = logs.gather(-1, keys)
    visible = (on_target > -torch.inf) & (weights != 0)
    if loss == "mass":
        on_target = on_target.masked_fill(~visible, -torch.inf)
        mass = on_target.logsumexp(-1)
        slope = None
        if needs_gradient:
            # 0 in rows without a visible target, whose mass is −∞.
            share = (on_target - mass.masked_fill(mass == -torch.inf, 0).unsqueeze(-1)).exp()
            slope = attention.clone().scatter_add_(-1, keys, share.neg_())
        return -mass, slope, torch.ones_like(mass)
    weights = torch.where(visible, weights, 0)
    error = -(weights * on_target.masked_fill(~visible, 0)).sum(-1)
    total = weights.sum(-1)
    slope, has_uniform = None, uniform.shape[-1] > 1 or attention.shape[2] == 1
    if has_uniform:
        seen = logs > -torch.inf
        error = error - uniform * logs.masked_fill(~seen, 0).sum(-1)
        total = total + uniform * seen.sum(-1)
    if needs_gradient:
        slope = (attention * total.unsqueeze(-1)).scatter_add_(-1, keys, weights.neg())
        if has_uniform:
            slope -= uniform.unsqueeze(-1) * seen
    return error, slope, total


def attention_to_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention weight of each row on the sink of its head, which has no value.

    Args:
        scores (`torch.Tensor` of shape `(batch, heads, rows, keys)`): Scores of the keys; masked ones have the lowest
            value of the dtype.
        sinks (`torch.Tensor` of shape `(heads,)`): Score of the sink of each head.

    Returns:
        `torch.Tensor` of shape `(batch, heads, rows)`: weight q; the other weights are (1 − q) times their softmax.
    """
    return torch.sigmoid(sinks.to(scores.dtype)[:, None] - scores.logsumexp(-1))


def hidden_keys(rows: slice, length: int, band: Sequence[int], device: torch.device) -> torch.Tensor:
    """Mask of the keys outside the band of each row, of shape `(rows, keys)`."""
    before, after = band
    own = torch.arange(rows.start, rows.stop, device=device)[:, None]
    keys = torch.arange(length, device=device)
    hidden = keys > own + after if after >= 0 else None
    if before < 0:
        return hidden
    early = keys < own - before
    return early if hidden is None else hidden | early


@torch.no_grad()
def guided_hits(query: torch.Tensor, key: torch.Tensor, scaling: float, targets: LayerTargets) -> torch.Tensor:
    """How often the strongest key of guided heads is one of their target, over blocks of rows.

    Args:
        query, key, scaling, targets: See [`guide_heads`]. Neither capping of scores nor sinks change the strongest
            key.

    Returns:
        `torch.LongTensor` of shape `(sentences, groups, 2)`: for each sentence and pattern or target, the number of
        pairs of a head and a row that counts whose strongest key has a non-zero target weight, and the number of all
        such pairs. Rows that see none of their target do not count.
    """
    if targets.packing is not None:
        query, key = targets.packing.split_heads(query), targets.packing.split_heads(key)
    num_rows, length = query.shape[2], key.shape[2]
    key_heads = _key_heads(targets.heads, query, key)
    query, key = query[:, targets.heads], key[:, key_heads]
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, heads = query.shape[:2]
    budget = elements_on(query.device, BLOCK_ELEMENTS)
    row_block = max(1, min(num_rows, budget // (batch * heads * length)))
    groups = [targets.groups[start : start + 6] for start in range(0, len(targets.groups), 6)]
    hits = torch.zeros(batch, len(groups), 2, dtype=torch.long, device=query.device)
    for top in range(0, num_rows, row_block):
        rows = slice(top, min(top + row_block, num_rows))
        # As for the loss, not in the precision of autocast.
        with torch.autocast(query.device.type, enabled=False):
            scores = (query[:, :, rows].to(dtype) * scaling) @ key.to(dtype).transpose(2, 3)
        if targets.key_mask is not None:
            scores.masked_fill_(~targets.key_mask[:, None, None], -torch.inf)
        if max(targets.band) >= 0:
            scores.masked_fill_(hidden_keys(rows, length, targets.band, query.device), -torch.inf)
        strongest = scores.argmax(-1, keepdim=True)
        for number, (start, stop) in enumerate(zip(targets.starts, targets.starts[1:])):
            keys, weights, *_, coefficient = (
                tensor[:, None] if tensor.shape[1] == 1 else tensor[:, None, rows] for tensor in groups[number]
            )
            counted = (coefficient > 0).expand(batch, 1, strongest.shape[2])
            hit = ((keys == strongest[:, start:stop]) & (weights != 0)).any(-1) & counted
            hits[:, number, 0] += hit.sum((1, 2))
            hits[:, number, 1] += counted.sum((1, 2)) * (stop - start)
    return hits


# In a compiled graph the loop over blocks is one opaque operator: its length depends on the batch, and it has nothing
# to fuse. The namespace contains the module name, since a copy of this file from a checkpoint may be loaded, too.
_NAMESPACE = re.sub(r"\W", "_", __name__, flags=re.ASCII)


@cache
def _agrees(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether Triton gives the loss and the gradients of blocks on a device; if not, a warning says so, once."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 1, 2, 70, head_dim, generator=generator).to(dtype)
    row, ones = torch.arange(70), torch.ones(1, 70)
    previous = [row.sub(1).clamp(min=0)[None, :, None], ones[..., None], ones, ones, 0 * ones, ones]
    first = [row[None, :1, None], ones[:, :1, None], ones[:, :1], ones[:, :1], 0 * ones[:, :1], ones]

    def arguments(exact: torch.dtype | None) -> tuple:
        tensors = [*vectors, *previous, *first]
        if exact is not None:
            tensors = [one.to(exact) if one.is_floating_point() else one for one in tensors]
        query, key, *groups = (one.to(device) for one in tensors)
        return query, key, None, head_dim**-0.5, 0.0, None, (-1, 0), [0, 1, 2], groups, [0, 1], True

    return is_as_exact(
        lambda: kernel_guidance(*arguments(None))[:3],
        lambda: _guidance_blocks(*arguments(torch.float64)),
        device,
        dtype,
        "guidance",
    )


def _guidance(
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
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`_guidance_blocks`], or the same in Triton, see [`use_triton`]."""
    function = kernel_guidance if use_triton(kernel, _agrees, query) else _guidance_blocks
    return function(query, key, sinks, scaling, softcap, key_mask, band, starts, groups, losses, needs_gradient)


_compiled_guidance = torch.library.custom_op(f"{_NAMESPACE}::guidance", _guidance, mutates_args=())


@_compiled_guidance.register_fake
def _(query, key, sinks, scaling, softcap, key_mask, band, starts, groups, losses, needs_gradient, kernel):
    dtype = torch.promote_types(query.dtype, torch.float32)
    shapes = (query.shape, key.shape) if needs_gradient else (0, 0)
    has_sinks = needs_gradient and sinks is not None
    return (
        query.new_empty(len(losses), dtype=dtype),
        torch.empty(shapes[0], dtype=query.dtype, device=query.device),
        torch.empty(shapes[1], dtype=key.dtype, device=key.device),
        torch.empty(sinks.shape if has_sinks else 0, dtype=dtype if sinks is None else sinks.dtype, device=key.device),
    )


class _GuideHeads(torch.autograd.Function):
    """Returns query and key unchanged, and the guidance loss of each group.

    Query and key pass through, so that backward adds the gradient of the loss in place to that of attention, instead
    of having autograd pad it to all heads and sum. Each guided head belongs to one group, so that the stored gradient
    of the sum, times one factor for each head, is the gradient of any weighted sum over groups.
    """

    @staticmethod
    def forward(
        ctx, query, key, sinks, scaling, softcap, key_mask, band, heads, starts, losses, unit, replay, kernel, *groups
    ):
        needs_gradient = any(ctx.needs_input_grad[:3])
        compute = _compiled_guidance if torch.compiler.is_compiling() else _guidance
        # The loss is float32 inside autocast too.
        with torch.autocast(query.device.type, enabled=False):
            key_heads = _key_heads(heads, query, key)
            own = query[:, heads], key[:, key_heads], None if sinks is None else sinks[heads]
            of_layer = scaling, softcap, key_mask, band, starts, groups, losses
            value, *gradients = compute(*own, *of_layer, needs_gradient, kernel)
        ctx.save_for_backward(unit, *gradients)
        ctx.heads, ctx.num_targets, ctx.replay = (heads, key_heads), len(groups), replay
        ctx.sizes = [stop - start for start, stop in zip(starts, starts[1:])]
        ctx.num_heads, ctx.has_sinks = (query.shape[1], key.shape[1]), sinks is not None
        ctx.set_materialize_grads(False)
        return query.view_as(query), key.view_as(key), value * unit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_query, grad_key, grad_value):
        if ctx.replay is not None:
            # Reentrant checkpointing recomputes a layer whose loss was already collected, detached.
            grad_value = ctx.replay()
        unit, *own_grads, sink_grad = ctx.saved_tensors
        factor, grads = None, []
        if grad_value is not None:
            by_group = (grad_value.to(unit.device) * unit).split(1)
            factor = torch.cat([one.expand(size) for one, size in zip(by_group, ctx.sizes)])
        for grad, own, heads, num_heads in zip((grad_query, grad_key), own_grads, ctx.heads, ctx.num_heads):
            if factor is not None:
                # Not rounded to half precision, in which the factor may underflow.
                own = torch.mul(own, factor[:, None, None], out=torch.empty_like(own))
                if grad is None:
                    shape = list(own.shape)
                    shape[1] = num_heads
                    grad = own.new_zeros(shape)
                else:
                    grad = grad.clone()
                if isinstance(heads, torch.Tensor):
                    # Query heads may share a key head.
                    grad.index_add_(1, heads, own.to(grad.dtype))
                else:
                    grad[:, heads] += own.to(grad.dtype)
            grads.append(grad)
        by_sinks = None
        if ctx.has_sinks and factor is not None:
            by_sinks = sink_grad.new_zeros(ctx.num_heads[0])
            by_sinks[ctx.heads[0]] = sink_grad * factor.to(sink_grad.dtype)
        return (*grads, by_sinks, *[None] * (10 + ctx.num_targets))


def _key_heads(heads: slice | torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> slice | torch.Tensor:
    """Indices of the key heads of the given query heads (grouped-query attention)."""
    group = query.shape[1] // key.shape[1]
    if group == 1:
        return heads
    if isinstance(heads, slice):
        heads = torch.arange(heads.start, heads.stop, device=key.device)
    return heads // group


def guide_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    targets: LayerTargets,
    replay: Callable[[], torch.Tensor | None] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Guidance loss of one attention layer for each pattern or target: the weighted sum of `‖H − P‖²`, or of another
    loss between attention H and target P, over the rows of the heads that have it.

    Args:
        query, key (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): All heads of the layer; lengths may
            differ, and there are fewer key heads in grouped-query attention.
        scaling (`float`): Factor of the scores before the softmax.
        targets (`LayerTargets`): Guided heads, their patterns, and the weights of the rows.
        replay (callable, *optional*): Called during backward, returns the gradient of the returned loss, or `None`,
            instead of autograd; for layers recomputed by reentrant gradient checkpointing.
        softcap (`float`): Scores s are `softcap · tanh(s / softcap)` before the softmax; 0 for none.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): Score of each head for a key without a value, with
            which rows of attention sum to less than 1.
        kernel (`str`): One of `GUIDANCE_KERNELS`, see [`use_triton`].

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: query and key, which replace the inputs, and the losses of
        shape `(groups,)`, in the order of `targets.names`, float32 (float64 for float64 inputs). Memory is linear in
        the length.
    """
    packing = targets.packing
    if packing is not None:
        query, key = packing.split_heads(query), packing.split_heads(key)
    query, key, losses = _GuideHeads.apply(
        query,
        key,
        sinks,
        scaling,
        softcap,
        targets.key_mask,
        targets.band,
        targets.heads,
        targets.starts,
        targets.losses,
        targets.unit,
        replay,
        kernel,
        *targets.groups,
    )
    if packing is not None:
        query, key = packing.join_heads(query), packing.join_heads(key)
    return query, key, losses
