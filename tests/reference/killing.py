"""Kills runs of a recipe at random moments, goes on with them, and compares what they leave with a run left alone.

    python killing.py FOLDER KILLS RECIPE FLAGS…

Everything is imported once; each run is a fork of this process, so that a kill comes while it works and not while it
imports. Prints JSON: how many runs were killed, and the folders of those that came to their end, the first one
undisturbed.
"""

import importlib
import json
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
from rough_pictures import draw_roughly


os.environ.update(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def start(recipe: Path, argv: list[str], log: Path) -> int:
    """Number of a process that runs the recipe, whose imports are there already."""
    process = os.fork()
    if process:
        return process
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        sys.argv = [str(recipe), *argv]
        runpy.run_path(str(recipe), run_name="__main__")
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(folder: Path, kills: int, name: str, flags: list[str]) -> None:
    importlib.import_module(f"hf_attn_dynamics.recipes.{name}")
    recipe = Path(__file__).parents[2] / "recipes" / f"{name}.py"
    argv = lambda place: [*flags, "--resume", "true", "--output_dir", str(place)]  # noqa: E731
    log = folder / "log.txt"
    begin = time.monotonic()
    if os.waitpid(start(recipe, argv(folder / "alone"), log), 0)[1]:
        sys.exit(log.read_text())
    duration = time.monotonic() - begin
    ended, killed, chance = [folder / "alone"], 0, random.Random(0)
    while killed < kills or len(ended) < 2:
        place = folder / f"disturbed{len(ended)}"
        process = start(recipe, argv(place), log)
        if killed < kills:
            # Long enough to come further than the run before, now and then.
            deadline = time.monotonic() + chance.uniform(0, 0.7) * duration
            done = 0
            while not done and time.monotonic() < deadline:
                time.sleep(0.003)
                done, status = os.waitpid(process, os.WNOHANG)
            if not done:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                killed += 1
                continue
        else:
            _, status = os.waitpid(process, 0)
        if status:
            sys.exit(log.read_text())
        ended.append(place)
    print(json.dumps({"killed": killed, "ended": [str(place) for place in ended]}))


if __name__ == "__main__":
    draw_roughly(pytest.MonkeyPatch())
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
