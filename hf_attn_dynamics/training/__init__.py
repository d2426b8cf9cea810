# Licensed under the Apache License, Version 2.0.
"""Training of headwise models: trainers, arguments, collators, schedules and metrics."""

from ..models.head_gates import settle_gates
from .arguments import HeadwiseArguments, HeadwiseSeq2SeqTrainingArguments, HeadwiseTrainingArguments
from .bow_attention import BowAttentionStack, LabelledSentences
from .callbacks import LogWhenSaved, ProgressWithLosses, StepTimer, show_progress
from .checkpoints import CheckpointCallback, checkpoint_steps
from .collators import MaskedLanguageModelCollator, ReplacedTokenCollator
from .epoch_masks import masks_of_evaluation
from .finite_loss import FiniteLossMixin
from .frozen_decoder import FrozenDecoderMixin
from .gates import GateHistory
from .head_dynamics import TIMELINE, HeadDynamicsCallback
from .layer_rates import LayerRatesMixin, layer_factors, spread_rates
from .length_batches import SimilarLengthSampler, SimilarLengthSeq2SeqTrainer
from .log_history import first_at_or_below, mean_over_steps
from .lstm_stack import LstmSeq2SeqStack, StackedOutput
from .metrics import (
    replaced_token_metrics,
    replaced_token_predictions,
    target_token_metrics,
    target_token_scores,
)
from .prunable_trainer import PrunableMixin, PrunableTrainer
from .resumed_training import ResumedTrainingMixin
from .resuming import checkpoint_damage, newest_checkpoint, train_from_newest
from .schedules import GUIDANCE_SCHEDULES, guidance_weight_at, target_heads_at
from .sharding import ShardedEmbeddingsMixin, whole_model
from .stacked import DescentResult, stacked_gradient_descent
from .trainer import HeadwiseSeq2SeqTrainer, HeadwiseTrainer, HeadwiseTrainerMixin, check_trainer_arguments
from .weight_average import WeightAverage, WeightAverageMixin, WeightAverageTrainer


__all__ = [
    "BowAttentionStack",
    "CheckpointCallback",
    "DescentResult",
    "FiniteLossMixin",
    "FrozenDecoderMixin",
    "GUIDANCE_SCHEDULES",
    "GateHistory",
    "HeadDynamicsCallback",
    "HeadwiseArguments",
    "HeadwiseSeq2SeqTrainer",
    "HeadwiseSeq2SeqTrainingArguments",
    "HeadwiseTrainer",
    "HeadwiseTrainerMixin",
    "HeadwiseTrainingArguments",
    "LabelledSentences",
    "LayerRatesMixin",
    "LogWhenSaved",
    "LstmSeq2SeqStack",
    "MaskedLanguageModelCollator",
    "ProgressWithLosses",
    "PrunableMixin",
    "PrunableTrainer",
    "ReplacedTokenCollator",
    "ResumedTrainingMixin",
    "ShardedEmbeddingsMixin",
    "SimilarLengthSampler",
    "SimilarLengthSeq2SeqTrainer",
    "StackedOutput",
    "StepTimer",
    "TIMELINE",
    "WeightAverage",
    "WeightAverageMixin",
    "WeightAverageTrainer",
    "check_trainer_arguments",
    "checkpoint_damage",
    "checkpoint_steps",
    "first_at_or_below",
    "guidance_weight_at",
    "layer_factors",
    "masks_of_evaluation",
    "mean_over_steps",
    "newest_checkpoint",
    "replaced_token_metrics",
    "replaced_token_predictions",
    "settle_gates",
    "show_progress",
    "spread_rates",
    "stacked_gradient_descent",
    "target_heads_at",
    "target_token_metrics",
    "target_token_scores",
    "train_from_newest",
    "whole_model",
]
