# Licensed under the Apache License, Version 2.0.
"""Configuration of bag-of-words attention."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_checks import CheckedConfigMixin, check_choice, check_classes, check_deviations, check_token_ids


CLASSIFIERS = ("fixed", "linear", "mlp")


@strict
class BowAttentionConfig(CheckedConfigMixin, PreTrainedConfig):
    """Configuration of a classifier over a bag of words that one query attends to (Lu et al. 2021, section 3).

    Args:
        vocab_size (`int`, defaults to 5009): Number of words, padding included.
        hidden_size (`int`, defaults to 15): Size d of an embedding.
        key_size (`int`, defaults to 15): Size d' of a key and of the query.
        classifier (`str`, defaults to `"linear"`): `fixed`, a frozen linear map with orthonormal columns (Attn-FC);
            `linear`, a trained one (Attn-TC); `mlp`, two layers with biases and a ReLU between them (Attn-TL).
        classifier_hidden_size (`int`, defaults to 10): Hidden units of `mlp`.
        convolution (`bool`, defaults to `False`): Whether two convolutions of width 2 make features and keys of
            neighbouring words from embeddings and keys of words (Attn-TC-CNN, appendix A).
        freeze_keys (`bool`, defaults to `False`): Whether keys are frozen (`-KF`).
        freeze_embeddings (`bool`, defaults to `False`): Whether embeddings are frozen (`-EF`).
        freeze_query (`bool`, defaults to `True`): Whether the query is frozen (appendix B trains it).
        embedding_std (`float`, defaults to 1e-3): Standard deviation σ/√d of the entries of embeddings.
        key_std (`float`, defaults to 0): Standard deviation of the entries of keys; 0 makes all initial scores zero.
        query_std (`float`, *optional*): Standard deviation of the entries of the query; `None` for a random query of
            norm 1, with which the paper's learning rates η = τ‖q‖² and τ are the same.
        pad_token_id (`int`, defaults to 0): Padding, never attended to.

    Raises:
        ValueError: if a value is invalid; the message names it.

    Example:
        >>> from hf_attn_dynamics import BowAttentionConfig
        >>> BowAttentionConfig(num_labels=4, classifier="mlp").classifier_hidden_size
        10
    """

    model_type = "bow-attention"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["context", "scores", "attention_weights"]

    vocab_size: int = 5009
    hidden_size: int = 15
    key_size: int = 15
    classifier: str = "linear"
    classifier_hidden_size: int = 10
    convolution: bool = False
    freeze_keys: bool = False
    freeze_embeddings: bool = False
    freeze_query: bool = True
    embedding_std: float = 1e-3
    key_std: float = 0.0
    query_std: float | None = None
    pad_token_id: int | None = 0

    def saved_code(self) -> type:
        # A circular import otherwise; Transformers saves the files that this one imports.
        from .modeling_bow_attention import BowAttentionForSequenceClassification

        return BowAttentionForSequenceClassification

    def check_values(self) -> None:
        super().check_values()
        check_deviations(self, "embedding_std", "key_std")
        if self.query_std is not None and self.query_std <= 0:
            raise ValueError(f"query_std must be greater than 0, got {self.query_std}.")
        check_choice(self, "classifier", CLASSIFIERS)
        check_token_ids(self, "vocab_size", "pad_token_id")
        check_classes(self)
        if self.classifier == "fixed" and self.num_labels > self.hidden_size:
            raise ValueError(
                f"classifier='fixed' needs hidden_size >= num_labels, got hidden_size={self.hidden_size} and "
                f"num_labels={self.num_labels}; raise hidden_size or set classifier='linear'."
            )


__all__ = ["BowAttentionConfig"]
