# Licensed under the Apache License, Version 2.0.
"""Questions asked of models, and the pictures of their answers."""

from .._stub import import_on_first_use


import_on_first_use(__name__)
