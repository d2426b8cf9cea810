# Licensed under the Apache License, Version 2.0.
"""Importance of heads, from gradients of a trained model, from gates, or random as a baseline.

All functions return [`HeadScores`], which `retain_heads` accepts.
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
    """Expected sensitivity of the loss to masking each head (Michel et al. 2019, equation 2).

    `I_h = mean over tokens of |⟨context_h, ∂L/∂context_h⟩|`, where `context_h` is the output of head h before the
    output projection, and L the sum of the losses of all labels. The result depends neither on padding nor on
    batching. Padding has attention mask 0; in the decoder of an encoder–decoder model, it has decoder attention mask 0
    or, without such a mask, the label -100. If a module runs several times in one forward pass (ALBERT), all calls
    count. Heads with a closed gate have importance 0.

    The model runs in evaluation mode; its mode, its gradients and its frozen parameters are not changed.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` supports, including frozen and pruned models.
        data (iterable of `dict`): Batches with labels, or a single batch: arguments of the forward pass. Tensors are
            moved to the device of the model.
        normalize (`str`, *optional*): `"l2"` divides by the ℓ2 norm over the heads of the layer, as in the paper.
        loss (callable, *optional*): `loss(outputs, batch)` returns the sum, not the mean, of the losses of a batch. By
            default, the model's own loss times the number of labels.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`HeadScores`]: NaN for removed heads.

    Raises:
        ValueError: if `normalize` is unknown, there is no batch, a batch has no labels or its loss is not finite, all
            labels are ignored, a layer never ran, a mask has another shape, or the reduction of the model's own loss
            is unknown; then pass `loss`.

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
        raise ValueError("data has no labels: all are ignored; give labels other than -100.")
    for layer in present:
        if not tokens[layer.site]:
            raise ValueError(f"data has no token for the {layer.site}; check the inputs and their attention masks.")
    scores = tabulate(layers, {site: total / max(tokens[site], 1) for site, total in sums.items()})
    return scores.normalized() if normalize else scores


def random_importance(model: PreTrainedModel, seed: int = 0) -> HeadScores:
    """Random scores from the uniform distribution on [0, 1), a baseline for rankings.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` supports.
        seed (`int`): Random seed; the score of a head does not depend on which other heads are removed.

    Returns:
        [`HeadScores`]: NaN for removed heads.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = locate_heads(model)
    values = {
        layer.site: torch.rand(layer.num_heads, generator=generator, dtype=torch.float64)[layer.heads]
        for layer in layers
    }
    return tabulate(layers, values)


def gate_importance(model: PreTrainedModel) -> HeadScores:
    """Location φ of the Hard Concrete distribution of each head's gate (Voita et al. 2019, section 6.1).

    If attention blocks have gates, too, the lower φ of a head and its block counts, as for `settle_gates`.

    Args:
        model (`PreTrainedModel`): A model with gates.

    Returns:
        [`HeadScores`]: for the kinds of sites with gates; NaN for removed heads.

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
    # Layers without heads have no gate.
    values = {
        site: torch.empty(0) if gate is None else gate.lowest_locations()
        for site, gate in gates.items()
        if site.kind in kinds
    }
    return tabulate(layers, values)


def _keep_context(layer: HeadLayer, contexts: list, context: torch.Tensor) -> torch.Tensor:
    """Records the head outputs of a layer as part of the autograd graph."""
    if context.dim() != 4:
        raise ValueError(
            f"the {layer.site.kind} attention in {layer.name} gives contexts of shape {tuple(context.shape)}, not "
            "(batch, length, heads, head_dim); choose attn_implementation='sdpa'."
        )
    if not context.requires_grad:
        # All earlier parameters are frozen: the graph starts here.
        context = context.detach().requires_grad_()
    contexts.append((layer, context))
    return context


def _sensitivity(context: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """|⟨context_h, ∂L/∂context_h⟩| by position and head, `(batch, length, heads)`, at least float32."""
    dtype = torch.promote_types(context.dtype, torch.float32)
    return (context.detach().to(dtype) * gradient.to(dtype)).sum(-1).abs()


class _SummedLoss:
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
