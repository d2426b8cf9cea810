# Licensed under the Apache License, Version 2.0.
"""The attention function of all headwise and all observed models.

    query, key, value ─▶ guidance: loss term from query and key, without the attention matrix
                      ─▶ the kernel that the user chose: sdpa, flash, flex or eager, unchanged;
                         or Gaussian weights, where attention is hard-coded
                      ─▶ observers: read query, key and mask
                      ─▶ gates: each head's output times its gate

A forward pass sends its requested outputs to the attention modules as the keyword `headwise`, a [`HeadwiseCall`] that
exists during the pass only. Nothing is stored on modules, and `model.config` does not change: attention modules read
the registered name of this function from an [`AttentionConfigView`]. In a stock model, the configuration names
`headwise|KERNEL`; observers are the attribute `observers` of its attention modules.
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


PLAIN_KERNELS = ("eager", "sdpa", "flex_attention")  # kernels of Transformers, which do not read `module.config`
PREFIX = "headwise|"  # of the registered name of this function over a kernel


class AttentionConfigView:
    """View of a model's configuration with another attention function.

    Args:
        config (`PreTrainedConfig`): The configuration; the view never changes it, and follows its changes.
    """

    def __init__(self, config: Any):
        self._config = config

    _attn_implementation = f"headwise:{__name__}"

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look up special methods before `_config` is set.
        if name == "_config" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._config, name)

    def __reduce__(self):
        return type(self), (self._config,)


class _KernelModule:
    """View of an attention module with the model's configuration, for kernels that read `module.config`."""

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
    raise ValueError(f"{type(module).__name__} has no eager attention function; choose another attn_implementation.")


