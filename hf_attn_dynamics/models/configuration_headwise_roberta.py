# Licensed under the Apache License, Version 2.0.
"""Configuration of headwise RoBERTa."""

from huggingface_hub.dataclasses import strict
from transformers import RobertaConfig

from .configuration_headwise import HeadwiseConfigMixin


@strict
class HeadwiseRobertaConfig(HeadwiseConfigMixin, RobertaConfig):
    """RoBERTa's configuration with attention guidance; see [`HeadwiseConfigMixin`] for what it adds.

    Example:
        >>> from hf_attn_dynamics import HeadwiseRobertaConfig
        >>> config = HeadwiseRobertaConfig(guidance={"heads": {"next": [0], "first": [1, 2]}})
        >>> config.guided_heads()[11]
        {'next': [0], 'first': [1, 2]}
    """

    model_type = "headwise-roberta"

    def auto_classes(self) -> dict[str, type]:
        # Not above, since that file imports this one. Named here, it is saved beside this one.
        from .modeling_headwise_roberta import AUTO_CLASSES

        return AUTO_CLASSES

    def max_positions(self) -> int:
        """Largest number of tokens that the position embeddings serve: RoBERTa counts from `pad_token_id + 1` on."""
        return self.max_position_embeddings - self.pad_token_id - 1


__all__ = ["HeadwiseRobertaConfig"]
