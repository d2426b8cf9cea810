# Licensed under the Apache License, Version 2.0.
"""The former place of the configuration of headwise BERT."""

from .headwise_classes import __getattr__ as __getattr__
