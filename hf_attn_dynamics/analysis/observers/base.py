# Licensed under the Apache License, Version 2.0.
"""Base class of observers, the attention that they receive, and running means over tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.head_roles import HeadLayer
from ...models.head_sites import HeadSite
from ...models.token_mask import may_attend, non_padding
from ..head_scores import HeadScores, tables_of_heads
from ..running import given_token_mask, is_seq2seq


if TYPE_CHECKING:
    from .excluded_tokens import ExcludedTokens, SpecialTokens


@dataclass(frozen=True, eq=False)
class ObservedTokens:
    """Tokens of the queries or of the keys in a forward pass.

    Args:
        ids (`torch.Tensor` of shape `(batch, length)`, *optional*): Token ids; `None` if unknown, as for images and
            embeddings.
        real (`torch.Tensor` of shape `(batch, length)`): Padding mask: True at tokens.
        earlier (`torch.Tensor` of shape `(batch, earlier positions)`, *optional*): Padding mask of cached positions
            before these.
    """

    ids: torch.Tensor | None
    real: torch.Tensor
    earlier: torch.Tensor | None = None

    @property
    def start(self) -> int:
        """Number of earlier positions."""
        return 0 if self.earlier is None else self.earlier.shape[1]

    @property
    def reach(self) -> int:
        """Number of positions, including earlier ones."""
        return self.start + self.real.shape[1]

    @cached_property
    def before(self) -> torch.Tensor:
        """Number of earlier tokens, `(batch, 1)`."""
        return (self.real[:, :0] if self.earlier is None else self.earlier).sum(-1, keepdim=True)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Number of tokens before each token in its sentence, `(batch, length)`; undefined at padding."""
        return self.real.cumsum(-1) + self.before - 1

    @cached_property
    def tokens_first(self) -> torch.Tensor:
        """Indices of the tokens in order, followed by the indices of padding, `(batch, length)`."""
        return (~self.real).int().argsort(dim=-1, stable=True)

    def last(self, count: int) -> "ObservedTokens":
        """The last `count` positions; shorter sequences are padded at the end."""
        left = self.real.shape[1] - count
        ends = (-left, 0) if left > 0 else (0, -left)
        ids = None if self.ids is None else F.pad(self.ids, ends)
        return ObservedTokens(ids, F.pad(self.real, ends), self.real[:, : max(0, left)])


def neighbour_ids(tokens: ObservedTokens, shift: int) -> torch.Tensor:
    """Ids of the tokens that stand `shift` tokens after each token of its sentence, `(batch, length)`.

    -1 where there is no such token, and at padding. The ids of `tokens` must be known.

    Example:
        >>> tokens = ObservedTokens(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[True, True, True, False]]))
        >>> neighbour_ids(tokens, 1), neighbour_ids(tokens, -1)
        (tensor([[ 6,  7, -1, -1]]), tensor([[-1,  5,  6, -1]]))
    """
    in_order = tokens.ids.gather(1, tokens.tokens_first)
    place = tokens.real.cumsum(-1) - 1 + shift
    exists = tokens.real & (place >= 0) & (place < tokens.real.sum(-1, keepdim=True))
    return in_order.gather(1, place.clamp(0, in_order.shape[1] - 1)).where(exists, -1)


