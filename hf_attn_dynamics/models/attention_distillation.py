# Licensed under the Apache License, Version 2.0.
"""Distillation of attention: the divergence of the attention of a student from the attention of a teacher.

As for the guidance loss, value and gradient are exact, and no attention matrix is stored: the forward pass computes
both over blocks of rows. The teacher gets no gradient.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from .block_sizes import BLOCK_ELEMENTS, elements_on
from .distillation_kernel import kernel_distillation
from .guidance_kernel import is_as_exact, use_triton
from .guidance_loss import hidden_keys
from .teacher_settings import RELATIONS, TEACHER_LOSSES, TeacherSettings


class AttentionInputs(NamedTuple):
    """Inputs of one attention layer.

    Attributes:
        query, key, value (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): Projected hidden states, with
            fewer key and value heads in grouped-query attention; `value` may be `None` where only attention is read.
        scaling (`float`): Factor of the scores.
        softcap (`float`): Scores s become `softcap · tanh(s / softcap)`; 0 for none.
        band (`tuple[int, int]`): Largest distance of visible keys before and after a row's position; -1 for no limit.
        heads (`list[int]`, *optional*): Query heads in the original numbering; by default no head was removed.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None
    scaling: float
    softcap: float = 0.0
    band: tuple[int, int] = (-1, -1)
    heads: list[int] | None = None

    @classmethod
    def of_kernel(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kernel_arguments: Mapping[str, Any],
        where: str,
        causal: bool = False,
        heads: list[int] | None = None,
    ) -> "AttentionInputs":
        """The inputs of a call of an attention kernel.

        Args:
            query, key, value (`torch.Tensor`): See [`AttentionInputs`].
            kernel_arguments (`dict`): Keywords of the kernel.
            where (`str`): Name of the layer, for messages.
            causal (`bool`): Whether attention is causal.
            heads (`list[int]`, *optional*): See [`AttentionInputs`].

        Raises:
            ValueError: if a `position_bias` is added to the scores, or there are attention sinks.
        """
        for name, meaning in (("position_bias", "relative positions"), ("s_aux", "attention sinks")):
            if kernel_arguments.get(name) is not None:
                raise ValueError(f"distillation of attention does not support the {meaning} of the {where}.")
        scaling, window = kernel_arguments.get("scaling"), kernel_arguments.get("sliding_window")
        reach = -1 if window is None else window - 1
        return cls(
            query,
            key,
            value,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            kernel_arguments.get("softcap") or 0.0,
            (reach, 0 if causal else reach),
            heads,
        )


class ScoreFactors(NamedTuple):
    """Factors of the scores of some heads: `scores = scaling · left · rightᵀ`, then capped.

    Attributes:
        left (`torch.Tensor` of shape `(batch, heads, rows, dim)`), right (`(batch, heads, keys, dim)`)
        scaling, softcap (`float`), band (`tuple[int, int]`): See [`AttentionInputs`].
    """

    left: torch.Tensor
    right: torch.Tensor
    scaling: float
    softcap: float = 0.0
    band: tuple[int, int] = (-1, -1)


