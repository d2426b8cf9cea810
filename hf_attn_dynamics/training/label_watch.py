# Licensed under the Apache License, Version 2.0.
"""Detection of training data without labels, or without targets of guided heads."""

import logging

import torch
from transformers import TrainerCallback


logger = logging.getLogger(__name__)

UNLABELLED_STEPS = 100  # largest number of steps without labels at the beginning of a run


class LabelWatch(TrainerCallback):
    """Stops a run without labels; only warns if heads are guided, since guidance needs none.

    Args:
        trainer (`HeadwiseTrainerMixin`): The trainer, which calls [`add`].

    Raises:
        ValueError: while training, if the model is not guided and all labels are ignored in the first epoch, the first
            100 steps or the whole run, whichever is shortest.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.met: torch.Tensor | int | None = None  # labels so far; `None` once the check is complete

    def add(self, labels: torch.Tensor | None) -> None:
        """Counts the labels of a step; `None` if their number is unknown."""
        if self.met is not None:
            self.met = None if labels is None else self.met + labels

    def on_train_begin(self, args, state, control, **kwargs):
        self.met = 0 if self.trainer.is_headwise and not state.global_step else None

    def on_step_end(self, args, state, control, **kwargs):
        self._look(state.global_step, at_last=state.global_step in (UNLABELLED_STEPS, state.max_steps))

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.global_step:
            self._look(state.global_step, at_last=True)

    def _look(self, steps: int, at_last: bool) -> None:
        """Checks whether any process has had a label; all processes must call it."""
        if self.met is None:
            return
        met = torch.as_tensor(self.met, device=self.trainer.args.device)
        met = self.trainer.accelerator.reduce(met, "sum")
        if not bool(met.all()):
            if not at_last:
                return
            self._refuse(steps, met)
        self.met = None

    def _refuse(self, steps: int, met: torch.Tensor) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        found = f"train_dataset had no labels in {steps} steps: all {' and '.join(model.label_columns)} are ignored"
        if not self.trainer.is_guided:
            self.met = None
            raise ValueError(f"{found}; pass labels that are not -100.")
        logger.warning("%s; only guidance is trained.", found)


class TargetWatch(LabelWatch):
    """Stops a run in which a target of guided heads has no row that counts, as [`LabelWatch`] does without labels.

    Raises:
        ValueError: while training, if a column has no target in the first epoch, the first 100 steps or the whole run,
            whichever is shortest.
    """

    def _refuse(self, steps: int, met: torch.Tensor) -> None:
        self.met = None
        missing = [name for name, count in zip(self.columns, met.tolist()) if not count]
        raise ValueError(
            f"train_dataset had no target in {' and '.join(missing)} in {steps} steps: all are -100, or weights of 0, "
            "or in rows that do not count; pass targets, or train with guidance=None."
        )

    def add_counts(self, counts: dict[str, torch.Tensor]) -> None:
        """Counts the rows of a step by column; empty if batches bring no targets."""
        self.columns = sorted(counts)
        self.add(torch.stack([counts[name] for name in self.columns]) if counts else None)