@dataclass(frozen=True, eq=False)
class ObservedBatch:
    """One forward pass of the observed model.

    Args:
        model (`PreTrainedModel`): The model or, in generation, its encoder.
        arguments (`dict`): Arguments of the forward pass by name.
        cached (`int`): Number of positions in the cache before the pass.
        sentences (`dict`): In generation, token ids and attention mask of the whole sequences, by the same names.
    """

    model: PreTrainedModel
    arguments: dict[str, Any]
    cached: int = 0
    sentences: dict[str, Any] = field(default_factory=dict)

    def ids(self, kind: str) -> torch.Tensor | None:
        """Token ids of the queries at a kind of site, `(batch, length)`; `None` if unknown."""
        return self._ids(kind, self.arguments)

    def tokens(
        self, kind: str, shape: tuple[int, int], device: torch.device, mask: torch.Tensor | None = None
    ) -> ObservedTokens:
        """Tokens of the queries at a kind of site: the last of each sentence if earlier ones are cached.

        Args:
            kind (`str`): Kind of site; for the keys of `cross` see `encoder_tokens`.
            shape (`tuple[int, int]`): Batch size and number of queries.
            device (`torch.device`): Device of the result.
            mask (`torch.Tensor`, *optional*): Attention mask of the layer. It locates padding if the model's own masks
                have another length, as for images, audio, and masks with a row per token.
        """
        tokens, ids = self._sentence(kind, shape, device, mask).last(shape[1]), self.ids(kind)
        known = tokens.ids is not None or ids is None or ids.shape != shape
        return tokens if known else replace(tokens, ids=ids.to(device))

    def key_tokens(
        self, kind: str, shape: tuple[int, int], device: torch.device, keys: int, mask: torch.Tensor | None = None
    ) -> ObservedTokens:
        """Tokens of the keys in self-attention: cached ones and those of the queries."""
        # Sliding-window caches have dropped the first keys; static caches have free slots at the end.
        return self._sentence(kind, shape, device, mask).last(keys)

    def encoder_tokens(
        self, shape: tuple[int, int], device: torch.device, mask: torch.Tensor | None = None
    ) -> ObservedTokens:
        """Tokens of the keys in cross-attention."""
        if is_seq2seq(self.model):
            return self.tokens("encoder", shape, device, mask)
        return ObservedTokens(None, _real(self.arguments.get("encoder_attention_mask"), shape, shape, device, mask))

    def _sentence(
        self, kind: str, shape: tuple[int, int], device: torch.device, mask: torch.Tensor | None
    ) -> ObservedTokens:
        """All tokens up to the last query, including cached ones."""
        seq2seq = is_seq2seq(self.model)
        whole = shape[0], shape[1] + (0 if seq2seq and kind == "encoder" else self.cached)
        arguments = {**self.arguments, **self.sentences}
        ids, (_, given) = self._ids(kind, arguments), given_token_mask(self.model, kind, arguments, shape)
        return ObservedTokens(
            None if ids is None or ids.shape != whole else ids.to(device), _real(given, shape, whole, device, mask)
        )

    def _ids(self, kind: str, arguments: Mapping[str, Any]) -> torch.Tensor | None:
        if kind == "encoder" or not is_seq2seq(self.model):
            ids = arguments.get("input_ids")
            # Multiple choice: each choice is a sequence of its own.
            return ids.flatten(0, 1) if torch.is_tensor(ids) and ids.dim() == 3 else ids
        ids, labels = arguments.get("decoder_input_ids"), arguments.get("labels")
        if ids is None and labels is not None and hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            return self.model.prepare_decoder_input_ids_from_labels(labels)
        return ids


def _real(
    given: Any, shape: tuple[int, int], whole: tuple[int, int], device: torch.device, mask: torch.Tensor | None
) -> torch.Tensor:
    """Padding mask of shape `whole`, from the mask given to the model or else from the mask of a layer."""
    if torch.is_tensor(given) and given.shape in (shape, whole):
        real = non_padding(given, given.shape, device)
    elif mask is not None and mask.dim() == 4:
        # Padding is what no query may attend to.
        real = may_attend(mask).flatten(1, 2).any(1).expand(shape[0], -1)[:, : whole[1]].to(device)
    else:
        real = non_padding(None, shape, device)
    return F.pad(real, (whole[1] - real.shape[1], 0), value=True)


def mask_part(bias: torch.Tensor, sentences: slice, rows: slice, keys: int) -> torch.Tensor:
    """Part of an attention mask; dimensions of size 1 broadcast and stay."""
    if bias.dim() != 4:
        raise ValueError(f"masks of shape {tuple(bias.shape)} are not known; choose attn_implementation='sdpa'.")
    bias = bias[sentences if bias.shape[0] > 1 else slice(None)]
    return bias[:, :, rows if bias.shape[2] > 1 else slice(None), :keys]


