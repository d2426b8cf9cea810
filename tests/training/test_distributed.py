"""Two gloo processes take the same step as one, with uneven sentences and labels."""

import json
from pathlib import Path

import pytest
from launching import run_together


WORKER = Path(__file__).with_name("distributed_worker.py")


def launch(processes, folder, task, kind):
    output = folder / f"{processes}.json"
    run_together(WORKER, processes, output, task, kind, processes)
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("kind", "task"),
    [("roberta", "MaskedLM"), ("bert", "PreTraining"), ("electra", "JointPreTraining"), ("marian", "Translation")],
)
def test_two_processes_give_the_losses_and_weights_of_one(tmp_path, kind, task):
    one, two = (launch(processes, tmp_path, task, kind) for processes in (1, 2))
    assert len(one["log"]) == len(two["log"]) == 3
    for expected, found in zip(one["log"], two["log"]):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5), name
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=1e-6)