def factors_of_heads(inputs: AttentionInputs, heads: Sequence[int]) -> ScoreFactors:
    """Factors of the scores of some query heads, in the given order.

    Args:
        inputs ([`AttentionInputs`]): Inputs of the layer.
        heads (`list[int]`): Query heads.
    """
    query, key = inputs.query, inputs.key
    if list(heads) != list(range(query.shape[1])) or key.shape[1] != query.shape[1]:
        index = torch.tensor(heads, device=query.device)
        group = query.shape[1] // key.shape[1]
        query, key = query.index_select(1, index), key.index_select(1, index // group)
    return ScoreFactors(query, key, inputs.scaling, inputs.softcap, inputs.band)


def factors_of_relation(inputs: AttentionInputs, relation: str, relation_heads: int) -> ScoreFactors:
    """Factors of a relation between the tokens (Wang et al. 2021, MiniLMv2), whose number of heads is chosen.

    The vectors of all heads are concatenated and split into relation heads. Scores are divided by the square root of
    the size of a relation head.

    Args:
        inputs ([`AttentionInputs`]): Inputs of the layer.
        relation (`str`): One of `RELATIONS`; `query_key` needs as many key heads as query heads, or repeats them.
        relation_heads (`int`): Number of relation heads.

    Raises:
        ValueError: if the vectors cannot be split into this number of heads.
    """
    sides = []
    for name in RELATIONS[relation]:
        vectors = getattr(inputs, name)
        if relation == "query_key" and name == "key":
            vectors = vectors.repeat_interleave(inputs.query.shape[1] // vectors.shape[1], 1)
        size = vectors.shape[1] * vectors.shape[3]
        if size % relation_heads:
            raise ValueError(
                f"relation_heads={relation_heads} does not divide {size}, the size of the {name} vectors of a token; "
                "choose a divisor of these sizes of student and teacher."
            )
        together = vectors.transpose(1, 2).flatten(2)
        sides.append(together.unflatten(2, (relation_heads, -1)).transpose(1, 2))
    left, right = sides
    return ScoreFactors(left, right, left.shape[-1] ** -0.5, band=inputs.band)


def _distillation_blocks(
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
    """Distillation loss of one layer and its gradients with respect to the factors of the student, by blocks of rows.

    With S and T the attention of a row of the student and of the teacher, and s and t their scores,

    | loss | value | gradient with respect to s |
    |---|---|---|
    | `kl` | Σ T (t − s) − LSE(t) + LSE(s) | S − T |
    | `squared` | Σ (S − T)² | 2·S⊙(S − T − Σ S⊙(S − T)) |

    Args:
        left, right (`torch.Tensor`), scaling, softcap (`float`), band: See [`ScoreFactors`], of the student.
        teacher_left, teacher_right, teacher_scaling, teacher_softcap, teacher_band: Factors of the teacher, with as
            many heads.
        key_mask (`torch.BoolTensor` of shape `(batch, keys)`, *optional*): True for non-padding keys.
        coefficient (`torch.Tensor` of shape `(batch, rows)`): Weight of each row, 0 for ignored rows.
        loss (`int`): Index into `TEACHER_LOSSES`.
        needs_gradient (`bool`): Whether to compute the gradients.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: the loss (scalar, float32, or float64 for float64 inputs)
        and the gradients in the dtypes of `left` and `right`; empty tensors if `needs_gradient` is False.
    """
    batch, heads, num_rows, _ = left.shape
    length = right.shape[2]
    dtype, device = torch.promote_types(left.dtype, torch.float32), left.device
    budget = elements_on(device, BLOCK_ELEMENTS)
    row_block = max(1, min(num_rows, budget // (heads * length)))
    sentence_block = max(1, min(batch, budget // (heads * length * row_block))) if row_block == num_rows else 1
    scratch = torch.empty(4, sentence_block * heads, row_block, length, dtype=dtype, device=device)
    lowest = torch.finfo(dtype).min
    value = torch.zeros((), dtype=dtype, device=device)
    left_grad = torch.empty(left.shape if needs_gradient else 0, dtype=left.dtype, device=device)
    right_grad = torch.empty(right.shape if needs_gradient else 0, dtype=right.dtype, device=device)

    for first in range(0, batch, sentence_block):
        sentences = slice(first, min(first + sentence_block, batch))
        size = sentences.stop - first
        own_right, other_right = (
            one[sentences].to(dtype).reshape(size * heads, length, one.shape[-1]) for one in (right, teacher_right)
        )
        own_right_grad = torch.zeros_like(own_right) if needs_gradient else None
        for top in range(0, num_rows, row_block):
            rows = slice(top, min(top + row_block, num_rows))
            shape = (size, heads, rows.stop - top, length)
            scores, attention, others, taught = (buffer[: size * heads, : shape[2]] for buffer in scratch)
            own_left = (left[sentences, :, rows].to(dtype) * scaling).reshape(size * heads, shape[2], -1)
            other_left = (teacher_left[sentences, :, rows].to(dtype) * teacher_scaling).reshape(
                *own_left.shape[:2], -1
            )
            own_hidden, other_hidden = (
                hidden_keys(rows, length, one, device) if max(one) >= 0 else None for one in (band, teacher_band)
            )
            bend = None
            for a, b, cap, out in (
                (own_left, own_right, softcap, scores),
                (other_left, other_right, teacher_softcap, others),
            ):
                torch.bmm(a, b.transpose(1, 2), out=out)
                if cap:
                    out.div_(cap).tanh_()
                    if out is scores and needs_gradient:
                        bend = 1 - out.square()  # the derivative of the capped scores
                    out.mul_(cap)
                if key_mask is not None:
                    out.view(shape).masked_fill_(~key_mask[sentences, None, None], lowest)
                if own_hidden is not None:
                    out.view(shape).masked_fill_(own_hidden, lowest)
            if other_hidden is not None:
                others.view(shape).masked_fill_(other_hidden, lowest)
            for out, weights in ((scores, attention), (others, taught)):
                # Scores may be large, and their differences small.
                out.sub_(out.amax(-1, keepdim=True))
                torch.softmax(out, dim=-1, out=weights)
            weight = coefficient[sentences, None, rows].expand(shape[:3]).reshape(size * heads, shape[2])
            if TEACHER_LOSSES[loss] == "kl":
                # LSE(s) = −log(max(S)), since max(s) is 0.
                error = others.sub_(scores).mul_(taught).sum(-1)
                error += taught.amax(-1).log_() - attention.amax(-1).log_()
                gradient = attention.sub_(taught)
            else:
                difference = torch.sub(attention, taught, out=taught)
                error = torch.mul(difference, difference, out=scores).sum(-1)
                overlap = torch.mul(attention, difference, out=others).sum(-1, keepdim=True)
                gradient = difference.sub_(overlap).mul_(attention).mul_(2)
            value += torch.where(weight > 0, error * weight, 0).sum()
            if needs_gradient:
                if bend is not None:
                    gradient.mul_(bend)
                gradient.mul_(weight.unsqueeze(-1))
                own_right_grad.baddbmm_(gradient.transpose(1, 2), own_left)
                by_left = torch.bmm(gradient, own_right).mul_(scaling)
                left_grad[sentences, :, rows] = by_left.view(*shape[:3], -1)
        if needs_gradient:
            right_grad[sentences] = own_right_grad.view(size, heads, length, -1)
    return value, left_grad, right_grad


@cache
def _agrees(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether Triton gives the loss and the gradients of blocks on a device; if not, a warning says so, once."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(4, 1, 2, 70, size, generator=generator).to(dtype)

    def arguments(exact: torch.dtype | None, loss: int) -> tuple:
        left, right, *teacher = vectors.to(device, exact)
        sides = [(*pair, size**-0.5, 0.0, (-1, 0)) for pair in ((left, right), teacher)]
        weights = torch.ones(1, 70, device=device, dtype=exact or torch.float32)
        return *sides[0], *sides[1], None, weights, loss, True

    return all(
        is_as_exact(
            lambda loss=loss: kernel_distillation(*arguments(None, loss)),
            lambda loss=loss: _distillation_blocks(*arguments(torch.float64, loss)),
            device,
            dtype,
            "distillation",
        )
        for loss in range(len(TEACHER_LOSSES))
    )


def _distillation(
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
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`_distillation_blocks`], or the same in Triton, see [`use_triton`]."""
    function = kernel_distillation if use_triton(kernel, _agrees, left, teacher_left) else _distillation_blocks
    student = left, right, scaling, softcap, band
    teacher = teacher_left, teacher_right, teacher_scaling, teacher_softcap, teacher_band
    return function(*student, *teacher, key_mask, coefficient, loss, needs_gradient)


# Compiled graphs take the loop as one operator, see `guidance_loss`.
_compiled_distillation = torch.library.custom_op(
    re.sub(r"\W", "_", __name__, flags=re.ASCII) + "::distillation", _distillation, mutates_args=()
)


@_compiled_distillation.register_fake
def _(left, right, *arguments):
    needs_gradient = arguments[-2]
    shapes = (left.shape, right.shape) if needs_gradient else (0, 0)
    return (
        left.new_empty((), dtype=torch.promote_types(left.dtype, torch.float32)),
        torch.empty(shapes[0], dtype=left.dtype, device=left.device),
        torch.empty(shapes[1], dtype=right.dtype, device=right.device),
    )


class _Distil(torch.autograd.Function):
    """The distillation loss of some heads."""

    @staticmethod
    def forward(ctx, left, right, unit, kernel, *arguments):
        needs_gradient = any(ctx.needs_input_grad[:2])
        compute = _compiled_distillation if torch.compiler.is_compiling() else _distillation
        # The loss is float32 inside autocast, too.
        with torch.autocast(left.device.type, enabled=False):
            value, *gradients = compute(left, right, *arguments, needs_gradient, kernel)
        ctx.save_for_backward(unit, *gradients)
        return value * unit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        unit, *own = ctx.saved_tensors
        scale = grad * unit
        return (*((one * scale).to(one.dtype) for one in own), *[None] * 13)


def distillation_loss(
    student: ScoreFactors,
    teacher: ScoreFactors,
    coefficient: torch.Tensor,
    loss: str = "kl",
    key_mask: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Weighted sum over rows and heads of the divergence of the student's attention from the teacher's.

    The teacher's attention is normalised over the keys that both see.

    Args:
        student, teacher ([`ScoreFactors`]): Factors of both, with the same number of heads, rows and keys; head sizes
            may differ. The teacher gets no gradient.
        coefficient (`torch.Tensor` of shape `(batch, rows)`): Weight of each row; 0 for rows that do not count.
        loss (`str`): `kl`, the divergence KL(teacher‖student), or `squared`, the squared distance.
        key_mask (`torch.BoolTensor` of shape `(batch, keys)`, *optional*): True for non-padding keys.
        kernel (`str`): One of `GUIDANCE_KERNELS`, see [`use_triton`].

    Returns:
        `torch.Tensor`: a float32 scalar (float64 for float64 inputs). Memory is linear in the length.

    Raises:
        ValueError: if heads, rows or keys differ, or `triton` cannot take these factors.
    """
    shapes = [(*one.left.shape[:3], one.right.shape[2]) for one in (student, teacher)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"student and teacher must have the same number of sentences, heads, rows and keys, got {shapes[0]} and "
            f"{shapes[1]}; pass the same tokens to both."
        )
    device = student.left.device
    # Gradients are computed before the scale of the loss is known, and would underflow in half precision otherwise.
    coefficient = coefficient.to(device, torch.promote_types(student.left.dtype, torch.float32))
    largest = coefficient.max()
    unit = torch.where(largest > 0, largest, 1.0)
    return _Distil.apply(
        student.left,
        student.right,
        unit,
        kernel,
        float(student.scaling),
        float(student.softcap or 0.0),
        list(student.band),
        teacher.left.detach().to(device),
        teacher.right.detach().to(device),
        float(teacher.scaling),
        float(teacher.softcap or 0.0),
        list(teacher.band),
        None if key_mask is None else key_mask.to(device),
        coefficient / unit,
        TEACHER_LOSSES.index(loss),
    )


def taught_loss(
    settings: TeacherSettings,
    heads: Mapping[int, int],
    student: AttentionInputs,
    teacher: AttentionInputs,
    row_weights: Callable[[int], torch.Tensor],
    key_mask: torch.Tensor | None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Distillation loss of one layer of the student: the sum of the losses of its heads and of each relation.

    Args:
        settings ([`TeacherSettings`]): Settings of the teacher.
        heads (`dict[int, int]`): Head of the teacher, in the original numbering, by index of the remaining heads of
            the student.
        student, teacher ([`AttentionInputs`]): Inputs of the two layers.
        row_weights (callable): Returns the weight of each row, given a number of heads, see
            [`GuidanceTargets.row_weights`].
        key_mask (`torch.BoolTensor` of shape `(batch, keys)`, *optional*): True for non-padding keys.
        kernel (`str`): One of `GUIDANCE_KERNELS`, see [`use_triton`].

    Returns:
        `torch.Tensor`: a float32 scalar (float64 in double precision).
    """
    pairs = []
    if heads:
        known = teacher.heads or list(range(teacher.query.shape[1]))
        learned = [known.index(head) for head in heads.values()]
        pairs.append((factors_of_heads(student, list(heads)), factors_of_heads(teacher, learned)))
    for relation in settings.relations or ():
        count = settings.relation_heads or teacher.query.shape[1]
        pairs.append(tuple(factors_of_relation(one, relation, count) for one in (student, teacher)))
    terms = [
        distillation_loss(own, other, row_weights(own.left.shape[1]), settings.loss, key_mask, kernel)
        for own, other in pairs
    ]
    return torch.stack(terms).sum()