def later_keys(keys: int, rows: slice, device: torch.device) -> torch.Tensor:
    """Which keys come after each query, `(rows, keys)`."""
    indices = torch.arange(keys, device=device)
    return indices > indices[rows, None]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Attention weights of all heads of one layer, for a block of sentences and queries.

    Args:
        batch (`ObservedBatch`): The forward pass.
        layer (`HeadLayer`): The layer; `layer.heads` are the heads of the weights in the original numbering.
        layers (`list[HeadLayer]`): All known layers of the model, including layers without heads.
        weights (`torch.Tensor` of shape `(sentences, heads, rows, keys)`): Softmax, float32, or float64 in double
            precision.
        queries, keys (`ObservedTokens`): Tokens of the whole batch.
        sentences, rows (`slice`): Sentences and queries of the batch that the weights belong to.
        mask (`torch.Tensor` of shape `(batch, heads, queries, keys)`, *optional*): Attention mask of the layer;
            dimensions of size 1 broadcast.
        causal (`bool`): Whether attention is causal without a mask that says so.
        has_sink (`bool`): Whether weights sum to less than 1, since a part falls on a learnt sink.
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
    has_sink: bool = False

    @property
    def site(self) -> HeadSite:
        """Kind of site and number of the layer."""
        return self.layer.site

    @property
    def layers_by_site(self) -> dict[HeadSite, HeadLayer]:
        """All known layers of the model by site."""
        return {layer.site: layer for layer in (*self.layers, self.layer)}

    @cached_property
    def real_queries(self) -> torch.Tensor:
        """Which queries are tokens, not padding, `(sentences, rows)`."""
        return self.queries.real[self.sentences, self.rows]

    @cached_property
    def real_keys(self) -> torch.Tensor:
        """Which keys are tokens, not padding, `(sentences, keys)`."""
        return self.keys.real[self.sentences]

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        """Which tokens each query may attend to, `(sentences, rows, keys)`."""
        visible = self.real_keys[:, None].expand(-1, self.weights.shape[2], -1)
        if self.mask is not None:
            visible = visible & may_attend(mask_part(self.mask, self.sentences, self.rows, visible.shape[-1])).any(1)
        if self.causal:
            visible = visible & ~later_keys(visible.shape[-1], self.rows, visible.device)
        return visible

    @cached_property
    def query_ids(self) -> torch.Tensor:
        """Token ids of the queries, `(sentences, rows)`."""
        return self._ids(self.queries)[self.sentences, self.rows]

    @cached_property
    def key_ids(self) -> torch.Tensor:
        """Token ids of the keys, `(sentences, keys)`."""
        return self._ids(self.keys)[self.sentences]

    @cached_property
    def query_positions(self) -> torch.Tensor:
        """Number of tokens before each query in its sentence, `(sentences, rows)`; see [`ObservedTokens`]."""
        return self.queries.positions[self.sentences, self.rows]

    @cached_property
    def key_positions(self) -> torch.Tensor:
        """Number of tokens before each key in its sentence, `(sentences, keys)`; see [`ObservedTokens`]."""
        return self.keys.positions[self.sentences]

    def largest(self, excluded_ids: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest weight of each query; cached, since several observers need it.

        Args:
            excluded_ids (`tuple[int, ...]`): Token ids of keys to leave out.

        Returns:
            The weight and the index of its key (the first if several are equal), both of shape
            `(sentences, heads, rows)`; the weight is 0 where all keys are left out.

        Raises:
            ValueError: if `excluded_ids` is not empty and token ids of the keys are unknown.
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
    """Base class of observers: statistics that are accumulated from attention weights while a model runs.

    A subclass sets `name`, the name of its result, accumulates statistics in `update`, and returns them from
    `compute`. Statistics should stay on their device until then. A subclass whose statistics treat some tokens
    differently sets `special`, [`ExcludedTokens`] or [`SpecialTokens`].
    """

    name: str = ""
    special: "ExcludedTokens | SpecialTokens | None" = None

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Called before the first batch with the model's tokenizer, for special tokens that the user did not name."""
        if self.special is not None:
            self.special.use_tokenizer(tokenizer)

    def begin(self, batch: ObservedBatch) -> None:
        """Called once before each forward pass."""
        if self.special is not None:
            self.special.begin(batch)

    def update(self, call: AttentionCall) -> None:
        """Called layer by layer with blocks of the attention weights, each block once."""
        raise NotImplementedError

    def end(self, batch: ObservedBatch) -> None:
        """Called once after each forward pass that does not raise an exception."""

    def compute(self) -> Any:
        """The result over all forward passes."""
        raise NotImplementedError


def begin_pass(observers: Iterable[Observer], batch: ObservedBatch) -> None:
    """Tells observers that a forward pass begins; what they have seen of one that raised an exception is dropped."""
    for observer in observers:
        for means in _means_of(observer):
            means.begin()
        observer.begin(batch)


def end_pass(observers: Iterable[Observer], batch: ObservedBatch) -> None:
    """Tells observers that a forward pass has ended without an exception."""
    for observer in observers:
        observer.end(batch)
        for means in _means_of(observer):
            means.end()


def _means_of(observer: Observer) -> "list[HeadMeans]":
    """Running means that an observer has as attributes, alone or in a dictionary."""
    values = [one for value in vars(observer).values() for one in (value.values() if type(value) is dict else [value])]
    return [value for value in values if isinstance(value, HeadMeans)]


def tell_tokenizer(observers: Iterable[Observer], tokenizer: Any) -> None:
    """Passes the tokenizer to observers, which take special tokens from it unless the user named some.

    Args:
        observers (iterable of `Observer`): The observers.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the model.

    Raises:
        ValueError: if `tokenizer` is not a tokenizer.
    """
    if tokenizer is None:
        return
    if not hasattr(tokenizer, "all_special_ids"):
        raise ValueError(f"tokenizer must be the tokenizer of the model, got {type(tokenizer).__name__}.")
    for observer in observers:
        observer.use_tokenizer(tokenizer)


def check_observers(observers: tuple, usage: str) -> None:
    """Checks that there are observers and nothing else.

    Args:
        observers (`tuple`): Arguments of the user.
        usage (`str`): An example of the call, for the message.

    Raises:
        ValueError: if `observers` is empty or one is not an [`Observer`].
    """
    if not observers:
        raise ValueError(f"there is no observer; pass some, as in {usage}.")
    for observer in observers:
        if not isinstance(observer, Observer):
            given = f"the class {observer.__name__}" if isinstance(observer, type) else repr(observer)
            raise ValueError(f"observers must be objects, one argument each, as in {usage}; got {given}.")


def check_seen(name: str, sums: Mapping) -> None:
    """Checks that an observer has received attention.

    Raises:
        ValueError: if `sums` is empty.
    """
    if not sums:
        raise ValueError(f"{name} has seen no attention; run the model on some batches within observe().")


class HeadMeans:
    """Running means over tokens of one or several numbers per head.

    As an attribute of an [`Observer`], the sums of a forward pass count once it has ended without an exception.

    Args:
        name (`str`): Name of the observer, for messages.
    """

    def __init__(self, name: str):
        self.name = name
        self.layers: dict[HeadSite, HeadLayer] = {}
        self.sums: dict[HeadSite, torch.Tensor] = {}
        self.counts: dict[HeadSite, torch.Tensor] = {}
        self._pending: list[tuple[HeadSite, torch.Tensor, torch.Tensor]] | None = None  # of the current pass

    def begin(self) -> None:
        """Begins a forward pass."""
        self._pending = []

    def end(self) -> None:
        """Counts the sums of the forward pass."""
        pending, self._pending = self._pending or [], None
        for sums in pending:
            self._count(*sums)

    def _count(self, site: HeadSite, sums: torch.Tensor, counts: torch.Tensor) -> None:
        self.sums[site] = self.sums.get(site, 0) + sums
        self.counts[site] = self.counts.get(site, 0) + counts

    def add(self, call: AttentionCall, values: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        """Adds one number per head and query.

        Args:
            call (`AttentionCall`): Layer, sentences and queries.
            values (`torch.Tensor` of shape `(sentences, heads, rows)`): The numbers.
            counted (`torch.Tensor` of shape `(sentences, rows)`, *optional*): Queries that count; all tokens by
                default.
        """
        counted = call.real_queries if counted is None else counted
        self.add_sums(call, values.where(counted[:, None], 0).sum((0, 2), dtype=torch.float64), counted.sum())

    def add_sums(self, call: AttentionCall, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Adds sums over queries of one or several numbers per head.

        Args:
            call (`AttentionCall`): Layer of the sums.
            sums (`torch.Tensor` of shape `(heads, …)`): Sums over the queries, float64.
            counts (`torch.Tensor`): Number of summands; broadcasts to the shape of `sums`.

        Raises:
            ValueError: if heads of the layer have been removed in between.
        """
        if call.site in self.sums and self.layers[call.site].heads != call.layer.heads:
            raise ValueError(
                f"{self.name} has seen other heads at {call.site} before; create a new observer after heads have been "
                "removed."
            )
        self.layers |= call.layers_by_site
        if self._pending is None:
            self._count(call.site, sums, counts)
        else:
            self._pending.append((call.site, sums, counts))

    def tables(self) -> dict[str, torch.Tensor]:
        """Means of shape `(layers, heads, …)` by kind of site; NaN for removed heads and where nothing counted.

        Raises:
            ValueError: if nothing has been added.
        """
        check_seen(self.name, self.sums)
        means = {site: total / self.counts[site] for site, total in self.sums.items()}
        return tables_of_heads(list(self.layers.values()), means)

    def compute(self) -> HeadScores:
        """Means of one number per head, see `tables`."""
        return HeadScores(self.tables())


class RowBlocks:
    """Sums over the queries of a sentence, whose blocks arrive in successive calls."""

    def __init__(self):
        self.sum: torch.Tensor | float = 0.0

    def add(self, call: AttentionCall, part: torch.Tensor) -> torch.Tensor | None:
        """Adds the part of one block; returns the sum with the last block of the sentence, before that `None`."""
        self.sum = self.sum + part
        if call.rows.stop < call.queries.real.shape[1]:
            return None
        total, self.sum = self.sum, 0.0
        return total
