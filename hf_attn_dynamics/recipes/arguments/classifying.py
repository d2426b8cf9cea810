# Licensed under the Apache License, Version 2.0.
"""Flags that recipes of classifiers share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .base import LabelledTextArguments, PublishArguments, SizeArguments, check_names, flag, refuse_flags


BERT_FLAGS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")  # of the small BERT

DEFAULT_LENGTH = 128


@dataclass
class CheckpointArguments(PublishArguments, SizeArguments):
    """Flags that name a checkpoint to fine-tune; a small BERT has the sizes of other flags."""

    model: str | None = flag(
        None,
        "Checkpoint (folder, or name on the Hub) to fine-tune; by default, a small BERT is trained.",
        earlier="model_name_or_path",
    )
    max_length: int | None = flag(
        None,
        f"Maximum number of tokens per text; {DEFAULT_LENGTH} by default, or as many as the checkpoint takes.",
    )

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "max_length")
        if self.model:
            refuse_flags(self, dict.fromkeys(BERT_FLAGS, "the checkpoint of --model has its own sizes"))


@dataclass
class ClassifierArguments(CheckpointArguments):
    """Flags that recipes of classifiers share; [`ClassifierTrainingArguments`] has those of training."""

    num_seeds: int | None = flag(None, "Number of trainings, with consecutive seeds from --seed on; 3 by default.")
    seeds: list[int] | None = flag(None, "Seeds of the trainings, instead of num_seeds.")

    def __post_init__(self):
        super().__post_init__()
        if self.seeds is not None:
            if self.num_seeds is not None:
                raise ValueError(f"num_seeds={self.num_seeds} and seeds={self.seeds} exclude each other; give one.")
            check_names("seeds", self.seeds)
            if min(self.seeds) < 0:
                raise ValueError(f"seeds must be at least 0, got {min(self.seeds)}.")
        self.check_at_least(1, "num_seeds")

    def seeds_from(self, first: int, number: int) -> Sequence[int]:
        """The values of --seeds, or `num_seeds` (`number` by default) consecutive seeds from `first` on."""
        return self.seeds or range(first, first + (self.num_seeds or number))


@dataclass
class LabelledFilesArguments(LabelledTextArguments):
    """Flags that name files of all parts, and their classes."""

    test_file: list[str] | None = flag(None, "Files, folders or patterns to compute the main metric on.")
    class_names: list[str] | None = flag(
        None, "Names of the classes of texts, in the order of their numbers in the files."
    )
    first_label: int | None = flag(
        None, "Number of the first class in the files, 0 or 1; needed if a file has neither 0 nor the largest number."
    )
    encoding: str = flag("utf-8", "Encoding of the files.")

    def __post_init__(self):
        super().__post_init__()
        if self.first_label is not None and (self.class_names is None or self.first_label not in (0, 1)):
            raise ValueError(f"first_label must be 0 or 1, beside class_names, got {self.first_label}.")


@dataclass
class ComparisonArguments(CheckpointArguments, LabelledFilesArguments):
    """Flags of recipes that compare trainings on the same texts."""

    max_examples: int | None = flag(None, "Number of training texts to draw at random; all by default.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "max_examples")
        check_sources(self)
        if self.train_file and not self.validation_file:
            raise ValueError(f"train_file {self.train_file} needs --validation_file to evaluate on.")


def check_sources(args: Any, evaluates: bool = False) -> None:
    """Raises ValueError for flags of texts that exclude each other, or that the recipe would ignore.

    Args:
        args (dataclass): Arguments.
        evaluates (`bool`): Whether the recipe can evaluate a trained classifier, without a training text.
    """
    if args.train_file and args.dataset_name:
        raise ValueError(
            f"train_file {args.train_file} and dataset_name {args.dataset_name!r} exclude each other; give one."
        )
    if not args.dataset_name:
        of_hub = ("dataset_config", "dataset_split", "validation_split")
        refuse_flags(args, dict.fromkeys(of_hub, "it needs --dataset_name"))
    elif args.validation_file:
        refuse_flags(args, {"validation_split": "validation_file is evaluated on instead"})
    if not args.train_file and not args.dataset_name and not (evaluates and args.validation_file):
        of_texts = ("validation_file", "test_file", "text_column", "label_column")
        needed = [name for name in of_texts if hasattr(args, name)]
        refuse_flags(args, dict.fromkeys(needed, "it needs --train_file or --dataset_name"))
    files = [getattr(args, name, None) for name in ("train_file", "validation_file", "test_file")]
    if hasattr(args, "encoding") and not any(files):
        refuse_flags(args, {"encoding": "it needs files"})


def check_glue_source(args: Any) -> None:
    """Raises ValueError if flags name two sources of GLUE."""
    if args.data_dir and args.dataset_name:
        raise ValueError(
            f"data_dir {args.data_dir!r} and dataset_name {args.dataset_name!r} exclude each other; give one."
        )
