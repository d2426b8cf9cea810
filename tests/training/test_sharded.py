"""FSDP2 over two processes: losses and weights of one, also resumed, and checkpoints that heads are removed from."""

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from launching import run_together


WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What one process and two give, for an encoder, an encoder–decoder and a decoder."""
    found = []
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp(f"processes{processes}")
        run_together(WORKER, processes, folder, processes)
        found.append(json.loads((folder / "report.json").read_text()))
    return found


@pytest.mark.parametrize("kind", ["roberta", "marian", "mistral"])
def test_a_sharded_model_is_trained_saved_and_pruned_as_one_that_is_not(reports, kind):
    one, two = (report[kind] for report in reports)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["logits"] == pytest.approx(one["logits"], abs=1e-5)
    assert two["gates"] == pytest.approx(one["gates"], abs=1e-6)
    assert one["losses"][0] > one["losses"][-1]
    assert one["differing"] == two["differing"] == []


@pytest.mark.parametrize("kind", ["roberta", "marian", "mistral"])
def test_a_sharded_model_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(reports, kind):
    for report in reports:
        losses, resumed = report[kind]["losses"], report[kind]["resumed"]
        assert resumed == pytest.approx(losses[-len(resumed) :], rel=1e-6)


@pytest.mark.parametrize("name", ["cpu", "two_cpu_processes", "multi_gpu", "fsdp2", "several_machines"])
def test_accelerate_reads_the_configurations(name):
    path = WORKER.parents[2] / "recipes" / "configs" / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.num_processes == {"cpu": 1, "several_machines": 8}.get(name, 2)
    assert config.num_machines == (2 if name == "several_machines" else 1)
    assert config.use_cpu == ("cpu" in name)
    assert f"recipes/configs/accelerate/{name}.yaml" in path.read_text()
