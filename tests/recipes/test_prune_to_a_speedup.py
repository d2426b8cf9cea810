"""`prune_heads --target_speedup`: heads, units and blocks are removed until a speed-up is reached."""

import copy
import csv
import dataclasses
import json

import pytest
import torch
from documented import undocumented
from huggingface_hub import ModelCard
from recipe_runs import Recipe
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_attn_dynamics import CostTable, count_flops_table, head_report, headwise_model, prune_units
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.unit_roles import locate_units
from hf_attn_dynamics.recipes import prune_heads, pruning_reports
from hf_attn_dynamics.recipes.arguments.prune_heads import PruneArguments
from hf_attn_dynamics.recipes.prune_heads import PruneTrainingArguments
from hf_attn_dynamics.recipes.pruning_goals import MEASUREMENT_MARGIN, SpeedupGoal
from hf_attn_dynamics.recipes.pruning_reports import Measurements


RECIPE = Recipe(
    "prune_heads",
    num_hidden_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    vocab_size=290,
    max_length=16,
    num_train_epochs=1,
    per_device_train_batch_size=8,
    logging_steps=2,
    importance_examples=16,
    latency_batch=2,
)


def as_seconds(model, batch, length, device=None, progress=True):
    """Stands for the measured table: a second for each FLOP, since times of tiny models are noise."""
    return dataclasses.replace(count_flops_table(model, batch, length), quantity="seconds")


class SlowerThanPredicted(Measurements):
    """Measured speed-ups that are 5 % below the predicted ones."""

    def speedup(self, model):
        dense = headwise_model(self._dense, self._class_name)
        return 0.95 * count_flops_table(dense, *self._shape).speedup_of(model)


