# Licensed under the Apache License, Version 2.0.
"""The attention that makes a loss as small as it can be, where that is a convex problem."""

import logging
from typing import NamedTuple

import torch

from ...models.ignored_labels import IGNORED, is_labelled
from ...models.token_mask import non_padding


logger = logging.getLogger(__name__)


class OptimalAttention(NamedTuple):
    """What [`optimal_attention`] found.

    `attention` has shape `(batch, target length, source length)`; for each target, `loss` is what it leads to, and
    `gap` is at least that loss less the smallest one that any attention has.
    """

    attention: torch.Tensor
    loss: torch.Tensor
    gap: torch.Tensor


def optimal_attention(
    source_logits: torch.Tensor,
    labels: torch.Tensor,
    target_logits: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 100,
    chunk_size: int = 128,
) -> OptimalAttention:
    """Attention of the smallest loss, α^opt, for models that are linear after attention (Snell et al. 2021, A.1).

    `p_t = softmax(Σ_l α_tl γ_l + γ_t)` (equations 27 and 33), with γ_l the logits of a source position and γ_t those
    that the target adds. For each target, -ln p_t,y is convex in α on the simplex (equations 35–37). It is minimised
    by a primal–dual interior-point method with a line search on the residual (Boyd & Vandenberghe 2004, section
    11.7), in float64. Logits that differ by hundreds make it slow: nearly a maximum, the loss is then not smooth.

    The certificate is the duality gap of Frank & Wolfe, `max_l ⟨∇, α - e_l⟩` with the gradient ∇ at the attention that
    is returned: by convexity no attention has a loss smaller than `loss - gap`.

    Args:
        source_logits (`torch.Tensor` of shape `(batch, source length, classes)`): γ_l. For a sigmoid with the logit
            γ, the two classes have 0 and γ.
        labels (`torch.Tensor` of shape `(batch, target length)`): The correct classes; -100 where there is none.
        target_logits (`torch.Tensor` of shape `(batch, target length, classes)`, *optional*): γ_t; 0 if not given.
        mask (`torch.Tensor` of shape `(batch, source length)`, *optional*): 0 where no attention may go.
        tolerance (`float`): Gap, in nats, at which a target is done, > 0.
        max_iterations (`int`): After so many steps a target is left as it is, with a warning and its gap.
        chunk_size (`int`): Targets at a time; each needs memory for some matrices of source length × classes.

    Returns:
        [`OptimalAttention`], float64: the weights sum to 1, and are 0 at padding; for targets without label, weights,
        loss and gap are NaN, which `agreement` leaves out.

    Raises:
        ValueError: if shapes do not fit, a label is no class, a target has no position to attend to, a logit is not
            finite, or another argument is out of range.

    Example (equations 30 and 31: the position with the highest probability gets no attention):
        >>> logits = torch.tensor([[[0.0, 0.0, 0.0], [0.0, -10.0, 5.0], [0.0, 5.0, -10.0]]])
        >>> optimal_attention(logits, torch.tensor([[0]])).attention.round(decimals=3).abs()
        tensor([[[0.0000, 0.5000, 0.5000]]], dtype=torch.float64)
    """
    batch, sources, classes = _checked_shape("source_logits", source_logits, (None, None, None))
    _, targets = _checked_shape("labels", labels, (batch, None))
    if target_logits is None:
        target_logits = source_logits.new_zeros(1, 1, 1).expand(batch, targets, classes)
    _checked_shape("target_logits", target_logits, (batch, targets, classes))
    if mask is not None:
        _checked_shape("mask", mask, (batch, sources))
    if not tolerance > 0 or max_iterations < 1 or chunk_size < 1:
        raise ValueError(
            "tolerance must be positive, max_iterations and chunk_size at least 1, got "
            f"{tolerance}, {max_iterations} and {chunk_size}."
        )
    real = non_padding(mask, (batch, sources), source_logits.device)
    has_label = is_labelled(labels)
    if ((labels < 0) | (labels >= classes))[has_label].any():
        raise ValueError(f"labels must be classes from 0 to {classes - 1}, or {IGNORED} for none.")
    if (has_label.any(1) & ~real.any(1)).any():
        raise ValueError("mask leaves no position to attend to in a sentence that has labels.")
    source_logits = source_logits.detach().double().masked_fill(~real[..., None], 0)
    target_logits = target_logits.detach().double()
    if not (source_logits.isfinite().all() and target_logits[has_label].isfinite().all()):
        raise ValueError("source_logits and target_logits must be finite at all real positions.")

    attention = source_logits.new_full((batch, targets, sources), torch.nan)
    loss, gap = source_logits.new_full((2, batch, targets), torch.nan)
    for rows in has_label.nonzero().split(chunk_size):
        sentence, target = rows.unbind(1)
        # Differences from the logits of the correct class: the loss is their log-sum-exp.
        correct = labels[sentence, target]
        gamma = source_logits[sentence]
        gamma = gamma - gamma.gather(-1, correct[:, None, None].expand(-1, sources, 1))
        offset = target_logits[sentence, target]
        offset = offset - offset.gather(-1, correct[:, None])
        objective = _LogSumExp(gamma, offset)
        alpha = _minimise(objective, real[sentence], tolerance, max_iterations)
        attention[sentence, target] = alpha
        loss[sentence, target] = objective.logits(alpha).logsumexp(-1)
        gap[sentence, target] = _duality_gap(alpha, objective.gradient(alpha)[0], real[sentence])
    open_gaps = int((gap > tolerance).sum())
    if open_gaps:
        logger.warning(
            "%d targets have a gap of more than %g after %d iterations, at most %g.",
            open_gaps,
            tolerance,
            max_iterations,
            gap[has_label].max(),
        )
    return OptimalAttention(attention, loss, gap)


