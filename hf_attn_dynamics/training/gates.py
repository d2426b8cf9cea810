# Licensed under the Apache License, Version 2.0.
"""Gates during training: random numbers, the penalty coefficient for a target, recording, and final values."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .._files import read_json, write_text
from ..analysis.notebook import html_table
from ..models.cost_table import CostTable
from ..models.gate_costs import expected_cost
from ..models.hard_concrete import HardConcreteGate
from ..models.head_gates import gates_of
from ..models.head_sites import HeadSite
from ..models.settled_gates import settle_gates, settle_gates_to_cost
from .resumable_callback import LastStepCallback, ResumableCallback
from .schedules import target_heads_at


if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

STILL = 0.05  # largest change of φ that counts as no change
FEW = 16  # number of units of each feed-forward block whose φ is watched


def gate_noise(
    gates: dict[HeadSite, HardConcreteGate],
    seed: int,
    step: int,
    unit_gates: dict[HeadSite, HardConcreteGate] | None = None,
) -> torch.Tensor:
    """Uniform random numbers for all gates in one optimizer step, the same in all processes and micro-batches.

    Args:
        gates (`dict[HeadSite, HardConcreteGate]`): See `head_gates()` of the model.
        seed, step (`int`): Determine the numbers.
        unit_gates (`dict[HeadSite, HardConcreteGate]`, *optional*): See `unit_gates()` of the model.

    Returns:
        `torch.Tensor` of shape `(gates,)`: for the argument `gate_noise` of the forward pass.
    """
    number = sum(gate.num_gates for gate in (*gates.values(), *(unit_gates or {}).values()))
    return torch.from_numpy(np.random.default_rng([seed, step]).random(number, dtype=np.float32))


@torch.no_grad()
def expected_open(gates: dict[HeadSite, HardConcreteGate]) -> dict[str, torch.Tensor]:
    """Expected number of open heads or units at each kind of site, scalars."""
    expected: dict[str, torch.Tensor] = {}
    for site, gate in gates.items():
        count = gate.expected_open()
        # Layers may be on several devices.
        expected[site.kind] = expected[site.kind] + count.to(expected[site.kind]) if site.kind in expected else count
    return expected


def _product(count: torch.Tensor, block: torch.Tensor | None) -> torch.Tensor:
    return count if block is None else count * block


class GateTarget(ResumableCallback):
    """Controls the gate penalty coefficient for a target by a Lagrange multiplier.

    After Wang et al. (2020) and Xia et al. (2022), with an additional proportional term. The loss is `task loss +
    w_t · gate penalty`. With the excess `e_t`, `w_t = m_t + 100·r·e_t` and `m_{t+1} = m_t + r·e_t`: the coefficient
    increases until the target is met, and may become negative.

    Args:
        rate (`float`): r, in loss per unit of the excess and step.
        warmup (`float`): See [`target_heads_at`].
    """

    def __init__(self, rate: float, warmup: float):
        self.rate, self.warmup = rate, warmup
        self._forget()

    def _forget(self) -> None:
        self.multiplier: torch.Tensor | float = 0.0

    def _remembered(self) -> dict[str, Any]:
        return {"multiplier": float(self.multiplier)}

    def _recall(self, remembered: dict[str, Any]) -> None:
        self.multiplier = remembered["multiplier"]

    def _weight(self, excess: torch.Tensor) -> torch.Tensor:
        weight = self.multiplier + 100 * self.rate * excess
        self.multiplier = self.multiplier + self.rate * excess
        return weight

    def step(self, model: PreTrainedModel, step: int, max_steps: int) -> torch.Tensor:
        """Coefficient of the gate penalty at this step, a tensor on the device; call once per optimizer step."""
        raise NotImplementedError

    def settle(self, model: PreTrainedModel) -> int:
        """Moves gates so that the target is met exactly; returns the number of moved gates."""
        raise NotImplementedError


class TargetHeads(GateTarget):
    """Controls the gate penalty coefficient for a target number of open heads, see [`GateTarget`].

    Heads are counted as `Σ σ(2·φ)`, which approximates the number of gates open outside training; the expected number
    in the penalty also counts a part of each closed head. If attention blocks have gates, a head counts as the product
    with its block.

    Args:
        total, target (`int`): Number of heads at the start and at the end.
        rate (`float`): r, in loss per head and step.
        warmup (`float`): See [`target_heads_at`].
    """

    made_of = "the target number of heads"

    def __init__(self, total: int, target: int, rate: float, warmup: float):
        super().__init__(rate, warmup)
        self.total, self.target = total, target

    def __str__(self) -> str:
        return f"exactly {self.target} heads stay open"

    @torch.no_grad()
    def step(self, model: PreTrainedModel, step: int, max_steps: int) -> torch.Tensor:
        gates = model.head_gates().values()
        counts = [_product(*gate.approximate_counts()) for gate in gates]
        counted = sum(count.to(counts[0]) for count in counts)
        planned = target_heads_at(step, max_steps, self.total, self.target, self.warmup)
        # Heads may have been removed during the run.
        return self._weight(counted - min(planned, sum(gate.num_elements for gate in gates)))

    def settle(self, model: PreTrainedModel) -> int:
        return settle_gates(model, self.target) if model.head_gates() else 0


class TargetCost(GateTarget):
    """Controls the gate penalty coefficient for a target speed-up, see [`GateTarget`].

    The gate penalty is the expected cost of the model as a fraction of the dense model's cost. The excess is that
    fraction, with `σ(2·φ)` instead of probabilities as for [`TargetHeads`], minus the planned one, which decreases
    linearly from 1. A percent of the cost counts as a head does there.

    Args:
        speedup (`float`): Target speed-up: cost of the dense model over the cost at the end.
        rate (`float`): r, in loss per percent of the cost and step.
        warmup (`float`): See [`target_heads_at`].
        table ([`CostTable`], *optional*): Costs; may be set later, before the first step.

    Attributes:
        table ([`CostTable`]): Costs. A resumed run continues with those of its checkpoint, unless the constructor got
            a table.
    """

    made_of = "the target speed-up"

    def __init__(self, speedup: float, rate: float, warmup: float, table: CostTable | None = None):
        self.speedup, self.table, self._is_given = speedup, table, table is not None
        super().__init__(rate, warmup)

    def __str__(self) -> str:
        return f"the speed-up is {self.speedup:g} ×"

    def _remembered(self) -> dict[str, Any]:
        return {**super()._remembered(), "table": None if self.table is None else self.table.to_dict()}

    def _recall(self, remembered: dict[str, Any]) -> None:
        super()._recall(remembered)
        if not self._is_given and remembered["table"] is not None:
            self.table = CostTable.from_dict(remembered["table"])

    @torch.no_grad()
    def step(self, model: PreTrainedModel, step: int, max_steps: int) -> torch.Tensor:
        counted = expected_cost(model, self.table, HardConcreteGate.approximate_counts)
        planned = target_heads_at(step, max_steps, 1.0, 1 / self.speedup, self.warmup)
        # Heads and units may have been removed during the run.
        left = expected_cost(model, self.table, _all_open)
        return self._weight(100 * (counted - left.clamp(max=planned))) * 100

    def settle(self, model: PreTrainedModel) -> int:
        return settle_gates_to_cost(model, self.table, self.speedup)


def _all_open(gate: HardConcreteGate) -> tuple[torch.Tensor, None]:
    """Number of elements of a gate, for [`expected_cost`]."""
    return gate.locations().new_tensor(float(gate.num_elements)), None


class GateHistory(LastStepCallback):
    """Records φ of every gate while [`HeadwiseTrainer`] trains.

    Args:
        every (`int`): Optimizer steps between two records; the first is taken before training, the last after the
            last step.

    Attributes:
        steps (`list[int]`): Number of steps before each record.
        log_alpha (`dict[str, list[list[list[float]]]]`): φ by kind of site, record, layer and (remaining) head, until
            a callback removes the gates. If attention blocks have gates, the lower φ of a head and its block counts.
        open_heads (`dict[str, list[float]]`): Expected number of open heads by kind of site and record.
        settled_heads (`dict[str, list[int]]`): Number of heads with deterministic gates open outside training, by kind
            of site and record.
        open_units (`dict[str, list[float]]`), settled_units (`dict[str, list[int]]`): The same for feed-forward units,
            if they or their blocks have gates.
    """

    made_of = "its interval"

    def __init__(self, every: int = 10):
        if every < 1:
            raise ValueError(f"GateHistory needs every to be at least 1, got {every}.")
        self.every = every
        self._forget()

    def _forget(self) -> None:
        self.steps: list[int] = []
        self.log_alpha: dict[str, list] = {}
        self.open_heads: dict[str, list[float]] = {}
        self.settled_heads: dict[str, list[int]] = {}
        self.open_units: dict[str, list[float]] = {}
        self.settled_units: dict[str, list[int]] = {}

    def _remembered(self) -> dict[str, Any]:
        return self.to_dict()

    def _recall(self, remembered: dict[str, Any]) -> None:
        for name, empty in GateHistory().to_dict().items():
            # Earlier versions have recorded no units.
            setattr(self, name, remembered.get(name, empty))

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        super().on_train_begin(args, state, control)
        if not state.global_step:
            self._measure(args, state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:
            self._measure(args, state, model)
        super().on_step_end(args, state, control, model=model)

    def _measure(self, args, state, model=None, **kwargs) -> None:
        if not gates_of(model):
            if self.steps:
                return  # a callback has removed them
            raise ValueError(f"GateHistory needs a model with gates, but {type(model).__name__} has none.")
        records = (self.log_alpha, self.open_heads, self.settled_heads, self.open_units, self.settled_units)
        # The last step is recorded again, since `GateWatch` may have moved gates.
        if self.steps[-1:] == [state.global_step]:
            for values in (self.steps, *(of_kind for record in records for of_kind in record.values())):
                values.pop()
        self.steps.append(state.global_step)
        layers: dict[str, list] = {}
        for site, gate in model.head_gates().items():
            layers.setdefault(site.kind, []).append(gate.lowest_locations().tolist())
        for kind, values in layers.items():
            self.log_alpha.setdefault(kind, []).append(values)
        _record(model.head_gates(), self.open_heads, self.settled_heads)
        _record(model.unit_gates(), self.open_units, self.settled_units)

    def to_dict(self) -> dict:
        """The attributes, for JSON."""
        return {
            "steps": self.steps,
            "log_alpha": self.log_alpha,
            "open_heads": self.open_heads,
            "settled_heads": self.settled_heads,
            "open_units": self.open_units,
            "settled_units": self.settled_units,
        }

    def _repr_html_(self) -> str:
        """The number of heads and units with open gates at the first and the last record, for notebooks."""
        rows = []
        for name, records, closed in (
            ("heads", self.open_heads, self.settled_heads),
            ("units", self.open_units, self.settled_units),
        ):
            for kind, expected in records.items():
                number = sum(map(len, self.log_alpha[kind][0])) if name == "heads" and kind in self.log_alpha else ""
                # Only heads have gates in most models.
                label = f"{kind}, {name}" if self.open_units else kind
                rows.append([label, number, expected[0], expected[-1], closed[kind][0], closed[kind][-1]])
        header = [
            "site",
            "heads",
            *(f"{what}, {when}" for what in ("expected open", "open") for when in ("first", "last")),
        ]
        steps = f", steps {self.steps[0]:,} to {self.steps[-1]:,}" if self.steps else ""
        caption = f"GateHistory: {len(self.steps):,} record{'s' * (len(self.steps) != 1)}{steps}"
        return html_table(header, rows, caption)

    def plot(self, path: str | Path | None = None, title: str = "", target: float | None = None) -> "Figure":
        """Draws the number of heads and units with open gates over the steps of training.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
            target (`float`, *optional*): Target number of heads, drawn as a line.
        """
        from ..analysis.plots.base import plot_gate_history

        total = {kind: sum(map(len, records[0])) for kind, records in self.log_alpha.items()}
        return plot_gate_history(self.steps, path=path, title=title, total=total, target=target, **self.open_counts())

    def open_counts(self) -> dict[str, dict[str, list]]:
        """The numbers of open heads and units, as arguments of [`plot_gate_history`]."""
        names = ("open_heads", "settled_heads", "open_units", "settled_units")
        return {name: getattr(self, name) for name in names}

    def save(self, path: str | Path) -> None:
        """Writes the record as JSON."""
        write_text(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "GateHistory":
        """Reads a record that [`GateHistory.save`] wrote.

        Raises:
            ValueError: if the file does not contain one.
        """
        history, values = cls(), read_json(path)
        kinds = {name: type(value) for name, value in history.to_dict().items()}
        if isinstance(values, dict):
            # Earlier versions have recorded no units.
            values = {"open_units": {}, "settled_units": {}, **values}
        if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != kinds:
            raise ValueError(f"{path} does not contain a GateHistory, which has {', '.join(kinds)}.")
        for name, value in values.items():
            setattr(history, name, value)
        return history


def _record(
    gates: dict[HeadSite, HardConcreteGate], expected: dict[str, list[float]], settled: dict[str, list[int]]
) -> None:
    """Appends the expected number of open elements of each kind of site, and the number outside training."""
    for kind, value in expected_open(gates).items():
        expected.setdefault(kind, []).append(value.item())
        of_kind = (gate for site, gate in gates.items() if site.kind == kind)
        settled.setdefault(kind, []).append(sum(int(gate.settled().ne(0).sum()) for gate in of_kind))


class GateWatch(ResumableCallback):
    """Moves gates to the target after the last step, and warns if all gates are closed or none has moved.

    Args:
        target ([`GateTarget`], *optional*): What holds exactly at the end.
    """

    made_of = "the target"

    def __init__(self, target: GateTarget | None = None):
        self.target = target
        self._forget()

    def _forget(self) -> None:
        self.at_start: torch.Tensor | None = None
        self.warned: set[str] = set()
        self.finished = False

    def _remembered(self) -> dict[str, Any]:
        return {"at_start": None if self.at_start is None else self.at_start.tolist()}

    def _recall(self, remembered: dict[str, Any]) -> None:
        if remembered["at_start"] is not None:
            self.at_start = torch.tensor(remembered["at_start"])

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        super().on_train_begin(args, state, control)
        if self.at_start is None:
            self.at_start = self._log_alpha(model)

    def on_log(self, args, state, control, model=None, **kwargs):
        if isinstance(self.target, TargetCost):
            return  # it may close one kind of block altogether
        heads, units = model.head_gates().values(), model.unit_gates().values()
        for gates, every, way_out in (
            (heads, "every attention layer", "set the number of heads to keep with target_heads"),
            (units, "every feed-forward block", "set a target_speedup"),
        ):
            if gates and every not in self.warned and not any(bool(gate.settled().any()) for gate in gates):
                self.warned.add(every)
                logger.warning(
                    "all gates are closed after step %d: %s now outputs zero. Lower gate_penalty, or %s.",
                    state.global_step,
                    every,
                    way_out,
                )

    def on_step_end(self, args, state, control, model=None, **kwargs):
        # Before this step is evaluated and saved, so that both see the final gates.
        if state.global_step >= state.max_steps:
            self._finish(state.global_step, model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        # If training stopped before its last step, or resumed after it. With `load_best_model_at_end`, earlier weights
        # have been loaded.
        if not self.finished and not args.load_best_model_at_end:
            self._finish(state.global_step, model)

    def _finish(self, step: int, model: PreTrainedModel) -> None:
        self.finished = True
        log_alpha = self._log_alpha(model)
        is_as_before = len(log_alpha) > 0 and log_alpha.shape == self.at_start.shape
        if is_as_before and not ((log_alpha - self.at_start).abs() > STILL).any():
            logger.warning(
                "no gate has moved by more than %g in %d steps: raise gate_learning_rate or the number of steps, or "
                "set gate_penalty, target_heads or target_speedup.",
                STILL,
                step,
            )
        if self.target is None or not gates_of(model):
            return
        moved = self.target.settle(model)
        if moved:
            number = sum(gate.num_gates for gate in gates_of(model))
            many = self.target.target if isinstance(self.target, TargetHeads) else number
            level = logging.WARNING if moved > max(1, many // 10) else logging.INFO
            logger.log(
                level,
                "%d gates were moved across their threshold after the last step, so that %s. "
                "If these are many, train longer, or raise gate_learning_rate or target_learning_rate.",
                moved,
                self.target,
            )

    @staticmethod
    def _log_alpha(model: PreTrainedModel) -> torch.Tensor:
        # Empty if a callback has removed the gates. A few units of each block suffice.
        found = [gate.locations() for gate in model.head_gates().values()]
        found += [gate.locations()[:FEW] for gate in model.unit_gates().values()]
        found += [gate.block_location() for gate in gates_of(model) if gate.has_block]
        return torch.cat([values.detach().float().cpu() for values in found]) if found else torch.empty(0)
