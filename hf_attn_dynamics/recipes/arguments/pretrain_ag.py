# Licensed under the Apache License, Version 2.0.
"""Flags of `pretrain_ag`."""

from dataclasses import dataclass, field

from .base import PublishArguments


OBJECTIVES = ("mlm", "clm", "rtd", "mlm+nsp")
GENERATORS = ("unigram", "trained")

PAPER = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "vocab_size": 52000,
    "block_size": 512,
    "learning_rate": 1e-4,
    "per_device_train_batch_size": 16,
    "max_steps": 100_000,
    "eval_steps": 2000,
    "logging_steps": 100,
    "save_steps": 2000,
    "compare": False,
}
# Defaults of flags, by name; the first is used without --preset.
PRESETS = {
    "tiny": {
        "num_hidden_layers": 8,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 4000,
        "block_size": 64,
        "attention_dropout": 0.0,
        "learning_rate": 1e-3,
        "adam_beta2": 0.98,
        "guidance_weight": 0.1,
        "per_device_train_batch_size": 16,
        "max_steps": 800,
        "eval_steps": 50,
        "logging_steps": 10,
        "save_steps": 300,
        "compare": True,
    },
    "roberta-8": {**PAPER, "num_hidden_layers": 8},
    "roberta-12": {**PAPER, "num_hidden_layers": 12},
    "roberta-16": {**PAPER, "num_hidden_layers": 16, "num_attention_heads": 16},
    "electra-12": {**PAPER, "objective": "rtd", "num_hidden_layers": 12},
    "bert-8": {**PAPER, "objective": "mlm+nsp", "num_hidden_layers": 8},
}


@dataclass
class PretrainArguments(PublishArguments):
    """Model, text and guidance of the run; how to train is in [`PretrainTrainingArguments`]."""

    preset: str = field(default="tiny", metadata={"help": f"Sizes and training settings: {', '.join(PRESETS)}."})
    objective: str = field(default="mlm", metadata={"help": f"What is to be learnt: {', '.join(OBJECTIVES)}."})
    architecture: str | None = field(
        default=None,
        metadata={"help": "With mlm and clm, model_type of what learns; by default roberta, with clm llama."},
    )
    generator: str | None = field(
        default=None,
        metadata={"help": f"With rtd, what replaces tokens: {' or '.join(GENERATORS)}; unigram by default."},
    )
    compare: bool = field(default=False, metadata={"help": "Also train the unguided twin, for comparison."})
    max_minutes: float | None = field(
        default=None, metadata={"help": "Take as many steps as fit into this time, at most max_steps."}
    )

    head_dynamics: int | None = field(
        default=None, metadata={"help": "Measure all heads every so many steps, and draw how they change; 0: never."}
    )

    num_hidden_layers: int = field(default=8, metadata={"help": "Layers."})
    hidden_size: int = field(default=128, metadata={"help": "Width; the feed-forward layers are 4 times as wide."})
    num_attention_heads: int = field(default=4, metadata={"help": "Heads of a layer."})
    num_key_value_heads: int | None = field(
        default=None,
        metadata={"help": "Groups of heads that share keys and values, where the architecture has any; none share."},
    )
    vocab_size: int = field(default=4000, metadata={"help": "Size of the tokenizer that is trained."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Take this tokenizer instead of training one (folder, or name on the Hub)."}
    )
    dropout: float = field(default=0.1, metadata={"help": "Dropout of hidden states."})
    attention_dropout: float = field(default=0.1, metadata={"help": "Dropout of attention weights."})

    train_file: list[str] | None = field(
        default=None,
        metadata={"help": "Files, folders or patterns of text to train on (txt, jsonl, csv, tsv, parquet)."},
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same, to evaluate on."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub, instead of train_file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    dataset_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str | None = field(default=None, metadata={"help": "Its split to evaluate on."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    streaming: bool = field(
        default=False, metadata={"help": "Read while training, instead of preparing all text first."}
    )
    block_size: int = field(default=64, metadata={"help": "Tokens of an example."})
    packing: bool = field(
        default=True, metadata={"help": "Fill every example with running text; else one text an example, padded."}
    )
    validation_examples: int = field(default=256, metadata={"help": "At most so many examples to evaluate on."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to mask, or to replace."})

    guidance_fraction: float = field(default=0.5, metadata={"help": "Share λ of the heads of a layer to guide."})
    guidance_patterns: list[str] | None = field(
        default=None, metadata={"help": "Patterns of head 0, head 1, …; the last one for all that are left."}
    )
    guidance_heads: str | None = field(
        default=None, metadata={"help": 'Explicit assignment instead, as JSON: {"next": [0], "first": [1, 2]}.'}
    )
    guidance_reduction: str = field(default="row_mean", metadata={"help": "row_mean, paper or code."})

    def __post_init__(self):
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be {', '.join(OBJECTIVES)}, got {self.objective!r}.")
        if self.generator is not None and self.objective != "rtd":
            raise ValueError(f"generator={self.generator!r} is for objective rtd, but that is {self.objective}.")
        if self.generator not in (None, *GENERATORS):
            raise ValueError(f"generator must be {' or '.join(GENERATORS)}, got {self.generator!r}.")
        self.check_at_least(1, "num_key_value_heads")
        if self.head_dynamics is not None and self.head_dynamics < 0:
            raise ValueError(f"head_dynamics must be a number of steps, or 0 for never, got {self.head_dynamics}.")


ARGUMENTS, HAS_TRAINER = PretrainArguments, True
