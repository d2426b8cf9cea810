# Licensed under the Apache License, Version 2.0.
"""Gates of feed-forward units: they multiply the input of the output projection, in a hook.

Feed-forward blocks take no keywords, but attention modules that call an attention function get the call of a forward
pass as the keyword `headwise`, also when gradient checkpointing recomputes a layer. They run first in each layer: a
hook of theirs keeps the random numbers as the attribute `unit_noise` of the feed-forward block, while the layer runs.
Other models carry the call in a context, see [`carried`].
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from .hard_concrete import HardConcreteGate
from .head_roles import layer_name, locate_heads, roles_of
from .headwise_attention import carried_call
from .headwise_call import HeadwiseCall
from .unit_roles import UnitLayer


def install_unit_gate(model: nn.Module, layer: UnitLayer, gate: HardConcreteGate) -> None:
    """Makes a gate the attribute `unit_gate` of a feed-forward block, and multiplies its units by it."""
    block, layers = layer.module, locate_heads(model)
    block.unit_gate, block.unit_site, block.unit_noise = gate, layer.site, None
    by_interface = all(roles_of(one.module).by_interface for one in layers)
    apply = _gate_units if by_interface else _gate_units_of_context
    hooks = [layer.output.register_forward_pre_hook(partial(apply, block))]
    if by_interface:
        attention = next(one.module for one in layers if one.site == layer.site)
        hooks.append(attention.register_forward_pre_hook(partial(_take_noise, block), with_kwargs=True))
        around = model.get_submodule(layer_name(layer.name, dict(model.named_modules())))
        hooks.append(around.register_forward_hook(partial(_drop_noise, block), always_call=True))
    block.unit_hooks = tuple(hooks)


def remove_unit_gate(block: nn.Module) -> None:
    """Removes the gate of a feed-forward block, and its hooks."""
    for hook in block.unit_hooks:
        hook.remove()
    for name in ("unit_gate", "unit_site", "unit_noise", "unit_hooks"):
        delattr(block, name)


def _noise_of(block: nn.Module, call: HeadwiseCall | None) -> torch.Tensor | None:
    if call is None:
        return None
    call.reached_units[block.unit_site] = True
    return call.unit_noise.get(block.unit_site)


def _take_noise(block: nn.Module, attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    block.unit_noise = _noise_of(block, kwargs.get("headwise"))


def _drop_noise(block: nn.Module, layer: nn.Module, args: tuple, output: Any) -> None:
    block.unit_noise = None


def _gate_units(block: nn.Module, output: nn.Module, args: tuple) -> tuple:
    return _gated(block, block.unit_noise, args)


@torch.compiler.disable
def _gate_units_of_context(block: nn.Module, output: nn.Module, args: tuple) -> tuple:
    return _gated(block, _noise_of(block, carried_call()), args)


def _gated(block: nn.Module, noise: torch.Tensor | None, args: tuple) -> tuple:
    """Units times their gates, and the other arguments of the output projection."""
    if not block.unit_gate.num_elements:
        return args
    factors = block.unit_gate(noise)
    return args[0] * factors.to(args[0].dtype), *args[1:]
