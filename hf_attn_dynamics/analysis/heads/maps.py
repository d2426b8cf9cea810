# Licensed under the Apache License, Version 2.0.
"""Attention maps of single batches; for statistics over a corpus, see [`observe`]."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ...models.head_roles import HeadLayer
from ...models.head_sites import SITE_KINDS, HeadSite
from ...models.number_checks import is_integer
from ..model_views import evaluation_view
from ..observers.base import AttentionCall, Observer
from ..observers.observation import observe
from ..running import arguments_of, is_seq2seq, on_device, reader_of


TARGET_TOKENS = 64  # of targets that models write


class _Maps(Observer):
    """Collects the maps of one forward pass.

    Args:
        numbers (`dict[str, list[int]]`, *optional*): Layers to keep by kind of site; all by default.
    """

    name = "maps"

    def __init__(self, numbers: dict[str, list[int]] | None = None):
        self.numbers = numbers
        self.maps: dict[HeadSite, torch.Tensor] = {}
        self.layers: dict[HeadSite, HeadLayer] = {}
        self.removed: dict[str, torch.Tensor] = {}  # by kind of site: the map of a layer without heads

    def update(self, call: AttentionCall) -> None:
        self.layers |= call.layers_by_site
        sentences, queries = call.queries.real.shape
        shape = sentences, call.layer.num_heads, queries, call.weights.shape[-1]
        if call.site.kind not in self.removed:
            self.removed[call.site.kind] = call.weights.new_full((), torch.nan).expand(shape)
        if self.numbers is not None and call.site.layer not in self.numbers.get(call.site.kind, ()):
            return
        if call.site not in self.maps:
            self.maps[call.site] = call.weights.new_full(shape, torch.nan)
        weights = call.weights * call.real_queries[:, None, :, None] * call.real_keys[:, None, None]
        for index, head in enumerate(call.layer.heads):
            self.maps[call.site][call.sentences, head, call.rows] = weights[:, index]

    def compute(self) -> dict[str, torch.Tensor]:
        tables = {}
        for kind, removed in sorted(self.removed.items(), key=lambda item: SITE_KINDS.index(item[0])):
            present = sorted(site.layer for site in self.layers if site.kind == kind)
            numbers = present if self.numbers is None else self.numbers.get(kind, [])
            if not numbers:
                continue
            if not set(numbers) <= set(present):
                raise ValueError(f"layers must be some of 0 to {present[-1]} at the {kind}, got {numbers}.")
            # Layers without heads compute no attention; other layers may be on several devices.
            maps = [self.maps.get(HeadSite(kind, number), removed) for number in numbers]
            tables[kind] = torch.stack([one.to(removed.device) for one in maps])
        return tables


def attention_maps(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    layers: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
) -> dict[str, torch.Tensor]:
    """Attention weights of all heads for one batch, under any attention kernel.

    Weights are the output of the softmax in evaluation mode; `output_attentions=True` of a model in training mode
    returns weights after dropout.

    Args:
        model (`PreTrainedModel`): Any model that [`observe`] accepts, including pruned models.
        batch (`dict`): Arguments of the forward pass.
        layers (`list[int]`, *optional*): Layers to return, in this order; all by default, which for a sentence of
            2,048 tokens in 32 layers with 32 heads need 17 GB. Or `{kind: [layers]}`, which leaves out other kinds.

    Returns:
        `dict[str, torch.Tensor]`: a tensor of shape `(layers, batch, heads, queries, keys)` for each kind of site
        (`encoder`, `decoder`, `cross`), float32, or float64 in double precision, on the device of the first layer.
        Rows of tokens sum to 1; rows and columns of padding are 0; removed heads are NaN.

    Raises:
        ValueError: if the model cannot be observed, computes no attention for this batch, or has no such layers.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> attention_maps(BertModel(config), {"input_ids": torch.tensor([[5, 7, 8]])})["encoder"].shape
        torch.Size([2, 1, 4, 3, 3])
    """
    with torch.no_grad(), observe(model, _Maps(_numbers(layers))) as seen:
        model(**on_device(batch, model))
    maps = seen.maps
    for kind in layers if isinstance(layers, Mapping) else ():
        if kind not in maps:
            raise ValueError(
                f"layers names the site {kind!r}, where {type(model).__name__} has computed no attention."
            )
    if not maps:
        raise ValueError(f"{type(model).__name__} has computed no attention that could be observed.")
    return maps


def _numbers(layers: Any) -> dict[str, list[int]] | None:
    """Layers to keep by kind of site."""
    if layers is None:
        return None
    numbers = layers if isinstance(layers, Mapping) else dict.fromkeys(SITE_KINDS, layers)
    for kind, some in numbers.items():
        listed = isinstance(some, Sequence) and all(is_integer(number) and number >= 0 for number in some)
        if kind not in SITE_KINDS or not listed or not some:
            raise ValueError(
                f"layers must be a list of numbers of layers, or {{kind: list}} for {', '.join(SITE_KINDS)}, got "
                f"{layers!r}."
            )
    return {kind: list(some) for kind, some in numbers.items()}


def text_inputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    text_pair: str | None = None,
    target: str | None = None,
) -> BatchEncoding:
    """Arguments of the forward pass for one text; an encoder–decoder model without `target` generates one.

    Args:
        model (`PreTrainedModel`): Any text model.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the model.
        text (`str`): The text.
        text_pair (`str`, *optional*): A second text, for models that read pairs.
        target (`str`, *optional*): Target text of an encoder–decoder model; by default, the model writes one of up to
            64 tokens, by greedy search.

    Raises:
        ValueError: if a model without decoder has a `target`, or an encoder–decoder model has no language-modeling
            head to shift targets, or to write one.
    """
    inputs = tokenizer(text, text_pair, return_tensors="pt")
    if not is_seq2seq(model):
        if target is not None:
            raise ValueError(f"{type(model).__name__} reads no target, got target={target!r}.")
        return inputs
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise ValueError(
            f"{type(model).__name__} cannot prepare a target for its decoder; give the model with a language-modeling "
            "head, such as AutoModelForSeq2SeqLM loads."
        )
    if target is not None:
        labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"]
    else:
        generator = evaluation_view(model)[model]
        settings = {"max_new_tokens": TARGET_TOKENS, "do_sample": False, "num_beams": 1}
        with torch.no_grad():
            written = generator.generate(**arguments_of(reader_of(model), inputs), **settings)
        labels = written[:, 1:].cpu()  # without the token that starts the decoder
    inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    return inputs


def to_bertviz(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    text_pair: str | None = None,
    target: str | None = None,
) -> dict[str, Any]:
    """Attention of one text as arguments of bertviz views: `head_view(**to_bertviz(model, tokenizer, text))`.

    Supports `sdpa`, unlike bertviz alone, and pruned models, whose removed heads are blank.

    Args:
        model (`PreTrainedModel`): Any text model that [`observe`] accepts.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the model.
        text (`str`): The text.
        text_pair (`str`, *optional*): A second text, for models that read pairs.
        target (`str`, *optional*): Target text of an encoder–decoder model.

    Returns:
        `dict`: keyword arguments of `bertviz.head_view` and `bertviz.model_view`.

    Raises:
        ValueError: if an encoder–decoder model has no `target`, or another model has one.
    """
    if is_seq2seq(model) and target is None:
        raise ValueError(f"{type(model).__name__} has a decoder: give the target that it reads, got target=None.")
    inputs = text_inputs(model, tokenizer, text, text_pair, target)
    maps = {kind: list(layers.nan_to_num(0.0).cpu().float()) for kind, layers in attention_maps(model, inputs).items()}
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    if is_seq2seq(model):
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
