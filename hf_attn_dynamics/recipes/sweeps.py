# Licensed under the Apache License, Version 2.0.
"""Sweeps: many runs of one recipe, and one table of their results.

A sweep is a YAML file:

    recipe: pretrain_ag.py            # a recipe of the package, or the path of a script
    settings: {preset: tiny}          # flags of all runs; {seed} in a value stands for the seed
    variants:                         # flags of each row, by its name (optional)
      all patterns: {}
      without first: {guidance_heads: '{"next": [0], "prev": [1]}'}
    grid: {learning_rate: [3.0e-4, 1.0e-3], warmup_steps: [0, 100]}   # every combination (optional)
    seeds: [1, 2, 3]
    systems: [guided, unguided]       # what one run compares; {system} in a key below stands for each (optional)
    figures: {MLM loss: "mlm_loss_eval_{system}", step ratio: step_ratio}     # headings, and keys of summary.json;
                                      # or places in it: [rows, {method: "{system}", heads: 12}, bleu]
    digits: 3                         # decimals in the table
    best: {loss: mlm_loss_eval_unguided, curve: eval_curve_guided}            # see [`add_ratio_to_best`] (optional)
    heat_map: {figure: "mlm_loss_eval_{system}", rows: [learning_rate], columns: [warmup_steps]}   # (optional)
"""

import itertools
import json
import math
import os
import re
import runpy
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import NoneType
from typing import Any

from tqdm import tqdm

from .._tables import format_table
from ..cli import main as run_of_package
from . import JOBS
from .arguments.parsing import read_yaml
from .ledger import number_at
from .new_process import process_context
from .run import SUMMARY, check_output_dir, num_cores, read_summaries, write_yaml


