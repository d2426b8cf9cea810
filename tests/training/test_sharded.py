"""FSDP2 over two processes: the losses and weights of one, and a checkpoint that heads can be removed from."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file


WORKER = Path(__file__).with_name("sharded_worker.py")


def launch(processes, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    folder.mkdir()
    runs = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), str(processes)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **settings, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    for run in runs:
        text, _ = run.communicate(timeout=240)
        assert run.returncode == 0, text
    return json.loads((folder / "report.json").read_text())


def test_a_sharded_model_is_trained_saved_and_pruned_as_one_that_is_not(tmp_path):
    one, two = launch(1, tmp_path / "one"), launch(2, tmp_path / "two")
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
