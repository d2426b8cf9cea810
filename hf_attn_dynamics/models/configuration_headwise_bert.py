# Licensed under the Apache License, Version 2.0.
"""Configuration of headwise BERT."""

from huggingface_hub.dataclasses import strict
from transformers import BertConfig

from .configuration_headwise import HeadwiseConfigMixin


@strict
class HeadwiseBertConfig(HeadwiseConfigMixin, BertConfig):
    """BERT's configuration with attention guidance; see [`HeadwiseConfigMixin`] for what it adds.

    Example:
        >>> from hf_attn_dynamics import HeadwiseBertConfig
        >>> config = HeadwiseBertConfig(guidance={"heads": {"next": [0], "first": [1, 2]}})
        >>> config.guided_heads()[11]
        {'next': [0], 'first': [1, 2]}
    """

    model_type = "headwise-bert"

    def auto_classes(self) -> dict[str, type]:
        # Not above, since that file imports this one. Named here, it is saved beside this one.
        from .modeling_headwise_bert import AUTO_CLASSES

        return AUTO_CLASSES


__all__ = ["HeadwiseBertConfig"]
