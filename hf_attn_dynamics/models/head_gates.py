# Licensed under the Apache License, Version 2.0.
"""Hard Concrete gates: a factor in [0, 1] for each head (Louizos et al. 2018, Voita et al. 2019).

A gate multiplies the output of its head before the output projection. Its only parameter is φ, `log_alpha`, the
location of its distribution.
"""

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from .compat import keep_in_single_precision
from .head_pruning import check_output_projections, prune_heads
from .head_roles import locate_heads
from .head_settings import GateSettings, check_limits
from .head_sites import config_value, kinds_of
from .precision import at_least_single
from .prunable_models import Model, separate_configuration


logger = logging.get_logger(__name__)

EPSILON = 1e-6  # noise is clamped to [EPSILON, 1 - EPSILON]
MARGIN = 1e-3  # distance of a moved gate from its threshold


def expected_open_heads(
    log_alpha: torch.Tensor, temperature: float = 0.33, limits: tuple[float, float] = (-0.1, 1.1)
) -> torch.Tensor:
    """Expected number of heads whose Hard Concrete gate is not zero (Voita et al. 2019, section 6.1).

    Args:
        log_alpha (`torch.Tensor` of shape `(..., heads)`): Location φ of each gate's distribution.
        temperature (`float`): Temperature T of the concrete distribution, > 0.
        limits (`tuple[float, float]`): Stretch interval (γ, ζ), γ < 0 < 1 < ζ.

    Returns:
        `torch.Tensor` of shape `(...)`: sum over heads of `P(gate ≠ 0) = σ(φ − T·ln(−γ/ζ))`, differentiable, float32
        (float64 in double precision).

    Raises:
        ValueError: if `limits` does not contain [0, 1] in its interior.

    Example:
        >>> round(expected_open_heads(torch.zeros(4)).item(), 3)
        2.752
    """
    low, high = check_limits(limits)
    return torch.sigmoid(at_least_single(log_alpha) - temperature * math.log(-low / high)).sum(-1)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, a class that PyTorch builds without distributed training lack."""
    return hasattr(tensor, "full_tensor")


class HardConcreteGate(nn.Module):
    """Hard Concrete gates of the heads of one attention module.

    In training a gate is sampled in each forward pass, `s = σ((ln u − ln(1−u) + φ)/T)`,
    `g = clip(s·(ζ−γ) + γ, 0, 1)` with uniform u (equations 7 and 8), which is differentiable in φ. In evaluation it
    is 0 or 1, whichever is likelier (`evaluation="binary"`), or `clip(σ(φ)·(ζ−γ) + γ, 0, 1)` (`"fractional"`).

    Args:
        num_heads (`int`): Number of heads of the module.
        settings ([`GateSettings`]): Distribution of the gates, and their values outside training.
        group_size (`int`): Number of consecutive heads that share one gate.

    Attributes:
        log_alpha (`nn.Parameter` of shape `(gates,)`): φ of the gates of the remaining heads, in float32; an empty
            buffer if no heads remain.
    """

    def __init__(self, num_heads: int, settings: GateSettings, group_size: int = 1):
        super().__init__()
        self.settings = settings
        self.group_size = group_size
        # In single precision whatever the dtype of the model: small steps of φ are lost in half precision.
        self.log_alpha = nn.Parameter(torch.empty(num_heads // group_size, dtype=torch.float32))
        self.reset_parameters()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "HardConcreteGate":
        """Follows the model to another device and to double precision, but not to half precision."""

        def at_least_in_single(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype in (torch.float32, torch.float64) else at_least_single(tensor.to(moved.device))

        return super()._apply(at_least_in_single, recurse)

    def reset_parameters(self, init: Any = nn.init) -> None:
        """Sets φ to its initial value.

        Args:
            init: Module with `uniform_` and `constant_`; `transformers.initialization` skips loaded weights.
        """
        initial = self.settings.initial_log_alpha
        if isinstance(initial, list):
            init.uniform_(self.log_alpha, *initial)
        else:
            init.constant_(self.log_alpha, float(initial))

    def forward(self, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Gate of each head.

        Args:
            noise (`torch.Tensor` of shape `(gates,)`, *optional*): Uniform random numbers for training; by default
                drawn from the global generator.

        Returns:
            `torch.Tensor` of shape `(heads,)`: gates in [0, 1], float32 (float64 in double precision).
        """
        if not self.training:
            return self.settled()
        log_alpha = at_least_single(self.log_alpha)
        noise = torch.rand_like(log_alpha) if noise is None else noise.to(log_alpha)
        noise = noise.clamp(EPSILON, 1 - EPSILON)
        gates = self._stretched(torch.sigmoid((torch.logit(noise) + log_alpha) / self.settings.temperature))
        return self._by_head(gates)

    def _by_head(self, values: torch.Tensor) -> torch.Tensor:
        """Repeats the value of each gate for the heads that share it."""
        return values if self.group_size == 1 else values.repeat_interleave(self.group_size)

    @property
    def num_heads(self) -> int:
        """Number of gated heads."""
        return len(self.log_alpha) * self.group_size

    @property
    def is_offloaded(self) -> bool:
        """Whether Accelerate has offloaded φ to disk or CPU and loads it only for a forward pass."""
        if not self.log_alpha.is_meta:
            return False
        try:
            from accelerate.utils import has_offloaded_params
        except ImportError:
            return False  # on the meta device without Accelerate, φ has no values
        return has_offloaded_params(self)

    def locations(self) -> torch.Tensor:
        """φ of all heads, of shape `(heads,)`, differentiable; gathered where FSDP shards it.

        Offloaded values are loaded and detached.
        """
        if self.is_offloaded:
            # By name, so that code saved with checkpoints does not require Accelerate.
            with importlib.import_module("accelerate.utils").align_module_device(self):
                return self._by_head(self.log_alpha.detach())
        return self._by_head(self.log_alpha.full_tensor() if _is_sharded(self.log_alpha) else self.log_alpha)

    @torch.no_grad()
    def set_locations(self, values: torch.Tensor) -> None:
        """Sets φ of all heads, of shape `(heads,)`; all processes must pass the same values.

        Raises:
            ValueError: if it is offloaded.
        """
        if self.is_offloaded:
            raise ValueError("gates that device_map has offloaded cannot be set: load the model without device_map.")
        values = values[:: self.group_size]
        if _is_sharded(self.log_alpha):
            from torch.distributed.tensor import distribute_tensor

            values = distribute_tensor(values, self.log_alpha.device_mesh, self.log_alpha.placements)
        self.log_alpha.copy_(values)

    def settled(self) -> torch.Tensor:
        """Deterministic gate of each head outside training, of shape `(heads,)`."""
        log_alpha = at_least_single(self.locations())
        if self.settings.evaluation == "binary":
            return (log_alpha > self.threshold).to(log_alpha.dtype)
        return self._stretched(torch.sigmoid(log_alpha))

    def _stretched(self, concrete: torch.Tensor) -> torch.Tensor:
        low, high = self.settings.limits
        return (concrete * (high - low) + low).clamp(0, 1)

    @property
    def threshold(self) -> float:
        """φ above which a gate is open outside training.

        For binary gates, it is where P(gate = 0) = P(gate = 1); 0 for limits that are symmetric about ½.
        """
        low, high = self.settings.limits
        if self.settings.evaluation == "fractional":
            return math.log(-low / high)
        # Rounded, so that symmetric limits give exactly 0.
        log_ratio = round(math.log((1 - low) * -low / ((high - 1) * high)), 12)
        return 0.5 * self.settings.temperature * log_ratio

    def expected_open_heads(self) -> torch.Tensor:
        """Expected number of heads of the module with open gates, see [`expected_open_heads`]."""
        return expected_open_heads(self.locations(), self.settings.temperature, self.settings.limits)

    def keep(self, indices: list[int]) -> None:
        """Removes the gates of all heads but those with these indices among the present ones."""
        log_alpha = self.log_alpha
        del self.log_alpha
        if indices:
            gates = [index // self.group_size for index in indices[:: self.group_size]]
            self.log_alpha = nn.Parameter(log_alpha.detach()[gates].clone(), log_alpha.requires_grad)
        else:
            # A buffer: distributed training would wait for the gradient of an empty parameter.
            self.register_buffer("log_alpha", log_alpha.detach()[:0].clone())

    def extra_repr(self) -> str:
        shared = f" of {self.group_size} heads" if self.group_size > 1 else ""
        return f"{len(self.log_alpha)} gates{shared}, evaluation={self.settings.evaluation}"


def install_gates(model: PreTrainedModel, settings: dict[str, GateSettings]) -> None:
    """Adds gates to the attention modules of the given kinds of sites that have none.

    Args:
        model (`PreTrainedModel`): A headwise model.
        settings (`dict[str, GateSettings]`): Settings by kind of site.
    """
    for layer in locate_heads(model):
        if layer.site.kind in settings and getattr(layer.module, "gate", None) is None:
            own = settings[layer.site.kind]
            gate = HardConcreteGate(layer.num_heads, own, 1 if own.unit == "head" else layer.group_size)
            if len(layer.heads) < layer.num_heads:
                gate.keep(layer.heads)
            reference = next(layer.module.parameters(), next(model.parameters()))
            layer.module.gate = gate.train(layer.module.training).to(reference.device)
    if settings:
        # FSDP2 therefore needs gates in another group than weights in half precision.
        keep_in_single_precision(model, ["log_alpha"])


def gate_penalty(gates: list[HardConcreteGate]) -> torch.Tensor:
    """Gate penalty: `Σ_heads P(gate ≠ 0)` over all gated modules (equation 9).

    Args:
        gates (`list[HardConcreteGate]`): All gates of a model.

    Returns:
        `torch.Tensor`: a differentiable scalar, float32 (float64 in double precision). Terms of gates with
        `penalty="module_mean"` are divided by the number of gated modules.
    """
    terms = [
        gate.expected_open_heads() / (len(gates) if gate.settings.penalty == "module_mean" else 1) for gate in gates
    ]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


@torch.no_grad()
def settle_gates(model: Model, keep: int) -> int:
    """Opens the gates of the `keep` heads with the largest φ and closes all others.

    Gates on the wrong side of their threshold are moved just across it.

    Args:
        model (`PreTrainedModel`): A headwise model with gates.
        keep (`int`): Number of heads whose gates are open outside training.

    Returns:
        `int`: number of gates that were moved.

    Raises:
        ValueError: if `keep` heads cannot be chosen because gates are shared by groups of heads.
    """
    gates = list(model.head_gates().values())
    order = torch.cat([(gate.locations().float().cpu() - gate.threshold)[:: gate.group_size] for gate in gates])
    sizes = [gate.group_size for gate in gates for _ in range(len(gate.log_alpha))]
    kept = torch.zeros(len(order), dtype=torch.bool)
    left = keep
    for index in order.argsort(descending=True, stable=True).tolist():
        if sizes[index] <= left:
            kept[index] = True
            left -= sizes[index]
    if left:
        raise ValueError(f"keep={keep} heads cannot stay open: {max(sizes)} heads share one gate.")
    moved = 0
    for gate, chosen in zip(gates, kept.split([len(gate.log_alpha) for gate in gates])):
        locations = gate.locations()
        chosen = chosen.to(locations.device).repeat_interleave(gate.group_size)
        wrong = (locations > gate.threshold) != chosen
        settled = torch.where(chosen, gate.threshold + MARGIN, gate.threshold - MARGIN)
        gate.set_locations(torch.where(wrong, settled, locations))
        moved += int(wrong.sum()) // gate.group_size
    return moved


@torch.no_grad()
def prune_closed_gates(model: Model) -> Model:
    """Removes the heads whose gates are closed outside training, then all gates; outputs do not change.

    Fractional gates (`evaluation="fractional"`) are multiplied into the output projection, as are closed gates of
    query heads that share a key/value head with an open one (`unit="head"`): these heads remain and output zero.

    Args:
        model (`PreTrainedModel`): A headwise model with gates; changed in place. Its configuration is copied; if it is
            part of another model, assign the copy there, see [`prune_heads`].

    Returns:
        `PreTrainedModel`: the same model, without gates.

    Raises:
        ValueError: if the model has no gates, or an output projection to be scaled is adapted, quantized or shared;
            see also [`prune_heads`]. The model is then unchanged.

    Example:
        >>> from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertModel, prune_closed_gates
        >>> model = HeadwiseBertModel(HeadwiseBertConfig(num_hidden_layers=2, gates={}))
        >>> model.head_gates()["encoder", 1].log_alpha.data[3] = -1.0
        >>> prune_closed_gates(model).config.pruned_heads
        {1: [3]}
    """
    gates = model.head_gates() if hasattr(model, "head_gates") else {}
    if not gates:
        raise ValueError(f"prune_closed_gates needs a model with gates, but {type(model).__name__} has none.")
    layers = {layer.site: layer for layer in locate_heads(model)}
    factors = {site: dict(zip(layers[site].heads, gate.settled().tolist())) for site, gate in gates.items()}
    closed = {
        site: [head for group in layers[site].groups() if not any(values[head] for head in group) for head in group]
        for site, values in factors.items()
    }
    left = {
        site: {head: factor for head, factor in values.items() if head not in closed[site]}
        for site, values in factors.items()
    }
    halfway = [layers[site] for site, values in left.items() if any(factor != 1 for factor in values.values())]
    check_output_projections(model, halfway)
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
        factors_left = torch.tensor(list(left[layer.site].values()), dtype=torch.float64)
        scale = factors_left.repeat_interleave(layer.head_dim).to(layer.output.weight)
        layer.output.weight.mul_(scale[:, None] if isinstance(layer.output, Conv1D) else scale)
    remove_gates(model)
    return model


def remove_gates(model: PreTrainedModel) -> None:
    """Removes all gates from a headwise model and its configuration, whatever their values."""
    for layer in locate_heads(model):
        if getattr(layer.module, "gate", None) is not None:
            layer.module.gate = None
    separate_configuration(model)
    model.config.gates = None
