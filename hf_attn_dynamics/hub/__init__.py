# Licensed under the Apache License, Version 2.0.
"""Model cards and uploads to the Hub."""

from .._moved import names_of


__getattr__ = names_of(__name__, "push")
