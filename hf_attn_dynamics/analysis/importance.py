# Licensed under the Apache License, Version 2.0.
"""Which heads matter: importance from the gradients of a trained model, from its gates, or by chance.

No training is needed for the first. All three return [`HeadScores`], which `retain_heads` takes.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..models.head_roles import HeadLayer, locate_heads
from ..models.ignored_labels import IGNORED
from ..models.precision import at_least_single
from .head_scores import HeadScores, tabulate
from .model_views import evaluation_view
from .running import batches_of, real_tokens


ALIKE = 0.1  # relative distance of gradients of one loss: less by rounding, more for any other labels


# ---------------------------------------------------------------------------------------------------------------------
# Three ways to score heads
# ---------------------------------------------------------------------------------------------------------------------


def head_importance(
    model: PreTrainedModel,
    data: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    normalize: str | None = None,
    loss: Callable[[ModelOutput, dict[str, Any]], torch.Tensor] | None = None,
    progress: bool = False,
) -> HeadScores:
    """How much the loss depends on each head: the expected sensitivity to masking it (Michel et al. 2019, equation 2).

    `I_h = mean over tokens of |⟨context_h, ∂L/∂context_h⟩|`, where `context_h` is the output of head h before the
    output projection, and L the sum of the losses of all labels. How sentences are padded and split into batches does
    not matter. Positions with attention mask 0 are no tokens; on the decoder's side of an encoder–decoder model these
    are positions with decoder attention mask 0 or, without such a mask, with the label -100. A layer whose weights
    are used several times in one pass (ALBERT) counts each use. Heads with a closed gate have importance 0.

    The model runs in evaluation mode; its mode, its gradients and what it has frozen stay as they are.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` knows, also one that is frozen or pruned.
        data (iterable of `dict`): Batches, as the model takes them, with labels; or a single one. Moved to the model's
            device.
        normalize (`str`, *optional*): `"l2"` divides by the ℓ2 norm of the heads of the same layer and kind of site,
            as the authors do.
        loss (callable, *optional*): `loss(outputs, batch)` returns the sum, not the mean, of the losses of a batch. By
            default the loss that the model computes itself, times the number of its labels.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`HeadScores`]: NaN where a head is removed.

    Raises:
        ValueError: if `normalize` is unknown, there is no batch, a batch has no labels or its loss is not finite, all
            labels of all batches are ignored, a layer never ran, masks do not fit, or it is not known what a model's
            own loss is the mean of; pass `loss`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = BertForSequenceClassification(config)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8], [9, 6, 4]]), "labels": torch.tensor([0, 1])}
        >>> head_importance(model, [batch], normalize="l2")["encoder"].shape
        torch.Size([2, 4])
    """
    if normalize not in (None, "l2"):
        raise ValueError(f"normalize must be 'l2' or None, got {normalize!r}.")
    layers = locate_heads(model)
    present = [layer for layer in layers if layer.heads]
    sums = {layer.site: torch.zeros(len(layer.heads), dtype=torch.float64) for layer in layers}
    tokens = dict.fromkeys(sums, 0)
    summed_loss = loss or (_HeadwiseLoss if hasattr(model, "sentence_losses") else _StockLoss)(model)
    contexts: list[tuple[HeadLayer, torch.Tensor]] = []
    view = evaluation_view(model)
    for layer in present:
        view.edit_outputs(layer, partial(_keep_context, layer, contexts))
    try:
        with torch.enable_grad():
            for number, batch in batches_of(data, model, "importance", progress):
                contexts.clear()
                outputs = view.root(**batch, return_dict=True)
                total = summed_loss(outputs, batch)
                if not contexts:
                    continue
                if total.dim() or not total.requires_grad:
                    raise ValueError(
                        f"loss must return a scalar that can be differentiated, got shape {tuple(total.shape)}, "
                        f"requires_grad={total.requires_grad} (batch {number})."
                    )
                if not total.isfinite():
                    raise ValueError(f"the loss of batch {number} is {total.item()}; importance needs a finite loss.")
                gradients = torch.autograd.grad(total, [context for _, context in contexts], allow_unused=True)
                seen = set()
                for (layer, context), gradient in zip(contexts, gradients):
                    real = real_tokens(model, layer.site.kind, batch, context.shape[:2], context.device)
                    if layer.site not in seen:
                        tokens[layer.site] += int(real.sum())
                        seen.add(layer.site)
                    if gradient is not None:
                        sums[layer.site] += _sensitivity(context, gradient)[real].sum(0).cpu().double()
    finally:
        contexts.clear()
    if not getattr(summed_loss, "has_labels", True):
        raise ValueError(
            "data has no label that counts: all are ignored, so that no head matters; give labels that are not -100."
        )
    for layer in present:
        if not tokens[layer.site]:
            raise ValueError(f"data has no token for the {layer.site}; check the inputs and their attention masks.")
    scores = tabulate(layers, {site: total / max(tokens[site], 1) for site, total in sums.items()})
    return scores.normalized() if normalize else scores


def random_importance(model: PreTrainedModel, seed: int = 0) -> HeadScores:
    """Scores drawn uniformly from [0, 1), the baseline of any ranking.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` knows.
        seed (`int`): Same seed, same scores, whichever heads are already removed.

    Returns:
        [`HeadScores`]: NaN where a head is removed.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = locate_heads(model)
    values = {
        layer.site: torch.rand(layer.num_heads, generator=generator, dtype=torch.float64)[layer.heads]
        for layer in layers
    }
    return tabulate(layers, values)


