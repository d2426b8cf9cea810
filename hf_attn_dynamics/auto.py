# Licensed under the Apache License, Version 2.0.
"""Earlier name of [`catalog`]."""

from .catalog import headwise_model as headwise_model
