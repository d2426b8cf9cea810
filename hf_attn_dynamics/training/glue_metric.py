# Licensed under the Apache License, Version 2.0.
"""The metrics of GLUE as an `evaluate` module that works offline.

This file has no relative imports, so that `evaluate.load(glue_metric.__file__, "mrpc")` works, too.
"""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


CITATION = """@inproceedings{wang2019glue,
    title = {{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
    author = {Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel},
    booktitle = {International Conference on Learning Representations},
    year = {2019}
}"""


def _correlation(correlate, references: np.ndarray, predictions: np.ndarray) -> float:
    """A correlation coefficient; 0, like Matthews' coefficient, if it is undefined because one side is constant."""
    if np.ptp(references) == 0 or np.ptp(predictions) == 0:
        return 0.0
    return correlate(references, predictions).statistic


FIGURES = {
    "accuracy": accuracy_score,
    "f1": lambda references, predictions: f1_score(references, predictions, zero_division=0),
    "matthews_correlation": matthews_corrcoef,
    "pearson": lambda references, predictions: _correlation(pearsonr, references, predictions),
    "spearmanr": lambda references, predictions: _correlation(spearmanr, references, predictions),
}
TASK_FIGURES = {
    "cola": ("matthews_correlation",),
    "mrpc": ("accuracy", "f1"),
    "qqp": ("accuracy", "f1"),
    "stsb": ("pearson", "spearmanr"),
    **dict.fromkeys(
        ("default", "sst2", "mnli", "mnli_matched", "mnli_mismatched", "ax", "qnli", "rte", "wnli"), ("accuracy",)
    ),
}


class GlueMetric(evaluate.Metric):
    """Metrics of a task of GLUE (Wang et al. 2019), with the names of `evaluate.load("glue")`.

    | task | metrics |
    |---|---|
    | `cola` | `matthews_correlation` |
    | `mrpc`, `qqp` | `accuracy`, `f1` of class 1 (0 if neither side has it) |
    | `stsb` | `pearson`, `spearmanr` (0 if one side is constant) |
    | `sst2`, `mnli`, `mnli_matched`, `mnli_mismatched`, `ax`, `qnli`, `rte`, `wnli`, and without a task | `accuracy` |

    Args:
        config_name (`str`, *optional*): The task; defaults to accuracy only.
        kwargs: Arguments of `evaluate.Metric`, such as `num_process`.

    Raises:
        ValueError: if the task is unknown.

    Example:
        >>> metrics = GlueMetric("mrpc").compute(predictions=[1, 1, 0, 1], references=[1, 0, 0, 1])
        >>> {name: round(value, 2) for name, value in metrics.items()}
        {'accuracy': 0.75, 'f1': 0.8}
    """

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in TASK_FIGURES:
            raise ValueError(
                f"config_name {self.config_name!r} is not a task of GLUE; choose one of {', '.join(TASK_FIGURES)}."
            )
        cell = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description="Metrics of the tasks of GLUE.",
            citation=CITATION,
            inputs_description="Predictions and references: class ids, or scores for stsb.",
            features=datasets.Features({"predictions": cell, "references": cell}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        """Called by `evaluate.Metric.compute` with all predictions and references."""
        true, found = np.asarray(references), np.asarray(predictions)
        return {name: float(FIGURES[name](true, found)) for name in TASK_FIGURES[self.config_name]}
