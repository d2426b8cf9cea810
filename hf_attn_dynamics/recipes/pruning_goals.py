# Licensed under the Apache License, Version 2.0.
"""What `prune_heads` prunes a model to: a number of heads, or a speed-up."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from .. import (
    CostTable,
    HeadScores,
    UnitScores,
    head_importance,
    random_importance,
    retain_heads,
    select_parts,
    unit_importance,
)
from ..models.settled_gates import settle_gates, settle_gates_to_cost
from .arguments.prune_heads import PruneArguments


logger = logging.getLogger(__name__)

# Two measurements of a model differ by up to about this factor.
MEASUREMENT_MARGIN = 1.04
# Fraction of the predicted speed-up below which a measurement is repeated.
UNLIKELY = 0.85
# Attempts to reach a measured speed-up, each with a higher predicted one.
ATTEMPTS = 4

Batches = Callable[[], Any]


class Goal(Protocol):
    """A goal of pruning.

    Attributes:
        name (`str`): Name in folders, such as `8` or `2x`.
    """

    name: str

    def gates(self, args: PruneArguments) -> dict[str, Any]:
        """Settings of the gates that reach the goal."""

    def training(self) -> dict[str, Any]:
        """Training arguments that reach the goal with gates."""

    def trainer(self) -> dict[str, Any]:
        """Arguments of the trainer that reach the goal with gates."""

    def scores(self, method: str, model: PreTrainedModel, batches: Batches, seed: int, progress: bool) -> Any:
        """Scores of what can be removed, for a method without gates."""

    def read_scores(self, path: Path) -> Any:
        """Scores that a run saved."""

    def prune(self, model: PreTrainedModel, scores: Any, value: float) -> None:
        """Removes the parts with the lowest scores, for a number of heads or a predicted speed-up."""

    def settle(self, model: PreTrainedModel, value: float) -> None:
        """Closes gates for a number of heads or a predicted speed-up."""

    def reach(
        self, method: str, prune: Callable[[float], PreTrainedModel], measure: Callable[[PreTrainedModel], float]
    ) -> PreTrainedModel:
        """Prunes until the goal is reached.

        Args:
            method (`str`): Method of pruning.
            prune (callable): Returns the model pruned to a number of heads or a predicted speed-up.
            measure (callable): Returns the measured speed-up of a model.

        Returns:
            `PreTrainedModel`: the pruned model; the fastest one, with a warning, if the goal was not reached.
        """


@dataclass(frozen=True)
class HeadGoal:
    """A number of heads to keep."""

    keep: int

    @property
    def name(self) -> str:
        return str(self.keep)

    def gates(self, args: PruneArguments) -> dict[str, Any]:
        return {"variant": args.gate_variant}

    def training(self) -> dict[str, Any]:
        return {"target_heads": self.keep}

    def trainer(self) -> dict[str, Any]:
        return {}

    def scores(self, method: str, model: PreTrainedModel, batches: Batches, seed: int, progress: bool) -> HeadScores:
        if method == "random":
            return random_importance(model, seed=seed)
        return head_importance(model, batches(), normalize="l2", progress=progress)

    def read_scores(self, path: Path) -> HeadScores:
        return HeadScores.load(path)

    def prune(self, model: PreTrainedModel, scores: HeadScores, value: float) -> None:
        retain_heads(model, int(value), scores)

    def settle(self, model: PreTrainedModel, value: float) -> None:
        settle_gates(model, int(value))

    def reach(
        self, method: str, prune: Callable[[float], PreTrainedModel], measure: Callable[[PreTrainedModel], float]
    ) -> PreTrainedModel:
        return prune(self.keep)


@dataclass(frozen=True)
class SpeedupGoal:
    """A speed-up to reach, by the parts that may be removed."""

    speedup: float
    table: CostTable
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.speedup:g}x"

    def gates(self, args: PruneArguments) -> dict[str, Any]:
        return {"variant": args.gate_variant, "parts": list(self.parts)}

    def training(self) -> dict[str, Any]:
        return {"target_speedup": self.speedup}

    def trainer(self) -> dict[str, Any]:
        return {"latency_table": self.table}

    def parts_of(self, method: str) -> list[str]:
        """What a method may remove; without gates, a block is removed when none of its heads or units is left."""
        return [part for part in self.parts if method == "gates" or part != "blocks"]

    def check(self, methods: Iterable[str]) -> None:
        """Checks that methods of pruning can reach the speed-up.

        Raises:
            ValueError: if one cannot; the message says what can be reached.
        """
        for method in methods:
            self.table.check_target(self.speedup, self.parts_of(method))

    def scores(self, method: str, model: PreTrainedModel, batches: Batches, seed: int, progress: bool) -> UnitScores:
        data = () if method == "random" else batches()
        # Heads are scored in any case.
        parts = {"heads", *self.parts_of(method)}
        return unit_importance(model, data, method, seed=seed, progress=progress, parts=parts)

    def read_scores(self, path: Path) -> UnitScores:
        return UnitScores.load(path)

    def prune(self, model: PreTrainedModel, scores: UnitScores, value: float) -> None:
        select_parts(model, scores, self.table, value, parts=self.parts_of(scores.method)).apply(model)

    def settle(self, model: PreTrainedModel, value: float) -> None:
        settle_gates_to_cost(model, self.table, value)

    def reach(
        self, method: str, prune: Callable[[float], PreTrainedModel], measure: Callable[[PreTrainedModel], float]
    ) -> PreTrainedModel:
        # Predictions are off by some percent, more for strongly pruned models.
        value, fastest, reached = self.speedup, None, 0.0
        for _ in range(ATTEMPTS):
            model = prune(value)
            found = measure(model)
            if found < UNLIKELY * value:
                # Something else ran meanwhile, rather than such an error of the prediction.
                found = max(found, measure(model))
            if found > reached:
                fastest, reached = model, found
            missing = MEASUREMENT_MARGIN * self.speedup / found
            if missing <= 1 or not self._is_reachable(missing * value, method):
                break
            value *= missing
        if reached < self.speedup:
            logger.warning(
                f"{method}: the model pruned for {self.speedup:g} × is {reached:.2f} × as fast as the dense model. "
                "Measure on a machine that runs nothing else, or set a lower target_speedup."
            )
        return fastest

    def _is_reachable(self, speedup: float, method: str) -> bool:
        try:
            self.table.check_target(speedup, self.parts_of(method))
        except ValueError:
            return False
        return True
