# Licensed under the Apache License, Version 2.0.
"""Configuration of the LSTM classifier with attention."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_checks import (
    CheckedConfigMixin,
    check_attention,
    check_classes,
    check_deviations,
    check_dropout,
    check_token_ids,
)


@strict
class LstmConfig(CheckedConfigMixin, PreTrainedConfig):
    """Configuration of a bidirectional LSTM classifier with attention over its states (Wiegreffe & Pinter 2019).

    Snell et al. 2021 use it in section 2.4.

    Args:
        vocab_size (`int`, defaults to 5000): Number of words, padding included.
        embedding_size (`int`, defaults to 300): Size of an embedding.
        hidden_size (`int`, defaults to 256): Size of the state of each direction.
        num_hidden_layers (`int`, defaults to 1): Number of LSTM layers.
        bidirectional (`bool`, defaults to `True`): Whether the LSTM is bidirectional; states are concatenated.
        attention (`str`, defaults to `"learned"`): `learned`; `uniform`, the same weight for all words; or `frozen`
            at its initial parameters.
        attention_size (`int`, defaults to 256): Hidden units of the attention.
        train_attention_only (`bool`, defaults to `False`): Whether all other parameters are frozen (the frozen β of
            appendix A.5).
        dropout (`float`, defaults to 0): Dropout between LSTM layers.
        embedding_std (`float`, defaults to 1): Standard deviation of new embeddings.
        pad_token_id (`int`, defaults to 0): Padding, never attended to.

    Raises:
        ValueError: if a value is invalid; the message names it.

    Example:
        >>> from hf_attn_dynamics import LstmConfig
        >>> LstmConfig(vocab_size=10_000, num_labels=4).num_labels
        4
    """

    model_type = "lstm-attention"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["context", "scores", "attention_weights", "states"]

    vocab_size: int = 5000
    embedding_size: int = 300
    hidden_size: int = 256
    num_hidden_layers: int = 1
    bidirectional: bool = True
    attention: str = "learned"
    attention_size: int = 256
    train_attention_only: bool = False
    dropout: float = 0.0
    embedding_std: float = 1.0
    pad_token_id: int | None = 0

    def saved_code(self) -> type:
        # A circular import otherwise; Transformers saves the files that this one imports.
        from .modeling_lstm import LstmForSequenceClassification

        return LstmForSequenceClassification

    def check_values(self) -> None:
        super().check_values()
        check_token_ids(self, "vocab_size", "pad_token_id")
        check_dropout(self)
        check_attention(self)
        check_deviations(self, "embedding_std")
        check_classes(self)


__all__ = ["LstmConfig"]
