import math
import os

import numpy as np
import pytest
from fresh_processes import python

from hf_attn_dynamics.training import glue_metric
from hf_attn_dynamics.training.glue_metric import GlueMetric


TRUE, FOUND = [1, 1, 1, 0, 0, 1, 0, 0], [1, 0, 1, 1, 0, 1, 0, 1]  # 3 right of class 1, 1 missed, 2 wrong, 2 right of 0
SCORES, GUESSES = [0.0, 1.5, 3.0, 5.0, 2.0], [0.5, 1.0, 4.9, 3.0, 2.5]


def slow_correlation(x, y):
    x, y = (np.asarray(side) - np.mean(side) for side in (x, y))
    return (x @ y) / math.sqrt((x @ x) * (y @ y))


def ranks(values):
    return [sorted(values).index(value) for value in values]


@pytest.mark.parametrize(
    ("task", "true", "found", "figures"),
    [
        *((task, TRUE, FOUND, {"accuracy": 5 / 8}) for task in (None, "sst2", "mnli", "mnli_matched", "qnli", "wnli")),
        ("rte", [0, 2, 1], [0, 1, 2], {"accuracy": 1 / 3}),
        ("cola", TRUE, FOUND, {"matthews_correlation": slow_correlation(TRUE, FOUND)}),
        ("cola", TRUE, [1] * 8, {"matthews_correlation": 0}),
        ("mrpc", TRUE, FOUND, {"accuracy": 5 / 8, "f1": 2 * 3 / (2 * 3 + 1 + 2)}),
        ("qqp", [0, 0], [0, 0], {"accuracy": 1, "f1": 0}),
        (
            "stsb",
            SCORES,
            GUESSES,
            {
                "pearson": slow_correlation(SCORES, GUESSES),
                "spearmanr": slow_correlation(ranks(SCORES), ranks(GUESSES)),
            },
        ),
        ("stsb", SCORES, [2.5] * 5, {"pearson": 0, "spearmanr": 0}),
    ],
)
def test_each_task_has_the_figures_of_the_benchmark(task, true, found, figures):
    assert GlueMetric(task).compute(predictions=found, references=true) == pytest.approx(figures)


def test_batches_make_no_difference():
    metric = GlueMetric("mrpc", keep_in_memory=True)
    for part in (slice(3), slice(3, None)):
        metric.add_batch(predictions=FOUND[part], references=TRUE[part])
    assert metric.compute() == GlueMetric("mrpc").compute(predictions=FOUND, references=TRUE)


def test_another_task_is_refused():
    with pytest.raises(ValueError, match="config_name 'squad' is not a task of GLUE; choose one of cola, mrpc"):
        GlueMetric("squad")


def test_evaluate_loads_the_file_without_a_network(tmp_path):
    code = (
        "import evaluate, socket, sys\n"
        "def refuse(*_): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        f"metric = evaluate.load({glue_metric.__file__!r}, 'mrpc')\n"
        "print(metric.compute(predictions=[1, 1, 0, 1], references=[1, 0, 0, 1]))"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    (result,) = python(["-c", code], bare=True, env=offline)
    assert result.stdout == "{'accuracy': 0.75, 'f1': 0.8}\n", result.stderr
