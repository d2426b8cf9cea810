"""Two gloo processes take the same step as one, with uneven sentences and labels."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


WORKER = Path(__file__).with_name("distributed_worker.py")


def launch(processes, folder, task, kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output = folder / f"{processes}.json"
    runs = []
    for rank in range(processes):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        if processes > 1:
            env |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        command = [sys.executable, str(WORKER), str(output), task, kind, str(processes)]
        runs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for run in runs:
        text, _ = run.communicate(timeout=240)
        assert run.returncode == 0, text
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
