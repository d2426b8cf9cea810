# Licensed under the Apache License, Version 2.0.
"""Flags of `redraw`."""

from dataclasses import dataclass, field
from typing import ClassVar

from .base import check_names


@dataclass(kw_only=True)
class RedrawArguments:
    """What to draw again."""

    positional: ClassVar[str] = "paths"

    paths: list[str] = field(
        metadata={"help": "Files NAME.plot.json, or folders that hold some; the flag itself may be left out."}
    )

    def __post_init__(self):
        check_names("paths", self.paths)


ARGUMENTS, HAS_TRAINER, PRESETS = RedrawArguments, False, None
