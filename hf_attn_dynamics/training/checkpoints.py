# Licensed under the Apache License, Version 2.0.
"""Looking at a model at uneven steps of its training: often at the beginning, when most of it changes."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .random_state import random_state_kept
from .resumable_callback import LastStepCallback


# The first steps, and how many there are between any two later ones (Snell et al. 2021, appendix A.8).
SCHEDULES = {
    "classification": ((0, 10, 50, 100, 150, 200, 250), 250),
    "translation": ((0, 50, 100, 500, 1000, 1500), 2000),
}


def checkpoint_steps(task: str, max_steps: int) -> list[int]:
    """Steps at which Snell et al. 2021 look at their models (appendix A.8), and the last one.

    Args:
        task (`str`): `classification`: 0, 10, 50, 100, 150, 200, 250, and then every 250; or `translation`: 0, 50,
            100, 500, 1,000, 1,500, and then every 2,000.
        max_steps (`int`): Steps of the training.

    Returns:
        `list[int]`: in ascending order.

    Raises:
        ValueError: if there is no such task, or no step.

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
    """Measures a model at given steps of its training, and keeps the best one.

    Training goes on as if nothing had happened: random numbers are the same. Works with any `Trainer`, and goes on
    with a run that is resumed: the history is the one of a run that was never stopped. All processes measure the same,
    and the main one writes.

    Args:
        steps (iterable of `int`): Numbers of optimizer steps after which to measure, as of [`checkpoint_steps`]; 0 is
            before the first one. The last step is measured in any case, unless a run is stopped early with
            `load_best_model_at_end`.
        measure (callable): Takes the model; returns figures by name, as [`AgreementTracker`] does. It is to leave the
            model as it is.
        best_by (`str`, *optional*): The figure whose largest value makes the best checkpoint; the first one of
            several.
        best_folder (`str` or `Path`, *optional*): With `best_by`: where that model is saved, as soon as it is the best
            so far.
        log (callable, *optional*): Takes the figures of each checkpoint, with `eval_` before their names. With
            `trainer.log` they reach trackers and progress bars.

    Attributes:
        history (`list[dict[str, float]]`): For each checkpoint its `step` and its figures, in their order.

    Raises:
        ValueError: if a step is negative, or only one of `best_by` and `best_folder` is given; while training, if
            `measure` does not return that figure.

    Example:
        >>> callback = CheckpointCallback(checkpoint_steps("translation", 1500), lambda model: {"accuracy": 0.5})
        >>> callback.history  # nothing yet: give it to a trainer, as in callbacks=[callback]
        []
    """

    made_of = "what it measures"

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
            raise ValueError(f"best_by={best_by!r} and best_folder={best_folder!r} need each other; give both.")
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
        """The entry of the history that is best by `best_by`.

        Raises:
            ValueError: if there is none, or `best_by` is not given.
        """
        values = [entry for entry in self.history if self.best_by and not math.isnan(entry[self.best_by])]
        if not values:
            raise ValueError(f"no checkpoint has a value of best_by={self.best_by!r}.")
        return max(values, key=lambda entry: entry[self.best_by])

    def _is_best(self, entry: dict[str, float]) -> bool:
        return self.best_by is not None and not math.isnan(entry[self.best_by]) and self.best() is entry

    def on_step_begin(self, args, state, control, **kwargs):
        # Not when the step before ends, which its time would then include.
        if state.global_step in self.steps:
            self._measure(args, state, **kwargs)

    def _measure(self, args, state, model=None, processing_class=None, **kwargs) -> None:
        if self.history and self.history[-1]["step"] == state.global_step:
            return
        from accelerate.utils import extract_model_from_parallel

        model = extract_model_from_parallel(model, keep_torch_compile=False)
        with random_state_kept(model.device):
            # Numbers of NumPy and PyTorch as those of Python, which a checkpoint can hold.
            figures = {
                name: value.item() if hasattr(value, "item") else value for name, value in self.measure(model).items()
            }
        if self.best_by is not None and self.best_by not in figures:
            raise ValueError(f"best_by is {self.best_by!r}, but measure returns {', '.join(figures) or 'nothing'}.")
        entry = {"step": state.global_step, **figures}
        self.history.append(entry)
        if state.is_world_process_zero and self._is_best(entry):
            for part in (model, processing_class):
                if part is not None:
                    part.save_pretrained(self.best_folder)
        if self.log is not None:
            self.log({f"eval_{name}": value for name, value in figures.items()})
