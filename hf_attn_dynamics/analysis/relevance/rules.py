# Licensed under the Apache License, Version 2.0.
"""Rules of layer-wise relevance propagation for sums and products (see `heads.py`).

Each operation is an autograd function with the usual forward pass, whose backward pass propagates relevance instead of
a gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch


RULES = ("ratio", "alpha_beta", "attn_lrp")


Pair = tuple[torch.Tensor, torch.Tensor]


class _Distribution(NamedTuple):
    """How neurons `v = Σ left · right + bias` distribute their relevance.

    Args:
        terms (list of `(c, pairs)`): Each product `left · right` of a pair gets `c · left · right`. Pairs hold parts
            of the factors; each product belongs to one pair.
        bias (`torch.Tensor`): Relevance of the bias.
        kept (`torch.Tensor`): Relevance that small denominators leave undistributed.
    """

    terms: list[tuple[torch.Tensor, list[Pair]]]
    bias: torch.Tensor
    kept: torch.Tensor


@dataclass(frozen=True)
class Rule:
    """How relevance is distributed over the summands of a sum and the factors of a product."""

    name: str
    epsilon: float

    def __post_init__(self):
        if self.name not in RULES:
            raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))}, got {self.name!r}.")
        if isinstance(self.epsilon, bool) or not isinstance(self.epsilon, (int, float)) or not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must be a number between 0 and 1, got {self.epsilon!r}.")

    @property
    def halves(self) -> bool:
        """Whether both factors of a product get half of its relevance (Achtibat et al. 2024)."""
        return self.name == "attn_lrp"

    def reciprocal_(self, denominator: torch.Tensor) -> torch.Tensor:
        """1 / denominator, clamped to ±1 / ε; in place."""
        return denominator.reciprocal_().clamp_(-1 / self.epsilon, 1 / self.epsilon)

    def distribute(
        self,
        relevance: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        bias: torch.Tensor,
        output: torch.Tensor,
        bilinear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> _Distribution:
        """Relevance of the summands of `output = bilinear(left, right) + bias`."""
        if self.name != "alpha_beta":
            c = relevance * self.reciprocal_(output.clone())
            return _Distribution([(c, [(left, right)])], c * bias, self._kept(relevance, c, output))
        (left_up, left_down), (right_up, right_down), (bias_up, bias_down) = map(_signed_parts, (left, right, bias))
        # Positive summands get the relevance, or negative ones if there are no positive ones.
        raised = bilinear(left_up, right_up) + bilinear(left_down, right_down) + bias_up
        lowered = torch.where(raised > 0, 0, raised - output)
        total = torch.where(raised > 0, raised, lowered)
        c = relevance * self.reciprocal_(total.clone())
        c_raised, c_lowered = torch.where(raised > 0, c, 0), torch.where(raised > 0, 0, c)
        terms = [(c_raised, [(left_up, right_up), (left_down, right_down)])]
        if lowered.any():
            terms.append((c_lowered, [(left_up, right_down), (left_down, right_up)]))
        return _Distribution(terms, c_raised * bias_up + c_lowered * bias_down, self._kept(relevance, c, total))

    def _kept(self, relevance: torch.Tensor, c: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return torch.where(total.abs() < self.epsilon, relevance - c * total, 0)

    def factors(self, first: torch.Tensor, second: torch.Tensor) -> Pair:
        """The values in proportion to which the factors of a product get relevance."""
        return (first.abs(), second.abs()) if self.name == "alpha_beta" else (first, second)


def _signed_parts(values: torch.Tensor) -> Pair:
    """Positive part, and absolute value of the negative part."""
    return values.clamp(min=0), values.clamp(max=0).neg_()


class PassThrough(torch.autograd.Function):
    """Each output passes its relevance to the input at the same index."""

    @staticmethod
    def forward(ctx, inputs, output):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, relevance):
        return relevance, None


class Softmax(torch.autograd.Function):
    """Softmax by its first-order expansion: `x · (R − s · Σ R)` for inputs x, outputs s and their relevance R.

    The constant of the expansion keeps the rest (Achtibat et al. 2024, proposition 3.1).
    """

    @staticmethod
    def forward(ctx, inputs, output, dim):
        ctx.save_for_backward(inputs, output)
        ctx.dim = dim
        return output.view_as(output)

    @staticmethod
    def backward(ctx, relevance):
        inputs, output = ctx.saved_tensors
        slope = relevance - output * relevance.sum(ctx.dim, keepdim=True)
        # Masked inputs may be infinite.
        return torch.where(output > 0, inputs * slope, 0), None, None


class Linear(torch.autograd.Function):
    """`output = map(inputs, coefficients) + bias`: sums of inputs with constant coefficients."""

    @staticmethod
    def forward(ctx, inputs, bias, output, coefficients, linear_map, rule):
        ctx.save_for_backward(inputs, bias, output, coefficients)
        ctx.linear_map, ctx.rule = linear_map, rule
        return output.view_as(output)

    @staticmethod
    def backward(ctx, relevance):
        inputs, bias, output, coefficients = ctx.saved_tensors
        distribute = partial(_distribute_linearly, ctx.rule, ctx.linear_map, coefficients)
        if ctx.linear_map is not MATRIX or coefficients.dim() > 2:
            return *distribute(relevance, inputs, bias, output), None, None, None, None
        # After the attention of the last layer, most rows have no relevance.
        rows = relevance.flatten(0, -2).ne(0).any(-1).nonzero()[:, 0]
        of_rows = distribute(*(tensor.flatten(0, -2)[rows] for tensor in (relevance, inputs, bias, output)))
        filled = [
            part.new_zeros(whole.shape).flatten(0, -2).index_copy(0, rows, part).view(whole.shape) if needed else None
            for part, whole, needed in zip(of_rows, (inputs, bias), ctx.needs_input_grad)
        ]
        return *filled, None, None, None, None


class LinearMap(NamedTuple):
    """A linear map, `apply(inputs, coefficients)`.

    Args:
        apply, transpose (callable): The map, and its transpose, which takes outputs. Both are linear in coefficients.
        spread (callable): `spread(kept, coefficients)` distributes undistributed relevance of each output over its
            inputs in equal parts.
    """

    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    transpose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    spread: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _distribute_linearly(rule, linear_map, coefficients, relevance, inputs, bias, output) -> Pair:
    """Relevance of the inputs and of the bias."""
    parts = rule.distribute(relevance, inputs, coefficients, bias, output, linear_map.apply)
    of_inputs = linear_map.spread(parts.kept, coefficients)
    for c, pairs in parts.terms:
        of_inputs = of_inputs + sum(left * linear_map.transpose(c, right) for left, right in pairs)
    return of_inputs, parts.bias


def _spread_over_rows(kept: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    # Not to inputs without effect, such as masked keys.
    used = matrix.ne(0)
    if used.all():
        return kept.sum(-1, keepdim=True) / matrix.shape[-2]
    return kept / used.sum(-2, keepdim=True).clamp(min=1) @ used.mT.to(kept)


def _apply_centring(inputs: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    diagonal, others = coefficients
    return (diagonal - others) * inputs + others * inputs.sum(-1, keepdim=True)


def _transpose_centring(outputs: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    diagonal, others = coefficients
    return (diagonal - others) * outputs + (others * outputs).sum(-1, keepdim=True)


# inputs @ matrix
MATRIX = LinearMap(torch.matmul, lambda outputs, matrix: outputs @ matrix.mT, _spread_over_rows)
# A matrix with one coefficient on and another off the diagonal: subtraction of the mean, and scale.
CENTRING = LinearMap(_apply_centring, _transpose_centring, lambda kept, _: kept.sum(-1, keepdim=True) / kept.shape[-1])
# The sum over the first dimension.
TOTAL = LinearMap(
    lambda inputs, ones: (inputs * ones).sum(0),
    lambda outputs, ones: outputs * ones,
    lambda kept, ones: kept / len(ones),
)


class Product(torch.autograd.Function):
    """`first * second`, both of the same shape."""

    @staticmethod
    def forward(ctx, first, second, rule):
        ctx.save_for_backward(first, second)
        ctx.rule = rule
        return first * second

    @staticmethod
    def backward(ctx, relevance):
        if ctx.rule.halves:
            return relevance / 2, relevance / 2, None
        first, second = ctx.rule.factors(*ctx.saved_tensors)
        of_first = relevance * first * ctx.rule.reciprocal_(first + second)
        return of_first, relevance - of_first, None


class MatrixProduct(torch.autograd.Function):
    """`left @ right`: sums of products of two neurons."""

    @staticmethod
    def forward(ctx, left, right, rule):
        output = left @ right
        ctx.save_for_backward(left, right, output)
        ctx.rule = rule
        return output

    @staticmethod
    def backward(ctx, relevance):
        left, right, output = ctx.saved_tensors
        # In the last layer, few rows have relevance.
        rows = relevance.ne(0).any(-1)
        chosen = rows.byte().topk(int(rows.sum(-1).max())).indices[..., None]
        of_rows, of_right = _distribute_to_factors(
            ctx.rule,
            *(tensor.take_along_dim(chosen, -2) for tensor in (relevance, left)),
            right,
            output.take_along_dim(chosen, -2),
        )
        return torch.zeros_like(left).scatter(-2, chosen.expand_as(of_rows), of_rows), of_right, None


def _distribute_to_factors(rule: Rule, relevance, left, right, output) -> Pair:
    """Relevance of both factors."""
    parts = rule.distribute(relevance, left, right, output.new_zeros(()), output, torch.matmul)
    # Not to masked keys.
    used = left.ne(0)
    kept = used * parts.kept.sum(-1, keepdim=True) / used.sum(-1, keepdim=True).clamp(min=1)
    if rule.halves:
        c = parts.terms[0][0]
        return left * (c @ right.mT) / 2 + kept, right * (left.mT @ c) / 2
    # Attention weights have no negative part.
    terms = [(c, [pair for pair in pairs if pair[0].any()]) for c, pairs in parts.terms]
    of_left, of_right = _split_products(rule, [term for term in terms if term[1]], *rule.factors(left, right))
    return of_left + kept, of_right


BLOCK = 2**18  # products per block, to fit into the CPU cache


def _split_products(
    rule: Rule, terms: list[tuple[torch.Tensor, list[Pair]]], left: torch.Tensor, right: torch.Tensor
) -> Pair:
    """Splits the relevance of products, `c_qd · left_qk · right_kd` of the pairs of terms, among their two factors.

    The first factor gets `left² · Σ_d right · (c / (left + right))`, the second factor the rest. Only the expression
    in the outer parentheses needs memory for each product.

    Args:
        rule (`Rule`): The rule.
        terms (list of `(c, pairs)`): See [`_Distribution`]; `c` is of shape `(..., queries, features)`.
        left (`torch.Tensor` of shape `(..., queries, keys)`), right (`torch.Tensor` of shape `(..., keys, features)`):
            See `Rule.factors`.

    Returns:
        Relevance of `left` and of `right`.
    """
    shape_left, shape_right = left.mT.shape, right.shape
    (keys, queries), features = shape_left[-2:], shape_right[-1]
    matrices = math.prod(shape_right[:-2])
    left, right = left.mT.reshape(matrices, keys, queries), right.reshape(matrices, keys, features)
    flat = [
        (
            c.reshape(matrices, queries, features),
            torch.stack([factor.mT for factor, _ in pairs], -2).view(matrices, keys, len(pairs), queries),
            torch.stack([factor for _, factor in pairs], -2).view(matrices, keys, len(pairs), features),
        )
        for c, pairs in terms
    ]
    of_left, of_right = torch.zeros_like(left), torch.zeros_like(right)
    of_keys = max(1, min(keys, BLOCK // max(1, queries * features)))
    of_matrices = max(1, BLOCK // max(1, queries * features * of_keys))
    for start in range(0, matrices, of_matrices):
        for key in range(0, keys, of_keys):
            block = slice(start, start + of_matrices), slice(key, key + of_keys)
            # (matrices, keys, queries, features)
            reciprocal = rule.reciprocal_(left[block][..., None] + right[block][..., None, :])
            for c, lefts, rights in flat:
                scaled = reciprocal * c[block[0], None]
                squares = lefts[block].square()
                of_left[block] += (squares * (rights[block] @ scaled.mT)).sum(-2)
                of_right[block] -= (rights[block] * (squares @ scaled)).sum(-2)
    for c, lefts, rights in flat:
        of_right += sum(factor * (other @ c) for factor, other in zip(rights.unbind(-2), lefts.unbind(-2)))
    return of_left.view(shape_left).mT, of_right.view(shape_right)
