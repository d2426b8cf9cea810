# Licensed under the Apache License, Version 2.0.
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cards import loaded_as_its_card_says
from documented import undocumented
from transformers import AutoModelForSeq2SeqLM

from hf_attn_dynamics.recipes import learn_to_copy
from hf_attn_dynamics.recipes.arguments.learn_to_copy import EXPERIMENTS
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags


ROOT = Path(__file__).parents[2]


SMALL = {
    "device": "cpu",
    "cpu_threads": 1,
    "disable_tqdm": "true",
    "length": 4,
    "hidden_size": 12,
    "batch_size": 8,
    "steps": 5,
    "runs": 2,
}
OF_WORDS = {"experiments": "control function", "drawn_from": 7}


def parse(*argv):
    return parse_yaml_or_flags(learn_to_copy.CopyingArguments, presets=learn_to_copy.PRESETS, argv=list(argv))[0]


def parse_settings(**settings):
    settings = {**SMALL, **settings}
    return parse(*(word for key, value in settings.items() for word in (f"--{key}", *str(value).split(" "))))


def run(folder, **settings):
    return learn_to_copy.main(parse_settings(output_dir=folder, **settings))


def assert_documented(summary):
    assert undocumented(learn_to_copy, summary, SETTING=learn_to_copy.settings_in(EXPERIMENTS)) == set()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "copying"
    return folder, run(folder, experiments="permutation control mixture function", drawn_from=7)


def test_the_summary_has_every_setting_and_is_what_was_returned(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert_documented(summary)
    for name in ("permutation", "control", "mixture", "function"):
        curves = json.loads((folder / f"{name}.json").read_text())["curves"]
        assert [len(curve) for curve in curves] == [6, 6]
        assert summary[f"{name}_accuracy"] == [curve[-1] for curve in curves]
        assert summary[f"{name}_learnt"] == 0
        assert summary[f"{name}_steps"] == [None, None]
        model = AutoModelForSeq2SeqLM.from_pretrained(folder / "models" / name)
        assert model.config.vocab_size == 3 + {"permutation": 4, "control": 7, "mixture": 8, "function": 7}[name]
    text = (folder / "copying.svg").read_text()
    assert all(
        label in text for label in ("permutations of 4 words", "4 of 7 words", "4 of 7 words, in another order")
    )


def test_models_have_cards(finished):
    folder, summary = finished
    assert loaded_as_its_card_says(folder / "models" / "control")["model"].config.vocab_size == 3 + 7
    card = (folder / "models" / "control" / "README.md").read_text()
    assert "its setting is `control`" in card
    assert f"| accuracy | {summary['control_accuracy'][0]:.3f} |" in card


def curve_alone(args, optimizer):
    """Accuracies of run 1 of `control`, whose model and sentences depend on its number only, trained by itself."""
    task, generator = args.task("control"), np.random.default_rng(1)
    model = learn_to_copy.copying_model(args, task, seed=1)
    optimizer = optimizer(model.parameters(), lr=args.learning_rate)
    curve = []
    for _ in range(6):
        sources, targets = map(torch.from_numpy, task.draw(8, generator))
        output = model(sources, labels=targets)
        curve.append((output.logits.argmax(-1) == targets).float().mean().item())
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    return curve


def test_a_run_is_that_of_the_model_alone(finished):
    """Accuracy is that before each update."""
    folder, _ = finished
    found = json.loads((folder / "control.json").read_text())["curves"][1]
    assert found == pytest.approx(curve_alone(parse_settings(**OF_WORDS), torch.optim.Adam), abs=1e-4)


OPEN = {"optimizer": "sgd", "learning_rate": 0.5, "embedding_std": 0.3, "share_embeddings": "false"}


def test_what_the_paper_leaves_open_can_be_set(finished, tmp_path):
    folder, _ = finished
    run(tmp_path / "run", experiments="control", drawn_from=7, **OPEN)
    found = json.loads((tmp_path / "run" / "control.json").read_text())["curves"][1]
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    assert found == pytest.approx(
        curve_alone(parse_settings(experiments="control", drawn_from=7, **OPEN), sgd), abs=1e-4
    )
    assert found != json.loads((folder / "control.json").read_text())["curves"][1]


def test_initial_values_are_those_of_the_flags():
    args, scaled = parse_settings(**OF_WORDS), parse_settings(**OF_WORDS, attention_scale=3, embedding_std=0.5)
    one, other = (learn_to_copy.copying_model(each, args.task("control"), seed=4) for each in (args, scaled))
    names = {"attention.query.weight": 3, "embeddings.weight": 0.5}
    for name, value in one.state_dict().items():
        factor = next((factor for part, factor in names.items() if part in name), 1)
        torch.testing.assert_close(other.state_dict()[name], factor * value)
    apart = parse_settings(**OF_WORDS, share_embeddings="false")
    model = learn_to_copy.copying_model(apart, args.task("control"), seed=4)
    assert model.num_parameters() == one.num_parameters() + 10 * 12


def test_smaller_stacks_give_the_same_curves(finished, tmp_path):
    folder, _ = finished
    run(tmp_path / "run", experiments="control", drawn_from=7, stack_size=1)
    found, expected = (json.loads((one / "control.json").read_text())["curves"] for one in (tmp_path / "run", folder))
    assert found == expected


@pytest.mark.parametrize("stop_learnt", ["true", "false"])
def test_a_run_that_has_learnt_stops_if_wanted(tmp_path, stop_learnt):
    summary = run(
        tmp_path / "run",
        experiments="control",
        length=2,
        drawn_from=3,
        steps=60,
        learning_rate=0.05,
        stop_learnt=stop_learnt,
    )
    curves = json.loads((tmp_path / "run" / "control.json").read_text())["curves"]
    assert summary["control_learnt"] == 1
    for curve, step in zip(curves, summary["control_steps"]):
        assert curve[step] >= 0.99 > max(curve[:step])
        assert len(curve) == (step + 1 if stop_learnt == "true" else 61)


def test_heads_are_tried_alone_and_combined(tmp_path, monkeypatch):
    """Whether a head is good is settled here; that good heads help takes a longer run."""
    built = {}
    make = learn_to_copy.model_with_heads

    def noted(args, task, heads):
        built.setdefault(len(heads), []).append(list(heads))
        return make(args, task, heads)

    def pretended(name, models, task, args, same_sentences):
        assert same_sentences
        good = {2, 4} if name == "alone" else set()
        return {run: [0.1, 1.0 if run in good else 0.2] for run in models}

    monkeypatch.setattr(learn_to_copy, "model_with_heads", noted)
    monkeypatch.setattr(learn_to_copy, "train_copying_stack", pretended)
    summary = run(tmp_path / "run", experiments="heads", heads=3, candidates=6)
    assert_documented(summary)
    assert summary["alone_learnt"] == pytest.approx(2 / 6)
    all_bad, one_good, random_heads = built[3][:2], built[3][2:4], built[3][4:]
    assert built[1] == [[head] for head in range(6)]
    for heads in all_bad:
        assert len(set(heads)) == 3
        assert not {2, 4} & set(heads)
    for heads in one_good:
        assert len(set(heads)) == 3
        assert len({2, 4} & set(heads)) == 1
    assert random_heads == [[6, 7, 8], [9, 10, 11]]
    assert (tmp_path / "run" / "heads.png").is_file()


def test_heads_are_those_of_other_seeds_and_all_else_is_the_same():
    args = parse_settings(experiments="heads")
    task = args.task("heads")
    one, three = (learn_to_copy.model_with_heads(args, task, heads) for heads in ([4], [1, 4, 2]))
    for (name, value), other in zip(one.state_dict().items(), three.state_dict().values()):
        if name == "attention.query.weight":
            torch.testing.assert_close(other[12:24], value)
            assert not torch.equal(other[:12], value)
        else:
            torch.testing.assert_close(other, value)


def test_too_few_bad_heads_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learn_to_copy, "train_copying_stack", lambda name, models, *_: {run: [1.0] for run in models})
    with pytest.raises(SystemExit):
        run(tmp_path / "run", experiments="heads", heads=3, candidates=4)
    assert "of 4 heads 4 learn to copy within 5 steps, but at least 3 bad ones" in capsys.readouterr().err


