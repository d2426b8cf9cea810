# Licensed under the Apache License, Version 2.0.
"""Flags of `align_translation`."""

from dataclasses import dataclass
from typing import ClassVar

from .base import flag
from .translation import SIZES, TransformerArguments


# Name -> what a model card says of it.
MODELS = {
    "unguided": "No head was guided: the baseline of a comparison.",
    "guided": "One head of cross-attention was guided to word alignments of IBM Model 1 while it learnt.",
}
ROWS = ("output", "input")
UNITS = ("words", "tokens")

# Defaults of flags, by name; the first is used without --preset.
PRESETS = {
    "numerals": {
        **SIZES["numerals"],
        "guidance_weight": 0.5,
        "max_steps": 400,
        "eval_steps": 50,
        "logging_steps": 50,
        "save_steps": 200,
    },
    "small": {
        **SIZES["small"],
        "guidance_weight": 0.5,
        "max_steps": 3000,
        "eval_steps": 250,
        "logging_steps": 50,
        "save_steps": 500,
    },
}


@dataclass
class AlignmentArguments(TransformerArguments):
    """Flags of `align_translation`; [`AlignmentTrainingArguments`] has those of training."""

    preset: str = flag("numerals", f"Sizes and training settings: {', '.join(PRESETS)}.")
    reference_alignments: list[str] | None = flag(
        None,
        "Alignments of the validation text in the Pharaoh format: one file, whose links may be marked as possible; or "
        "two of both directions, whose intersection is sure and whose union is possible. By default, the alignments "
        "of IBM Model 1 in both directions.",
    )
    units: str | None = flag(
        None,
        f"What is aligned: {' or '.join(UNITS)}. Words are separated by spaces and aligned in lower case. By default, "
        "words; of the embedded text, whose German numbers are single words, tokens.",
    )
    alignment_method: str = flag(
        "intersection",
        "How the alignments of both directions are combined to the targets of the guided head: intersection, union, "
        "grow-diag, grow-diag-final or grow-diag-final-and.",
    )
    guided_layer: int = flag(0, "Layer of the decoder, from 0, whose cross-attention has the guided head.")
    guided_head: int = flag(0, "Head of this layer to guide, from 0.")
    guided_rows: str = flag(
        "input", "Row of a target token that is guided: output, which predicts it, or input, which reads it."
    )

    least: ClassVar[dict[str, int]] = {**TransformerArguments.least, "guided_layer": 0, "guided_head": 0}

    def __post_init__(self):
        super().__post_init__()
        for name, known in (("units", (*UNITS, None)), ("guided_rows", ROWS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {known[0]} or {known[1]}, got {getattr(self, name)!r}.")
        for name, limit in (("guided_layer", self.decoder_layers), ("guided_head", self.num_attention_heads)):
            if getattr(self, name) >= limit:
                raise ValueError(f"{name} must be below {limit}, got {getattr(self, name)}.")
        if self.reference_alignments is not None:
            if len(self.reference_alignments) not in (1, 2):
                raise ValueError(
                    "reference_alignments must be one file, or two of both directions, got "
                    f"{' '.join(self.reference_alignments) or 'none'}."
                )
            if self.aligned_units != "words":
                raise ValueError(
                    f"reference_alignments {' '.join(self.reference_alignments)} align words, but units is "
                    f"{self.aligned_units}; set --units words."
                )

    @property
    def aligned_units(self) -> str:
        """Words or tokens."""
        return self.units or ("words" if self.source_file or self.dataset_name else "tokens")


ARGUMENTS, HAS_TRAINER = AlignmentArguments, True
