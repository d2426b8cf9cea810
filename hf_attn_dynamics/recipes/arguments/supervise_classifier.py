# Licensed under the Apache License, Version 2.0.
"""Flags of `supervise_classifier`."""

from dataclasses import dataclass

from .base import flag, refuse_flags
from .classifying import ComparisonArguments


GUIDANCE_LOSSES = ("mass", "cross_entropy", "squared")


@dataclass
class RationaleArguments(ComparisonArguments):
    """Flags of `supervise_classifier`; [`RationaleTrainingArguments`] has those of training."""

    lexicon_file: list[str] | None = flag(
        None,
        "Files of phrases and classes (tsv, csv, jsonl, parquet), whose single words are the lexicon; by default, it "
        "is learnt from the training text.",
    )
    min_count: int = flag(5, "Number of training texts that a learnt word occurs in, at least.")
    min_fraction: float = flag(
        0.6,
        "Fraction of the training texts with a word that have its class, at least; 0 keeps all words of lexicon_file.",
    )
    layer: int | None = flag(None, "Layer with guided heads, from 0; the last one by default.")
    heads: list[int] = flag([0], "Guided heads of the layer, from 0.")
    guidance_loss: str = flag("mass", f"Loss of guided heads: {', '.join(GUIDANCE_LOSSES)}.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "min_count")
        self.check_at_least(0, "layer")
        if not 0 <= self.min_fraction <= 1:
            raise ValueError(f"min_fraction must be from 0 to 1, got {self.min_fraction}.")
        if not self.heads or len(set(self.heads)) < len(self.heads) or min(self.heads) < 0:
            raise ValueError(f"heads must be non-empty, unique and at least 0, got {self.heads}.")
        if self.guidance_loss not in GUIDANCE_LOSSES:
            raise ValueError(f"guidance_loss must be {', '.join(GUIDANCE_LOSSES)}, got {self.guidance_loss!r}.")
        if not self.train_file and not self.dataset_name:
            refuse_flags(self, {"lexicon_file": "it needs --train_file or --dataset_name"})


ARGUMENTS, HAS_TRAINER, PRESETS = RationaleArguments, True, None
