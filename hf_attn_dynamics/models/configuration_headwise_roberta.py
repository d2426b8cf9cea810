# Licensed under the Apache License, Version 2.0.
"""What the configuration of headwise RoBERTa has beside that of any headwise model."""

from dataclasses import dataclass

from .configuration_headwise import HeadwiseConfigMixin
from .headwise_classes import __getattr__ as __getattr__  # the former place of HeadwiseRobertaConfig


@dataclass(kw_only=True, repr=False, eq=False)
class HeadwiseRobertaConfigMixin(HeadwiseConfigMixin):
    """See [`HeadwiseConfigMixin`] for what is said of heads."""

    def max_positions(self) -> int:
        """Largest number of tokens that the position embeddings serve: RoBERTa counts from `pad_token_id + 1` on."""
        return self.max_position_embeddings - self.pad_token_id - 1
