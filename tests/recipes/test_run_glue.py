import csv
import json
import shutil
import statistics
from pathlib import Path

import datasets
import glue_files
import numpy as np
import pytest
import torch
from documented import undocumented
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_attn_dynamics import HeadwiseRobertaConfig, headwise_model, prune_heads
from hf_attn_dynamics.data import GLUE_TASKS, load_glue, train_byte_level_bpe
from hf_attn_dynamics.recipes import classifier_tasks, run_glue
from hf_attn_dynamics.recipes.arguments.classifying import BERT_FLAGS
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags


ROOT = Path(__file__).parents[2]


SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 290,
    "max_length": 40,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.01,
    "disable_tqdm": "true",
    "device": "cpu",
    "cpu_threads": 1,
}
TYPES = (run_glue.GlueArguments, run_glue.GlueTrainingArguments)


def run(folder, data_dir, **settings):
    small = {
        name: value for name, value in SMALL.items() if not (name in BERT_FLAGS and "model_name_or_path" in settings)
    }
    settings = {"output_dir": folder, "data_dir": data_dir, **small, **settings}
    argv = [word for k, v in settings.items() if v is not None for word in (f"--{k}", *str(v).split(" "))]
    return run_glue.main(*parse_yaml_or_flags(*TYPES, argv=argv))


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue_data")
    glue_files.write_tsv(folder)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, benchmark):
    """All tasks, in their order."""
    folder = tmp_path_factory.mktemp("runs") / "all"
    return folder, run(folder, benchmark, seeds="3")


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory, benchmark):
    folder = tmp_path_factory.mktemp("runs") / "two"
    return folder, run(folder, benchmark, tasks="mrpc STS-B", num_seeds=2, seed=7)


def read_answers(path):
    with open(path) as file:
        return [(int(row["index"]), row["prediction"]) for row in csv.DictReader(file, delimiter="\t")]


