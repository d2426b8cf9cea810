# Licensed under the Apache License, Version 2.0.
"""What observers of attention are shown, and what many of them do with it: the mean over tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.head_roles import HeadLayer
from ...models.head_sites import HeadSite
from ...models.token_mask import may_attend, non_padding
from ..head_scores import HeadScores, tables_of_heads
from ..running import given_token_mask


@dataclass(frozen=True, eq=False)
class ObservedTokens:
    """The positions of one side of a forward pass.

    Args:
        ids (`torch.Tensor` of shape `(batch, length)`, *optional*): Token ids; `None` where they are not known, as for
            images and embeddings.
        real (`torch.Tensor` of shape `(batch, length)`): False at padding.
        earlier (`torch.Tensor` of shape `(batch, earlier positions)`, *optional*): The same of what came before and
            was cached.
    """

    ids: torch.Tensor | None
    real: torch.Tensor
    earlier: torch.Tensor | None = None

    @property
    def start(self) -> int:
        """Number of positions that came before."""
        return 0 if self.earlier is None else self.earlier.shape[1]

    @property
    def reach(self) -> int:
        """Number of positions up to the last, with those that came before."""
        return self.start + self.real.shape[1]

    @cached_property
    def before(self) -> torch.Tensor:
        """Number of tokens that came before, `(batch, 1)`."""
        return (self.real[:, :0] if self.earlier is None else self.earlier).sum(-1, keepdim=True)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Number of tokens before each in its sentence, `(batch, length)`; means nothing at padding."""
        return self.real.cumsum(-1) + self.before - 1

    @cached_property
    def tokens_first(self) -> torch.Tensor:
        """Indices of the tokens in their order, then those of padding, `(batch, length)`."""
        return (~self.real).int().argsort(dim=-1, stable=True)

    def last(self, count: int) -> "ObservedTokens":
        """The last positions; if there are less, all of them and then some that hold nothing yet."""
        left = self.real.shape[1] - count
        ends = (-left, 0) if left > 0 else (0, -left)
        ids = None if self.ids is None else F.pad(self.ids, ends)
        return ObservedTokens(ids, F.pad(self.real, ends), self.real[:, : max(0, left)])


