# Licensed under the Apache License, Version 2.0.
"""Flags of `train_lstm_translation`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .translation import TextArguments


LSTM = "lstm"  # its name, for --model

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
    """LSTM and text of the run; how to train is in [`LstmTrainingArguments`]."""

    model: str = field(default=LSTM, metadata={"help": "The model that this recipe trains."})
    preset: str = field(default="numerals", metadata={"help": f"Sizes and training settings: {', '.join(PRESETS)}."})
    num_hidden_layers: int = field(default=2, metadata={"help": "LSTM layers of the encoder, and of the decoder."})
    hidden_size: int = field(default=256, metadata={"help": "Size of embeddings, states and the read-out."})
    bidirectional: bool = field(default=True, metadata={"help": "Whether the encoder reads both ways."})
    directions: str = field(default="added", metadata={"help": "added; or concatenated, each of half the size."})
    num_attention_heads: int = field(default=1, metadata={"help": "Attention heads, whose contexts are added."})
    attention: str = field(default="learned", metadata={"help": "learned; or uniform, or frozen as it starts."})
    readout: str = field(default="mlp", metadata={"help": "mlp; or additive, a linear layer over context + state."})
    dropout: float = field(default=0.5, metadata={"help": "Dropout between LSTM layers."})

    least: ClassVar[dict[str, int]] = {**TextArguments.least, "hidden_size": 1}

    def __post_init__(self):
        super().__post_init__()
        if self.model != LSTM:
            raise ValueError(f"model must be {LSTM} here, got {self.model!r}; train_translation.py has others.")
        if self.dropout and self.num_hidden_layers == 1:
            raise ValueError(f"dropout={self.dropout} is between LSTM layers, of which there is one; set it to 0.")

    def model_settings(self) -> dict[str, Any]:
        """What the configuration is to say, apart from the tokens."""
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
