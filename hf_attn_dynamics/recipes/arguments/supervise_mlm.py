# Licensed under the Apache License, Version 2.0.
"""Flags of `supervise_mlm`."""

from dataclasses import dataclass
from pathlib import Path

from ...data.coreference import POSITIONS, READERS
from .base import PublishArguments, SizeArguments, check_names, flag, refuse_flags, with_default
from .probe_coreference import sources_by_name


TASKS = ("parsing", "antecedents")
LOSSES = ("cross_entropy", "mass", "squared")
KINDS = ", ".join(READERS)


@dataclass
class SuperviseArguments(PublishArguments, SizeArguments):
    """Flags of `supervise_mlm`: task, model, the guided head, and data."""

    task: str = flag("parsing", f"What the guided head learns: {' or '.join(TASKS)}.")
    model: str | None = flag(
        None, "Checkpoint (folder, or name on the Hub); by default a small BERT with random weights."
    )
    layer: int | None = flag(None, "Layer of the guided head, from 0; the middle one by default.")
    head: int = flag(0, "Index of the guided head in its layer, from 0.")
    guidance_loss: str = flag("cross_entropy", f"Loss of the guided head: {', '.join(LOSSES)}.")
    train_file: list[str] | None = flag(
        None,
        f"Training sentences: .conllu files for parsing, KIND:PATH for antecedents, where KIND is {KINDS}; embedded "
        "sentences by default.",
    )
    test_file: list[str] | None = flag(None, "Test sentences, of the same form.")
    validation_every: int = flag(
        10, "Every this many training sentences, one is for validation: the best unguided head is chosen on them."
    )
    distractor: str = flag("none", "Where open_sesame has a clause about others: before, after or none.")
    max_examples: int | None = flag(None, "Number of training and validation sentences to draw; all by default.")
    max_test_examples: int | None = flag(
        None, "Number of sentences to draw from each test file for the accuracy of heads; all by default."
    )
    max_eval_examples: int = flag(512, "Maximum number of sentences of each file for the masked-language-model loss.")
    max_length: int | None = flag(None, "Tokens per training sentence; 128 by default, or less if the model is.")
    mlm_probability: float = flag(0.15, "Fraction of the tokens to mask.")

    hidden_size: int = with_default(64, SizeArguments, "hidden_size")
    num_attention_heads: int = with_default(4, SizeArguments, "num_attention_heads")
    vocab_size: int = with_default(500, SizeArguments, "vocab_size")
    dropout: float = flag(0.1, "Dropout of the hidden states of the small BERT.")

    def __post_init__(self):
        super().__post_init__()
        for name, known in (("task", TASKS), ("guidance_loss", LOSSES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {', '.join(known)}, got {getattr(self, name)!r}.")
        if self.distractor not in (*POSITIONS, "none"):
            raise ValueError(f"distractor must be {', '.join(POSITIONS)} or none, got {self.distractor!r}.")
        self.check_at_least(0, "layer", "head")
        self.check_at_least(1, "max_examples", "max_test_examples", "max_eval_examples")
        self.check_at_least(2, "validation_every", "max_length")
        if bool(self.train_file) != bool(self.test_file):
            given, missing = ("train", "test") if self.train_file else ("test", "train")
            raise ValueError(f"{given}_file={getattr(self, f'{given}_file')} needs --{missing}_file.")
        if self.model:
            sizes = (*SizeArguments.__dataclass_fields__, "dropout")
            refuse_flags(self, dict.fromkeys(sizes, "the checkpoint has its own"))
        sources: list[tuple[str, str]] = []
        if self.task == "antecedents":
            # What they refuse is refused before anything is imported for it.
            sources = [*self.train_sources(), *self.test_sources().values()]
        if self.distractor != "none" and not any(kind == "open_sesame" for kind, _ in sources):
            raise ValueError(f"distractor={self.distractor} needs --task antecedents and open_sesame:PATH.")

    def train_sources(self) -> list[tuple[str, str]]:
        """Kind and path of the training data of antecedents."""
        return list(sources_by_name("train_file", self.train_file or ()).values())

    def test_sources(self) -> dict[str, tuple[str, str]]:
        """Kind and path of the test data of antecedents, by the name of the file or folder."""
        sources = sources_by_name("test_file", self.test_file or ()).values()
        names = [Path(path).name.removesuffix(".gz") for _, path in sources]
        if sources:
            check_names("test_file", names)
        return dict(zip(names, sources))


ARGUMENTS, HAS_TRAINER, PRESETS = SuperviseArguments, True, None
