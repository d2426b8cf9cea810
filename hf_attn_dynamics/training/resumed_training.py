# Licensed under the Apache License, Version 2.0.
"""Exact resumption of runs: from complete checkpoints, also within a stream."""

import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerState

from ..models.compat import TRAINER_STATE_NAME, load_random_state
from .resuming import whole_checkpoint
from .training_hooks import TrainingHooksMixin


EPOCH_RNG_STATE = "epoch_rng_state.safetensors"  # in checkpoints: random state at the beginning of the epoch


class ResumedTrainingMixin(TrainingHooksMixin):
    """A trainer that resumes from the newest complete checkpoint, at exactly the next batch.

    The stock trainer treats a stream as one endless epoch, and restarts it; it resumes an epoch with another order of
    examples if the sampler has no generator; and it takes one more step from the checkpoint of the last step.
    """

    def __init__(self, *args, **kwargs):
        self._resumed_from: str | None = None  # the checkpoint, while a resumed run is trained
        self._pass = _PassOverData(self)
        super().__init__(*args, **kwargs)
        self.add_callback(self._pass)

    @property
    def pass_number(self) -> int:
        """Number of the current epoch, from 0."""
        return self._pass.number

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """The stock method, which only resumes complete checkpoints.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): A checkpoint; or `True` for the newest complete one
                in `output_dir`, see [`newest_checkpoint`].

        Raises:
            ValueError: if the checkpoint is incomplete, or there is no complete one.
        """
        self._resumed_from = whole_checkpoint(resume_from_checkpoint, self.args.output_dir)
        try:
            return super().train(self._resumed_from, *args, **kwargs)
        finally:
            self._resumed_from = None

    def _begin_training(self) -> None:
        super()._begin_training()
        best = self.state.best_model_checkpoint
        moved = best and Path(self.args.output_dir) / Path(best).name
        if moved and not Path(best).is_dir() and moved.is_dir():
            # The stock trainer would silently keep the last weights if the folder of a run has been moved.
            self.state.best_model_checkpoint = str(moved)

    def _init_training_state(self, max_steps, num_steps, num_epochs, resume_from_checkpoint, trial):
        """Number of the epoch, and of the micro-batch within it, at which training starts."""
        begins = super()._init_training_state(max_steps, num_steps, num_epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is not None and num_epochs == sys.maxsize and self.state.global_step:
            saved = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
            # For a stream, `epoch` is the number of the epoch plus the fraction of `max_steps` taken in it.
            passes = math.ceil(saved.epoch) - 1
            steps = 0 if self.args.ignore_data_skip else round((saved.epoch - passes) * saved.max_steps)
            begins = passes, steps * self.args.gradient_accumulation_steps
        if self.state.global_step >= self.state.max_steps:
            # The last step has been taken: start no epoch.
            begins = num_epochs, 0
        self._pass.begin_at(*begins)
        return begins

    def save_model(self, output_dir=None, _internal_call=False):
        """The stock method; checkpoints also store the random state at the beginning of the epoch."""
        super().save_model(output_dir, _internal_call)
        is_checkpoint = _internal_call and output_dir is not None and not self.args.save_only_model
        if is_checkpoint and self.args.should_save and self._pass.random_state is not None:
            # Sharded weights are written later, so the folder may not exist yet.
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            save_file({"cpu": self._pass.random_state}, Path(output_dir) / EPOCH_RNG_STATE)


class _PassOverData(TrainerCallback):
    """Records the random state at the beginning of each epoch, and restores it for a resumed one.

    Attributes:
        number (`int`): Number of the epoch, from 0.
        random_state (`torch.Tensor`, *optional*): State of the CPU generator at its beginning.
    """

    def __init__(self, trainer: ResumedTrainingMixin):
        self.trainer = trainer
        self.random_state: torch.Tensor | None = None
        self.begin_at(0, 0)

    def begin_at(self, number: int, micro_batches: int) -> None:
        """Sets the number of the next epoch, and of its micro-batches that have been trained on."""
        self.number, self.micro_batches = number - 1, micro_batches

    def on_epoch_begin(self, args, state, control, **kwargs):
        # Counted, since for a stream `state.epoch` is a fraction of `max_steps`.
        self.number += 1
        checkpoint, resumed_within = self.trainer._resumed_from, self.micro_batches
        if checkpoint is not None and resumed_within is not None:
            before = Path(checkpoint) / EPOCH_RNG_STATE
            if not resumed_within:
                load_random_state(self.trainer, checkpoint)
            elif before.is_file():
                # The stock loop skips micro-batches, but a sampler without a generator would use another order.
                torch.set_rng_state(load_file(before)["cpu"])
        self.micro_batches = None
        self.random_state = torch.get_rng_state()
