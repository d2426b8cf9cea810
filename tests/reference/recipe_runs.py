"""Runs recipes one after another, in this process or, as a script, in several: recipe_runs.py JOBS RESULTS."""

import gc
import importlib
import json
import os
import sys
import typing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from launching import words
from rough_pictures import draw_roughly
from transformers import Trainer

from hf_attn_dynamics.recipes.run import NOT_OF_THE_RUN, parse_yaml_or_flags, values_of_run


class Recipe:
    """A recipe in this process, on one core, with small sizes.

    Args:
        name (`str`): Its name.
        **small: Flags of all its runs, which those of a run may change.
    """

    ON_ONE_CORE: ClassVar = {"device": "cpu", "cpu_threads": 1, "disable_tqdm": "true"}

    def __init__(self, name: str, **small: Any):
        self.module = importlib.import_module(f"hf_attn_dynamics.recipes.{name}")
        self.small = {**self.ON_ONE_CORE, **small}
        arguments = importlib.import_module(f"hf_attn_dynamics.recipes.arguments.{name}")
        self.presets = arguments.PRESETS or {}
        self.types = [kind for name, kind in typing.get_type_hints(self.module.main).items() if name != "return"]

    def parse(self, *argv: Any) -> tuple:
        """Its arguments, given the words of a command line."""
        return parse_yaml_or_flags(*self.types, presets=self.presets, argv=[str(word) for word in argv])

    def parse_flags(self, **flags: Any) -> tuple:
        return self.parse(*words(**{**self.small, **flags}))

    def run(self, folder: Path, **flags: Any) -> dict:
        """Its summary."""
        return self.module.main(*self.parse_flags(output_dir=folder, **flags))

    def values(self, *argv: Any) -> dict:
        """What makes the run with such a command line what it is, by name."""
        args, *of_trainer = self.parse(*argv)
        if of_trainer:
            return values_of_run(args, *of_trainer, self.presets)
        return {key: value for key, value in vars(args).items() if key not in NOT_OF_THE_RUN}


def run(recipe: str, words: list[str]) -> dict:
    """Summary of a run with these words on its command line, and all that its trainers have logged."""
    # Else, settings of FSDP would stay those of an earlier model.
    AcceleratorState._reset_state()
    recipe = Recipe(recipe)
    logged = []
    log = Trainer.log

    def recording(self, logs, start_time=None):
        logged.append(dict(logs))
        log(self, logs, start_time)

    Trainer.log = recording
    try:
        summary = recipe.module.main(*recipe.parse(*words))
    finally:
        Trainer.log = log
    return {"summary": summary, "log": logged}


def allow_fsdp_on_cpus() -> None:
    """Accelerate takes FSDP for devices of some kinds only; processes on CPUs pass for those."""
    begin = AcceleratorState.__init__

    def pretending(self, *args, **kwargs):
        if not self._shared_state:
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        begin(self, *args, **kwargs)

    AcceleratorState.__init__ = pretending


if __name__ == "__main__":
    jobs, results = map(Path, sys.argv[1:])
    draw_roughly(pytest.MonkeyPatch())
    if "ACCELERATE_USE_FSDP" in os.environ:
        allow_fsdp_on_cpus()
    found = {}
    for name, job in json.loads(jobs.read_text()).items():
        # Every training collects garbage, which takes seconds where it looks at all that was imported.
        gc.freeze()
        found[name] = run(*job)
    if PartialState().is_main_process:
        results.write_text(json.dumps(found))