def gate_importance(model: PreTrainedModel) -> HeadScores:
    """How open the gate of each head is: the location φ of its distribution (Voita et al. 2019, section 6.1).

    Args:
        model (`PreTrainedModel`): A model with gates.

    Returns:
        [`HeadScores`]: for the kinds of sites that have gates; NaN where a head is removed.

    Raises:
        ValueError: if the model has no gates.
    """
    layers = locate_heads(model)
    gates = {layer.site: getattr(layer.module, "gate", None) for layer in layers}
    kinds = {site.kind for site, gate in gates.items() if gate is not None}
    if not kinds:
        raise ValueError(
            f"{type(model).__name__} has no gates: load or build a headwise model with gates={{}}, or rank its heads "
            "with head_importance()."
        )
    # Where all heads of a layer are removed, so is the gate.
    values = {
        site: torch.empty(0) if gate is None else gate.locations()
        for site, gate in gates.items()
        if site.kind in kinds
    }
    return tabulate(layers, values)


# ---------------------------------------------------------------------------------------------------------------------
# Contexts
# ---------------------------------------------------------------------------------------------------------------------


def _keep_context(layer: HeadLayer, contexts: list, context: torch.Tensor) -> torch.Tensor:
    """Notes the outputs of the heads of a layer, which must be part of a graph."""
    if context.dim() != 4:
        raise ValueError(
            f"the {layer.site.kind} attention in {layer.name} gives contexts of shape {tuple(context.shape)}, not "
            "(batch, length, heads, head_dim); choose attn_implementation='sdpa'."
        )
    if not context.requires_grad:
        # All that comes before is frozen: the graph begins here.
        context = context.detach().requires_grad_()
    contexts.append((layer, context))
    return context


