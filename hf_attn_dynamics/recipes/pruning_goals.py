# Licensed under the Apache License, Version 2.0.
"""What `prune_heads` prunes a model to: a number of heads, or a speed-up."""

from collections.abc import Callable
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
from .arguments.prune_heads import PruneArguments


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

    def prune(self, model: PreTrainedModel, scores: Any) -> None:
        """Removes the parts with the lowest scores."""


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

    def prune(self, model: PreTrainedModel, scores: HeadScores) -> None:
        retain_heads(model, self.keep, scores)


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

    def scores(self, method: str, model: PreTrainedModel, batches: Batches, seed: int, progress: bool) -> UnitScores:
        data = () if method == "random" else batches()
        return unit_importance(model, data, method, seed=seed, progress=progress)

    def read_scores(self, path: Path) -> UnitScores:
        return UnitScores.load(path)

    def prune(self, model: PreTrainedModel, scores: UnitScores) -> None:
        # Blocks are removed where no head or unit of theirs is left.
        parts = [part for part in self.parts if part != "blocks"]
        select_parts(model, scores, self.table, self.speedup, parts=parts).apply(model)
