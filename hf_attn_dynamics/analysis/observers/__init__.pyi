# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from typing import Any

from .base import Observer as Observer
from .confidence import HeadConfidence as HeadConfidence
from .confidence import HeadEntropy as HeadEntropy
from .delimiters import DelimiterAttention as DelimiterAttention
from .distances import HeadDistance as HeadDistance
from .distances import HeadDistances as HeadDistances
from .observation import observe as observe
from .positions import RelativeAttention as RelativeAttention
from .positions import RelativePositions as RelativePositions
from .roles import RoleScores as RoleScores
from .roles import role_overlap as role_overlap
from .roles import top_heads as top_heads
from .sinks import AttentionSink as AttentionSink
from .sinks import SinkAttention as SinkAttention
from .syntactic_roles import SyntacticRoles as SyntacticRoles
from .token_relations import InductionScore as InductionScore
from .token_relations import LocalAttention as LocalAttention
from .token_relations import PreviousToken as PreviousToken
from .token_relations import TargetAttention as TargetAttention
from .token_roles import DuplicateTokens as DuplicateTokens
from .token_roles import RareWords as RareWords
from .token_roles import RetrievalScore as RetrievalScore

# Earlier names, which can be imported until 0.2.
def __getattr__(name: str) -> Any: ...
