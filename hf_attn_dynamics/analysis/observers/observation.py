# Licensed under the Apache License, Version 2.0.
"""Observing the attention of a running model, with memory for a few rows of attention weights only.

    with observe(model, HeadConfidence(), RelativePositions()) as seen:
        for batch in data:
            model(**batch)
    seen.confidence["encoder"]          # (layers, heads)

Within the context, the model computes attention with its own kernel. The weights are then computed once more, block by
block, for the observers: the output of the softmax, before dropout and gates, in single precision.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from html import escape
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.block_sizes import BLOCK_ELEMENTS, elements_on
from ...models.compat import passes_attention_interface, supports_sdpa
from ...models.guidance_loss import attention_to_sinks
from ...models.head_roles import HeadLayer, locate_heads, site_of
from ...models.headwise_attention import headwise_over
from ...models.packing import packing_of
from ...models.pruned_attention import given_cache
from ..attention_inputs import site_of_call
from ..model_views import ModelView, parts_of, prepared_views
from ..notebook import Html, html_table
from ..running import is_seq2seq, named_arguments
from .base import (
    AttentionCall,
    ObservedBatch,
    Observer,
    begin_pass,
    check_observers,
    end_pass,
    later_keys,
    mask_part,
    tell_tokenizer,
)


VECTOR = 16  # single-precision numbers per vector instruction
MAX_WEIGHTS = {**BLOCK_ELEMENTS, "cpu": 2**18}  # per block: on a CPU, what fits into the cache


class Observation:
    """Results of the observers of one [`observe`]: `seen.NAME` is the result of the observer of that name."""

    def __init__(self, observers: dict[str, Observer]):
        self._observers = observers

    def __getattr__(self, name: str) -> Any:
        observers = self.__dict__.get("_observers", {})
        if name not in observers:
            raise AttributeError(f"nothing called {name!r} was observed, but {', '.join(observers) or 'nothing'}.")
        return observers[name].compute()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._observers]

    def _repr_html_(self) -> str:
        """What each observer has measured, for notebooks; a click opens the result."""
        rows = []
        for name, observer in self._observers.items():
            try:
                result = observer.compute()
            except ValueError as error:
                rows.append([name, type(observer).__name__, f"no result: {error}"])
                continue
            shown = result._repr_html_() if hasattr(result, "_repr_html_") else escape(repr(result))
            opened = Html(f"<details><summary>{escape(type(result).__name__)}</summary>{shown}</details>")
            rows.append([name, type(observer).__name__, opened])
        return html_table(["name", "observer", "result"], rows, "Observation")

    def results(self) -> dict[str, Any]:
        """All results by name."""
        return {name: observer.compute() for name, observer in self._observers.items()}


@contextmanager
def observe(
    model: PreTrainedModel, *observers: Observer, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[Observation]:
    """Context in which observers receive all attention weights that a model computes in the current thread.

    The model runs in evaluation mode. Its outputs are those of its own attention kernel; `sdpa` replaces `flash` and
    `flex` kernels, whose masks cannot be read, or `eager` for models without `sdpa`. The model itself is not changed:
    other threads and copies of it are not affected. Compiled models run uncompiled. Observers can continue in a later
    context, and contexts can be nested.

    Padding is read from the masks that the forward pass is called with or, if these have another length than the layer
    (images, audio, masks with a row per token), from the attention mask of the layer; queries that are padding do not
    count. Within `generate()`, the steps count as rows of one forward pass over the generated sequence. If one module
    serves several layers (ALBERT), each call counts as a layer. Heads with hard-coded weights are not observed.

    Args:
        model (`PreTrainedModel`): Any model that uses the attention interface of Transformers: encoders, decoders,
            and encoder–decoder models (self-attention and cross-attention), headwise or pruned, on any device.
        observers (`Observer`): The observers, e.g. [`HeadConfidence`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the model. Observers take special tokens from
            it unless the user names them; not all configurations name the end of a sentence.

    Returns:
        A context manager that returns an [`Observation`] with the result of each observer by name.

    Raises:
        ValueError: if there is no observer, an argument is not an observer, two have the same name, `model` is not a
            model, is wrapped, or does not use the attention interface, or `tokenizer` is not a tokenizer.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import HeadConfidence, observe
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertModel(config)
        >>> with observe(model, HeadConfidence(excluded_ids=[3])) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 3], [9, 6, 4, 3]]))
        >>> seen.confidence["encoder"].shape
        torch.Size([2, 4])
    """
    check_observers(observers, "observe(model, HeadConfidence())")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"{type(model).__name__} only holds the model that attends; pass model.module.")
    if not (isinstance(model, nn.Module) and parts_of(model)):
        raise ValueError(f"model must be a PreTrainedModel, or hold one, got {type(model).__name__}: nothing attends.")
    tell_tokenizer(observers, tokenizer)
    by_name: dict[str, Observer] = {}
    for observer in observers:
        if observer.name in by_name:
            raise ValueError(f"two observers are called {observer.name!r}; give one of them another `name`.")
        by_name[observer.name] = observer
    for part in parts_of(model):
        if not passes_attention_interface(type(part)):
            raise ValueError(
                f"{type(part).__name__} computes attention by itself, not through the attention interface of "
                "Transformers, so it cannot be observed."
            )
    watch = _Watch(model, list(observers))
    with prepared_views(model, watch.prepare):
        yield Observation(by_name)


def _observed(part: PreTrainedModel, before: str) -> str:
    """Name of the attention function that runs a kernel and calls the observers."""
    readable = "sdpa" if supports_sdpa(part) else "eager"
    return headwise_over(readable if "flash" in before or "flex" in before else before)


class _Watch:
    """Follows the forward passes of a model, and passes the attention weights of each layer to the observers."""

    def __init__(self, model: PreTrainedModel, observers: list[Observer]):
        self.model = model
        self.observers = observers
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.names = {id(module): name for name, module in self.modules.items()}
        untouched = tuple(f"{part}." for part in getattr(model, "untouched_parts", ()))
        self.untouched = {id(module) for name, module in self.modules.items() if f"{name}.".startswith(untouched)}
        self.layers: dict[int, HeadLayer] = {}
        # Sites of unknown classes follow from the names of their modules, once they call attention.
        with suppress(ValueError):
            self.layers = {id(layer.module): layer for layer in locate_heads(model)}
        self.batch: ObservedBatch | None = None
        self.sentences: dict[str, Any] = {}  # of the next forward pass, if it is a step of `generate()`
        self.encoded: tuple[torch.Tensor, torch.Tensor] | None = None  # token ids and outputs of the encoder
        self.depth = 0
        self.calls: Counter[str] = Counter()  # by kind of site, in this forward pass

    def prepare(self, view: ModelView) -> None:
        """Adds hooks to a view that mark the begin and end of a forward pass; nested calls of parts belong to it."""
        view.evaluate(self.model)
        view.observers.append(self.look)
        view.name_attention(self.model, _observed)
        for part in parts_of(self.model):
            view.before(part, self._begin, first=True)
            view.after(part, self._end, always=True)
            if part in view and hasattr(part, "prepare_inputs_for_generation"):
                self._note_sentences(view[part])

    def _note_sentences(self, part: PreTrainedModel) -> None:
        """Keeps the whole sequences of each step of `generate()`: forward passes do not receive cached tokens."""
        prepare = part.prepare_inputs_for_generation
        prefix = "decoder_" if is_seq2seq(part) else ""

        @wraps(prepare)
        def noting(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
            noted = {
                f"{prefix}input_ids": input_ids,
                f"{prefix}attention_mask": kwargs.get(f"{prefix}attention_mask"),
            }
            if prefix:
                noted["input_ids"] = self._encoded_ids(kwargs.get("encoder_outputs"))
            self.sentences = {name: value for name, value in noted.items() if value is not None}
            return prepare(input_ids, *args, **kwargs)

        part.prepare_inputs_for_generation = noting

    def _encoded_ids(self, outputs: Any) -> torch.Tensor | None:
        """Token ids that the encoder computed `outputs` from, if it was its last call."""
        if not outputs or self.encoded is None:
            return None
        ids, states = self.encoded
        if outputs[0] is not states:
            # Beam search repeats each sentence.
            times = len(outputs[0]) // len(states)
            if not torch.equal(outputs[0], states.repeat_interleave(times, 0)):
                return None
            self.encoded = ids.repeat_interleave(times, 0), outputs[0]
        return self.encoded[0]

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.depth += 1
        if self.depth == 1:
            arguments = named_arguments(module, args, kwargs)
            cache = given_cache(arguments)
            cached = 0 if cache is None else int(cache.get_seq_length())
            self.batch = ObservedBatch(module, arguments, cached, self.sentences)
            self.sentences = {}
            self.calls.clear()
            if packing_of(module, arguments) is not None:
                raise ValueError(
                    "observers read a sentence in each row, but this batch has several: pass padded sentences with an "
                    "attention mask."
                )
            begin_pass(self.observers, self.batch)

    def _end(self, module: nn.Module, inputs: tuple, outputs: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            batch, self.batch = self.batch, None
            if outputs is not None:  # else it raised an exception
                if torch.is_tensor(ids := batch.arguments.get("input_ids")) and self._is_encoder(module):
                    self.encoded = ids, outputs[0]
                end_pass(self.observers, batch)

    def _is_encoder(self, module: nn.Module) -> bool:
        return is_seq2seq(self.model) and module is self.model.get_encoder()

    def look(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, *mask: Any, **kwargs: Any) -> None:
        """Passes the weights of one layer to the observers, in single precision also under autocast."""
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            self.show(module.viewed, query.detach(), key.detach(), *mask, **kwargs)

    def show(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **unused: Any,
    ) -> None:
        """Computes the weights of one layer block by block, and passes them to the observers."""
        if id(module) in self.untouched:
            return
        if self.batch is None:
            raise ValueError(
                f"{self.names.get(id(module), type(module).__name__)} was called outside a forward pass of the model; "
                "call the model, or a part of it that is a PreTrainedModel."
            )
        layer = self._layer(module, query.shape[1])
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        shape = (query.shape[0], query.shape[2]), (key.shape[0], key.shape[2])
        kind, device = layer.site.kind, query.device
        if kind == "cross":
            queries = self.batch.tokens(kind, shape[0], device)
            keys = self.batch.encoder_tokens(shape[1], device, mask)
        else:
            queries = self.batch.tokens(kind, shape[0], device, mask)
            keys = (
                queries if shape[1] == shape[0] else self.batch.key_tokens(kind, shape[0], device, shape[1][1], mask)
            )
        causal = causal and mask is None and query.shape[2] > 1
        scores = partial(
            _scores,
            query,
            key.to(torch.promote_types(key.dtype, torch.float32)).contiguous(),  # once for all blocks
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            biases=[bias for bias in (mask, position_bias) if bias is not None],
            causal=causal,
        )
        layers = list(self.layers.values())
        for sentences, rows in _blocks(*query.shape[:3], key.shape[2], device):
            weights = _softmax(scores(sentences, rows), s_aux)
            block = weights, queries, keys, sentences, rows
            call = AttentionCall(self.batch, layer, layers, *block, mask, causal, s_aux is not None)
            for observer in self.observers:
                observer.update(call)

    def _layer(self, module: nn.Module, present: int) -> HeadLayer:
        """The layer of this call of a module."""
        layer = self.layers.get(id(module))
        if layer is None:
            layer = self.layers[id(module)] = self._unlisted(module, present)
        site = site_of_call(layer, self.calls[layer.site.kind])
        self.calls[layer.site.kind] += 1
        return layer if site == layer.site else HeadLayer(**{**vars(layer), "site": site})

    def _unlisted(self, module: nn.Module, present: int) -> HeadLayer:
        name = self.names.get(id(module))
        if name is None:
            raise ValueError(f"{type(module).__name__} is not a part of the observed {type(self.model).__name__}.")
        site = site_of(name, self.modules)
        for other in self.layers.values():
            if other.site == site:
                raise ValueError(
                    f"{type(self.model).__name__}: {other.name} and {name} are both {site}, so that heads cannot be "
                    "told apart; observe one of its parts that has a single encoder and decoder."
                )
        return HeadLayer(site, name, module, module, present, list(range(present)), 0, 1)


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    sentences: slice,
    rows: slice,
    scaling: float,
    softcap: float | None,
    biases: list[torch.Tensor],
    causal: bool,
) -> torch.Tensor:
    """Attention scores of a block, `(sentences, heads, rows, keys)`, at least in single precision."""
    dtype = key.dtype
    query, key = query[sentences, :, rows].to(dtype), key[sentences]
    groups = query.shape[1] // key.shape[1]
    # Grouped-query attention: query heads of a group are adjacent.
    query = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3) * scaling
    scores = (query @ key.mT).unflatten(2, (groups, -1)).flatten(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    lowest = torch.finfo(dtype).min
    for bias in biases:
        bias = mask_part(bias, sentences, rows, scores.shape[-1])
        if bias.dtype == torch.bool:
            # Adding is faster than filling; half the minimum keeps the sum finite.
            scores += torch.zeros_like(bias, dtype=dtype).masked_fill_(~bias, lowest / 2)
        else:
            scores.add_(bias.to(dtype)).clamp_(min=lowest)
    if causal:
        scores.masked_fill_(later_keys(scores.shape[-1], rows, scores.device), lowest)
    return scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension, times what attention sinks leave."""
    keys = scores.shape[-1]
    if keys < VECTOR:  # ten times slower
        scores = F.pad(scores, (0, VECTOR - keys), value=-torch.inf)
    weights = scores.softmax(-1)[..., :keys]
    return weights if sinks is None else weights * (1 - attention_to_sinks(scores, sinks).unsqueeze(-1))


def _blocks(batch: int, heads: int, rows: int, keys: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Blocks of sentences and rows that fit into memory: whole sentences, or else rows of one sentence."""
    most = elements_on(device, MAX_WEIGHTS)
    sentences = max(1, most // (heads * rows * keys))
    height = rows if heads * rows * keys <= most else max(1, most // (heads * keys))
    for start in range(0, batch, sentences):
        for row in range(0, rows, height):
            yield slice(start, min(start + sentences, batch)), slice(row, min(row + height, rows))
