# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from typing import Any

from .heads import RelevanceConservation as RelevanceConservation
from .heads import head_relevance as head_relevance
from .heads import relevance_conservation as relevance_conservation
from .tokens import token_relevance as token_relevance

# Earlier names, which can be imported until 0.2.
def __getattr__(name: str) -> Any: ...
