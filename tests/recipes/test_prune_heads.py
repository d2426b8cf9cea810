import csv
import json
import sys
from pathlib import Path

import pytest
from documented import undocumented
from fresh_processes import python
from huggingface_hub import ModelCard
from swapped_classes import classes_swapped
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

import prune_heads  # noqa: E402
from classifying import SIZES  # noqa: E402

from hf_attn_dynamics.runs import parse_yaml_or_flags, values_of_run  # noqa: E402


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 290,
    "max_length": 16,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 8,
    "logging_steps": 2,
    "keep": "5 2",
    "importance_examples": 16,
    "latency_batch": 2,
    "disable_tqdm": "true",
    "device": "cpu",
    "cpu_threads": 1,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences about cats and dogs, by name; the validation file has the classes in the other order."""
    folder = tmp_path_factory.mktemp("text")
    rows = [(f"the {animal} number {i} sat here", animal) for i in range(16) for animal in ("cat", "dog")]
    for name, part in (("train", rows), ("validation", rows[::-1][:12])):
        lines = [f"{sentence}\t{label}" for sentence, label in part]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return folder


def run(folder, text, **settings):
    small = {name: value for name, value in SMALL.items() if not (name in SIZES and "model_name" in settings)}
    settings = {**small, "train_file": text / "train.tsv", "validation_file": text / "validation.tsv", **settings}
    argv = [word for k, v in {"output_dir": folder, **settings}.items() for word in (f"--{k}", *str(v).split(" "))]
    arguments = parse_yaml_or_flags(
        prune_heads.PruneArguments, prune_heads.PruneTrainingArguments, argv=argv
    )  # fmt: skip
    return prune_heads.main(*arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, run(folder, text, from_scratch="true")


def test_the_summary_has_every_figure_and_is_what_was_returned(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert undocumented(prune_heads, summary) == set()
    assert (summary["heads_total"], summary["heads_kept"], summary["importance"]) == (8, 5, "gates")
    assert summary["parameters_pruned"] == summary["parameters_dense"] - 3 * (4 * 16 * 4 + 3 * 4)
    assert 0 <= summary["metric_from_scratch"] <= 1
    assert summary["text"] == "train.tsv"


def test_every_way_keeps_exactly_so_many_heads(finished):
    folder, summary = finished
    rows = [(row["method"], row["heads"]) for row in summary["rows"]]
    ways = ("gates", "michel", "random", "from scratch")
    assert rows == [(way, keep) for way in ways for keep in (5, 2)]
    with open(folder / "curve.csv") as file:
        table = list(csv.DictReader(file))
    assert [(row["method"], int(row["heads"])) for row in table] == [("dense", 8), *rows]
    for picture in ("curve", "heads", "gates", "gate_history"):
        for suffix in (".png", ".svg"):
            assert (folder / (picture + suffix)).stat().st_size


def test_the_saved_models_are_those_that_were_measured(finished, text):
    folder, summary = finished
    for keep in (5, 2):
        model = AutoModelForSequenceClassification.from_pretrained(folder / f"model-{keep}")
        assert sum(map(len, model.config.kept_heads().values())) == keep
        assert model.config.gates is None
        tokenizer = AutoTokenizer.from_pretrained(folder / f"model-{keep}")
        lines = (text / "validation.tsv").read_text().splitlines()[1:]
        found = pipeline("text-classification", model=model, tokenizer=tokenizer)([x.split("\t")[0] for x in lines])
        right = sum(answer["label"] == line.split("\t")[1] for answer, line in zip(found, lines))
        expected = next(r for r in summary["rows"] if (r["method"], r["heads"]) == ("gates", keep))
        assert right / len(lines) == pytest.approx(expected["accuracy"])
        assert f"{keep} of 8 heads" in (folder / f"model-{keep}" / "README.md").read_text()


@pytest.mark.parametrize("numbered", [False, True])
def test_classes_in_another_order_are_found_by_name(finished, text, tmp_path, numbered):
    folder, summary = finished
    own = None if numbered else ["DOG", "CAT"]
    classes_swapped(folder / "dense", tmp_path / "model", own)
    settings = {"model_name": tmp_path / "model", "num_train_epochs": 0, "importance": "random", "keep": 7}
    swapped = run(tmp_path / "run", text, **settings, gate_epochs=0.1, finetune_epochs=0)
    dense = summary["metric_dense"]
    assert swapped["metric_dense"] == pytest.approx(1 - dense if numbered else dense)


def test_a_model_that_has_lost_heads_loses_more(finished, text, tmp_path):
    folder, before = finished
    settings = {"model_name": folder / "model-5", "num_train_epochs": 0, "importance": "random", "keep": 2}
    summary = run(tmp_path / "run", text, **settings, gate_epochs=0.1, finetune_epochs=0)
    assert (summary["heads_total"], summary["heads_kept"]) == (5, 2)
    for figure in ("parameters", "bytes"):
        assert summary[f"{figure}_dense"] == before[f"{figure}_pruned"] > summary[f"{figure}_pruned"]


def test_cards_say_what_is_known_of_each_model(finished):
    folder, summary = finished
    dense, pruned = (ModelCard.load(folder / name / "README.md") for name in ("dense", "model-5"))
    assert "with all 8 attention heads. The classes are cat, dog." in dense.text
    assert "accuracy_dense" not in dense.text
    assert "with 5 of 8 attention heads, chosen by gates; it was fine-tuned after the others were" in pruned.text
    # Nobody has said which language the text is in.
    assert dense.data.language is pruned.data.language is None
    assert dense.data.eval_results[0].metric_value == pytest.approx(summary["metric_dense"], abs=1e-4)


def test_blank_texts_are_left_out(text, tmp_path, caplog):
    lines = (text / "train.tsv").read_text().splitlines()
    (tmp_path / "train.tsv").write_text("\n".join([lines[0], "\tcat", *lines[1:]]) + "\n")
    settings = {"num_train_epochs": 0.1, "importance": "random", "keep": 2, "gate_epochs": 0.1, "finetune_epochs": 0}
    summary = run(tmp_path / "run", text, train_file=tmp_path / "train.tsv", **settings)
    assert summary["train_examples"] == len(lines) - 1
    assert "1 of 33 texts are blank and left out" in caplog.text


def test_texts_of_one_class_are_refused(text, tmp_path, capsys):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "a cat\tcat\n" * 3)
    with pytest.raises(SystemExit):
        run(tmp_path / "run", text, train_file=tmp_path / "train.tsv")
    assert "all texts to train on have the label cat; two classes are needed" in capsys.readouterr().err


def test_a_run_that_was_stopped_goes_on_where_it_was(finished, text, tmp_path):
    _, expected = finished
    stopped = tmp_path / "run"
    run(stopped, text, from_scratch="true")
    (stopped / "summary.json").unlink()
    for name in ("michel-2", "gates-2", "scratch-2"):
        (stopped / "checkpoints" / name / "run.json").unlink()
    untouched = (stopped / "checkpoints" / "dense" / "run.json").stat().st_mtime_ns
    summary = run(stopped, text, from_scratch="true", resume="true")
    assert (stopped / "checkpoints" / "dense" / "run.json").stat().st_mtime_ns == untouched
    assert summary["rows"] == expected["rows"]


def test_the_yaml_holds_the_defaults_and_names_every_argument_of_its_own(tmp_path):
    path = ROOT / "recipes" / "configs" / "prune_heads.yaml"
    types = (prune_heads.PruneArguments, prune_heads.PruneTrainingArguments)
    from_file, defaults = (parse_yaml_or_flags(*types, argv=argv) for argv in ([str(path)], []))
    assert values_of_run(*from_file, {}) == values_of_run(*defaults, {})
    named = {line.partition(":")[0] for line in path.read_text().splitlines()}
    assert set(vars(defaults[0])) <= named


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": "0"}, "keep must be at least 1, got 0"),
        ({"keep": "8"}, "keep=8, but the model has 8 heads; keep fewer"),
        ({"keep": "3 3"}, "keep must name something, and nothing twice, got [3, 3]"),
        ({"importance": "taylor"}, "importance must be among gates, michel, random, got 'taylor'"),
        ({"gate_penalty": "0.1"}, "gate_penalty=0.1 has no effect here; set keep"),
        ({"max_steps": "7"}, "max_steps=7 has no effect here; set num_train_epochs"),
        ({"gate_epochs": "0"}, "gate_epochs must be above 0"),
        ({"gate_variant": "papr"}, "gate_variant must be paper or paper_code, got 'papr'"),
        ({"importance_examples": "0"}, "importance_examples must be at least 1, got 0"),
        ({"latency_batch": "0"}, "latency_batch must be at least 1, got 0"),
        ({"latency_length": "0"}, "latency_length must be at least 1, got 0"),
        ({"latency_length": "600"}, "latency_length=600, but the model has positions for"),
        ({"model_name": "no/such"}, "no/such"),
        ({"model_name": "no/such", "hidden_size": 32}, "hidden_size=32 has no effect here; it is of the small BERT"),
        ({"model_name": "no/such", "dropout": 0.2}, "dropout=0.2 has no effect here; it is of the small BERT"),
        ({"dataset_name": "a/b"}, "and dataset_name 'a/b' both name a text; give one"),
        ({"validation_split": "dev"}, "validation_split=dev has no effect here; it is of a dataset_name"),
        ({"max_length": 2}, "max_length is 2, but 2 special tokens are added; make it larger"),
        ({"train_file": "nowhere.tsv"}, "nowhere.tsv"),
        ({"label_column": "mood"}, "mood"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, text, capsys, settings, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", text, **settings)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_it_runs_as_a_script(tmp_path, text):
    settings = {**SMALL, "keep": "2", "importance": "random", "train_file": text / "train.tsv"}
    settings["validation_file"] = text / "validation.tsv"
    flags = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    (result,) = python(["recipes/prune_heads.py", *flags, "--output_dir", tmp_path / "run"], cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "| dense" in result.stdout
    assert "model-2/" in result.stdout
