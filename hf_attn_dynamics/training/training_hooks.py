# Licensed under the Apache License, Version 2.0.
"""Base of the trainer mixins: methods that are called where Transformers calls no callback."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import TrainerCallback

from .arguments import HeadwiseArguments


class TrainingHooksMixin:
    """Base of the mixins of a trainer, with hooks where Transformers calls no callback.

    Mixins precede the trainer class, extend the hooks that they need, and call `super()`.
    """

    reads: ClassVar[tuple[str, ...]] = ()  # arguments of [`HeadwiseArguments`] that this class reads

    def __init__(self, *args, **kwargs):
        self._own_optimizer: torch.optim.Optimizer | None = None  # the last one that the trainer created
        super().__init__(*args, **kwargs)
        # The first callback, since others may remove heads at the start of training.
        self.callback_handler.callbacks.insert(0, _TrainingBegins(self))
        self._read_arguments()

    @property
    def _plain_model(self) -> nn.Module:
        """The unwrapped model."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def _holds_parts(self) -> bool:
        """Whether weights are sharded over processes."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _argument(self, name: str) -> Any:
        """An argument of [`HeadwiseArguments`], or its default if the trainer has other arguments."""
        return getattr(self.args, name, getattr(HeadwiseArguments, name))

    @property
    def _is_optimizer_own(self) -> bool:
        """Whether the trainer created its optimizer."""
        optimizer = self.optimizer
        return optimizer is not None and self._own_optimizer is getattr(optimizer, "optimizer", optimizer)

    def create_optimizer(self, *args, **kwargs):
        """The stock method, which keeps an existing optimizer."""
        if self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        self._own_optimizer = super().create_optimizer(*args, **kwargs)
        return self._own_optimizer

    def _hp_search_setup(self, trial):
        """The stock method, which `train` calls after creating the model, and which reads the values of a trial."""
        super()._hp_search_setup(trial)
        self._read_arguments()
        self._prepare_training()

    def _read_arguments(self) -> None:
        """Reads arguments and model; called at construction, and again whenever training starts."""
        if isinstance(self.args, HeadwiseArguments):
            self.args.check_values()

    def _prepare_training(self) -> None:
        """Called when training starts, before a checkpoint is loaded and the optimizer is created."""

    def _begin_training(self) -> None:
        """Called before the first step, after the checkpoint is loaded and the optimizer is created."""

    def _model_changed(self) -> None:
        """Called after parameters have been replaced."""

    def _follow_model(self) -> None:
        """Checks whether parameters have been replaced."""


class _TrainingBegins(TrainerCallback):
    def __init__(self, trainer: TrainingHooksMixin):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._begin_training()