@dataclass(frozen=True, eq=False)
class ObservedBatch:
    """One forward pass of the model that is observed.

    Args:
        model (`PreTrainedModel`): The model or, in generation, its encoder.
        arguments (`dict`): What its forward pass was called with, by name.
        cached (`int`): Number of earlier positions that a cache held when the pass began.
        sentences (`dict`): In generation, token ids and attention mask from the first token on, by the same names.
    """

    model: PreTrainedModel
    arguments: dict[str, Any]
    cached: int = 0
    sentences: dict[str, Any] = field(default_factory=dict)

    def ids(self, kind: str) -> torch.Tensor | None:
        """Token ids at the queries of a kind of site, `(batch, length)`, if they are known."""
        return self._ids(kind, self.arguments)

    def tokens(
        self, kind: str, shape: tuple[int, int], device: torch.device, mask: torch.Tensor | None = None
    ) -> ObservedTokens:
        """Tokens at the queries of a kind of site, the last of each sentence where earlier ones are cached.

        Args:
            kind (`str`): Not of the keys of `cross`, see `encoder_tokens`.
            shape (`tuple[int, int]`): Batch and number of queries.
            device (`torch.device`): Where the answer is wanted.
            mask (`torch.Tensor`, *optional*): What the layer masks: it tells what is padding where the masks that the
                model was given are not of its length, as for images, sound, and masks with a row for each token.
        """
        tokens, ids = self._sentence(kind, shape, device, mask).last(shape[1]), self.ids(kind)
        known = tokens.ids is not None or ids is None or ids.shape != shape
        return tokens if known else replace(tokens, ids=ids.to(device))

    def key_tokens(
        self, kind: str, shape: tuple[int, int], device: torch.device, keys: int, mask: torch.Tensor | None = None
    ) -> ObservedTokens:
        """What self-attention attends to: as many keys as a cache holds, and those of the queries."""
        # Caches of a window have lost the first, and those of a fixed size have room for more.
        return self._sentence(kind, shape, device, mask).last(keys)

    def encoder_tokens(
        self, shape: tuple[int, int], device: torch.device, mask: torch.Tensor | None = None
    ) -> ObservedTokens:
        """What cross-attention attends to."""
        if getattr(self.model.config, "is_encoder_decoder", False):
            return self.tokens("encoder", shape, device, mask)
        return ObservedTokens(None, _real(self.arguments.get("encoder_attention_mask"), shape, shape, device, mask))

    def _sentence(
        self, kind: str, shape: tuple[int, int], device: torch.device, mask: torch.Tensor | None
    ) -> ObservedTokens:
        """All tokens up to the last query."""
        seq2seq = getattr(self.model.config, "is_encoder_decoder", False)
        whole = shape[0], shape[1] + (0 if seq2seq and kind == "encoder" else self.cached)
        arguments = {**self.arguments, **self.sentences}
        ids, (_, given) = self._ids(kind, arguments), given_token_mask(self.model, kind, arguments, shape)
        return ObservedTokens(
            None if ids is None or ids.shape != whole else ids.to(device), _real(given, shape, whole, device, mask)
        )

    def _ids(self, kind: str, arguments: Mapping[str, Any]) -> torch.Tensor | None:
        if kind == "encoder" or not getattr(self.model.config, "is_encoder_decoder", False):
            ids = arguments.get("input_ids")
            # Each of several choices is read as a sentence.
            return ids.flatten(0, 1) if torch.is_tensor(ids) and ids.dim() == 3 else ids
        ids, labels = arguments.get("decoder_input_ids"), arguments.get("labels")
        if ids is None and labels is not None and hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            return self.model.prepare_decoder_input_ids_from_labels(labels)
        return ids


def _real(
    given: Any, shape: tuple[int, int], whole: tuple[int, int], device: torch.device, mask: torch.Tensor | None
) -> torch.Tensor:
    """Which positions are tokens, of shape `whole`, by what the model was given or else by what a layer masks."""
    if torch.is_tensor(given) and given.shape in (shape, whole):
        real = non_padding(given, given.shape, device)
    elif mask is not None and mask.dim() == 4:
        # What no row attends to.
        real = may_attend(mask).flatten(1, 2).any(1).expand(shape[0], -1)[:, : whole[1]].to(device)
    else:
        real = non_padding(None, shape, device)
    return F.pad(real, (whole[1] - real.shape[1], 0), value=True)


def mask_part(bias: torch.Tensor, sentences: slice, rows: slice, keys: int) -> torch.Tensor:
    """Of a mask for all scores, that for some; dimensions of size one stand for all, and keep to it."""
    if bias.dim() != 4:
        raise ValueError(f"masks of shape {tuple(bias.shape)} are not known; choose attn_implementation='sdpa'.")
    bias = bias[sentences if bias.shape[0] > 1 else slice(None)]
    return bias[:, :, rows if bias.shape[2] > 1 else slice(None), :keys]


