# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from .compensation import RefitErrors as RefitErrors
from .compensation import compensate as compensate
from .compensation import mean_unit_outputs as mean_unit_outputs
from .compensation import refit_outputs as refit_outputs
from .copying import copying_scores as copying_scores
from .coreference import CoreferenceScores as CoreferenceScores
from .coreference import coreference_accuracy as coreference_accuracy
from .importance import gate_importance as gate_importance
from .importance import head_importance as head_importance
from .importance import random_importance as random_importance
from .latency import count_flops_table as count_flops_table
from .latency import measure_latency_table as measure_latency_table
from .maps import attention_maps as attention_maps
from .maps import to_bertviz as to_bertviz
from .matching import HeadMatching as HeadMatching
from .matching import compare_heads as compare_heads
from .names import HeadNames as HeadNames
from .names import name_heads as name_heads
from .outputs import head_outputs as head_outputs
from .outputs import masked_heads as masked_heads
from .outputs import mean_head_outputs as mean_head_outputs
from .post_training import FisherPruning as FisherPruning
from .post_training import fisher_pruning as fisher_pruning
from .pruning_report import HeadReport as HeadReport
from .pruning_report import head_report as head_report
from .selection import Selection as Selection
from .selection import select_parts as select_parts
from .unit_scores import UnitScores as UnitScores
from .unit_scores import unit_importance as unit_importance
