# Licensed under the Apache License, Version 2.0.
"""Flags that the recipes for translation have in common."""

from dataclasses import dataclass, field
from typing import ClassVar

from .base import PublishArguments


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
class TextArguments(PublishArguments):
    """Text of a run, and how it is translated."""

    num_beams: int = field(default=1, metadata={"help": "Width of the beam search; 1 is greedy."})
    vocab_size: int = field(default=150, metadata={"help": "Size of the SentencePiece vocabulary of both languages."})

    source_file: list[str] | None = field(
        default=None,
        metadata={"help": "Text to translate from, a sentence a line; or tables of both sides, without target_file."},
    )
    target_file: list[str] | None = field(default=None, metadata={"help": "Its translations, line by line."})
    validation_source_file: list[str] | None = field(default=None, metadata={"help": "The same, to evaluate on."})
    validation_target_file: list[str] | None = field(default=None, metadata={"help": "Its translations."})
    test_source_file: list[str] | None = field(
        default=None, metadata={"help": "The same, to measure BLEU on; the validation text by default."}
    )
    test_target_file: list[str] | None = field(default=None, metadata={"help": "Its translations."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub, instead of source_file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    dataset_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str = field(default="validation", metadata={"help": "Its split to evaluate on."})
    test_split: str | None = field(default=None, metadata={"help": "Its split to measure BLEU on."})
    source_column: str | None = field(
        default=None,
        metadata={"help": "Column to translate from in tables and data sets: name or position; source or src."},
    )
    target_column: str | None = field(default=None, metadata={"help": "Column of the translations; target or tgt."})
    languages: list[str] | None = field(
        default=None, metadata={"help": "Codes of both languages, source first, for BLEU and the model cards."}
    )
    max_length: int = field(default=64, metadata={"help": "Pairs with more tokens on a side are not trained on."})
    max_eval_examples: int | None = field(
        default=None, metadata={"help": "At most so many pairs of the validation text and of the test text."}
    )

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
class TranslationArguments(TextArguments):
    """Transformer and text of a run; how to train is in [`TranslationTrainingArguments`]."""

    preset: str = field(default="numerals", metadata={"help": f"Sizes and training settings: {', '.join(SIZES)}."})
    guidance: str | None = field(
        default=None,
        metadata={
            "help": 'Guide heads while they learn, as JSON: {"fraction": 0.5} in the encoder, {} for defaults, or '
            '{"encoder": …, "decoder": …, "cross": …}.'
        },
    )

    encoder_layers: int = field(default=2, metadata={"help": "Layers of the encoder."})
    decoder_layers: int = field(default=2, metadata={"help": "Layers of the decoder."})
    hidden_size: int = field(default=128, metadata={"help": "Width; the feed-forward layers are 4 times as wide."})
    num_attention_heads: int = field(default=4, metadata={"help": "Heads of a layer, at each site."})
    dropout: float = field(default=0.1, metadata={"help": "Dropout of hidden states."})
    attention_dropout: float = field(default=0.0, metadata={"help": "Dropout of attention weights."})

    least: ClassVar[dict[str, int]] = {
        **TextArguments.least,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "num_attention_heads": 1,
    }

    def __post_init__(self):
        super().__post_init__()
        if self.hidden_size < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is no multiple of {self.num_attention_heads} heads.")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}.")
