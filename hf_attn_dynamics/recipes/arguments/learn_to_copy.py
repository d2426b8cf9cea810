# Licensed under the Apache License, Version 2.0.
"""Flags of `learn_to_copy`."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...data.demo.copying import CopyingTask
from .base import LoopArguments, PublishArguments, check_names, flag, refuse_flags, with_default


EXPERIMENTS = ("permutation", "control", "mixture", "function", "heads")
OPTIMIZERS = ("adam", "sgd")
OF_WORDS = ("control", "function")  # experiments whose sentences are drawn from a larger vocabulary

# Defaults of flags, by name; the first is used without --preset.
PRESETS: dict[str, dict[str, Any]] = {
    "demo": {
        "length": 20,
        "drawn_from": 30,
        "hidden_size": 64,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "max_steps": 300,
        "num_seeds": 8,
        "candidates": 24,
    },
    "paper": {
        "length": 40,
        "drawn_from": 60,
        "hidden_size": 256,
        "batch_size": 128,
        "learning_rate": 1e-3,
        "max_steps": 300,
        "num_seeds": 20,
        "candidates": 40,
    },
}


@dataclass
class CopyingArguments(PublishArguments, LoopArguments):
    """Flags of `learn_to_copy`: experiments and sizes."""

    preset: str = flag("demo", f"Sizes and training settings: {', '.join(PRESETS)}.")
    output_dir: str = with_default("runs/learn_to_copy", LoopArguments, "output_dir")
    experiments: list[str] = flag(["permutation", "control", "mixture"], f"Experiments: {', '.join(EXPERIMENTS)}.")
    length: int = flag(20, "Words per sentence, and size of the vocabulary that permutations use.")
    drawn_from: int = flag(30, "Size of the vocabulary in the experiments control and function.")
    hidden_size: int = flag(64, "Size of embeddings, states and readout.")
    batch_size: int = flag(64, "New sentences per step.")
    optimizer: str = flag("adam", f"Optimizer: {' or '.join(OPTIMIZERS)} (with a momentum of 0.9).")
    learning_rate: float = flag(3e-3, "Learning rate of the optimizer.")
    embedding_std: float = flag(1.0, "Standard deviation of the initial embeddings.")
    attention_scale: float = flag(1.0, "Factor of the initial weights of attention.")
    share_embeddings: bool = flag(True, "Share the embeddings of encoder and decoder.")
    max_steps: int = flag(300, "Maximum number of updates per model.", earlier="steps")
    num_seeds: int = flag(8, "Number of models per setting, with consecutive seeds from --seed on.", earlier="runs")
    heads: int = flag(8, "Number of heads in the experiment heads.")
    candidates: int = flag(24, "Number of heads to train alone, among which good and bad ones are found.")
    stop_learnt: bool = flag(True, "Stop training a model once it copies.")
    stack_size: int | None = flag(
        None, "Maximum number of models to train as one stack; lower it to save memory. All by default."
    )

    def __post_init__(self):
        super().__post_init__()
        check_names("experiments", self.experiments, EXPERIMENTS)
        self.check_at_least(1, "length", "hidden_size", "batch_size", "max_steps", "num_seeds", "heads", "stack_size")
        self.check_positive("learning_rate", "embedding_std", "attention_scale")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be {' or '.join(OPTIMIZERS)}, got {self.optimizer!r}.")
        unread = {}
        if not set(OF_WORDS) & set(self.experiments):
            unread["drawn_from"] = f"only the experiments {' and '.join(OF_WORDS)} read it"
        elif self.drawn_from <= self.length:
            raise ValueError(f"drawn_from must be more than length, {self.length}, got {self.drawn_from}.")
        if "heads" not in self.experiments:
            unread |= dict.fromkeys(("heads", "candidates"), "only the experiment heads reads it")
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