def test_the_preset_paper_has_the_sizes_of_the_paper():
    args = parse("--preset", "paper")
    assert (args.length, args.drawn_from, args.hidden_size, args.batch_size, args.num_seeds) == (40, 60, 256, 128, 20)


def test_sizes_that_an_experiment_does_not_use_are_not_checked():
    assert parse("--experiments", "permutation", "mixture", "--length", "40").drawn_from == 30


@pytest.mark.parametrize("preset", list(learn_to_copy.PRESETS))
def test_what_a_preset_has_is_not_asked_for(preset):
    """Neither are the same values in a file, such as the config.yaml of a run."""
    args = parse("--preset", preset, "--experiments", "permutation")
    again = parse("--preset", preset, "--experiments", "permutation", "--drawn_from", str(args.drawn_from))
    assert again == args


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"experiments": "sorting"},
            "experiments must be among permutation, control, mixture, function, heads, got",
        ),
        ({"optimizer": "lion"}, "optimizer must be adam or sgd, got 'lion'"),
        ({"attention_scale": 0}, "attention_scale must be greater than 0, got 0.0"),
        ({"embedding_std": -1}, "embedding_std must be greater than 0, got -1.0"),
        ({"drawn_from": 4, "experiments": "permutation function"}, "drawn_from must be more than length, 4, got 4"),
        ({"candidates": 8, "experiments": "heads"}, "candidates must be more than heads, 8, got 8"),
        (
            {"drawn_from": 7, "experiments": "mixture heads"},
            "drawn_from=7 has no effect here; only the experiments control and function read it.",
        ),
        ({"heads": 2}, "heads=2 has no effect here; only the experiment heads reads it."),
        ({"candidates": 30}, "candidates=30 has no effect here; only the experiment heads reads it."),
        (
            {"drawn_from": 30, "preset": "paper", "experiments": "permutation"},
            "drawn_from=30 has no effect here; only the experiments control and function read it.",
        ),
        ({"num_seeds": 0}, "num_seeds must be at least 1, got 0"),
        ({"learning_rate": 0}, "learning_rate must be greater than 0, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
    ids=[
        "experiment",
        "optimizer",
        "attention",
        "embeddings",
        "words",
        "candidates",
        "no words",
        "no heads",
        "no candidates",
        "not of the preset",
        "runs",
        "rate",
        "seed",
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, capsys, settings, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", **settings)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