def test_all_tasks_are_learnt_and_have_their_figures(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["tasks"] == list(glue_files.TITLES)
    figures = {
        **dict.fromkeys(("sst2", "qnli", "rte", "wnli"), ["accuracy", "loss", "score"]),
        **dict.fromkeys(("mrpc", "qqp"), ["accuracy", "f1", "loss", "score"]),
        "cola": ["matthews_correlation", "loss", "score"],
        "stsb": ["pearson", "spearmanr", "loss", "score"],
        "mnli": ["matched_accuracy", "mismatched_accuracy", "matched_loss", "mismatched_loss", "score"],
    }
    for row in summary["rows"]:
        assert list(row)[4:] == figures[row["task"]]
        shown = [row[name] for name in figures[row["task"]] if not name.endswith(("loss", "score"))]
        assert row["score"] == pytest.approx(statistics.fmean(shown))
        assert (row["train_examples"], row["eval_examples"]) == (8, 16 if row["task"] == "mnli" else 8)
    assert summary["metric_mean"] == pytest.approx(statistics.fmean(row["score"] for row in summary["rows"]))
    assert summary["metric_sd"] is None


def test_every_key_of_the_summary_is_documented(two_seeds):
    _, summary = two_seeds
    figures = {name for row in summary["rows"] for name in list(row)[4:]}
    assert undocumented(run_glue, summary, TASK=summary["tasks"], METRIC=figures) == set()


def test_seeds_have_mean_and_spread(two_seeds):
    _, summary = two_seeds
    assert [(row["task"], row["seed"]) for row in summary["rows"]] == [
        ("mrpc", 7),
        ("mrpc", 8),
        ("stsb", 7),
        ("stsb", 8),
    ]
    for task, figure in (("mrpc", "f1"), ("mrpc", "loss"), ("stsb", "spearmanr"), ("stsb", "score")):
        values = [row[figure] for row in summary["rows"] if row["task"] == task]
        assert summary[f"{task}_{figure}_mean"] == pytest.approx(np.mean(values))
        assert summary[f"{task}_{figure}_sd"] == pytest.approx(np.std(values, ddof=1))
    scores = [np.mean([row["score"] for row in summary["rows"] if row["seed"] == seed]) for seed in (7, 8)]
    assert summary["scores"] == pytest.approx(scores)
    assert summary["metric_sd"] == pytest.approx(np.std(scores, ddof=1))


def test_one_table_has_all_tasks(two_seeds):
    folder, summary = two_seeds
    with open(folder / "table.csv") as file:
        table = list(csv.DictReader(file))
    assert [(row["task"], row["metric"]) for row in table] == [
        ("mrpc", "accuracy"),
        ("mrpc", "f1"),
        ("mrpc", "score"),
        ("stsb", "pearson"),
        ("stsb", "spearmanr"),
        ("stsb", "score"),
        ("all", "score"),
    ]
    assert float(table[1]["seed 8"]) == summary["rows"][1]["f1"]
    assert float(table[-1]["mean"]) == summary["metric_mean"]


@pytest.mark.parametrize("task", glue_files.TITLES)
def test_the_saved_model_gives_the_answers_and_figures_of_its_row(task, finished, benchmark):
    folder, summary = finished
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model" / task).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model" / task)

    def answers(split):
        found = []
        for row in load_glue(task, split, benchmark):
            tokens = tokenizer(*(row[name] for name in ("text", "text_pair") if name in row), return_tensors="pt")
            with torch.no_grad():
                logits = model(**tokens).logits[0]
            found.append(model.config.id2label[logits.argmax().item()] if task in glue_files.NAMES else logits.item())
        return found

    for title, split in GLUE_TASKS[task].test.items():
        indices, predicted = zip(*read_answers(folder / "submission" / "seed-3" / f"{title}.tsv"))
        assert indices == tuple(range(8))
        if task == "stsb":
            assert [float(cell) for cell in predicted] == pytest.approx(np.clip(answers(split), 0, 5), abs=1e-3)
        elif task in ("mnli", "qnli", "rte"):
            assert list(predicted) == answers(split)
        else:
            assert [glue_files.NAMES[task][int(cell)] for cell in predicted] == answers(split)
    row = next(row for row in summary["rows"] if row["task"] == task)
    true = [glue_files.label(task, number) for number in range(8)]
    if task == "stsb":
        assert row["pearson"] == pytest.approx(np.corrcoef(answers("validation"), true)[0, 1], abs=1e-3)
    elif task != "cola":
        names = [glue_files.NAMES[task][number] for number in true]
        right = [found == name for found, name in zip(answers(GLUE_TASKS[task].validation[-1]), names)]
        assert row["mismatched_accuracy" if task == "mnli" else "accuracy"] == np.mean(right)
    assert GLUE_TASKS[task].title in (folder / "model" / task / "README.md").read_text()


def test_a_data_set_of_the_hub_gives_the_same(two_seeds, tmp_path, monkeypatch):
    _, expected = two_seeds
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "hub").mkdir()
    glue_files.write_hub(tmp_path / "hub", ["mrpc"])
    settings = {"dataset_name": tmp_path / "hub", "tasks": "mrpc", "seeds": "7"}
    summary = run(tmp_path / "run", None, **settings)
    assert summary["rows"] == expected["rows"][:1]
    assert [path.name for path in (tmp_path / "run" / "submission" / "seed-7").iterdir()] == ["MRPC.tsv"]


def test_test_sets_are_left_alone_on_demand(benchmark, tmp_path):
    run(tmp_path / "run", benchmark, tasks="rte", num_seeds=1, submission="false")
    assert not (tmp_path / "run" / "submission").exists()


def test_classes_in_another_order_give_the_same_answers(finished, benchmark, tmp_path):
    folder, summary = finished
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model" / "mnli")
    order = [2, 0, 1]
    names = [glue_files.NAMES["mnli"][number].upper() for number in order]
    for weight in model.classifier.parameters():
        weight.data = weight.data[order]
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: number for number, name in enumerate(names)}
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(folder / "model" / "mnli").save_pretrained(tmp_path / "model")

    settings = {"model_name_or_path": tmp_path / "model", "tasks": "mnli", "seeds": "3", "num_train_epochs": 0}
    row = run(tmp_path / "run", benchmark, **settings)["rows"][0]
    expected = next(row for row in summary["rows"] if row["task"] == "mnli")
    assert row == pytest.approx(expected)
    for title in ("MNLI-m", "MNLI-mm", "AX"):
        path = Path("submission", "seed-3", f"{title}.tsv")
        assert read_answers(tmp_path / "run" / path) == read_answers(folder / path)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory, finished):
    """The classifier of sst2 without two of its four heads."""
    folder = tmp_path_factory.mktemp("checkpoints") / "pruned"
    model = headwise_model(finished[0] / "model" / "sst2", "AutoModelForSequenceClassification")
    prune_heads(model, {0: [1, 2]}).save_pretrained(folder)
    AutoTokenizer.from_pretrained(finished[0] / "model" / "sst2").save_pretrained(folder)
    return folder


