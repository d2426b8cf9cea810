# Licensed under the Apache License, Version 2.0.
"""Configuration of the LSTM encoder–decoder with attention."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_checks import (
    CheckedConfigMixin,
    check_attention,
    check_choice,
    check_deviations,
    check_dropout,
    check_token_ids,
)


READOUTS = ("mlp", "additive")
DIRECTIONS = ("added", "concatenated")


@strict
class LstmSeq2SeqConfig(CheckedConfigMixin, PreTrainedConfig):
    """Configuration of an LSTM encoder–decoder with dot-product attention (Luong et al. 2015; Snell et al. 2021, 2.1).

    The defaults are those of the paper's copying experiments; its translation model has `vocab_size=8000,
    num_hidden_layers=2, bidirectional=True, dropout=0.5`.

    Args:
        vocab_size (`int`, defaults to 64): Number of source words, padding included.
        target_vocab_size (`int`, *optional*): Number of target words; defaults to `vocab_size`.
        embedding_size (`int`, defaults to 256): Size of an embedding.
        hidden_size (`int`, defaults to 256): Size of encoder and decoder states.
        num_hidden_layers (`int`, defaults to 1): Number of LSTM layers of the encoder, and of the decoder.
        bidirectional (`bool`, defaults to `False`): Whether the encoder is bidirectional.
        directions (`str`, defaults to `"added"`): How the states of both directions are combined: `added`, each of
            `hidden_size`; or `concatenated`, each of `hidden_size / 2`.
        num_attention_heads (`int`, defaults to 1): Number of heads; each attends to whole states, and their contexts
            are added (equations 20 and 21).
        attention (`str`, defaults to `"learned"`): `learned`; `uniform`, the same weight for all source words; or
            `frozen` at its initial parameters.
        train_attention_only (`bool`, defaults to `False`): Whether all other parameters are frozen (the frozen β of
            appendix A.5).
        readout (`str`, defaults to `"mlp"`): `mlp`, one hidden layer with a ReLU over context and state (equation 2);
            or `additive`, a linear layer over their sum (appendix A.1), whose best attention is a convex problem.
        readout_size (`int`, defaults to 256): Hidden units of `mlp`.
        dropout (`float`, defaults to 0): Dropout between LSTM layers.
        embedding_std (`float`, defaults to 1): Standard deviation of new embeddings.
        share_encoder_decoder_embeddings (`bool`, defaults to `True`): Whether source and target share embeddings.
        use_cache (`bool`, defaults to `True`): Whether the decoder returns its state for generation.
        pad_token_id (`int`, defaults to 0): Padding token.
        bos_token_id (`int`, defaults to 1): Token at the start of a sentence.
        eos_token_id (`int`, defaults to 2): Token at the end of a sentence.
        decoder_start_token_id (`int`, defaults to 1): First input token of the decoder.

    Raises:
        ValueError: if a value is invalid; the message names it.

    Example:
        >>> from hf_attn_dynamics import LstmSeq2SeqConfig
        >>> LstmSeq2SeqConfig(vocab_size=8000, num_hidden_layers=2, bidirectional=True, dropout=0.5).num_target_words
        8000
    """

    model_type = "lstm-attention-seq2seq"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "cache",
        "cross_attentions",
        "encoder_last_hidden_state",
        "decoder_hidden_states",
    ]

    vocab_size: int = 64
    target_vocab_size: int | None = None
    embedding_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 1
    bidirectional: bool = False
    directions: str = "added"
    num_attention_heads: int = 1
    attention: str = "learned"
    train_attention_only: bool = False
    readout: str = "mlp"
    readout_size: int = 256
    dropout: float = 0.0
    embedding_std: float = 1.0
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = False
    is_encoder_decoder: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    @property
    def num_target_words(self) -> int:
        """Number of target words."""
        return self.vocab_size if self.target_vocab_size is None else self.target_vocab_size

    def saved_code(self) -> type:
        # A circular import otherwise; Transformers saves the files that this one imports.
        from .modeling_lstm_seq2seq import LstmSeq2SeqForConditionalGeneration

        return LstmSeq2SeqForConditionalGeneration

    def check_values(self) -> None:
        super().check_values()
        check_choice(self, "readout", READOUTS)
        check_choice(self, "directions", DIRECTIONS)
        check_token_ids(self, "vocab_size", "pad_token_id")
        check_token_ids(self, "num_target_words", "pad_token_id", "bos_token_id", "eos_token_id")
        # Without it, generate() would fall back to bos_token_id, and training would fail.
        check_token_ids(self, "num_target_words", "decoder_start_token_id", optional=False)
        check_dropout(self)
        check_attention(self)
        check_deviations(self, "embedding_std")
        if self.directions == "concatenated" and (not self.bidirectional or self.hidden_size % 2):
            raise ValueError(
                f"directions='concatenated' needs bidirectional=True and an even hidden_size, got bidirectional="
                f"{self.bidirectional} and {self.hidden_size}."
            )
        if self.attention == "uniform" and self.num_attention_heads > 1:
            raise ValueError(
                f"attention='uniform' needs num_attention_heads=1, got {self.num_attention_heads}: all heads would be "
                "the same."
            )
        if self.share_encoder_decoder_embeddings and self.num_target_words != self.vocab_size:
            raise ValueError(
                f"source and target cannot share embeddings with vocab_size={self.vocab_size} and target_vocab_size="
                f"{self.target_vocab_size}; set share_encoder_decoder_embeddings=False."
            )
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be False: the output layer has separate weights.")


__all__ = ["LstmSeq2SeqConfig"]
