# Licensed under the Apache License, Version 2.0.
"""Layer-wise relevance propagation, by head (Voita et al. 2019)."""

from ..._moved import names_of


__getattr__ = names_of(__name__, "heads")
