# Licensed under the Apache License, Version 2.0.
"""The former path of [`catalog`]."""

from .catalog import headwise_model as headwise_model
