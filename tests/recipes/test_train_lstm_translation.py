# Licensed under the Apache License, Version 2.0.
import csv
import json
import shlex
import sys

import pytest
import translating
import yaml
from documented import listed_keys, undocumented
from launching import ROOT, words
from recipe_runs import Recipe
from sacrebleu.metrics import BLEU
from transformers import AutoModelForSeq2SeqLM
from translating import files, likelihood, lines, loaded, translations

from hf_attn_dynamics import LstmSeq2SeqForConditionalGeneration, cli
from hf_attn_dynamics.recipes import train_lstm_translation, translation
from hf_attn_dynamics.recipes.run import write_yaml


SHARED = ("hidden_size", "vocab_size", "max_length", "max_steps", "learning_rate", "per_device_train_batch_size",
          "save_steps")  # fmt: skip
SMALL = {key: translating.SMALL[key] for key in SHARED} | {"eval_steps": 2, "logging_steps": 1}
CONFIG = str(ROOT / "recipes/configs/train_translation.yaml")
RECIPE = Recipe("train_lstm_translation", **SMALL)


def run(folder, text=None, **changes):
    return RECIPE.run(folder, **{**(files(text) if text else {}), **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run with a test text, and a beam."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    test = {"test_source_file": text / "test.de", "test_target_file": text / "test.en"}
    return folder, run(folder, text, num_beams=2, languages=["de", "en"], **test)


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves
# ---------------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_summary_table_picture_model_and_card(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    for suffix in ("png", "svg"):
        assert (folder / f"curve.{suffix}").stat().st_size > 0
    text = (folder / "model/README.md").read_text()
    card = yaml.safe_load(text.split("---")[1])
    assert (card["pipeline_tag"], card["language"]) == ("translation", ["de", "en"])
    assert "Approximating How Single Head Attention Learns" in text
    assert "heads were removed" not in text


def test_every_documented_key_is_in_the_summary(finished):
    documented = train_lstm_translation.__doc__.split("summary.json`:\n")[1]
    keys = listed_keys(documented)
    assert len(keys) == 21
    assert keys - set(finished[1]) == set()
    assert undocumented(train_lstm_translation, finished[1]) == set()
    assert {"seed", "device", "command", "torch_version", "sacrebleu_version"} <= set(finished[1])


def test_the_table_has_all_evaluations(finished):
    folder, summary = finished
    with open(folder / "table.csv", newline="") as file:
        rows = [list(map(float, row.values())) for row in csv.DictReader(file)]
    assert rows == summary["eval_curve"]
    assert [step for step, _, _ in rows] == [2, 4]
    assert rows[-1][1:] == [summary["nll"], summary["token_accuracy"]]


def test_the_model_loads_by_its_name_and_does_what_the_summary_says(finished, text):
    folder, summary = finished
    model, tokenizer = loaded(folder / "model")
    assert isinstance(model, LstmSeq2SeqForConditionalGeneration)
    assert model.config.use_cache
    assert summary["parameters"] == model.num_parameters()
    assert summary["parameters_embeddings"] == model.config.vocab_size * model.config.hidden_size
    nll, accuracy = likelihood(folder / "model", zip(*lines(text, "valid")))
    assert summary["nll"] == pytest.approx(nll, rel=1e-5)
    assert summary["token_accuracy"] == pytest.approx(accuracy)
    sources, references = lines(text, "test")
    longest = 2 * max(SMALL["max_length"], *(len(tokenizer(line).input_ids) for line in sources + references))
    hypotheses = translations(folder / "model", sources, num_beams=2, max_length=longest)
    assert BLEU().corpus_score(hypotheses, [references]).score == pytest.approx(summary["bleu"])
    for example in summary["examples"]:
        assert example["translation"] == hypotheses[sources.index(example["source"])]


# ---------------------------------------------------------------------------------------------------------------------
# How it is trained
# ---------------------------------------------------------------------------------------------------------------------


def test_learning_is_seen_in_bleu_likelihood_and_accuracy(tmp_path, text):
    longer = {"max_steps": 200, "hidden_size": 32, "save_strategy": "no", "eval_steps": 100, "logging_steps": 50}
    summary = run(tmp_path / "run", text, per_device_train_batch_size=16, **longer)
    assert summary["exact_match"] > 0.9
    assert summary["token_accuracy"] > 0.97
    assert summary["nll"] < 0.3
    assert summary["eval_curve"][0][1] > summary["nll"]


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "uniform"},
        {"attention": "frozen"},
        {"readout": "additive"},
        {"num_attention_heads": 2},
        {"bidirectional": "false"},
        {"directions": "concatenated"},
        {"num_hidden_layers": 2, "dropout": 0.5},
    ],
)
def test_flags_make_other_models(tmp_path, text, finished, changes):
    summary = run(tmp_path / "run", text, max_steps=2, **changes)
    assert summary["nll"] != finished[1]["eval_curve"][0][1]
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/model").config
    assert {key: json.dumps(getattr(config, key)).strip('"') for key in changes} == {
        key: str(value) for key, value in changes.items()
    }


