# Licensed under the Apache License, Version 2.0.
"""Benchmarks: what they compare does the same work; flags, refusals and summaries."""

import dataclasses
import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import padded_batch, ragged_sentences, stock_config, vivid
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from hf_attn_dynamics.data import train_byte_level_bpe
from hf_attn_dynamics.models.cost_table import CostTable
from hf_attn_dynamics.recipes.arguments.parsing import parse_yaml_or_flags
from hf_attn_dynamics.recipes.run import flags_of


FOLDER = Path(__file__).parents[2] / "recipes" / "benchmarks"
sys.path.append(str(FOLDER))
import analysis  # noqa: E402
import attribution_cost  # noqa: E402
import benchmarking  # noqa: E402
import distillation  # noqa: E402
import guidance  # noqa: E402


NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "benchmarking")


@functools.cache
def load(name):
    """A benchmark as a module of another name, since some of the test suite's own modules are called alike."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(name, *words):
    [flags] = flags_of(load(name).main)
    return parse_yaml_or_flags(flags, argv=list(words))[0]


@pytest.mark.parametrize("name", NAMES)
def test_benchmarks_have_the_flags_of_recipes(name):
    [flags] = flags_of(load(name).main)
    fields = [one for one in dataclasses.fields(flags) if one.init]
    assert {"output_dir", "seed", "cpu_threads", "rounds"} <= {one.name for one in fields}
    assert all(one.metadata["help"].endswith(".") for one in fields)
    assert parse(name, "--threads", "3").cpu_threads == 3


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("analysis", ["--files", "a", "b"], {"data": ["a", "b"]}),
        ("attribution", ["--layers", "2", "--width", "64"], {"num_hidden_layers": 2, "hidden_size": 64}),
        ("pruned_latency", ["--model_name", "m", "--output", "o.json"], {"model": "m", "output_dir": "o.json"}),
        ("relevance", ["--batch", "3"], {"batch_size": 3}),
        ("stacked_runs", ["--seeds", "2"], {"num_seeds": 2}),
    ],
)
def test_earlier_names_of_flags_stay_valid(name, words, expected):
    args = parse(name, *words)
    assert {key: getattr(args, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("alignment", ["--source_file", "a"], "give source_file and target_file, or neither"),
        ("attribution", ["--length", "3"], "length must be at least 4"),
        ("guidance", ["--architecture", "mistral", "--num_attention_heads", "4"], "must be a multiple of 3, got 4"),
        ("guidance", ["--lenghts", "4"], "there is no flag --lenghts; did you mean --lengths?"),
        ("guidance", ["--systems", "triton"], "systems must contain plain, which the others are compared with"),
        ("guidance", ["--dtype", "half"], "dtype must be float32 or bfloat16, got 'half'"),
        ("idle_call", ["--rounds", "0"], "rounds must be at least 1, got 0"),
        ("latency_table", ["--points", "1"], "points must be at least 2, got 1"),
        ("latency_table", ["--shapes", "128"], "shapes must be like 8x128, sentences and tokens, got '128'"),
        ("pruned_latency", ["--keep", "36", "80"], "keep must be a number of heads from 1 to 72, got 80"),
        ("pruned_latency", ["--shapes", "8x"], "shapes must be like 8x128, sentences and tokens, got '8x'"),
        ("relevance", ["--device", "gpu"], "device must be auto, cpu or cuda, got 'gpu'"),
        ("seq2seq", ["--steps", "0"], "steps must be at least 1, got 0"),
        ("stacked_runs", ["--output_dir", str(FOLDER)], "already holds files; name another folder."),
        ("stacked_runs", ["--output_dir", __file__], "is a file; name a folder"),
    ],
)
def test_bad_flags_of_benchmarks_are_refused_in_one_line(name, words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(name, *words)
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_summaries_keep_the_earliest_names_of_flags_as_keys(tmp_path, capsys):
    sizes = ["--lengths", "4", "--hidden_size", "64", "--num_hidden_layers", "1", "--batch_size", "2"]
    args = parse("relevance", *sizes, "--rounds", "1", "--output_dir", str(tmp_path / "out"))
    summary = load("relevance").main(args)
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    expected = {"threads": 1, "batch": 2, "rounds": 1, "lengths": [4], "seed": 0, "device": "cpu"}
    assert {key: summary[key] for key in expected} == expected
    assert "torch_version" in summary
    assert "output_dir" not in summary
    [row] = summary["rows"]
    assert row["seconds_ratio"] > 0
    assert f"{row['error_ratio']:.3f}" in capsys.readouterr().out


def test_a_summary_goes_to_the_file_that_output_names(tmp_path):
    path = tmp_path / "found.json"
    args = parse("pruned_latency", "--keep", "9", "--shapes", "1x4", "--rounds", "1", "--output", str(path))
    load("pruned_latency").main(args)
    [row] = json.loads(path.read_text())["rows"]
    assert (row["model"], row["batch"], row["length"]) == ("12% of 72 heads", 1, 4)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_attributions_are_ranked_by_their_faithfulness(kind, tmp_path, capsys):
    tokenizer = train_byte_level_bpe(["the cat sat on the mat", "the dog ran"], 300, kind="bert")
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "encoder":
        model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=8))
    else:
        padding = tokenizer.pad_token_id
        model = LlamaForSequenceClassification(LlamaConfig(**sizes, intermediate_size=8, pad_token_id=padding))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "text.tsv").write_text("the cat sat on the mat\t1\nthe dog ran\t0\nthe cat ran\t1\n")
    words = ["--model", tmp_path / "model", "--data", tmp_path / "text.tsv", "--batch_size", "2", "--steps", "3"]
    module = load("attribution_faithfulness")
    summary = module.main(parse("attribution_faithfulness", *map(str, words), "--output_dir", str(tmp_path / "out")))
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert summary["left_out"].keys() == (set() if kind == "encoder" else {"globenc", "decompx"})
    assert {row["method"] for row in summary["rows"]} == module.METHODS.keys() - summary["left_out"].keys()
    gaps = [row["gap"] for row in summary["rows"]]
    assert gaps == sorted(gaps, reverse=True)
    assert all(row["seconds"] > 0 for row in summary["rows"])
    assert summary["texts"] == 3
    assert (tmp_path / "out" / "faithfulness.png").is_file()
    assert (tmp_path / "out" / "faithfulness.plot.json").is_file()
    assert "attn_lrp: gap" in capsys.readouterr().out


def test_the_cost_of_attributions_is_measured_until_they_take_too_long(tmp_path, capsys):
    # Imported by its own name, so that the processes that measure memory find it.
    sizes = {"lengths": [4, 8], "hidden_size": 64, "num_hidden_layers": 1, "rounds": 1, "limit": 0.0}
    methods, folder = ["alti", "attn_lrp"], str(tmp_path / "out")
    summary = attribution_cost.main(attribution_cost.CostArguments(methods=methods, output_dir=folder, **sizes))
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    found = {(row["length"], row["method"]) for row in summary["rows"]}
    assert found == {(4, "forward"), (4, "alti"), (4, "attn_lrp"), (8, "forward")}
    for row in summary["rows"]:
        assert row["seconds"] > 0
        assert (row["to_forward"] == 1) or row["method"] != "forward"
        assert row["memory_mb"] >= 0
    assert "to_forward" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"lengths must be at least 2 and ascend, got \[8, 4\]"):
        attribution_cost.CostArguments(lengths=[8, 4])


def test_predicted_and_measured_speedups_are_compared(tmp_path, capsys):
    path = tmp_path / "table.json"
    sizes = ["--shapes", "1x4", "--rounds", "1", "--points", "2", "--models", "2"]
    load("latency_table").main(parse("latency_table", *sizes, "--output_dir", str(path)))
    summary = json.loads(path.read_text())
    assert [row["length"] for row in summary["rows"]] == [4, 4]
    for row in summary["rows"]:
        assert row["measured_over_predicted"] == row["measured"] / row["predicted"]
        assert row["by_flops"] > 1
    assert CostTable.from_dict(summary["tables"]["1x4"]).phase == "forward"
    assert "largest speed-up" in capsys.readouterr().out


def test_systems_take_turns_after_a_warm_up():
    ran = []
    systems = {name: lambda name=name: ran.append(name) for name in "ab"}
    seconds = benchmarking.take_turns(systems, rounds=2, warm_up=1)
    assert "".join(ran) == "ababab"
    assert {name: len(taken) for name, taken in seconds.wall.items()} == {"a": 2, "b": 2}
    assert seconds.cpu.keys() == seconds.wall.keys()
    ran.clear()
    benchmarking.take_turns(systems, rounds=20, order=random.Random(0))
    assert {tuple(ran[turn : turn + 2]) for turn in range(0, 42, 2)} == {("a", "b"), ("b", "a")}


def test_ratios_are_taken_within_a_turn():
    assert benchmarking.median_ratio({"a": [2.0, 30.0, 8.0], "b": [1.0, 10.0, 2.0]}, "a", "b") == 3
    assert benchmarking.medians({"a": [2.0, 30.0, 8.0]}) == {"a": 8}


def test_peak_memory_is_that_of_a_process_of_its_own():
    args = guidance.GuidanceArguments(lengths=[8], tokens=8, hidden_size=24, num_hidden_layers=1)
    elsewhere = benchmarking.in_new_process(benchmarking.peak_of_steps, args, guidance.System, "plain")
    assert 0 < elsewhere < benchmarking.peak_resident_mb()


def test_what_a_teacher_costs_is_measured_on_equal_steps():
    args = distillation.DistillationArguments(
        lengths=[12], tokens=24, hidden_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    ids, weights = benchmarking.token_batch(args, 12), {}
    for name in distillation.SYSTEMS:
        system = distillation.System(name, args, 12)
        system.step(ids)
        weights[name] = torch.cat([weight.detach().flatten() for weight in system.model.parameters()])
    torch.testing.assert_close(weights["taught"], weights["dense"], rtol=0, atol=1e-6)
    # With one layer, its heads are all heads.
    assert torch.equal(weights["all"], weights["taught"])
    assert not torch.allclose(weights["plain"], weights["dense"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("limit", [3, 63])
def test_statistics_of_maps_are_those_that_are_observed(limit):
    model = vivid(BertModel(stock_config("bert"))).eval()
    batches = [padded_batch(ragged_sentences(5, seed)) for seed in range(2)]
    ends = [5, 6, 7, 8, 9]
    seen, found = (analysis.run(name, model, batches, ends, limit) for name in ("observed", "eager"))
    distances = seen["distance"].distances["encoder"]
    expected = {
        "confidence": seen["confidence"]["encoder"],
        "entropy": seen["entropy"]["encoder"],
        "distance": distances[tuple(torch.triu_indices(len(distances), len(distances), 1))],
        "attention": seen["relative_positions"].attention["encoder"],
        "largest": seen["relative_positions"].largest["encoder"],
    }
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        torch.testing.assert_close(found[name].double(), table, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_what_is_measured_on_a_gpu_runs_on_a_cpu_and_continues(tmp_path):
    words = ["bash", str(FOLDER / "gpu.sh"), str(tmp_path / "out")]
    environment = {**os.environ, "TOY": "1", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for name, key in (("guidance", "time_triton_to_plain_24"), ("prefill", "memory_observed_to_plain_24")):
        assert json.loads((tmp_path / "out" / name / "summary.json").read_text())[key] > 0
    again = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert again.stdout.splitlines() == ["guidance: done before", "prefill: done before"]


def test_a_part_that_fails_on_a_gpu_is_named_and_the_others_run(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@" >> "$LOG"\n[ "${1##*/}" != guidance.py ]\n')
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "LOG": str(tmp_path / "commands")}
    words = ["bash", str(FOLDER / "gpu.sh"), str(tmp_path / "out")]
    for turn, commands in enumerate((4, 5)):
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stdout.splitlines()[-1].startswith("failed: guidance; see the logs in ")
        lines = (tmp_path / "commands").read_text().splitlines()
        assert len(lines) == commands, turn
    # Their flags are known.
    for line in lines:
        name, *flags = line.split()
        if name.endswith(".py"):
            flags = ["cpu" if flag == "cuda" else flag for flag in flags[:-1]]
            parse(Path(name).stem, *flags, str(tmp_path / "new"))
