import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hf_attn_dynamics.recipes import JOBS
from hf_attn_dynamics.recipes import sweep as sweep_recipe
from hf_attn_dynamics.recipes.arguments.sweep import SweepArguments
from hf_attn_dynamics.recipes.sweeps import Sweep, collect, over_seeds, run_sweep, table


ROOT = Path(__file__).parents[1]


# A recipe whose figures follow from its flags; it dies at a rate of 7, and counts how often it was started.
RECIPE = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
for name in ("output_dir", "rate", "seed", "text", "resume", "cpu_threads", "disable_tqdm"):
    parser.add_argument("--" + name)
args = parser.parse_args()
folder = pathlib.Path(args.output_dir)
folder.mkdir(parents=True, exist_ok=True)
(folder / "started.txt").open("a").write(f"resume={args.resume}\\n")
rate, seed = float(args.rate), int(args.seed)
print("on standard output")
if rate == 7:
    raise RuntimeError("a rate of 7 cannot be")
summary = {"loss_a": rate + seed, "loss_b": 10 * rate, "text": args.text}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def definition(**changes):
    values = {"recipe": "recipe.py", "figures": {"loss": "loss_{system}"}, "seeds": [1, 2], "systems": ["a", "b"]}
    return {**values, "grid": {"rate": [1, 2]}, **changes}


def test_runs_are_all_combinations_with_names_of_their_own():
    sweep = Sweep(**definition(variants={"plain": {}, "λ = 1/2": {"text": "of {seed}"}}, settings={"text": "x"}))
    runs = sweep.runs()
    assert len(runs) == len({run.name for run in runs}) == 8
    assert runs[0].name == "plain-rate-1-seed-1"
    assert runs[3].name == "λ-1-2-rate-2-seed-1"
    assert runs[3].settings == {"text": "of 1", "rate": 2, "seed": 1}
    assert [run.seed for run in runs] == [1] * 4 + [2] * 4


def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path, recipe):
    sweep = Sweep(**definition(grid={"rate": [1, 7, 2]}, seeds=[1]))
    failed = run_sweep(sweep, recipe, tmp_path / "sweep", jobs=2)
    assert failed == {"rate-7-seed-1": "RuntimeError: a rate of 7 cannot be"}
    assert [row["loss"] for row in collect(sweep, tmp_path / "sweep")] == [2.0, 10.0, 3.0, 20.0]
    assert "on standard output" in (tmp_path / "sweep/logs/rate-1-seed-1.txt").read_text()


def test_going_on_makes_what_is_missing_alone(tmp_path, recipe):
    folder = tmp_path / "sweep"
    run_sweep(Sweep(**definition(grid={"rate": [1, 7]}, seeds=[1])), recipe, folder)
    # Another seed is added, and the rate that was not possible left out.
    sweep = Sweep(**definition(grid={"rate": [1]}, seeds=[1, 2]))
    assert run_sweep(sweep, recipe, folder, resume=True) == {}
    assert (folder / "runs/rate-1-seed-1/started.txt").read_text() == "resume=None\n"
    assert (folder / "runs/rate-1-seed-2/summary.json").is_file()
    run_sweep(Sweep(**definition(grid={"rate": [7]}, seeds=[1])), recipe, folder, resume=True)
    assert (folder / "runs/rate-7-seed-1/started.txt").read_text() == "resume=None\nresume=True\n"


