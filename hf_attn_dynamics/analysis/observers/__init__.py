# Licensed under the Apache License, Version 2.0.
"""Statistics of attention weights, collected while a model runs."""

from ..._moved import names_of
from ..._stub import import_on_first_use


import_on_first_use(__name__, names_of(__name__, "base"))
