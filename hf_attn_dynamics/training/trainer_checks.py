# Licensed under the Apache License, Version 2.0.
"""Checks of trainer arguments."""

import math

from torch import nn
from transformers import TrainingArguments

from ..models.head_gates import HardConcreteGate
from .arguments import HeadwiseArguments


def check_trainer_arguments(args, data_collator=None) -> None:
    """Checks the arguments of [`HeadwiseTrainer`], which needs no model.

    Args:
        args (`TrainingArguments`): Arguments of the trainer.
        data_collator (*optional*): Its collator.

    Raises:
        ValueError: if a number is out of range; if one process sees several GPUs, since `nn.DataParallel` does not
            support head losses; or if persistent workers would keep the first epoch of a collator.
    """
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}.")
    for name in ("learning_rate", "num_train_epochs"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {getattr(args, name)}.")
    for name in ("seed", "data_seed"):
        if not 0 <= (getattr(args, name) or 0) < 2**32:
            raise ValueError(f"{name} must be from 0 to 2**32 - 1, got {getattr(args, name)}.")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, for which Trainer uses nn.DataParallel: start one process per GPU "
            "with `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one of them."
        )
    if args.dataloader_persistent_workers and hasattr(data_collator, "set_epoch"):
        raise ValueError(
            "dataloader_persistent_workers=True keeps the collator of the first epoch, so that masks would never "
            "change; set it to False."
        )


def check_read(args: TrainingArguments, trainer_class: type) -> None:
    """Raises ValueError for arguments of [`HeadwiseArguments`] that no class of a trainer reads."""
    read = {name for cls in trainer_class.__mro__ for name in vars(cls).get("reads", ())}
    for name in HeadwiseArguments.names():
        value, default = getattr(args, name, None), getattr(HeadwiseArguments, name)
        if name not in read and hasattr(args, name) and value != default:
            raise ValueError(
                f"{name}={value}, but {trainer_class.__name__} does not read it: leave it out, or add the mixin that "
                "reads it before the other base classes."
            )


def check_gates_of_adapter(model: nn.Module, gates: dict) -> None:
    """Raises ValueError for trained gates that checkpoints of a PEFT adapter would not contain."""
    if hasattr(model, "peft_config") and any(
        isinstance(gate, HardConcreteGate) and gate.log_alpha.requires_grad for gate in gates.values()
    ):
        raise ValueError(
            f"gates of {type(model).__name__} are trained, but checkpoints of its adapter would not contain them: add "
            "'gate' to modules_to_save of the adapter's configuration, or set save_strategy='no'."
        )


def check_label_smoothing(model: nn.Module, factor: float) -> None:
    """Raises ValueError for label smoothing unless the labels are one column of classes."""
    terms = {(term.labels, term.logits, term.kind) for term in model.loss_terms}
    is_classes = terms == {("labels", "logits", "class")}
    if terms == {("labels", "logits", "problem")}:
        problem = model.config.problem_type
        is_classes = model.config.num_labels > 1 and problem in (None, "single_label_classification")
    if factor and not is_classes:
        raise ValueError(
            f"label_smoothing_factor={factor} needs a single label column of classes, which {type(model).__name__} "
            "does not have; set it to 0."
        )