def test_a_pruned_model_stays_pruned(pruned, benchmark, tmp_path):
    run(tmp_path / "run", benchmark, model_name_or_path=pruned, tasks="sst2", num_seeds=1)
    before, after = (
        AutoModelForSequenceClassification.from_pretrained(path) for path in (pruned, tmp_path / "run/model/sst2")
    )
    assert after.config.pruned_heads == before.config.pruned_heads == {0: [1, 2]}
    assert not torch.equal(after.classifier.weight, before.classifier.weight)


def test_a_model_that_is_only_evaluated_is_not_saved_again(pruned, benchmark, tmp_path):
    summary = run(tmp_path / "run", benchmark, model_name_or_path=pruned, tasks="sst2", num_train_epochs=0)
    assert len(summary["rows"]) == 1
    assert (tmp_path / "run" / "submission" / "seed-42" / "SST-2.tsv").is_file()
    assert not (tmp_path / "run" / "model").exists()


def test_a_classifier_is_evaluated_without_a_training_text(pruned, benchmark, tmp_path):
    shutil.copytree(benchmark / "SST-2", tmp_path / "data" / "SST-2")
    (tmp_path / "data" / "SST-2" / "train.tsv").unlink()
    settings = {"model_name_or_path": pruned, "tasks": "sst2", "num_train_epochs": 0}
    expected = run(tmp_path / "whole", benchmark, **settings)["rows"][0]
    assert run(tmp_path / "run", tmp_path / "data", **settings)["rows"] == [{**expected, "train_examples": None}]


def test_a_pruned_model_reads_as_many_tokens_as_it_has_positions_for(pruned, benchmark, tmp_path):
    run(tmp_path / "run", benchmark, model_name_or_path=pruned, tasks="sst2", num_train_epochs=0, max_length=None)
    assert "max_length: 40" in (tmp_path / "run" / "config.yaml").read_text()


def test_one_seed_has_no_mean_and_no_deviation_to_print(benchmark, tmp_path, capsys):
    run(tmp_path / "one", benchmark, tasks="rte", num_seeds=1)
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| task"))
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["task", "metric", "seed 42"]


def test_a_guided_model_stays_guided(benchmark, tmp_path):
    tokenizer = train_byte_level_bpe(["a fine film"], 280)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    config = HeadwiseRobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=1, guidance={"fraction": 0.5}, **sizes
    )
    headwise_model(config, "AutoModelForMaskedLM").save_pretrained(tmp_path / "guided")
    tokenizer.save_pretrained(tmp_path / "guided")
    settings = {"model_name_or_path": tmp_path / "guided", "tasks": "stsb", "num_seeds": 1}
    run(tmp_path / "run", benchmark, **settings)
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model/stsb").config
    assert config.guided_heads()[0] == {"next": [0], "prev": [1]}


@pytest.mark.parametrize(("first", "second"), [("stsb", "sst2"), ("sst2", "stsb"), ("mnli", "rte")])
def test_a_model_of_one_task_goes_on_to_another(first, second, finished, benchmark, tmp_path):
    settings = {"model_name_or_path": finished[0] / "model" / first, "tasks": second, "num_seeds": 1}
    run(tmp_path / "run", benchmark, **settings)
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model" / second).config
    labels = glue_files.NAMES.get(second)
    assert config.problem_type == ("single_label_classification" if labels else "regression")
    assert list(config.id2label.values()) == (labels or ["LABEL_0"])


