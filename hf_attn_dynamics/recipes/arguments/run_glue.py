# Licensed under the Apache License, Version 2.0.
"""Flags of `run_glue`."""

from dataclasses import dataclass, field

from ...data.glue_tasks import GLUE_TASKS, glue_task
from .base import check_names
from .classifying import ClassifierArguments, check_glue_source


@dataclass
class GlueArguments(ClassifierArguments):
    """Tasks and model of the run; how to train is in [`GlueTrainingArguments`]."""

    tasks: list[str] | None = field(
        default=None, metadata={"help": f"Tasks: {', '.join(GLUE_TASKS)}; all by default."}
    )
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder of GLUE's files, or of those of the one task."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set on the Hub, such as nyu-mll/glue, instead of data_dir."}
    )
    submission: bool = field(default=True, metadata={"help": "Answer the test sets that are there."})

    def __post_init__(self):
        super().__post_init__()
        check_glue_source(self)
        if self.tasks is not None:
            if not self.data_dir and not self.dataset_name:
                raise ValueError(f"tasks {self.tasks} need a data_dir, or dataset_name nyu-mll/glue, beside them.")
            self.tasks = [glue_task(name).name for name in self.tasks]
            check_names("tasks", self.tasks)


ARGUMENTS, HAS_TRAINER, PRESETS = GlueArguments, True, None
