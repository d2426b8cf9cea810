# Licensed under the Apache License, Version 2.0.
"""The loss of a batch as a sum over its labels, which does not depend on how sentences are batched."""

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...models.head_losses import LossTerm, loss_terms_of, mean_loss, sentence_losses


class SummedLoss:
    """Sum of a model's own losses over the labels of a batch; their mean would depend on batching.

    Attributes:
        has_labels (`bool`): Whether any label so far was not ignored.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.terms = _terms_of(model)
        self.has_labels = False

    def __call__(self, outputs: ModelOutput, batch: dict) -> torch.Tensor:
        own = outputs.get("loss")
        losses = sentence_losses(self.terms, self.model.config, outputs, batch)
        if own is None or not losses:
            columns = [term.labels for term in self.terms if not term.made] or ["labels"]
            if own is not None:
                raise _unknown_loss(self.model)
            raise ValueError(
                f"{type(self.model).__name__} returns no loss: each batch needs {' or '.join(map(repr, columns))}, or "
                "pass loss=lambda outputs, batch: …, which returns the sum of the losses of a batch."
            )
        mean = mean_loss(losses)
        if all(bool(counts.any()) for _, counts in losses.values()) and not _is_close(own, mean):
            raise _unknown_loss(self.model)
        self.has_labels = self.has_labels or any(bool(counts.any()) for _, counts in losses.values())
        return sum(term.weight * sums.sum() for term, (sums, _) in losses.items())


def _terms_of(model: PreTrainedModel) -> tuple[LossTerm, ...]:
    """Loss terms of a headwise model or of a class of Transformers; empty for other classes."""
    if hasattr(model, "loss_terms"):
        return model.loss_terms
    is_stock = type(model).forward.__module__.startswith("transformers.models.")
    return loss_terms_of(type(model)) if is_stock else ()


def _is_close(own: torch.Tensor, mean: torch.Tensor) -> bool:
    """Whether the loss that a model returned equals the mean expected of its class, up to rounding."""
    tolerance = 1e-4 if own.dtype in (torch.float32, torch.float64) else 2e-2
    return abs(float(own.detach()) - float(mean.detach())) <= tolerance * max(1, abs(float(own.detach())))


def _unknown_loss(model: PreTrainedModel) -> ValueError:
    return ValueError(
        f"the reduction of the loss of {type(model).__name__} is unknown; pass loss=lambda outputs, batch: …, which "
        "returns the sum of the losses of a batch."
    )
