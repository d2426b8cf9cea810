# Licensed under the Apache License, Version 2.0.
"""Collators that mask each example anew in every pass over the data, and alike in every evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from .resumed_training import ResumedTrainingMixin


class EpochMasks(TrainerCallback):
    """Tells the collator of a trainer, which has a method `set_epoch`, which pass over the data begins."""

    def __init__(self, trainer: ResumedTrainingMixin):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.data_collator.set_epoch(self.trainer.pass_number)


@contextmanager
def masks_of_evaluation(collator: Any) -> Iterator[None]:
    """Lets a collator with epochs mask as in the first one, so that every evaluation is to predict the same tokens."""
    epoch = getattr(collator, "epoch", None)
    if epoch is None:
        yield
        return
    collator.set_epoch(0)
    try:
        yield
    finally:
        collator.set_epoch(epoch)
