# Licensed under the Apache License, Version 2.0.
"""Flags of `pretrain_ag`."""

from dataclasses import dataclass

from .base import PublishArguments, SizeArguments, TextDataArguments, flag, refuse_flags, with_default
from .classifying import check_sources


OBJECTIVES = ("mlm", "clm", "rtd", "mlm+nsp")
GENERATORS = ("unigram", "trained")

PAPER = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "vocab_size": 52000,
    "max_length": 512,
    "learning_rate": 1e-4,
    "per_device_train_batch_size": 16,
    "max_steps": 100_000,
    "eval_steps": 2000,
    "logging_steps": 100,
    "save_steps": 2000,
    "compare": False,
}
TINY = {
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 4000,
    "max_length": 64,
    "attention_dropout": 0.0,
    "learning_rate": 1e-3,
    "adam_beta2": 0.98,
    "guidance_weight": 0.1,
    "per_device_train_batch_size": 16,
    "max_steps": 800,
    "eval_steps": 50,
    "logging_steps": 10,
    "save_steps": 300,
    "compare": True,
}
# Defaults of flags, by name; the first is used without --preset.
PRESETS = {
    "demo": {**TINY, "max_minutes": 4.0, "min_steps": 400},
    "tiny": TINY,
    "roberta-8": {**PAPER, "num_hidden_layers": 8},
    "roberta-12": {**PAPER, "num_hidden_layers": 12},
    "roberta-16": {**PAPER, "num_hidden_layers": 16, "num_attention_heads": 16},
    "electra-12": {**PAPER, "objective": "rtd", "num_hidden_layers": 12},
    "bert-8": {**PAPER, "objective": "mlm+nsp", "num_hidden_layers": 8},
}


@dataclass
class PretrainArguments(PublishArguments, SizeArguments, TextDataArguments):
    """Flags of `pretrain_ag`; [`PretrainTrainingArguments`] has those of training."""

    preset: str = flag("demo", f"Sizes and training settings: {', '.join(PRESETS)}.")
    objective: str = flag("mlm", f"Pretraining objective: {', '.join(OBJECTIVES)}.")
    architecture: str | None = flag(
        None, "Architecture (model_type) for mlm and clm; by default roberta for mlm and llama for clm."
    )
    generator: str | None = flag(
        None, f"Generator of replaced tokens for rtd: {' or '.join(GENERATORS)}; unigram by default."
    )
    compare: bool = flag(False, "Also train the unguided twin.")
    max_minutes: float | None = flag(
        None,
        "Time for all runs together: they take as many steps as fit, at most max_steps. The limit of the preset demo "
        "does not apply to another max_steps.",
    )
    min_steps: int = flag(2, "Minimum number of steps with --max_minutes.")
    head_dynamics: int | None = flag(
        None, "Measure all heads every this many steps, and draw how they change; 0 for no measurements."
    )

    num_hidden_layers: int = with_default(8, SizeArguments, "num_hidden_layers")
    num_attention_heads: int = with_default(4, SizeArguments, "num_attention_heads")
    num_key_value_heads: int | None = flag(
        None, "Number of key/value heads, for architectures with grouped attention; one per head by default."
    )
    tokenizer_name: str | None = flag(
        None, "Tokenizer (folder, or name on the Hub); by default, one is trained on the text."
    )
    dropout: float = flag(0.1, "Dropout of the hidden states.")
    attention_dropout: float = flag(0.1, "Dropout of the attention weights.")

    validation_split: str | None = with_default(None, TextDataArguments, "validation_split")
    text_column: str = flag("text", "Column of the text; name or position.")
    encoding: str = flag("utf-8", "Encoding of the files.")
    streaming: bool = flag(False, "Read the text while training instead of preparing it first.")
    max_length: int = flag(64, "Tokens per example.", earlier="block_size")
    packing: bool = flag(True, "Fill every example with running text; otherwise one padded text per example.")
    max_eval_examples: int = flag(256, "Maximum number of examples to evaluate on.", earlier="validation_examples")
    mlm_probability: float = flag(0.15, "Fraction of the tokens to mask, or to replace.")

    guidance_fraction: float = flag(0.5, "Fraction λ of the heads per layer to guide.")
    guidance_patterns: list[str] | None = flag(
        None, "Patterns of head 0, head 1, …; the last one also for the remaining guided heads."
    )
    guidance_heads: str | None = flag(
        None, 'Heads of each pattern as JSON, instead of a fraction: {"next": [0], "first": [1, 2]}.'
    )
    suppress_steps: int | None = flag(
        None,
        "Also train a third model whose guided heads are pushed away from their patterns for this many steps (loss "
        "avoid), and then released.",
    )
    suppress_weight: float | None = flag(
        None, "Weight α of the loss that pushes heads away; guidance_weight by default."
    )
    guidance_reduction: str = flag("row_mean", "Reduction of the guidance loss: row_mean, paper or code.")

    def __post_init__(self):
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be {', '.join(OBJECTIVES)}, got {self.objective!r}.")
        if self.generator is not None and self.objective != "rtd":
            raise ValueError(f"generator={self.generator!r} needs objective rtd, got objective {self.objective}.")
        if self.generator not in (None, *GENERATORS):
            raise ValueError(f"generator must be {' or '.join(GENERATORS)}, got {self.generator!r}.")
        check_sources(self)
        if self.guidance_heads:
            instead = "guidance_heads names all guided heads"
            refuse_flags(self, {"guidance_fraction": instead, "guidance_patterns": instead})
        self.check_at_least(1, "num_key_value_heads", "min_steps", "suppress_steps", "max_eval_examples")
        if self.suppress_weight is not None:
            if self.suppress_steps is None:
                raise ValueError(f"suppress_weight={self.suppress_weight} needs --suppress_steps.")
            self.check_positive("suppress_weight")
        if self.head_dynamics is not None and self.head_dynamics < 0:
            raise ValueError(
                f"head_dynamics must be a number of steps, or 0 for no measurements, got {self.head_dynamics}."
            )


ARGUMENTS, HAS_TRAINER = PretrainArguments, True
