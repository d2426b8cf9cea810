# Licensed under the Apache License, Version 2.0.
"""Flags of `compare_translation`."""

from dataclasses import dataclass

from .base import check_names, flag
from .translation import SIZES, TranslationArguments


# Name -> what a model card says of it.
SYSTEMS = {
    "base": "No head was guided or fixed: the baseline of a comparison.",
    "guided": "Some heads were guided towards fixed patterns while it learnt.",
    "hard_coded": "Its self-attention is not learnt, but fixed to Gaussians beside each token (You et al. 2020).",
}

# Defaults of flags, by name; the first is used without --preset. With group_by_length, 50 batches go from the longest
# pairs to the shortest, and the next 50 again: a window of so many steps has pairs of all lengths.
PRESETS = {
    "numerals": {**SIZES["numerals"], "max_steps": 800, "eval_steps": 50, "logging_steps": 50, "save_steps": 200},
    "small": {**SIZES["small"], "max_steps": 3000, "eval_steps": 250, "logging_steps": 50, "save_steps": 500},
    "base": {**SIZES["base"], "max_steps": 100_000, "eval_steps": 2000, "logging_steps": 100, "save_steps": 2000},
}


@dataclass
class ComparisonArguments(TranslationArguments):
    """Flags of `compare_translation`; [`ComparisonTrainingArguments`] has those of training."""

    systems: list[str] = flag(list(SYSTEMS), f"Systems to train: {', '.join(SYSTEMS)}.")
    hard_coded: str | None = flag(
        None,
        'Gaussians of the system hard_coded as JSON: {"encoder": {"offsets": [-1, 1], "std": 1.0}, "decoder": …}; by '
        "default these, and offsets -1 and 0 in the decoder.",
    )

    def __post_init__(self):
        super().__post_init__()
        check_names("systems", self.systems, SYSTEMS)
        self.systems = [name for name in SYSTEMS if name in self.systems]
        for name, system in (("guidance", "guided"), ("hard_coded", "hard_coded")):
            if getattr(self, name) is not None and system not in self.systems:
                raise ValueError(
                    f"{name}={getattr(self, name)} needs the system {system}, but systems are "
                    f"{', '.join(self.systems)}; add it, or leave {name} out."
                )


ARGUMENTS, HAS_TRAINER = ComparisonArguments, True
