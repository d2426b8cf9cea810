# Licensed under the Apache License, Version 2.0.
"""Flags of `train_lstm_translation`."""

from dataclasses import dataclass
from typing import Any, ClassVar

from .base import flag, hidden_flag
from .translation import TextArguments


# Defaults of flags, by name; the first is used without --preset.
PRESETS = {
    "numerals": {
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "vocab_size": 250,
        "dropout": 0.0,
        "max_length": 64,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 64,
        "num_beams": 1,
        "max_steps": 1200,
        "eval_steps": 100,
        "logging_steps": 50,
        "save_steps": 400,
    },
    "small": {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "vocab_size": 4000,
        "dropout": 0.3,
        "max_length": 32,
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 64,
        "num_beams": 1,
        "max_steps": 3000,
        "eval_steps": 250,
        "logging_steps": 50,
        "save_steps": 500,
    },
    "paper": {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "vocab_size": 8000,
        "dropout": 0.5,
        "max_length": 128,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 16,
        "num_beams": 4,
        "max_steps": 30_000,
        "eval_steps": 1000,
        "logging_steps": 250,
        "save_steps": 1000,
    },
}


@dataclass
class LstmArguments(TextArguments):
    """Flags of `train_lstm_translation`; [`LstmTrainingArguments`] has those of training."""

    model: str | None = hidden_flag()
    preset: str = flag("numerals", f"Sizes and training settings: {', '.join(PRESETS)}.")
    num_hidden_layers: int = flag(2, "Number of LSTM layers in the encoder, and in the decoder.")
    hidden_size: int = flag(256, "Size of embeddings, states and readout.")
    bidirectional: bool = flag(True, "Use a bidirectional encoder.")
    directions: str = flag(
        "added", "How the two directions are combined: added, or concatenated (half the size each)."
    )
    num_attention_heads: int = flag(1, "Number of attention heads, whose contexts are added.")
    attention: str = flag("learned", "Attention: learned, uniform, or frozen at its random weights.")
    readout: str = flag("mlp", "Readout: mlp, or additive (a linear layer over the sum of context and state).")
    dropout: float = flag(0.5, "Dropout between LSTM layers.")

    least: ClassVar[dict[str, int]] = {**TextArguments.least, "hidden_size": 1}

    def __post_init__(self):
        super().__post_init__()
        if self.model not in (None, "lstm"):
            raise ValueError(
                f"model={self.model!r} is not trained here; hf-attn train_translation trains a Transformer."
            )
        if self.dropout and self.num_hidden_layers == 1:
            raise ValueError(f"dropout={self.dropout} has no effect with num_hidden_layers=1; set it to 0.")

    def model_settings(self) -> dict[str, Any]:
        """Arguments of the configuration, apart from the tokens."""
        return {
            "vocab_size": self.vocab_size,
            "embedding_size": self.hidden_size,
            "hidden_size": self.hidden_size,
            "readout_size": self.hidden_size,
            **{
                name: getattr(self, name)
                for name in (
                    "num_hidden_layers", "bidirectional", "directions", "num_attention_heads", "attention", "readout",
                    "dropout",
                )
            },
        }  # fmt: skip


ARGUMENTS, HAS_TRAINER = LstmArguments, True
