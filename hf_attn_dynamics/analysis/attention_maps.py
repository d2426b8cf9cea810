# Licensed under the Apache License, Version 2.0.
"""Whole attention maps of a few sentences, to look at; for a corpus, see [`observe`]."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.head_roles import HeadLayer
from ..models.head_sites import HeadSite, kinds_of
from .observing import AttentionCall, Observer, observe
from .running import on_device


class _Maps(Observer):
    """Puts the maps of one pass together."""

    name = "maps"

    def __init__(self):
        self.maps: dict[HeadSite, torch.Tensor] = {}
        self.layers: dict[HeadSite, HeadLayer] = {}

    def update(self, call: AttentionCall) -> None:
        self.layers |= {layer.site: layer for layer in (*call.layers, call.layer)}
        if call.site not in self.maps:
            sentences, queries = call.queries.real.shape
            shape = sentences, call.layer.num_heads, queries, call.weights.shape[-1]
            self.maps[call.site] = call.weights.new_full(shape, torch.nan)
        weights = call.weights * call.real_queries[:, None, :, None] * call.real_keys[:, None, None]
        # Indices before a slice: the rows of a block, of the heads that are left.
        for place, head in enumerate(call.layer.heads):
            self.maps[call.site][call.sentences, head, call.rows] = weights[:, place]

    def compute(self) -> dict[str, torch.Tensor]:
        tables = {}
        for kind in kinds_of(self.maps):
            layers = [site for site in self.layers if site.kind == kind]
            # Layers without heads compute no attention.
            empty = torch.full_like(next(maps for site, maps in self.maps.items() if site.kind == kind), torch.nan)
            tables[kind] = torch.stack([self.maps.get(site, empty) for site in sorted(layers)])
        return tables


def attention_maps(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Attention of all heads within one batch, whatever kernel the model computes it with.

    Args:
        model (`PreTrainedModel`): Any model that [`observe`] takes, also one that is pruned.
        batch (`dict`): Arguments of its forward pass.

    Returns:
        `dict[str, torch.Tensor]`: for each kind of site (`encoder`, `decoder`, `cross`) a tensor of shape
        `(layers, batch, heads, queries, keys)`, float32 (float64 in double), on the device of the model. Rows of
        tokens sum to 1; rows and columns of padding are 0; heads that are removed are NaN.

    Raises:
        ValueError: if the model can not be observed, or computes no attention for this batch.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> attention_maps(BertModel(config), {"input_ids": torch.tensor([[5, 7, 8]])})["encoder"].shape
        torch.Size([2, 1, 4, 3, 3])
    """
    with torch.no_grad(), observe(model, _Maps()) as seen:
        model(**on_device(batch, model))
    if not (maps := seen.maps):
        raise ValueError(f"{type(model).__name__} has computed no attention that could be observed.")
    return maps


def to_bertviz(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    text_pair: str | None = None,
    target: str | None = None,
) -> dict[str, Any]:
    """Attention of one text as the views of bertviz take it: `head_view(**to_bertviz(model, tokenizer, text))`.

    Works where bertviz alone does not: under `sdpa`, and for pruned models, whose removed heads are shown as blank.

    Args:
        model (`PreTrainedModel`): Any text model that [`observe`] takes.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        text (`str`): What the model reads.
        text_pair (`str`, *optional*): A second text, for models that read pairs.
        target (`str`, *optional*): What the decoder of an encoder–decoder model reads.

    Returns:
        `dict`: keyword arguments of `bertviz.head_view` and `bertviz.model_view`.

    Raises:
        ValueError: if an encoder–decoder model has no `target`, or another model has one.
    """
    is_seq2seq = getattr(model.config, "is_encoder_decoder", False)
    if is_seq2seq == (target is None):
        advice = "has a decoder: give the target that it reads" if is_seq2seq else "reads no target"
        raise ValueError(f"{type(model).__name__} {advice}, got target={target!r}.")
    inputs = tokenizer(text, text_pair, return_tensors="pt")
    if is_seq2seq:
        labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"]
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    maps = {kind: list(layers.nan_to_num(0.0).cpu().float()) for kind, layers in attention_maps(model, inputs).items()}
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    if is_seq2seq:
        return {
            **{f"{kind}_attention": layers for kind, layers in maps.items()},
            "encoder_tokens": tokens,
            "decoder_tokens": tokenizer.convert_ids_to_tokens(inputs["decoder_input_ids"][0]),
        }
    (layers,) = maps.values()
    views = {"attention": layers, "tokens": tokens}
    if text_pair is not None:
        views["sentence_b_start"] = inputs.sequence_ids(0).index(1)
    return views
