# Licensed under the Apache License, Version 2.0.
"""Observers: statistics of attention weights while a model runs, and what looks on."""

from ..._moved import names_of


__getattr__ = names_of(__name__, "base")