def later_keys(keys: int, rows: slice, device: torch.device) -> torch.Tensor:
    """Which places come after that of each row, `(rows, keys)`."""
    places = torch.arange(keys, device=device)
    return places > places[rows, None]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Some rows of the attention weights of one layer, of all its heads.

    Args:
        batch (`ObservedBatch`): The forward pass.
        layer (`HeadLayer`): Whose heads they are; `layer.heads` names them in the original numbering.
        layers (`list[HeadLayer]`): All layers of the model that are known, also those without heads.
        weights (`torch.Tensor` of shape `(sentences, heads, rows, keys)`): Softmax, float32 (float64 in double).
        queries, keys (`ObservedTokens`): Of the whole batch.
        sentences, rows (`slice`): Which sentences and which queries of the batch these are.
        mask (`torch.Tensor` of shape `(batch, heads, queries, keys)`, *optional*): What the layer masks; dimensions of
            size 1 stand for all.
        causal (`bool`): Whether queries attend to no later place, without a mask that says so.
    """

    batch: ObservedBatch
    layer: HeadLayer
    layers: list[HeadLayer]
    weights: torch.Tensor
    queries: ObservedTokens
    keys: ObservedTokens
    sentences: slice
    rows: slice
    mask: torch.Tensor | None = None
    causal: bool = False

    @property
    def site(self) -> HeadSite:
        """Kind and layer."""
        return self.layer.site

    @cached_property
    def real_queries(self) -> torch.Tensor:
        """Which rows belong to tokens, `(sentences, rows)`."""
        return self.queries.real[self.sentences, self.rows]

    @cached_property
    def real_keys(self) -> torch.Tensor:
        """Which keys are tokens, `(sentences, keys)`."""
        return self.keys.real[self.sentences]

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        """Which tokens each row may attend to, `(sentences, rows, keys)`."""
        visible = self.real_keys[:, None].expand(-1, self.weights.shape[2], -1)
        if self.mask is not None:
            visible = visible & may_attend(mask_part(self.mask, self.sentences, self.rows, visible.shape[-1])).any(1)
        if self.causal:
            visible = visible & ~later_keys(visible.shape[-1], self.rows, visible.device)
        return visible

    @cached_property
    def query_ids(self) -> torch.Tensor:
        """Token ids of the rows, `(sentences, rows)`."""
        return self._ids(self.queries)[self.sentences, self.rows]

    @cached_property
    def key_ids(self) -> torch.Tensor:
        """Token ids of the keys, `(sentences, keys)`."""
        return self._ids(self.keys)[self.sentences]

    @cached_property
    def query_positions(self) -> torch.Tensor:
        """Number of tokens before each row in its sentence, `(sentences, rows)`; see [`ObservedTokens`]."""
        return self.queries.positions[self.sentences, self.rows]

    @cached_property
    def key_positions(self) -> torch.Tensor:
        """Number of tokens before each key in its sentence, `(sentences, keys)`; see [`ObservedTokens`]."""
        return self.keys.positions[self.sentences]

    def largest(self, excluded_ids: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest weight of each row, computed once for all observers that ask.

        Args:
            excluded_ids (`tuple[int, ...]`): Tokens that do not count as keys.

        Returns:
            The weight and the index of its key, the first of several, both of shape `(sentences, heads, rows)`; the
            weight is 0 where no key counts.

        Raises:
            ValueError: if tokens are excluded, and token ids of the keys are not known.
        """
        if excluded_ids not in self._largest:
            weights = self.weights
            if excluded_ids:
                excluded = sum((self.key_ids == one for one in excluded_ids), torch.zeros_like(self.key_ids))
                weights = weights - 2 * excluded[:, None, None].to(weights.dtype)
            values, keys = weights.max(-1)
            self._largest[excluded_ids] = values.clamp_(min=0), keys
        return self._largest[excluded_ids]

    @cached_property
    def _largest(self) -> dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def _ids(self, tokens: ObservedTokens) -> torch.Tensor:
        if tokens.ids is None:
            raise ValueError(
                f"an observer needs token ids, and those at the {self.site.kind} of "
                f"{type(self.batch.model).__name__} are not known; pass whole sentences as input_ids and "
                "decoder_input_ids, or let generate() fill the cache. Observers with excluded_ids=[] need none."
            )
        return tokens.ids


