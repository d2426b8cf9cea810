# Licensed under the Apache License, Version 2.0.
"""What trainers of headwise models refuse to begin with."""

import math

from torch import nn
from transformers import TrainingArguments

from ..models.head_gates import HardConcreteGate
from .arguments import HeadwiseArguments


def check_trainer_arguments(args, data_collator=None) -> None:
    """Refuses what [`HeadwiseTrainer`] cannot do, before a model is built.

    Args:
        args (`TrainingArguments`): Arguments of the trainer.
        data_collator (*optional*): Its collator.

    Raises:
        ValueError: if a number among them is none that training can begin with; if one process sees several GPUs,
            since `nn.DataParallel` cannot carry the losses of heads; or if data workers would keep a collator whose
            masks are to change between epochs.
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
            f"one process sees {args.n_gpu} GPUs, which would mean nn.DataParallel: start one process a GPU with "
            "`accelerate launch`, or set CUDA_VISIBLE_DEVICES to one of them."
        )
    if args.dataloader_persistent_workers and hasattr(data_collator, "set_epoch"):
        raise ValueError(
            "dataloader_persistent_workers=True keeps the collator's first epoch in its workers, so that masks would "
            "never change; set it to False."
        )


def check_read(args: TrainingArguments, trainer_class: type) -> None:
    """Refuses arguments of [`HeadwiseArguments`] that no class of a trainer reads."""
    read = {name for cls in trainer_class.__mro__ for name in vars(cls).get("reads", ())}
    for name in HeadwiseArguments.names():
        value, default = getattr(args, name, None), getattr(HeadwiseArguments, name)
        if name not in read and hasattr(args, name) and value != default:
            raise ValueError(
                f"{name}={value}, but {trainer_class.__name__} extends no class that reads it: leave it out, or put "
                "the mixin that does before the other classes."
            )


def check_gates_of_adapter(model: nn.Module, gates: dict) -> None:
    """Refuses gates that are trained beside an adapter of PEFT, which alone is saved."""
    if hasattr(model, "peft_config") and any(
        isinstance(gate, HardConcreteGate) and gate.log_alpha.requires_grad for gate in gates.values()
    ):
        raise ValueError(
            f"gates of {type(model).__name__} are trained, but checkpoints of its adapter would not have them: name "
            "'gate' in modules_to_save of the adapter's configuration, or set save_strategy='no'."
        )


def check_label_smoothing(model: nn.Module, factor: float) -> None:
    """Refuses to smooth what the stock smoother cannot read: all but one column of classes, with its logits."""
    terms = {(term.labels, term.logits, term.kind) for term in model.loss_terms}
    is_classes = terms == {("labels", "logits", "class")}
    if terms == {("labels", "logits", "problem")}:
        problem = model.config.problem_type
        is_classes = model.config.num_labels > 1 and problem in (None, "single_label_classification")
    if factor and not is_classes:
        raise ValueError(
            f"label_smoothing_factor={factor}, but {type(model).__name__} does not learn one column of classes from "
            "labels, which is all that can be smoothed; set it to 0."
        )
