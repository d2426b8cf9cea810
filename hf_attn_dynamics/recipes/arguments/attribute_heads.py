# Licensed under the Apache License, Version 2.0.
"""Flags of `attribute_heads`."""

from dataclasses import dataclass

from .base import LoopArguments, flag, with_default
from .reading import ReadingArguments


WIDE = 64  # hidden size above which the method `auto` estimates contributions


@dataclass
class AttributeArguments(ReadingArguments):
    """Flags of `attribute_heads`: model, sentences, and how contributions are computed."""

    output_dir: str = with_default("runs/attribute_heads", LoopArguments, "output_dir")
    max_examples: int | None = with_default(200, ReadingArguments, "max_examples")
    batch_size: int = with_default(16, ReadingArguments, "batch_size")
    pairs: bool = flag(True, "Read two consecutive sentences as a pair, as in the paper; otherwise one at a time.")
    text_pair_column: str | None = flag(
        None, "Column of the second sentence of each pair in tables; name or position."
    )
    min_length: int = flag(6, "Shortest text to read, in tokens.")
    max_length: int = flag(64, "Longest text to read, in tokens.")
    method: str = flag(
        "auto",
        f"How to compute global contributions: exact, probes, or auto (exact up to a hidden size of {WIDE}, and for "
        "the spectral norm).",
    )
    norm: str = flag("frobenius", "Norm of the contributions: frobenius or spectral.")
    probes: int = flag(32, "Random directions per token for --method probes.")
    chunk_size: int = flag(768, "Tangents per chunk; lower it to save memory.")
    save_every: int = flag(1, "Save the sums after this many batches per process.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "min_length", "chunk_size", "save_every")
        self.check_at_least(2, "probes", "max_length")
        if self.min_length > self.max_length:
            raise ValueError(f"min_length is {self.min_length}, but max_length {self.max_length}; lower it.")
        if self.method not in ("auto", "exact", "probes"):
            raise ValueError(f"method must be auto, exact or probes, got {self.method!r}.")
        if self.norm not in ("frobenius", "spectral"):
            raise ValueError(f"norm must be frobenius or spectral, got {self.norm!r}.")
        if self.text_pair_column is not None and not (self.data and self.pairs):
            missing = "data is not given" if self.pairs else "pairs is false"
            raise ValueError(
                f"text_pair_column={self.text_pair_column!r} needs --data with tables and --pairs true, but {missing}."
            )


ARGUMENTS, HAS_TRAINER, PRESETS = AttributeArguments, False, None
