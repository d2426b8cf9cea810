"""FSDP2 over two processes: the losses and weights of one, and a checkpoint that heads can be removed from."""

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from launching import run_together


WORKER = Path(__file__).with_name("sharded_worker.py")


def run(processes, folder):
    folder.mkdir()
    run_together(WORKER, processes, folder, processes)
    return json.loads((folder / "report.json").read_text())


def test_a_sharded_model_is_trained_saved_and_pruned_as_one_that_is_not(tmp_path):
    one, two = run(1, tmp_path / "one"), run(2, tmp_path / "two")
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["logits"] == pytest.approx(one["logits"], abs=1e-5)
    assert two["gates"] == pytest.approx(one["gates"], abs=1e-6)
    assert one["losses"][0] > one["losses"][-1]


@pytest.mark.parametrize("name", ["cpu", "two_cpu_processes", "multi_gpu", "fsdp2"])
def test_accelerate_reads_the_configurations(name):
    path = WORKER.parents[2] / "recipes" / "configs" / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.num_processes == (1 if name == "cpu" else 2)
    assert config.use_cpu == ("cpu" in name)
    assert f"recipes/configs/accelerate/{name}.yaml" in path.read_text()
