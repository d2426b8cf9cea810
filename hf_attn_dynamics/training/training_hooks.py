# Licensed under the Apache License, Version 2.0.
"""What the trainers of this package are made of: mixins that go before a Trainer, and when each of them is called."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import TrainerCallback

from .arguments import HeadwiseArguments


class TrainingHooksMixin:
    """Calls its methods at the times that callbacks are not called at; mixins extend those that they need.

    Mixins go before the class of a trainer, and call the methods of the next one by `super()`.
    """

    reads: ClassVar[tuple[str, ...]] = ()  # arguments of [`HeadwiseArguments`] that this class reads

    def __init__(self, *args, **kwargs):
        self._own_optimizer: torch.optim.Optimizer | None = None  # the last one that was not given to the trainer
        super().__init__(*args, **kwargs)
        # Before all others, which may remove heads as training begins.
        self.callback_handler.callbacks.insert(0, _TrainingBegins(self))
        self._read_arguments()

    @property
    def _plain_model(self) -> nn.Module:
        """The model as it was given to the trainer."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def _holds_parts(self) -> bool:
        """Whether weights are spread over processes."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _argument(self, name: str) -> Any:
        """An argument of [`HeadwiseArguments`], which other arguments have the default of."""
        return getattr(self.args, name, getattr(HeadwiseArguments, name))

    @property
    def _is_optimizer_own(self) -> bool:
        """Whether there is an optimizer that was not given to the trainer."""
        optimizer = self.optimizer
        return optimizer is not None and self._own_optimizer is getattr(optimizer, "optimizer", optimizer)

    def create_optimizer(self, *args, **kwargs):
        """The stock method, which makes no optimizer where there is one."""
        if self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        self._own_optimizer = super().create_optimizer(*args, **kwargs)
        return self._own_optimizer

    def _hp_search_setup(self, trial):
        """The stock method, which `train` calls once it has its model, and which gives arguments those of a trial."""
        super()._hp_search_setup(trial)
        self._read_arguments()
        self._prepare_training()

    def _read_arguments(self) -> None:
        """What follows from arguments and model; once more whenever training starts, since both may be others then."""
        if isinstance(self.args, HeadwiseArguments):
            self.args.check_values()

    def _prepare_training(self) -> None:
        """Called as training starts, before weights of a checkpoint are loaded and the optimizer is made."""

    def _begin_training(self) -> None:
        """Called when the first step is about to be taken, with weights and optimizer in place."""

    def _model_changed(self) -> None:
        """Called when parameters have been replaced by others: what depends on them is to follow."""

    def _follow_model(self) -> None:
        """Looks whether parameters have been replaced by others."""


class _TrainingBegins(TrainerCallback):
    def __init__(self, trainer: TrainingHooksMixin):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._begin_training()
