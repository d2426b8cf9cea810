import csv
import itertools
import json
import logging
import shutil
import statistics
from pathlib import Path

import glue_files
import numpy as np
import pytest
import torch
from datasets import Dataset
from documented import undocumented
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from seqeval.metrics import f1_score
from swapped_classes import classes_swapped
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    RobertaConfig,
    pipeline,
)

from hf_attn_dynamics import HeadwiseRobertaConfig, HeadwiseTrainer, headwise_model
from hf_attn_dynamics.data import load_token_classification, train_byte_level_bpe
from hf_attn_dynamics.recipes import classifying, finetune, run_glue
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
    "per_device_train_batch_size": 8,
    "disable_tqdm": "true",
    "device": "cpu",
    "cpu_threads": 1,
}
TYPES = (finetune.FinetuneArguments, finetune.FinetuneTrainingArguments)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Texts about cats and dogs; sentences with people and places."""
    folder = tmp_path_factory.mktemp("text")
    rows = [(f"the {animal} number {i} sat here", animal) for i in range(12) for animal in ("cat", "dog")]
    rows.insert(3, (" ", "cat"))
    names = itertools.product(("Ada", "Bo", "Cy", "Di"), ("Jimma", "Bonn"))
    sentences = [
        f"in O\n{place} B-LOC\n" if number % 3 == 2 else f"{person} B-PER\nsaw O\n{place} B-LOC\n"
        for number, (person, place) in enumerate(names)
    ]
    for name, part in (("train", slice(None)), ("validation", slice(4, None)), ("test", slice(1, 8))):
        lines = [f"{sentence}\t{label}" for sentence, label in rows[part]]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
        (folder / f"{name}.conll").write_text("\n".join(sentences[part]))
    return folder


def run(folder, text, task="sequence", **settings):
    kind = "conll" if task == "token" else "tsv"
    files = {f"{split}_file": text / f"{split}.{kind}" for split in ("train", "validation")}
    small = {
        name: value for name, value in SMALL.items() if not (name in BERT_FLAGS and "model_name_or_path" in settings)
    }
    settings = {"output_dir": folder, "task": task, **small, **files, **settings}
    argv = [word for k, v in settings.items() if v is not None for word in (f"--{k}", *str(v).split(" "))]
    return finetune.main(*parse_yaml_or_flags(*TYPES, argv=argv))


@pytest.fixture(scope="module")
def sequence(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "sequence"
    return folder, run(folder, text, num_seeds=2, seed=7)


@pytest.fixture(scope="module")
def token(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "token"
    settings = {"num_train_epochs": 30, "learning_rate": 0.02, "seeds": "5 3"}
    return folder, run(folder, text, "token", test_file=text / "test.conll", **settings)


@pytest.mark.parametrize("name", ["sequence", "token"])
def test_the_summary_has_mean_and_spread_of_every_figure(name, request):
    folder, summary = request.getfixturevalue(name)
    assert json.loads((folder / "summary.json").read_text()) == summary
    figures = list(summary["rows"][0])[4:]
    assert undocumented(finetune, summary, METRIC=figures) == set()
    for figure in figures:
        values = [row[figure] for row in summary["rows"]]
        assert summary[f"{figure}_mean"] == pytest.approx(statistics.fmean(values))
        assert summary[f"{figure}_sd"] == pytest.approx(np.std(values, ddof=1))
    assert summary["metric_mean"] == summary[f"{summary['metric']}_mean"]


def test_two_classes_have_three_figures(sequence):
    _, summary = sequence
    assert [row["seed"] for row in summary["rows"]] == [7, 8]
    assert list(summary["rows"][0])[4:] == ["accuracy", "macro_f1", "mcc", "loss"]
    assert (summary["metric"], summary["labels"]) == ("accuracy", ["cat", "dog"])
    # A blank text is left out of both.
    assert (summary["train_examples"], summary["eval_examples"], summary["test_examples"]) == (24, 21, None)


def test_entities_are_learnt_and_scored_on_the_test_text(token):
    _, summary = token
    names = ["precision", "recall", "f1", "loss"]
    assert [row["seed"] for row in summary["rows"]] == [5, 3]
    assert list(summary["rows"][0])[4:] == [*names, *(f"test_{name}" for name in names)]
    assert summary["labels"] == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    assert summary["metric"] == "test_f1"
    assert summary["metric_mean"] > 0.9
    (result,) = ModelCard.load(token[0] / "model" / "README.md").data.eval_results
    assert (result.metric_name, result.dataset_split) == ("test_f1", "test")


def test_the_table_ends_with_mean_and_spread(sequence):
    folder, summary = sequence
    with open(folder / "table.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["seed"] for row in table] == ["7", "8", "mean", "sd"]
    assert [float(row["loss"]) for row in table[:2]] == [row["loss"] for row in summary["rows"]]
    assert float(table[2]["accuracy"]) == summary["accuracy_mean"]


def test_the_saved_classifier_is_that_of_the_first_seed(sequence, text):
    folder, summary = sequence
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder / "model"))
    rows = [line.split("\t") for line in (text / "validation.tsv").read_text().splitlines()[1:]]
    answers = classify([sentence for sentence, _ in rows])
    right = [answer["label"] == label for answer, (_, label) in zip(answers, rows, strict=True)]
    assert np.mean(right) == pytest.approx(summary["rows"][0]["accuracy"])
    card = (folder / "model" / "README.md").read_text()
    assert "classify texts with seed 7" in card
    over_seeds = f"accuracy is {summary['metric_mean']:.3f} ± {summary['metric_sd']:.3f}."
    assert f"Over 2 trainings, {over_seeds}" in card
    assert "language: en" not in card


def test_the_saved_tagger_is_that_of_the_first_seed(token, text):
    folder, summary = token
    model = AutoModelForTokenClassification.from_pretrained(folder / "model")
    tag = pipeline("token-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder / "model"))
    sentences = load_token_classification(text / "test.conll")
    found = []
    for words in sentences["tokens"]:
        sentence = " ".join(words)
        # The token of a word begins with the space before it.
        starts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])])
        answers = {answer["start"]: answer["entity"] for answer in tag(sentence, ignore_labels=[])}
        found.append([answers.get(start, answers.get(start - 1)) for start in starts])
    assert f1_score(sentences["tags"][:], found) == pytest.approx(summary["rows"][0]["test_f1"])


def test_cross_validation_evaluates_every_example_once(tmp_path, text):
    summary = run(tmp_path / "run", text, validation_file=None, folds=3, num_train_epochs=0.1)
    assert [(row["seed"], row["fold"]) for row in summary["rows"]] == [(42, 1), (42, 2), (42, 3)]
    assert [(row["train_examples"], row["eval_examples"]) for row in summary["rows"]] == [(16, 8)] * 3
    assert summary["folds"] == 3


@pytest.mark.parametrize(
    ("labels", "shares"),
    [
        ([0] * 6 + [1] * 3, {(2, 1)}),
        ([0] * 7 + [1] * 2, None),
        ([[0], [1, 2]] * 5, None),
    ],
    ids=["classes", "rare class", "sentences"],
)
def test_parts_are_disjoint_and_have_equal_shares_of_classes(labels, shares):
    examples = Dataset.from_dict({"labels": labels})
    parts = finetune.folds_of(examples, 3, seed=0)
    rows = range(len(labels))
    assert sorted(row for _, evaluated in parts for row in evaluated) == list(rows)
    assert all(sorted([*trained, *evaluated]) == list(rows) for trained, evaluated in parts)
    if shares:
        assert {tuple(np.bincount([labels[row] for row in evaluated])) for _, evaluated in parts} == shares
    again, other = (finetune.folds_of(examples, 3, seed)[0][1].tolist() for seed in (0, 2))
    assert again == parts[0][1].tolist() != other


def test_a_run_that_was_killed_goes_on_from_its_newest_whole_checkpoint(text, tmp_path, monkeypatch):
    settings = {"num_seeds": 1, "seed": 7, "save_strategy": "steps", "save_steps": 1}
    expected = run(tmp_path, text, **settings)
    checkpoints = tmp_path / "checkpoints" / "seed-7"
    for gone in ("summary.json", "checkpoints/seed-7/run.json", "checkpoints/seed-7/checkpoint-3/trainer_state.json"):
        (tmp_path / gone).unlink()
    assert (checkpoints / "checkpoint-2" / "trainer_state.json").is_file()
    steps = []
    step = HeadwiseTrainer.training_step
    monkeypatch.setattr(HeadwiseTrainer, "training_step", lambda *args: steps.append(0) or step(*args))
    assert run(tmp_path, text, resume="true", **settings)["rows"] == expected["rows"]
    assert len(steps) == 1


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A guided RoBERTa, and a stock BERT whose classes are others."""
    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    tokenizer = train_byte_level_bpe(["the cat sat here"], 280)
    config = HeadwiseRobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=1, guidance={"fraction": 0.5}, **sizes
    )
    for name, model in (
        ("guided", headwise_model(config, "AutoModelForMaskedLM")),
        ("stock", BertForSequenceClassification(BertConfig(vocab_size=280, num_labels=5, **sizes))),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("task", ["sequence", "token"])
@pytest.mark.parametrize("name", ["guided", "stock"])
def test_any_checkpoint_is_fine_tuned(name, task, checkpoints, text, tmp_path):
    settings = {"model_name_or_path": checkpoints / name, "num_seeds": 1, "num_train_epochs": 0.2}
    summary = run(tmp_path / "run", text, task, **settings)
    assert summary["metric_sd"] is None
    assert "learning_rate: 3.0e-05" in (tmp_path / "run" / "config.yaml").read_text()
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").config
    assert list(config.id2label.values()) == summary["labels"]
    assert (config.guidance is not None) == (name == "guided")


@pytest.mark.parametrize("own", [["DOG", "CAT"], None], ids=["named", "numbered"])
def test_classes_of_a_trained_classifier_are_found_by_name(own, sequence, text, tmp_path, caplog):
    folder, expected = sequence
    classes_swapped(folder / "model", tmp_path / "model", own)
    summary = run(tmp_path / "run", text, model_name_or_path=tmp_path / "model", num_train_epochs=0, seed=7)
    first = expected["rows"][0]
    warned = "have numbers, not names; they are assumed to be cat, dog, in this order" in caplog.text
    if own:
        assert summary["rows"][0] == pytest.approx(first)
        assert not warned
        assert summary["labels"] == ["dog", "cat"]
    else:
        assert summary["accuracy_mean"] == pytest.approx(1 - first["accuracy"])
        assert warned
    assert len(summary["rows"]) == 1
    assert not (tmp_path / "run" / "model").exists()


def test_the_layer_of_other_classes_is_drawn_anew_by_each_seed(sequence, text, tmp_path):
    folder, _ = sequence
    model = classes_swapped(folder / "model", tmp_path / "model", ["yes", "no"])
    args, _ = parse_yaml_or_flags(*TYPES, argv=["--model_name_or_path", str(tmp_path / "model")])
    layers = []
    for seed in (1, 2, 2):
        torch.manual_seed(seed)
        layers.append(
            classifying.build_classifier(args, None, classifying.class_names(["cat", "dog"])).classifier.weight
        )
    assert not torch.equal(layers[0], model.classifier.weight)
    assert not torch.equal(layers[0], layers[1])
    assert torch.equal(layers[1], layers[2])
    kept = classifying.build_classifier(args, None, classifying.class_names(["yes", "no"]))
    assert torch.equal(kept.classifier.weight, model.classifier.weight)
    assert torch.equal(kept.bert.encoder.layer[0].output.dense.weight, model.bert.encoder.layer[0].output.dense.weight)


@pytest.mark.parametrize("name", ["sequence", "token"])
def test_a_classifier_is_evaluated_on_a_validation_text_alone(name, request, text, tmp_path):
    folder, expected = request.getfixturevalue(name)
    settings = {"model_name_or_path": folder / "model", "num_train_epochs": 0, "seed": expected["rows"][0]["seed"]}
    summary = run(tmp_path / "run", text, name, train_file=None, **settings)
    (row,) = summary["rows"]
    first = expected["rows"][0]
    assert row == pytest.approx({**{key: first[key] for key in row}, "train_examples": None})
    assert (summary["train_examples"], summary["eval_examples"]) == (None, first["eval_examples"])
    assert summary["labels"] == expected["labels"]
    assert summary["text"].startswith("validation.")


def test_a_validation_text_alone_may_lack_classes_of_the_classifier(sequence, text, tmp_path, caplog):
    (tmp_path / "cats.tsv").write_text("sentence\tlabel\na cat\tcat\nthe cat\tcat\n")
    settings = {"model_name_or_path": sequence[0] / "model", "num_train_epochs": 0, "train_file": None}
    summary = run(tmp_path / "run", text, validation_file=tmp_path / "cats.tsv", **settings)
    assert (summary["labels"], summary["eval_examples"]) == (["cat", "dog"], 2)


@pytest.mark.parametrize(("first", "names"), [(0, "tom rex"), (1, "tom rex"), (1, None)])
def test_numbered_classes_are_as_many_as_there_are_numbers_and_may_have_names(first, names, text, tmp_path):
    for name in ("train", "validation"):
        rows = (text / f"{name}.tsv").read_text().replace("\tcat", f"\t{first}").replace("\tdog", f"\t{first + 1}")
        (tmp_path / f"{name}.tsv").write_text(rows)
    files = {f"{name}_file": tmp_path / f"{name}.tsv" for name in ("train", "validation")}
    summary = run(tmp_path / "run", text, class_names=names, num_seeds=1, num_train_epochs=0.2, **files)
    assert summary["labels"] == (names.split() if names else ["1", "2"])


@pytest.mark.parametrize("task", ["sequence", "token"])
def test_files_may_be_in_another_encoding(task, text, tmp_path):
    kind = {"sequence": "tsv", "token": "conll"}[task]
    for name in ("train", "validation"):
        content = (text / f"{name}.{kind}").read_text().replace("cat number", "kätzchen").replace("saw", "säh")
        (tmp_path / f"{name}.{kind}").write_bytes(content.encode("latin-1"))
    files = {f"{name}_file": tmp_path / f"{name}.{kind}" for name in ("train", "validation")}
    settings = {"num_seeds": 1, "num_train_epochs": 0.2, **files}
    assert run(tmp_path / "run", text, task, encoding="latin-1", **settings)["train_examples"] > 0
    with pytest.raises(SystemExit):
        run(tmp_path / "unread", text, task, **settings)


@pytest.fixture(scope="module")
def glue_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue_data")
    glue_files.write_tsv(folder)
    return folder


@pytest.mark.parametrize("flag", ["task", "task_name"])
def test_a_task_of_glue_is_learnt_as_by_the_recipe_for_all_of_them(flag, glue_data, tmp_path):
    words = {**SMALL, "data_dir": glue_data, "seeds": 3}
    argv = [str(word) for key, value in words.items() for word in (f"--{key}", value)]
    alone = [*argv, f"--{flag}", "mnli", "--output_dir", str(tmp_path / "alone")]
    summary = finetune.main(*parse_yaml_or_flags(*TYPES, argv=alone))
    types = (run_glue.GlueArguments, run_glue.GlueTrainingArguments)
    among = [*argv, "--tasks", "mnli", "--output_dir", str(tmp_path / "among")]
    expected = run_glue.main(*parse_yaml_or_flags(*types, argv=among))
    row = dict(expected["rows"][0])
    assert row.pop("task") == "mnli"
    assert summary["rows"] == [{**row, "fold": None}]
    assert (summary["task"], summary["metric"], summary["metric_sd"]) == ("mnli", "score", None)
    for title in ("MNLI-m", "MNLI-mm", "AX"):
        path = f"submission/seed-3/{title}.tsv"
        assert (tmp_path / "alone" / path).read_text() == (tmp_path / "among" / path).read_text()
    cards = [(tmp_path / path / "README.md").read_text() for path in ("alone/model", "among/model/mnli")]
    assert all("fine-tuned on MNLI (" in card and "entailment, neutral, contradiction" in card for card in cards)
    assert undocumented(finetune, summary, METRIC=list(summary["rows"][0])[4:]) == set()


def test_glue_comes_from_the_hub_unless_a_folder_is_named(glue_data):
    args, _ = parse_yaml_or_flags(*TYPES, argv=["--task", "mrpc"])
    assert args.dataset_name == "nyu-mll/glue"
    args, _ = parse_yaml_or_flags(*TYPES, argv=["--task", "mrpc", "--data_dir", str(glue_data)])
    assert args.dataset_name is None


def test_a_length_that_is_not_set_is_what_the_checkpoint_has_positions_for(checkpoints, text, tmp_path):
    settings = {"model_name_or_path": checkpoints / "guided", "num_seeds": 1, "num_train_epochs": 0.2}
    run(tmp_path / "run", text, max_length=None, **settings)
    assert "max_length: 64" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("config", "length", "fitting"),
    [
        (BertConfig(max_position_embeddings=24), None, 24),
        (BertConfig(max_position_embeddings=24), 20, 20),
        (RobertaConfig(max_position_embeddings=66, pad_token_id=1), None, 64),
        (BertConfig(), None, 128),
        (LlamaConfig(max_position_embeddings=24), 200, 200),
        (None, 200, 200),
    ],
)
def test_lengths_fit_the_positions_of_a_model(config, length, fitting):
    assert classifying.fitting_length("max_length", length, 128, config) == fitting


