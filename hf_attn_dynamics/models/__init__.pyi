# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from typing import Any

from .configuration_bow_attention import BowAttentionConfig as BowAttentionConfig
from .configuration_lstm import LstmConfig as LstmConfig
from .configuration_lstm_seq2seq import LstmSeq2SeqConfig as LstmSeq2SeqConfig
from .configuration_proxy import ProxyConfig as ProxyConfig
from .hard_concrete import HardConcreteGate as HardConcreteGate
from .hard_concrete import expected_open_heads as expected_open_heads
from .head_gates import prune_closed_gates as prune_closed_gates
from .head_pruning import prune_heads as prune_heads
from .head_pruning import retain_heads as retain_heads
from .head_roles import HeadRoles as HeadRoles
from .head_roles import register_attention as register_attention
from .headwise_classes import headwise_class as headwise_class
from .modeling_bow_attention import BowAttentionForSequenceClassification as BowAttentionForSequenceClassification
from .modeling_lstm import LstmForSequenceClassification as LstmForSequenceClassification
from .modeling_lstm_seq2seq import LstmSeq2SeqForConditionalGeneration as LstmSeq2SeqForConditionalGeneration
from .modeling_proxy import ProxyForSeq2Seq as ProxyForSeq2Seq
from .modeling_proxy import ProxyForSequenceClassification as ProxyForSequenceClassification
from .patterns import PatternRows as PatternRows
from .patterns import pattern_names as pattern_names
from .patterns import register_pattern as register_pattern
from .patterns import token_set as token_set
from .unit_pruning import prune_layers as prune_layers
from .unit_pruning import prune_units as prune_units
from .unit_pruning import retain_units as retain_units
from .unit_roles import UnitRoles as UnitRoles
from .unit_roles import register_feed_forward as register_feed_forward

# Headwise classes, such as `HeadwiseBertForMaskedLM`, are created when they are first imported.
def __getattr__(name: str) -> Any: ...
