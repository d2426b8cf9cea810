# Licensed under the Apache License, Version 2.0.
"""Flags of `train_translation`."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ...models.head_settings import VARIANTS
from ...models.head_sites import SITE_KINDS
from .base import check_names
from .train_lstm_translation import LSTM, LstmArguments
from .translation import SIZES, TranslationArguments


TRANSFORMER = "transformer"  # its name beside that of the LSTM, for --model

# Defaults of flags, by name; the first is used without --preset.
PRESETS = {
    "numerals": {**SIZES["numerals"], "max_steps": 1800, "gate_steps": 500, "finetune_steps": 300},
    "small": {**SIZES["small"], "max_steps": 3000, "gate_steps": 1000, "finetune_steps": 500},
    "base": {**SIZES["base"], "max_steps": 200_000, "gate_steps": 50_000, "finetune_steps": 10_000},
}


@dataclass
class PruningArguments(TranslationArguments):
    """Model, text and heads of the run; how to train is in [`PruningTrainingArguments`]."""

    model: str = field(
        default=TRANSFORMER, metadata={"help": f"{TRANSFORMER}; or {LSTM}, which has flags of its own."}
    )
    gate_sites: list[str] = field(
        default_factory=lambda: list(SITE_KINDS),
        metadata={"help": f"Attention that may lose heads: {', '.join(SITE_KINDS)}."},
    )
    keep: list[int] | None = field(
        default=None,
        metadata={
            "help": "Numbers of heads to keep over these sites, each from the dense model; half and a quarter of them "
            "if gate_penalty is not given either."
        },
    )
    gate_variant: str = field(default="paper", metadata={"help": "Gates: paper or paper_code."})
    gate_steps: int = field(default=400, metadata={"help": "Steps for which gates are trained."})
    finetune_steps: int = field(default=200, metadata={"help": "Steps after heads are removed."})
    from_scratch: bool = field(
        default=False, metadata={"help": "Also train the same heads from random weights, for comparison."}
    )

    least: ClassVar[dict[str, int]] = {**TranslationArguments.least, "gate_steps": 1, "finetune_steps": 0}

    def __post_init__(self):
        super().__post_init__()
        if self.model != TRANSFORMER:
            raise ValueError(f"model must be {TRANSFORMER} or {LSTM}, got {self.model!r}.")
        check_names("gate_sites", self.gate_sites, SITE_KINDS)
        if self.gate_variant not in VARIANTS:
            raise ValueError(f"gate_variant must be {' or '.join(VARIANTS)}, got {self.gate_variant!r}.")
        if self.keep is not None:
            check_names("keep", self.keep)
        for keep in self.keep or []:
            if keep < 1:
                raise ValueError(f"keep must be at least 1, got {keep}.")


ARGUMENTS, HAS_TRAINER = PruningArguments, True


def other_recipe(given: dict[str, Any]) -> str | None:
    """The recipe of the LSTM, if the command line, as [`given_values`] reads it, asks for that model.

    Raises:
        ValueError: if a flag of a Transformer and its heads is given as well.
    """
    if given.get("model") != LSTM:
        return None
    # Training arguments are those of both; the recipe refuses by itself what is of heads among them.
    of_heads = {one.name for one in fields(PruningArguments)} - {one.name for one in fields(LstmArguments)}
    for name in sorted(of_heads & given.keys()):
        raise ValueError(f"{name}={given[name]} is of a Transformer and its heads; leave it out with model=lstm.")
    return "train_lstm_translation"
