# Licensed under the Apache License, Version 2.0.
# The public names: `__init__.py` reads them from here when the package is imported, and type checkers do.

from typing import Any

from . import analysis as analysis
from . import catalog as catalog
from . import data as data
from . import hub as hub
from . import models as models
from . import recipes as recipes
from . import training as training
from .analysis.attribution.across_layers import global_contribution as global_contribution
from .analysis.attribution.integrated_gradients import IntegratedGradientsAgreement as IntegratedGradientsAgreement
from .analysis.attribution.integrated_gradients import integrated_gradients_agreement as integrated_gradients_agreement
from .analysis.attribution.local import local_contribution as local_contribution
from .analysis.attribution.rollout import attention_flow as attention_flow
from .analysis.attribution.rollout import attention_rollout as attention_rollout
from .analysis.attribution.rollout import value_weighted_attention as value_weighted_attention
from .analysis.attribution.statistics import MapCorrelation as MapCorrelation
from .analysis.attribution.statistics import correlate as correlate
from .analysis.attribution.statistics import map_types as map_types
from .analysis.attribution.statistics import show_maps as show_maps
from .analysis.head_scores import HeadScores as HeadScores
from .analysis.head_timeline import HeadTimeline as HeadTimeline
from .analysis.heads.coreference import CoreferenceScores as CoreferenceScores
from .analysis.heads.coreference import coreference_accuracy as coreference_accuracy
from .analysis.heads.importance import gate_importance as gate_importance
from .analysis.heads.importance import head_importance as head_importance
from .analysis.heads.importance import random_importance as random_importance
from .analysis.heads.maps import attention_maps as attention_maps
from .analysis.heads.maps import to_bertviz as to_bertviz
from .analysis.heads.outputs import head_outputs as head_outputs
from .analysis.heads.outputs import masked_heads as masked_heads
from .analysis.heads.outputs import mean_head_outputs as mean_head_outputs
from .analysis.heads.pruning_report import HeadReport as HeadReport
from .analysis.heads.pruning_report import head_report as head_report
from .analysis.lexical.agreement import ContextualizedAgreement as ContextualizedAgreement
from .analysis.lexical.agreement import agreement as agreement
from .analysis.lexical.agreement import chance_agreement as chance_agreement
from .analysis.lexical.agreement import contextualized_agreement as contextualized_agreement
from .analysis.lexical.agreement import kendall_tau as kendall_tau
from .analysis.lexical.alignment import IbmModel1 as IbmModel1
from .analysis.lexical.alignment import alignment_error_rate as alignment_error_rate
from .analysis.lexical.alignment import attention_alignment as attention_alignment
from .analysis.lexical.alignment import read_pharaoh as read_pharaoh
from .analysis.lexical.alignment import write_pharaoh as write_pharaoh
from .analysis.lexical.optimal_attention import OptimalAttention as OptimalAttention
from .analysis.lexical.optimal_attention import optimal_attention as optimal_attention
from .analysis.lexical.probe import LexicalProbe as LexicalProbe
from .analysis.lexical.probe import lexical_probe as lexical_probe
from .analysis.lexical.saliency import word_saliency as word_saliency
from .analysis.lexical.source_rows import AgreementTracker as AgreementTracker
from .analysis.lexical.source_rows import ibm_rows as ibm_rows
from .analysis.lexical.source_rows import row_mask as row_mask
from .analysis.lexical.source_rows import source_rows as source_rows
from .analysis.observers.base import Observer as Observer
from .analysis.observers.confidence import HeadConfidence as HeadConfidence
from .analysis.observers.confidence import HeadEntropy as HeadEntropy
from .analysis.observers.delimiters import DelimiterAttention as DelimiterAttention
from .analysis.observers.distances import HeadDistance as HeadDistance
from .analysis.observers.distances import HeadDistances as HeadDistances
from .analysis.observers.observation import observe as observe
from .analysis.observers.positions import RelativeAttention as RelativeAttention
from .analysis.observers.positions import RelativePositions as RelativePositions
from .analysis.observers.roles import RoleScores as RoleScores
from .analysis.observers.roles import role_overlap as role_overlap
from .analysis.observers.roles import top_heads as top_heads
from .analysis.observers.syntactic_roles import SyntacticRoles as SyntacticRoles
from .analysis.observers.token_roles import DuplicateTokens as DuplicateTokens
from .analysis.observers.token_roles import RareWords as RareWords
from .analysis.reading import HeadReading as HeadReading
from .analysis.reading import read_heads as read_heads
from .analysis.relevance.heads import RelevanceConservation as RelevanceConservation
from .analysis.relevance.heads import head_relevance as head_relevance
from .analysis.relevance.heads import relevance_conservation as relevance_conservation
from .analysis.score_norm import ScoreNormHistory as ScoreNormHistory
from .analysis.score_norm import attended_words as attended_words
from .analysis.score_norm import score_norm_curve as score_norm_curve
from .analysis.score_norm import score_norm_terms as score_norm_terms
from .analysis.score_norm import topic_purity as topic_purity
from .catalog import HeadwiseArchitecture as HeadwiseArchitecture
from .catalog import headwise_architectures as headwise_architectures
from .catalog import headwise_model as headwise_model
from .catalog import load_pruned as load_pruned
from .models.configuration_bow_attention import BowAttentionConfig as BowAttentionConfig
from .models.configuration_lstm import LstmConfig as LstmConfig
from .models.configuration_lstm_seq2seq import LstmSeq2SeqConfig as LstmSeq2SeqConfig
from .models.configuration_proxy import ProxyConfig as ProxyConfig
from .models.head_gates import HardConcreteGate as HardConcreteGate
from .models.head_gates import expected_open_heads as expected_open_heads
from .models.head_gates import prune_closed_gates as prune_closed_gates
from .models.head_pruning import prune_heads as prune_heads
from .models.head_pruning import retain_heads as retain_heads
from .models.head_roles import HeadRoles as HeadRoles
from .models.head_roles import register_attention as register_attention
from .models.headwise_classes import headwise_class as headwise_class
from .models.modeling_bow_attention import (
    BowAttentionForSequenceClassification as BowAttentionForSequenceClassification,
)
from .models.modeling_lstm import LstmForSequenceClassification as LstmForSequenceClassification
from .models.modeling_lstm_seq2seq import LstmSeq2SeqForConditionalGeneration as LstmSeq2SeqForConditionalGeneration
from .models.modeling_proxy import ProxyForSeq2Seq as ProxyForSeq2Seq
from .models.modeling_proxy import ProxyForSequenceClassification as ProxyForSequenceClassification
from .models.patterns import PatternRows as PatternRows
from .models.patterns import pattern_names as pattern_names
from .models.patterns import register_pattern as register_pattern
from .models.patterns import token_set as token_set
from .training.arguments import HeadwiseArguments as HeadwiseArguments
from .training.arguments import HeadwiseSeq2SeqTrainingArguments as HeadwiseSeq2SeqTrainingArguments
from .training.arguments import HeadwiseTrainingArguments as HeadwiseTrainingArguments
from .training.checkpoints import CheckpointCallback as CheckpointCallback
from .training.checkpoints import checkpoint_steps as checkpoint_steps
from .training.collators import MaskedLanguageModelCollator as MaskedLanguageModelCollator
from .training.collators import ReplacedTokenCollator as ReplacedTokenCollator
from .training.gates import GateHistory as GateHistory
from .training.head_dynamics import HeadDynamicsCallback as HeadDynamicsCallback
from .training.trainer import HeadwiseSeq2SeqTrainer as HeadwiseSeq2SeqTrainer
from .training.trainer import HeadwiseTrainer as HeadwiseTrainer
from .training.trainer import HeadwiseTrainerMixin as HeadwiseTrainerMixin

__version__: str

# Headwise classes, such as `HeadwiseBertForMaskedLM`, are made of the stock ones when they are asked for.
def __getattr__(name: str) -> Any: ...
