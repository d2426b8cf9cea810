"""Two gloo processes take the same step as one, with uneven sentences and labels."""

import json
from pathlib import Path

import distributed_worker
import pytest
from launching import run_together


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What two processes give, which train all models one after another, since to start them takes longest."""
    path = tmp_path_factory.mktemp("two") / "found.json"
    run_together(Path(distributed_worker.__file__), 2, path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", distributed_worker.CASES)
def test_two_processes_give_the_losses_and_weights_of_one(of_two, case, tmp_path):
    one, two = distributed_worker.trained(case, processes=1), of_two[case]
    assert len(one["log"]) == len(two["log"]) == 3
    for expected, found in zip(one["log"], two["log"]):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5), name
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    assert two["accuracies"] == one["accuracies"]
    assert len(one["accuracies"]) == (2 if case == "targets" else 0)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=1e-6)
