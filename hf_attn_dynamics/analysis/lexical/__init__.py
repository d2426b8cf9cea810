# Licensed under the Apache License, Version 2.0.
"""What attention knows of words: probe, saliency, agreement, alignment (Snell et al. 2021)."""

from ..._stub import import_on_first_use


import_on_first_use(__name__)
