# Licensed under the Apache License, Version 2.0.
"""Flags of `prune_heads`."""

from dataclasses import dataclass

from ...models.head_settings import VARIANTS
from .base import LabelledTextArguments, PublishArguments, SizeArguments, check_names, flag, with_default
from .classifying import check_sources


PRUNE_TASKS = ("text-classification", "causal-lm", "masked-lm", "image")
METHODS = ("gates", "michel", "random")
DEFAULT_LENGTH = 64


@dataclass
class PruneArguments(PublishArguments, SizeArguments, LabelledTextArguments):
    """Flags of `prune_heads`; [`PruneTrainingArguments`] has those of training."""

    task: str = flag("text-classification", f"Task to train on: {', '.join(PRUNE_TASKS)}.")
    keep: list[int] = flag([8, 2], "Numbers of heads to keep, each from the dense model.")
    importance: list[str] = flag(list(METHODS), f"Ways to choose the heads: {', '.join(METHODS)}.")
    from_scratch: bool = flag(False, "Also train models with the same heads from random weights.")
    gate_epochs: float = flag(1.0, "Epochs of training with gates.")
    finetune_epochs: float = flag(1.0, "Epochs of training after pruning.")
    importance_examples: int = flag(1024, "Training examples to compute the importance of michel on.")
    gate_variant: str = flag("paper", f"Variant of the gates: {' or '.join(VARIANTS)}.")
    latency_batch: int = flag(8, "Batch size of the timed forward passes.")
    latency_length: int | None = flag(None, "Tokens per text in the timed passes; max_length by default.")

    model: str | None = flag(
        None,
        "Checkpoint (folder, or name on the Hub) to fine-tune; by default, a small model is trained.",
        earlier="model_name",
    )
    num_hidden_layers: int = with_default(4, SizeArguments, "num_hidden_layers")
    architecture: str | None = flag(
        None,
        "Architecture (model_type) of the small model; by default bert for text-classification, llama for causal-lm, "
        "roberta for masked-lm, vit for image.",
    )
    num_key_value_heads: int | None = flag(
        None, "Number of key/value heads of a small language model; one per head by default."
    )
    dropout: float = flag(0.1, "Dropout of the hidden states of the small model.")
    attention_dropout: float = flag(0.0, "Dropout of the attention weights of the small model.")
    mlm_probability: float = flag(0.15, "Fraction of the tokens to mask for masked-lm.")
    encoding: str = flag("utf-8", "Encoding of the files.")
    max_length: int | None = flag(
        None,
        f"Maximum number of tokens per text, or tokens per block of a language model; {DEFAULT_LENGTH} by default, or "
        "as many as the checkpoint takes.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.task not in PRUNE_TASKS:
            raise ValueError(f"task must be one of {', '.join(PRUNE_TASKS)}, got {self.task!r}.")
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
