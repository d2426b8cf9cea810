# Licensed under the Apache License, Version 2.0.
"""Flags of `distil_heads`."""

from dataclasses import dataclass

from ..summaries.distil_heads import SYSTEMS
from .base import SizeArguments, check_names, flag, with_default
from .classifying import ComparisonArguments


TEACHER_LOSSES = ("kl", "squared")
RELATIONS = ("query", "key", "value", "query_key")


@dataclass
class DistilArguments(ComparisonArguments):
    """Flags of `distil_heads`; [`DistilTrainingArguments`] has those of training."""

    teacher_epochs: float = flag(
        3.0, "Epochs of fine-tuning the teacher; 0 for a --model that is a classifier of these classes already."
    )
    student_layers: list[int] | None = flag(
        None, "Layers of the teacher that the student starts from, from 0; by default every second one."
    )
    systems: list[str] = flag(list(SYSTEMS), f"What the students learn: {', '.join(SYSTEMS)}.")
    attention_loss: str = flag("kl", f"Loss of the attention: {' or '.join(TEACHER_LOSSES)}.")
    relations: list[str] = flag(["value", "query_key"], f"Relations of the last layer: {', '.join(RELATIONS)}.")
    relation_heads: int | None = flag(
        None, "Number of heads that vectors are split into for the relations; those of the teacher by default."
    )
    num_hidden_layers: int = with_default(4, SizeArguments, "num_hidden_layers")

    def __post_init__(self):
        super().__post_init__()
        check_names("systems", self.systems, SYSTEMS)
        check_names("relations", self.relations, RELATIONS)
        self.check_at_least(1, "relation_heads")
        if not self.teacher_epochs >= 0:
            raise ValueError(f"teacher_epochs must be at least 0, got {self.teacher_epochs}.")
        if not self.teacher_epochs and not self.model:
            raise ValueError("teacher_epochs=0 takes a trained classifier as the teacher; it needs --model.")
        if self.student_layers is not None:
            check_names("student_layers", self.student_layers)
            if min(self.student_layers) < 0:
                raise ValueError(f"student_layers must be at least 0, got {self.student_layers}.")
        if self.attention_loss not in TEACHER_LOSSES:
            raise ValueError(f"attention_loss must be {' or '.join(TEACHER_LOSSES)}, got {self.attention_loss!r}.")


ARGUMENTS, HAS_TRAINER, PRESETS = DistilArguments, True, None
