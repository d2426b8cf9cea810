"""The benchmark that compares `prune_heads` with Torch-Pruning, which is no dependency."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from recipe_runs import Recipe

from hf_attn_dynamics.recipes.arguments.parsing import parse_yaml_or_flags


FOLDER = Path(__file__).parents[2] / "recipes" / "benchmarks"
sys.path.append(str(FOLDER))
import torch_pruning_peer as benchmark  # noqa: E402


needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("torch_pruning") is None, reason="Torch-Pruning is not installed"
)
RECIPE = Recipe(
    "prune_heads",
    num_hidden_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    vocab_size=290,
    max_length=16,
    num_train_epochs=1,
    per_device_train_batch_size=8,
    importance="random",
    importance_examples=16,
    latency_batch=2,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that leaves two of eight heads, with texts about cats and dogs."""
    folder = tmp_path_factory.mktemp("peer")
    rows = [f"the {animal} number {i} sat here\t{animal}" for i in range(16) for animal in ("cat", "dog")]
    (folder / "text.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    text = {"train_file": folder / "text.tsv", "validation_file": folder / "text.tsv"}
    RECIPE.run(folder / "run", **text, keep=2, distillation_weight=0.5, hidden_distillation_weight=0.1, seed=3)
    return folder / "run"


def run(folder, *words):
    # The threads of the process, as those of the run before: times are not looked at.
    argv = ["--run", folder, "--shapes", "2x16", "1x8", "--rounds", "2", "--cpu_threads", "1", *words]
    return benchmark.main(parse_yaml_or_flags(benchmark.PeerArguments, argv=list(map(str, argv)))[0])


@needs_peer
def test_both_have_the_same_flops_and_all_models_are_measured(finished, tmp_path, capsys):
    summary = run(finished, "--importance", *benchmark.IMPORTANCE, "--output_dir", tmp_path / "out")
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    dense, ours, *peers = summary["rows"]
    assert [(row["system"], row["method"], row["goal"]) for row in summary["rows"]] == [
        ("dense", "", ""),
        ("package", "random", "2"),
        ("torch_pruning", "taylor", "2"),
        ("torch_pruning", "taylor_global", "2"),
        ("torch_pruning", "magnitude", "2"),
    ]
    assert (dense["heads"], dense["units"], dense["flops_ratio"]) == ([4, 4], [64, 64], 1)
    assert (sum(ours["heads"]), ours["units"]) == (2, [64, 64])
    for row in peers:
        assert ours["flops_ratio"] - 0.05 < row["flops_ratio"] <= ours["flops_ratio"]
        assert sum(row["heads"]) < 8
        assert sum(row["units"]) < 128
        assert row["parameters"] < dense["parameters"]
        assert "size" in row["loading_error"]
        assert 0 <= row["accuracy_untrained"] <= 1
    assert dense["loading_error"] is ours["loading_error"] is None
    for row in summary["rows"]:
        assert 0 <= row["accuracy"] <= 1
        assert row["speedup_2x16"] > 0
        assert row["speedup_1x8"] > 0
    assert (summary["seed"], summary["epochs"], summary["distillation_weight"]) == (3, 2, 0.5)
    assert f"{peers[0]['accuracy']:.3f}" in capsys.readouterr().out


@needs_peer
def test_a_fraction_of_the_flops_is_reached_with_the_hidden_size_that_was(finished):
    row = run(finished, "--flops", "0.6")["rows"][-1]
    assert row["goal"] == "60.0%"
    assert 0.55 < row["flops_ratio"] <= 0.6


@needs_peer
def test_fewer_flops_than_torch_pruning_can_leave_are_refused(finished, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(finished, "--flops", "0.01")
    assert "Torch-Pruning leaves at least" in capsys.readouterr().err


def test_without_torch_pruning_one_line_says_how_to_get_it(finished, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(SystemExit, match="2"):
        run(finished)
    assert "pip install torch-pruning" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--flops", "1.2"], "flops must be greater than 0 and less than 1, got 1.2"),
        (["--importance", "fisher"], "importance must be among taylor, taylor_global, magnitude, got 'fisher'"),
        (["--shapes", "8"], "shapes must be like 8x128, sentences and tokens, got '8'"),
    ],
)
def test_bad_flags_are_refused_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_yaml_or_flags(benchmark.PeerArguments, argv=words)
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_folder_without_a_finished_run_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "import_peer", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path)
    assert "holds no summary.json of a finished run" in capsys.readouterr().err
