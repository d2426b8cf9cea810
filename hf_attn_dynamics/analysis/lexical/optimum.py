# Licensed under the Apache License, Version 2.0.
"""The attention with the smallest loss, for models in which that is a convex problem."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...models.ignored_labels import IGNORED, is_labelled
from ...models.token_mask import non_padding
from .source_maps import plot_sentence, table_of_rows


if TYPE_CHECKING:
    from matplotlib.figure import Figure


logger = logging.getLogger(__name__)


class OptimalAttention(NamedTuple):
    """Result of [`optimal_attention`].

    `attention` has shape `(batch, target length, source length)`. For each target, `loss` is its loss, and `gap` an
    upper bound on the difference to the smallest possible loss.
    """

    attention: torch.Tensor
    loss: torch.Tensor
    gap: torch.Tensor

    def _repr_html_(self) -> str:
        """The largest weight of each output word and its loss, for notebooks."""
        sentences = f"{len(self.attention):,} sentence{'s' * (len(self.attention) != 1)}"
        gap = self.gap[~self.gap.isnan()].max().item() if (~self.gap.isnan()).any() else 0.0
        caption = f"OptimalAttention of {sentences}: losses are at most {gap:.0e} nats above the smallest possible"
        return table_of_rows(self.attention, self._is_padding, caption, {"loss (nats)": self.loss})

    def plot(
        self,
        path: str | Path | None = None,
        title: str = "",
        sentence: int = 0,
        source: Sequence[str] | None = None,
        target: Sequence[str] | None = None,
    ) -> "Figure":
        """Draws the weights of one sentence of the batch: a row for each output word, without padding.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
            sentence (`int`): Index of the sentence in the batch.
            source, target (`list[str]`, *optional*): Tokens of both sides, with or without those of padding; positions
                by default.

        Returns:
            `matplotlib.figure.Figure`

        Raises:
            ValueError: if there is no such sentence, it has no label, or there is another number of tokens.
        """
        names = "optimal attention", "attention weight"
        return plot_sentence(self.attention, self._is_padding, names, sentence, source, target, path, title)

    @property
    def _is_padding(self) -> torch.Tensor:
        # The weights of an interior-point method are positive.
        return self.attention == 0


def optimal_attention(
    source_logits: torch.Tensor,
    labels: torch.Tensor,
    target_logits: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 100,
    chunk_size: int = 128,
) -> OptimalAttention:
    """Attention with the smallest loss, α^opt, for models that are linear after attention (Snell et al. 2021, A.1).

    `p_t = softmax(Σ_l α_tl γ_l + γ_t)` (equations 27 and 33), where γ_l are the logits of a source position and γ_t
    the logits of the target. For each target, -ln p_t,y is convex in α on the simplex (equations 35–37). It is
    minimized by a primal–dual interior-point method with a line search on the residual (Boyd & Vandenberghe 2004,
    section 11.7), in float64. Convergence is slow for logits that differ by hundreds, for which the loss is nearly a
    maximum and not smooth.

    The certificate is the Frank–Wolfe duality gap, `max_l ⟨∇, α - e_l⟩` with the gradient ∇ at the returned attention:
    by convexity, no attention has a loss smaller than `loss - gap`.

    Args:
        source_logits (`torch.Tensor` of shape `(batch, source length, classes)`): γ_l. For a sigmoid with logit γ, the
            two classes have logits 0 and γ.
        labels (`torch.Tensor` of shape `(batch, target length)`): The correct classes; -100 is ignored.
        target_logits (`torch.Tensor` of shape `(batch, target length, classes)`, *optional*): γ_t; 0 by default.
        mask (`torch.Tensor` of shape `(batch, source length)`, *optional*): 0 at positions without attention.
        tolerance (`float`): Gap, in nats, at which a target has converged, > 0.
        max_iterations (`int`): Maximum number of steps; a warning reports targets that have not converged.
        chunk_size (`int`): Targets per chunk; each needs memory for some matrices of source length × classes.

    Returns:
        [`OptimalAttention`], float64: weights sum to 1, and are 0 at padding. Targets without a label are NaN, which
        `agreement` leaves out.

    Raises:
        ValueError: if shapes do not match, a label is not a class, a target has no position to attend to, a logit is
            not finite, or another argument is out of range.

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
        raise ValueError("mask leaves no position to attend to in a sentence with labels.")
    source_logits = source_logits.detach().double().masked_fill(~real[..., None], 0)
    target_logits = target_logits.detach().double()
    if not (source_logits.isfinite().all() and target_logits[has_label].isfinite().all()):
        raise ValueError("source_logits and target_logits must be finite at all non-padding positions.")

    attention = source_logits.new_full((batch, targets, sources), torch.nan)
    loss, gap = source_logits.new_full((2, batch, targets), torch.nan)
    for rows in has_label.nonzero().split(chunk_size):
        sentence, target = rows.unbind(1)
        # Relative to the logit of the correct class, the loss is the log-sum-exp of the logits.
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
    """`ln Σ_o exp(Σ_l α_l γ_lo + γ_o)` of each row as a function of α."""

    gamma: torch.Tensor  # (rows, source length, classes)
    offset: torch.Tensor  # (rows, classes)

    def logits(self, alpha: torch.Tensor) -> torch.Tensor:
        return (alpha[:, None] @ self.gamma).squeeze(1) + self.offset

    def gradient(self, alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient, which is the mean of γ, and the probabilities of the classes."""
        p = self.logits(alpha).softmax(-1)
        return (self.gamma @ p[..., None]).squeeze(-1), p

    def hessian(self, gradient: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """The covariance of γ under the probabilities of the classes."""
        return (self.gamma * p[:, None]) @ self.gamma.mT - gradient[:, :, None] * gradient[:, None]


def _duality_gap(alpha: torch.Tensor, gradient: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    lowest = gradient.masked_fill(~real, torch.inf).amin(-1)
    return ((gradient - lowest[:, None]) * alpha).sum(-1)


def _minimise(objective: _LogSumExp, real: torch.Tensor, tolerance: float, max_iterations: int) -> torch.Tensor:
    """Minimizers of the objectives on the simplex over non-padding positions, `(rows, source length)`."""
    weights = real.double()
    solution = weights / weights.sum(-1, keepdim=True)
    gradient, p = objective.gradient(solution)
    # Multipliers for which ∇ - dual + level is 0 at the start.
    level = 1 - gradient.masked_fill(~real, torch.inf).amin(-1, keepdim=True)
    state = _State(solution.clone(), (gradient + level) * weights, level, gradient, p)
    rows = torch.arange(len(real), device=real.device)  # that have not converged
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
    """Weights of rows that have not converged, multipliers of α ≥ 0 and of Σ α = 1, gradient and probabilities."""

    alpha: torch.Tensor  # (rows, source length)
    dual: torch.Tensor  # (rows, source length)
    level: torch.Tensor  # (rows, 1)
    gradient: torch.Tensor  # (rows, source length)
    p: torch.Tensor  # (rows, classes)


def _interior_point_step(objective: _LogSumExp, real: torch.Tensor, state: _State) -> _State:
    """One Newton step towards `∇ - dual + level = 0` and `alpha · dual = center` at non-padding positions."""
    alpha, dual, level, gradient, p = state
    center = (alpha * dual).sum(-1, keepdim=True) / real.sum(-1, keepdim=True) / 10
    pull = torch.where(real, center / alpha, 0)
    # The system `(∇² + diag(dual / alpha)) step = …`, scaled on both sides: eigenvalues are at least 1, and padding is
    # an identity block.
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
        return (torch.cat([stationarity, state.alpha * state.dual - center], -1) * real.repeat(1, 2)).norm(dim=-1)

    # Backtracking line search from 99 % of the distance to the boundary.
    longest = [
        torch.where(step < 0, -value / step, torch.inf).amin(-1, keepdim=True)
        for value, step in ((alpha, step_alpha), (dual, step_dual))
    ]
    size = (0.99 * torch.minimum(*longest)).clamp(max=1)
    before = residual(state)
    for _ in range(30):
        alpha = state.alpha + size * step_alpha
        alpha = alpha / alpha.sum(-1, keepdim=True)  # corrects rounding
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
