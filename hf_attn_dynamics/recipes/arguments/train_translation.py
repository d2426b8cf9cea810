# Licensed under the Apache License, Version 2.0.
"""Flags of `train_translation`."""

from dataclasses import dataclass
from typing import ClassVar

from ...models.head_settings import VARIANTS
from ...models.head_sites import SITE_KINDS
from .base import check_names, flag, hidden_flag
from .translation import SIZES, TranslationArguments


# Defaults of flags, by name; the first is used without --preset.
PRESETS = {
    "numerals": {**SIZES["numerals"], "max_steps": 1800, "gate_steps": 500, "finetune_steps": 300},
    "small": {**SIZES["small"], "max_steps": 3000, "gate_steps": 1000, "finetune_steps": 500},
    "base": {**SIZES["base"], "max_steps": 200_000, "gate_steps": 50_000, "finetune_steps": 10_000},
}


@dataclass
class PruningArguments(TranslationArguments):
    """Flags of `train_translation`; [`PruningTrainingArguments`] has those of training."""

    model: str | None = hidden_flag()
    gate_sites: list[str] = flag(list(SITE_KINDS), f"Attention whose heads are gated: {', '.join(SITE_KINDS)}.")
    keep: list[int] | None = flag(
        None,
        "Numbers of heads to keep at these sites, each from the dense model; by default half and a quarter, unless "
        "--gate_penalty is given.",
    )
    gate_variant: str = flag("paper", f"Variant of the gates: {' or '.join(VARIANTS)}.")
    gate_steps: int = flag(400, "Steps of training with gates.")
    finetune_steps: int = flag(200, "Steps of training after pruning.")
    from_scratch: bool = flag(False, "Also train models with the same heads from random weights.")
    early_stopping_patience: int | None = flag(
        None,
        "Train each model but those with gates until so many evaluations, every eval_steps (save_steps by default), "
        "have not lowered the validation loss, and take its best weights; the numbers of steps are the most.",
    )

    relevance_examples: int = flag(
        0, "Validation pairs to compute the relevance (LRP) of the heads of the dense model on; 0 skips it."
    )

    least: ClassVar[dict[str, int]] = {
        **TranslationArguments.least,
        "relevance_examples": 0,
        "gate_steps": 1,
        "finetune_steps": 0,
        "early_stopping_patience": 1,
    }

    def __post_init__(self):
        super().__post_init__()
        if self.model not in (None, "transformer"):
            raise ValueError(
                f"model={self.model!r} is not trained here; hf-attn train_lstm_translation trains an LSTM."
            )
        check_names("gate_sites", self.gate_sites, SITE_KINDS)
        if self.gate_variant not in VARIANTS:
            raise ValueError(f"gate_variant must be {' or '.join(VARIANTS)}, got {self.gate_variant!r}.")
        if self.keep is not None:
            check_names("keep", self.keep)
        for keep in self.keep or []:
            if keep < 1:
                raise ValueError(f"keep must be at least 1, got {keep}.")


ARGUMENTS, HAS_TRAINER = PruningArguments, True