def test_a_length_that_is_asked_for_is_refused_by_its_flag():
    with pytest.raises(ValueError, match="latency_length=25, but the model has positions for 24 tokens"):
        classifying.fitting_length("latency_length", 25, 128, BertConfig(max_position_embeddings=24))


def test_layers_that_are_replaced_are_not_reported(checkpoints, text, tmp_path, caplog, monkeypatch):
    reports = []
    handler = logging.Handler()
    handler.emit = lambda record: reports.append(record.getMessage())
    for name in ("modeling_utils", "configuration_utils"):
        monkeypatch.setattr(logging.getLogger(f"transformers.{name}"), "handlers", [handler])
    for name in ("guided", "stock"):
        settings = {"model_name_or_path": checkpoints / name, "num_seeds": 2, "num_train_epochs": 0.2}
        run(tmp_path / name, text, **settings)
    assert reports == []
    assert "are initialised at random" not in caplog.text


def test_weights_of_the_body_that_are_not_loaded_are_reported_once(checkpoints, text, tmp_path, caplog):
    shutil.copytree(checkpoints / "stock", tmp_path / "torn")
    weights = load_file(tmp_path / "torn" / "model.safetensors")
    lost = [name for name in weights if ".layer.0.attention." in name]
    kept = {name: weight for name, weight in weights.items() if name not in lost[1:]}
    kept[lost[0]] = kept[lost[0]][:-1].clone()
    save_file(kept, tmp_path / "torn" / "model.safetensors", metadata={"format": "pt"})
    settings = {"model_name_or_path": tmp_path / "torn", "num_seeds": 2, "num_train_epochs": 0.2}
    run(tmp_path / "run", text, **settings)
    warning = (
        f"{len(lost)} weights of the model are missing in {tmp_path / 'torn'} or have another size, such as bert."
    )
    assert caplog.text.count(warning) == 1


