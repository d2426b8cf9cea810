# Licensed under the Apache License, Version 2.0.
"""Recording of one forward pass for attribution: inputs, projections and attention weights of each layer."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...models.compat import passes_attention_interface
from ...models.guidance_loss import attention_to_sinks
from ...models.head_roles import HeadLayer, locate_heads
from ...models.head_sites import SITE_KINDS
from ...models.headwise_attention import register_over_kernel
from ...models.input_checks import check_integers, check_text
from ...models.pruned_attention import attends_to
from ..model_views import ModelView, evaluation_view
from ..running import arguments_of, is_seq2seq, longest_input, reader_of, real_tokens, unwrapped


@dataclass(eq=False)
class TracedAttention:
    """One call of an attention module.

    Args:
        layer (`HeadLayer`): The layer; the heads of all tensors below are its remaining heads, `layer.heads`.
        inputs (`torch.Tensor` of shape `(batch, length, hidden)`): Input of the projections to queries, keys, values.
        rotary (`tuple[torch.Tensor, torch.Tensor]`, *optional*): Cosines and sines of rotary position embeddings.
        query, key, value (`torch.Tensor` of shape `(batch, heads, length, head_dim)`, *optional*): As they enter the
            scores; keys and values are repeated for each query head. Like the fields below, `None` for a layer without
            heads.
        weights (`torch.Tensor` of shape `(batch, heads, query, key)`, *optional*): Softmax, at least float32.
        output (`torch.Tensor` of shape `(batch, heads, length, head_dim)`, *optional*): Weighted values, before gates.
        scaling (`float`): Factor of the scores.
        softcap (`float`, *optional*): Soft cap of the scores.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): Scores of attention sinks.
        groups (`int`): Number of query heads that share a key head.
        slopes (`torch.Tensor` of shape `(batch, heads, query, key)`, *optional*): Derivatives of capped scores by the
            scores.
        encoded (`torch.Tensor` of shape `(batch, keys, hidden)`, *optional*): Input of the projections to keys and
            values in cross-attention.
    """

    layer: HeadLayer
    inputs: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    output: torch.Tensor | None = None
    scaling: float = 1.0
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    groups: int = 1
    slopes: torch.Tensor | None = None
    encoded: torch.Tensor | None = None

    @property
    def key_inputs(self) -> torch.Tensor:
        """Input of the projections to keys and values."""
        return self.inputs if self.encoded is None else self.encoded

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, biases: list[torch.Tensor]) -> None:
        """Records queries, keys and values, and computes weights and output by differentiable tensor operations."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        self.groups = query.shape[1] // key.shape[1]
        self.query = query.to(dtype)
        self.key, self.value = (one.to(dtype).repeat_interleave(self.groups, dim=1) for one in (key, value))
        scores = self.query @ self.key.mT * self.scaling
        if self.softcap is not None:
            capped = torch.tanh(scores / self.softcap)
            scores, self.slopes = self.softcap * capped, 1 - capped.square()
        for bias in biases:
            # Masks may be longer than the keys.
            scores = (scores + bias[..., : scores.shape[-1]].to(dtype)).clamp(min=torch.finfo(dtype).min)
        self.weights = scores.softmax(-1)
        if self.sinks is not None:
            self.weights = self.weights * (1 - attention_to_sinks(scores, self.sinks).unsqueeze(-1))
        self.output = self.weights @ self.value