def test_a_sweep_that_is_stopped_stops_its_runs(tmp_path, recipe):
    started, ended = tmp_path / "started", tmp_path / "ended"
    wait = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
    recipe.write_text(f"{wait}; pathlib.Path({str(ended)!r}).touch()")
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(definition(recipe=str(recipe))))
    command = [sys.executable, str(ROOT / "recipes/sweep.py"), str(path), "--output_dir", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, start_new_session=True, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    # Of the session, only this process is sent the signal; a terminal sends it to all.
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 128 + signal.SIGINT
    assert said[-1] == "sweep.py: stopped; the same command with --resume true continues."
    # Nothing of the session that it began is left.
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("a run goes on")
    assert not ended.exists()


def write_summaries(folder, sweep, summary):
    for run in sweep.runs():
        path = folder / "runs" / run.name / "summary.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(summary(run)))


def test_the_table_has_means_and_sample_deviations(tmp_path):
    figures = {"loss": "loss_{system}", "steps": "steps"}
    sweep = Sweep(**definition(figures=figures, seeds=[1, 2, 3], digits=2))
    losses = {1: [1.0, 2.0, 3.0], 2: [4.0, 4.0, 4.0]}
    write_summaries(
        tmp_path, sweep, lambda run: {"loss_a": losses[run.point["rate"]][run.seed - 1], "loss_b": 5.0, "steps": 7}
    )
    (tmp_path / "runs/rate-2-seed-3/summary.json").unlink()
    means = over_seeds(sweep, collect(sweep, tmp_path))
    assert means[0] == {"variant": "", "rate": 1, "system": "a", "loss": [2.0, 1.0, 3], "steps": [7, 0, 3]}
    assert table(sweep, means).splitlines() == [
        "| rate | system | loss                 | steps                |",
        "|------|--------|----------------------|----------------------|",
        "| 1    | a      | 2.00 ± 1.00          | 7.00 ± 0.00          |",
        "| 1    | b      | 5.00 ± 0.00          | –                    |",
        "| 2    | a      | 4.00 ± 0.00 (2 of 3) | 7.00 ± 0.00 (2 of 3) |",
        "| 2    | b      | 5.00 ± 0.00 (2 of 3) | –                    |",
    ]


def test_a_run_that_has_diverged_is_missing_in_the_mean(tmp_path):
    sweep = Sweep(**definition(seeds=[1, 2, 3, 4], systems=["a"], grid={}))
    losses = {1: 1.0, 2: float("nan"), 3: 3.0, 4: float("inf")}
    write_summaries(tmp_path, sweep, lambda run: {"loss_a": losses[run.seed]})
    [mean] = over_seeds(sweep, collect(sweep, tmp_path))
    assert mean["loss"] == [2.0, pytest.approx(2**0.5), 2]
    assert "2.000 ± 1.414 (2 of 4)" in table(sweep, [mean])


def test_a_figure_may_be_a_place_in_the_rows_of_a_summary(tmp_path):
    place = ["rows", {"method": "{system}", "heads": 12}, "bleu"]
    sweep = Sweep(**definition(figures={"BLEU": place, "all heads": "bleu_dense"}, grid={}, seeds=[1]))
    rows = [{"method": method, "heads": heads, "bleu": heads + place} for place, method in enumerate("ab")
            for heads in (24, 12)]  # fmt: skip
    write_summaries(tmp_path, sweep, lambda run: {"rows": rows, "bleu_dense": 30.0})
    found = [(row["system"], row["BLEU"], row["all heads"]) for row in collect(sweep, tmp_path)]
    assert found == [("a", 12, 30.0), ("b", 13, None)]
    # A run may lack one of the systems, but not all runs all of them.
    write_summaries(tmp_path / "some", sweep, lambda run: {"rows": rows[:2], "bleu_dense": 30.0})
    assert [row["BLEU"] for row in collect(sweep, tmp_path / "some")] == [12, None]
    write_summaries(tmp_path / "none", sweep, lambda run: {"rows": [], "bleu_dense": 30.0})
    with pytest.raises(ValueError, match="which no summary has"):
        collect(sweep, tmp_path / "none")


def test_one_seed_has_no_deviation(tmp_path):
    sweep = Sweep(**definition(seeds=[4], systems=["a"], grid={}))
    write_summaries(tmp_path, sweep, lambda run: {"loss_a": 1.5})
    assert table(sweep, over_seeds(sweep, collect(sweep, tmp_path))).splitlines()[-1] == "| a      | 1.500 |"


def test_the_ratio_to_the_best_is_that_of_the_best_point_in_the_mean_and_the_same_seed(tmp_path):
    best = {"loss": "loss_b", "curve": "curve_a"}
    sweep = Sweep(**definition(figures={"ratio": "step_ratio_to_best"}, systems=["a"], best=best))
    # Rate 1 has the lowest single loss, rate 2 the lowest mean.
    finals = {(1, 1): 1.0, (1, 2): 9.0, (2, 1): 2.0, (2, 2): 3.0}
    curve = [[10, 4.0], [20, 3.0], [30, 2.5]]
    write_summaries(
        tmp_path, sweep, lambda r: {"loss_b": finals[r.point["rate"], r.seed], "curve_a": curve, "steps": 40}
    )
    ratios = {(row["rate"], row["seed"]): row["ratio"] for row in collect(sweep, tmp_path)}
    assert ratios == {(1, 1): None, (2, 1): None, (1, 2): 0.5, (2, 2): 0.5}
    # A point with fewer seeds is no candidate, whatever its loss, and neither is one that diverged.
    of_run = tmp_path / "runs/rate-2-seed-1/summary.json"
    of_run.write_text(json.dumps({**json.loads(of_run.read_text()), "loss_b": math.nan}))
    ratios = {(row["rate"], row["seed"]): row["ratio"] for row in collect(sweep, tmp_path)}
    assert (ratios[1, 2], ratios[2, 2]) == (0.25, 0.25)
    of_run.unlink()
    ratios = {(row["rate"], row["seed"]): row["ratio"] for row in collect(sweep, tmp_path)}
    assert ratios == {(1, 1): None, (1, 2): 0.25, (2, 2): 0.25}


def test_the_recipe_leaves_tables_and_a_picture(tmp_path, recipe, capsys):
    path = tmp_path / "sweep.yaml"
    heat_map = {"figure": "loss_{system}", "rows": ["rate"], "columns": ["other"]}
    values = definition(recipe=str(recipe), grid={"rate": [1, 2], "other": [None]}, heat_map=heat_map)
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    text = sweep_recipe.main(SweepArguments(sweep=str(path), output_dir=str(tmp_path / "out"), jobs=2))
    assert (tmp_path / "out/table.md").read_text() == text + "\n"
    assert (tmp_path / "out/runs.csv").read_text().splitlines()[:2] == [
        "variant,rate,other,system,seed,loss",
        ",1,,a,1,2.0",
    ]
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["runs"], summary["failed"]) == (4, 0)
    for name in ("heat_map.png", "heat_map.svg", "sweep.yaml"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    # As a run that was stopped.
    (tmp_path / "out/runs/rate-2-other-None-seed-1/summary.json").unlink()
    before = (tmp_path / "out/table.md").stat().st_mtime_ns
    sweep_recipe.main(SweepArguments(sweep=str(path), output_dir=str(tmp_path / "out"), tables_only=True))
    assert (tmp_path / "out/table.md").stat().st_mtime_ns > before
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["runs"], summary["failed"]) == (3, 1)
    assert (tmp_path / "out/runs/rate-1-other-None-seed-1/started.txt").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": None}, "seeds of a sweep must be a list"),
        ({"seeds": []}, "seeds of a sweep must be a list"),
        ({"seeds": [1, 1]}, "would be called 'rate-1-seed-1'"),
        ({"grid": {"rate": 1}}, "grid of a sweep must list values, got rate: 1"),
        ({"variants": {"x": {"rate": 1}}}, "rate is in the grid of a sweep and in its variant 'x'"),
        ({"variants": {"x": 1}}, "variants of a sweep must be flags with values, got x: 1"),
        ({"variants": {"a b": {}, "a-b": {}}}, "would be called 'a-b-rate-1-seed-1'"),
        ({"best": {"loss": "x"}}, "best of a sweep takes the keys curve, loss"),
        (
            {"heat_map": {"figure": "loss_{system}", "rows": ["size"], "columns": []}},
            "names 'size', which is not in the grid: rate",
        ),
        (
            {"heat_map": {"figure": "loss_{system}", "rows": "rate", "columns": []}},
            "heat_map rows must be a list of names in the grid, got 'rate'",
        ),
        (
            {"heat_map": {"figure": "loss", "rows": ["rate"], "columns": []}},
            "heat_map shows 'loss', which is not among the figures of the sweep: loss_{system}",
        ),
        ({"figures": {"loss": 3}}, "figures of a sweep must be keys of summary.json, in braces at most {system}, got"),
        ({"figures": {"loss": "x_{foo}"}}, "got loss: 'x_{foo}'"),
        ({"figures": {"loss": ["rows", {"method": "{foo}"}, "x"]}}, "got loss: ['rows', {'method': '{foo}'}, 'x']"),
        ({"figures": {"loss": []}}, "got loss: []"),
        (
            {"figures": {"text": "text"}, "settings": {"text": "x"}},
            "'text' of the sweep must be a number, got 'x'",
        ),
        ({"digits": -1}, "digits of a sweep must be a number from 0, got -1"),
        ({"recipes": "x"}, "unknown key 'recipes'"),
        ({"recipe": None}, "recipe of a sweep must name a script"),
        ({"recipe": "nowhere.py"}, "recipe nowhere.py of the sweep does not exist"),
        ({"figures": {"loss": "los_{system}"}}, "'los_{system}', which no summary has; correct the file, and make"),
    ],
)
def test_bad_sweeps_are_refused_in_one_line(tmp_path, recipe, capsys, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(definition(**changes)))
    with pytest.raises(SystemExit) as stop:
        sweep_recipe.main(SweepArguments(sweep=str(path), output_dir=str(tmp_path / "out")))
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


