# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do. The stubs of
# the subpackages have the modules. `dir()` lists the names above the first star: those that users reach for first.

from typing import Any

from . import analysis as analysis
from . import catalog as catalog
from . import data as data
from . import hub as hub
from . import models as models
from . import recipes as recipes
from . import training as training
from .analysis import HeadConfidence as HeadConfidence
from .analysis import HeadReading as HeadReading
from .analysis import HeadScores as HeadScores
from .analysis import HeadTimeline as HeadTimeline
from .analysis import IbmModel1 as IbmModel1
from .analysis import Observer as Observer
from .analysis import RelativePositions as RelativePositions
from .analysis import SyntacticRoles as SyntacticRoles
from .analysis import agreement as agreement
from .analysis import attention_maps as attention_maps
from .analysis import global_contribution as global_contribution
from .analysis import head_importance as head_importance
from .analysis import head_relevance as head_relevance
from .analysis import head_report as head_report
from .analysis import lexical_probe as lexical_probe
from .analysis import local_contribution as local_contribution
from .analysis import masked_heads as masked_heads
from .analysis import measure_latency_table as measure_latency_table
from .analysis import observe as observe
from .analysis import read_heads as read_heads
from .analysis import score_norm_curve as score_norm_curve
from .analysis import show_contributions as show_contributions
from .analysis import show_heads as show_heads
from .catalog import headwise_architectures as headwise_architectures
from .catalog import headwise_model as headwise_model
from .catalog import load_pruned as load_pruned
from .models import LstmConfig as LstmConfig
from .models import LstmForSequenceClassification as LstmForSequenceClassification
from .models import LstmSeq2SeqConfig as LstmSeq2SeqConfig
from .models import LstmSeq2SeqForConditionalGeneration as LstmSeq2SeqForConditionalGeneration
from .models import headwise_class as headwise_class
from .models import prune_closed_gates as prune_closed_gates
from .models import prune_heads as prune_heads
from .models import prune_units as prune_units
from .models import register_attention as register_attention
from .models import register_pattern as register_pattern
from .models import retain_heads as retain_heads
from .training import CheckpointCallback as CheckpointCallback
from .training import HeadDynamicsCallback as HeadDynamicsCallback
from .training import HeadwiseSeq2SeqTrainer as HeadwiseSeq2SeqTrainer
from .training import HeadwiseSeq2SeqTrainingArguments as HeadwiseSeq2SeqTrainingArguments
from .training import HeadwiseTrainer as HeadwiseTrainer
from .training import HeadwiseTrainingArguments as HeadwiseTrainingArguments
from .training import MaskedLanguageModelCollator as MaskedLanguageModelCollator
from .training import ReplacedTokenCollator as ReplacedTokenCollator

# isort: split
# The other names that can be imported from the package; `dir()` of the subpackages lists them.
from .analysis import *
from .catalog import HeadwiseArchitecture as HeadwiseArchitecture
from .models import *
from .training import GateHistory as GateHistory
from .training import HeadwiseArguments as HeadwiseArguments
from .training import HeadwiseTrainerMixin as HeadwiseTrainerMixin
from .training import checkpoint_steps as checkpoint_steps

__version__: str

# Headwise classes, such as `HeadwiseBertForMaskedLM`, are made of the stock ones when they are asked for.
def __getattr__(name: str) -> Any: ...
