# Licensed under the Apache License, Version 2.0.
"""Flags of `finetune`."""

from dataclasses import dataclass, field

from ...data.glue_tasks import GLUE, GLUE_TASKS
from .base import refuse_flags
from .classifying import ClassifierArguments, check_glue_source, check_sources


TASKS = ("sequence", "token", *GLUE_TASKS)
OF_FILES = (
    "train_file", "validation_file", "test_file", "dataset_config", "dataset_split", "validation_split", "text_column",
    "label_column", "class_names", "encoding", "folds",
)  # fmt: skip
OF_GLUE = ("data_dir", "submission")


@dataclass
class FinetuneArguments(ClassifierArguments):
    """Task, model and text of the run; how to train is in [`FinetuneTrainingArguments`]."""

    task: str = field(
        default="sequence",
        metadata={
            "help": "What to classify: sequence, token, or a task of GLUE by its name, such as mrpc.",
            "aliases": ["--task_name"],
        },
    )
    folds: int | None = field(
        default=None, metadata={"help": "Cross-validation: evaluate on each of so many parts of train_file in turn."}
    )

    train_file: list[str] | None = field(
        default=None,
        metadata={"help": "Files, folders or patterns: texts and labels (tsv, csv, jsonl, parquet), or words and tags "
                          "(conll, txt, tsv, jsonl, parquet)."},
    )  # fmt: skip
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same, to evaluate on."})
    test_file: list[str] | None = field(default=None, metadata={"help": "The same, for the main figure, if given."})
    dataset_name: str | None = field(
        default=None, metadata={"help": f"Data set on the Hub, instead of train_file (texts only); {GLUE} for GLUE."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    dataset_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str = field(default="validation", metadata={"help": "Its split to evaluate on."})
    text_column: list[str] | None = field(
        default=None, metadata={"help": "Column of the texts, two of a pair, or that of the words: name or position."}
    )
    label_column: str | None = field(
        default=None, metadata={"help": "Column of the labels or tags: name or position; found if not named."}
    )
    class_names: list[str] | None = field(
        default=None, metadata={"help": "Names of the classes of texts, in the order of their numbers in the files."}
    )
    encoding: str = field(default="utf-8", metadata={"help": "Encoding of the files."})
    data_dir: str | None = field(
        default=None, metadata={"help": "Of a task of GLUE: folder of its files, instead of the Hub."}
    )
    submission: bool = field(default=True, metadata={"help": "Of a task of GLUE: answer its test sets."})

    def __post_init__(self):
        super().__post_init__()
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}.")
        if self.folds is not None and self.folds < 2:
            raise ValueError(f"folds must be at least 2, got {self.folds}.")
        self._check_source()
        if self.task in GLUE_TASKS and not self.data_dir:
            self.dataset_name = self.dataset_name or GLUE
        if self.folds and (given := self.validation_file or self.test_file):
            raise ValueError(f"folds={self.folds} evaluates on parts of the training text; leave out {given}.")

    def _check_source(self) -> None:
        """Refuses flags that the task does not read."""
        if self.task in GLUE_TASKS:
            refuse_flags(
                self, dict.fromkeys(OF_FILES, f"{self.task} has texts of its own, in data_dir or dataset_name")
            )
            check_glue_source(self)
            return
        refuse_flags(self, dict.fromkeys(OF_GLUE, f"it is of the tasks {', '.join(GLUE_TASKS)}"))
        check_sources(self, evaluates=True)
        if not (self.train_file or self.validation_file or self.test_file):
            refuse_flags(self, {"encoding": "no file is named"})
        if self.task == "token":
            refuse_flags(self, {"class_names": "tags of words name the types of entities"})


ARGUMENTS, HAS_TRAINER, PRESETS = FinetuneArguments, True, None
