# Licensed under the Apache License, Version 2.0.
"""Checks of trainer arguments."""

import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import TrainingArguments

from ..models.hard_concrete import HardConcreteGate
from ..models.head_settings import target_columns
from .arguments import HeadwiseArguments
from .collators import GuidanceCollator


PACKAGE = __name__.partition(".")[0]


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


def check_gates_of_adapter(model: nn.Module, gates: Iterable[nn.Module]) -> None:
    """Raises ValueError for trained gates that checkpoints of a PEFT adapter would not contain."""
    if hasattr(model, "peft_config") and any(
        isinstance(gate, HardConcreteGate) and any(p.requires_grad for p in gate.parameters()) for gate in gates
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


def check_target_columns(model: nn.Module, dataset: Any, data_collator: Any) -> None:
    """Raises ValueError for a training set without the column of a target, if that can be known in advance.

    It is unknown for datasets without column names and for those that create columns when they are read, and if the
    collator of somebody else may create the columns.

    Args:
        model (`PreTrainedModel`): A headwise model.
        dataset (`Dataset` or others, *optional*): The training set.
        data_collator (callable): The collator of the trainer.
    """
    names = getattr(dataset, "column_names", None)
    # Transforms of a dataset have the format "custom".
    given = getattr(dataset, "format", None)
    is_transformed = isinstance(given, dict) and given.get("type") == "custom"
    if not isinstance(names, list) or is_transformed or not _keeps_columns(data_collator):
        return
    for settings in model.head_settings.guidance.values():
        for name, form in (settings.targets or {}).items():
            # The weights of sparse targets may be missing.
            column = target_columns(name, form)[0]
            if column not in names:
                raise ValueError(
                    f"train_dataset has no column {column}, which guidance to the target {name!r} needs; its columns "
                    f"are {', '.join(names)}. Add it, for example with align_targets(), load the model without this "
                    "target, or set guidance_weight=0."
                )


def _keeps_columns(data_collator: Any) -> bool:
    """Whether a collator takes the columns of targets from the dataset: those of this package and of Transformers."""
    if type(data_collator) is GuidanceCollator:
        return _keeps_columns(data_collator.collator)
    named = data_collator if hasattr(data_collator, "__name__") else type(data_collator)
    return named.__module__.partition(".")[0] in (PACKAGE, "transformers")
