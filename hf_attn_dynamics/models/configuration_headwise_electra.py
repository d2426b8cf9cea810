# Licensed under the Apache License, Version 2.0.
"""Configuration of headwise ELECTRA."""

from huggingface_hub.dataclasses import strict
from transformers import ElectraConfig

from .configuration_headwise import HeadwiseConfigMixin


@strict
class HeadwiseElectraConfig(HeadwiseConfigMixin, ElectraConfig):
    """ELECTRA's configuration with guided, gated and removed heads; see [`HeadwiseConfigMixin`] for what it adds.

    Example:
        >>> from hf_attn_dynamics import HeadwiseElectraConfig
        >>> HeadwiseElectraConfig(gates={}).gates["initial_log_alpha"]
        2.5
    """

    model_type = "headwise-electra"


__all__ = ["HeadwiseElectraConfig"]
