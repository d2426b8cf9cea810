# Licensed under the Apache License, Version 2.0.
"""A Trainer that evaluates, saves and returns the moving average of the weights that it trains."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerCallback


TRAINED_WEIGHTS = "trained_weights.safetensors"


class WeightAverage:
    """Exponential moving average of parameters, which begins as their values.

    After step t, counted from 1, it is `d_t · average + (1 − d_t) · parameter` with `d_t = min(decay, (1 + t) / (10 +
    t))`: short at first, so that the initial weights are soon forgotten.

    Args:
        parameters (`Mapping[str, nn.Parameter]`): What is averaged, by name.
        decay (`float`): Largest d_t, from 0 (the parameters themselves) to below 1: the average is over about
            `1 / (1 − decay)` steps.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self.decay = decay
        self._parameters = dict(parameters)
        self._values = [p.detach().clone() for p in self._parameters.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the parameters after a step, whose number is from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._values, self._trained(), 1 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Puts the average into the parameters for good."""
        torch._foreach_copy_(self._trained(), self._values)

    @contextmanager
    def applied(self) -> Iterator[dict[str, torch.Tensor]]:
        """Puts the average into the parameters for a while; yields what was trained, by name."""
        trained = [p.detach().clone() for p in self._parameters.values()]
        self.apply()
        try:
            yield dict(zip(self._parameters, trained))
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._trained(), trained)

    @torch.no_grad()
    def load_trained(self, file: Path) -> None:
        """Takes the parameters as they are for the average, and what was trained from a file.

        Raises:
            ValueError: if the file holds other parameters.
        """
        torch._foreach_copy_(self._values, self._trained())
        trained = load_file(file)
        if trained.keys() != self._parameters.keys():
            name = min(trained.keys() ^ self._parameters.keys())
            raise ValueError(
                f"{file} is of another model, or of another choice of what is trained: {name} is in one of them alone."
            )
        for name, p in self._parameters.items():
            p.copy_(trained[name])

    def _trained(self) -> list[torch.Tensor]:
        return [p.detach() for p in self._parameters.values()]


class WeightAverageTrainer(Trainer):
    """`Trainer` that with `args.ema_decay` evaluates, saves and returns averaged weights, see [`WeightAverage`].

    All that is trained is averaged, but for gates. Checkpoints hold the averaged weights as the model and those that
    are trained beside them, in `trained_weights.safetensors`, which a resumed run goes on with. Callbacks that look at
    the model while it is trained see what is trained. Averaging costs a copy of what is trained, a second one while
    the model is evaluated or saved, and no random number: the weights that are trained are the same, bit for bit.

    Raises:
        ValueError: if weights are spread over processes (FSDP, DeepSpeed); while training, if a checkpoint that is to
            be resumed has averaged weights and the run has none, or the other way round.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._average: WeightAverage | None = None
        self._ema_decay = getattr(self.args, "ema_decay", 0.0)
        if not self._ema_decay:
            return
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                f"ema_decay={self._ema_decay}, but weights that FSDP or DeepSpeed spread over processes are not "
                "averaged; set it to 0, or train without these."
            )
        self.add_callback(_AverageCallback(self))

    def _new_average(self) -> WeightAverage:
        model = self.accelerator.unwrap_model(self.model)
        # How far each gate is open follows a plan of its own, down to the last step.
        gates = model.head_gates() if hasattr(model, "head_gates") else {}
        left_out = {id(gate.log_alpha) for gate in gates.values()}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in left_out}
        return WeightAverage(trained, self._ema_decay)

    def _averaged(self):
        """Averaged weights in the model for a while, if there are any; gives what is trained by name, or None."""
        return nullcontext() if self._average is None else self._average.applied()

    def train(self, *args, **kwargs):
        """The stock method, after which the model has the averaged weights."""
        self._average = None
        try:
            output = super().train(*args, **kwargs)
            if self._average is not None:
                self._average.apply()
            return output
        finally:
            self._average = None

    def evaluation_loop(self, *args, **kwargs):
        """The stock loop, with the averaged weights."""
        with self._averaged():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        """Saves the model with the averaged weights; in a checkpoint, what is trained beside it."""
        with self._averaged() as trained:
            super().save_model(output_dir, _internal_call)
        if trained is not None and _internal_call and self.args.should_save:
            save_file(
                {name: value.contiguous() for name, value in trained.items()}, Path(output_dir) / TRAINED_WEIGHTS
            )

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        path = Path(resume_from_checkpoint) / TRAINED_WEIGHTS
        if path.is_file() != bool(self._ema_decay):
            found = "has averaged weights" if path.is_file() else "has no averaged weights"
            raise ValueError(
                f"{resume_from_checkpoint} {found}, but ema_decay is {self._ema_decay}: resume it with the ema_decay "
                "of its run, or train anew from its model."
            )
        if self._ema_decay:
            self._average = self._new_average()
            self._average.load_trained(path)

    def _load_best_model(self):
        super()._load_best_model()
        # These are averaged weights, of an earlier step.
        self._average = None


class _AverageCallback(TrainerCallback):
    """Begins the average of a run, unless its checkpoint had one, and takes in each step."""

    def __init__(self, trainer: WeightAverageTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if self.trainer._average is None:
            self.trainer._average = self.trainer._new_average()

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer._average.update(state.global_step)
