# Licensed under the Apache License, Version 2.0.
"""Settings of guidance and gates in a trainer, and the state of one step and of one logging window."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from ..models.cost_table import CostTable
from ..models.gate_costs import largest_speedup
from ..models.hard_concrete import HardConcreteGate
from ..models.head_gates import gates_of
from ..models.head_settings import PARTS
from ..models.settled_gates import check_whole_groups
from .arguments import HeadwiseArguments
from .gates import GateTarget, GateWatch, TargetCost, TargetHeads
from .schedules import GuidanceSchedules


class HeadPlan:
    """Guidance and gates of a training run, from the arguments of a trainer and its model.

    Args:
        model (`PreTrainedModel`): A headwise model.
        argument (callable): Returns an argument of [`HeadwiseArguments`] by name.
        table ([`CostTable`], *optional*): Costs for a target speed-up; without them, `take_table` gets them before
            training.

    Attributes:
        guided, gated, penalised (`bool`): Whether there is guidance, gates, and a gate penalty.
        guided_names (`tuple[str, ...]`): Patterns and targets of guided heads.
        penalty (`float`): Coefficient of the gate penalty without a target.
        target (`GateTarget`, *optional*): Controls the coefficient for a target number of heads or speed-up.
        watch (`GateWatch`, *optional*): Sets deterministic gates at the end.

    Raises:
        ValueError: if the arguments need guidance or gates that the model does not have, or schedules name patterns
            or targets that no head is guided to.
    """

    def __init__(self, model: PreTrainedModel, argument: Callable[[str], Any], table: CostTable | None = None):
        guidance, weight = getattr(model.config, "guidance", None), argument("guidance_weight")
        _check_guidance(model, guidance, weight)
        self.guided = guidance is not None and weight != 0
        self._schedules = GuidanceSchedules(argument("guidance_schedule"), argument("guidance_hold_steps"))
        self.guided_names = model.head_settings.guided_names if self.guided else ()
        if self.guided:
            self._schedules.check_names(self.guided_names)
        gates, target = gates_of(model), argument("target_heads")
        self.penalty = argument("gate_penalty")
        speedup, flops = argument("target_speedup"), argument("target_flops")
        pressure = {"target_speedup": speedup, "target_flops": flops, "target_heads": target}
        pressure = {name: value for name, value in pressure.items() if value is not None}
        if self.penalty:
            pressure["gate_penalty"] = self.penalty
        for name, value in pressure.items():
            _check_gates(model, gates, f"{name}={value}")
        _check_target_heads(model, target)
        self.gated, self.penalised = bool(gates), bool(pressure)
        self.target: GateTarget | None = None
        rate, warmup = argument("target_learning_rate"), argument("target_warmup")
        if target is not None:
            self.target = TargetHeads(_number(model), target, rate, warmup)
        elif speedup is not None or flops is not None:
            check_whole_groups(model)
            self.target = TargetCost(speedup or 1 / flops, rate, warmup, table)
            if table is not None:
                _check_shape(table, argument)
                self._check_table(model, table)
        self.watch = GateWatch(self.target) if gates else None

    @property
    def callbacks(self) -> list[TrainerCallback]:
        """Callbacks for the gates."""
        return [callback for callback in (self.watch, self.target) if callback is not None]

    def guidance_weight(self, step: int, max_steps: int, initial: float) -> float | dict[str, float]:
        """α of a step; by name if patterns and targets have different schedules."""
        return self._schedules.weights_at(step, max_steps, initial, self.guided_names)

    @property
    def cost(self) -> CostTable | None:
        """Costs for the gate penalty, if the target is a speed-up."""
        return self.target.table if isinstance(self.target, TargetCost) else None

    @property
    def needs_table(self) -> bool:
        """Whether the target is a speed-up whose costs are not known yet."""
        return isinstance(self.target, TargetCost) and self.target.table is None

    def take_table(self, model: PreTrainedModel, table: CostTable) -> None:
        """Sets the costs for the target speed-up.

        Raises:
            ValueError: if they belong to another architecture, or the target cannot be reached.
        """
        self._check_table(model, table)
        self.target.table = table

    def _check_table(self, model: PreTrainedModel, table: CostTable) -> None:
        table.check_fits(model)
        parts = {part for settings in model.head_settings.gates.values() for part in settings.parts}
        table.check_target(self.target.speedup, [part for part in PARTS if part in parts])
        if (largest := largest_speedup(model, table)) < self.target.speedup:
            gated = ", ".join(model.head_settings.gates)
            raise ValueError(
                f"a speed-up of {self.target.speedup:g} × cannot be reached: closing all gates of the {gated} gives "
                f"{largest:.2f} ×. Build the model with gates of other sites or parts, too."
            )

    def gate_penalty_weight(self, model: PreTrainedModel, state: TrainerState) -> float | torch.Tensor | None:
        """λ of a step, or `None` without a gate penalty; call once per step."""
        if self.target is not None:
            return self.target.step(model, state.global_step, state.max_steps)
        return self.penalty if self.penalised else None

    def follow(self, model: PreTrainedModel) -> None:
        """Continues with the remaining gates; without any, there is no gate penalty."""
        self.gated = bool(gates_of(model))
        self.penalised = self.penalised and self.gated
        left = _number(model)
        if self.gated and isinstance(self.target, TargetHeads) and self.target.target > left:
            raise ValueError(
                f"target_heads={self.target.target}, but heads were removed during training, and only {left} gated "
                "heads remain: remove fewer, or lower target_heads."
            )


def _check_shape(table: CostTable, argument: Callable[[str], Any]) -> None:
    """Raises ValueError if costs that the user gives were measured for another batch than the user asks for."""
    for name in ("latency_batch", "latency_length"):
        value, of_table = argument(name), getattr(table, name.removeprefix("latency_"))
        if of_table is not None and value not in (of_table, getattr(HeadwiseArguments, name)):
            raise ValueError(
                f"{name}={value}, but latency_table was made for {of_table}: leave {name} out, or make another table."
            )


def _number(model: PreTrainedModel) -> int:
    """Number of heads with gates of their own."""
    return sum(gate.num_elements for gate in model.head_gates().values() if gate.has_elements)


def _check_guidance(model: PreTrainedModel, guidance: dict | None, weight: float | str | None) -> None:
    """Raises ValueError for a guidance weight without guidance."""
    if guidance is None and weight not in (None, 0):
        raise ValueError(
            f"guidance_weight={weight}, but {type(model).__name__} has no guidance: build it from a headwise "
            'configuration with guidance={"fraction": 0.5}, for instance, or set guidance_weight=0.'
        )


def _check_gates(model: PreTrainedModel, gates: list[HardConcreteGate], given: str) -> None:
    """Raises ValueError for a gate penalty without trainable gates."""
    if not gates:
        raise ValueError(
            f"{given}, but {type(model).__name__} has no gates: load or build it with gates={{}}, for instance, or "
            "call add_gates({})."
        )
    if not any(parameter.requires_grad for gate in gates for parameter in gate.parameters()):
        raise ValueError(
            f"{given}, but every gate of {type(model).__name__} is frozen: add 'gate' to modules_to_save of the "
            "adapter that froze them, or call requires_grad_(True) on each of model.head_gates().values() first."
        )
    if any(gate.is_offloaded for gate in gates):
        raise ValueError(
            f"{given}, but device_map has offloaded gates of {type(model).__name__}, which then get no gradient: load "
            "it without device_map."
        )


def _check_target_heads(model: PreTrainedModel, target: int | None) -> None:
    """Raises ValueError for an impossible number of heads."""
    if target is None:
        return
    gates = model.head_gates()
    if not all(gate.has_elements for gate in gates.values()):
        raise ValueError(
            f"target_heads={target}, but the attention blocks of {type(model).__name__} have gates without those of "
            "heads: build it with 'heads' among the parts of its gates, or set a target_speedup."
        )
    if target > _number(model):
        raise ValueError(f"target_heads={target}, but {type(model).__name__} has {_number(model)} gated heads.")
    sizes = {gate.group_size for gate in gates.values()}
    if len(sizes) == 1 and target % (size := sizes.pop()):
        raise ValueError(
            f"target_heads={target}, but {type(model).__name__} has one gate for {size} query heads, which share a "
            f"key/value head: pass a multiple of {size}, or build it with gates={{'unit': 'head'}}."
        )


@dataclass
class HeadStep:
    """Counts, weights and gate noise of one optimizer step, shared by all of its micro-batches.

    Attributes:
        counts (`dict[str, torch.Tensor]`): `num_items_in_batch` of the model: labels of each column, sentences and
            forward passes of the whole accumulated batch.
        guidance_weight (`float` or `dict[str, float]`, *optional*): α, or one by pattern and target.
        guidance_kernel (`str`): What computes the guidance loss, one of `GUIDANCE_KERNELS`.
        gate_penalty_weight (`float` or `torch.Tensor`, *optional*): λ.
        gate_noise (`torch.Tensor`, *optional*): Random numbers of all gates.
        gate_cost (`CostTable`, *optional*): Costs of which the gate penalty is the expectation.
        rehearsed (`list[dict]`, *optional*): Losses of each micro-batch by name, collected to balance α_0 without a
            training step.
        counts_hits (`bool`): Whether hits of heads that are guided to targets are counted for the log.
    """

    counts: dict[str, torch.Tensor]
    guidance_weight: float | dict[str, float] | None = None
    gate_penalty_weight: float | torch.Tensor | None = None
    gate_noise: torch.Tensor | None = None
    gate_cost: CostTable | None = None
    rehearsed: list[dict[str, torch.Tensor]] | None = None
    counts_hits: bool = False
    guidance_kernel: str = "auto"

    @property
    def weights(self) -> dict[str, Any]:
        """Weights of the head losses, as arguments of the model."""
        weights = {"guidance_weight": self.guidance_weight, "gate_penalty_weight": self.gate_penalty_weight}
        return {name: weight for name, weight in weights.items() if weight is not None}

    @property
    def others(self) -> dict[str, Any]:
        """What the head losses need beside their weights, as arguments of the model."""
        cost = None if self.gate_penalty_weight is None else self.gate_cost
        # The default of models, which those of earlier versions do not take.
        is_default = self.guidance_weight is None or self.guidance_kernel == "auto"
        kernel = None if is_default else self.guidance_kernel
        arguments = {"gate_noise": self.gate_noise, "gate_cost": cost, "guidance_kernel": kernel}
        return {name: value for name, value in arguments.items() if value is not None}


class LossWindow:
    """Sums of losses since the last log entry, kept on the device to avoid synchronising in every step.

    Hits of heads that are guided to targets are those of a single step, see [`HeadStep`].
    """

    def __init__(self):
        self._hits: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._start = 0

    def begin_step(self, number: int) -> None:
        """Sets the number of the next step, from 0."""
        if not self._sums:
            self._start = number

    def record(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Adds the losses of a micro-batch."""
        for name, value in losses.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def record_hits(self, hits: Mapping[str, torch.Tensor] | None) -> None:
        """Adds the hits of a micro-batch, of shape `(sentences, 2)` by target, see [`guided_hits`]."""
        for name, of_sentences in (hits or {}).items():
            own = of_sentences.sum(0)
            self._hits[name] = self._hits[name] + own if name in self._hits else own

    def accuracies(self, sum_over_processes: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Fraction of hits by target; targets without a row that counts are left out."""
        if not self._hits:
            return {}
        names = sorted(self._hits)
        sums = sum_over_processes(torch.stack([self._hits[name] for name in names])).tolist()
        return {f"guided_accuracy_{name}": hits / count for name, (hits, count) in zip(names, sums) if count}

    def means(self, steps: int, mean_over_processes: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Mean of each loss over the window; `steps` is the total number of steps. Empty without losses."""
        steps -= self._start
        if not self._sums or steps <= 0:
            return {}
        names = sorted(self._sums)
        means = mean_over_processes(torch.stack([self._sums[name] for name in names]) / steps)
        return dict(zip(names, means.tolist()))
