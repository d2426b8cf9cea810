# Licensed under the Apache License, Version 2.0.
"""Collators whose masks change with every epoch of training, but not between evaluations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from .resumed_training import ResumedTrainingMixin


class EpochMasks(TrainerCallback):
    """Calls `set_epoch` of a trainer's collator at the beginning of each epoch."""

    def __init__(self, trainer: ResumedTrainingMixin):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.data_collator.set_epoch(self.trainer.pass_number)


@contextmanager
def masks_of_evaluation(collator: Any) -> Iterator[None]:
    """Context in which a collator with epochs uses the masks of epoch 0, so that all evaluations are comparable."""
    epoch = getattr(collator, "epoch", None)
    if epoch is None:
        yield
        return
    collator.set_epoch(0)
    try:
        yield
    finally:
        collator.set_epoch(epoch)
