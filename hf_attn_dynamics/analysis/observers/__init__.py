# Licensed under the Apache License, Version 2.0.
"""Statistics of attention weights, collected while a model runs."""

from ..._moved import names_of


__getattr__ = names_of(__name__, "base")
