# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from .agreements import ContextualizedAgreement as ContextualizedAgreement
from .agreements import agreement as agreement
from .agreements import chance_agreement as chance_agreement
from .agreements import contextualized_agreement as contextualized_agreement
from .agreements import kendall_tau as kendall_tau
from .alignment import align_both_directions as align_both_directions
from .alignment import alignment_error_rate as alignment_error_rate
from .alignment import attention_alignment as attention_alignment
from .alignment import read_pharaoh as read_pharaoh
from .alignment import symmetrize as symmetrize
from .alignment import write_pharaoh as write_pharaoh
from .diagonal_prior import DiagonalPrior as DiagonalPrior
from .hidden_states import embedding_alignment as embedding_alignment
from .ibm_model import IbmModel1 as IbmModel1
from .optimum import OptimalAttention as OptimalAttention
from .optimum import optimal_attention as optimal_attention
from .probe import LexicalProbe as LexicalProbe
from .probe import lexical_probe as lexical_probe
from .rows import AgreementTracker as AgreementTracker
from .rows import ibm_rows as ibm_rows
from .rows import row_mask as row_mask
from .rows import source_rows as source_rows
from .saliency import word_saliency as word_saliency
