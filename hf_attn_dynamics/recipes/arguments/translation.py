# Licensed under the Apache License, Version 2.0.
"""Flags that the recipes for translation share."""

from dataclasses import dataclass
from typing import ClassVar

from .base import HubDataArguments, PublishArguments, flag


# Model, text and batches of the presets, by name. How long to train is for each recipe to say.
SIZES = {
    "numerals": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 250,
        "dropout": 0.0,
        "max_length": 64,
        "warmup_steps": 200,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 64,
        "num_beams": 1,
    },
    "small": {
        "encoder_layers": 3,
        "decoder_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "vocab_size": 4000,
        "dropout": 0.1,
        "max_length": 32,
        "warmup_steps": 500,
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 64,
        "num_beams": 1,
    },
    # That of Vaswani et al. (2017), with their factor hidden_size^-0.5: 4 · 512^-0.5 · 16000^-0.5.
    "base": {
        "encoder_layers": 6,
        "decoder_layers": 6,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 32000,
        "dropout": 0.1,
        "max_length": 128,
        "warmup_steps": 16_000,
        "learning_rate": 1.4e-3,
        "per_device_train_batch_size": 640,
        "num_beams": 4,
    },
}


@dataclass
class TextArguments(PublishArguments, HubDataArguments):
    """Flags that name parallel text, and how it is translated."""

    num_beams: int = flag(1, "Number of beams; 1 is greedy search.")
    vocab_size: int = flag(150, "Size of the SentencePiece vocabulary that both languages share.")

    source_file: list[str] | None = flag(
        None, "Text to translate from, one sentence per line; or tables with both languages, without target_file."
    )
    target_file: list[str] | None = flag(None, "Translations of source_file, line by line.")
    validation_source_file: list[str] | None = flag(None, "Source text to evaluate on.")
    validation_target_file: list[str] | None = flag(None, "Translations of validation_source_file.")
    test_source_file: list[str] | None = flag(None, "Source text to compute BLEU on; the validation text by default.")
    test_target_file: list[str] | None = flag(None, "Translations of test_source_file.")
    test_split: str | None = flag(None, "Split of the dataset to compute BLEU on.")
    source_column: str | None = flag(
        None, "Column of the source text in tables and datasets; name or position, source or src by default."
    )
    target_column: str | None = flag(None, "Column of the translations; target or tgt by default.")
    languages: list[str] | None = flag(
        None, "Codes of the source and the target language, for BLEU and the model cards."
    )
    max_length: int = flag(64, "Maximum number of tokens per side; longer pairs are not trained on.")
    max_eval_examples: int | None = flag(None, "Maximum number of pairs of the validation text, and of the test text.")

    least: ClassVar[dict[str, int]] = {"max_eval_examples": 1, "num_beams": 1, "max_length": 1}

    def __post_init__(self):
        super().__post_init__()
        if self.languages is not None and len(self.languages) != 2:
            raise ValueError(f"languages must be two, source and target, got {self.languages}.")
        for name, least in self.least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")


@dataclass
class TransformerArguments(TextArguments):
    """Flags of a translation Transformer and its text; [`TranslationTrainingArguments`] has those of training."""

    preset: str = flag("numerals", f"Sizes and training settings: {', '.join(SIZES)}.")

    encoder_layers: int = flag(2, "Number of encoder layers.")
    decoder_layers: int = flag(2, "Number of decoder layers.")
    hidden_size: int = flag(128, "Hidden size; feed-forward layers are four times as wide.")
    num_attention_heads: int = flag(4, "Number of heads per layer and attention.")
    dropout: float = flag(0.1, "Dropout of the hidden states.")
    attention_dropout: float = flag(0.0, "Dropout of the attention weights.")

    least: ClassVar[dict[str, int]] = {
        **TextArguments.least,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "num_attention_heads": 1,
    }

    def __post_init__(self):
        super().__post_init__()
        if self.hidden_size < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}."
            )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}.")


@dataclass
class TranslationArguments(TransformerArguments):
    """Flags of a translation Transformer whose heads can be guided to patterns."""

    guidance: str | None = flag(
        None,
        'Guidance of the heads as JSON: {"fraction": 0.5} in the encoder, {} for its defaults, or '
        '{"encoder": …, "decoder": …, "cross": …}.',
    )
