# Licensed under the Apache License, Version 2.0.
"""Which tokens contribute to a head's output: Hidden Token Attribution (Pascal et al. 2021)."""

from ..._moved import names_of
from ..._stub import import_on_first_use


import_on_first_use(__name__, names_of(__name__, "local"))
