# Licensed under the Apache License, Version 2.0.
"""Flags of `probe_coreference`."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...data.coreference import POSITIONS, READERS
from .base import RunArguments, check_names


TINY, EMBEDDED = "tiny", "embedded"


@dataclass
class ProbeArguments(RunArguments):
    """Models, data, and what competes for the attention of a head."""

    output_dir: str = field(
        default="runs/probe_coreference", metadata={"help": "Where to write; may not hold another run."}
    )
    models: list[str] | None = field(
        default=None, metadata={"help": "NAME=CHECKPOINT (folder, or name on the Hub); without, a tiny random BERT."}
    )
    data: list[str] | None = field(
        default=None, metadata={"help": f"KIND:PATH, kinds are {', '.join(READERS)}; without, embedded sentences."}
    )
    random_seeds: list[int] | None = field(
        default=None, metadata={"help": "Beside each model, one with random weights for each of these seeds."}
    )
    special_tokens: bool | None = field(
        default=None, metadata={"help": "Whether special tokens compete; by default not for conll2012."}
    )
    mentions_only: bool | None = field(
        default=None, metadata={"help": "Whether only heads of mentions compete; by default for conll2012."}
    )
    distractor: str = field(
        default="before", metadata={"help": "Clause about others in open_sesame: before, after or none."}
    )
    max_items: int | None = field(default=None, metadata={"help": "Items drawn from each data set; all by default."})
    batch_size: int = field(default=32, metadata={"help": "Texts of a batch."})
    seed: int = field(default=42, metadata={"help": "Of clauses and items that are drawn, and of the tiny model."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bars."})

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size", "max_items")
        if self.distractor not in (*POSITIONS, "none"):
            raise ValueError(f"distractor must be {', '.join(POSITIONS)} or none, got {self.distractor!r}.")
        if self.distractor == "after" and not any(one.startswith("open_sesame:") for one in self.data or ()):
            raise ValueError("distractor=after is of open_sesame, which data does not name; leave it out.")
        if self.random_seeds is not None:
            check_names("random_seeds", self.random_seeds)
        # What they refuse is refused before anything is imported for it.
        self.named_models()
        self.named_data()

    def named_models(self) -> dict[str, str | None]:
        """Checkpoints by name; `None` for the tiny model."""
        if not self.models:
            return {TINY: None}
        pairs = [_pair("models", one, "=", "NAME=CHECKPOINT") for one in self.models]
        for name, _ in pairs:
            # Names are folders of the run, and the models with random weights have names of their own.
            if not re.fullmatch(r"[\w.-]+", name) or re.search(r"-random\d+$", name):
                raise ValueError(
                    f"models names {name!r}; use letters, digits, '_', '-' and '.', and no '-random0' at the end."
                )
        return _without_repeats("models", pairs)

    def named_data(self) -> dict[str, tuple[str, str | None]]:
        """Kind and path of each data set by its name: the kind, and the file where a kind comes twice."""
        if not self.data:
            return {EMBEDDED: (EMBEDDED, None)}
        pairs = [_pair("data", one, ":", "KIND:PATH") for one in self.data]
        kinds = [kind for kind, _ in pairs]
        for kind in kinds:
            if kind not in READERS:
                raise ValueError(f"data {kind!r} is not one of {', '.join(READERS)}.")
        names = [kind if kinds.count(kind) == 1 else f"{kind}-{Path(path).name}" for kind, path in pairs]
        return _without_repeats("data", list(zip(names, pairs)))

    def competing(self, kind: str) -> dict[str, bool]:
        """What competes in data of this kind."""
        as_clark = kind == "conll2012"
        return {
            "special_tokens": not as_clark if self.special_tokens is None else self.special_tokens,
            "mentions_only": as_clark if self.mentions_only is None else self.mentions_only,
        }


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
