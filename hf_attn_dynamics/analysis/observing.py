# Licensed under the Apache License, Version 2.0.
"""Looking on while a model attends: running statistics of attention weights, in memory for a few of them.

    with observe(model, HeadConfidence(), RelativePositions()) as seen:
        for batch in data:
            model(**batch)
    seen.confidence["encoder"]          # (layers, heads)

Within the context, attention is computed by the kernel that was chosen before, and then once more, a few rows at a
time, for the observers. They see weights as the softmax gives them: before dropout and gates, in single precision.
"""

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..models.head_guidance import BLOCK_ELEMENTS, elements_on
from ..models.head_roles import HeadLayer, locate_heads, site_of
from ..models.head_sites import HeadSite
from ..models.headwise_attention import call_kernel
from ..models.pruned_attention import given_cache
from .head_scores import HeadScores, tables_of_heads
from .running import attention_implementation, evaluation_mode, token_mask


VECTOR = 16  # numbers in single precision that a processor works on at a time
MAX_WEIGHTS = {**BLOCK_ELEMENTS, "cpu": 2**18}  # that are there at a time: few enough for the cache of a processor


# ---------------------------------------------------------------------------------------------------------------------
# What observers see
# ---------------------------------------------------------------------------------------------------------------------


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
        ids, (_, given) = self._ids(kind, arguments), token_mask(self.model, kind, arguments, shape)
        return ObservedTokens(
            None if ids is None or ids.shape != whole else ids.to(device), _real(given, shape, whole, device, mask)
        )

    def _ids(self, kind: str, arguments: Mapping[str, Any]) -> torch.Tensor | None:
        if kind == "encoder" or not getattr(self.model.config, "is_encoder_decoder", False):
            return arguments.get("input_ids")
        ids, labels = arguments.get("decoder_input_ids"), arguments.get("labels")
        if ids is None and labels is not None and hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            return self.model.prepare_decoder_input_ids_from_labels(labels)
        return ids


def _real(
    given: Any, shape: tuple[int, int], whole: tuple[int, int], device: torch.device, mask: torch.Tensor | None
) -> torch.Tensor:
    """Which positions are tokens, of shape `whole`, by what the model was given or else by what a layer masks."""
    if torch.is_tensor(given) and given.shape in (shape, whole):
        real = given.to(device).bool()
    elif mask is not None and mask.dim() == 4:
        # What no row attends to.
        real = _allowed(mask).flatten(1, 2).any(1).expand(shape[0], -1)[:, : whole[1]].to(device)
    else:
        real = torch.ones(shape, dtype=torch.bool, device=device)
    return F.pad(real, (whole[1] - real.shape[1], 0), value=True)


def _allowed(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask, boolean or to be added to scores, lets queries attend."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


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
            visible = visible & _allowed(_part(self.mask, self.sentences, self.rows, visible.shape[-1])).any(1)
        if self.causal:
            visible = visible & ~_later(visible.shape[-1], self.rows, visible.device)
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


# ---------------------------------------------------------------------------------------------------------------------
# Looking on
# ---------------------------------------------------------------------------------------------------------------------


class Observation:
    """What the observers of one [`observe`] have seen: `seen.NAME` is the result of the observer of that name."""

    def __init__(self, observers: dict[str, Observer]):
        self._observers = observers

    def __getattr__(self, name: str) -> Any:
        observers = self.__dict__.get("_observers", {})
        if name not in observers:
            raise AttributeError(f"nothing called {name!r} was observed, but {', '.join(observers) or 'nothing'}.")
        return observers[name].compute()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._observers]

    def results(self) -> dict[str, Any]:
        """All results by name."""
        return {name: observer.compute() for name, observer in self._observers.items()}


_NUMBERS = itertools.count()  # names of attention functions are never used twice


