# Licensed under the Apache License, Version 2.0.
"""Summary of `finetune`."""

from dataclasses import dataclass

from .base import Summary, hidden, result
from .classifying import TrainingRow


@dataclass(kw_only=True)
class FinetuneRow(TrainingRow):
    """One training: a line of `table.csv`, which ends with mean and standard deviation."""

    seed: int = result("Random seed.")
    fold: int | None = result("Part of the text that is evaluated on, from 1; null without --folds.")
    train_examples: int | None = result("Number of training examples; null if the model is only evaluated.")
    eval_examples: int = result("Number of validation examples.")
    metrics: dict[str, float] = result("All metrics, and the mean loss in nats.", key="{per}", per="METRIC")


@dataclass(kw_only=True)
class FinetuneSummary(Summary):
    """Results over all seeds and parts."""

    task: str = result("Value of --task.")
    labels: list[str] = result("Names of the labels.")
    metric: str = result(
        "Main metric: accuracy, f1 or score; on the test text, if there is one, test_accuracy and so on."
    )
    metric_mean: float = result("Mean of the main metric over all trainings.")
    metric_sd: float | None = result("Its standard deviation (of a sample); null for a single training.")
    means: dict[str, float] = result(
        "Mean of each metric over all trainings: accuracy, macro_f1 and mcc (of two classes); or precision, recall "
        "and f1 of entities; or the metrics of the task of GLUE; and loss, in nats. Those on the test text begin with "
        "test_.",
        key="{per}_mean",
        per="METRIC",
    )
    sds: dict[str, float | None] = result(
        "Standard deviation of each metric (of a sample); null for a single training.", key="{per}_sd", per="METRIC"
    )
    rows: list[FinetuneRow] = result("All trainings, as in table.csv.")
    folds: int | None = result("Number of parts, or null.")
    model: str = result("Checkpoint, or the name of the small model.")
    text: str = result("Name of the data.")
    train_examples: int | None = result("Number of training examples; with --folds, of all parts.")
    eval_examples: int = result("Number of validation examples; with --folds, of all parts.")
    test_examples: int | None = result("Number of test examples; null without --test_file.")
    seed: int = hidden()


SUMMARY = FinetuneSummary
