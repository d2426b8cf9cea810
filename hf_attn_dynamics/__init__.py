# Licensed under the Apache License, Version 2.0.
"""Guide, gate, remove and read attention heads in Hugging Face Transformers 5.

Importing the package makes its models known to the Auto classes. Everything else is imported when it is first used.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from ._auto_registration import register_with_auto_classes


__version__ = "0.1.0"

_PUBLIC = {
    "analysis.agreement": [
        "ContextualizedAgreement",
        "agreement",
        "chance_agreement",
        "contextualized_agreement",
        "kendall_tau",
    ],
    "analysis.alignment": [
        "IbmModel1",
        "alignment_error_rate",
        "attention_alignment",
        "read_pharaoh",
        "write_pharaoh",
    ],
    "analysis.attention_maps": ["attention_maps", "to_bertviz"],
    "analysis.attention_statistics": ["HeadConfidence", "HeadEntropy"],
    "analysis.attribution": ["local_contribution"],
    "analysis.attribution_statistics": ["MapCorrelation", "correlate", "map_types", "show_maps"],
    "analysis.coreference": ["CoreferenceScores", "coreference_accuracy"],
    "analysis.global_attribution": ["global_contribution"],
    "analysis.head_distances": ["HeadDistance", "HeadDistances"],
    "analysis.head_outputs": ["head_outputs", "masked_heads", "mean_head_outputs"],
    "analysis.head_scores": ["HeadScores"],
    "analysis.head_timeline": ["HeadTimeline"],
    "analysis.importance": ["gate_importance", "head_importance", "random_importance"],
    "analysis.integrated_gradients": ["IntegratedGradientsAgreement", "integrated_gradients_agreement"],
    "analysis.lexical_probe": ["LexicalProbe", "lexical_probe"],
    "analysis.observers": ["Observer"],
    "analysis.observing": ["observe"],
    "analysis.optimal_attention": ["OptimalAttention", "optimal_attention"],
    "analysis.relative_positions": ["RelativeAttention", "RelativePositions"],
    "analysis.relevance": ["RelevanceConservation", "head_relevance", "relevance_conservation"],
    "analysis.report": ["HeadReport", "head_report"],
    "analysis.roles": ["RoleScores", "role_overlap", "top_heads"],
    "analysis.rollout": ["attention_flow", "attention_rollout", "value_weighted_attention"],
    "analysis.saliency": ["word_saliency"],
    "analysis.score_norm": [
        "ScoreNormHistory",
        "attended_words",
        "score_norm_curve",
        "score_norm_terms",
        "topic_purity",
    ],
    "analysis.source_rows": ["AgreementTracker", "ibm_rows", "row_mask", "source_rows"],
    "analysis.syntactic_roles": ["SyntacticRoles"],
    "analysis.token_roles": ["DuplicateTokens", "RareWords"],
    "auto": ["headwise_model"],
    "models.configuration_bow_attention": ["BowAttentionConfig"],
    "models.configuration_headwise_bert": ["HeadwiseBertConfig"],
    "models.configuration_headwise_electra": ["HeadwiseElectraConfig"],
    "models.configuration_headwise_marian": ["HeadwiseMarianConfig"],
    "models.configuration_headwise_roberta": ["HeadwiseRobertaConfig"],
    "models.configuration_lstm": ["LstmConfig"],
    "models.configuration_lstm_seq2seq": ["LstmSeq2SeqConfig"],
    "models.configuration_proxy": ["ProxyConfig"],
    "models.head_gates": ["HardConcreteGate", "expected_open_heads", "prune_closed_gates"],
    "models.head_pruning": ["prune_heads", "retain_heads"],
    "models.head_roles": ["HeadRoles", "register_attention"],
    "models.modeling_bow_attention": ["BowAttentionForSequenceClassification"],
    "models.modeling_headwise_bert": [
        "HeadwiseBertForMaskedLM",
        "HeadwiseBertForPreTraining",
        "HeadwiseBertForQuestionAnswering",
        "HeadwiseBertForSequenceClassification",
        "HeadwiseBertForTokenClassification",
        "HeadwiseBertModel",
    ],
    "models.modeling_headwise_electra": [
        "HeadwiseElectraForJointPreTraining",
        "HeadwiseElectraForMaskedLM",
        "HeadwiseElectraForPreTraining",
        "HeadwiseElectraForQuestionAnswering",
        "HeadwiseElectraForSequenceClassification",
        "HeadwiseElectraForTokenClassification",
        "HeadwiseElectraModel",
    ],
    "models.modeling_headwise_marian": ["HeadwiseMarianMTModel", "HeadwiseMarianModel"],
    "models.modeling_headwise_roberta": [
        "HeadwiseRobertaForMaskedLM",
        "HeadwiseRobertaForQuestionAnswering",
        "HeadwiseRobertaForSequenceClassification",
        "HeadwiseRobertaForTokenClassification",
        "HeadwiseRobertaModel",
    ],
    "models.modeling_lstm": ["LstmForSequenceClassification"],
    "models.modeling_lstm_seq2seq": ["LstmSeq2SeqForConditionalGeneration"],
    "models.modeling_proxy": ["ProxyForSeq2Seq", "ProxyForSequenceClassification"],
    "models.patterns": ["PatternRows", "pattern_names", "register_pattern", "token_set"],
    "models.pruned_checkpoints": ["load_pruned"],
    "training.arguments": ["HeadwiseArguments", "HeadwiseSeq2SeqTrainingArguments", "HeadwiseTrainingArguments"],
    "training.checkpoints": ["CheckpointCallback", "checkpoint_steps"],
    "training.collators": ["MaskedLanguageModelCollator", "ReplacedTokenCollator"],
    "training.gates": ["GateHistory"],
    "training.head_dynamics": ["HeadDynamicsCallback"],
    "training.trainer": ["HeadwiseSeq2SeqTrainer", "HeadwiseTrainer", "HeadwiseTrainerMixin"],
}
_SUBPACKAGES = ("analysis", "data", "hub", "models", "runs", "training")
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

if TYPE_CHECKING:
    from .analysis.agreement import *
    from .analysis.alignment import *
    from .analysis.attention_maps import *
    from .analysis.attention_statistics import *
    from .analysis.attribution import *
    from .analysis.attribution_statistics import *
    from .analysis.coreference import *
    from .analysis.global_attribution import *
    from .analysis.head_distances import *
    from .analysis.head_outputs import *
    from .analysis.head_scores import *
    from .analysis.head_timeline import *
    from .analysis.importance import *
    from .analysis.integrated_gradients import *
    from .analysis.lexical_probe import *
    from .analysis.observers import *
    from .analysis.observing import *
    from .analysis.optimal_attention import *
    from .analysis.relative_positions import *
    from .analysis.relevance import *
    from .analysis.report import *
    from .analysis.roles import *
    from .analysis.rollout import *
    from .analysis.saliency import *
    from .analysis.score_norm import *
    from .analysis.source_rows import *
    from .analysis.syntactic_roles import *
    from .analysis.token_roles import *
    from .auto import *
    from .models.configuration_bow_attention import *
    from .models.configuration_headwise_bert import *
    from .models.configuration_headwise_electra import *
    from .models.configuration_headwise_marian import *
    from .models.configuration_headwise_roberta import *
    from .models.configuration_lstm import *
    from .models.configuration_lstm_seq2seq import *
    from .models.configuration_proxy import *
    from .models.head_gates import *
    from .models.head_pruning import *
    from .models.head_roles import *
    from .models.modeling_bow_attention import *
    from .models.modeling_headwise_bert import *
    from .models.modeling_headwise_electra import *
    from .models.modeling_headwise_marian import *
    from .models.modeling_headwise_roberta import *
    from .models.modeling_lstm import *
    from .models.modeling_lstm_seq2seq import *
    from .models.modeling_proxy import *
    from .models.patterns import *
    from .models.pruned_checkpoints import *
    from .training.arguments import *
    from .training.checkpoints import *
    from .training.collators import *
    from .training.gates import *
    from .training.head_dynamics import *
    from .training.trainer import *


def __getattr__(name: str):
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name in _SUBPACKAGES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBPACKAGES})


__all__ = [*_MODULE_OF]

register_with_auto_classes(sys.modules[__name__])