@pytest.mark.parametrize(("weight", "guides"), [(None, False), ("auto", True)])
def test_heads_are_guided_only_when_asked(weight, guides, checkpoints, text, tmp_path, monkeypatch):
    logs = []
    monkeypatch.setattr(classifying.HeadwiseTrainer, "log", lambda self, logged, *_: logs.append(logged))
    settings = {"model_name_or_path": checkpoints / "guided", "num_train_epochs": 0.2, "guidance_weight": weight}
    run(tmp_path / "run", text, num_seeds=1, **settings)
    assert any("guidance_weight_initial" in logged for logged in logs) == guides


def test_classes_that_are_not_evaluated_are_named_once(tmp_path, text, caplog):
    (tmp_path / "cats.tsv").write_text("sentence\tlabel\na cat\tcat\nthe cat\tcat\n")
    run(tmp_path / "run", text, validation_file=tmp_path / "cats.tsv", num_seeds=1, num_train_epochs=0.2)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("hf_attn_dynamics")]
    assert messages.count("The validation text has no example of dog.") == 1
    assert messages.count("1 of 25 texts are blank and left out.") == 1


@pytest.mark.parametrize("pairs", [False, True])
def test_examples_that_are_trained_and_evaluated_on_are_counted(caplog, pairs):
    train, evaluation = {"text": ["a cat", "a dog"]}, {"text": ["a dog", "a cat", "a dog", "an ox"]}
    if pairs:
        train["text_pair"], evaluation["text_pair"] = ["sat", "sat"], ["sat", "ran", "sat", "sat"]
    classifying.warn_of_repeats(Dataset.from_dict(train), Dataset.from_dict(evaluation), "test")
    assert f"{2 if pairs else 3} of 4 examples of the test text also occur in the training text" in caplog.text


