# Licensed under the Apache License, Version 2.0.
"""Flags of `analyze_heads`."""

from dataclasses import dataclass, field

from .reading import ReadingArguments


@dataclass
class AnalyzeArguments(ReadingArguments):
    """Model, sentences, and how much of the slower measures."""

    output_dir: str = field(default="runs/analyze_heads", metadata={"help": "Where to write."})
    relations: list[str] | None = field(
        default=None, metadata={"help": "Dependencies that are looked at; nsubj, obj, amod, advmod, det and case."}
    )
    pruned: list[str] | None = field(
        default=None, metadata={"help": "Checkpoints of the same model without some heads: which functions are left."}
    )
    frequent: int = field(default=500, metadata={"help": "Tokens that are called frequent, for rare words."})
    importance_sentences: int = field(default=256, metadata={"help": "Sentences for importance; 0: not measured."})
    relevance_sentences: int = field(default=32, metadata={"help": "Sentences for relevance; 0: not measured."})

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "frequent")
        self.check_at_least(0, "importance_sentences", "relevance_sentences")


ARGUMENTS, HAS_TRAINER, PRESETS = AnalyzeArguments, False, None
