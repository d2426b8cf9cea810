# Licensed under the Apache License, Version 2.0.
"""Copying heads: what the output of a head does to the logit of the token that it attends to."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...models.head_sites import HeadSite
from ..attribution.local import weight_and_bias
from ..attribution.trace import AttentionTrace, trace_attention
from ..head_scores import HeadScores, tables_of_heads
from ..running import reader_of, unwrapped


def copying_scores(model: PreTrainedModel, batch: Mapping[str, Any], max_tokens: int = 64) -> HeadScores:
    """How much the value of a token, through the output projection of each head, raises the logit of this token.

    For each token of the batch, the output that a head would have if it attended to this token alone is mapped to
    logits by the weights of the final norm and of the language-modelling head (the output circuit of Elhage et al.
    2021). The score is the mean fraction of the vocabulary with a lower logit than the token itself: 1 if a head
    writes exactly the tokens that it attends to, 0.5 by chance, 0 if it suppresses them. Elhage et al. report the
    eigenvalues of this circuit instead, and Wang et al. (2022) how often the token is among the five largest logits.
    Later layers, norms after the
    output projection, and biases are left out.

    Args:
        model (`PreTrainedModel`): A causal language model.
        batch (`dict`): `input_ids` and, if sentences are padded, `attention_mask`.
        max_tokens (`int`): Number of different tokens to average over: the first ones of the batch.

    Returns:
        [`HeadScores`]: from 0 to 1; NaN for removed heads.

    Raises:
        ValueError: if the model is no causal language model with a head, other layers than a norm stand between its
            last layer and the head, `max_tokens` is below 1, or see [`local_contribution`].

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> copying_scores(model, {"input_ids": torch.tensor([[5, 7, 8, 9]])})["decoder"].shape
        torch.Size([2, 4])
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(
            f"{type(model).__name__} has no language-modelling head, which maps outputs of heads to logits; pass a "
            "causal language model, such as that of AutoModelForCausalLM."
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    trace = trace_attention(model, batch)
    if any(call.layer.site.kind != "decoder" for call in trace.calls):
        raise ValueError(
            f"{type(model).__name__} is no causal language model, whose outputs of heads a norm and a matrix map to "
            "logits; pass one."
        )
    if not any(child is head for child in unwrapped(model).children()):
        raise ValueError(
            f"{type(model).__name__} has other layers than a norm before the matrix of its head, so that outputs of "
            "heads have no logits of their own."
        )
    sentences, positions, ids = _first_tokens(batch["input_ids"].to(trace.real.device), trace, max_tokens)
    norm = final_norm(model, trace)
    scores: dict[HeadSite, torch.Tensor] = {}
    with torch.no_grad():
        for call in trace.calls:
            if call.value is None:
                continue
            weight, _ = weight_and_bias(call.layer.output, call.layer.module)
            if len(weight) != head.weight.shape[1]:
                raise ValueError(
                    f"outputs of heads of {type(model).__name__} have {len(weight)} dimensions, but the head of the "
                    f"model reads {head.weight.shape[1]}, so that they have no logits of their own."
                )
            values = call.value[sentences.to(call.value.device), :, positions.to(call.value.device)]
            parts = weight.T.unflatten(0, (values.shape[1], -1)).to(values.dtype)  # (heads, head_dim, hidden)
            vectors = torch.einsum("thd,hdo->hto", values, parts).to(head.weight.device, head.weight.dtype)
            scores[call.layer.site] = torch.stack(
                [_fraction_below(head.weight @ _scaled(norm, own).T, ids) for own in vectors]
            )
    return HeadScores(tables_of_heads([call.layer for call in trace.calls], scores))


def _first_tokens(
    ids: torch.Tensor, trace: AttentionTrace, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sentence, position and id of the first occurrences of up to `count` different tokens."""
    sentences, positions = trace.real.nonzero().unbind(1)
    found: dict[int, int] = {}
    for index, token in enumerate(ids[sentences, positions].tolist()):
        found.setdefault(token, index)
    chosen = torch.tensor(list(found.values())[:count], device=ids.device)
    return sentences[chosen], positions[chosen], ids[sentences[chosen], positions[chosen]]


def _scaled(norm: nn.Module | None, vectors: torch.Tensor) -> torch.Tensor:
    """Vectors times the weights of the norm, each with a positive factor of its own, which no rank depends on."""
    return vectors if norm is None else norm(vectors) - norm(torch.zeros_like(vectors))


def _fraction_below(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean fraction of the other logits, `(vocabulary, tokens)`, that are below those of the tokens."""
    own = logits.gather(0, ids.to(logits.device)[None])
    return ((logits < own).sum(0) / (len(logits) - 1)).double().mean()


def final_norm(model: PreTrainedModel, trace: AttentionTrace) -> nn.Module | None:
    """The norm after the last layer: the last one beside the list of layers; `None` without any."""
    reader = reader_of(model)
    name = trace.calls[0].layer.name
    parts = name.split(".")
    # The owner of the list, such as `model.layers`, whose items have numbers.
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), 1)
    owner = reader.get_submodule(".".join(parts[: number - 1]))
    norms = [child for child in owner.children() if type(child).__name__.endswith("Norm")]
    return norms[-1] if norms else None
