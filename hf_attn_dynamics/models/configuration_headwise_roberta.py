# Licensed under the Apache License, Version 2.0.
"""Configuration of headwise RoBERTa."""

from dataclasses import dataclass

from .configuration_headwise import HeadwiseConfigMixin
from .headwise_classes import __getattr__ as __getattr__  # earlier module of HeadwiseRobertaConfig


@dataclass(kw_only=True, repr=False, eq=False)
class HeadwiseRobertaConfigMixin(HeadwiseConfigMixin):
    """See [`HeadwiseConfigMixin`] for the settings of heads."""

    def max_positions(self) -> int:
        """Largest number of tokens: RoBERTa counts positions from `pad_token_id + 1`."""
        return self.max_position_embeddings - self.pad_token_id - 1
