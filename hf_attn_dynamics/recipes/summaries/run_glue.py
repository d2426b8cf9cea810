# Licensed under the Apache License, Version 2.0.
"""Summary of `run_glue`."""

from dataclasses import dataclass

from .base import Summary, hidden, result
from .classifying import TrainingRow


@dataclass(kw_only=True)
class GlueRow(TrainingRow):
    """One task with one seed."""

    task: str = result("Name of the task.")
    seed: int = result("Random seed.")
    train_examples: int | None = result("Number of training examples; null if the model is only evaluated.")
    eval_examples: int = result("Number of validation examples.")
    metrics: dict[str, float] = result(
        "Metrics of the task, mean losses (in nats; squared error for stsb), and score, the mean of the metrics.",
        key="{per}",
        per="METRIC",
    )


@dataclass(kw_only=True)
class GlueSummary(Summary):
    """Results over all tasks and seeds."""

    tasks: list[str] = result("Names of the tasks.")
    metric: str = result('"score": the mean over tasks of the means of their metrics.')
    metric_mean: float = result("Mean of the score over the seeds.")
    metric_sd: float | None = result("Its standard deviation (of a sample); null for one seed.")
    scores: list[float] = result("The score with each seed.")
    means: dict[str, float] = result(
        "Mean over the seeds of each metric of a task: accuracy, f1, matthews_correlation, pearson, spearmanr, loss "
        "(for mnli with matched_ or mismatched_ in front) and score.",
        key="{per}_mean",
        per="TASK_METRIC",
    )
    sds: dict[str, float | None] = result(
        "Standard deviation over the seeds of each metric of a task (of a sample); null for one seed.",
        key="{per}_sd",
        per="TASK_METRIC",
    )
    rows: list[GlueRow] = result("All tasks with all seeds.")
    seeds: list[int] = result("The seeds.")
    model: str = result("Checkpoint, or the name of the small model.")
    text: str = result("Name of the data.")
    seed: int = hidden()


SUMMARY = GlueSummary
