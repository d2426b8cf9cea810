# Licensed under the Apache License, Version 2.0.
"""Configuration of bag-of-words attention."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_checks import CheckedConfigMixin, check_choice, check_classes, check_deviations, check_words


CLASSIFIERS = ("fixed", "linear", "mlp")


@strict
class BowAttentionConfig(CheckedConfigMixin, PreTrainedConfig):
    """One query attends to a bag of words, and a classifier reads the average (Lu et al. 2021, section 3).

    Args:
        vocab_size (`int`, defaults to 5009): Number of words, padding included.
        hidden_size (`int`, defaults to 15): Size d of an embedding.
        key_size (`int`, defaults to 15): Size d' of a key and of the query.
        classifier (`str`, defaults to `"linear"`): `fixed`, a frozen linear map with orthonormal columns (Attn-FC);
            `linear`, a trained one (Attn-TC); `mlp`, two layers with biases and a ReLU between them (Attn-TL).
        classifier_hidden_size (`int`, defaults to 10): Hidden units of `mlp`.
        convolution (`bool`, defaults to `False`): Whether two convolutions of width 2 make features and keys of
            neighbouring words from embeddings and keys of words (Attn-TC-CNN, appendix A).
        freeze_keys (`bool`, defaults to `False`): Whether keys stay as they are (`-KF`).
        freeze_embeddings (`bool`, defaults to `False`): Whether embeddings stay as they are (`-EF`).
        freeze_query (`bool`, defaults to `True`): Whether the query does (appendix B has it trained).
        embedding_std (`float`, defaults to 1e-3): Standard deviation σ/√d of the entries of embeddings.
        key_std (`float`, defaults to 0): Of the entries of keys; 0 makes all scores zero at first.
        query_std (`float`, *optional*): Of the entries of the query; without it, a random query of norm 1, by which
            the paper's learning rates η = τ‖q‖² and τ are the same.
        pad_token_id (`int`, defaults to 0): Padding, never attended to.

    Raises:
        ValueError: if a value is not possible; the message names it.

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
        # Not above, since that file imports this one. Named here, it is saved beside this one.
        from .modeling_bow_attention import BowAttentionForSequenceClassification

        return BowAttentionForSequenceClassification

    def check_values(self) -> None:
        super().check_values()
        check_deviations(self, "embedding_std", "key_std")
        if self.query_std is not None and self.query_std <= 0:
            raise ValueError(f"query_std must be greater than 0, got {self.query_std}: a zero query sees no key.")
        check_choice(self, "classifier", CLASSIFIERS)
        check_words(self, "vocab_size", "pad_token_id")
        check_classes(self)
        if self.classifier == "fixed" and self.num_labels > self.hidden_size:
            raise ValueError(
                f"a fixed classifier of {self.num_labels} labels needs as many independent columns, but hidden_size "
                f"is {self.hidden_size}; raise it or train the classifier."
            )


__all__ = ["BowAttentionConfig"]