class _LogSumExp(NamedTuple):
    """`ln Σ_o exp(Σ_l α_l γ_lo + γ_o)` of each row, as a function of α."""

    gamma: torch.Tensor  # (rows, source length, classes)
    offset: torch.Tensor  # (rows, classes)

    def logits(self, alpha: torch.Tensor) -> torch.Tensor:
        return (alpha[:, None] @ self.gamma).squeeze(1) + self.offset

    def gradient(self, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient, and the probabilities that it is the mean of γ under."""
        p = self.logits(alpha).softmax(-1)
        return (self.gamma @ p[..., None]).squeeze(-1), p

    def hessian(self, gradient: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """The covariance of γ under the probabilities."""
        return (self.gamma * p[:, None]) @ self.gamma.mT - gradient[:, :, None] * gradient[:, None]


def _duality_gap(alpha: torch.Tensor, gradient: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    lowest = gradient.masked_fill(~real, torch.inf).amin(-1)
    return ((gradient - lowest[:, None]) * alpha).sum(-1)


def _minimise(objective: _LogSumExp, real: torch.Tensor, tolerance: float, max_iterations: int) -> torch.Tensor:
    """Points of the simplex over the real positions, `(rows, source length)`, where each objective is smallest."""
    weights = real.double()
    solution = weights / weights.sum(-1, keepdim=True)
    gradient, p = objective.gradient(solution)
    # Multipliers with which ∇ - dual + level is 0 from the start.
    level = 1 - gradient.masked_fill(~real, torch.inf).amin(-1, keepdim=True)
    state = _State(solution.clone(), (gradient + level) * weights, level, gradient, p)
    rows = torch.arange(len(real), device=real.device)  # those that are not done
    for _ in range(max_iterations):
        is_open = _duality_gap(state.alpha, state.gradient, real) > tolerance
        if not is_open.all():
            rows, real = rows[is_open], real[is_open]
            state = _State(*(value[is_open] for value in state))
            objective = _LogSumExp(*(value[is_open] for value in objective))
        if not len(rows):
            break
        state = _interior_point_step(objective, real, state)
        solution[rows] = state.alpha
    return solution


class _State(NamedTuple):
    """Weights of rows that are not done, multipliers of α ≥ 0 and of Σ α = 1, and what is known at these weights."""

    alpha: torch.Tensor  # (rows, source length)
    dual: torch.Tensor  # (rows, source length)
    level: torch.Tensor  # (rows, 1)
    gradient: torch.Tensor  # (rows, source length)
    p: torch.Tensor  # (rows, classes)


def _interior_point_step(objective: _LogSumExp, real: torch.Tensor, state: _State) -> _State:
    """One Newton step towards `∇ - dual + level = 0` and `alpha · dual = centre` over the real positions."""
    alpha, dual, level, gradient, p = state
    centre = (alpha * dual).sum(-1, keepdim=True) / real.sum(-1, keepdim=True) / 10
    pull = torch.where(real, centre / alpha, 0)
    # The system `(∇² + diag(dual / alpha)) step = …`, scaled on both sides: no eigenvalue is less than 1, and at
    # padding there is nothing but the 1.
    scale = torch.where(real, (alpha / dual).sqrt(), 0)
    matrix = scale[:, :, None] * objective.hessian(gradient, p) * scale[:, None]
    matrix.diagonal(dim1=1, dim2=2).add_(1)
    right = torch.stack([scale * (pull - gradient), scale], -1)
    newton, ones = (scale[..., None] * torch.cholesky_solve(right, torch.linalg.cholesky(matrix))).unbind(-1)
    new_level = newton.sum(-1, keepdim=True) / ones.sum(-1, keepdim=True)
    step_alpha = newton - new_level * ones
    step_dual = torch.where(real, pull - dual - dual / alpha * step_alpha, 0)
    step_level = new_level - level

    def residual(state: _State) -> torch.Tensor:
        stationarity = state.gradient - state.dual + state.level
        return (torch.cat([stationarity, state.alpha * state.dual - centre], -1) * real.repeat(1, 2)).norm(dim=-1)

    # As far as 99 % of the way to the border, then back until the residual falls.
    longest = [
        torch.where(step < 0, -value / step, torch.inf).amin(-1, keepdim=True)
        for value, step in ((alpha, step_alpha), (dual, step_dual))
    ]
    size = (0.99 * torch.minimum(*longest)).clamp(max=1)
    before = residual(state)
    for _ in range(30):
        alpha = state.alpha + size * step_alpha
        alpha = alpha / alpha.sum(-1, keepdim=True)  # 1 but for rounding
        moved = _State(alpha, state.dual + size * step_dual, level + size * step_level, *objective.gradient(alpha))
        too_far = residual(moved) > (1 - 0.01 * size.squeeze(1)) * before
        if not too_far.any():
            break
        size = torch.where(too_far[:, None], size / 2, size)
    return moved


def _checked_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> torch.Size:
    if tensor.dim() != len(shape) or any(want not in (None, size) for want, size in zip(shape, tensor.shape)):
        wanted = ", ".join("…" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}.")
    return tensor.shape
