# Licensed under the Apache License, Version 2.0.
"""Which heads matter: importance from the gradients of a trained model, from its gates, or by chance.

No training is needed for the first. All three return [`HeadScores`], which `retain_heads` takes.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...models.head_losses import LossTerm, loss_terms_of, mean_loss, sentence_losses
from ...models.head_roles import HeadLayer, locate_heads
from ..head_scores import HeadScores, tabulate
from ..model_views import evaluation_view
from ..running import batches_of, real_tokens


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
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
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
    summed_loss = loss or _SummedLoss(model)
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


class _SummedLoss:
    """The sum of a model's own losses over the labels of a batch, by the terms that its class has.

    Attributes:
        has_labels (`bool`): Whether any label so far is not ignored.
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
                f"{type(self.model).__name__} gives no loss: each batch needs {' or '.join(map(repr, columns))}, or "
                "pass loss=lambda outputs, batch: …, which returns the sum of the losses of a batch."
            )
        mean = mean_loss(losses)
        if all(bool(counts.any()) for _, counts in losses.values()) and not _is_close(own, mean):
            raise _unknown_loss(self.model)
        self.has_labels = self.has_labels or any(bool(counts.any()) for _, counts in losses.values())
        return sum(term.weight * sums.sum() for term, (sums, _) in losses.items())


def _terms_of(model: PreTrainedModel) -> tuple[LossTerm, ...]:
    """Terms of the loss of a headwise model, or of a class of Transformers; others may compute anything."""
    if hasattr(model, "loss_terms"):
        return model.loss_terms
    is_stock = type(model).forward.__module__.startswith("transformers.models.")
    return loss_terms_of(type(model)) if is_stock else ()


def _is_close(own: torch.Tensor, mean: torch.Tensor) -> bool:
    """Whether the loss that a model computed is the one that is expected of its class, but for rounding."""
    tolerance = 1e-4 if own.dtype in (torch.float32, torch.float64) else 2e-2
    return abs(float(own.detach()) - float(mean.detach())) <= tolerance * max(1, abs(float(own.detach())))


def _unknown_loss(model: PreTrainedModel) -> ValueError:
    return ValueError(
        f"it is not known what the loss of {type(model).__name__} is the mean of; pass loss=lambda outputs, batch: …, "
        "which returns the sum of the losses of a batch."
    )
