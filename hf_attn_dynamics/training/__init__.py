# Licensed under the Apache License, Version 2.0.
"""Training headwise models: trainer, arguments, collators, schedules, metrics."""

from .arguments import HeadwiseSeq2SeqTrainingArguments, HeadwiseTrainingArguments
from .bow_attention import BowAttentionStack, LabelledSentences
from .callbacks import LogWhenSaved, ProgressWithLosses, StepTimer, show_progress
from .collators import MaskedLanguageModelCollator, ReplacedTokenCollator
from .gates import GateHistory, settle_gates
from .head_dynamics import TIMELINE, HeadDynamicsCallback
from .log_history import first_at_or_below, mean_over_steps
from .metrics import replaced_token_metrics, replaced_token_predictions
from .schedules import GUIDANCE_SCHEDULES, guidance_weight_at, target_heads_at
from .stacked import DescentResult, stacked_gradient_descent
from .trainer import HeadwiseSeq2SeqTrainer, HeadwiseTrainer, check_trainer_arguments


__all__ = [
    "BowAttentionStack",
    "DescentResult",
    "GUIDANCE_SCHEDULES",
    "GateHistory",
    "HeadDynamicsCallback",
    "HeadwiseSeq2SeqTrainer",
    "HeadwiseSeq2SeqTrainingArguments",
    "HeadwiseTrainer",
    "HeadwiseTrainingArguments",
    "LabelledSentences",
    "LogWhenSaved",
    "MaskedLanguageModelCollator",
    "ProgressWithLosses",
    "ReplacedTokenCollator",
    "StepTimer",
    "TIMELINE",
    "check_trainer_arguments",
    "first_at_or_below",
    "guidance_weight_at",
    "mean_over_steps",
    "replaced_token_metrics",
    "replaced_token_predictions",
    "settle_gates",
    "show_progress",
    "stacked_gradient_descent",
    "target_heads_at",
]
