# Licensed under the Apache License, Version 2.0.
"""A Trainer that evaluates, saves and returns the moving average of the weights that it trains."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback

from ..models.precision import at_least_single
from .prunable_trainer import PrunableMixin
from .resumed_training import ResumedTrainingMixin


TRAINED_WEIGHTS = "trained_weights.safetensors"
AVERAGE = "average/"  # before names in that file


class WeightAverage:
    """Exponential moving average of parameters, which begins as their values.

    `torch.optim.swa_utils.AveragedModel` would copy the whole model, average what is not trained as well, in the
    precision that it has, and lose what it averages when heads are removed; the step of the average is PyTorch's.

    After step t, counted from 1, it is `d_t · average + (1 − d_t) · parameter` with `d_t = min(decay, (1 + t) / (10 +
    t))`: short at first, so that the initial weights are soon forgotten. It is kept in single precision at least, in
    which small steps are not lost.

    Args:
        parameters (`Mapping[str, nn.Parameter]`): What is averaged, by name.
        decay (`float`): Largest d_t, from 0 (the parameters themselves) to below 1: the average is over about
            `1 / (1 − decay)` steps.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self.decay = decay
        self._named = dict(parameters)
        self._values = [at_least_single(value).clone() for value in self._trained()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the parameters after a step, whose number is from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(decay)(self._values, [at_least_single(value) for value in self._trained()], step)

    @torch.no_grad()
    def apply(self) -> None:
        """Puts the average into the parameters for good."""
        _copy(self._values, self._trained())

    @contextmanager
    def applied(self) -> Iterator[dict[str, torch.Tensor]]:
        """Puts the average into the parameters for a while; yields what a checkpoint needs beside these, by name."""
        trained = [value.clone() for value in self._trained()]
        self.apply()
        beside = dict(zip(self._named, trained))
        # What parameters in half precision cannot hold.
        beside |= {
            AVERAGE + name: value
            for (name, p), value in zip(self._named.items(), self._values)
            if p.dtype != value.dtype
        }
        try:
            yield beside
        finally:
            _copy(trained, self._trained())

    def load(self, beside: Mapping[str, torch.Tensor]) -> None:
        """Takes the parameters as they are for the average, and what was trained from what is saved beside them."""
        averages = [beside.get(AVERAGE + name, value) for name, value in zip(self._named, self._trained())]
        _copy(averages, self._values)
        _copy([beside[name] for name in self._named], self._trained())

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Averages these from now on: those that are averaged already go on, others begin as their values."""
        held = {id(parameter): value for parameter, value in zip(self._named.values(), self._values)}
        self._named = dict(parameters)
        self._values = [
            held[id(p)] if id(p) in held else at_least_single(p.detach()).clone() for p in parameters.values()
        ]

    def _trained(self) -> list[torch.Tensor]:
        return [p.detach() for p in self._named.values()]


def _copy(values: Iterable[torch.Tensor], places: Iterable[torch.Tensor]) -> None:
    for value, place in zip(values, places):
        place.copy_(value)


class WeightAverageMixin(ResumedTrainingMixin):
    """A trainer that with `args.ema_decay` evaluates, saves and returns averaged weights, see [`WeightAverage`].

    All that is trained is averaged, but for gates. Checkpoints hold the averaged weights as the model and those that
    are trained beside them, in `trained_weights.safetensors`, which a resumed run goes on with; with
    `save_only_model`, which cannot be resumed, they hold the average alone. Callbacks that look at the model while it
    is trained see what is trained. Averaging costs a copy of what is trained (in single precision at least), a second
    one while the model is evaluated or saved, and no random number: the weights that are trained are the same, bit for
    bit. Where heads are removed while training, the average of what is left of their layers begins anew.

    Raises:
        ValueError: if weights are spread over processes (FSDP, DeepSpeed); while training, if there are none to
            average, or a checkpoint that is to be resumed has averaged weights and the run has none, or the other way
            round.
    """

    reads = ("ema_decay",)

    def __init__(self, *args, **kwargs):
        self._average: WeightAverage | None = None  # of the run
        super().__init__(*args, **kwargs)
        self.add_callback(_AverageCallback(self))

    def _read_arguments(self) -> None:
        super()._read_arguments()
        if (decay := self._argument("ema_decay")) and self._holds_parts:
            raise ValueError(
                f"ema_decay={decay}, but weights that FSDP or DeepSpeed spread over processes are not averaged; set "
                "it to 0, or train without these."
            )

    def _new_average(self) -> WeightAverage:
        return WeightAverage(self._averaged_parameters(), self._argument("ema_decay"))

    def _averaged_parameters(self) -> dict[str, nn.Parameter]:
        model = self._plain_model
        # How far each gate is open follows a plan of its own, down to the last step.
        gates = model.head_gates() if hasattr(model, "head_gates") else {}
        left_out = {id(gate.log_alpha) for gate in gates.values()}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in left_out}
        if not trained:
            raise ValueError(
                f"ema_decay={self._argument('ema_decay')}, but {type(model).__name__} trains nothing that is averaged "
                "(gates are not); set it to 0."
            )
        return trained

    def _prepare_training(self) -> None:
        super()._prepare_training()
        if self._resumed_from is None:
            return
        decay, path = self._argument("ema_decay"), Path(self._resumed_from) / TRAINED_WEIGHTS
        if path.is_file() != bool(decay):
            found = "has averaged weights" if path.is_file() else "has no averaged weights"
            raise ValueError(
                f"{self._resumed_from} {found}, but ema_decay is {decay}: resume it with the ema_decay of its run, or "
                "train anew from its model (as after save_only_model=True, which keeps the average alone)."
            )
        if decay:
            with safe_open(path, "pt") as saved:
                names = saved.keys()
            if other := {name.removeprefix(AVERAGE) for name in names} ^ self._averaged_parameters().keys():
                raise ValueError(
                    f"{TRAINED_WEIGHTS} is of another model, or of another choice of what is trained: {min(other)} is "
                    "in one of them alone."
                )

    def _begin_training(self) -> None:
        super()._begin_training()
        if self._argument("ema_decay"):
            self._average = self._new_average()
            if self._resumed_from is not None:
                # The weights of the checkpoint, which are in place by now, are the average.
                self._average.load(load_file(Path(self._resumed_from) / TRAINED_WEIGHTS))

    def _model_changed(self) -> None:
        super()._model_changed()
        if self._average is not None:
            self._average.follow(self._averaged_parameters())

    def _averaged(self):
        """Averaged weights in the model for a while, if there are any; gives what is saved beside them, or None."""
        self._follow_model()
        return nullcontext() if self._average is None else self._average.applied()

    def train(self, *args, **kwargs):
        """The stock method, after which the model has the averaged weights."""
        self._average = None
        try:
            output = super().train(*args, **kwargs)
            self._follow_model()
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
        with self._averaged() as beside:
            super().save_model(output_dir, _internal_call)
            if beside is not None and _internal_call and self.args.should_save and not self.args.save_only_model:
                beside = {name: value.contiguous() for name, value in beside.items()}
                save_file(beside, Path(output_dir) / TRAINED_WEIGHTS)

    def _load_best_model(self):
        super()._load_best_model()
        # These are averaged weights, of an earlier step.
        self._average = None


class WeightAverageTrainer(WeightAverageMixin, PrunableMixin, Trainer):
    """`Trainer` that averages weights, and whose model may lose heads while it trains, as [`HeadwiseTrainer`]."""


class _AverageCallback(TrainerCallback):
    """Takes each step into the average."""

    def __init__(self, trainer: WeightAverageMixin):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer._average is not None:
            self.trainer._average.update(state.global_step)
