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
from ..models.hard_concrete import HardConcreteGate
from ..models.head_gates import gates_of
from ..models.head_sites import HeadSite
from ..models.settled_gates import settle_gates
from .resumable_callback import LastStepCallback, ResumableCallback
from .schedules import target_heads_at


if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

STILL = 0.05  # largest change of φ that counts as no change


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
        expected[site.kind] = expected.get(site.kind, 0.0) + gate.expected_open()
    return expected


class TargetHeads(ResumableCallback):
    """Controls the gate penalty coefficient for a target number of open heads by a Lagrange multiplier.

    After Wang et al. (2020) and Xia et al. (2022), with an additional proportional term. The loss is `task loss +
    w_t · gate penalty`. With `e_t` excess heads, `w_t = m_t + 100·r·e_t` and `m_{t+1} = m_t + r·e_t`: the coefficient
    increases until the target is met, and may become negative. Heads are counted as `Σ σ(2·φ)`, which approximates the
    number of gates open outside training; the expected number in the penalty also counts a part of each closed head.

    Args:
        total, target (`int`): Number of heads at the start and at the end.
        rate (`float`): r, in loss per head and step.
        warmup (`float`): See [`target_heads_at`].
    """

    made_of = "the target number of heads"

    def __init__(self, total: int, target: int, rate: float, warmup: float):
        self.total, self.target, self.rate, self.warmup = total, target, rate, warmup
        self._forget()

    def _forget(self) -> None:
        self.multiplier: torch.Tensor | float = 0.0

    def _remembered(self) -> dict[str, Any]:
        return {"multiplier": float(self.multiplier)}

    def _recall(self, remembered: dict[str, Any]) -> None:
        self.multiplier = remembered["multiplier"]

    def step(self, gates: dict[HeadSite, HardConcreteGate], step: int, max_steps: int) -> torch.Tensor:
        """Coefficient of the gate penalty at this step, a tensor on the device; call once per optimizer step."""
        with torch.no_grad():
            counted = sum(_product(*gate.approximate_counts()) for gate in gates.values())
        planned = target_heads_at(step, max_steps, self.total, self.target, self.warmup)
        # Heads may have been removed during the run.
        excess = counted - min(planned, sum(gate.num_elements for gate in gates.values()))
        weight = self.multiplier + 100 * self.rate * excess
        self.multiplier = self.multiplier + self.rate * excess
        return weight


