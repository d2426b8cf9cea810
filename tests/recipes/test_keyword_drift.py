# Licensed under the Apache License, Version 2.0.
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cards import loaded_as_its_card_says
from documented import undocumented
from transformers import AutoModelForSequenceClassification

from hf_attn_dynamics.data import KeywordTask
from hf_attn_dynamics.data.demo.copying import KEYWORD
from hf_attn_dynamics.recipes import keyword_drift
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags


ROOT = Path(__file__).parents[2]


SMALL = {
    "device": "cpu",
    "cpu_threads": 1,
    "disable_tqdm": "true",
    "words": 6,
    "length": 5,
    "hidden_size": 6,
    "embedding_size": 5,
    "batch_size": 8,
    "steps": 12,
    "measurements": 4,
    "positive": 10,
}


def parse(*argv):
    return parse_yaml_or_flags(keyword_drift.DriftArguments, presets=keyword_drift.PRESETS, argv=list(argv))[0]


def run(folder, **settings):
    settings = {"output_dir": folder, **SMALL, **settings}
    return keyword_drift.main(parse(*(word for key, value in settings.items() for word in (f"--{key}", str(value)))))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "drift"
    return folder, run(folder)


def test_the_summary_is_documented_and_is_what_was_returned(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert undocumented(keyword_drift, summary) == set()
    assert json.loads((folder / "curves.json").read_text())["steps"] == [0, 1, 2, 3, 5, 6, 9, 12]
    assert all((folder / f"drift.{kind}").is_file() for kind in ("png", "svg"))


def test_the_model_has_a_card(finished):
    folder, summary = finished
    assert loaded_as_its_card_says(folder / "model")["model"].config.attention == "uniform"
    card = (folder / "model" / "README.md").read_text()
    assert f"| accuracy         |  {summary['accuracy']:.3f} |" in card
    assert "Snell" in card


def test_log_odds_are_those_of_the_readout_at_each_place(finished):
    folder, summary = finished
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert model.config.attention == "uniform"
    sentences = keyword_drift.positive_sentences(KeywordTask(6, 5), 10, np.random.default_rng(1))
    expected = {place: [] for place in keyword_drift.PLACES}
    with torch.no_grad():
        for sentence in sentences:
            output = model(sentence[None])
            gamma = model.readout(output.states)[0, :, 1].tolist()
            place = sentence.tolist().index(KEYWORD)
            expected["keyword"].append(gamma[place])
            expected["next"].append(gamma[place + 1])
            expected["mean"].append(output.logits[0, 1].item())
            expected["last"].append(gamma[-1])
    for place, values in expected.items():
        assert summary["log_odds"][place] == pytest.approx(sum(values) / 10, abs=1e-5)


def test_measured_sentences_have_the_keyword_before_the_last_word():
    sentences = keyword_drift.positive_sentences(KeywordTask(4, 3), 50, np.random.default_rng(0))
    assert sentences.shape == (50, 3)
    assert ((sentences[:, :-1] == KEYWORD).sum(1) == 1).all()
    assert (sentences[:, -1] != KEYWORD).all()


def test_figures_say_when_orders_hold():
    curves = {
        "steps": [0, 10, 20, 30, 40],
        "accuracy": [0.5, 0.6, 0.7, 0.9, 1.0],
        "log_odds": {
            "keyword": [0.0, 3.0, 4.0, 4.0, 1.0],
            "next": [0.1, 2.0, 3.0, 5.0, 6.0],
            "mean": [0.0, 1.0, 1.0, 2.0, 2.0],
            "last": [0.2, 0.5, 2.0, 4.5, 9.0],
        },
        "seconds": 1.0,
    }
    figures = keyword_drift.figures_of(curves)
    assert figures["hypothesis_2"] == [10, 20]
    assert figures["overtaken"] == 30
    assert figures["observation_3"] == 40
    curves["log_odds"]["last"] = [0.0] * 5
    assert keyword_drift.figures_of(curves)["overtaken"] is keyword_drift.figures_of(curves)["observation_3"] is None


def test_a_finished_run_is_not_trained_again(finished, monkeypatch):
    folder, summary = finished
    monkeypatch.setattr(keyword_drift, "train", lambda *_: pytest.fail("was trained again"))
    assert {**run(folder, resume="true"), "command": ""} == {**summary, "command": ""}


def test_runs_are_the_same_again(finished, tmp_path):
    _, summary = finished
    assert run(tmp_path / "run")["log_odds"] == summary["log_odds"]


def test_knowledge_of_the_keyword_moves_to_the_last_word(tmp_path):
    summary = run(tmp_path / "run", steps=150, learning_rate=0.01, batch_size=16, hidden_size=12)
    assert summary["accuracy"] > 0.9
    assert summary["overtaken"] <= summary["observation_3"] < 150
    log_odds = summary["log_odds"]
    assert log_odds["last"] > log_odds["next"] > log_odds["keyword"] > log_odds["mean"]


def test_the_configuration_file_has_every_key_and_its_default():
    path = ROOT / "recipes/configs/keyword_drift.yaml"
    defaults = parse()
    assert parse(str(path)) == defaults
    assert set(vars(defaults)) <= {line.partition(":")[0] for line in path.read_text().splitlines()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 2}, "length must be at least 3, for a keyword, a next and a last word; got 2"),
        ({"words": 1}, "words must be at least 2, the keyword and another one, got 1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"learning_rate": "nan"}, "learning_rate must be greater than 0, got nan"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
    ids=["length", "words", "steps", "rate", "seed"],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, capsys, settings, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", **settings)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
