# Licensed under the Apache License, Version 2.0.
"""Launchers that stand for machines, each started by the script for Slurm, give the losses of one process."""

import json
import os
import socket
import subprocess

import pytest
from launching import ROOT, words


SCRIPT = ROOT / "recipes/configs/accelerate/slurm.sh"
SETTINGS = {
    "max_steps": 4,
    "eval_steps": 2,
    "save_steps": 2,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "block_size": 16,
    "validation_examples": 6,
    "compare": "false",
    "dropout": 0.0,
    "device": "cpu",
    "cpu_threads": 1,
    "disable_tqdm": "true",
}
LOSSES = ("mlm_loss_eval_guided", "mlm_loss_train_mean_guided")
# Two machines, which are this one.
TOOLS = {
    "scontrol": "printf 'localhost\\nlocalhost\\n'",
    "srun": 'shift; SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; wait $!',
}


@pytest.fixture
def environment(tmp_path):
    """A job of two machines, with stand-ins for the commands of Slurm."""
    for name, command in TOOLS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\nset -e\n{command}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "machine[1-2]", "SLURM_NNODES": "2", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def submitted(environment, *words):
    result = subprocess.run(
        ["bash", str(SCRIPT), *map(str, words)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_two_machines_give_the_losses_of_one_process(tmp_path, environment, text, run_as_script):
    files = {"train_file": text / "train.en", "validation_file": text / "valid.en"}
    line = words(**SETTINGS, **files, per_device_train_batch_size=2, output_dir=tmp_path / "two")
    settings = {
        "ACCELERATE_CONFIG": "two_cpu_processes",
        "PROCESSES_PER_MACHINE": "1",
        "MAIN_PROCESS_PORT": free_port(),
    }
    submitted({**environment, **settings}, ROOT / "recipes/pretrain_ag.py", *line)
    line = words(**SETTINGS, **files, per_device_train_batch_size=4, output_dir=tmp_path / "one")
    run_as_script("pretrain_ag.py", *line)
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    assert two["num_processes"] == 2
    for name in LOSSES:
        assert two[name] == pytest.approx(one[name], rel=1e-5), name


@pytest.mark.parametrize(("restarts", "resumed"), [({}, False), ({"SLURM_RESTART_COUNT": "1"}, True)])
def test_a_job_has_a_launcher_a_machine_and_continues_when_it_is_requeued(tmp_path, environment, restarts, resumed):
    (tmp_path / "accelerate").write_text('#!/usr/bin/env bash\necho "$@"\n')
    (tmp_path / "accelerate").chmod(0o755)
    launched = submitted({**environment, "SLURM_GPUS_ON_NODE": "4", **restarts}, "recipe.py", "--seed", "a b")
    for rank in (0, 1):
        end = f"--main_process_port 29500 --machine_rank {rank} recipe.py --seed a b" + " --resume true" * resumed
        (line,) = (line for line in launched.splitlines() if f"--machine_rank {rank}" in line)
        assert line.endswith(end)
        assert "several_machines.yaml --num_machines 2 --num_processes 8 --main_process_ip localhost" in line


def test_a_job_without_gpus_is_refused(environment):
    environment = {name: value for name, value in environment.items() if name != "SLURM_GPUS_ON_NODE"}
    result = subprocess.run(["bash", str(SCRIPT), "recipe.py"], capture_output=True, text=True, env=environment)
    assert result.returncode
    assert "pass --gpus-per-node to sbatch" in result.stderr