@contextmanager
def observe(model: PreTrainedModel, *observers: Observer) -> Iterator[Observation]:
    """Has observers look on at all attention that a model computes within the context.

    The model is in evaluation mode meanwhile. Its outputs are those of the kernel that was chosen before, but for
    `flash` and `flex` kernels, whose masks cannot be read: `sdpa` stands in for them. On leaving, also by an
    exception, everything is as before. Observers may go on in a later context; contexts may be nested.

    Padding is told by the masks that the forward pass is called with or, where these are not of a layer's length (for
    images, sound, masks with a row for each token), by what the layer masks; rows of padding are not counted. Within
    `generate()`, what a cache holds is known from the first token on: steps are seen as rows of one pass over the
    sentence, which goes as far as it is written. Where a layer is called several times in one pass (ALBERT), each call
    is a layer of its own. Heads with hard-coded weights are not seen.

    Args:
        model (`PreTrainedModel`): Any model whose attention passes the interface of Transformers: encoders, decoders,
            encoder–decoder models (self-attention and cross-attention), headwise and pruned ones; on any device.
        observers (`Observer`): What looks on, e.g. [`HeadConfidence`].

    Returns:
        A context whose value is an [`Observation`]: the result of each observer by its name.

    Raises:
        ValueError: if there is no observer, one is none, two have the same name, the model is in a wrapper, or it
            computes attention by itself.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import HeadConfidence, observe
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = BertModel(config)
        >>> with observe(model, HeadConfidence(excluded_ids=[3])) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 3], [9, 6, 4, 3]]))
        >>> seen.confidence["encoder"].shape
        torch.Size([2, 4])
    """
    check_observers(observers, "observe(model, HeadConfidence())")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"{type(model).__name__} only holds the model that attends; pass model.module.")
    by_name: dict[str, Observer] = {}
    for observer in observers:
        if observer.name in by_name:
            raise ValueError(f"two observers are called {observer.name!r}; give one another `name`.")
        by_name[observer.name] = observer
    for part in _parts(model):
        if not part._can_set_attn_implementation():
            raise ValueError(
                f"{type(part).__name__} computes attention by itself, not through the attention interface of "
                "Transformers, so that it cannot be observed."
            )
    watch = _Watch(model, list(observers))
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(watch.passes())
        stack.enter_context(attention_function(model, lambda kernel: partial(_observed_attention, watch, kernel)))
        yield Observation(by_name)


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


