# Licensed under the Apache License, Version 2.0.
"""Flags that recipes of classifiers have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import PublishArguments, check_names, refuse_flags


BERT_FLAGS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")  # of the small BERT

DEFAULT_LENGTH = 128


@dataclass
class ClassifierArguments(PublishArguments):
    """Seeds and model; how to train is in [`ClassifierTrainingArguments`]."""

    num_seeds: int | None = field(default=None, metadata={"help": "Trainings, with the seeds from --seed on; 3."})
    seeds: list[int] | None = field(default=None, metadata={"help": "Or the seeds themselves."})

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Fine-tune this checkpoint (folder, or name on the Hub); without, train a small BERT."},
    )
    num_hidden_layers: int = field(default=2, metadata={"help": "Layers of the small BERT."})
    hidden_size: int = field(default=128, metadata={"help": "Its width; the feed-forward layers are 4 times as wide."})
    num_attention_heads: int = field(default=8, metadata={"help": "Its heads in each layer."})
    vocab_size: int = field(default=4000, metadata={"help": "Size of its tokenizer."})
    max_length: int | None = field(
        default=None,
        metadata={"help": f"Tokens after which texts are cut; {DEFAULT_LENGTH}, or as many as the checkpoint takes."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.seeds is not None:
            if self.num_seeds is not None:
                raise ValueError(f"num_seeds={self.num_seeds} and seeds={self.seeds} both say how often to train.")
            check_names("seeds", self.seeds)
            if min(self.seeds) < 0:
                raise ValueError(f"seeds must be at least 0, got {min(self.seeds)}.")
        self.check_at_least(1, "num_seeds", "max_length")
        if self.model_name_or_path:
            refuse_flags(self, dict.fromkeys(BERT_FLAGS, "it is of the small BERT, and a checkpoint is named"))

    def seeds_from(self, first: int, number: int) -> Sequence[int]:
        """The seeds that are named, or so many as are asked for (`number` by default) from the first one on."""
        return self.seeds or range(first, first + (self.num_seeds or number))


def check_sources(args: Any, evaluates: bool = False) -> None:
    """Refuses flags of labelled texts that exclude each other, or that nothing is read for.

    Args:
        args (dataclass): Arguments.
        evaluates (`bool`): Whether a trained classifier may be evaluated, which needs no text to train on.

    Raises:
        ValueError: naming the flag.
    """
    if args.train_file and args.dataset_name:
        raise ValueError(
            f"train_file {args.train_file} and dataset_name {args.dataset_name!r} both name a text; give one."
        )
    if not args.dataset_name:
        of_hub = ("dataset_config", "dataset_split", "validation_split")
        refuse_flags(args, dict.fromkeys(of_hub, "it is of a dataset_name, and there is none"))
    elif args.validation_file:
        refuse_flags(args, {"validation_split": "the validation text is validation_file"})
    if not args.train_file and not args.dataset_name and not (evaluates and args.validation_file):
        of_texts = ("validation_file", "test_file", "text_column", "label_column")
        needed = [name for name in of_texts if hasattr(args, name)]
        refuse_flags(args, dict.fromkeys(needed, "name a train_file or dataset_name beside it"))


def check_glue_source(args: Any) -> None:
    """Refuses two sources of GLUE.

    Raises:
        ValueError: naming both flags.
    """
    if args.data_dir and args.dataset_name:
        raise ValueError(f"data_dir {args.data_dir!r} and dataset_name {args.dataset_name!r} both name the data.")
