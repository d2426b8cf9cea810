# Licensed under the Apache License, Version 2.0.
"""Arguments of a headwise forward pass; keywords that would be ignored raise TypeError.

A stock forward pass accepts any keyword, so that a misspelt one is silently ignored. A headwise one accepts:

| keyword | read by |
|---|---|
| a named argument of the stock forward pass | the stock model |
| `OWN_ARGUMENTS` | the headwise model |
| a column of a target, `guidance_NAME` | the guidance loss, of models with `guidance["targets"]` |
| `MODEL_ARGUMENTS` | the layers of the stock model |
| any other of `TransformersKwargs` | the attention kernel, if it supports it |
| `shift_labels`, together with `labels` | the loss of a model that predicts the next token |
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import TransformersKwargs

from .compat import FlashAttentionKwargs, flash_attention_forward, kernel_name
from .guidance_settings import COLUMN_PREFIX
from .headwise_attention import PLAIN_KERNELS
from .headwise_call import OWN_ARGUMENTS
from .loss_terms import SHIFTED_LABELS


# Read by every stock model, though some do not name them in their signature.
MODEL_ARGUMENTS = ("return_dict", "past_key_values", "output_attentions", "output_hidden_states")
# Read by mixtures of experts.
FOREIGN_ARGUMENTS = ("output_router_logits",)


def kernel_arguments(keywords: Iterable[str]) -> tuple[str, ...]:
    """Keywords that Transformers passes from a forward pass to the attention kernel.

    They describe packed sentences and causal attention. Keywords that a later version of Transformers adds are
    included, and refused for kernels that are known not to read them.
    """
    return tuple(name for name in keywords if name not in (*OWN_ARGUMENTS, *MODEL_ARGUMENTS, *FOREIGN_ARGUMENTS))


KERNEL_ARGUMENTS = kernel_arguments(TransformersKwargs.__annotations__)
# Keywords of packed sentences, or of masking without an attention mask. `position_ids` also occur with padding.
PACKING_ARGUMENTS = tuple(name for name in KERNEL_ARGUMENTS if name != "position_ids")
# `eager` and `flex_attention` read none of them; `sdpa` reads `is_causal`, only without padding.
_FLASH_ARGUMENTS = (*FlashAttentionKwargs.__annotations__, "position_ids", "is_causal")


def reads(kernel: str, name: str) -> bool:
    """Whether a kernel reads one of `KERNEL_ARGUMENTS` in every batch; kernels of other libraries may read any.

    Args:
        kernel (`str`): Registered name of the kernel, as in `attn_implementation`.
        name (`str`): The argument.

    Example:
        >>> reads("sdpa", "cu_seq_lens_q"), reads("flash_attention_2", "cu_seq_lens_q")
        (False, True)
    """
    if kernel in PLAIN_KERNELS:
        return False
    # Flash attention from the Hub is also registered with this function.
    if ALL_ATTENTION_FUNCTIONS.get(kernel) is flash_attention_forward:
        return name in _FLASH_ARGUMENTS
    return True


def _keyword(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)


def headwise_forward(stock_forward: Callable) -> Callable:
    """Wraps a model's forward: adds the headwise arguments and raises TypeError for keywords that would be ignored.

    Args:
        stock_forward (callable): The method of the stock class. The wrapper passes it, and a dictionary of all
            arguments, to the model's `_forward`.
    """
    signature = inspect.signature(stock_forward)
    stock = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    named = [p for p in stock if p.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = [p for p in stock if p.kind is inspect.Parameter.VAR_KEYWORD]
    names = [p.name for p in named]
    allowed = {*names, *MODEL_ARGUMENTS, *OWN_ARGUMENTS}

    @wraps(stock_forward)
    def forward(self, *args, **kwargs):
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__}.forward takes {len(names)} positional arguments, got {len(args)}.")
        if twice := kwargs.keys() & set(names[: len(args)]):
            raise TypeError(f"{type(self).__name__}.forward got {twice.pop()!r} by position and by name.")
        if args:
            kwargs.update(zip(names, args))
        if "headwise" in kwargs:
            # The headwise body of a headwise model with a task head.
            return stock_forward(self, **kwargs)
        if not kwargs.keys() <= allowed:
            _check_keywords(self, kwargs, allowed, names)
        return self._forward(stock_forward, kwargs)

    own = [_keyword(name) for name in OWN_ARGUMENTS if name not in names]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[this, *named, *own, *rest])
    forward.is_headwise = True
    return forward


def _check_keywords(model: Any, given: Mapping[str, Any], allowed: set[str], names: list[str]) -> None:
    """Raises TypeError for keywords that neither the model nor its kernel reads."""
    kernel = kernel_name(model.config)
    for name, value in given.items():
        if name in allowed or (name in FOREIGN_ARGUMENTS and hasattr(model.config, name)):
            continue
        if name.startswith(COLUMN_PREFIX) and name in model.target_columns:
            continue
        if name == SHIFTED_LABELS and model.reads_shifted_labels:
            if value is not None and given.get("labels") is None:
                raise TypeError(
                    f"{type(model).__name__}.forward reads {name!r} only together with labels: pass labels, too."
                )
            continue
        if name not in KERNEL_ARGUMENTS:
            raise TypeError(
                f"{type(model).__name__}.forward has no argument {name!r}; it would be ignored. "
                f"Its arguments are {', '.join([*names, *OWN_ARGUMENTS, *sorted(model.target_columns)])}."
            )
        if value is not None and not reads(kernel, name):
            raise TypeError(
                f"{type(model).__name__}.forward takes {name!r} only for kernels that read it, such as flash "
                f"attention; {kernel!r} would ignore it, at least in batches with padding."
            )