@pytest.mark.parametrize("text", ["a: [", "just words", "seeds: [1]\nrecipe: x.py"])
def test_files_that_are_no_sweep_are_refused_by_name(tmp_path, text):
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(ValueError, match="sweep.yaml"):
        Sweep.load(tmp_path / "sweep.yaml")


def test_a_folder_with_another_sweep_is_refused(tmp_path, recipe):
    sweep = Sweep(**definition())
    run_sweep(sweep, recipe, tmp_path / "sweep")
    with pytest.raises(ValueError, match="already holds files"):
        run_sweep(sweep, recipe, tmp_path / "sweep")
    with pytest.raises(ValueError, match="other settings"):
        run_sweep(Sweep(**definition(settings={"text": "x"})), recipe, tmp_path / "sweep", resume=True)
    with pytest.raises(ValueError, match="another variant ''"):
        run_sweep(Sweep(**definition(variants={"": {"text": "x"}})), recipe, tmp_path / "sweep", resume=True)
    with pytest.raises(ValueError, match="jobs must be at least 1"):
        run_sweep(sweep, recipe, tmp_path / "sweep", jobs=0, resume=True)
    (tmp_path / "sweep/sweep.yaml").unlink()
    with pytest.raises(ValueError, match="holds no sweep.yaml that can be resumed; name another folder"):
        run_sweep(sweep, recipe, tmp_path / "sweep", resume=True)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes/sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_sweeps_that_are_shipped_can_be_read(path):
    sweep = Sweep.load(path)
    assert sweep.recipe.removesuffix(".py") in JOBS
