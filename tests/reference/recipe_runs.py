"""Runs recipes one after another, in this process or, as a script, in several: recipe_runs.py JOBS RESULTS."""

import gc
import importlib
import json
import os
import sys
import typing
from pathlib import Path

import pytest
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from rough_pictures import draw_roughly
from transformers import Trainer

from hf_attn_dynamics.recipes.run import parse_yaml_or_flags


def run(recipe: str, words: list[str]) -> dict:
    """Summary of a run with these words on its command line, and all that its trainers have logged."""
    # Else, settings of FSDP would stay those of an earlier model.
    AcceleratorState._reset_state()
    module = importlib.import_module(f"hf_attn_dynamics.recipes.{recipe}")
    types = [kind for name, kind in typing.get_type_hints(module.main).items() if name != "return"]
    logged = []
    log = Trainer.log

    def recording(self, logs, start_time=None):
        logged.append(dict(logs))
        log(self, logs, start_time)

    Trainer.log = recording
    try:
        summary = module.main(*parse_yaml_or_flags(*types, presets=getattr(module, "PRESETS", None), argv=words))
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