class GateHistory(LastStepCallback):
    """Records φ of every gate while [`HeadwiseTrainer`] trains.

    Args:
        every (`int`): Optimizer steps between two records; the first is taken before training, the last after the
            last step.

    Attributes:
        steps (`list[int]`): Number of steps before each record.
        log_alpha (`dict[str, list[list[list[float]]]]`): φ by kind of site, record, layer and (remaining) head, until
            a callback removes the gates.
        open_heads (`dict[str, list[float]]`): Expected number of open heads by kind of site and record.
        settled_heads (`dict[str, list[int]]`): Number of heads with deterministic gates open outside training, by kind
            of site and record.
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

    def _remembered(self) -> dict[str, Any]:
        return self.to_dict()

    def _recall(self, remembered: dict[str, Any]) -> None:
        for name in self.to_dict():
            setattr(self, name, remembered[name])

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        super().on_train_begin(args, state, control)
        if not state.global_step:
            self._measure(args, state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:
            self._measure(args, state, model)
        super().on_step_end(args, state, control, model=model)

    def _measure(self, args, state, model=None, **kwargs) -> None:
        gates = model.head_gates() if hasattr(model, "head_gates") else {}
        if not gates and self.steps:
            return  # a callback has removed them
        # The last step is recorded again, since `GateWatch` may have moved gates.
        if self.steps[-1:] == [state.global_step]:
            for values in (
                self.steps,
                *self.log_alpha.values(),
                *self.open_heads.values(),
                *self.settled_heads.values(),
            ):
                values.pop()
        if not gates:
            raise ValueError(f"GateHistory needs a model with gates, but {type(model).__name__} has none.")
        self.steps.append(state.global_step)
        layers: dict[str, list] = {}
        for site, gate in gates.items():
            layers.setdefault(site.kind, []).append(gate.locations().tolist())
        for kind, values in layers.items():
            self.log_alpha.setdefault(kind, []).append(values)
        for kind, expected in open_heads(gates).items():
            self.open_heads.setdefault(kind, []).append(expected.item())
            of_kind = (gate for site, gate in gates.items() if site.kind == kind)
            self.settled_heads.setdefault(kind, []).append(sum(int(gate.settled().ne(0).sum()) for gate in of_kind))

    def to_dict(self) -> dict:
        """The attributes, for JSON."""
        return {
            "steps": self.steps,
            "log_alpha": self.log_alpha,
            "open_heads": self.open_heads,
            "settled_heads": self.settled_heads,
        }

    def _repr_html_(self) -> str:
        """The number of heads with open gates at the first and the last record, for notebooks."""
        rows = []
        for kind, expected in self.open_heads.items():
            heads, settled = sum(map(len, self.log_alpha[kind][0])), self.settled_heads[kind]
            rows.append([kind, heads, expected[0], expected[-1], settled[0], settled[-1]])
        header = [
            "site",
            "heads",
            *(f"{what}, {when}" for what in ("expected open", "open") for when in ("first", "last")),
        ]
        steps = f", steps {self.steps[0]:,} to {self.steps[-1]:,}" if self.steps else ""
        caption = f"GateHistory: {len(self.steps):,} record{'s' * (len(self.steps) != 1)}{steps}"
        return html_table(header, rows, caption)

    def plot(self, path: str | Path | None = None, title: str = "", target: float | None = None) -> "Figure":
        """Draws the number of heads with open gates over the steps of training.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
            target (`float`, *optional*): Target number of heads, drawn as a line.
        """
        from ..analysis.plots.base import plot_gate_history

        total = {kind: sum(map(len, records[0])) for kind, records in self.log_alpha.items()}
        return plot_gate_history(self.steps, self.open_heads, path, title, total, target, self.settled_heads)

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
        if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != kinds:
            raise ValueError(f"{path} does not contain a GateHistory, which has {', '.join(kinds)}.")
        for name, value in values.items():
            setattr(history, name, value)
        return history


class GateWatch(ResumableCallback):
    """Moves gates to the target number after the last step, and warns if all gates are closed or none has moved.

    Args:
        keep (`int`, *optional*): Number of heads with open gates at the end, see [`settle_gates`].
    """

    made_of = "the target number of heads"

    def __init__(self, keep: int | None = None):
        self.keep = keep
        self._forget()

    def _forget(self) -> None:
        self.at_start: torch.Tensor | None = None
        self.warned = self.finished = False

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
        gates = model.head_gates().values()
        if gates and not self.warned and not any(bool((gate.locations() > gate.threshold).any()) for gate in gates):
            self.warned = True
            logger.warning(
                "all gates are closed after step %d: every attention layer now outputs zero. Lower gate_penalty, or "
                "set the number of heads to keep with target_heads.",
                state.global_step,
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
                "set gate_penalty or target_heads.",
                STILL,
                step,
            )
        if self.keep is None or not model.head_gates():
            return
        moved = settle_gates(model, self.keep)
        if moved:
            level = logging.WARNING if moved > max(1, self.keep // 10) else logging.INFO
            logger.log(
                level,
                "%d gates were moved across their threshold after the last step, so that exactly %d heads stay open. "
                "If these are many, train longer, or raise gate_learning_rate or target_learning_rate.",
                moved,
                self.keep,
            )

    @staticmethod
    def _log_alpha(model: PreTrainedModel) -> torch.Tensor:
        # Empty if a callback has removed the gates.
        found = [gate.locations().detach().float().cpu() for gate in model.head_gates().values()]
        return torch.cat(found) if found else torch.empty(0)
