# Licensed under the Apache License, Version 2.0.
"""Flags of `prune_heads`."""

from dataclasses import dataclass

from ...models.head_settings import PARTS, VARIANTS
from .base import (
    LabelledTextArguments,
    PublishArguments,
    SizeArguments,
    check_names,
    flag,
    refuse_flags,
    with_default,
)
from .classifying import check_sources


PRUNE_TASKS = ("text-classification", "causal-lm", "masked-lm", "image")
METHODS = ("gates", "michel", "random", "fisher", "margin")
CLASSIFIER_TASKS = ("text-classification", "image")
DEFAULT_LENGTH = 64


@dataclass
class PruneArguments(PublishArguments, SizeArguments, LabelledTextArguments):
    """Flags of `prune_heads`; [`PruneTrainingArguments`] has those of training."""

    task: str = flag("text-classification", f"Task to train on: {', '.join(PRUNE_TASKS)}.")
    keep: list[int] = flag([8, 2], "Numbers of heads to keep, each from the dense model.")
    parts: list[str] = flag(
        list(PARTS), f"What may be removed for a speed-up: {', '.join(PARTS)} (units of feed-forward blocks)."
    )
    importance: list[str] | None = flag(
        None,
        f"Ways to choose what is removed: {', '.join(METHODS)}; by default gates, michel and random for heads, gates, "
        "fisher and random for a speed-up.",
        earlier="method",
    )
    refit: bool = flag(
        True, "For a speed-up without gates, refit the output projections by least squares before training."
    )
    from_scratch: bool = flag(False, "Also train models with the same heads from random weights.")
    gate_epochs: float = flag(1.0, "Epochs of training with gates.")
    finetune_epochs: float = flag(
        1.0,
        "Epochs of training after pruning by gates; in other ways, a model is trained for the sum of both.",
    )
    importance_examples: int = flag(1024, "Examples to compute the importance of heads and units on, and to refit on.")
    importance_file: list[str] | None = flag(
        None,
        "Files like those of train_file to take these examples from, best as long as the texts that the model will "
        "get; train_file by default.",
    )
    gate_variant: str = flag("paper", f"Variant of the gates: {' or '.join(VARIANTS)}.")
    latency_shapes: list[str] | None = flag(
        None, "Further batch sizes and lengths to time the models of a speed-up on, such as 1x32."
    )

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
        for keep in self.keep:
            if keep < 1:
                raise ValueError(f"keep must be at least 1, got {keep}.")
        if self.importance is not None:
            check_names("importance", self.importance, METHODS)
        check_names("parts", self.parts, PARTS)
        self.more_shapes()
        if self.parts == ["blocks"]:
            raise ValueError("parts must name heads, units or both, beside blocks.")
        self.check_at_least(1, "importance_examples", "num_key_value_heads")
        if self.gate_variant not in VARIANTS:
            raise ValueError(f"gate_variant must be {' or '.join(VARIANTS)}, got {self.gate_variant!r}.")
        if self.gate_epochs < 0 or self.finetune_epochs < 0:
            raise ValueError(
                f"gate_epochs and finetune_epochs must be at least 0, got {self.gate_epochs} and "
                f"{self.finetune_epochs}."
            )

    def more_shapes(self) -> list[tuple[int, int]]:
        """Further batch sizes and lengths of timed passes.

        Raises:
            ValueError: if one is not two numbers.
        """
        shapes = []
        for shape in self.latency_shapes or ():
            batch, _, length = shape.partition("x")
            if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
                raise ValueError(f"latency_shapes must be batch sizes and lengths, such as 1x32, got {shape!r}.")
            shapes.append((int(batch), int(length)))
        return shapes

    def choose_methods(self, for_speedup: bool) -> None:
        """Sets `importance` unless the user does.

        Raises:
            ValueError: for flags that only the other kind of goal reads, and gates without training.
        """
        default = ["gates", "fisher", "random"] if for_speedup else ["gates", "michel", "random"]
        self.importance = self.importance or default
        if "gates" in self.importance and not self.gate_epochs:
            raise ValueError("gate_epochs must be above 0 to train gates; set another importance or more epochs.")
        if "margin" in self.importance and self.task not in CLASSIFIER_TASKS:
            raise ValueError(f"importance margin is for classifiers, not for task {self.task}; use fisher.")
        read_by = {"michel", "fisher", "margin"} | ({"random"} if for_speedup and self.refit else set())
        if self.importance_file and not read_by & set(self.importance):
            raise ValueError(
                f"importance_file={self.importance_file} has no effect with importance {' '.join(self.importance)}, "
                "which reads no texts."
            )
        if for_speedup:
            refuse_flags(self, {"keep": "target_speedup says what to reach"})
            return
        refuse_flags(
            self,
            {"parts": "set target_speedup", "refit": "set target_speedup", "latency_shapes": "set target_speedup"},
        )
        for method in ("fisher", "margin"):
            if method in self.importance:
                raise ValueError(f"importance {method} chooses heads and units for a speed-up; set target_speedup.")


ARGUMENTS, HAS_TRAINER, PRESETS = PruneArguments, True, None
