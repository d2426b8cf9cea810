# Licensed under the Apache License, Version 2.0.
"""Trainers with an exponential moving average of the weights."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback

from ..models.head_gates import gates_of
from ..models.precision import at_least_single
from .prunable_trainer import PrunableMixin
from .resumed_training import ResumedTrainingMixin


TRAINED_WEIGHTS = "trained_weights.safetensors"
AVERAGE = "average/"  # prefix of averages in that file


class WeightAverage:
    """Exponential moving average of parameters, initialised with their values.

    `torch.optim.swa_utils.AveragedModel` would copy the whole model, average frozen parameters, too, in their own
    precision, and lose the average when heads are removed; the update of the average is PyTorch's.

    After step t, counted from 1, it is `d_t · average + (1 − d_t) · parameter` with `d_t = min(decay, (1 + t) / (10 +
    t))`, which reduces the influence of the initial weights. It is kept at least in single precision, so that small
    steps are not lost.

    Args:
        parameters (`Mapping[str, nn.Parameter]`): Parameters to average, by name.
        decay (`float`): Largest d_t, from 0 (no averaging) to below 1: the average is over about `1 / (1 − decay)`
            steps.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self.decay = decay
        self._named = dict(parameters)
        self._values = [at_least_single(value).clone() for value in self._trained()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the average after a step, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(decay)(self._values, [at_least_single(value) for value in self._trained()], step)

    @torch.no_grad()
    def apply(self) -> None:
        """Copies the average into the parameters."""
        _copy(self._values, self._trained())

    @contextmanager
    def applied(self) -> Iterator[dict[str, torch.Tensor]]:
        """Context with the average in the parameters; yields the further tensors of a checkpoint, by name."""
        trained = [value.clone() for value in self._trained()]
        self.apply()
        stored = dict(zip(self._named, trained))
        # Averages that parameters in half precision cannot represent.
        stored |= {
            AVERAGE + name: value
            for (name, p), value in zip(self._named.items(), self._values)
            if p.dtype != value.dtype
        }
        try:
            yield stored
        finally:
            _copy(trained, self._trained())

    def load(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Restores the average from the parameters, and the trained parameters from a checkpoint's further tensors."""
        averages = [stored.get(AVERAGE + name, value) for name, value in zip(self._named, self._trained())]
        _copy(averages, self._values)
        _copy([stored[name] for name in self._named], self._trained())

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Changes the averaged parameters: keeps existing averages, and initialises others with their values."""
        held = {id(parameter): value for parameter, value in zip(self._named.values(), self._values)}
        self._named = dict(parameters)
        self._values = [
            held[id(p)] if id(p) in held else at_least_single(p.detach()).clone() for p in parameters.values()
        ]

    def _trained(self) -> list[torch.Tensor]:
        return [p.detach() for p in self._named.values()]


def _copy(values: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
    for value, target in zip(values, targets):
        target.copy_(value)


class WeightAverageMixin(ResumedTrainingMixin):
    """A trainer with `args.ema_decay`, which evaluates, saves and returns averaged weights, see [`WeightAverage`].

    All trained parameters except gates are averaged. The model in a checkpoint has the averaged weights;
    `trained_weights.safetensors` has the trained ones, with which a resumed run continues. With `save_only_model`,
    which excludes resuming, checkpoints only have the average. Callbacks see the trained weights during training.
    Averaging needs a copy of the trained parameters (at least in single precision), a second copy during evaluation
    and saving, and no random numbers: trained weights are bitwise the same as without it. If heads are removed during
    training, the averages of their layers are initialised again.

    Raises:
        ValueError: if weights are sharded (FSDP, DeepSpeed); while training, if there is nothing to average, or only
            one of the run and the checkpoint to be resumed has averaged weights.
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
                f"ema_decay={decay} does not support weights sharded by FSDP or DeepSpeed; set it to 0, or train "
                "without these."
            )

    def _new_average(self) -> WeightAverage:
        return WeightAverage(self._averaged_parameters(), self._argument("ema_decay"))

    def _averaged_parameters(self) -> dict[str, nn.Parameter]:
        model = self._plain_model
        # Gates follow their own schedule until the last step.
        left_out = {id(parameter) for gate in gates_of(model) for parameter in gate.parameters()}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in left_out}
        if not trained:
            raise ValueError(
                f"ema_decay={self._argument('ema_decay')}, but {type(model).__name__} has no trained parameters "
                "except gates, which are not averaged; set it to 0."
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
                "start a new run from its model (as after save_only_model=True, which only keeps the average)."
            )
        if decay:
            with safe_open(path, "pt") as saved:
                names = saved.keys()
            if other := {name.removeprefix(AVERAGE) for name in names} ^ self._averaged_parameters().keys():
                raise ValueError(
                    f"{TRAINED_WEIGHTS} belongs to another model, or to other trained parameters: {min(other)} is in "
                    "only one of them."
                )

    def _begin_training(self) -> None:
        super()._begin_training()
        if self._argument("ema_decay"):
            self._average = self._new_average()
            if self._resumed_from is not None:
                # The weights of the checkpoint, which have been loaded, are the average.
                self._average.load(load_file(Path(self._resumed_from) / TRAINED_WEIGHTS))

    def _model_changed(self) -> None:
        super()._model_changed()
        if self._average is not None:
            self._average.follow(self._averaged_parameters())

    def _averaged(self):
        """Context with averaged weights in the model; yields the further tensors of a checkpoint, or `None`."""
        self._follow_model()
        return nullcontext() if self._average is None else self._average.applied()

    def train(self, *args, **kwargs):
        """The stock method; afterwards, the model has the averaged weights."""
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
        """Saves the model with the averaged weights; in a checkpoint, also the trained weights."""
        with self._averaged() as stored:
            super().save_model(output_dir, _internal_call)
            is_checkpoint = _internal_call and output_dir is not None
            if stored is not None and is_checkpoint and self.args.should_save and not self.args.save_only_model:
                stored = {name: value.contiguous() for name, value in stored.items()}
                save_file(stored, Path(output_dir) / TRAINED_WEIGHTS)

    def _load_best_model(self):
        super()._load_best_model()
        # The best weights are averages of an earlier step.
        self._average = None


class WeightAverageTrainer(WeightAverageMixin, PrunableMixin, Trainer):
    """`Trainer` with weight averaging and support for pruning during training, as in [`HeadwiseTrainer`]."""


class _AverageCallback(TrainerCallback):
    """Updates the average after each step."""

    def __init__(self, trainer: WeightAverageMixin):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer._average is not None:
            self.trainer._average.update(state.global_step)
