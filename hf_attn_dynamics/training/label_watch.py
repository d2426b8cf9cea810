# Licensed under the Apache License, Version 2.0.
"""A run that meets no label is refused, or warned of where guidance can be learnt without any."""

import logging

import torch
from transformers import TrainerCallback


logger = logging.getLogger(__name__)

UNLABELLED_STEPS = 100  # that a run may begin with


class LabelWatch(TrainerCallback):
    """Counts labels until there are some.

    Args:
        trainer (`HeadwiseTrainerMixin`): The trainer, which calls [`add`].

    Raises:
        ValueError: while training, if no label counts in the first pass over the data, in its first 100 steps or in
            the whole run, whichever is shortest, and the model is not guided either.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.met: torch.Tensor | int | None = None  # so far; `None` where nothing is to be found out any more

    def add(self, labels: torch.Tensor | None) -> None:
        """Counts the labels of a step; `None` where they are not known before its loss is computed."""
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
        """Whether there has been a label; all processes look at once."""
        if self.met is None:
            return
        met = torch.as_tensor(self.met, device=self.trainer.args.device)
        if not int(self.trainer.accelerator.reduce(met, "sum")):
            if not at_last:
                return
            self._refuse(steps)
        self.met = None

    def _refuse(self, steps: int) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        found = (
            f"train_dataset has given no label in {steps} steps: all {' and '.join(model.label_columns)} are ignored"
        )
        if not self.trainer.is_guided:
            self.met = None
            raise ValueError(f"{found}, and there is nothing to learn; give labels that are not -100.")
        logger.warning("%s, and guidance alone has been learnt.", found)
