"""Starts recipes as people do."""

import json
import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]


def launch(recipe, folder, processes, **settings):
    """Runs a recipe under `accelerate launch` on so many CPU processes; returns its summary."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--dynamo_backend", "no"]
    if processes == 1:
        command += ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    else:
        command += ["--config_file", str(ROOT / "recipes/configs/accelerate/two_cpu_processes.yaml")]
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", *str(value).split(" "))]
    result = subprocess.run(
        [*command, str(ROOT / "recipes" / recipe), "--output_dir", str(folder), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads((Path(folder) / "summary.json").read_text())
