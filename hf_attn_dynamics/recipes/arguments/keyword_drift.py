# Licensed under the Apache License, Version 2.0.
"""Flags of `keyword_drift`."""

from dataclasses import dataclass
from typing import Any

from ...data.demo.copying import KeywordTask
from .base import LoopArguments, PublishArguments, flag, with_default


# Defaults of flags, by name; the first is used without --preset.
PRESETS: dict[str, dict[str, Any]] = {
    "demo": {"hidden_size": 64, "embedding_size": 64, "max_steps": 1500},
    "paper": {"hidden_size": 256, "embedding_size": 300, "max_steps": 4000},
}


@dataclass
class DriftArguments(PublishArguments, LoopArguments):
    """Flags of `keyword_drift`: task, model and training."""

    preset: str = flag("demo", f"Sizes and training settings: {', '.join(PRESETS)}.")
    output_dir: str = with_default("runs/keyword_drift", LoopArguments, "output_dir")
    words: int = flag(40, "Number of words in the vocabulary, including the keyword.")
    length: int = flag(40, "Words per sentence.")
    embedding_size: int = flag(64, "Size of the embeddings.")
    hidden_size: int = flag(64, "Size of the LSTM states, per direction.")
    bidirectional: bool = flag(False, "Use a bidirectional LSTM.")
    batch_size: int = flag(32, "New sentences per step.")
    learning_rate: float = flag(1e-3, "Learning rate of Adam.")
    max_steps: int = flag(1500, "Number of updates.", earlier="steps")
    measurements: int = flag(100, "Number of evenly spaced measurements of γ, and as many early ones.")
    positive: int = flag(256, "Number of positive sentences to measure γ on.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "embedding_size", "hidden_size", "batch_size", "max_steps", "measurements", "positive")
        self.check_positive("learning_rate")
        if self.length < 3:
            raise ValueError(f"length must be at least 3, for a keyword, a next and a last word; got {self.length}.")
        self.task()

    def task(self) -> KeywordTask:
        return KeywordTask(self.words, self.length)


ARGUMENTS, HAS_TRAINER = DriftArguments, False
