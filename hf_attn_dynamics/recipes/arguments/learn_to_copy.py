# Licensed under the Apache License, Version 2.0.
"""Flags of `learn_to_copy`."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...data.demo.copying import CopyingTask
from .base import PublishArguments, check_names, refuse_flags


EXPERIMENTS = ("permutation", "control", "mixture", "function", "heads")
OF_WORDS = ("control", "function")  # experiments whose sentences are drawn from a larger vocabulary

# Defaults of flags, by name; the first is used without --preset.
PRESETS: dict[str, dict[str, Any]] = {
    "demo": {
        "length": 20,
        "drawn_from": 30,
        "hidden_size": 64,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "steps": 300,
        "runs": 8,
        "candidates": 24,
    },
    "paper": {
        "length": 40,
        "drawn_from": 60,
        "hidden_size": 256,
        "batch_size": 128,
        "learning_rate": 1e-3,
        "steps": 300,
        "runs": 20,
        "candidates": 40,
    },
}


@dataclass
class CopyingArguments(PublishArguments):
    """Which experiments, at which size."""

    preset: str = field(default="demo", metadata={"help": f"Sizes and training settings: {', '.join(PRESETS)}."})
    output_dir: str = field(
        default="runs/learn_to_copy", metadata={"help": "Where to write; may not hold another run."}
    )
    experiments: list[str] = field(
        default_factory=lambda: ["permutation", "control", "mixture"],
        metadata={"help": f"Some of {', '.join(EXPERIMENTS)}."},
    )
    length: int = field(default=20, metadata={"help": "Words of a sentence, and of the vocabulary it permutes."})
    drawn_from: int = field(default=30, metadata={"help": "Words of the vocabulary of control and function."})
    hidden_size: int = field(default=64, metadata={"help": "Of embeddings, states and readout."})
    batch_size: int = field(default=64, metadata={"help": "New sentences of a step."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Of Adam."})
    steps: int = field(default=300, metadata={"help": "Most updates of a run."})
    runs: int = field(default=8, metadata={"help": "Of each setting."})
    heads: int = field(default=8, metadata={"help": "Heads of the models of the experiment heads."})
    candidates: int = field(default=24, metadata={"help": "Heads to try alone, until which are good and bad."})
    stop_learnt: bool = field(default=True, metadata={"help": "Whether a run that has learnt to copy stops."})
    stack_size: int | None = field(
        default=None, metadata={"help": "Most runs to train as one stack; all by default. Memory grows with them."}
    )
    seed: int = field(default=0, metadata={"help": "Of weights and sentences; runs count from here."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bars."})

    def __post_init__(self):
        super().__post_init__()
        check_names("experiments", self.experiments, EXPERIMENTS)
        self.check_at_least(1, "length", "hidden_size", "batch_size", "steps", "runs", "heads", "stack_size")
        self.check_at_least(0, "seed")
        self.check_positive("learning_rate")
        unread = {}
        if not set(OF_WORDS) & set(self.experiments):
            unread["drawn_from"] = f"it is of the experiments {' and '.join(OF_WORDS)}"
        elif self.drawn_from <= self.length:
            raise ValueError(f"drawn_from must be more than length, {self.length}, got {self.drawn_from}.")
        if "heads" not in self.experiments:
            unread |= dict.fromkeys(("heads", "candidates"), "it is of the experiment heads")
        elif self.candidates <= self.heads:
            raise ValueError(f"candidates must be more than heads, {self.heads}, got {self.candidates}.")
        refuse_flags(self, unread, PRESETS.get(self.preset))

    def task(self, experiment: str) -> CopyingTask:
        if experiment == "function":
            order = np.random.default_rng(self.seed).permutation(self.length)
            return CopyingTask(self.drawn_from, self.length, order=tuple(order.tolist()))
        if experiment == "control":
            return CopyingTask(self.drawn_from, self.length)
        return CopyingTask(self.length, self.length, vocabularies=2 if experiment == "mixture" else 1)


ARGUMENTS, HAS_TRAINER = CopyingArguments, False
