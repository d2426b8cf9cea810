# Licensed under the Apache License, Version 2.0.
"""Configuration of headwise ALBERT."""

from dataclasses import dataclass

from .configuration_headwise import HeadwiseConfigMixin
from .head_sites import HeadSite


@dataclass(kw_only=True, repr=False, eq=False)
class HeadwiseAlbertConfigMixin(HeadwiseConfigMixin):
    """See [`HeadwiseConfigMixin`] for the settings of heads; layers that share their weights share their heads."""

    def attention_sites(self) -> dict[HeadSite, int]:
        """Number of heads, removed ones included, in each distinct layer."""
        layers = range(self.num_hidden_groups * self.inner_group_num)
        return {HeadSite("encoder", layer): self.num_attention_heads for layer in layers}
