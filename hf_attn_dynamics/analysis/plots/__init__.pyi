# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from typing import Any

from .attribution import MapExample as MapExample
from .attribution import plot_centers_of_mass as plot_centers_of_mass
from .attribution import plot_faithfulness as plot_faithfulness
from .attribution import plot_map_correlation as plot_map_correlation
from .attribution import plot_map_examples as plot_map_examples
from .attribution import plot_map_types as plot_map_types
from .attribution import plot_relative_maps as plot_relative_maps
from .base import plot_gate_history as plot_gate_history
from .base import plot_gates as plot_gates
from .base import plot_head_maps as plot_head_maps
from .base import plot_heads_per_layer as plot_heads_per_layer
from .base import plot_pretraining as plot_pretraining
from .base import plot_pruning_curve as plot_pruning_curve
from .dynamics import plot_head_dynamics as plot_head_dynamics
from .heads import plot_functions_kept as plot_functions_kept
from .heads import plot_head_distances as plot_head_distances
from .heads import plot_head_functions as plot_head_functions
from .heads import plot_relative_attention as plot_relative_attention
from .heads import plot_roles as plot_roles
from .heads import plot_sinks as plot_sinks
from .lexical import SourceMap as SourceMap
from .lexical import plot_source_maps as plot_source_maps
from .parts import plot_parts_per_layer as plot_parts_per_layer
from .parts import plot_speedup_curve as plot_speedup_curve
from .score_norm import Curves as Curves
from .score_norm import plot_score_norm_curves as plot_score_norm_curves

# Earlier names, which can be imported until 0.2.
def __getattr__(name: str) -> Any: ...
