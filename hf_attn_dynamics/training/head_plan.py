# Licensed under the Apache License, Version 2.0.
"""What a trainer is to do with the heads of its model, and what belongs to one step and to one logging window."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from ..models.head_gates import HardConcreteGate
from ..models.head_sites import HeadSite
from .gates import GateWatch, TargetHeads


Gates = dict[HeadSite, HardConcreteGate]


class HeadPlan:
    """How heads are guided and gated, from the arguments of a trainer and its model.

    Args:
        model (`PreTrainedModel`): A headwise model.
        argument (callable): Gives an argument of [`HeadwiseArguments`] by name.

    Attributes:
        guided, gated, penalised (`bool`): Whether there is guidance, gates, and a price of open heads.
        penalty (`float`): That price, unless there is a target.
        target (`TargetHeads`, *optional*): The price that leaves a number of heads open.
        watch (`GateWatch`, *optional*): Settles the gates at the end.

    Raises:
        ValueError: if the model has no guidance or no gates, and the arguments ask for some.
    """

    def __init__(self, model: PreTrainedModel, argument: Callable[[str], Any]):
        guidance, weight = getattr(model.config, "guidance", None), argument("guidance_weight")
        _check_guidance(model, guidance, weight)
        self.guided = guidance is not None and weight != 0
        gates, target = model.head_gates(), argument("target_heads")
        self.penalty = argument("gate_penalty")
        _check_gates(model, gates, target, self.penalty)
        self.gated, self.penalised = bool(gates), target is not None or self.penalty > 0
        self.watch = GateWatch(target) if gates else None
        self.target: TargetHeads | None = None
        if target is not None:
            rate, warmup = argument("target_learning_rate"), argument("target_warmup")
            self.target = TargetHeads(_number(gates), target, rate, warmup)

    @property
    def callbacks(self) -> list[TrainerCallback]:
        """What drives, watches and settles the gates."""
        return [callback for callback in (self.watch, self.target) if callback is not None]

    def gate_penalty_weight(self, gates: Gates, state: TrainerState) -> float | torch.Tensor | None:
        """λ of a step, if open heads have a price; asked for once in each step."""
        if self.target is not None:
            return self.target.step(gates, state.global_step, state.max_steps)
        return self.penalty if self.penalised else None

    def follow(self, gates: Gates) -> None:
        """Goes on with the gates that are left; without any, open heads cost nothing any more."""
        self.gated = bool(gates)
        self.penalised = self.penalised and self.gated
        left = _number(gates)
        if gates and self.target is not None and self.target.target > left:
            raise ValueError(
                f"target_heads={self.target.target}, but heads were removed while training, and {left} gated heads "
                "are left: remove fewer, or lower target_heads."
            )


def _number(gates: Gates) -> int:
    """Number of heads that have gates."""
    return sum(gate.num_heads for gate in gates.values())


def _check_guidance(model: PreTrainedModel, guidance: dict | None, weight: float | str | None) -> None:
    """Refuses a weight of guidance that there is none of."""
    if guidance is None and weight not in (None, 0):
        raise ValueError(
            f"guidance_weight={weight}, but {type(model).__name__} has no guidance: build it from a headwise "
            'configuration with guidance={"fraction": 0.5}, for instance, or set guidance_weight=0.'
        )


def _check_gates(model: PreTrainedModel, gates: Gates, target: int | None, penalty: float) -> None:
    """Refuses a price of open heads where none could close, and a number that there are fewer gates than."""
    if target is None and not penalty:
        return
    given = f"gate_penalty={penalty}" if target is None else f"target_heads={target}"
    if not gates:
        raise ValueError(
            f"{given}, but {type(model).__name__} has no gates: load or build it with gates={{}}, for instance, or "
            "call add_gates({})."
        )
    if not any(gate.log_alpha.requires_grad for gate in gates.values()):
        raise ValueError(
            f"{given}, but every gate of {type(model).__name__} is frozen, and none would close: name 'gate' in "
            "modules_to_save of the adapter that froze them, or call requires_grad_(True) on each of "
            "model.head_gates().values() first."
        )
    if any(gate.is_offloaded for gate in gates.values()):
        raise ValueError(
            f"{given}, but gates of {type(model).__name__} are offloaded by its device_map, where no gradient reaches "
            "them: load it without device_map."
        )
    if target is not None and target > _number(gates):
        raise ValueError(f"target_heads={target}, but {type(model).__name__} has {_number(gates)} gated heads.")
    sizes = {gate.group_size for gate in gates.values()}
    if target is not None and len(sizes) == 1 and target % (size := sizes.pop()):
        raise ValueError(
            f"target_heads={target}, but {type(model).__name__} has one gate for {size} query heads, which share a "
            f"key and a value: give a multiple of {size}, or build it with gates={{'unit': 'head'}}."
        )


@dataclass
class HeadStep:
    """What belongs to one optimizer step, the same for all of its micro-batches.

    Attributes:
        counts (`dict[str, torch.Tensor]`): `num_items_in_batch` of the model: labels of each column, sentences and
            forward passes of the whole accumulated batch.
        guidance_weight (`float`, *optional*): α.
        gate_penalty_weight (`float` or `torch.Tensor`, *optional*): λ.
        gate_noise (`torch.Tensor`, *optional*): Random numbers of all gates.
        rehearsed (`list[dict]`, *optional*): Instead of a step: the losses of each micro-batch, by name.
    """

    counts: dict[str, torch.Tensor]
    guidance_weight: float | None = None
    gate_penalty_weight: float | torch.Tensor | None = None
    gate_noise: torch.Tensor | None = None
    rehearsed: list[dict[str, torch.Tensor]] | None = None

    @property
    def weights(self) -> dict[str, float | torch.Tensor]:
        """Weights of the losses of heads, by the names that the model has for them."""
        weights = {"guidance_weight": self.guidance_weight, "gate_penalty_weight": self.gate_penalty_weight}
        return {name: weight for name, weight in weights.items() if weight is not None}

    @property
    def noise(self) -> dict[str, torch.Tensor]:
        """Random numbers of gates, by the name that the model has for them."""
        return {} if self.gate_noise is None else {"gate_noise": self.gate_noise}


class LossWindow:
    """Sums of losses since the last log entry, on the device: reading them would wait for every step."""

    def __init__(self):
        self._sums: dict[str, torch.Tensor] = {}
        self._start = 0

    def begin_step(self, number: int) -> None:
        """Says which step comes next, from 0."""
        if not self._sums:
            self._start = number

    def record(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Adds a micro-batch's parts of losses."""
        for name, value in losses.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def means(self, steps: int, mean_over_processes: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Mean of each loss over the window, if it has any, once so many steps have been taken in all."""
        steps -= self._start
        if not self._sums or steps <= 0:
            return {}
        names = sorted(self._sums)
        means = mean_over_processes(torch.stack([self._sums[name] for name in names]) / steps)
        return dict(zip(names, means.tolist()))
