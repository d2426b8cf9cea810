# Licensed under the Apache License, Version 2.0.
"""Configuration of the bag-of-words proxy."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_checks import CheckedConfigMixin, check_deviations, check_token_ids


@strict
class ProxyConfig(CheckedConfigMixin, PreTrainedConfig):
    """Configuration of the bag-of-words proxy of a model early in training (Snell et al. 2021, equation 5).

    Args:
        vocab_size (`int`, defaults to 5000): Number of source words, padding included.
        target_vocab_size (`int`, *optional*): Number of target words; defaults to `vocab_size`. Classifiers have
            `num_labels` instead.
        embedding_size (`int`, defaults to 256): Size of an embedding.
        embedding_std (`float`, *optional*): Standard deviation of new embeddings and of new weights of the linear
            layer; defaults to 1/√embedding_size, as in section 4.1.
        pad_token_id (`int`, defaults to 0): Padding token.

    Raises:
        ValueError: if a value is invalid; the message names it.

    Example:
        >>> from hf_attn_dynamics import ProxyConfig
        >>> ProxyConfig(vocab_size=8000).embedding_size
        256
    """

    model_type = "bag-of-words-proxy"

    vocab_size: int = 5000
    target_vocab_size: int | None = None
    embedding_size: int = 256
    embedding_std: float | None = None
    pad_token_id: int | None = 0

    def saved_code(self) -> type:
        # A circular import otherwise; Transformers saves the files that this one imports.
        from .modeling_proxy import ProxyForSeq2Seq

        return ProxyForSeq2Seq

    def check_values(self) -> None:
        super().check_values()
        check_token_ids(self, "vocab_size", "pad_token_id")
        check_deviations(self, "embedding_std")


__all__ = ["ProxyConfig"]