@pytest.fixture(scope="module")
def timed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prune_heads, "measure_latency_table", as_seconds)
        patch.setattr(prune_heads, "Measurements", SlowerThanPredicted)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences about cats and dogs."""
    folder = tmp_path_factory.mktemp("text")
    rows = [(f"the {animal} number {i} sat here", animal) for i in range(16) for animal in ("cat", "dog")]
    for name, part in (("train", rows), ("validation", rows[::-1][:12])):
        lines = [f"{sentence}\t{label}" for sentence, label in part]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return {"train_file": folder / "train.tsv", "validation_file": folder / "validation.tsv"}


TAUGHT = {"distillation_weight": 0.5, "hidden_distillation_weight": 0.1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text, timed):
    folder = tmp_path_factory.mktemp("runs") / "faster"
    summary = RECIPE.run(folder, **text, **TAUGHT, target_speedup="1.5 2.5", latency_shapes="1x8", from_scratch="true")
    return folder, summary


def test_the_summary_has_every_figure_and_is_what_was_returned(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert undocumented(prune_heads, summary) == set()
    assert summary["target_speedup"] == [1.5, 2.5]
    assert summary["latency_ratio"] == pytest.approx(1 / summary["rows"][0]["speedup"], rel=1e-12)
    assert (summary["heads_total"], summary["units_total"]) == (8, 128)
    assert 1 < summary["largest_speedup_heads"] < summary["largest_speedup_units"] < summary["largest_speedup_blocks"]


def test_every_way_reaches_every_target(finished):
    folder, summary = finished
    rows = [(row["method"], row["target"]) for row in summary["rows"]]
    ways = ("gates", "fisher", "random", "from scratch")
    assert rows == [(way, target) for way in ways for target in (1.5, 2.5)]
    for row in summary["rows"]:
        # The measured one is at least the target, with a margin for the measurement.
        assert 0.95 * row["predicted_speedup"] >= MEASUREMENT_MARGIN * row["target"] - 1e-9
        # Not much further than asked for: the smallest part is a unit or a head.
        assert 0.95 * row["predicted_speedup"] < 1.35 * row["target"]
        assert row["speedup"] > 0
        assert row["speedup_1x8"] > 0
        assert ("accuracy_untrained" in row) == (row["method"] in ("fisher", "random"))
    with open(folder / "curve.csv") as file:
        table = list(csv.DictReader(file))
    assert [(row["method"], float(row["target"])) for row in table] == [("dense", 1.0), *rows]
    for picture in ("curve", "parts", "gates", "gate_history"):
        for suffix in (".png", ".svg"):
            assert (folder / (picture + suffix)).stat().st_size


def test_the_saved_models_are_those_that_were_measured(finished):
    folder, summary = finished
    table = CostTable.load(folder / "latency_table.json")
    for name, target in (("model-1.5x", 1.5), ("model-2.5x", 2.5)):
        model = AutoModelForSequenceClassification.from_pretrained(folder / name)
        row = next(row for row in summary["rows"] if (row["method"], row["target"]) == ("gates", target))
        assert sum(len(layer.heads) for layer in locate_heads(model)) == row["heads"]
        assert sum(len(layer.units) for layer in locate_units(model)) == row["units"]
        assert table.speedup_of(model) == pytest.approx(row["predicted_speedup"])
        assert model.config.gates is None
        card = (folder / name / "README.md").read_text()
        assert f"{row['heads']} of 8 heads and {row['units']} of 128 feed-forward units" in card
        assert ModelCard(card).data.library_name == "transformers"


def test_a_run_that_is_resumed_measures_nothing_again(finished, text, monkeypatch):
    folder, summary = finished
    monkeypatch.setattr(prune_heads, "measure_latency_table", None)
    flags = {**text, **TAUGHT, "target_speedup": "1.5 2.5", "latency_shapes": "1x8", "from_scratch": "true"}
    again = RECIPE.run(folder, **flags, resume="true")
    assert again["rows"] == summary["rows"]


def test_times_on_a_cpu_are_measured_on_the_saved_model_in_a_process_of_its_own(finished, monkeypatch):
    folder, _ = finished
    args = PruneArguments(latency_shapes=["1x8"])
    training_args = PruneTrainingArguments(latency_batch=2, latency_length=16, use_cpu=True, target_speedup=[2.0])
    measurements = Measurements(folder / "dense", "AutoModelForSequenceClassification", args, training_args)
    dense = AutoModelForSequenceClassification.from_pretrained(folder / "dense")
    model = prune_units(copy.deepcopy(dense), {0: "0-15"})
    expected = [head_report(model, *shape, dense=dense, threads=1) for shape in ((2, 16), (1, 8))]
    # What is changed here does not reach the other process.
    monkeypatch.setattr(pruning_reports, "head_report", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reports = measurements.reports(model, (2, 16, "forward"), (1, 8, "forward"))
    finally:
        torch.set_num_threads(threads)
    for report, other in zip(reports, expected, strict=True):
        times = ("latency_dense", "latency_pruned")
        assert all(getattr(report, name) > 0 for name in times)
        same = dataclasses.replace(other, **{name: getattr(report, name) for name in times})
        assert report == same
        assert report.threads == 1
    with pytest.raises(ValueError, match="length is 99, but"):
        measurements.reports(model, (1, 99, "forward"))


@pytest.mark.parametrize("error", [1.1, 1.0, 0.9, 0.6])
def test_more_is_removed_until_the_measured_speedup_is_reached(error):
    table = CostTable("seconds", 1.0, {"encoder": [[0, 0.0], [4, 9.0]]}, {}, {"encoder": 1})
    goal, tried = SpeedupGoal(2.0, table, ("heads",)), []
    reached = goal.reach("fisher", lambda value: tried.append(value) or value, lambda model: error * model)
    assert reached == tried[-1]
    assert error * reached >= 2 * MEASUREMENT_MARGIN - 1e-9
    assert len(tried) == (1 if error > 1 else 2)


def test_a_measurement_that_was_disturbed_is_repeated():
    table = CostTable("seconds", 1.0, {"encoder": [[0, 0.0], [4, 9.0]]}, {}, {"encoder": 1})
    tried, disturbed = [], iter([True, False])
    reached = SpeedupGoal(2.0, table, ("heads",)).reach(
        "fisher",
        lambda value: tried.append(value) or value,
        lambda model: model * (0.4 if next(disturbed) else MEASUREMENT_MARGIN),
    )
    assert reached == 2.0
    assert tried == [2.0]


def test_of_models_that_all_miss_the_speedup_the_fastest_is_kept_with_a_warning(caplog):
    table = CostTable("seconds", 1.0, {"encoder": [[0, 0.0], [4, 9.0]]}, {}, {"encoder": 1})
    found = iter([1.71, 1.8, 1.75, 1.75, 1.74, 1.74, 1.74])
    made = []
    reached = SpeedupGoal(2.0, table, ("heads",)).reach(
        "gates", lambda value: made.append(value) or value, lambda model: next(found)
    )
    assert reached == made[1]
    assert "gates: the model pruned for 2 × is 1.80 × as fast as the dense model" in caplog.text


def test_a_speedup_is_not_pursued_beyond_what_the_table_allows():
    table = CostTable("seconds", 1.0, {"encoder": [[0, 0.0], [4, 2.0]]}, {}, {"encoder": 1})
    tried = []
    SpeedupGoal(2.0, table, ("heads",)).reach(
        "fisher", lambda value: tried.append(value) or value, lambda model: 0.8 * model
    )
    assert tried == [2.0, pytest.approx(2.0 * MEASUREMENT_MARGIN / 0.8)]
    SpeedupGoal(2.5, table, ("heads",)).reach(
        "fisher", lambda value: tried.append(value) or value, lambda model: 0.8 * model
    )
    assert tried[2:] == [2.5]


def test_units_alone_leave_all_heads(tmp_path, text, timed):
    summary = RECIPE.run(
        tmp_path / "run", **text, target_speedup=1.3, parts="units", method="gates fisher", refit="false"
    )
    assert [row["method"] for row in summary["rows"]] == ["gates", "fisher"]
    for row in summary["rows"]:
        assert row["heads"] == 8
        assert row["units"] < 128
    assert (tmp_path / "run" / "gate_history.png").is_file()
    assert not (tmp_path / "run" / "gates.png").exists()


def test_a_model_pruned_by_scores_needs_no_training(tmp_path, text, timed):
    untrained = {"num_train_epochs": 0, "gate_epochs": 0, "finetune_epochs": 0}
    summary = RECIPE.run(tmp_path / "run", **text, **untrained, target_speedup=1.3, importance="margin fisher")
    for row in summary["rows"]:
        assert row["units"] < 128
        assert row["accuracy"] == row["accuracy_untrained"]
    card = (tmp_path / "run" / "model-1.3x" / "README.md").read_text()
    assert "chosen by their effect on the margin" in card
    assert "fine-tuned after" not in card


def test_importance_and_refitted_projections_are_those_of_the_texts_of_a_file(tmp_path, text, timed, monkeypatch):
    other = tmp_path / "other.tsv"
    other.write_text("sentence\tlabel\nI like the cat\tcat\nI like the dog\tdog\n")
    found = []
    monkeypatch.setattr(
        prune_heads, "refit_outputs", lambda model, dense, data: found.extend(len(batch["labels"]) for batch in data)
    )
    score = prune_heads.SpeedupGoal.scores

    def scored(goal, method, model, batches, *others):
        found.extend(batch["input_ids"].shape for batch in batches())
        return score(goal, method, model, batches, *others)

    monkeypatch.setattr(prune_heads.SpeedupGoal, "scores", scored)
    untrained = {"num_train_epochs": 0, "gate_epochs": 0, "finetune_epochs": 0, "importance_file": other}
    RECIPE.run(tmp_path / "run", **text, **untrained, target_speedup=1.3, importance="margin")
    [shape, count] = found
    assert shape[0] == count == 2


def test_a_decoder_loses_whole_groups_and_units(tmp_path, timed):
    lines = [f"the {a} number {n} sat near the {b}" for a in ("cat", "dog") for n in range(12) for b in ("cow", "fox")]
    for name, part in (("train", lines), ("validation", lines[::5])):
        (tmp_path / f"{name}.txt").write_text("\n".join(part))
    summary = RECIPE.run(
        tmp_path / "run",
        task="causal-lm",
        num_key_value_heads=2,
        train_file=tmp_path / "train.txt",
        validation_file=tmp_path / "validation.txt",
        target_speedup=1.5,
        per_device_train_batch_size=4,
    )
    assert all(row["heads"] % 2 == 0 for row in summary["rows"])
    for row in summary["rows"]:
        assert row["decoding_speedup"] > 0
        # Keys and values of 2 × 2 heads of size 4 in float32, less what was removed.
        assert 0 < row["cache_bytes"] <= 2 * 2 * 2 * 4 * 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model-1.5x")
    with torch.no_grad():
        assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"target_speedup": 1}, "target_speedup must be greater than 1, got 1.0"),
        ({"target_speedup": "2 2"}, "target_speedup must be non-empty and unique, got [2.0, 2.0]"),
        ({"target_speedup": 2, "keep": 3}, "keep=[3] has no effect here; target_speedup says what to reach"),
        ({"target_speedup": 2, "parts": "layers"}, "parts must be among heads, units, blocks, got 'layers'"),
        ({"target_speedup": 2, "parts": "blocks"}, "parts must name heads, units or both, beside blocks"),
        ({"target_speedup": 2, "latency_shapes": "8"}, "latency_shapes must be batch sizes and lengths, such as 1x32"),
        ({"target_speedup": 2, "target_flops": 0.5}, "target_flops=0.5 has no effect here; set target_speedup"),
        ({"parts": "heads"}, "parts=['heads'] has no effect here; set target_speedup"),
        ({"refit": "false"}, "refit=False has no effect here; set target_speedup"),
        ({"importance": "fisher"}, "importance fisher chooses heads and units for a speed-up; set target_speedup"),
        ({"importance": "margin"}, "importance margin chooses heads and units for a speed-up; set target_speedup"),
        (
            {"target_speedup": 2, "importance": "margin", "task": "causal-lm"},
            "importance margin is for classifiers, not for task causal-lm; use fisher",
        ),
        (
            {"target_speedup": 2, "importance": "gates", "importance_file": "other.tsv"},
            "importance_file=['other.tsv'] has no effect with importance gates, which reads no texts",
        ),
        ({"target_speedup": 2, "importance_file": "other.tsv"}, "other.tsv"),
        ({"target_speedup": 5000}, "at most"),
        ({"target_speedup": 2, "parts": "heads"}, "at most"),
        # Gates could close feed-forward blocks, but scores are of heads alone.
        ({"target_speedup": 2, "parts": "heads blocks"}, "2 × cannot be reached by heads alone: at most"),
        (
            {"target_speedup": 2, "latency_shapes": "1x8 1x4096"},
            "latency_shapes=4096, but the model has positions for",
        ),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, text, timed, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        RECIPE.run(tmp_path / "run", **text, **flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
