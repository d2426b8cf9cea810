# Licensed under the Apache License, Version 2.0.
"""Configuration of headwise Marian."""

from dataclasses import dataclass

from .configuration_headwise import HeadwiseConfigMixin
from .head_sites import HeadSite
from .headwise_classes import __getattr__ as __getattr__  # earlier module of HeadwiseMarianConfig


@dataclass(kw_only=True, repr=False, eq=False)
class HeadwiseMarianConfigMixin(HeadwiseConfigMixin):
    """See [`HeadwiseConfigMixin`] for the settings of heads, by site.

    Example:
        >>> from hf_attn_dynamics import HeadwiseMarianConfig
        >>> config = HeadwiseMarianConfig(pruned_heads={"cross": {0: [1, 2]}}, decoder_layers=1)
        >>> len(config.kept_heads()["cross", 0])
        14
    """

    def attention_sites(self) -> dict[HeadSite, int]:
        """Number of heads, removed ones included, at each site of the model."""
        # Each attribute is read once: reading is slow in configurations, and every forward pass calls this.
        encoder, decoder = self.encoder_attention_heads, self.decoder_attention_heads
        layers, alone = range(self.decoder_layers), self.is_decoder and not self.is_encoder_decoder
        return {
            **{HeadSite("encoder", layer): encoder for layer in range(0 if alone else self.encoder_layers)},
            **{HeadSite("decoder", layer): decoder for layer in layers},
            **{HeadSite("cross", layer): decoder for layer in (() if alone else layers)},
        }
