"""Starts recipes as people do, and scripts on several processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import yaml
from fresh_processes import python


ROOT = Path(__file__).parents[2]


def launch(recipe, folder, **settings):
    """Runs a recipe under `accelerate launch` on two CPU processes; returns its summary."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--dynamo_backend", "no"]
    command += ["--config_file", str(ROOT / "recipes/configs/accelerate/two_cpu_processes.yaml")]
    result = subprocess.run(
        [*command, str(ROOT / "recipes" / recipe), *words(output_dir=folder, **settings)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads((Path(folder) / "summary.json").read_text())


def words(**values):
    """Words of a command line. Flags that are None are left out; a list is several words, and so is text with spaces
    that is not JSON."""
    line = []
    for name, value in values.items():
        if isinstance(value, str) and not value.startswith(("{", "[")):
            value = value.split(" ")
        if value is not None:
            line += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return line


def fsdp2_environment():
    """What `accelerate launch` would tell processes from the configuration of FSDP2, but in single precision."""
    config = yaml.safe_load((ROOT / "recipes/configs/accelerate/fsdp2.yaml").read_text())["fsdp_config"]
    words = {key.upper(): str(value).lower() if value is bool(value) else str(value) for key, value in config.items()}
    return {"ACCELERATE_USE_FSDP": "true", **words}


def run_together(script, processes, *arguments, **environment):
    """Runs a script with these arguments on so many CPU processes, which find each other by gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environments = []
    for rank in range(processes):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        env |= environment
        if processes > 1:
            env |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        environments.append(env)
    for run in python(*[[script, *arguments]] * processes, env=environments):
        assert run.returncode == 0, run.stdout + run.stderr
