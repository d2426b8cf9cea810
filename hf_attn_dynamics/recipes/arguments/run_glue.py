# Licensed under the Apache License, Version 2.0.
"""Flags of `run_glue`."""

from dataclasses import dataclass

from ...data.glue_tasks import GLUE_TASKS, glue_task
from .base import check_names, flag
from .classifying import ClassifierArguments, check_glue_source


@dataclass
class GlueArguments(ClassifierArguments):
    """Flags of `run_glue`; [`GlueTrainingArguments`] has those of training."""

    tasks: list[str] | None = flag(None, f"Tasks: {', '.join(GLUE_TASKS)}; all by default.")
    data_dir: str | None = flag(None, "Folder with the files of GLUE, or of a single task.")
    dataset_name: str | None = flag(None, "Dataset on the Hub, such as nyu-mll/glue, instead of data_dir.")
    submission: bool = flag(True, "Write the answers to the test sets.")

    def __post_init__(self):
        super().__post_init__()
        check_glue_source(self)
        if self.tasks is not None:
            if not self.data_dir and not self.dataset_name:
                raise ValueError(f"tasks {self.tasks} need --data_dir, or --dataset_name nyu-mll/glue.")
            self.tasks = [glue_task(name).name for name in self.tasks]
            check_names("tasks", self.tasks)


ARGUMENTS, HAS_TRAINER, PRESETS = GlueArguments, True, None
