# Licensed under the Apache License, Version 2.0.
"""Measurements of a model at uneven training steps, dense at the beginning."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .random_state import random_state_kept
from .resumable_callback import LastStepCallback


# The first steps, and the distance between later ones (Snell et al. 2021, appendix A.8).
SCHEDULES = {
    "classification": ((0, 10, 50, 100, 150, 200, 250), 250),
    "translation": ((0, 50, 100, 500, 1000, 1500), 2000),
}


def checkpoint_steps(task: str, max_steps: int) -> list[int]:
    """Steps at which Snell et al. 2021 evaluate their models (appendix A.8), and the last step.

    Args:
        task (`str`): `classification`: 0, 10, 50, 100, 150, 200, 250, and then every 250; or `translation`: 0, 50,
            100, 500, 1,000, 1,500, and then every 2,000.
        max_steps (`int`): Number of training steps.

    Returns:
        `list[int]`: in ascending order.

    Raises:
        ValueError: if `task` is unknown, or `max_steps` is less than 1.

    Example:
        >>> checkpoint_steps("classification", 600)
        [0, 10, 50, 100, 150, 200, 250, 500, 600]
    """
    if task not in SCHEDULES:
        raise ValueError(f"task must be {' or '.join(SCHEDULES)}, got {task!r}.")
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}.")
    first, distance = SCHEDULES[task]
    steps = [*first, *range(first[-1] + distance, max_steps, distance)]
    return [*(step for step in steps if step < max_steps), max_steps]


class CheckpointCallback(LastStepCallback):
    """Measures a model at given training steps, and saves the best one.

    Measuring does not change training, random numbers included. Works with any `Trainer`; a resumed run has the same
    history as an uninterrupted one. All processes measure, and the main process writes.

    Args:
        steps (iterable of `int`): Numbers of optimizer steps after which to measure, such as [`checkpoint_steps`]; 0
            is before the first step. The last step is always measured, unless a run with `load_best_model_at_end` is
            stopped early.
        measure (callable): Takes the model, which it must not change, and returns metrics by name, such as
            [`AgreementTracker`].
        best_by (`str`, *optional*): Metric whose largest value marks the best checkpoint; the first one of equal ones.
        best_folder (`str` or `Path`, *optional*): With `best_by`: folder to which each best model so far is saved.
        log (callable, *optional*): Takes the metrics of each checkpoint, with names prefixed by `eval_`, such as
            `trainer.log`.

    Attributes:
        history (`list[dict[str, float]]`): `step` and metrics of each checkpoint, in order.

    Raises:
        ValueError: if a step is negative, or only one of `best_by` and `best_folder` is given; while training, if
            `measure` does not return the metric `best_by`.

    Example:
        >>> callback = CheckpointCallback(checkpoint_steps("translation", 1500), lambda model: {"accuracy": 0.5})
        >>> callback.history  # empty until it is passed to a trainer, as in callbacks=[callback]
        []
    """

    made_of = "its metrics"

    def __init__(
        self,
        steps: Iterable[int],
        measure: Callable[[PreTrainedModel], dict[str, float]],
        best_by: str | None = None,
        best_folder: str | Path | None = None,
        log: Callable[[dict[str, float]], None] | None = None,
    ):
        self.steps = frozenset(steps)
        if min(self.steps, default=0) < 0:
            raise ValueError(f"steps must not be negative, got {min(self.steps)}.")
        if (best_by is None) != (best_folder is None):
            raise ValueError(f"best_by={best_by!r} and best_folder={best_folder!r} need each other; pass both.")
        self.measure = measure
        self.best_by = best_by
        self.best_folder = best_folder
        self.log = log
        self._forget()

    def _forget(self) -> None:
        self.history: list[dict[str, float]] = []

    def _remembered(self) -> dict[str, Any]:
        return {"history": self.history}

    def _recall(self, remembered: dict[str, Any]) -> None:
        self.history = list(remembered["history"])

    def best(self) -> dict[str, float]:
        """The entry of the history with the largest `best_by`.

        Raises:
            ValueError: if there is none, or `best_by` is `None`.
        """
        values = [entry for entry in self.history if self.best_by and not math.isnan(entry[self.best_by])]
        if not values:
            raise ValueError(f"no checkpoint has a value of best_by={self.best_by!r}.")
        return max(values, key=lambda entry: entry[self.best_by])

    def _is_best(self, entry: dict[str, float]) -> bool:
        return self.best_by is not None and not math.isnan(entry[self.best_by]) and self.best() is entry

    def on_step_begin(self, args, state, control, **kwargs):
        # At the beginning of a step, since the end of the previous one belongs to its measured time.
        if state.global_step in self.steps:
            self._measure(args, state, **kwargs)

    def _measure(self, args, state, model=None, processing_class=None, **kwargs) -> None:
        if self.history and self.history[-1]["step"] == state.global_step:
            return
        from accelerate.utils import extract_model_from_parallel

        model = extract_model_from_parallel(model, keep_torch_compile=False)
        with random_state_kept(model.device):
            # Scalars of NumPy and PyTorch are converted for JSON.
            metrics = {
                name: value.item() if hasattr(value, "item") else value for name, value in self.measure(model).items()
            }
        if self.best_by is not None and self.best_by not in metrics:
            raise ValueError(f"best_by is {self.best_by!r}, but measure returns {', '.join(metrics) or 'nothing'}.")
        entry = {"step": state.global_step, **metrics}
        self.history.append(entry)
        if state.is_world_process_zero and self._is_best(entry):
            for part in (model, processing_class):
                if part is not None:
                    part.save_pretrained(self.best_folder)
        if self.log is not None:
            self.log({f"eval_{name}": value for name, value in metrics.items()})
