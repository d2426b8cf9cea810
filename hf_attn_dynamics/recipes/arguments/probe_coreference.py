# Licensed under the Apache License, Version 2.0.
"""Flags of `probe_coreference`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.coreference import POSITIONS, READERS
from .base import LoopArguments, check_names, flag, with_default


TINY_MODEL, EMBEDDED_DATA = "tiny", "embedded"


@dataclass
class ProbeArguments(LoopArguments):
    """Flags of `probe_coreference`: models, data, and the tokens that compete for attention."""

    output_dir: str = with_default("runs/probe_coreference", LoopArguments, "output_dir")
    model: list[str] | None = flag(
        None,
        "Checkpoints (folder, or name on the Hub), each as CHECKPOINT or NAME=CHECKPOINT; by default a tiny BERT with "
        "random weights.",
        earlier="models",
    )
    data: list[str] | None = flag(
        None, f"KIND:PATH, where KIND is {', '.join(READERS)}; embedded sentences by default."
    )
    random_seeds: list[int] | None = flag(None, "Also probe each architecture with random weights, once per seed.")
    special_tokens: bool | None = flag(
        None, "Let special tokens compete for attention; true by default, except for conll2012."
    )
    mentions_only: bool | None = flag(
        None, "Let only the heads of mentions compete; false by default, except for conll2012."
    )
    distractor: str = flag("before", "Where open_sesame has a clause about others: before, after or none.")
    max_examples: int | None = flag(
        None, "Number of items to draw from each dataset; all by default.", earlier="max_items"
    )
    batch_size: int = flag(32, "Batch size.")
    seed: int = with_default(42, LoopArguments, "seed")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size", "max_examples")
        if self.distractor not in (*POSITIONS, "none"):
            raise ValueError(f"distractor must be {', '.join(POSITIONS)} or none, got {self.distractor!r}.")
        if self.distractor == "after" and not any(one.startswith("open_sesame:") for one in self.data or ()):
            raise ValueError("distractor=after needs --data open_sesame:PATH.")
        if self.random_seeds is not None:
            check_names("random_seeds", self.random_seeds)
        # What they refuse is refused before anything is imported for it.
        self.named_models()
        self.named_data()

    def named_models(self) -> dict[str, str | None]:
        """Checkpoints by name; `None` for the tiny model."""
        if not self.model:
            return {TINY_MODEL: None}
        pairs = [
            _pair("model", one, "=", "NAME=CHECKPOINT") if "=" in one else (Path(one).name, one) for one in self.model
        ]
        for name, _ in pairs:
            # Names are folders of the run, and the models with random weights have names of their own.
            if not re.fullmatch(r"[\w.-]+", name) or re.search(r"-random\d+$", name):
                raise ValueError(
                    f"model names {name!r}; use letters, digits, '_', '-' and '.', and no '-random0' at the end."
                )
        return _without_repeats("model", pairs)

    def named_data(self) -> dict[str, tuple[str, str | None]]:
        """Kind and path of each dataset by its name: the kind, and the file where a kind comes twice."""
        if not self.data:
            return {EMBEDDED_DATA: (EMBEDDED_DATA, None)}
        return sources_by_name("data", self.data)

    def competing(self, kind: str) -> dict[str, bool]:
        """What competes in data of this kind."""
        as_clark = kind == "conll2012"
        return {
            "special_tokens": not as_clark if self.special_tokens is None else self.special_tokens,
            "mentions_only": as_clark if self.mentions_only is None else self.mentions_only,
        }


def sources_by_name(argument: str, values: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Kind and path of each dataset by its name: the kind, and the file where a kind comes twice.

    Args:
        argument (`str`): Name of the flag, for messages.
        values (list of `str`): Its values, each KIND:PATH.
    """
    pairs = [_pair(argument, one, ":", "KIND:PATH") for one in values]
    kinds = [kind for kind, _ in pairs]
    for kind in kinds:
        if kind not in READERS:
            raise ValueError(f"{argument} {kind!r} is not one of {', '.join(READERS)}.")
    names = [kind if kinds.count(kind) == 1 else f"{kind}-{Path(path).name}" for kind, path in pairs]
    return _without_repeats(argument, list(zip(names, pairs)))


def _pair(name: str, value: str, mark: str, form: str) -> tuple[str, str]:
    key, found, rest = value.partition(mark)
    if not (key and found and rest):
        raise ValueError(f"{name} must be {form}, got {value!r}.")
    return key, rest


def _without_repeats(argument: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{argument} names {name!r} twice.")
    return dict(pairs)


ARGUMENTS, HAS_TRAINER, PRESETS = ProbeArguments, False, None
