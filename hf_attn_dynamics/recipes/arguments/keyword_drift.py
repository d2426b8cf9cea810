# Licensed under the Apache License, Version 2.0.
"""Flags of `keyword_drift`."""

from dataclasses import dataclass, field
from typing import Any

from ...data.demo.copying import KeywordTask
from .base import PublishArguments


# Defaults of flags, by name; the first is used without --preset.
PRESETS: dict[str, dict[str, Any]] = {
    "demo": {"hidden_size": 64, "embedding_size": 64, "steps": 1500},
    "paper": {"hidden_size": 256, "embedding_size": 300, "steps": 4000},
}


@dataclass
class DriftArguments(PublishArguments):
    """Which task, which model, how long."""

    preset: str = field(default="demo", metadata={"help": f"Sizes and training settings: {', '.join(PRESETS)}."})
    output_dir: str = field(
        default="runs/keyword_drift", metadata={"help": "Where to write; may not hold another run."}
    )
    words: int = field(default=40, metadata={"help": "Number of words, the keyword included."})
    length: int = field(default=40, metadata={"help": "Words of a sentence."})
    embedding_size: int = field(default=64, metadata={"help": "Size of embeddings."})
    hidden_size: int = field(default=64, metadata={"help": "Size of the states of each direction."})
    bidirectional: bool = field(default=False, metadata={"help": "Whether the LSTM reads both ways."})
    batch_size: int = field(default=32, metadata={"help": "New sentences of a step."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Of Adam."})
    steps: int = field(default=1500, metadata={"help": "Updates."})
    measurements: int = field(default=100, metadata={"help": "How often γ is measured: evenly, and as often early."})
    positive: int = field(default=256, metadata={"help": "Positive sentences to measure it on."})
    seed: int = field(default=0, metadata={"help": "Of weights and sentences."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bars."})

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "embedding_size", "hidden_size", "batch_size", "steps", "measurements", "positive")
        self.check_at_least(0, "seed")
        self.check_positive("learning_rate")
        if self.length < 3:
            raise ValueError(f"length must be at least 3, for a keyword, a next and a last word; got {self.length}.")
        self.task()

    def task(self) -> KeywordTask:
        return KeywordTask(self.words, self.length)


ARGUMENTS, HAS_TRAINER = DriftArguments, False