def test_smoothing_is_of_training_alone(tmp_path, text):
    smooth = run(tmp_path / "smooth", text, label_smoothing_factor=0.3, learning_rate=0)
    plain = run(tmp_path / "plain", text, learning_rate=0)
    assert smooth["nll"] == plain["nll"]


def test_the_last_step_is_evaluated_whatever_eval_steps_are(tmp_path, text):
    summary = run(tmp_path / "run", text, eval_steps=3)
    assert [step for step, _, _ in summary["eval_curve"]] == [3, 4]


def test_another_seed_gives_other_figures(tmp_path, text):
    first, other = (run(tmp_path / str(seed), text, seed=seed) for seed in (7, 8))
    assert first["nll"] != other["nll"]
    assert first["bleu_text"] == "validation"


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("languages", "known"), [(None, False), (["en", "zh"], True), (["zh", "en"], False)])
def test_bleu_knows_the_words_of_the_target_language(languages, known):
    # One of eleven characters is another, in 1, 2, 3 and 3 of the runs of 1 to 4.
    expected = 100 * (10 / 11 * 8 / 10 * 6 / 9 * 5 / 8) ** (1 / 4) if known else 0
    found = translation.bleu_for(languages).corpus_score(["我们今天去了公园散步。"], [["我们今天去了公园跑步。"]])
    assert found.score == pytest.approx(expected)


@pytest.mark.parametrize("preset", train_lstm_translation.PRESETS)
def test_presets_name_flags_only_and_the_paper_trains_as_it_says(tmp_path, preset):
    args, training_args = RECIPE.parse("--preset", preset, "--output_dir", str(tmp_path))
    for name, value in train_lstm_translation.PRESETS[preset].items():
        assert getattr(args if hasattr(args, name) else training_args, name) == value
    assert training_args.lr_scheduler_type == "constant"
    assert (training_args.adam_beta1, training_args.adam_beta2, training_args.adam_epsilon) == (0.9, 0.999, 1e-8)


@pytest.mark.parametrize("asked", ["by a flag", "in a file"])
def test_the_recipe_for_translation_trains_an_lstm_and_shows_translations(tmp_path, text, monkeypatch, capsys, asked):
    write_yaml(tmp_path / "config.yaml", {"model": "lstm", "eval_steps": 3})
    first = [str(tmp_path / "config.yaml")] if asked == "in a file" else ["--model", "lstm", "--eval_steps", "3"]
    line = words(output_dir=tmp_path / "run", **{**RECIPE.small, **files(text), "eval_steps": None})
    monkeypatch.setattr(sys, "argv", ["train_translation.py", *first, *line])
    cli.run("train_translation")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [step for step, _, _ in summary["eval_curve"]] == [3, 4]
    assert shlex.join(["train_translation.py", *first]) in summary["command"]
    output = capsys.readouterr().out
    for shown in (f"source       {summary['examples'][0]['source']}", "| token_accuracy", "curve.png"):
        assert shown in output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--model", "lstm", "--keep", "4", "2"], "keep=4 2 is of a Transformer and its heads"),
        (["--model", "lstm", "--guidance", "{}"], "guidance={} is of a Transformer"),
        (["--gate_sites=encoder", "--model=lstm"], "gate_sites=encoder is of a Transformer"),
        (["--model", "lstm", "--encoder_layers", "1"], "encoder_layers=1 is of a Transformer"),
        (["--model", "lstm", "--gate_penalty", "0.1"], "gate_penalty=0.1 has no effect here; an LSTM has no heads"),
        (["--model", "lstm", "--target_heads", "3"], "target_heads=3 has no effect here"),
        (["--model", "lstm", "--guidance_weight", "1"], "guidance_weight=1 has no effect here"),
        (["--model", "lstm", "--freeze_decoder", "true"], "freeze_decoder=True has no effect here"),
        (["--model", "gru"], "model must be transformer or lstm, got 'gru'"),
        ([CONFIG, "--model", "lstm"], "is of a Transformer and its heads; leave it out with model=lstm"),
        (["--preset", "huge", "--model", "lstm"], "preset 'huge' is not one of numerals, small, paper"),
    ],
)
def test_flags_of_heads_are_refused_where_an_lstm_is_asked_for(tmp_path, monkeypatch, refused, line, message):
    monkeypatch.setattr(sys, "argv", ["train_translation.py", *line, "--output_dir", str(tmp_path / "run")])
    with refused(message):
        cli.run("train_translation")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_source_file": None, "validation_target_file": None}, "no text to evaluate on"),
        ({"dropout": 0.1}, "dropout=0.1 is between LSTM layers, of which there is one"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 to"),
        ({"attention": "hard"}, "attention must be one of learned, uniform, frozen, got 'hard'"),
        ({"readout": "linear"}, "readout must be one of mlp, additive, got 'linear'"),
        ({"directions": "concatenated", "bidirectional": "false"}, "needs bidirectional=True"),
        ({"directions": "concatenated", "hidden_size": 15}, "an even hidden_size"),
        ({"attention": "uniform", "num_attention_heads": 2}, "set num_attention_heads=1"),
    ],
)
def test_bad_input_is_one_message_and_status_2_before_anything_is_written(tmp_path, text, refused, changes, message):
    with refused(message):
        run(tmp_path / "run", text, **changes)
