# Licensed under the Apache License, Version 2.0.
"""Layer-wise relevance propagation to attention heads (Voita et al. 2019)."""

from ..._moved import names_of
from ..._stub import import_on_first_use


import_on_first_use(__name__, names_of(__name__, "heads"))
