# Licensed under the Apache License, Version 2.0.
"""Flags of recipes that read heads."""

from dataclasses import dataclass, field

from .base import RunArguments


@dataclass
class ReadingArguments(RunArguments):
    """Which model, which sentences, and where to write."""

    output_dir: str = field(default="runs/heads", metadata={"help": "Where to write."})
    model: str | None = field(
        default=None,
        metadata={"help": "Checkpoint; without, that of runs/pretrain_ag, or else a small one is trained first."},
    )
    data: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files, folders or patterns, .conllu or text (of a folder with both, the .conllu); without, "
            "embedded sentences."
        },
    )
    text_column: str = field(default="text", metadata={"help": "Column of the sentences in tables."})
    max_sentences: int | None = field(default=2000, metadata={"help": "Sentences that are read, from the first."})
    batch_size: int = field(default=32, metadata={"help": "Sentences of a batch."})
    seed: int = field(default=42, metadata={"help": "Random seed, also of the model that is trained first."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bars."})

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size", "max_sentences")

    @property
    def model_name(self) -> str:
        """What to call the model."""
        return self.model or "the demonstration"
