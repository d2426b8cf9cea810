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


__all__ = ["HeadwiseBertConfig"]
