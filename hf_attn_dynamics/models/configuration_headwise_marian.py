# Licensed under the Apache License, Version 2.0.
"""Configuration of headwise Marian."""

from huggingface_hub.dataclasses import strict
from transformers import MarianConfig

from .configuration_headwise import HeadwiseConfigMixin
from .head_sites import HeadSite


@strict
class HeadwiseMarianConfig(HeadwiseConfigMixin, MarianConfig):
    """Marian's configuration with guided, gated and removed heads; see [`HeadwiseConfigMixin`] for what it adds.

    Example:
        >>> from hf_attn_dynamics import HeadwiseMarianConfig
        >>> config = HeadwiseMarianConfig(pruned_heads={"cross": {0: [1, 2]}}, decoder_layers=1)
        >>> len(config.kept_heads()["cross", 0])
        14
    """

    model_type = "headwise-marian"

    def attention_sites(self) -> dict[HeadSite, int]:
        """Number of heads, removed ones included, at each site of the model."""
        decoder = {
            HeadSite(kind, layer): self.decoder_attention_heads
            for kind in ("decoder", "cross")
            for layer in range(self.decoder_layers)
        }
        if self.is_decoder and not self.is_encoder_decoder:
            return {site: heads for site, heads in decoder.items() if site.kind == "decoder"}
        return {
            **{HeadSite("encoder", layer): self.encoder_attention_heads for layer in range(self.encoder_layers)},
            **decoder,
        }


__all__ = ["HeadwiseMarianConfig"]
