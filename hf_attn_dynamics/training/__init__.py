# Licensed under the Apache License, Version 2.0.
"""Training headwise models: trainer, arguments, collators, schedules."""

from .arguments import HeadwiseTrainingArguments
from .callbacks import ProgressWithLosses, StepTimer
from .collators import MaskedLanguageModelCollator
from .log_history import first_at_or_below, mean_over_steps
from .schedules import GUIDANCE_SCHEDULES, guidance_weight_at
from .trainer import HeadwiseTrainer, check_trainer_arguments


__all__ = [
    "GUIDANCE_SCHEDULES",
    "HeadwiseTrainer",
    "HeadwiseTrainingArguments",
    "MaskedLanguageModelCollator",
    "ProgressWithLosses",
    "StepTimer",
    "check_trainer_arguments",
    "first_at_or_below",
    "guidance_weight_at",
    "mean_over_steps",
]
