# Licensed under the Apache License, Version 2.0.
"""Views of a model: analyses change a view, never the model.

A view has a module for each module of the model, of the same class and with the same parameters, buffers and
attributes, so gradients reach the model's own weights. Hooks, training mode and the attention function in the
configuration belong to the view. Copies, pickles and other threads are therefore not affected by contexts.
"""

import copy
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import chain
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..models.compat import (
    MODULE_CHILDREN,
    MODULE_COMPILED_CALL,
    MODULE_HOOK_KINDS,
    MODULE_HOOKS,
    MODULE_PARAMETERS,
    MODULE_TENSORS,
    attention_kernel,
    compiled_model,
    is_fused_by_trl,
    passes_attention_interface,
    set_attention_kernel,
)
from ..models.head_roles import HeadLayer
from ..models.unit_roles import UnitLayer


_PLAIN = {bool, float, int, str, type(None), torch.Size, torch.Tensor, OrderedDict, set}  # types that hold no modules
_END = object()


class ModelView:
    """A view of a model or of one of its parts, prepared by all open contexts of this thread.

    Methods take modules of the model. They ignore modules that the view does not contain, so that a context on a model
    also applies to forward passes of its parts.

    Args:
        model (`nn.Module`): The model. Compiled modules run uncompiled.

    Attributes:
        root (`nn.Module`): The view's counterpart of `model`; call it in place of the model.
        observers (`list`): Functions that [`headwise_attention`] calls, one list for all modules of the view. They
            receive modules of the view; `module.viewed` is the module of the model.
    """

    def __init__(self, model: nn.Module):
        self.observers: list[Callable] = []
        # TorchScript modules have no attributes to copy.
        originals = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._members = {id(module): (module, object.__new__(type(module))) for module in originals}
        self._configurations: dict[int, tuple[PreTrainedConfig, PreTrainedConfig]] = {}
        for original, view in self._members.values():
            self._fill(original, view)
        self._seen = [list(_values(module)) for module in originals]
        self.root = self[model]
        for context in open_contexts():
            context.prepare(self)
        self._seen_configurations = [list(vars(config).values()) for config, _ in self._configurations.values()]

    def is_current(self) -> bool:
        """Whether the model has not changed since the view was created, except for the values of its weights."""
        modules = (_values(module) for module, _ in self._members.values())
        configurations = (vars(config).values() for config, _ in self._configurations.values())
        return all(map(_are_same, modules, self._seen)) and all(
            map(_are_same, configurations, self._seen_configurations)
        )

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._members

    def __getitem__(self, module: nn.Module) -> nn.Module:
        """The view's counterpart of a module of the model."""
        return self._members[id(module)][1]

    def _fill(self, original: nn.Module, view: nn.Module) -> None:
        state = {
            name: value if type(value) in _PLAIN or name in MODULE_TENSORS else self._in_view(value)
            for name, value in vars(original).items()
        }
        if "forward" in state and is_fused_by_trl(state["forward"]):
            del state["forward"]
        for name in MODULE_HOOKS:
            # The user's hooks receive the module of the model, not of the view.
            state[name] = OrderedDict((key, partial(_on, hook, original)) for key, hook in state[name].items())
        for name in MODULE_HOOK_KINDS:
            state[name] = state[name].copy()
        state |= {MODULE_COMPILED_CALL: None, "viewed": original, "observers": self.observers}
        vars(view).update(state)

    def _in_view(self, value: Any) -> Any:
        """An attribute of a module, with modules of the model replaced by those of the view."""
        kind = type(value)
        if isinstance(value, nn.Module):
            return self._members.get(id(value), (None, value))[1]
        if kind is MethodType and id(value.__self__) in self._members:
            return MethodType(value.__func__, self._in_view(value.__self__))
        if kind is partial:
            # Accelerate replaces `forward` by a partial.
            arguments, keywords = self._in_view(value.args), self._in_view(value.keywords)
            return partial(self._in_view(value.func), *arguments, **keywords)
        if kind is dict:
            mapped = {key: self._in_view(one) for key, one in value.items()}
            return mapped if any(mapped[key] is not one for key, one in value.items()) else value
        if kind in (list, tuple):
            several = [self._in_view(one) for one in value]
            return kind(several) if any(one is not other for one, other in zip(several, value)) else value
        return value

    def before(
        self,
        module: nn.Module,
        hook: Callable[[nn.Module, tuple, dict], tuple[tuple, dict] | None],
        first: bool = False,
    ) -> None:
        """Registers a function to be called before a module runs.

        Args:
            module (`nn.Module`): The module.
            hook (callable): Takes the module, its positional and its keyword arguments; may return replacements of
                both.
            first (`bool`): Whether it is called before all other hooks.
        """
        if module in self:
            self[module].register_forward_pre_hook(partial(_on, hook, module), prepend=first, with_kwargs=True)

    def after(self, module: nn.Module, hook: Callable[[nn.Module, tuple, Any], Any], always: bool = False) -> None:
        """Registers a function to be called after a module has run.

        Args:
            module (`nn.Module`): The module.
            hook (callable): Takes the module, its positional arguments and its output; may return a replacement of
                the output.
            always (`bool`): Whether it is also called after an exception, with `None` as output.
        """
        if module in self:
            self[module].register_forward_hook(partial(_on, hook, module), always_call=always)

    def edit_outputs(self, layer: HeadLayer, edit: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Registers a function that reads or replaces the head outputs of a layer, before the output projection.

        Args:
            layer (`HeadLayer`): The layer; without heads, nothing happens.
            edit (callable): Takes the outputs of the remaining heads, `(batch, length, heads, head_dim)`, each time
                the layer runs; may return replacements.
        """

        def before_projection(module: nn.Module, inputs: tuple, keywords: dict) -> tuple | None:
            edited = edit(inputs[0].unflatten(-1, (len(layer.heads), layer.head_dim)))
            return None if edited is None else ((edited.flatten(-2), *inputs[1:]), keywords)

        if layer.heads:
            self.before(layer.output, before_projection)

    def edit_units(self, layer: UnitLayer, edit: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Registers a function that reads or replaces the activations of the units of a feed-forward block, before the
        output projection.

        Args:
            layer (`UnitLayer`): The block; without units, nothing happens.
            edit (callable): Takes the activations of the remaining units, `(batch, length, units)`, each time the
                block runs; may return replacements.

        Raises:
            ValueError: in the forward pass, if the block processes a sentence in chunks.
        """
        shape: list[int] = []

        def before_block(module: nn.Module, inputs: tuple, keywords: dict) -> None:
            states = inputs[0] if inputs else keywords["hidden_states"]
            shape[:] = states.shape[:-1]

        def before_projection(module: nn.Module, inputs: tuple, keywords: dict) -> tuple | None:
            units = inputs[0]
            if units.shape[:-1].numel() != math.prod(shape):
                raise ValueError(
                    f"{layer.name} processes its inputs in chunks; set config.chunk_size_feed_forward to 0."
                )
            # OPT has one dimension for sentences and tokens.
            edited = edit(units.reshape(*shape, units.shape[-1]))
            return None if edited is None else ((edited.reshape(units.shape), *inputs[1:]), keywords)

        if layer.units:
            self.before(layer.module, before_block)
            self.before(layer.output, before_projection)

    def evaluate(self, model: nn.Module) -> None:
        """Sets the view of a model, or of a part of it, to evaluation mode."""
        for module in model.modules():
            if module in self:
                self[module].training = False

    def detach_parameters(self) -> None:
        """Detaches the view's parameters: they share memory with the model, and do not require gradients."""
        for _, view in self._members.values():
            weights = vars(view)[MODULE_PARAMETERS].items()
            vars(view)[MODULE_PARAMETERS] = {
                name: None if weight is None else weight.detach() for name, weight in weights
            }

    def name_attention(self, model: nn.Module, name: Callable[[PreTrainedModel, str], str]) -> None:
        """Changes the registered attention functions of a model.

        Args:
            model (`nn.Module`): The model; parts without the attention interface are not changed.
            name (callable): Returns the name of the function, given a part of the model and the current name.
        """
        parts = [part for part in parts_of(model) if part in self]
        if parts:
            self._separate_configurations()
        before = [attention_kernel(self[part].config) or "eager" for part in parts]
        # Setting the name also sets it in sub-configurations, whose models come later in this loop.
        for part, old in zip(parts, before):
            set_attention_kernel(self[part].config, name(part, old) if passes_attention_interface(type(part)) else old)
        known = {id(one) for part in parts for one in _with_parts(self[part].config)}
        for part, own in self._other_configurations(parts, known):
            if passes_attention_interface(type(part)):
                set_attention_kernel(own, name(part, attention_kernel(own) or "eager"))

    def _other_configurations(
        self, parts: Sequence[PreTrainedModel], known: set[int]
    ) -> list[tuple[PreTrainedModel, PreTrainedConfig]]:
        """Configurations that are not those of a part, such as those of layers that were added as copies."""
        # The innermost part of each module comes last.
        part_of = {module: part for part in parts for module in part.modules()}
        found = {}
        for module, part in part_of.items():
            own = vars(self[module]).get("config")
            if isinstance(own, PreTrainedConfig) and id(own) not in known:
                found[id(own)] = part, own
        return list(found.values())

    def _separate_configurations(self) -> None:
        for module, view in self._members.values():
            for name, value in vars(module).items():
                if type(value) in _PLAIN:
                    continue
                if isinstance(value, PreTrainedConfig):
                    vars(view)[name] = self._configuration(value)
                elif isinstance(given := getattr(value, "_config", None), PreTrainedConfig):
                    # Attention modules of headwise models hold a wrapper of their configuration.
                    vars(view)[name] = type(value)(self._configuration(given))

    def _configuration(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The view's copy of a configuration, one for all modules that share it."""
        if id(config) not in self._configurations:
            own = copy.copy(config)
            self._configurations[id(config)] = config, own
            for name in config.sub_configs:
                if isinstance(inner := getattr(config, name, None), PreTrainedConfig):
                    setattr(own, name, self._configuration(inner))
        return self._configurations[id(config)][1]


def _on(hook: Callable, module: nn.Module, view: nn.Module, *arguments: Any) -> Any:
    return hook(module, *arguments)


def _values(module: nn.Module) -> Iterable[Any]:
    """Attributes, children and hooks of a module."""
    state = vars(module)
    return chain(state.values(), state[MODULE_CHILDREN].values(), *(state[name].values() for name in MODULE_HOOKS))


def _are_same(values: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(map(is_, chain(values, [_END]), chain(others, [_END])))


def _with_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and its sub-configurations."""
    yield config
    for name in config.sub_configs:
        if isinstance(inner := getattr(config, name, None), PreTrainedConfig):
            yield from _with_parts(inner)


def parts_of(model: nn.Module) -> list[PreTrainedModel]:
    """The `PreTrainedModel`s among a model and its submodules."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def evaluation_view(model: nn.Module) -> ModelView:
    """A view of a model in evaluation mode; call its `root`. The mode of the model is not changed."""
    view = ModelView(model)
    view.evaluate(model)
    return view


@dataclass(frozen=True, eq=False)
class _Context:
    """An open context on a model.

    Args:
        modules (`dict[int, nn.Module]`): Modules of the model by `id`.
        prepare (callable): Takes each [`ModelView`] of the model, of a part of it, or of a model that contains it.
        views (`dict[int, ModelView]`): Views that have run while the context was the innermost of its thread, by `id`
            of the module that they replace.
    """

    modules: dict[int, nn.Module]
    prepare: Callable[[ModelView], None]
    views: dict[int, ModelView] = field(default_factory=dict)

    def view(self, module: nn.Module) -> nn.Module:
        """The counterpart of a module within this context and the contexts around it."""
        view = self.views.get(id(module))
        if view is None or not view.is_current():
            view = self.views[id(module)] = ModelView(module)
        return view.root


_thread = threading.local()
_lock = threading.Lock()
_num_open = 0  # over all threads
_ENTRIES = ((nn.Module, "__call__"), (GenerationMixin, "generate"))
_stock: dict[tuple[type, str], Callable] = {}  # the original functions


def open_contexts() -> list[_Context]:
    """Contexts of this thread, the outermost first."""
    return getattr(_thread, "contexts", [])


def generates() -> bool:
    """Whether this thread is in a call of `generate()` of a view."""
    return getattr(_thread, "generates", False)


@contextmanager
def prepared_views(model: nn.Module, prepare: Callable[[ModelView], None]) -> Iterator[None]:
    """Context in which calls of a model and of its parts, and of their `generate()`, run views in the current thread.

    Other threads, copies and pickles are not affected.

    Args:
        model (`nn.Module`): The model.
        prepare (callable): Takes each [`ModelView`] before its first run.
    """
    context = _Context({id(module): module for module in model.modules()}, prepare)
    contexts = _thread.contexts = open_contexts()
    _count_open(1)
    contexts.append(context)
    try:
        yield
    finally:
        contexts.remove(context)
        for other in (context, *contexts):
            other.views.clear()
        _count_open(-1)


def _count_open(change: int) -> None:
    """Replaces `nn.Module.__call__` and `generate` while any thread has an open context."""
    global _num_open
    with _lock:
        before, _num_open = _num_open, _num_open + change
        for entry in _ENTRIES:
            if before == 0:
                _stock[entry] = getattr(*entry)
                setattr(*entry, _redirected(_stock[entry]))
            elif _num_open == 0:
                setattr(*entry, _stock[entry])


def _redirected(stock: Callable) -> Callable:
    @wraps(stock)
    def entry(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return stock(self, *args, **kwargs)
        # A compiled model is treated as its original.
        contexts = open_contexts()
        model = compiled_model(self) if contexts else self
        if not any(id(model) in context.modules for context in contexts):
            return stock(self, *args, **kwargs)
        before, _thread.generates = generates(), generates() or stock.__name__ == "generate"
        try:
            return stock(contexts[-1].view(model), *args, **kwargs)
        finally:
            _thread.generates = before

    return entry
