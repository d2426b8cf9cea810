# Licensed under the Apache License, Version 2.0.
"""Flags of `attribute_heads`."""

from dataclasses import dataclass, field

from .reading import ReadingArguments


WIDE = 64  # size of embeddings above which contributions are estimated, unless told otherwise


@dataclass
class AttributeArguments(ReadingArguments):
    """Model, sentences, and how contributions are computed."""

    output_dir: str = field(default="runs/attribute_heads", metadata={"help": "Where to write."})
    max_sentences: int | None = field(default=200, metadata={"help": "Sentences that are read, from the first."})
    batch_size: int = field(default=16, metadata={"help": "Texts of a batch."})
    pairs: bool = field(default=True, metadata={"help": "Two sentences in turn are read as a pair; else one by one."})
    text_pair_column: str | None = field(
        default=None, metadata={"help": "Of tables: column of the second sentence of each pair; name or position."}
    )
    min_length: int = field(default=6, metadata={"help": "Tokens of the shortest text that is read."})
    max_length: int = field(default=64, metadata={"help": "Tokens of the longest text that is read."})
    method: str = field(
        default="auto",
        metadata={"help": f"Of global contributions: exact, probes, or auto: exact up to embeddings of {WIDE}."},
    )
    probes: int = field(default=32, metadata={"help": "Directions for each token; only for probes."})
    chunk_size: int = field(default=768, metadata={"help": "Tangents at a time; memory falls with it."})
    save_every: int = field(default=1, metadata={"help": "Batches of each process after which sums are saved."})

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "min_length", "chunk_size", "save_every")
        self.check_at_least(2, "probes", "max_length")
        if self.min_length > self.max_length:
            raise ValueError(f"min_length is {self.min_length}, but max_length {self.max_length}; lower it.")
        if self.method not in ("auto", "exact", "probes"):
            raise ValueError(f"method must be auto, exact or probes, got {self.method!r}.")
        if self.text_pair_column is not None and not (self.data and self.pairs):
            missing = "data is not given" if self.pairs else "pairs is false"
            raise ValueError(f"text_pair_column={self.text_pair_column!r} is of pairs in tables, but {missing}.")


ARGUMENTS, HAS_TRAINER, PRESETS = AttributeArguments, False, None
