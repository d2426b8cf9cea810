# Licensed under the Apache License, Version 2.0.
"""What heads and feed-forward units do and how much they matter: maps, outputs, importance, antecedents, costs."""

from ..._stub import import_on_first_use


import_on_first_use(__name__)
