# Licensed under the Apache License, Version 2.0.
"""Flags of `lexical_knowledge`."""

from dataclasses import dataclass
from typing import Any, ClassVar

from .base import PublishArguments, TextDataArguments, flag, refuse_flags, with_default


# Sizes of text that is embedded, and the paper's (appendix A.8), for flags that are not given.
LEXICAL_SIZES: dict[str, dict[str, dict[str, float | str]]] = {
    "classification": {
        "embedded": {
            "embedding_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "dropout": 0.0, "min_count": 3,
            "max_length": 64, "max_eval_examples": 4000, "max_steps": 400, "per_device_train_batch_size": 32
        },
        "paper": {
            "embedding_size": 300, "hidden_size": 256, "num_hidden_layers": 1, "dropout": 0.0, "min_count": 3,
            "max_length": 400, "max_eval_examples": 4000, "max_steps": 4000, "per_device_train_batch_size": 32
        },
    },
    "translation": {
        "embedded": {
            "embedding_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "dropout": 0.0, "readout": "mlp",
            "vocab_size": 250, "max_length": 64, "max_eval_examples": 300, "max_steps": 1000,
            "per_device_train_batch_size": 32
        },
        "paper": {
            "embedding_size": 256, "hidden_size": 256, "num_hidden_layers": 2, "dropout": 0.5, "readout": "mlp",
            "vocab_size": 8000, "max_length": 128, "max_eval_examples": 4000, "max_steps": 20_000,
            "per_device_train_batch_size": 16
        },
    },
}  # fmt: skip


@dataclass
class LexicalArguments(PublishArguments, TextDataArguments):
    """Flags of `lexical_knowledge`; [`LexicalTrainingArguments`] has those of training.

    Sizes that are not given are the paper's, or smaller for the embedded text, see [`LEXICAL_SIZES`].
    """

    task: str = flag("classification", f"Task to learn: {' or '.join(LEXICAL_SIZES)}.")
    frozen_beta: bool = flag(False, "Also train a model of which only attention is trained (table 10).")
    checkpoints: list[int] | None = flag(
        None, "Steps to measure the models at, apart from the last one; the paper's by default."
    )

    train_file: list[str] | None = flag(
        None,
        "Classification: tables of texts and labels, or NAME=PATH with the texts of each class. Translation: source "
        "and target, aligned by line, or one table with both.",
    )
    validation_fraction: float | None = flag(
        None,
        "Fraction of the training text to evaluate on, if no other text is named; 0.1 by default.",
        earlier="validation_share",
    )
    validation_split: str | None = with_default(None, TextDataArguments, "validation_split")
    encoding: str = flag("utf-8", "Encoding of the files.")
    columns: list[str] | None = flag(
        None, "Columns of tables: text and label, or source and target; names or positions."
    )

    max_length: int | None = flag(
        None, "Maximum number of words per text; longer texts are cut, longer pairs are not trained on."
    )
    max_eval_examples: int | None = flag(
        None, "Maximum number of examples to evaluate on, drawn by the seed; 4,000 by default."
    )
    vocab_size: int | None = flag(
        None,
        "Classification: number of most frequent words to keep, all by default. Translation: size of the vocabulary "
        "that both languages share, 8,000 by default.",
    )
    min_count: int | None = flag(
        None, "Classification: minimum number of occurrences of a word in the training text; 3 by default."
    )
    glove: str | None = flag(
        None, "Classification: file of word vectors (.txt, .npz) to initialize the embeddings of LSTM models with."
    )

    embedding_size: int | None = flag(None, "Size of the embeddings.")
    hidden_size: int | None = flag(None, "Size of the states, and of the hidden layers of attention or readout.")
    num_hidden_layers: int | None = flag(None, "Number of LSTM layers.")
    dropout: float | None = flag(None, "Dropout between LSTM layers.")
    readout: str | None = flag(None, "Translation: mlp, or additive, with which α_opt is computed.")
    optimal_sentences: int | None = flag(
        None, "Number of sentences to compute α_opt on with the additive readout; 50 by default."
    )

    of_task: ClassVar[dict[str, tuple[str, ...]]] = {
        "classification": ("min_count", "glove"),
        "translation": ("readout", "optimal_sentences"),
    }

    def __post_init__(self):
        super().__post_init__()
        if self.task not in LEXICAL_SIZES:
            raise ValueError(f"task must be {' or '.join(LEXICAL_SIZES)}, got {self.task!r}.")
        for task, names in self.of_task.items():
            for name in names:
                if task != self.task and getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)} is for task {task}, not for {self.task}.")
        for name in ("max_length", "max_eval_examples", "optimal_sentences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.optimal_sentences is not None and self.readout != "additive":
            raise ValueError(f"optimal_sentences={self.optimal_sentences} needs readout=additive.")
        if min(self.checkpoints or [0]) < 0:
            raise ValueError(f"checkpoints must not be negative, got {min(self.checkpoints)}.")
        self._check_text()

    def _check_text(self) -> None:
        for first, second in (
            ("train_file", "dataset_name"),
            ("validation_file", "validation_split"),
            ("validation_file", "validation_fraction"),
            ("validation_split", "validation_fraction"),
        ):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise ValueError(
                    f"{first} {getattr(self, first)} and {second} {getattr(self, second)} exclude each other; "
                    "give one."
                )
        for name in ("dataset_config", "dataset_split", "validation_split"):
            if getattr(self, name) not in (None, "train") and self.dataset_name is None:
                raise ValueError(f"{name} {getattr(self, name)!r} needs --dataset_name.")
        if self.is_embedded:
            for name in ("validation_file", "validation_fraction", "columns"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} {getattr(self, name)} needs --train_file or --dataset_name.")
        if not self.train_file and not self.validation_file:
            refuse_flags(self, {"encoding": "it needs files"})
        if self.validation_fraction is not None and not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be between 0 and 1, got {self.validation_fraction}.")
        if self.columns is not None and len(self.columns) != 2:
            raise ValueError(f"columns must be two, of text and label or of source and target, got {self.columns}.")

    @property
    def is_embedded(self) -> bool:
        """Whether the run reads the embedded text."""
        return self.train_file is None and self.dataset_name is None


def choose_sizes(args: LexicalArguments, training_args: Any) -> None:
    """Sets flags that are not given, see [`LEXICAL_SIZES`]."""
    for name, value in LEXICAL_SIZES[args.task]["embedded" if args.is_embedded else "paper"].items():
        owner = args if hasattr(args, name) else training_args
        if getattr(owner, name) is None:
            setattr(owner, name, value)


ARGUMENTS, HAS_TRAINER, PRESETS = LexicalArguments, True, None
