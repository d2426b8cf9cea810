# Licensed under the Apache License, Version 2.0.
"""Earlier module of the headwise BERT classes, kept for saved checkpoints."""

from .headwise_classes import __getattr__ as __getattr__