SWEEP = "sweep.yaml"
RATIO_TO_BEST = "step_ratio_to_best"


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its name, what sets it apart, and its flags."""

    name: str
    variant: str
    point: dict[str, Any]
    seed: int
    settings: dict[str, Any]


@dataclass
class Sweep:
    """Content of a sweep file; the module explains its keys.

    Raises:
        ValueError: if a value has the wrong type, or two runs have the same name.
    """

    recipe: str
    figures: dict[str, str | list]
    seeds: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    grid: dict[str, list] = field(default_factory=dict)
    systems: list[str] = field(default_factory=lambda: [""])
    digits: int = 3
    best: dict[str, str] | None = None
    heat_map: dict[str, Any] | None = None

    def __post_init__(self):
        if not isinstance(self.recipe, str):
            raise ValueError(f"recipe of a sweep must name a script, got {self.recipe!r}.")
        kinds = {"figures": dict, "seeds": list, "settings": dict, "variants": dict, "grid": dict, "systems": list}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (not value and name not in ("settings", "grid")):
                what = "names with values" if kind is dict else "a list"
                raise ValueError(f"{name} of a sweep must be {what}, got {value!r}.")
        for name, values in self.grid.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"grid of a sweep must list values, got {name}: {values!r}.")
        for name, settings in self.variants.items():
            if not isinstance(settings, dict):
                raise ValueError(f"variants of a sweep must be flags with values, got {name}: {settings!r}.")
            for key in settings.keys() & self.grid.keys():
                raise ValueError(
                    f"{key} is in the grid of a sweep and in its variant {name!r}; leave one of them out."
                )
        for heading, key in self.figures.items():
            words = list(_words_in(key))
            if not words or any(re.search(r"[{}]", word.replace("{system}", "")) for word in words):
                raise ValueError(
                    f"figures of a sweep must be keys of summary.json, in braces at most {{system}}, got {heading}: "
                    f"{key!r}."
                )
        if type(self.digits) is not int or self.digits < 0:
            raise ValueError(f"digits of a sweep must be a number from 0, got {self.digits!r}.")
        self._check_section("best", self.best, {"loss", "curve"})
        self._check_section("heat_map", self.heat_map, {"figure", "rows", "columns"})
        if self.heat_map and self.heat_map["figure"] not in self.figures.values():
            raise ValueError(
                f"heat_map shows {self.heat_map['figure']!r}, which is not among the figures of the sweep: "
                f"{', '.join(map(str, self.figures.values()))}."
            )
        for axis in ("rows", "columns") if self.heat_map else ():
            if not isinstance(self.heat_map[axis], list):
                raise ValueError(f"heat_map {axis} must be a list of names in the grid, got {self.heat_map[axis]!r}.")
            for name in self.heat_map[axis]:
                if name not in self.grid:
                    raise ValueError(
                        f"heat_map {axis} names {name!r}, which is not in the grid: {', '.join(self.grid)}."
                    )
        names = [run.name for run in self.runs()]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two runs of the sweep would be called {name!r}; name variants and seeds apart.")

    @staticmethod
    def _check_section(name: str, value: Any, keys: set[str]) -> None:
        if value is not None and (not isinstance(value, dict) or value.keys() != keys):
            raise ValueError(f"{name} of a sweep takes the keys {', '.join(sorted(keys))}, got {value!r}.")

    @classmethod
    def load(cls, path: str | Path) -> "Sweep":
        """Reads a sweep file.

        Raises:
            ValueError: if a key is missing, unknown or invalid.
        """
        values = read_yaml(path)
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{path} has the unknown key {unknown[0]!r}; the keys of a sweep are {', '.join(known)}.")
        if missing := sorted({"recipe", "figures", "seeds"} - set(values)):
            raise ValueError(f"{path} has no {missing[0]!r}; a sweep needs it.")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def points(self) -> list[dict[str, Any]]:
        """Combinations of the grid, the last name changing fastest."""
        return [dict(zip(self.grid, values)) for values in itertools.product(*self.grid.values())]

    def runs(self) -> list[SweepRun]:
        """All runs, those of one seed together."""
        runs = []
        for seed, (variant, own), point in itertools.product(self.seeds, self.variants.items(), self.points()):
            parts = [variant, *(f"{name}-{value}" for name, value in point.items()), f"seed-{seed}"]
            settings = {**self.settings, **own, **point, "seed": seed}
            runs.append(
                SweepRun(
                    name="-".join(re.sub(r"[^\w.]+", "-", part).strip("-") for part in parts if part),
                    variant=variant,
                    point=point,
                    seed=seed,
                    settings={key: _with_seed(value, seed) for key, value in settings.items()},
                )
            )
        return runs


def _with_seed(value: Any, seed: int) -> Any:
    if isinstance(value, list):
        return [_with_seed(one, seed) for one in value]
    return value.replace("{seed}", str(seed)) if isinstance(value, str) else value


def _words_in(key: Any) -> Iterator[str]:
    """The words of a key of `summary.json`, or of a place in it; nothing of what is neither."""
    if isinstance(key, str):
        yield key
    elif isinstance(key, list):
        for one in key:
            for word in one.values() if isinstance(one, dict) else [one]:
                yield from _words_in(word)


def _of_system(key: Any, system: str) -> Any:
    """A key of `summary.json`, or a place in it, with the name of a system in place of `{system}`."""
    if isinstance(key, str):
        return key.replace("{system}", system)
    if isinstance(key, list):
        return [_of_system(one, system) for one in key]
    if isinstance(key, dict):
        return {name: _of_system(one, system) for name, one in key.items()}
    return key


def _has(summary: dict[str, Any], key: str | list) -> bool:
    return key in summary if isinstance(key, str) else _result(summary, key) is not None


def _result(summary: dict[str, Any], key: str | list) -> Any:
    """What a summary has for a key or at a place; `None` if there is nothing."""
    if isinstance(key, str):
        return summary.get(key)
    try:
        return number_at(summary, key)
    except ValueError:
        return None


def run_sweep(
    sweep: Sweep, recipe: str | Path, folder: str | Path, jobs: int = 1, resume: bool = False
) -> dict[str, str]:
    """Starts all runs that are not finished, each in a process of its own.

    Args:
        sweep (`Sweep`): The sweep.
        recipe (`str` or `Path`): Name of a recipe of the package, with or without `.py`, or path of a script.
        folder (`str` or `Path`): Output folder: `runs/NAME/` of each run, and `logs/NAME.txt` with its output.
        jobs (`int`): Number of runs at a time; they share the cores of the CPU, or the memory of the GPU.
        resume (`bool`): Whether to continue the sweep in the folder.

    Returns:
        `dict[str, str]`: last line of the output of each failed run.

    Raises:
        ValueError: if the recipe does not exist, or the folder holds another sweep.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")
    if not _is_of_package(recipe) and not Path(recipe).is_file():
        raise ValueError(f"recipe {recipe} of the sweep does not exist; name one of {', '.join(JOBS)}, or a path.")
    folder = _checked_folder(sweep, folder, resume)
    waiting = [run for run in sweep.runs() if not (folder / "runs" / run.name / SUMMARY).is_file()]
    threads = max(1, num_cores() // jobs)
    starter = process_context([__name__])
    running: dict[int, tuple[SweepRun, BaseProcess]] = {}
    failed: dict[str, str] = {}
    try:
        with tqdm(total=len(waiting), desc="runs") as bar:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    flags = _flags(run, folder / "runs" / run.name, threads)
                    process = starter.Process(target=_run_script, args=(str(recipe), flags, str(_log(folder, run))))
                    process.start()
                    running[process.sentinel] = run, process
                for sentinel in wait(list(running)):
                    run, process = running.pop(sentinel)
                    process.join()
                    if process.exitcode:
                        failed[run.name] = _last_line(_log(folder, run)) or f"exit status {process.exitcode}"
                    bar.set_postfix_str(run.name)
                    bar.update()
    finally:
        for _, process in running.values():
            process.terminate()
    return failed


def _log(folder: Path, run: SweepRun) -> Path:
    return folder / "logs" / f"{run.name}.txt"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def _checked_folder(sweep: Sweep, folder: str | Path, resume: bool) -> Path:
    """Checks the folder, and writes the sweep file to it."""
    path = Path(folder) / SWEEP
    if path.is_file() and resume:
        before = Sweep.load(path)
        for key in ("recipe", "settings"):
            if getattr(before, key) != getattr(sweep, key):
                raise ValueError(f"{folder} holds a sweep with other {key}; name another folder.")
        for name in before.variants.keys() & sweep.variants.keys():
            if before.variants[name] != sweep.variants[name]:
                raise ValueError(f"{folder} holds a sweep with another variant {name!r}; rename the variant.")
    elif resume and path.parent.is_dir() and any(path.parent.iterdir()):
        raise ValueError(f"output_dir {folder} holds no {SWEEP} that can be resumed; name another folder.")
    else:
        check_output_dir(folder, {}, resume=False)
    for name in ("runs", "logs"):
        (Path(folder) / name).mkdir(parents=True, exist_ok=True)
    write_yaml(path, vars(sweep))
    return Path(folder)


def _flags(run: SweepRun, folder: Path, threads: int) -> list[str]:
    settings = {"cpu_threads": threads, "disable_tqdm": True, **run.settings, "output_dir": str(folder)}
    if folder.is_dir() and any(folder.iterdir()):
        settings["resume"] = True
    words = []
    for key, value in settings.items():
        if value is not None:
            text = [json.dumps(value)] if isinstance(value, dict) else [str(v) for v in _as_list(value)]
            words += [f"--{key}", *text]
    return words


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _is_of_package(recipe: str | Path) -> bool:
    return str(recipe).removesuffix(".py") in JOBS


def _run_script(recipe: str, argv: list[str], log: str) -> None:
    """Runs a recipe as `hf-attn NAME …` would, or a script as `python RECIPE …`, with its output in a file."""
    with open(log, "a", encoding="utf-8") as file:
        # Output of C libraries goes there, too.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        if _is_of_package(recipe):
            run_of_package([recipe.removesuffix(".py"), *argv])
        else:
            sys.argv = [recipe, *argv]
            sys.path.insert(0, str(Path(recipe).parent))
            runpy.run_path(recipe, run_name="__main__")


def collect(sweep: Sweep, folder: str | Path) -> list[dict[str, Any]]:
    """Results of all finished runs.

    Args:
        sweep (`Sweep`): The sweep.
        folder (`str` or `Path`): Its output folder.

    Returns:
        `list[dict]`: one per run and system: `variant`, the names of the grid, `system`, `seed`, and the results by
        their headings (`None` if the run lacks one).

    Raises:
        ValueError: if no run is finished, no summary has one of the keys, or a value is not a number.
    """
    summaries = {}
    for run in sweep.runs():
        path = Path(folder) / "runs" / run.name / SUMMARY
        if path.is_file():
            [summaries[run.name]] = read_summaries([path.parent])
    if not summaries:
        raise ValueError(f"{folder} holds no finished run of the sweep.")
    if sweep.best is not None:
        add_ratio_to_best(sweep, summaries)
    for key in sweep.figures.values():
        places = [_of_system(key, system) for system in sweep.systems]
        if not any(_has(summary, place) for summary in summaries.values() for place in places):
            raise ValueError(
                f"{folder}: figures of the sweep name {key!r}, which no summary has; correct the file, and make the "
                "table with --tables_only."
            )
    rows = [
        {
            "variant": run.variant,
            **run.point,
            "system": system,
            "seed": run.seed,
            **{
                heading: _result(summaries[run.name], _of_system(key, system))
                # A result of the whole run stands in the row of its first system.
                if any("{system}" in word for word in _words_in(key)) or system == sweep.systems[0]
                else None
                for heading, key in sweep.figures.items()
            },
        }
        for run in sweep.runs()
        if run.name in summaries
        for system in sweep.systems
    ]
    for row, heading in itertools.product(rows, sweep.figures):
        if not isinstance(row[heading], (int, float, NoneType)):
            raise ValueError(f"{folder}: {heading!r} of the sweep must be a number, got {row[heading]!r}.")
    return rows


def add_ratio_to_best(sweep: Sweep, summaries: dict[str, dict]) -> None:
    """Adds `step_ratio_to_best` to summaries: how soon a run reaches the best loss of another system.

    Within a variant, the grid point is found at which `best["loss"]`, the final loss of the other system, has the
    smallest mean over seeds, among the points with the most finished seeds. The ratio is the step of the first entry
    of `best["curve"]` at or below that loss of the same seed, over `steps`; `None` if it is never reached.
    """
    runs = {run.name: run for run in sweep.runs() if run.name in summaries}
    for variant in sweep.variants:
        finals: dict[tuple, dict[int, float]] = {}
        for name, run in runs.items():
            loss = summaries[name].get(sweep.best["loss"])
            if run.variant == variant and loss is not None and math.isfinite(loss):
                finals.setdefault(tuple(run.point.values()), {})[run.seed] = loss
        if not finals:
            continue
        most = max(map(len, finals.values()))
        best = min((f for f in finals.values() if len(f) == most), key=lambda f: statistics.fmean(f.values()))
        for name, run in runs.items():
            if run.variant == variant and run.seed in best:
                curve = summaries[name].get(sweep.best["curve"]) or []
                step = next((step for step, loss in curve if loss <= best[run.seed]), None)
                summaries[name][RATIO_TO_BEST] = None if step is None else step / summaries[name]["steps"]


def over_seeds(sweep: Sweep, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and sample standard deviation over seeds.

    Args:
        sweep (`Sweep`): The sweep.
        rows (`list[dict]`): See [`collect`].

    Returns:
        `list[dict]`: the rows without `seed`; a result is `[mean, sd, number of seeds]`, or `None` if no run has it.
        The sd of one seed is `None`. Values that are not finite, such as the loss of a diverged run, are left out.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in ("variant", *sweep.grid, "system")), []).append(row)
    means = []
    for members in groups.values():
        mean = {key: members[0][key] for key in ("variant", *sweep.grid, "system")}
        for heading in sweep.figures:
            values = [row[heading] for row in members if row[heading] is not None and math.isfinite(row[heading])]
            spread = statistics.stdev(values) if len(values) > 1 else None
            mean[heading] = [statistics.fmean(values), spread, len(values)] if values else None
        means.append(mean)
    return means


def table(sweep: Sweep, means: list[dict[str, Any]]) -> str:
    """The means as Markdown, `mean ± sd`, with the number of runs in brackets if seeds are missing."""
    names = [name for name in ("variant", *sweep.grid, "system") if any(row[name] != "" for row in means)]
    body = [
        [
            *(str(row[name]) for name in names),
            *(_spread(row[h], sweep.digits, len(sweep.seeds)) for h in sweep.figures),
        ]
        for row in means
    ]
    return format_table([*(name.replace("_", " ") for name in names), *sweep.figures], body)


def _spread(value: list | None, digits: int, seeds: int) -> str:
    if value is None:
        return "–"
    mean, spread, count = value
    text = f"{mean:,.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
    return text if count == seeds else f"{text} ({count} of {seeds})"
