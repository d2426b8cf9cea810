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

    def auto_classes(self) -> dict[str, type]:
        # Not above, since that file imports this one. Named here, it is saved beside this one.
        from .modeling_headwise_marian import AUTO_CLASSES

        return AUTO_CLASSES

    def attention_sites(self) -> dict[HeadSite, int]:
        """Number of heads, removed ones included, at each site of the model."""
        # Each attribute is read once: in configurations that takes time, and every forward pass asks.
        encoder, decoder = self.encoder_attention_heads, self.decoder_attention_heads
        layers, alone = range(self.decoder_layers), self.is_decoder and not self.is_encoder_decoder
        return {
            **{HeadSite("encoder", layer): encoder for layer in range(0 if alone else self.encoder_layers)},
            **{HeadSite("decoder", layer): decoder for layer in layers},
            **{HeadSite("cross", layer): decoder for layer in (() if alone else layers)},
        }


__all__ = ["HeadwiseMarianConfig"]
