# Licensed under the Apache License, Version 2.0.
"""Agreement of two quantities over source positions, such as attention, probe and saliency (Snell et al. 2021, 3.1).

The last dimension of a tensor is the source positions; each row is an output word or, in classification, a sentence.
For a corpus, concatenate the rows of all batches, from `reduction="none"`, and average by `torch.cat(rows).nanmean()`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...models.token_mask import non_padding
from ..notebook import html_table


REDUCTIONS = ("mean", "none")


def agreement(
    u: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    share: float = 0.05,
    reduction: str = "mean",
) -> torch.Tensor:
    """Fraction of rows in which the maximum of `u` is in the top 5 % of `v`: A(u, v) (Snell et al. 2021, equation 10).

    `A(u, v) = 1[|{j : v_j > v_argmax(u)}| < 5 % L]`, where L is the number of non-padding positions. The published
    code has `< ceil(0.05 L)`, which is equivalent for integers. It is not symmetric. If several positions of `u` are
    maximal, the first counts; equal values of `v` do not exceed each other, so a constant `v` agrees with any `u`.

    Args:
        u (`torch.Tensor` of shape `(batch, …, length)`): Values of the source positions, one row per output word.
        v (`torch.Tensor` of the same shape): Values of the same positions.
        mask (`torch.Tensor`, *optional*): 0 at padding. Of shape `(batch, length)`, or with as many dimensions as `u`
            and broadcastable to its shape, to leave out output words as well.
        share (`float`): Fraction of positions that counts as the top, in (0, 1].
        reduction (`str`): `"mean"` over rows, or `"none"`.

    Returns:
        `torch.Tensor`: the mean, float64; or 1 or 0 for each row, shape `(batch, …)`. Rows without non-padding
        positions, or with NaN at one, are NaN and left out of the mean; the mean of no rows is NaN.

    Raises:
        ValueError: if shapes do not match, `share` is out of range, or `reduction` is unknown.

    Example:
        >>> attention = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> probe = torch.tensor([[0.3, 0.9, 0.1], [0.2, 0.6, 0.4]])
        >>> agreement(attention, probe).item()
        0.5
    """
    _check_share(share)
    _check_reduction(reduction)
    real, defined = _real_positions(mask, u=u, v=v)
    highest = u.masked_fill(~real, -torch.inf).amax(-1, keepdim=True)
    best = ((u == highest) & real).byte().argmax(-1, keepdim=True)  # never padding, where all words have -inf
    higher = ((v > v.gather(-1, best)) & real).sum(-1)
    return _reduced(_within_share(higher, real.sum(-1), share), defined, reduction)


def chance_agreement(
    v: torch.Tensor, mask: torch.Tensor | None = None, share: float = 0.05, reduction: str = "mean"
) -> torch.Tensor:
    """Expected agreement of any `u` with a shuffled `v`: the baseline Â (Snell et al. 2021, section 3.1).

    Shuffling moves each value of `v` to the maximum of `u` with equal probability, so the expectation is the fraction
    of positions in the top, `ceil(5 % L) / L` without ties. It is computed without sampling.

    Args:
        v (`torch.Tensor` of shape `(batch, …, length)`): See [`agreement`], also for the other arguments.
        mask (`torch.Tensor`, *optional*): 0 at padding.
        share (`float`): Fraction of positions that counts as the top, in (0, 1].
        reduction (`str`): `"mean"` over rows, or `"none"`.

    Returns:
        `torch.Tensor`: the mean, float64; or for each row, shape `(batch, …)`, a number in (0, 1]. NaN as in
        [`agreement`].

    Raises:
        ValueError: see [`agreement`].

    Example:
        >>> chance_agreement(torch.rand(3, 25)).item()
        0.08
    """
    _check_share(share)
    _check_reduction(reduction)
    real, defined = _real_positions(mask, v=v)
    v = v.masked_fill(~real, -torch.inf)
    # Number of greater values; padding is -inf and never among them.
    higher = v.shape[-1] - torch.searchsorted(v.sort(-1).values, v.contiguous(), right=True)
    count = real.sum(-1)
    is_high = _within_share(higher, count.unsqueeze(-1), share) * real
    return _reduced(is_high.sum(-1) / count, defined, reduction)


def kendall_tau(
    u: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, reduction: str = "mean"
) -> torch.Tensor:
    """Kendall's rank correlation of two quantities, τ_b (Kendall 1945), the second measure of Snell et al. 2021.

    `τ_b = Σ sign(u_i - u_j) sign(v_i - v_j) / sqrt(n_u n_v)` over pairs i < j of non-padding positions, where n_u and
    n_v are the numbers of pairs without ties in `u` and in `v`. It is symmetric; its expectation for a shuffled `v` is
    0, the baseline. Time is quadratic in the length, memory linear.

    Args:
        u (`torch.Tensor` of shape `(batch, …, length)`): See [`agreement`], also for the other arguments.
        v (`torch.Tensor` of the same shape): Values of the same positions.
        mask (`torch.Tensor`, *optional*): 0 at padding.
        reduction (`str`): `"mean"` over rows, or `"none"`.

    Returns:
        `torch.Tensor`: the mean, float64; or for each row, shape `(batch, …)`, a number in [-1, 1]. NaN as in
        [`agreement`], and for rows in which `u` or `v` is constant.

    Raises:
        ValueError: if shapes do not match or `reduction` is unknown.

    Example:
        >>> kendall_tau(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 3.0, 2.0]])).item()
        0.333...
    """
    _check_reduction(reduction)
    real, defined = _real_positions(mask, u=u, v=v)
    concordance, untied_u, untied_v = torch.zeros(3, *u.shape[:-1], dtype=torch.float64, device=u.device)
    for lag in range(1, u.shape[-1]):
        pairs = real[..., lag:] & real[..., :-lag]
        order_u, order_v = _order(u, lag) * pairs, _order(v, lag) * pairs
        concordance += (order_u * order_v).sum(-1)
        untied_u += order_u.abs().sum(-1)
        untied_v += order_v.abs().sum(-1)
    # 0 / 0 where one of them is constant.
    return _reduced(concordance / (untied_u * untied_v).sqrt(), defined, reduction)


class ContextualizedAgreement(NamedTuple):
    """ξ, and the index of its checkpoint; `None` if no checkpoint agrees better."""

    performance: float
    checkpoint: int | None

    def _repr_html_(self) -> str:
        """Both values, for notebooks."""
        checkpoint = "none agrees better" if self.checkpoint is None else self.checkpoint
        rows = [["performance ξ", float(self.performance)], ["checkpoint", checkpoint]]
        return html_table(["", "value"], rows, "ContextualizedAgreement: the first checkpoint that agrees better")


def contextualized_agreement(
    value: float, agreements: Sequence[float], performances: Sequence[float]
) -> ContextualizedAgreement:
    """Agreement as the performance of an independent run whose attention first agrees better, ξ(u, v).

    `ξ(u, v) = p(inf{τ : A(α, α'(τ)) > A(u, v)})` (Snell et al. 2021, equation 11), where α is the attention of the
    fully trained model, and α'(τ) and p(τ) are attention and performance of a run with another seed at checkpoint τ.

    Args:
        value (`float`): A(u, v), averaged over the corpus.
        agreements (sequence of `float`): A(α, α'(τ)) over the same corpus at each checkpoint, in order of training.
        performances (sequence of `float`): p(τ) at the same checkpoints: accuracy, BLEU …

    Returns:
        [`ContextualizedAgreement`]: if no checkpoint agrees better, the performance of the last checkpoint, ξ* (a star
        in the paper's tables), and `checkpoint=None`.

    Raises:
        ValueError: if there is no checkpoint, the lengths differ, or an agreement is NaN.

    Example:
        >>> contextualized_agreement(0.31, agreements=[0.07, 0.24, 0.35, 0.52], performances=[0.0, 22.9, 43.4, 66.3])
        ContextualizedAgreement(performance=43.4, checkpoint=2)
    """
    if len(agreements) != len(performances) or not len(agreements):
        raise ValueError(
            f"there are {len(agreements)} agreements and {len(performances)} performances; give one of each for every "
            "checkpoint, at least one."
        )
    if any(map(math.isnan, [value, *agreements])):
        raise ValueError(f"value and agreements must be numbers, got {value} and {list(agreements)}.")
    for checkpoint, reached in enumerate(agreements):
        if reached > value:
            return ContextualizedAgreement(performances[checkpoint], checkpoint)
    return ContextualizedAgreement(performances[-1], None)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}.")


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")


def _real_positions(mask: torch.Tensor | None, **values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-padding positions, in the shape of the values, and rows with a defined result."""
    shape, *others = (value.shape for value in values.values())
    names = " and ".join(values)
    if any(other != shape for other in others) or not shape or not shape[-1]:
        shapes = " and ".join(str(tuple(value.shape)) for value in values.values())
        raise ValueError(f"{names} must have one shape (batch, …, length), length at least 1, got {shapes}.")
    if any(not value.is_floating_point() for value in values.values()):
        types = " and ".join(str(value.dtype) for value in values.values())
        raise ValueError(f"{names} must be of a floating type, got {types}.")
    if mask is not None and mask.dim() == 2 and len(shape) > 2:
        mask = mask.view(len(mask), *[1] * (len(shape) - 2), mask.shape[-1])
    sizes = shape if mask is None else mask.shape
    if len(sizes) != len(shape) or any(size not in (1, full) for size, full in zip(sizes, shape)):
        raise ValueError(f"mask has shape {tuple(sizes)}, which does not match {names} of shape {tuple(shape)}.")
    real = non_padding(mask, shape, next(iter(values.values())).device).expand(shape)
    is_nan = sum(value.isnan() for value in values.values()).bool()
    return real, real.any(-1) & ~(is_nan & real).any(-1)


def _within_share(higher: torch.Tensor, count: torch.Tensor, share: float) -> torch.Tensor:
    # Division is exact here; 0.05 × 140 is greater than 7 in floating point.
    return (higher / count.double() < share).double()


def _order(values: torch.Tensor, lag: int) -> torch.Tensor:
    """Signs of the differences of values that are `lag` positions apart, also for infinite values."""
    later, earlier = values[..., lag:], values[..., :-lag]
    return (later > earlier).to(torch.int8) - (later < earlier).to(torch.int8)


def _reduced(rows: torch.Tensor, defined: torch.Tensor, reduction: str) -> torch.Tensor:
    rows = rows.masked_fill(~defined, torch.nan)
    return rows if reduction == "none" else rows.nanmean()
