# Licensed under the Apache License, Version 2.0.
"""Importance of heads, from gradients of a trained model, from gates, or random as a baseline.

All functions return [`HeadScores`], which `retain_heads` accepts.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...models.head_roles import locate_heads
from ..head_scores import HeadScores, tabulate
from ..model_parts import parts_of_model, tables_of_parts
from .mask_gradients import mean_sensitivities


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
    parts = parts_of_model(model, ["heads"])
    means = mean_sensitivities(model, data, parts, loss, "importance", progress)
    scores = HeadScores(tables_of_parts(parts, means))
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
        site: torch.empty(0) if gate is None else gate.locations()
        for site, gate in gates.items()
        if site.kind in kinds
    }
    return tabulate(layers, values)