def _parts(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@contextmanager
def attention_function(
    model: PreTrainedModel, function_over: Callable[[str], Callable], kernel: str | None = None
) -> Iterator[None]:
    """Has a function called wherever a model attends, and afterwards the kernel that was chosen before.

    Args:
        model (`PreTrainedModel`): Parts that compute attention by themselves go on doing so.
        function_over (callable): Gives the function, from the name of the kernel that it stands for.
        kernel (`str`, *optional*): That kernel, whose masks the function gets; by default the one before, or `sdpa`
            for `flash` and `flex` kernels, whose masks cannot be read.
    """
    with ExitStack() as stack:
        stack.enter_context(attention_implementation(model, partial(_registered, stack, function_over, kernel)))
        yield


def _registered(stack: ExitStack, function_over: Callable[[str], Callable], kernel: str | None, before: str) -> str:
    """Registers a function until the stack is left, and returns its name."""
    kernel = kernel or ("sdpa" if "flash" in before or "flex" in before else before)
    # The last part of the name tells what is beneath.
    name = f"observed_{next(_NUMBERS)}|{kernel}"
    functions: dict[type, Any] = {AttentionInterface: function_over(kernel)}
    if (mask_function := ALL_MASK_ATTENTION_FUNCTIONS.get(kernel)) is not None:
        functions[AttentionMaskInterface] = mask_function
    for interface, function in functions.items():
        interface.register(name, function)
        # Masks are made for names of this mapping only, and there is no function that takes one out.
        stack.callback(interface._global_mapping.pop, name)
    return name


def _observed_attention(
    watch: "_Watch",
    kernel: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the model calls in place of its kernel."""
    module = getattr(module, "attention_module", module)
    output = call_kernel(
        module, query, key, value, attention_mask, name=kernel, config=getattr(module, "config", None), **kwargs
    )
    # In the precision that observers are promised, whatever autocast makes of the model.
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        watch.show(module, query.detach(), key.detach(), attention_mask, **kwargs)
    return output


class _Watch:
    """Follows the forward passes of a model, and shows its observers what each layer attends to."""

    def __init__(self, model: PreTrainedModel, observers: list[Observer]):
        self.model = model
        self.observers = observers
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.names = {id(module): name for name, module in self.modules.items()}
        untouched = tuple(f"{part}." for part in getattr(model, "untouched_parts", ()))
        self.untouched = {id(module) for name, module in self.modules.items() if f"{name}.".startswith(untouched)}
        self.layers: dict[int, HeadLayer] = {}
        # Of classes that are not known, what is needed here is read off their names, when they call.
        with suppress(ValueError):
            self.layers = {id(layer.module): layer for layer in locate_heads(model)}
        self.batch: ObservedBatch | None = None
        self.sentences: dict[str, Any] = {}  # of the next pass, if it is a step of a generation
        self.encoded: tuple[torch.Tensor, torch.Tensor] | None = None  # what an encoder read, and made of it
        self.depth = 0
        self.calls: Counter[str] = Counter()  # of each kind of site, in this pass

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Notes when a forward pass begins and ends; parts that are called within one belong to it."""
        hooks = []
        try:
            for part in _parts(self.model):
                hooks.append(part.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
                hooks.append(part.register_forward_hook(self._end, always_call=True))
            with ExitStack() as stack:
                for part in _parts(self.model):
                    stack.enter_context(self._steps(part))
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self.batch = self.encoded = None

    @contextmanager
    def _steps(self, part: PreTrainedModel) -> Iterator[None]:
        """Notes whole sentences in each step of a generation: what is cached, no forward pass is told."""
        prepare = getattr(part, "prepare_inputs_for_generation", None)
        if prepare is None:
            yield
            return
        before = vars(part).get("prepare_inputs_for_generation")
        prefix = "decoder_" if getattr(part.config, "is_encoder_decoder", False) else ""

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
        try:
            yield
        finally:
            del part.prepare_inputs_for_generation
            if before is not None:
                part.prepare_inputs_for_generation = before

    def _encoded_ids(self, outputs: Any) -> torch.Tensor | None:
        """Token ids that an encoder made its outputs of, if it did so last."""
        if not outputs or self.encoded is None:
            return None
        ids, states = self.encoded
        if outputs[0] is not states:
            # Beams have each sentence several times.
            times = len(outputs[0]) // len(states)
            if not torch.equal(outputs[0], states.repeat_interleave(times, 0)):
                return None
            self.encoded = ids.repeat_interleave(times, 0), outputs[0]
        return self.encoded[0]

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.depth += 1
        if self.depth == 1:
            bound = inspect.signature(module.forward).bind_partial(*args).arguments
            arguments = {**bound, **kwargs}
            cache = given_cache(arguments)
            cached = 0 if cache is None else int(cache.get_seq_length())
            self.batch = ObservedBatch(module, arguments, cached, self.sentences)
            self.sentences = {}
            self.calls.clear()
            for observer in self.observers:
                observer.begin(self.batch)

    def _end(self, module: nn.Module, inputs: tuple, outputs: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            batch, self.batch = self.batch, None
            if outputs is not None:  # else it raised an exception
                if torch.is_tensor(ids := batch.arguments.get("input_ids")) and self._is_encoder(module):
                    self.encoded = ids, outputs[0]
                for observer in self.observers:
                    observer.end(batch)

    def _is_encoder(self, module: nn.Module) -> bool:
        return getattr(getattr(self.model, "config", None), "is_encoder_decoder", False) and (
            module is self.model.get_encoder()
        )

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
        """Shows the weights of one layer, some rows at a time."""
        if id(module) in self.untouched:
            return
        if self.batch is None:
            raise ValueError(
                f"{self.names.get(id(module), type(module).__name__)} was called outside a forward pass of the model; "
                "call the model, or a part of it that is a PreTrainedModel."
            )
        layer = self._layer(module, query.shape[1])
        if s_aux is not None:
            raise ValueError(f"{self.names[id(module)]} attends to sinks, which observers do not know.")
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
            weights = _softmax(scores(sentences, rows))
            call = AttentionCall(self.batch, layer, layers, weights, queries, keys, sentences, rows, mask, causal)
            for observer in self.observers:
                observer.update(call)

    def _layer(self, module: nn.Module, present: int) -> HeadLayer:
        """The layer that a module is, this time."""
        layer = self.layers.get(id(module))
        if layer is None:
            layer = self.layers[id(module)] = self._unlisted(module, present)
        call = self.calls[layer.site.kind]
        self.calls[layer.site.kind] += 1
        # One module serves several layers here: they count in the order in which they are called.
        if "albert_layers" in layer.name.split("."):
            return HeadLayer(**{**vars(layer), "site": HeadSite(layer.site.kind, call)})
        return layer

    def _unlisted(self, module: nn.Module, present: int) -> HeadLayer:
        name = self.names.get(id(module))
        if name is None:
            raise ValueError(f"{type(module).__name__} is no part of {type(self.model).__name__} that is observed.")
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
    """Scores of some rows, `(sentences, heads, rows, keys)`, at least in single precision."""
    dtype = key.dtype
    query, key = query[sentences, :, rows].to(dtype), key[sentences]
    groups = query.shape[1] // key.shape[1]
    # Query heads that share a key are side by side.
    query = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3) * scaling
    scores = (query @ key.mT).unflatten(2, (groups, -1)).flatten(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    lowest = torch.finfo(dtype).min
    for bias in biases:
        bias = _part(bias, sentences, rows, scores.shape[-1])
        if bias.dtype == torch.bool:
            # Adding is faster than filling; half as low, so that the sum is finite.
            scores += torch.zeros_like(bias, dtype=dtype).masked_fill_(~bias, lowest / 2)
        else:
            scores.add_(bias.to(dtype)).clamp_(min=lowest)
    if causal:
        scores.masked_fill_(_later(scores.shape[-1], rows, scores.device), lowest)
    return scores


def _part(bias: torch.Tensor, sentences: slice, rows: slice, keys: int) -> torch.Tensor:
    """Of a mask for all scores, that for some; dimensions of size one stand for all, and keep to it."""
    if bias.dim() != 4:
        raise ValueError(f"masks of shape {tuple(bias.shape)} are not known; choose attn_implementation='sdpa'.")
    bias = bias[sentences if bias.shape[0] > 1 else slice(None)]
    return bias[:, :, rows if bias.shape[2] > 1 else slice(None), :keys]


def _later(keys: int, rows: slice, device: torch.device) -> torch.Tensor:
    """Which places come after that of each row, `(rows, keys)`."""
    places = torch.arange(keys, device=device)
    return places > places[rows, None]


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension."""
    keys = scores.shape[-1]
    if keys < VECTOR:  # ten times as slow there
        scores = F.pad(scores, (0, VECTOR - keys), value=-torch.inf)
    return scores.softmax(-1)[..., :keys]


def _blocks(batch: int, heads: int, rows: int, keys: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Sentences and rows of them that are few enough for a device: whole sentences, or else rows of one."""
    most = elements_on(device, MAX_WEIGHTS)
    sentences = max(1, most // (heads * rows * keys))
    height = rows if heads * rows * keys <= most else max(1, most // (heads * keys))
    for start in range(0, batch, sentences):
        for row in range(0, rows, height):
            yield slice(start, min(start + sentences, batch)), slice(row, min(row + height, rows))
