import csv
import json

import pytest

from hf_attn_dynamics.recipes import merge_curves
from hf_attn_dynamics.recipes.arguments.merge_curves import MergeArguments


def write_run(folder, seed, dense, accuracies, **changes):
    folder.mkdir()
    rows = [{"method": method, "heads": heads, "accuracy": value} for (method, heads), value in accuracies.items()]
    summary = {"metric": "accuracy", "heads_total": 72, "text": "t", "train_examples": 5, "eval_examples": 2}
    summary |= {"metric_dense": dense, "seed": seed, "rows": rows, **changes}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_table_has_the_mean_and_deviation_of_the_runs(tmp_path, capsys):
    runs = [
        write_run(tmp_path / "a", 1, 0.9, {("gates", 36): 0.88, ("gates", 9): 0.8, ("random", 9): 0.5}),
        write_run(tmp_path / "b", 2, 0.92, {("gates", 36): 0.9, ("gates", 9): 0.84, ("random", 9): 0.7}),
    ]
    merge_curves.main(MergeArguments(runs=list(map(str, runs)), output_dir=str(tmp_path / "out")))
    table = capsys.readouterr().out
    assert [line.split("|")[1:5] for line in table.splitlines()[2:]] == [
        [" dense    ", " 91.0 ± 1.4 ", " –          ", " –           "],
        [" gates    ", " –          ", " 89.0 ± 1.4 ", " 82.0 ± 2.8  "],
        [" random   ", " –          ", " –          ", " 60.0 ± 14.1 "],
    ]
    assert (tmp_path / "out" / "table.md").read_text().strip() == table.strip()
    assert len((tmp_path / "out" / "curve.csv").read_text().splitlines()) == 9
    assert (tmp_path / "out" / "curve.png").stat().st_size


def test_speedups_have_lines_of_their_own(tmp_path, capsys):
    runs = []
    for seed, better in ((1, 0.0), (2, 0.02)):
        rows = [
            {"method": "gates", "target": 2.0, "speedup": 2.1 + better, "heads": 30, "accuracy": 0.88 + better},
            {"method": "fisher", "target": 2.0, "speedup": 2.0, "heads": 25 + seed, "accuracy": 0.87,
             "accuracy_untrained": 0.6 + better},
        ]  # fmt: skip
        more = {"rows": rows, "target_speedup": [2.0], "latency_batch": 8, "latency_length": 128}
        runs.append(write_run(tmp_path / str(seed), seed, 0.9, {}, **more))
    merge_curves.main(MergeArguments(runs=list(map(str, runs)), output_dir=str(tmp_path / "out")))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["method", "target", "measured speed-up", "accuracy", "accuracy, untrained"]
    assert lines[2:] == [
        ["dense", "1 ×", "1.00", "90.0 ± 0.0", "–"],
        ["gates", "2 ×", "2.11 ± 0.01", "89.0 ± 1.4", "–"],
        ["fisher", "2 ×", "2.00 ± 0.00", "87.0 ± 0.0", "61.0 ± 1.4"],
    ]
    with open(tmp_path / "out" / "curve.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["method"], row["speedup"]) for row in rows[:2]] == [
        ("1", "dense", "1.0"),
        ("1", "gates", "2.1"),
    ]
    drawn = json.loads((tmp_path / "out" / "curve.plot.json").read_text())
    assert drawn["plot"] == "plot_speedup_curve"
    assert drawn["arguments"]["title"] == "t; 2 seeds; batch 8 × 128 tokens"


def test_perplexity_is_no_share(tmp_path, capsys):
    rows = [{"method": "gates", "heads": 2, "perplexity": 90.0}]
    run = write_run(tmp_path / "a", 1, 81.25, {}, metric="perplexity", rows=rows)
    merge_curves.main(MergeArguments(runs=[str(run)], output_dir=str(tmp_path / "out")))
    table = capsys.readouterr().out
    assert "| dense      | 81.2     | –       |" in table
    assert "| gates      | –        | 90.0    |" in table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "u"}, "the same text, but it is 't' in the first run and 'u' in"),
        ({"heads_total": 12}, "the same heads_total, but it is 72 in the first run and 12"),
        ({"target_speedup": [2.0]}, "the same target_speedup, but it is None in the first run and [2.0] in"),
        ({"latency_batch": 1}, "the same latency_batch, but it is"),
        ({"parameters_dense": 7}, "the same parameters_dense, but it is"),
        ({"seed": 1}, "runs have the seeds 1, 1; name each seed once"),
    ],
)
def test_runs_that_were_not_made_alike_are_refused(tmp_path, refused, changes, message):
    runs = [write_run(tmp_path / "a", 1, 0.9, {("gates", 9): 0.8})]
    runs.append(write_run(tmp_path / "b", dense=0.9, accuracies={("gates", 9): 0.8}, **{"seed": 2, **changes}))
    with refused(message):
        merge_curves.main(MergeArguments(runs=list(map(str, runs)), output_dir=str(tmp_path / "out")))


@pytest.mark.parametrize(
    ("run", "output", "message"),
    [
        (".", "out", "holds no summary.json of a finished run"),
        ("a", "a/summary.json", "a/summary.json is a file; name a folder"),
        ("a", "a", "a is one of the runs; name another folder"),
        ("a", "a/../a", "a is one of the runs; name another folder"),
    ],
)
def test_places_that_cannot_be_meant_are_refused(tmp_path, refused, run, output, message):
    write_run(tmp_path / "a", 1, 0.9, {("gates", 9): 0.8})
    with refused(message):
        merge_curves.main(MergeArguments(runs=[str(tmp_path / run)], output_dir=str(tmp_path / output)))
