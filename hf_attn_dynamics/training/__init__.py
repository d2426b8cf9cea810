# Licensed under the Apache License, Version 2.0.
"""Training headwise models: trainer, arguments, collators, schedules."""

from .arguments import HeadwiseTrainingArguments
from .collators import MaskedLanguageModelCollator
from .schedules import GUIDANCE_SCHEDULES, guidance_weight_at
from .trainer import HeadwiseTrainer, check_trainer_arguments, mean_over_steps


__all__ = [
    "GUIDANCE_SCHEDULES",
    "HeadwiseTrainer",
    "HeadwiseTrainingArguments",
    "MaskedLanguageModelCollator",
    "check_trainer_arguments",
    "guidance_weight_at",
    "mean_over_steps",
]
