# Licensed under the Apache License, Version 2.0.
"""Flags of `finetune`."""

from dataclasses import dataclass

from ...data.glue_tasks import GLUE, GLUE_TASKS
from .base import flag, refuse_flags
from .classifying import ClassifierArguments, LabelledFilesArguments, check_glue_source, check_sources


FINETUNE_TASKS = ("sequence", "token", *GLUE_TASKS)
OF_FILES = (
    "train_file", "validation_file", "test_file", "dataset_config", "dataset_split", "validation_split", "text_column",
    "label_column", "class_names", "first_label", "encoding", "folds",
)  # fmt: skip
OF_GLUE = ("data_dir", "submission")


@dataclass
class FinetuneArguments(ClassifierArguments, LabelledFilesArguments):
    """Flags of `finetune`; [`FinetuneTrainingArguments`] has those of training."""

    task: str = flag(
        "sequence", "Task: sequence, token, or a task of GLUE by its name, such as mrpc.", earlier="task_name"
    )
    folds: int | None = flag(None, "Cross-validation: number of parts of train_file, each evaluated on in turn.")
    train_file: list[str] | None = flag(
        None,
        "Files, folders or patterns to train on: texts and labels (tsv, csv, jsonl, parquet), or words and tags "
        "(conll, txt, tsv, jsonl, parquet).",
    )
    dataset_name: str | None = flag(
        None, f"Dataset on the Hub, instead of train_file (texts only); {GLUE} by default for the tasks of GLUE."
    )
    data_dir: str | None = flag(None, "Folder with the files of a task of GLUE, instead of the Hub.")
    submission: bool = flag(True, "Write the answers to the test sets of a task of GLUE.")

    def __post_init__(self):
        super().__post_init__()
        if self.task not in FINETUNE_TASKS:
            raise ValueError(f"task must be one of {', '.join(FINETUNE_TASKS)}, got {self.task!r}.")
        if self.folds is not None and self.folds < 2:
            raise ValueError(f"folds must be at least 2, got {self.folds}.")
        self._check_source()
        if self.task in GLUE_TASKS and not self.data_dir:
            self.dataset_name = self.dataset_name or GLUE
        if self.folds and (given := self.validation_file or self.test_file):
            raise ValueError(f"folds={self.folds} evaluates on parts of the training text; leave {given} out.")

    def _check_source(self) -> None:
        """Refuses flags that the task does not read."""
        if self.task in GLUE_TASKS:
            refuse_flags(self, dict.fromkeys(OF_FILES, f"{self.task} reads --data_dir or --dataset_name"))
            check_glue_source(self)
            return
        refuse_flags(self, dict.fromkeys(OF_GLUE, f"only the tasks {', '.join(GLUE_TASKS)} read it"))
        check_sources(self, evaluates=True)
        if self.task == "token":
            refuse_flags(self, {"class_names": "the types of entities come from the tags"})


ARGUMENTS, HAS_TRAINER, PRESETS = FinetuneArguments, True, None