def _sensitivity(context: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """|⟨context_h, ∂L/∂context_h⟩| of each position and head, `(batch, length, heads)`, at least float32."""
    dtype = torch.promote_types(context.dtype, torch.float32)
    return (context.detach().to(dtype) * gradient.to(dtype)).sum(-1).abs()


# ---------------------------------------------------------------------------------------------------------------------
# Losses: sums, since the mean over a batch depends on how sentences are batched
# ---------------------------------------------------------------------------------------------------------------------


class _HeadwiseLoss:
    """Headwise models know the loss of each sentence.

    Attributes:
        has_labels (`bool`): Whether any label so far is not ignored.
    """

    def __init__(self, model: Any):
        self.model = model
        self.has_labels = False

    def __call__(self, outputs: ModelOutput, batch: dict) -> torch.Tensor:
        losses = self.model.sentence_losses(outputs, batch)
        if not losses:
            raise ValueError(_no_labels(self.model, self.model.label_columns or ["labels"]))
        self.has_labels = self.has_labels or any(bool(counts.any()) for _, counts in losses.values())
        return sum(term.weight * sums.sum() for term, (sums, _) in losses.items())


class _StockLoss:
    """Stock models return a mean. The loss whose mean it is gives the sum, and proves that we know what it is of."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.form: str | None = None
        self.has_labels = False

    def __call__(self, outputs: ModelOutput, batch: dict) -> torch.Tensor:
        own = outputs.get("loss")
        if own is None:
            raise ValueError(_no_labels(self.model, ["labels"]))
        forms = _loss_forms(outputs, batch)
        if own.isnan() and any(mean.isnan() for _, mean in forms.values()):
            # A batch without any label: the mean over none.
            return next(total for total, mean in forms.values() if mean.isnan())
        self.has_labels = True
        value = float(own.detach())
        tolerance = (1e-4 if own.dtype in (torch.float32, torch.float64) else 2e-2) * max(1, abs(value))
        close = {name: mean for name, (_, mean) in forms.items() if abs(float(mean.detach()) - value) <= tolerance}
        if self.form is None:
            # Rounded values are alike where a model knows little, what they depend on is not.
            distances = _gradient_distances(own, close, outputs)
            alike = [name for name in close if distances.get(name, 0) <= ALIKE]
            self.form = alike[0] if len(alike) == 1 else None
        elif self.form not in close:
            self.form = None
        if self.form is None:
            raise ValueError(
                f"it is not known what the loss of {type(self.model).__name__} is the mean of; pass "
                "loss=lambda outputs, batch: …, which returns the sum of the losses of a batch."
            )
        return forms[self.form][0]


def _gradient_distances(own: torch.Tensor, losses: dict[str, torch.Tensor], outputs: ModelOutput) -> dict[str, float]:
    """How far gradients of some losses by the logits are from those of a model's own, relative to the size of these.

    Empty where the model's own loss is not computed from the logits that it returns.
    """
    logits = [value for name, value in outputs.items() if name.endswith("logits") and value.requires_grad]

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        found = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
        return [torch.zeros(()) if one is None else at_least_single(one) for one in found]

    expected = gradients(own) if logits else []
    size = math.hypot(*(float(one.norm()) for one in expected))
    if not size:
        return {}
    return {
        name: math.hypot(*(float(torch.dist(one, other)) for one, other in zip(gradients(loss), expected))) / size
        for name, loss in losses.items()
    }


def _no_labels(model: nn.Module, columns: list[str]) -> str:
    return (
        f"{type(model).__name__} gives no loss: each batch needs {' or '.join(map(repr, columns))}, or pass "
        "loss=lambda outputs, batch: …, which returns the sum of the losses of a batch."
    )


def _loss_forms(outputs: ModelOutput, batch: dict) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Sum and mean of every loss that a model with these outputs and labels may compute."""
    forms = {}
    labels, logits = batch.get("labels"), outputs.get("logits")
    if labels is not None and torch.is_tensor(logits):
        logits = at_least_single(logits)
        if labels.is_floating_point() and labels.numel() == logits.numel():
            target = labels.to(logits).view_as(logits)
            for name, function in (("squares", mse_loss), ("binary", binary_cross_entropy_with_logits)):
                total = function(logits, target, reduction="sum")
                forms[name] = total, total / labels.numel()
        elif labels.shape == logits.shape:
            # ELECTRA: whether each token was replaced, as its stock loss has it: mask 1.
            mask = batch.get("attention_mask")
            real = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask == 1
            total = binary_cross_entropy_with_logits(logits[real], labels[real].to(logits), reduction="sum")
            forms["replaced tokens"] = total, total / real.sum()
        elif not labels.is_floating_point() and labels.numel() * logits.shape[-1] == logits.numel():
            forms["classes"] = _cross_entropy(logits, labels)
            if labels.dim() == 2 and logits.dim() == 3:
                forms["next tokens"] = _cross_entropy(logits[:, :-1], labels[:, 1:])
    spans = [(outputs.get(f"{end}_logits"), batch.get(f"{end}_positions")) for end in ("start", "end")]
    if all(torch.is_tensor(logits) and labels is not None for logits, labels in spans):
        # Answers that were cut off lie past the end.
        ends = [
            _cross_entropy(at_least_single(logits), labels.view(-1).clamp(0, logits.shape[1]), logits.shape[1])
            for logits, labels in spans
        ]
        forms["spans"] = tuple((start + end) / 2 for start, end in zip(*ends))
    return forms


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int = IGNORED
) -> tuple[torch.Tensor, torch.Tensor]:
    labels = labels.reshape(-1).to(logits.device)
    total = cross_entropy(logits.flatten(0, -2), labels, ignore_index=ignored, reduction="sum")
    return total, total / labels.ne(ignored).sum()
