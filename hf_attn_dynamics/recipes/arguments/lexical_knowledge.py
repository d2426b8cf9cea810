# Licensed under the Apache License, Version 2.0.
"""Flags of `lexical_knowledge`."""

from dataclasses import dataclass, field
from typing import ClassVar

from .base import PublishArguments, refuse_flags


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
class LexicalArguments(PublishArguments):
    """Task, text and models of the run; how to train is in [`LexicalTrainingArguments`].

    What is not given is the paper's, or smaller for the embedded text: see [`LEXICAL_SIZES`].
    """

    task: str = field(default="classification", metadata={"help": f"What is learnt: {' or '.join(LEXICAL_SIZES)}."})
    frozen_beta: bool = field(
        default=False, metadata={"help": "Also train a model of which everything but attention is frozen (table 10)."}
    )
    checkpoints: list[int] | None = field(
        default=None, metadata={"help": "Steps at which models are measured, beside the last; the paper's by default."}
    )

    train_file: list[str] | None = field(
        default=None,
        metadata={"help": "Classification: tables of texts and labels, or NAME=PATH of the texts of each class. "
                          "Translation: source and target, aligned by line; or one table of both sides."},
    )  # fmt: skip
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same, to measure on."})
    validation_share: float | None = field(
        default=None, metadata={"help": "Fraction of the training text to measure on, if no other text is named; 0.1."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub, instead of train_file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    dataset_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str | None = field(
        default=None, metadata={"help": "Its split to measure on; without, a fraction of the training text."}
    )
    encoding: str = field(default="utf-8", metadata={"help": "Encoding of the files."})
    columns: list[str] | None = field(
        default=None,
        metadata={"help": "Of tables: columns of text and label, or of source and target; names or positions."},
    )

    max_length: int | None = field(
        default=None, metadata={"help": "Words after which texts are cut; longer pairs are not trained on."}
    )
    max_eval_examples: int | None = field(
        default=None, metadata={"help": "Most examples to measure on, drawn by the seed; 4,000."}
    )
    vocab_size: int | None = field(
        default=None,
        metadata={"help": "Classification: most frequent words to keep; all by default. Translation: pieces that both "
                          "languages share; 8,000."},
    )  # fmt: skip
    min_count: int | None = field(
        default=None, metadata={"help": "Classification: how often a word is seen in training to be known; 3."}
    )
    glove: str | None = field(
        default=None,
        metadata={"help": "Classification: word vectors (.txt, .npz) that embeddings of LSTM models start from."},
    )

    embedding_size: int | None = field(default=None, metadata={"help": "Size of embeddings."})
    hidden_size: int | None = field(
        default=None, metadata={"help": "Size of states, and of the hidden layers of attention or readout."}
    )
    num_hidden_layers: int | None = field(default=None, metadata={"help": "LSTM layers."})
    dropout: float | None = field(default=None, metadata={"help": "Dropout between LSTM layers."})
    readout: str | None = field(
        default=None, metadata={"help": "Translation: mlp, or additive, for which α_opt is found."}
    )
    optimal_sentences: int | None = field(
        default=None, metadata={"help": "With readout additive: sentences for which α_opt is found; 50."}
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
            ("validation_file", "validation_share"),
            ("validation_split", "validation_share"),
        ):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise ValueError(
                    f"{first} {getattr(self, first)} and {second} {getattr(self, second)} both name a text; give one."
                )
        for name in ("dataset_config", "dataset_split", "validation_split"):
            if getattr(self, name) not in (None, "train") and self.dataset_name is None:
                raise ValueError(f"{name} {getattr(self, name)!r} is of a dataset_name, but there is none.")
        if self.is_embedded:
            for name in ("validation_file", "validation_share", "columns"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} {getattr(self, name)} needs a train_file or dataset_name beside it.")
        if not self.train_file and not self.validation_file:
            refuse_flags(self, {"encoding": "no file is named"})
        if self.validation_share is not None and not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share must be between 0 and 1, got {self.validation_share}.")
        if self.columns is not None and len(self.columns) != 2:
            raise ValueError(f"columns must be two, of text and label or of source and target, got {self.columns}.")

    @property
    def is_embedded(self) -> bool:
        """Whether no text is named."""
        return self.train_file is None and self.dataset_name is None


ARGUMENTS, HAS_TRAINER, PRESETS = LexicalArguments, True, None
