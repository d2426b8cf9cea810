# Licensed under the Apache License, Version 2.0.
"""Flags of `sweep`."""

from dataclasses import dataclass, field
from typing import ClassVar

from .base import flag


@dataclass(kw_only=True)
class SweepArguments:
    """The sweep, and how many of its runs are made at a time."""

    positional: ClassVar[str] = "sweep"

    sweep: str = field(metadata={"help": "YAML file of the sweep; the flag itself may be left out."})
    output_dir: str = field(metadata={"help": "Output folder; it must not hold another sweep."})
    jobs: int = flag(1, "Number of runs at a time.")
    resume: bool = flag(False, "Continue the sweep in output_dir.")
    tables_only: bool = flag(False, "Start no runs; write the tables of the finished ones.")

    def __post_init__(self):
        if self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}.")


ARGUMENTS, HAS_TRAINER, PRESETS = SweepArguments, False, None
