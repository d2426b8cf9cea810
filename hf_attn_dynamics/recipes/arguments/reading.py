# Licensed under the Apache License, Version 2.0.
"""Flags of recipes that read heads."""

from dataclasses import dataclass

from .base import LoopArguments, flag


@dataclass
class ReadingArguments(LoopArguments):
    """Model, sentences and batch size."""

    model: str | None = flag(
        None,
        "Checkpoint (folder, or name on the Hub); by default runs/pretrain_ag/model, or else a small model is trained "
        "first.",
    )
    data: list[str] | None = flag(
        None,
        "Files, folders or patterns: .conllu with trees, or text; folders with both are read as .conllu. Embedded "
        "sentences by default.",
    )
    text_column: str = flag("text", "Column of the sentences in tables; name or position.")
    max_examples: int | None = flag(2000, "Number of sentences to read.", earlier="max_sentences")
    batch_size: int = flag(32, "Batch size.")
    seed: int = flag(42, "Random seed.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size", "max_examples")

    @property
    def model_name(self) -> str:
        """Name of the model in the summary and the report."""
        return self.model or "the demonstration"
