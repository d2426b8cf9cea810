# Licensed under the Apache License, Version 2.0.
"""Flags of `prune_heads`."""

from dataclasses import dataclass, field

from ...models.head_settings import VARIANTS
from .base import PublishArguments, check_names
from .classifying import check_sources


TASKS = ("text-classification", "causal-lm", "masked-lm", "image")
METHODS = ("gates", "michel", "random")


@dataclass
class PruneArguments(PublishArguments):
    """Model, examples and heads of the run; how to train is in [`PruneTrainingArguments`]."""

    task: str = field(default="text-classification", metadata={"help": f"What is learnt: {', '.join(TASKS)}."})
    keep: list[int] = field(
        default_factory=lambda: [8, 2], metadata={"help": "Numbers of heads to keep, each from the dense model."}
    )
    importance: list[str] = field(
        default_factory=lambda: list(METHODS), metadata={"help": f"Ways to choose heads: {', '.join(METHODS)}."}
    )
    from_scratch: bool = field(
        default=False, metadata={"help": "Also train the same heads from random weights, for comparison."}
    )
    gate_epochs: float = field(default=1.0, metadata={"help": "Epochs for which gates are trained."})
    finetune_epochs: float = field(default=1.0, metadata={"help": "Epochs after heads are removed."})
    importance_examples: int = field(default=1024, metadata={"help": "Training examples that michel looks at."})
    gate_variant: str = field(default="paper", metadata={"help": "Gates: paper or paper_code."})
    latency_batch: int = field(default=8, metadata={"help": "Sentences, or images, of the batch that is timed."})
    latency_length: int | None = field(
        default=None, metadata={"help": "Its tokens a sentence; max_length by default."}
    )

    model_name: str | None = field(
        default=None,
        metadata={"help": "Fine-tune this checkpoint (folder, or name on the Hub); without, train a small model."},
    )
    num_hidden_layers: int = field(default=4, metadata={"help": "Layers of the small model."})
    hidden_size: int = field(default=128, metadata={"help": "Its width; the feed-forward layers are 4 times as wide."})
    num_attention_heads: int = field(default=8, metadata={"help": "Its heads in each layer."})
    architecture: str | None = field(
        default=None,
        metadata={
            "help": "Its model_type; by default llama with causal-lm, roberta with masked-lm, vit with image. Texts "
            "are classified by a BERT."
        },
    )
    num_key_value_heads: int | None = field(
        default=None,
        metadata={"help": "Of language models, groups of heads that share keys and values; none share by default."},
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "With masked-lm, fraction of the tokens to mask."})
    vocab_size: int = field(default=4000, metadata={"help": "Size of its tokenizer."})
    dropout: float = field(default=0.1, metadata={"help": "Its dropout of hidden states."})
    attention_dropout: float = field(default=0.0, metadata={"help": "Its dropout of attention weights."})

    train_file: list[str] | None = field(
        default=None, metadata={"help": "Files, folders or patterns with texts and labels (tsv, csv, jsonl, parquet)."}
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same, to evaluate on."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub, instead of train_file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    dataset_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str = field(default="validation", metadata={"help": "Its split to evaluate on."})
    text_column: list[str] | None = field(
        default=None, metadata={"help": "Column of the texts, or two of a pair: name or position; found if not named."}
    )
    label_column: str | None = field(
        default=None, metadata={"help": "Column of the labels: name or position; found if not named."}
    )
    max_length: int = field(default=64, metadata={"help": "Tokens after which texts are cut; of a block."})

    def __post_init__(self):
        super().__post_init__()
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}.")
        if self.task != "image":  # which is refused all flags of texts, in words of its own
            check_sources(self)
        check_names("keep", self.keep)
        check_names("importance", self.importance, METHODS)
        for keep in self.keep:
            if keep < 1:
                raise ValueError(f"keep must be at least 1, got {keep}.")
        self.check_at_least(1, "importance_examples", "latency_batch", "latency_length", "num_key_value_heads")
        if self.gate_variant not in VARIANTS:
            raise ValueError(f"gate_variant must be {' or '.join(VARIANTS)}, got {self.gate_variant!r}.")
        if self.gate_epochs <= 0 or self.finetune_epochs < 0:
            raise ValueError(
                f"gate_epochs must be above 0 and finetune_epochs at least 0, got {self.gate_epochs} and "
                f"{self.finetune_epochs}."
            )


ARGUMENTS, HAS_TRAINER, PRESETS = PruneArguments, True, None