def test_embedded_text_is_learnt_without_data(tmp_path, monkeypatch):
    few = classifier_tasks.embedded_classification(2, 1)
    monkeypatch.setattr(classifier_tasks, "embedded_classification", lambda *_, seed: few)
    summary = run(tmp_path / "run", None, num_seeds=1)
    assert (summary["tasks"], len(summary["rows"])) == (["embedded"], 1)
    assert list(summary["rows"][0])[4:] == ["accuracy", "loss", "score"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": "sst3"}, "task must be one of GLUE (cola, sst2"),
        ({"tasks": "sst2 SST-2"}, "tasks must be non-empty and unique, got ['sst2', 'sst2']"),
        ({"tasks": "sst2", "data_dir": None}, "tasks ['sst2'] need --data_dir, or --dataset_name nyu-mll/glue"),
        ({"dataset_name": "nyu-mll/glue"}, "and dataset_name 'nyu-mll/glue' exclude each other"),
        ({"data_dir": "{benchmark}/nowhere"}, "nowhere' does not exist"),
        ({"data_dir": "{broken}", "tasks": "rte"}, "has no file of the validation split of rte"),
        ({"data_dir": "{broken}", "tasks": "wnli"}, "has no column sentence2 for the texts of wnli, only index"),
        ({"data_dir": "{broken}", "tasks": "qnli"}, "has the label 'maybe' in row 1, but qnli has the labels"),
        ({"data_dir": "{benchmark}/SST-2", "tasks": "cola sst2"}, "has one file, train.tsv, for cola and sst2"),
        ({"num_train_epochs": 0}, "num_train_epochs=0 evaluates a trained classifier; it needs --model"),
        (
            {"num_train_epochs": 0, "model_name_or_path": "{pruned}", "tasks": "mnli"},
            "mnli needs a model with the classes entailment, neutral, contradiction, and",
        ),
        (
            {"num_train_epochs": 0, "model_name_or_path": "{pruned}", "tasks": "stsb"},
            "stsb needs a model with one score, and",
        ),
        (
            {"num_train_epochs": 0, "model_name_or_path": "{pruned}", "tasks": "sst2", "num_seeds": 3},
            "num_train_epochs=0 evaluates a trained classifier, which does not depend on seeds; leave out --num_seeds",
        ),
        (
            {"model_name_or_path": "{pruned}", "tasks": "sst2", "hidden_size": 32},
            "hidden_size=32 has no effect here; the checkpoint of --model has its own sizes",
        ),
        ({"max_length": 2}, "max_length must be greater than the number of special tokens, 2, got 2"),
        ({"model_name_or_path": "no/such", "tasks": "sst2"}, "model 'no/such' cannot be loaded"),
        ({"tasks": "sst2", "guidance_weight": 0.5}, "guidance_weight=0.5, but no head of the model is guided"),
        (
            {"model_name_or_path": "{pruned}", "tasks": "sst2", "max_length": 80},
            "max_length=80, but the model has positions for 40 tokens",
        ),
        ({"push_to_hub": "true"}, "push_to_hub pushes one trained model, but there are 9 tasks; name one"),
        (
            {"push_to_hub": "true", "num_train_epochs": 0, "model_name_or_path": "{pruned}", "tasks": "sst2"},
            "push_to_hub pushes one trained model, but num_train_epochs=0 only evaluates",
        ),
        ({"output_dir": "{benchmark}"}, "already holds files; name another folder"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, benchmark, pruned, capsys, settings, message):
    for name, header, cells in (
        ("RTE", "index\tsentence1\tsentence2\tlabel", "0\ta\tb\tentailment"),
        ("WNLI", "index\tsentence1\tlabel", "0\ta\t1"),
        ("QNLI", "index\tquestion\tsentence\tlabel", "0\ta\tb\tmaybe"),
    ):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "train.tsv").write_text(f"{header}\n{cells}\n")
    places = {"benchmark": benchmark, "broken": tmp_path / "broken", "pruned": pruned}
    settings = {k: v.format(**places) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(SystemExit) as stop:
        run(**{"folder": tmp_path / "run", "data_dir": benchmark, **settings})
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert not (tmp_path / "run").exists()


def test_it_runs_as_a_script(benchmark, tmp_path, run_as_script):
    settings = {**SMALL, "data_dir": benchmark, "tasks": "rte", "num_seeds": 1, "output_dir": tmp_path / "run"}
    flags = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    output = run_as_script("run_glue.py", *flags)
    assert "| all  | score " in output
    assert "submission/" in output
