# Licensed under the Apache License, Version 2.0.
"""Runs that are resumed end as if they had never been stopped: from whole checkpoints, in the middle of streams."""

import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerState

from ..models.compat import TRAINER_STATE_NAME, load_random_state
from .resuming import whole_checkpoint
from .training_hooks import TrainingHooksMixin


EPOCH_RNG_STATE = "epoch_rng_state.safetensors"  # in checkpoints: random numbers when the pass over the data began


class ResumedTrainingMixin(TrainingHooksMixin):
    """A trainer that goes on from the newest checkpoint that is whole, at the very batch that would have been next.

    The stock trainer takes a stream for one pass that never ends, and would go on from its beginning; the order that a
    sampler without a generator of its own draws for a resumed pass would be another one; and a run that goes on from
    the checkpoint of its last step would take a step more.
    """

    def __init__(self, *args, **kwargs):
        self._resumed_from: str | None = None  # the checkpoint, while a run that is resumed is trained
        self._pass = _PassOverData(self)
        super().__init__(*args, **kwargs)
        self.add_callback(self._pass)

    @property
    def pass_number(self) -> int:
        """Number of the pass over the data that has begun last, from 0."""
        return self._pass.number

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """The stock method, but for checkpoints that are not whole.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): A checkpoint; or `True` for the newest one in
                `output_dir` that is whole, see [`newest_checkpoint`].

        Raises:
            ValueError: if the checkpoint is not whole, or there is none that is.
        """
        self._resumed_from = whole_checkpoint(resume_from_checkpoint, self.args.output_dir)
        try:
            return super().train(self._resumed_from, *args, **kwargs)
        finally:
            self._resumed_from = None

    def _init_training_state(self, max_steps, num_steps, num_epochs, resume_from_checkpoint, trial):
        """Where training begins: the number of the pass over the data, and of the micro-batch within it."""
        begins = super()._init_training_state(max_steps, num_steps, num_epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is not None and num_epochs == sys.maxsize and self.state.global_step:
            saved = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
            # Of a stream, `epoch` is the number of the pass, and then the share of `max_steps` done within it.
            passes = math.ceil(saved.epoch) - 1
            steps = 0 if self.args.ignore_data_skip else round((saved.epoch - passes) * saved.max_steps)
            begins = passes, steps * self.args.gradient_accumulation_steps
        if self.state.global_step >= self.state.max_steps:
            # The last step has been taken: there is no pass to begin.
            begins = num_epochs, 0
        self._pass.begin_at(*begins)
        return begins

    def save_model(self, output_dir=None, _internal_call=False):
        """The stock method; beside the model of a checkpoint, the random numbers with which the pass began."""
        super().save_model(output_dir, _internal_call)
        is_checkpoint = _internal_call and output_dir is not None and not self.args.save_only_model
        if is_checkpoint and self.args.should_save and self._pass.random_state is not None:
            # Sharded weights are written later, into a folder that need not be there yet.
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            save_file({"cpu": self._pass.random_state}, Path(output_dir) / EPOCH_RNG_STATE)


class _PassOverData(TrainerCallback):
    """Begins a pass that is resumed with the random numbers that it began with, and keeps those of each pass.

    Attributes:
        number (`int`): Number of the pass, from 0.
        random_state (`torch.Tensor`, *optional*): State of the generator of the CPU when it began.
    """

    def __init__(self, trainer: ResumedTrainingMixin):
        self.trainer = trainer
        self.random_state: torch.Tensor | None = None
        self.begin_at(0, 0)

    def begin_at(self, number: int, micro_batches: int) -> None:
        """Says which pass the next one is, and how many micro-batches of it have been trained on."""
        self.number, self.micro_batches = number - 1, micro_batches

    def on_epoch_begin(self, args, state, control, **kwargs):
        # Counted, since for a stream `state.epoch` is the share of `max_steps`.
        self.number += 1
        checkpoint, resumed_within = self.trainer._resumed_from, self.micro_batches
        if checkpoint is not None and resumed_within is not None:
            before = Path(checkpoint) / EPOCH_RNG_STATE
            if not resumed_within:
                load_random_state(self.trainer, checkpoint)
            elif before.is_file():
                # The stock loop skips what was trained on, but a sampler that has no generator draws another order.
                torch.set_rng_state(load_file(before)["cpu"])
        self.micro_batches = None
        self.random_state = torch.get_rng_state()
