# Licensed under the Apache License, Version 2.0.
"""Layer-wise relevance propagation to tokens; see `heads.py` for the rules."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.head_roles import locate_heads
from .propagation import Propagation
from .rules import Rule


def token_relevance(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    rule: str = "attn_lrp",
    epsilon: float = 1e-6,
    progress: bool = False,
) -> dict[str, torch.Tensor]:
    """Relevance of each token for the top-1 logit, by layer-wise relevance propagation.

    The relevance of a token is the relevance of the first layer's input at its position, summed over dimensions: word,
    position and segment embeddings together. Its sign says whether the token speaks for the prediction or against it.
    `"attn_lrp"` (Achtibat et al. 2024, AttnLRP) is made for transformers; the rules of Voita et al. (2019) serve for
    comparison. Predictions, models, rules and precision are those of [`head_relevance`].

    Args:
        model (`PreTrainedModel`): A model with a task head, see [`head_relevance`].
        batch (`dict`): Arguments of the forward pass. Positions with attention mask 0, or with label -100 if there are
            labels, are not predictions.
        rule (`str`): `"attn_lrp"`, `"ratio"` or `"alpha_beta"`.
        epsilon (`float`): Least absolute value of denominators, between 0 and 1.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        `dict[str, torch.Tensor]`: relevance of shape `(batch, positions, tokens)`, by stack: `encoder` or `decoder`;
        encoder–decoder models have both. Classifiers of sentences have one position. As fractions of the logit; 0 at
        padding, NaN for positions that are not predictions.

    Raises:
        ValueError: if `batch` is not a dictionary, or see [`head_relevance`].

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8], [9, 6, 4]])}
        >>> token_relevance(BertForSequenceClassification(config), batch)["encoder"].shape
        torch.Size([2, 1, 3])
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch must be arguments of a forward pass by name, got {type(batch).__name__}.")
    locate_heads(model)  # raises ValueError unless it is a model
    propagation = Propagation(model, Rule(rule, epsilon), keep_entries=True)
    found: dict[str, torch.Tensor] = {}
    for select, backward in propagation.passes(batch, 1, progress):
        sentences = select.any(1)
        positions = select.int().argmax(1)[sentences]
        for (kind, states), relevance in zip(propagation.entries.items(), backward([*propagation.entries.values()])):
            if kind not in found:
                shape = (*select.shape, states.shape[1])
                found[kind] = torch.full(shape, torch.nan, dtype=relevance.dtype, device=relevance.device)
            found[kind][sentences, positions] = relevance.sum(-1)[sentences]
    return found
