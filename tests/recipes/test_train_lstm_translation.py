# Licensed under the Apache License, Version 2.0.
import csv
import json
import sys
from pathlib import Path

import pytest
import torch
import translating
import yaml
from launching import words
from sacrebleu.metrics import BLEU
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from translating import files

from hf_attn_dynamics import LstmSeq2SeqForConditionalGeneration
from hf_attn_dynamics.recipes import train_lstm_translation, train_translation, translation
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags, run_recipe, write_yaml
from hf_attn_dynamics.recipes.summaries.train_lstm_translation import LstmTranslationSummary


ROOT = Path(__file__).parents[2]


SHARED = ("hidden_size", "vocab_size", "max_length", "max_steps", "learning_rate", "per_device_train_batch_size",
          "save_steps")  # fmt: skip
SMALL = {key: translating.SMALL[key] for key in SHARED} | {"eval_steps": 2, "logging_steps": 1}


def flags(folder, text=None, **changes):
    given = {} if text is None else files(text)
    return words(**{"output_dir": folder, **SMALL, **given, **changes})


def parse(*argv):
    return parse_yaml_or_flags(
        train_lstm_translation.LstmArguments,
        train_lstm_translation.LstmTrainingArguments,
        presets=train_lstm_translation.PRESETS,
        argv=list(argv),
    )


def run(argv):
    return train_lstm_translation.main(*parse(*argv))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run with a test text, and a beam."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    test = {"test_source_file": text / "test.de", "test_target_file": text / "test.en"}
    return folder, run(flags(folder, text, num_beams=2, languages=["de", "en"], **test))


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
    assert f"sacrebleu {summary['sacrebleu_version']}" in text


def test_the_summary_has_the_documented_keys(finished):
    documented = {key for keys in LstmTranslationSummary.documentation() for key in keys.split(", ")}
    assert documented == set(finished[1])
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
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert isinstance(model, LstmSeq2SeqForConditionalGeneration)
    assert model.config.use_cache
    assert summary["parameters"] == model.num_parameters()
    assert summary["parameters_embeddings"] == model.config.vocab_size * model.config.hidden_size
    lines = {name: (text / name).read_text().splitlines() for name in ("test.de", "test.en", "valid.de", "valid.en")}
    total, right, nll = 0, 0, 0.0
    for source, target in zip(lines["valid.de"], lines["valid.en"]):  # one by one, where the run makes batches
        batch = tokenizer(source, text_target=target, return_tensors="pt")
        with torch.no_grad():
            output = model(**batch)
        total += batch["labels"].numel()
        right += int((output.logits.argmax(-1) == batch["labels"]).sum())
        nll += output.loss.item() * batch["labels"].numel()
    assert summary["nll"] == pytest.approx(nll / total, rel=1e-5)
    assert summary["token_accuracy"] == pytest.approx(right / total)
    longest = max(len(tokenizer(line).input_ids) for line in lines["test.de"] + lines["test.en"])
    longest = 2 * max(longest, SMALL["max_length"])
    hypotheses = [
        tokenizer.decode(
            model.generate(**tokenizer(line, return_tensors="pt"), num_beams=2, max_length=longest)[0],
            skip_special_tokens=True,
        ).strip()
        for line in lines["test.de"]
    ]
    assert BLEU().corpus_score(hypotheses, [lines["test.en"]]).score == pytest.approx(summary["bleu"])
    for example in summary["examples"]:
        assert example["translation"] == hypotheses[lines["test.de"].index(example["source"])]


def test_learning_is_seen_in_bleu_likelihood_and_accuracy(tmp_path, text):
    longer = {"max_steps": 200, "hidden_size": 32, "save_strategy": "no", "eval_steps": 100, "logging_steps": 50}
    summary = run(flags(tmp_path / "run", text, per_device_train_batch_size=16, **longer))
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
    summary = run(flags(tmp_path / "run", text, max_steps=2, **changes))
    assert summary["nll"] != finished[1]["eval_curve"][0][1]
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/model").config
    assert {key: json.dumps(getattr(config, key)).strip('"') for key in changes} == {
        key: str(value) for key, value in changes.items()
    }


def test_smoothing_is_of_training_alone(tmp_path, text):
    smooth = run(flags(tmp_path / "smooth", text, label_smoothing_factor=0.3, learning_rate=0))
    plain = run(flags(tmp_path / "plain", text, learning_rate=0))
    assert smooth["nll"] == plain["nll"]


def test_the_last_step_is_evaluated_whatever_eval_steps_are(tmp_path, text):
    summary = run(flags(tmp_path / "run", text, eval_steps=3))
    assert [step for step, _, _ in summary["eval_curve"]] == [3, 4]


def test_the_same_seed_gives_the_same_results_and_another_one_others(tmp_path, text):
    first, second, other = (run(flags(tmp_path / name, text, seed=seed)) for name, seed in zip("123", (7, 7, 8)))
    assert first["eval_curve"] == second["eval_curve"]
    assert first["nll"] != other["nll"]
    assert first["bleu_text"] == "validation"


