# Licensed under the Apache License, Version 2.0.
"""Gradients of the loss with respect to multiplicative masks of heads and units, all equal to 1.

The gradient of a mask at one position is ⟨z, ∂L/∂z⟩, where z is what the head or unit gives to the output projection.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..model_parts import ModelPart, PartSite
from ..model_views import evaluation_view
from ..running import batches_of, real_tokens
from .summed_loss import SummedLoss


# A part, its gradients by position, `(batch, length, elements)`, or `None` if the loss does not depend on it, and the
# padding mask of its positions.
Call = tuple[ModelPart, torch.Tensor | None, torch.Tensor]


def mask_gradients(
    model: PreTrainedModel,
    data: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    parts: list[ModelPart],
    loss: Callable[[ModelOutput, dict[str, Any]], torch.Tensor] | None,
    purpose: str,
    progress: bool = False,
) -> Iterator[tuple[dict[str, Any], list[Call]]]:
    """Runs a model on batches, and yields the gradients of the masks of each batch.

    The model runs in evaluation mode; its mode, its gradients and its frozen parameters are not changed.

    Args:
        model (`PreTrainedModel`): The model.
        data (iterable of `dict`): Batches with labels, or a single batch.
        parts (`list[ModelPart]`): Heads and units of the model.
        loss (callable, *optional*): `loss(outputs, batch)` returns the sum of the losses of a batch; the model's own
            loss by default.
        purpose (`str`): Name of the analysis, for messages.
        progress (`bool`): Whether to show a progress bar.

    Yields:
        The batch on the device of the model, and a call for each run of each part, at least float32.

    Raises:
        ValueError: if there is no batch, a batch has no labels or its loss is not finite, or all labels are ignored.
    """
    summed_loss = loss or SummedLoss(model)
    found: list[tuple[ModelPart, torch.Tensor]] = []
    view = evaluation_view(model)
    for own in parts:
        own.edit(view, partial(_keep, own, found))
    try:
        for number, batch in batches_of(data, model, purpose, progress):
            found.clear()
            with torch.enable_grad():
                outputs = view.root(**batch, return_dict=True)
                total = summed_loss(outputs, batch)
            if not found:
                continue
            if total.dim() or not total.requires_grad:
                raise ValueError(
                    f"loss must return a scalar that can be differentiated, got shape {tuple(total.shape)}, "
                    f"requires_grad={total.requires_grad} (batch {number})."
                )
            if not total.isfinite():
                raise ValueError(f"the loss of batch {number} is {total.item()}; importance needs a finite loss.")
            gradients = torch.autograd.grad(total, [given for _, given in found], allow_unused=True)
            calls = []
            for (own, given), gradient in zip(found, gradients):
                real = real_tokens(model, own.key.site.kind, batch, given.shape[:2], given.device)
                calls.append((own, None if gradient is None else _product(given, gradient), real))
            del outputs, total, gradients
            yield batch, calls
    finally:
        found.clear()
    if not getattr(summed_loss, "has_labels", True):
        raise ValueError("data has no labels: all are ignored; give labels other than -100.")


def mean_sensitivities(
    model: PreTrainedModel,
    data: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    parts: list[ModelPart],
    loss: Callable[[ModelOutput, dict[str, Any]], torch.Tensor] | None,
    purpose: str,
    progress: bool = False,
) -> dict[PartSite, torch.Tensor]:
    """Mean over tokens of the absolute gradients of masks (Michel et al. 2019), in float64.

    See [`mask_gradients`] for the arguments.

    Raises:
        ValueError: as [`mask_gradients`]; or if a layer never ran.
    """
    sums = {own.key: torch.zeros(len(own.elements), dtype=torch.float64) for own in parts}
    tokens = dict.fromkeys(sums, 0)
    for _, calls in mask_gradients(model, data, parts, loss, purpose, progress):
        seen = set()
        for own, gradient, real in calls:
            if own.key not in seen:
                tokens[own.key] += int(real.sum())
                seen.add(own.key)
            if gradient is not None:
                sums[own.key] += gradient.abs()[real].sum(0).cpu().double()
    check_tokens(parts, tokens)
    return {key: total / max(tokens[key], 1) for key, total in sums.items()}


def check_tokens(parts: list[ModelPart], tokens: Mapping[PartSite, int]) -> None:
    """Raises ValueError if the data has no token for a layer."""
    for own in parts:
        if own.elements and not tokens[own.key]:
            raise ValueError(f"data has no token for the {own.key.site}; check the inputs and their attention masks.")


def _keep(own: ModelPart, found: list, given: torch.Tensor) -> torch.Tensor:
    """Records the inputs of an output projection as part of the autograd graph."""
    if not given.requires_grad:
        # All earlier parameters are frozen: the graph starts here.
        given = given.detach().requires_grad_()
    found.append((own, given))
    return given


def _product(given: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """⟨z, ∂L/∂z⟩ of each head or unit, by position."""
    dtype = torch.promote_types(given.dtype, torch.float32)
    products = given.detach().to(dtype) * gradient.to(dtype)
    return products.sum(-1) if products.dim() == 4 else products