class Observer:
    """What looks on while a model attends.

    A subclass sets `name`, under which its result is found, adds up what it sees in `update`, and returns a result
    from `compute`. What it adds up should stay on the device that it comes from until then.
    """

    name: str = ""

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Takes special tokens that it was not given from the tokenizer of the model; called before any batch."""

    def begin(self, batch: ObservedBatch) -> None:
        """Called once before each forward pass."""

    def update(self, call: AttentionCall) -> None:
        """Called with some rows after some others, until each has been seen once, layer by layer."""
        raise NotImplementedError

    def end(self, batch: ObservedBatch) -> None:
        """Called once after each forward pass that does not fail."""

    def compute(self) -> Any:
        """The result of all that was seen."""
        raise NotImplementedError


def tell_tokenizer(observers: Iterable[Observer], tokenizer: Any) -> None:
    """Has observers take special tokens that they were not given from a tokenizer.

    Args:
        observers (iterable of `Observer`): Those that were given all they need stay as they are.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The tokenizer of the model; without it, nothing happens.

    Raises:
        ValueError: if it is no tokenizer.
    """
    if tokenizer is None:
        return
    if not hasattr(tokenizer, "all_special_ids"):
        raise ValueError(f"tokenizer must be the tokenizer of the model, got {type(tokenizer).__name__}.")
    for observer in observers:
        observer.use_tokenizer(tokenizer)


def check_observers(observers: tuple, usage: str) -> None:
    """Refuses what cannot look on.

    Args:
        observers (`tuple`): What was given in place of [`Observer`].
        usage (`str`): How it is done, for the message.

    Raises:
        ValueError: if there is no observer, or something else.
    """
    if not observers:
        raise ValueError(f"there is no observer; pass some, as in {usage}.")
    for observer in observers:
        if not isinstance(observer, Observer):
            given = f"the class {observer.__name__}" if isinstance(observer, type) else repr(observer)
            raise ValueError(f"observers must be objects, one argument each, as in {usage}; got {given}.")


def check_seen(name: str, sums: Mapping) -> None:
    """Refuses to compute a result of nothing.

    Raises:
        ValueError: if nothing has been added up.
    """
    if not sums:
        raise ValueError(f"{name} has seen no attention; run the model on some batches within observe().")


class HeadMeans:
    """Running mean over tokens of a number for each head, or of several.

    Args:
        name (`str`): Whose mean it is, for messages.
    """

    def __init__(self, name: str):
        self.name = name
        self.layers: dict[HeadSite, HeadLayer] = {}
        self.sums: dict[HeadSite, torch.Tensor] = {}
        self.counts: dict[HeadSite, torch.Tensor] = {}

    def add(self, call: AttentionCall, values: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        """Adds numbers of some rows.

        Args:
            call (`AttentionCall`): Where they come from.
            values (`torch.Tensor` of shape `(sentences, heads, rows)`): The numbers.
            counted (`torch.Tensor` of shape `(sentences, rows)`, *optional*): Rows that count; those of tokens if not
                given.
        """
        counted = call.real_queries if counted is None else counted
        self.add_sums(call, values.where(counted[:, None], 0).sum((0, 2), dtype=torch.float64), counted.sum())

    def add_sums(self, call: AttentionCall, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Adds what numbers of some rows add up to, also of several numbers for each head.

        Args:
            call (`AttentionCall`): Where they come from.
            sums (`torch.Tensor` of shape `(heads, …)`): Their sums, float64.
            counts (`torch.Tensor`): How many were added, of a shape that can be expanded to that of `sums`.
        """
        self.layers |= {layer.site: layer for layer in (*call.layers, call.layer)}
        self.sums[call.site] = self.sums.get(call.site, 0) + sums
        self.counts[call.site] = self.counts.get(call.site, 0) + counts

    def tables(self) -> dict[str, torch.Tensor]:
        """Means of shape `(layers, heads, …)` by kind of site; NaN where a head is removed, or nothing counted.

        Raises:
            ValueError: if nothing was added.
        """
        check_seen(self.name, self.sums)
        means = {site: total / self.counts[site] for site, total in self.sums.items()}
        return tables_of_heads(list(self.layers.values()), means)

    def compute(self) -> HeadScores:
        """Means of one number for each head, see `tables`."""
        return HeadScores(self.tables())
