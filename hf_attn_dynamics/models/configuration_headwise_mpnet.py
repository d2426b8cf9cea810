# Licensed under the Apache License, Version 2.0.
"""Configuration of headwise MPNet."""

from dataclasses import dataclass

from .configuration_headwise import HeadwiseConfigMixin


@dataclass(kw_only=True, repr=False, eq=False)
class HeadwiseMPNetConfigMixin(HeadwiseConfigMixin):
    """See [`HeadwiseConfigMixin`] for the settings of heads."""

    def max_positions(self) -> int:
        """Largest number of tokens: MPNet counts positions from 2, for any `pad_token_id`."""
        return self.max_position_embeddings - 2
