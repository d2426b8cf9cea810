# Licensed under the Apache License, Version 2.0.
"""Gates of feed-forward units: they multiply the input of the output projection, in a hook.

Feed-forward blocks take no keywords. Where attention modules call an attention function, their layers get the call of
a forward pass as the keyword `headwise`, also when gradient checkpointing recomputes them: a hook of the layer keeps
it as the attribute `unit_call` of the block while the layer runs. Other models carry it in a context, see
[`carried`].
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
    module = layer.module
    module.unit_gate, module.unit_site, module.unit_call = gate, layer.site, None
    by_interface = all(roles_of(one.module).by_interface for one in locate_heads(model))
    apply = _gate_units if by_interface else _gate_units_of_context
    hooks = [layer.output.register_forward_pre_hook(partial(apply, module))]
    if by_interface:
        modules = dict(model.named_modules())
        around = modules[layer_name(layer.name, modules)]
        hooks.append(around.register_forward_pre_hook(partial(_take_call, module), with_kwargs=True))
        hooks.append(around.register_forward_hook(partial(_drop_call, module), always_call=True))
    module.unit_hooks = tuple(hooks)


def remove_unit_gate(module: nn.Module) -> None:
    """Removes the gate of a feed-forward block, and its hooks."""
    for hook in module.unit_hooks:
        hook.remove()
    for name in ("unit_gate", "unit_site", "unit_call", "unit_hooks"):
        delattr(module, name)


def _take_call(block: nn.Module, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if block.unit_call is not kwargs.get("headwise"):
        block.unit_call = kwargs.get("headwise")


def _drop_call(block: nn.Module, layer: nn.Module, args: tuple, output: Any) -> None:
    if block.unit_call is not None:
        block.unit_call = None


def _gate_units(block: nn.Module, output: nn.Module, args: tuple) -> tuple:
    return _gated(block, block.unit_call, args)


@torch.compiler.disable
def _gate_units_of_context(block: nn.Module, output: nn.Module, args: tuple) -> tuple:
    return _gated(block, carried_call(), args)


def _gated(block: nn.Module, call: HeadwiseCall | None, args: tuple) -> tuple:
    noise = None
    if call is not None:
        call.reached_units[block.unit_site] = True
        noise = call.unit_noise.get(block.unit_site)
    factors = block.unit_gate(noise)
    return args[0] * factors.to(args[0].dtype), *args[1:]
