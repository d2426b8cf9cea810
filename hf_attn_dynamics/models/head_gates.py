# Licensed under the Apache License, Version 2.0.
"""Gates of a model: installing them, their penalty, and pruning by them; see [`HardConcreteGate`].

A gate multiplies the output of its head before the output projection, or the activation of its feed-forward unit.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from .compat import keep_in_single_precision
from .gated_units import install_unit_gate, remove_unit_gate
from .hard_concrete import LOCATIONS, HardConcreteGate
from .head_pruning import prune_heads
from .head_roles import locate_heads
from .head_settings import GateSettings
from .head_sites import config_value, kinds_of
from .projections import check_outputs
from .prunable_models import Model, separate_configuration
from .unit_pruning import check_units, prune_units
from .unit_roles import locate_units


logger = logging.get_logger(__name__)


def install_gates(model: PreTrainedModel, settings: dict[str, GateSettings]) -> None:
    """Adds gates to the attention modules and feed-forward blocks of the given kinds of sites that have none.

    Args:
        model (`PreTrainedModel`): A headwise model.
        settings (`dict[str, GateSettings]`): Settings by kind of site.

    Raises:
        ValueError: if feed-forward blocks are to get gates, but are unknown or mixtures of experts. The model is then
            unchanged.
    """
    of_units = {kind: own for kind, own in settings.items() if own.gates_feed_forward and kind != "cross"}
    blocks = locate_units(model) if of_units else []
    for layer in locate_heads(model):
        own = settings.get(layer.site.kind)
        if own is not None and own.gates_attention and getattr(layer.module, "gate", None) is None:
            size = 1 if own.unit == "head" else layer.group_size
            gate = HardConcreteGate(layer.num_heads, own, size, "blocks" in own.parts, "heads" in own.parts)
            layer.module.gate = _placed(gate, layer.module, layer.heads, model)
    for layer in blocks:
        if layer.site.kind in of_units and getattr(layer.module, "unit_gate", None) is None:
            own = of_units[layer.site.kind]
            gate = HardConcreteGate(layer.num_units, own, 1, "blocks" in own.parts, "units" in own.parts)
            install_unit_gate(model, layer, _placed(gate, layer.module, layer.units, model))
    if settings:
        # FSDP2 therefore needs gates in another group than weights in half precision.
        with_blocks = any("blocks" in own.parts for own in settings.values())
        keep_in_single_precision(model, LOCATIONS if with_blocks else LOCATIONS[:1])


def _placed(gate: HardConcreteGate, owner: nn.Module, kept: list[int], model: nn.Module) -> HardConcreteGate:
    """The gate for the remaining elements of a module, on its device and in its mode."""
    if len(kept) < gate.num_elements:
        gate.keep(kept)
    reference = next(owner.parameters(), next(model.parameters()))
    return gate.train(owner.training).to(reference.device)


def gates_of(model: Any) -> list[HardConcreteGate]:
    """All gates of a model in the order of their random numbers: of heads, then of units; empty without gates."""
    if not hasattr(model, "head_gates"):
        return []
    return [*model.head_gates().values(), *model.unit_gates().values()]


def gate_penalty(gates: list[HardConcreteGate]) -> torch.Tensor:
    """Gate penalty: `Σ P(gate ≠ 0)` over the heads and units of all gated modules (equation 9).

    Args:
        gates (`list[HardConcreteGate]`): All gates of a model.

    Returns:
        `torch.Tensor`: a differentiable scalar, float32 (float64 in double precision). Terms of gates with
        `penalty="module_mean"` are divided by the number of gated modules.
    """
    terms = [gate.expected_open() / (len(gates) if gate.settings.penalty == "module_mean" else 1) for gate in gates]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


@torch.no_grad()
def prune_closed_gates(model: Model) -> Model:
    """Removes the heads and units whose gates are closed outside training, then all gates; outputs do not change.

    Blocks with a closed gate lose all their heads or units. Fractional gates (`evaluation="fractional"`) are
    multiplied into the output projection, as are closed gates of query heads that share a key/value head with an open
    one (`unit="head"`): these heads remain and output zero.

    Args:
        model (`PreTrainedModel`): A headwise model with gates; changed in place. Its configuration is copied; if it is
            part of another model, assign the copy there, see [`prune_heads`].

    Returns:
        `PreTrainedModel`: the same model, without gates.

    Raises:
        ValueError: if the model has no gates, or an output projection to be scaled is adapted, quantized or shared;
            see also [`prune_heads`] and [`prune_units`]. The model is then unchanged.

    Example:
        >>> from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertModel, prune_closed_gates
        >>> model = HeadwiseBertModel(HeadwiseBertConfig(num_hidden_layers=2, gates={}))
        >>> model.head_gates()["encoder", 1].log_alpha.data[3] = -1.0
        >>> prune_closed_gates(model).config.pruned_heads
        {1: [3]}
    """
    if not gates_of(model):
        raise ValueError(f"prune_closed_gates needs a model with gates, but {type(model).__name__} has none.")
    unit_gates = model.unit_gates()
    blocks = {layer.site: layer for layer in locate_units(model)} if unit_gates else {}
    factors = {site: dict(zip(blocks[site].units, gate.settled().tolist())) for site, gate in unit_gates.items()}
    closed = {site: [unit for unit, factor in values.items() if not factor] for site, values in factors.items()}
    closed = {site: units for site, units in closed.items() if units}
    left = {site: {unit: one for unit, one in values.items() if one} for site, values in factors.items()}
    scaled = [site for site, values in left.items() if any(one != 1 for one in values.values())]
    check_units(model, list(blocks.values()), {*closed, *scaled})
    _prune_heads(model)
    if closed:
        prune_units(model, config_value(closed, kinds_of(blocks)))
    for site in scaled:
        _scale(blocks[site].output, list(left[site].values()))
    remove_gates(model)
    return model


def _prune_heads(model: PreTrainedModel) -> None:
    """Removes the heads with closed gates, and multiplies other gates into output projections."""
    layers = {layer.site: layer for layer in locate_heads(model)}
    factors = {
        site: dict(zip(layers[site].heads, gate.settled().tolist())) for site, gate in model.head_gates().items()
    }
    closed = {
        site: [head for group in layers[site].groups() if not any(values[head] for head in group) for head in group]
        for site, values in factors.items()
    }
    left = {
        site: {head: factor for head, factor in values.items() if head not in closed[site]}
        for site, values in factors.items()
    }
    halfway = [layers[site] for site, values in left.items() if any(factor != 1 for factor in values.values())]
    check_outputs(model, halfway)
    if shut := {
        str(site): heads for site, values in left.items() if (heads := [h for h, f in values.items() if not f])
    }:
        logger.warning(
            "closed heads that share a key/value head with open ones remain and output zero: %s; with gates={'unit': "
            "'group'}, groups close as a whole.",
            shut,
        )
    removed = config_value(closed, kinds_of(layers))
    if removed:
        prune_heads(model, removed)
    for layer in halfway:
        _scale(layer.output, list(left[layer.site].values()), layer.head_dim)


def _scale(output: nn.Module, factors: list[float], width: int = 1) -> None:
    """Multiplies the inputs of an output projection by factors of heads or units of this width."""
    scale = torch.tensor(factors, dtype=torch.float64).repeat_interleave(width).to(output.weight)
    output.weight.mul_(scale[:, None] if isinstance(output, Conv1D) else scale)


def remove_gates(model: PreTrainedModel) -> None:
    """Removes all gates from a headwise model and its configuration, whatever their values."""
    for layer in locate_heads(model):
        if getattr(layer.module, "gate", None) is not None:
            layer.module.gate = None
    for module in list(model.modules()):
        if "unit_hooks" in vars(module):
            remove_unit_gate(module)
    separate_configuration(model)
    model.config.gates = None
