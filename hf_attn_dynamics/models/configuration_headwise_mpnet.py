# Licensed under the Apache License, Version 2.0.
"""What the configuration of headwise MPNet has beside that of any headwise model."""

from dataclasses import dataclass

from .configuration_headwise import HeadwiseConfigMixin


@dataclass(kw_only=True, repr=False, eq=False)
class HeadwiseMPNetConfigMixin(HeadwiseConfigMixin):
    """See [`HeadwiseConfigMixin`] for what is said of heads."""

    def max_positions(self) -> int:
        """Largest number of tokens that the position embeddings serve: MPNet counts from 2 on, whatever pads."""
        return self.max_position_embeddings - 2
