# Licensed under the Apache License, Version 2.0.
"""The one function through which every attention call passes, of headwise models and of those that are observed.

    query, key, value ─▶ guidance: loss term from query and key, without the attention matrix
                      ─▶ the kernel that the user chose: sdpa, flash, flex or eager, unchanged;
                         or Gaussian weights, where attention is hard-coded
                      ─▶ observers: see query, key and mask
                      ─▶ gates: each head's output times its gate

What a forward pass wants is in a [`HeadwiseCall`] that travels down as the keyword `headwise`, and is gone when the
pass ends. Nothing is stored on modules, and `model.config` is left alone: only the attention modules see, through an
[`AttentionConfigView`], the name under which this function is registered. A stock model has it called by a
configuration that names `headwise|KERNEL`; observers are the attribute `observers` of its attention modules.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .compat import attention_kernel, kernel_name
from .head_roles import HeadLayer, roles_of
from .headwise_call import HeadwiseCall


PLAIN_KERNELS = ("eager", "sdpa", "flex_attention")  # of Transformers itself: they read no names off the module
PREFIX = "headwise|"  # of the name of this function where it stands for a kernel


class AttentionConfigView:
    """A model's configuration, but for the name of the attention function.

    Args:
        config (`PreTrainedConfig`): The configuration, which stays as it is and may be changed by its owner.
    """

    def __init__(self, config: Any):
        self._config = config

    _attn_implementation = f"headwise:{__name__}"

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for special methods on an object that is not set up yet.
        if name == "_config" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._config, name)

    def __reduce__(self):
        return type(self), (self._config,)


class _KernelModule:
    """An `attention_module` as a kernel that reads `module.config` expects it: with the real configuration."""

    def __init__(self, module: nn.Module, config: Any):
        self.attention_module = module
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attention_module, name)


def _eager_kernel(module: nn.Module) -> Callable:
    for cls in type(module).__mro__:
        kernel = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if kernel is not None:
            return kernel
    raise ValueError(
        f"{type(module).__name__} comes without an eager attention function; choose another attn_implementation."
    )


def _additive_mask(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """The mask of an `sdpa` call as the eager functions expect it: added to the scores."""
    if attention_mask is None and module.is_causal and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attention_mask is None or attention_mask.dtype != torch.bool:
        return attention_mask
    return torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(
        ~attention_mask, torch.finfo(query.dtype).min
    )


def register_over_kernel(prefix: str, kernel: str, function: Callable) -> str:
    """Registers an attention function that stands for a kernel and takes its masks.

    Args:
        prefix (`str`): What the function does, with `|` at its end.
        kernel (`str`): The kernel.
        function (callable): The function, the same one for a prefix and a kernel each time.

    Returns:
        `str`: its name, such as `paged|eager` among those of Transformers.
    """
    name = prefix + kernel
    AttentionInterface.register(name, function)
    if (mask_function := ALL_MASK_ATTENTION_FUNCTIONS.get(kernel)) is not None:
        AttentionMaskInterface.register(name, mask_function)
    return name


def _call_kernel(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    name: str,
    config: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, if there are any, the attention weights of a kernel of Transformers."""
    if kwargs.get("output_attentions") and name == "sdpa":
        # This kernel returns no weights; asked for them, the stock models return an empty tuple.
        name, attention_mask = "eager", _additive_mask(module, query, key, attention_mask)
    kernel = _eager_kernel(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
    # Kernels of other libraries look up the implementation by name in `module.config`.
    kernel_module = module if name in PLAIN_KERNELS else _KernelModule(module, config)
    return kernel(kernel_module, query, key, value, attention_mask, **kwargs)


def _hard_coded_kernel(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    config: Any,
    dropout: float = 0.0,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gaussian weights in place of those that query and key would give, under masks of the kernel that is named."""
    name = kernel_name(config)
    if name not in ("eager", "sdpa"):
        raise ValueError(
            f"hard-coded attention ({module.head_site}) reads the masks of sdpa and eager, not those of {name!r}; "
            "call model.set_attn_implementation('sdpa')."
        )
    output, weights = module.hard_coded(value, attention_mask, query.shape[2], module.is_causal, dropout)
    return output, weights if output_attentions or name == "eager" else None


def headwise_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    headwise: HeadwiseCall | None = None,
    kernel: str | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention by the kernel that the model chooses, and what the forward pass asks of each head.

    Args:
        module (`nn.Module`): The attention module. Of a headwise model its `config` is an [`AttentionConfigView`],
            and its `head_site` tells where it is. Its `observers`, if it has any, are called with module, query, key
            and mask, and with the keywords of the kernel.
        query, key, value (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): Projected hidden states.
        attention_mask (`torch.Tensor`, *optional*): As the kernel expects it.
        headwise (`HeadwiseCall`, *optional*): What is requested. Gates act without it, too: `module.gate` is one.
        kernel (`str`, *optional*): Name of the kernel; what the configuration of a headwise model names by default.
        kwargs: For the kernel; `scaling`, the factor of the scores, is `head_dim ** -0.5` if not given.

    Returns:
        `tuple[torch.Tensor, torch.Tensor | None]`: the output of shape `(batch, length, heads, head_dim)` and the
        attention weights, if the kernel returns any, or is `sdpa` and `output_attentions` is asked for: that call is
        then computed by the eager function.
    """
    config = getattr(module, "config", None)
    config = getattr(config, "_config", config)
    if headwise is None and "carries_call" in vars(module):
        headwise = _carried_call()
    if headwise is not None:
        query, key = headwise.guide(module.head_site, query, key, kwargs)
    # Modules search long for attributes that they lack: `install_headwise_attention` gives these to headwise ones.
    if getattr(module, "hard_coded", None) is not None:
        output, weights = _hard_coded_kernel(module, query, key, value, attention_mask, config, **kwargs)
    else:
        name = kernel or (attention_kernel(config) or "eager").removeprefix(PREFIX)
        if name == "sdpa" and not kwargs.get("output_attentions"):
            # Nearly all calls; the detour by `_call_kernel` would be noticed in small models.
            kernel_function = ALL_ATTENTION_FUNCTIONS[name]
            output, weights = kernel_function(module, query, key, value, attention_mask, **kwargs)
        else:
            output, weights = _call_kernel(module, query, key, value, attention_mask, name, config, **kwargs)
        for observer in vars(module).get("observers", ()):
            observer(module, query, key, attention_mask, **kwargs)
    gate = getattr(module, "gate", None)
    if gate is not None:
        noise = None if headwise is None else headwise.gate_noise.get(module.head_site)
        output = output * gate(noise).to(output.dtype)[:, None]
    return output, weights


# ---- Attention modules that do not hand their keywords down to the attention function, or do not call it ----

_carried: ContextVar[HeadwiseCall | None] = ContextVar("headwise_call", default=None)


@torch.compiler.disable
def _carried_call() -> HeadwiseCall | None:
    return _carried.get()


@contextmanager
def carried(call: HeadwiseCall) -> Iterator[None]:
    """Has a call reach the attention modules of a model whose layers take no keywords."""
    token = _carried.set(call)
    try:
        yield
    finally:
        _carried.reset(token)


@torch.compiler.disable
def _gate_inputs(module: nn.Module, output: nn.Module, args: tuple) -> tuple | None:
    """Forward pre-hook of the output projection of an attention module that computes attention by itself."""
    call, noise = _carried.get(), None
    if call is not None:
        call.reached[module.head_site] = True
        noise = call.gate_noise.get(module.head_site)
    if module.gate is None:
        return None
    factors = module.gate(noise).to(args[0].dtype)
    return (args[0].unflatten(-1, (len(factors), -1)) * factors[:, None]).flatten(-2), *args[1:]


@cache
def _hands_down_keywords(attention_class: type[nn.Module]) -> bool:
    """Whether the forward pass of an attention class calls the attention function with its own keywords."""
    try:
        source = inspect.getsource(attention_class.forward)
    except (OSError, TypeError):
        return True
    return "**kwargs" in source.rpartition("attention_interface(")[2]


def _carry_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    _carried.set(kwargs.get("headwise"))


def _put_down_call(module: nn.Module, args: tuple, output: Any) -> None:
    _carried.set(None)


AttentionInterface.register(attention_kernel(AttentionConfigView), headwise_attention)


def headwise_over(kernel: str) -> str:
    """Name that a configuration gives to [`headwise_attention`] over a kernel, for the attention of stock models."""
    kernel = kernel.removeprefix(PREFIX)
    return register_over_kernel(PREFIX, kernel, partial(headwise_attention, kernel=kernel))


def install_headwise_attention(layers: Iterable[HeadLayer]) -> None:
    """Let attention modules call [`headwise_attention`], whatever kernel their configuration names, now or later.

    Args:
        layers (iterable of [`HeadLayer`]): Attention modules that read the implementation's name from
            `module.config`; those that already do call it keep their view. Where attention is not computed by a
            registered function, the output projection gets a hook, in which gates act.
    """
    for layer in layers:
        module = layer.module
        is_new = "head_site" not in vars(module)
        module.head_site = layer.site
        for name in ("gate", "hard_coded"):
            if getattr(module, name, None) is None:
                setattr(module, name, None)
        if not roles_of(module).by_interface:
            if is_new:
                layer.output.register_forward_pre_hook(partial(_gate_inputs, module))
            continue
        if not _hands_down_keywords(type(module)) and "carries_call" not in vars(module):
            module.carries_call = True
            module.register_forward_pre_hook(_carry_call, with_kwargs=True)
            module.register_forward_hook(_put_down_call, always_call=True)
        if not isinstance(module.config, AttentionConfigView):
            module.config = AttentionConfigView(module.config)
