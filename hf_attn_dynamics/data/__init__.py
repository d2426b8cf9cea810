# Licensed under the Apache License, Version 2.0.
"""Datasets and tokenizers."""

from .._stub import import_on_first_use


import_on_first_use(__name__)
