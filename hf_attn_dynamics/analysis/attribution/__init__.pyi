# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from typing import Any

from .across_layers import global_contribution as global_contribution
from .decomposition import TokenDecomposition as TokenDecomposition
from .decomposition import token_decomposition as token_decomposition
from .integrated_gradients import IntegratedGradientsAgreement as IntegratedGradientsAgreement
from .integrated_gradients import integrated_gradients_agreement as integrated_gradients_agreement
from .layers import EncoderDecoderContribution as EncoderDecoderContribution
from .layers import encoder_decoder_contribution as encoder_decoder_contribution
from .layers import layer_contribution as layer_contribution
from .local import local_contribution as local_contribution
from .rollout import attention_flow as attention_flow
from .rollout import attention_rollout as attention_rollout
from .rollout import value_weighted_attention as value_weighted_attention
from .statistics import MapCorrelation as MapCorrelation
from .statistics import correlate as correlate
from .statistics import map_types as map_types
from .statistics import show_maps as show_maps
from .token_removal import Faithfulness as Faithfulness
from .token_removal import faithfulness as faithfulness

# Earlier names, which can be imported until 0.2.
def __getattr__(name: str) -> Any: ...