@dataclass(eq=False)
class AttentionTrace:
    """All attention calls of one forward pass.

    Args:
        calls (`list[TracedAttention]`): The calls in order, one per layer.
        real (`torch.Tensor` of shape `(batch, length)`): Padding mask of the queries: True at tokens.
        encoded_real (`torch.Tensor` of shape `(batch, keys)`, *optional*): That of the keys in cross-attention.
    """

    calls: list[TracedAttention]
    real: torch.Tensor
    encoded_real: torch.Tensor | None = None

    def sentences(self, device: torch.device | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Index and token positions of each non-empty sentence, on `device` or that of the first layer."""
        for number, real in enumerate(self.real.to(device)):
            if real.any():
                yield number, real.nonzero().squeeze(-1)

    def pairs(self, device: torch.device | None = None) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Index of each sentence that is not empty, and the positions of its queries and keys."""
        for number, tokens in self.sentences(device):
            keys = tokens if self.encoded_real is None else self.encoded_real[number].to(device).nonzero()[:, 0]
            if len(keys):
                yield number, tokens, keys

    def table(self) -> torch.Tensor:
        """Zeros of shape `(layers, batch, heads, query, key)`; NaN for removed heads."""
        batch, length = self.real.shape
        keys = length if self.encoded_real is None else self.encoded_real.shape[1]
        heads = max(call.layer.num_heads for call in self.calls)
        dtype = next((call.weights.dtype for call in self.calls if call.weights is not None), torch.float32)
        table = self.real.new_full((len(self.calls), batch, heads, length, keys), math.nan, dtype=dtype)
        for number, call in enumerate(self.calls):
            table[number, :, call.layer.heads] = 0
        return table

    def put(
        self,
        table: torch.Tensor,
        number: int,
        sentence: int,
        tokens: torch.Tensor,
        values: torch.Tensor,
        keys: torch.Tensor | None = None,
    ) -> None:
        """Writes values of shape `(heads, query, key)` for the tokens of one sentence into one layer of a table."""
        heads = torch.tensor(self.calls[number].layer.heads, device=table.device)
        queries, keys = tokens.to(table.device), (tokens if keys is None else keys).to(table.device)
        table[number, sentence].index_put_((heads[:, None, None], queries[:, None], keys), values.to(table))


def rows_to_one(values: torch.Tensor) -> torch.Tensor:
    """Divides rows by their sums; rows of zeros stay zero."""
    totals = values.sum(-1, keepdim=True)
    return values / totals.where(totals > 0, torch.ones_like(totals))


def trace_attention(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    prepare: Callable[[ModelView], None] | None = None,
    differentiable: bool = False,
    kind: str | None = None,
) -> AttentionTrace:
    """Runs the base model on a batch, in evaluation mode, and records its attention.

    Args:
        model (`PreTrainedModel`): An encoder, a decoder, or an encoder–decoder model.
        batch (`dict`): Arguments of the forward pass; those that the model does not accept are ignored.
        prepare (callable, *optional*): Takes the [`ModelView`] that runs, to add hooks to it.
        differentiable (`bool`): Whether to record gradients within each attention module, up to its inputs.
        kind (`str`, *optional*): Kind of site. `decoder` and `cross` of an encoder–decoder model run all of it;
            otherwise, its encoder runs.

    Returns:
        [`AttentionTrace`]

    Raises:
        ValueError: if the model has attention of an unknown class, hard-coded attention, no such kind of site, or
            cross-attention without being an encoder–decoder; or does not use the attention interface or not with its
            keyword arguments (SigLIP); or the batch has more tokens than the model has positions for.
    """
    reader, whole = reader_of(model), unwrapped(model)
    if is_seq2seq(whole) and kind not in (None, "encoder"):
        reader = whole
    layers = locate_heads(reader)
    kinds = sorted({layer.site.kind for layer in layers}, key=SITE_KINDS.index)
    if kind is not None and kind not in kinds:
        known = ", ".join(map(repr, kinds))
        raise ValueError(f"kind must be one of {known} for {type(model).__name__}, got {kind!r}.")
    if is_seq2seq(whole):
        kind = kind or "encoder"
        layers = [layer for layer in layers if layer.site.kind == kind]
    elif "cross" in kinds:
        raise ValueError(
            f"{type(model).__name__} has cross-attention, for which contributions are not defined; pass an encoder, a "
            "decoder without cross-attention, or an encoder–decoder model."
        )
    if not passes_attention_interface(type(reader)):
        raise ValueError(
            f"{type(reader).__name__} computes attention by itself, not through the attention interface of "
            "Transformers, so queries and keys cannot be read."
        )
    inputs = arguments_of(reader, batch)
    _check_texts(model, reader, inputs)
    calls: list[TracedAttention] = []
    view = evaluation_view(reader)
    view.name_attention(reader, lambda part, before: register_over_kernel("traced|", "eager", _traced_attention))
    for layer in layers:
        view.before(layer.module, partial(_begin, layer, calls, differentiable))
    if prepare is not None:
        prepare(view)
    with torch.set_grad_enabled(differentiable):
        view.root(**inputs)
    for call in calls:
        if call.layer.heads and call.weights is None:
            _refuse_unrecorded(model, call.layer)
    shape, device = tuple(calls[0].inputs.shape[:2]), calls[0].inputs.device
    real = real_tokens(whole, kind if is_seq2seq(whole) else "encoder", batch, shape, device)
    if calls[0].encoded is None:
        return AttentionTrace(calls, real)
    shape = tuple(calls[0].encoded.shape[:2])
    return AttentionTrace(calls, real, real_tokens(whole, "encoder", batch, shape, device))


def _refuse_unrecorded(model: PreTrainedModel, layer: HeadLayer) -> None:
    """Raises ValueError: says why the attention function was not called with the record of a layer."""
    if getattr(layer.module, "hard_coded", None) is not None:
        raise ValueError(
            f"the {layer.site} of {type(model).__name__} has hard-coded weights, which do not depend on its inputs; "
            "its contributions are these weights."
        )
    raise ValueError(
        f"{type(layer.module).__name__} of {type(model).__name__} does not pass its keyword arguments on to the "
        "attention function, so its queries and keys cannot be read."
    )


def _check_texts(model: PreTrainedModel, reader: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    longest = longest_input(model)
    ids = inputs.get("input_ids")
    if ids is not None and ids.dim() != 2:
        raise ValueError(
            f"input_ids must have the shape (batch, length), got {tuple(ids.shape)}; flatten multiple choices, "
            "input_ids.flatten(0, 1), also in the other tensors."
        )
    for name in ("input_ids", "inputs_embeds"):
        if inputs.get(name) is not None:
            check_text(name, inputs[name])
    words = getattr(reader.get_input_embeddings(), "num_embeddings", None)
    if ids is not None and words is not None:
        check_integers("input_ids", ids, words, "vocab_size")
    texts = [inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
    length = max((text.shape[1] for text in texts), default=0)
    if longest is not None and length > longest:
        raise ValueError(
            f"batch has sentences of {length} tokens, but {type(model).__name__} has positions for {longest}; "
            "truncate them."
        )


def _begin(
    layer: HeadLayer,
    calls: list[TracedAttention],
    differentiable: bool,
    module: nn.Module,
    args: tuple,
    kwargs: dict,
) -> tuple:
    """Forward pre-hook of an attention module: passes the record of the call down as a keyword."""
    states = args[0] if args else kwargs["hidden_states"]
    encoded = attends_to(kwargs)
    if differentiable:
        states = states.detach().requires_grad_()
        args, kwargs = ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})
        if encoded is not None:
            leaf = encoded.detach().requires_grad_()
            kwargs = {name: leaf if value is encoded else value for name, value in kwargs.items()}
            encoded = leaf
    calls.append(TracedAttention(layer, states, kwargs.get("position_embeddings"), encoded=encoded))
    # A layer without heads computes no attention.
    return args, {**kwargs, "traced": calls[-1]} if layer.heads else kwargs


def _traced_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    traced: TracedAttention | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention function in place of the model's kernel."""
    # Modules that locate_heads does not list call it without a record.
    traced = traced or TracedAttention(None, query)
    traced.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    traced.softcap, traced.sinks = softcap, s_aux
    traced.attend(query, key, value, [bias for bias in (attention_mask, position_bias) if bias is not None])
    return traced.output.transpose(1, 2).to(query.dtype), traced.weights
