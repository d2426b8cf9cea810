# Licensed under the Apache License, Version 2.0.
"""Flags of `merge_curves`."""

from dataclasses import dataclass, field
from typing import ClassVar

from .base import check_names, flag


@dataclass(kw_only=True)
class MergeArguments:
    """The runs, and where to write."""

    positional: ClassVar[str] = "runs"

    runs: list[str] = field(metadata={"help": "Folders of finished runs; the flag itself may be left out."})
    output_dir: str = field(metadata={"help": "Output folder; files of the same names are replaced."})
    title: str = flag("", "Title of the picture; by default, the text and the number of seeds.")

    def __post_init__(self):
        check_names("runs", self.runs)


ARGUMENTS, HAS_TRAINER, PRESETS = MergeArguments, False, None