def _additive_mask(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Converts the mask of an `sdpa` call to the additive mask of eager attention."""
    if attention_mask is None and module.is_causal and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attention_mask is None or attention_mask.dtype != torch.bool:
        return attention_mask
    return torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(
        ~attention_mask, torch.finfo(query.dtype).min
    )


def register_over_kernel(prefix: str, kernel: str, function: Callable) -> str:
    """Registers an attention function that wraps a kernel and reads its masks.

    Args:
        prefix (`str`): Name of the function, ending with `|`.
        kernel (`str`): Name of the kernel.
        function (callable): The function.

    Returns:
        `str`: the registered name, such as Transformers' `paged|eager`.
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
    """Calls a kernel; returns its output and, if it computes them, its attention weights."""
    if kwargs.get("output_attentions") and name == "sdpa":
        # This kernel returns no weights: stock models then return an empty tuple.
        name, attention_mask = "eager", _additive_mask(module, query, key, attention_mask)
    kernel = _eager_kernel(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
    # Kernels of other libraries read the name of the implementation from `module.config`.
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
    """Computes hard-coded attention with the masks of the kernel in the configuration."""
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
    """Computes attention with the model's kernel, and adds guidance, observers and gates.

    Args:
        module (`nn.Module`): The attention module. In a headwise model it has a `head_site`, and its `config` is an
            [`AttentionConfigView`]. Its `observers`, if any, are called with module, query, key and mask, and with
            `value` and the keywords of the kernel.
        query, key, value (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): Projected hidden states.
        attention_mask (`torch.Tensor`, *optional*): Mask in the format of the kernel.
        headwise (`HeadwiseCall`, *optional*): Requested outputs. Gates (`module.gate`) act without it, too.
        kernel (`str`, *optional*): Name of the kernel; defaults to the one in the configuration.
        kwargs: Keywords of the kernel; `scaling`, the factor of the scores, defaults to `head_dim ** -0.5`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor | None]`: the output of shape `(batch, length, heads, head_dim)` and the
        attention weights, if the kernel returns them. With `output_attentions=True`, `sdpa` is replaced by the eager
        function.
    """
    config = getattr(module, "config", None)
    config = getattr(config, "_config", config)
    if headwise is None and "carries_call" in vars(module):
        headwise = carried_call()
    if headwise is not None:
        query, key = headwise.guide(module.head_site, query, key, value, kwargs)
    # `install_headwise_attention` sets these attributes to None, since looking up missing ones is slow.
    if getattr(module, "hard_coded", None) is not None:
        output, weights = _hard_coded_kernel(module, query, key, value, attention_mask, config, **kwargs)
    else:
        name = kernel or (attention_kernel(config) or "eager").removeprefix(PREFIX)
        if name == "sdpa" and not kwargs.get("output_attentions"):
            # The common case; `_call_kernel` would slow down small models.
            kernel_function = ALL_ATTENTION_FUNCTIONS[name]
            output, weights = kernel_function(module, query, key, value, attention_mask, **kwargs)
        else:
            output, weights = _call_kernel(module, query, key, value, attention_mask, name, config, **kwargs)
        for observer in vars(module).get("observers", ()):
            observer(module, query, key, attention_mask, value=value, **kwargs)
    gate = getattr(module, "gate", None)
    if gate is not None:
        noise = None if headwise is None else headwise.gate_noise.get(module.head_site)
        output = output * gate(noise).to(output.dtype)[:, None]
    return output, weights


# ---- Attention modules that do not pass their keywords to the attention function, or do not call it ----

_carried: ContextVar[HeadwiseCall | None] = ContextVar("headwise_call", default=None)


@torch.compiler.disable
def carried_call() -> HeadwiseCall | None:
    """The call that the context carries, see [`carried`]."""
    return _carried.get()


@contextmanager
def carried(call: HeadwiseCall) -> Iterator[None]:
    """Context in which attention modules read a call that their layers do not pass on."""
    token = _carried.set(call)
    try:
        yield
    finally:
        _carried.reset(token)


@torch.compiler.disable
def _gate_inputs(module: nn.Module, output: nn.Module, args: tuple) -> tuple | None:
    """Pre-hook of the output projection: applies gates where a module does not call the attention function."""
    call, noise = _carried.get(), None
    if call is not None:
        call.reached[module.head_site] = True
        noise = call.gate_noise.get(module.head_site)
    if module.gate is None:
        return None
    factors = module.gate(noise).to(args[0].dtype)
    return (args[0].unflatten(-1, (len(factors), -1)) * factors[:, None]).flatten(-2), *args[1:]


@cache
def _passes_keywords(attention_class: type[nn.Module]) -> bool:
    """Whether the forward pass of an attention class passes its keywords to the attention function."""
    try:
        source = inspect.getsource(attention_class.forward)
    except (OSError, TypeError):
        return True
    return "**kwargs" in source.rpartition("attention_interface(")[2]


def _carry_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    _carried.set(kwargs.get("headwise"))


def _drop_call(module: nn.Module, args: tuple, output: Any) -> None:
    _carried.set(None)


AttentionInterface.register(attention_kernel(AttentionConfigView), headwise_attention)


def headwise_over(kernel: str) -> str:
    """Registers [`headwise_attention`] over a kernel for stock models; returns its name."""
    kernel = kernel.removeprefix(PREFIX)
    return register_over_kernel(PREFIX, kernel, partial(headwise_attention, kernel=kernel))


def install_headwise_attention(layers: Iterable[HeadLayer]) -> None:
    """Makes attention modules call [`headwise_attention`], whatever kernel the configuration names, also later.

    Args:
        layers (iterable of [`HeadLayer`]): Attention modules. Those that call a registered function get an
            [`AttentionConfigView`] as `module.config`, unless they have one; the others get a hook at the output
            projection that applies gates.
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
        if not _passes_keywords(type(module)) and "carries_call" not in vars(module):
            module.carries_call = True
            module.register_forward_pre_hook(_carry_call, with_kwargs=True)
            module.register_forward_hook(_drop_call, always_call=True)
        if not isinstance(module.config, AttentionConfigView):
            module.config = AttentionConfigView(module.config)