@pytest.mark.parametrize(("languages", "known"), [(None, False), (["en", "zh"], True), (["zh", "en"], False)])
def test_bleu_knows_the_words_of_the_target_language(languages, known):
    # One of eleven characters is another, in 1, 2, 3 and 3 of the runs of 1 to 4.
    expected = 100 * (10 / 11 * 8 / 10 * 6 / 9 * 5 / 8) ** (1 / 4) if known else 0
    found = translation.bleu_for(languages).corpus_score(["我们今天去了公园散步。"], [["我们今天去了公园跑步。"]])
    assert found.score == pytest.approx(expected)


@pytest.mark.parametrize("preset", train_lstm_translation.PRESETS)
def test_presets_name_flags_only_and_the_paper_trains_as_it_says(tmp_path, preset):
    args, training_args = parse("--preset", preset, "--output_dir", str(tmp_path))
    for name, value in train_lstm_translation.PRESETS[preset].items():
        assert getattr(args if hasattr(args, name) else training_args, name) == value
    assert training_args.lr_scheduler_type == "constant"
    assert (training_args.adam_beta1, training_args.adam_beta2, training_args.adam_epsilon) == (0.9, 0.999, 1e-8)


def test_it_runs_as_a_script_and_shows_translations(tmp_path, text, run_as_script):
    output = run_as_script("train_lstm_translation.py", *flags(tmp_path / "run", text))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    for line in (f"source       {summary['examples'][0]['source']}", "| token_accuracy", "curve.png"):
        assert line in output


@pytest.mark.parametrize("in_file", [True, False])
def test_the_recipe_for_a_transformer_names_this_one_where_an_lstm_is_asked_for(
    tmp_path, capsys, monkeypatch, in_file
):
    write_yaml(tmp_path / "config.yaml", {"model": "lstm"})
    line = [str(tmp_path / "config.yaml")] if in_file else ["--model", "lstm"]
    monkeypatch.setattr(sys, "argv", ["train_translation.py", *line, "--output_dir", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as stop:
        run_recipe(train_translation.main, train_translation.PRESETS)
    assert stop.value.code == 2
    assert "hf-attn train_lstm_translation trains an LSTM" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "transformer"}, "hf-attn train_translation trains a Transformer"),
        ({"keep": 4}, "--keep"),
        ({"encoder_layers": 1}, "--encoder_layers"),
        ({"gate_penalty": 0.1}, "gate_penalty=0.1 has no effect here; an LSTM has no heads"),
        ({"target_heads": 3}, "target_heads=3 has no effect here; an LSTM has no heads"),
        ({"guidance_weight": 1}, "guidance_weight=1 has no effect here; an LSTM has no heads"),
        ({"freeze_decoder": "true"}, "freeze_decoder=True has no effect here; an LSTM has no heads"),
        ({"preset": "huge"}, "preset 'huge' is not one of numerals, small, paper"),
        ({"source_file": "nowhere.de"}, "nowhere.de"),
        ({"target_file": "SHORT"}, "lines"),
        ({"validation_source_file": None, "validation_target_file": None}, "no text to evaluate on"),
        ({"vocab_size": 5000}, "for these texts, got 5000"),
        ({"num_hidden_layers": 2, "dropout": 1.5}, "dropout must be in [0, 1), got 1.5"),
        ({"dropout": 0.1}, "dropout=0.1 has no effect with num_hidden_layers=1"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 to"),
        ({"attention": "hard"}, "attention must be one of learned, uniform, frozen, got 'hard'"),
        ({"readout": "linear"}, "readout must be one of mlp, additive, got 'linear'"),
        ({"directions": "concatenated", "bidirectional": "false"}, "needs bidirectional=True"),
        ({"directions": "concatenated", "hidden_size": 15}, "an even hidden_size"),
        ({"attention": "uniform", "num_attention_heads": 2}, "needs num_attention_heads=1, got 2"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"num_train_epochs": 2}, "num_train_epochs=2.0 has no effect here; set max_steps"),
        ({"generation_max_length": 1000}, "generation_max_length=1000"),
        ({"OUTPUT": "other run"}, "already holds files"),
    ],
)
def test_bad_input_is_one_message_and_status_2_before_anything_is_written(tmp_path, text, capsys, changes, message):
    folder, changes = tmp_path / "run", dict(changes)
    if changes.pop("OUTPUT", None):
        folder.mkdir()
        (folder / "summary.json").write_text("{}")
    if changes.get("target_file") == "SHORT":
        changes["target_file"] = tmp_path / "short.en"
        changes["target_file"].write_text("the cow\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        run(flags(folder, text, **changes))
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in error
    assert message in error
    assert sorted(tmp_path.rglob("*")) == before