def test_a_text_that_is_trained_and_evaluated_on_is_said(tmp_path, text, caplog):
    run(tmp_path / "run", text, validation_file=text / "train.tsv", num_seeds=1, num_train_epochs=0.2)
    assert "24 of 24 examples of the validation text also occur in the training text" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "ner"}, "task must be one of sequence, token, cola, "),
        (
            {"task": "mrpc"},
            "train_file=['{text}/train.tsv'] has no effect here; mrpc reads --data_dir or",
        ),
        (
            {"task": "mrpc", "data_dir": "{text}", "dataset_name": "a/b", "train_file": None, "validation_file": None},
            "and dataset_name 'a/b' exclude each other; give one",
        ),
        ({"train_file": None, "validation_file": None, "encoding": "latin-1"}, "no effect here; it needs files"),
        (
            {"class_names": "tom"},
            "class_names is ['tom'], but the files have the labels cat, dog; add names for cat, dog",
        ),
        ({"first_label": 1}, "first_label must be 0 or 1, beside class_names, got 1"),
        ({"data_dir": "{text}"}, "has no effect here; only the tasks cola, "),
        (
            {"task": "token", "class_names": "a b"},
            "class_names=['a', 'b'] has no effect here; the types of",
        ),
        (
            {"model_name_or_path": "{checkpoints}/guided", "num_train_epochs": 0, "train_file": None},
            "num_train_epochs=0, but validation.tsv needs a model with the classes cat, dog, and",
        ),
        ({"num_seeds": 0}, "num_seeds must be at least 1, got 0"),
        ({"seeds": "1 1"}, "seeds must be non-empty and unique, got [1, 1]"),
        ({"seeds": "1 2", "num_seeds": 2}, "num_seeds=2 and seeds=[1, 2] exclude each other; give one"),
        ({"folds": 1}, "folds must be at least 2, got 1"),
        ({"folds": 3}, "folds=3 evaluates on parts of the training text; leave "),
        ({"folds": 30, "validation_file": None}, "folds=30, but there are only 24 examples"),
        ({"validation_file": None}, "there is no text to evaluate on; give --validation_file or --folds"),
        ({"train_file": None}, "has no effect here; it needs --train_file or --dataset_name"),
        ({"train_file": None, "validation_file": None, "text_column": "q"}, "text_column=['q'] has no effect here"),
        ({"dataset_name": "a/b"}, "and dataset_name 'a/b' exclude each other; give one"),
        ({"dataset_config": "c"}, "dataset_config=c has no effect here; it needs --dataset_name"),
        (
            {"dataset_name": "a/b", "train_file": None, "validation_split": "dev"},
            "validation_split=dev has no effect here; validation_file is evaluated on instead",
        ),
        ({"seeds": "1 -3"}, "seeds must be at least 0, got -3"),
        ({"seed": "-1"}, "seed must be from 0 to 2**32 - 1, got -1"),
        ({"learning_rate": "nan"}, "learning_rate must be finite and at least 0, got nan"),
        ({"num_train_epochs": "-1"}, "num_train_epochs must be finite and at least 0, got -1"),
        ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size must be at least 1, got 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
        ({"max_length": 2}, "max_length must be greater than the number of special tokens, 2, got 2"),
        ({"num_train_epochs": 0}, "num_train_epochs=0 evaluates a trained classifier; it needs --model"),
        (
            {"num_train_epochs": 0, "model_name_or_path": "{checkpoints}/stock"},
            "num_train_epochs=0, but train.tsv needs a model with the classes cat, dog, and",
        ),
        (
            {"model_name_or_path": "{checkpoints}/stock", "vocab_size": 300},
            "vocab_size=300 has no effect here; the checkpoint of --model has its own sizes",
        ),
        ({"task": "token", "train_file": None, "validation_file": None}, "task token has no embedded text"),
        ({"task": "token", "text_column": "0 1"}, "task token takes one column of words"),
        ({"task": "token", "label_column": "0"}, "tag_column 0 has 'Ada'"),
        ({"train_file": "nowhere.tsv"}, "nowhere.tsv"),
        ({"train_file": "{text}/one.tsv"}, "all training texts have the label cat; two classes are needed"),
        ({"validation_file": "{text}/birds.tsv"}, "The dataset has the classes bird, dog"),
        ({"task": "token", "validation_file": "{text}/org.conll"}, "the validation text has the tag B-ORG"),
        ({"guidance_weight": 0.5}, "guidance_weight=0.5, but no head of the model is guided"),
        ({"model_name_or_path": "no/such"}, "model 'no/such' cannot be loaded"),
        (
            {"model_name_or_path": "{checkpoints}/guided", "max_length": 80},
            "but the model has positions for 64 tokens",
        ),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, text, checkpoints, capsys, settings, message):
    (text / "one.tsv").write_text("sentence\tlabel\na cat\tcat\nthe cat\tcat\n")
    (text / "birds.tsv").write_text("sentence\tlabel\na bird\tbird\na dog\tdog\n")
    (text / "org.conll").write_text("FAO B-ORG\nsaw O\n")
    places = {"text": text, "checkpoints": checkpoints}
    settings = {k: v.format(**places) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", text, **settings)
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message.replace("{text}", str(text)) in error
    assert not (tmp_path / "run").exists()


def test_it_runs_as_a_script(tmp_path, text, run_as_script):
    files = {f"{split}_file": text / f"{split}.tsv" for split in ("train", "validation")}
    settings = {**SMALL, **files, "num_seeds": 1, "num_train_epochs": 0.2, "output_dir": tmp_path / "run"}
    flags = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    output = run_as_script("finetune.py", *flags)
    # A single training has no mean and no deviation to print.
    assert "| accuracy |" in output
    assert not {"mean", "sd"} & set(output.split())
    assert "model/" in output
