# Licensed under the Apache License, Version 2.0.
import csv
import json
from pathlib import Path

import pytest
from cards import loaded_as_its_card_says
from documented import undocumented
from transformers import AutoModelForSequenceClassification

from hf_attn_dynamics.recipes import score_norm
from hf_attn_dynamics.recipes.arguments.score_norm import EXPERIMENTS
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags


ROOT = Path(__file__).parents[2]


SMALL = {"device": "cpu", "cpu_threads": 1, "disable_tqdm": "true", "epochs": 6, "runs": 2, "records": 3}
GOOD, BAD = "a powerful and solid film", "the worst , a stupid mess"
MIXED = "the best and most powerful bore"


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Files of two and of five classes."""
    folder = tmp_path_factory.mktemp("reviews")
    for name, labels in (("two", (1, 0, 0)), ("five", (4, 0, 2))):
        (folder / name).mkdir()
        for split, extra in (("train", ""), ("dev", " indeed"), ("test", " !")):
            lines = [f"{text}{extra}\t{label}" for text, label in zip((GOOD, BAD, MIXED), labels)]
            (folder / name / f"{split}.tsv").write_text("\n".join(lines * 2) + "\n")
    return folder


def run(folder, **settings):
    settings = {"output_dir": folder, **SMALL, **settings}
    argv = [word for key, value in settings.items() for word in (f"--{key}", *str(value).split(" "))]
    return score_norm.main(*parse_yaml_or_flags(score_norm.ScoreNormArguments, argv=argv))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "synthetic"
    return folder, run(folder)


def assert_documented(summary):
    assert undocumented(score_norm, summary, EXPERIMENT=EXPERIMENTS) == set()


def test_the_summary_is_documented_and_is_what_was_returned(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert_documented(summary)
    assert summary["synthetic_epochs"] == {"FC": [6, 6], "TC": [6, 6], "TL": [6, 6]}
    for interval in summary["synthetic_accuracy"].values():
        assert interval["low"] <= interval["mean"] <= interval["high"]
    for picture in ("synthetic_distributions", "synthetic_curves"):
        assert all((folder / f"{picture}.{kind}").is_file() for kind in ("png", "svg"))


def test_the_first_run_of_each_model_is_saved(finished):
    folder, _ = finished
    for name, classifier in (("FC", "fixed"), ("TC", "linear"), ("TL", "mlp")):
        model = AutoModelForSequenceClassification.from_pretrained(folder / "models" / "synthetic" / name)
        assert model.config.classifier == classifier
        assert model.keys.weight.any()


def test_models_have_cards(tmp_path):
    summary = run(tmp_path / "run", runs=1)
    for name, accuracy in summary["synthetic_accuracy"].items():
        folder = tmp_path / "run" / "models" / "synthetic" / name
        assert loaded_as_its_card_says(folder)["model"].config.num_labels == 4
        card = (folder / "README.md").read_text()
        assert f"| accuracy | {accuracy['mean']:.3f} |" in card
        assert "trained for 6 epochs" in card


def test_a_longer_run_follows_the_theory(tmp_path):
    summary = run(tmp_path / "run", epochs=400, learning_rate=1.0, runs=1)
    for name in ("FC", "TC"):
        assert summary["synthetic_accuracy"][name] == {"mean": 1.0, "low": None, "high": None}
        assert summary["synthetic_topic_score"][name]["mean"] > 1
        assert summary["synthetic_max_other_score"][name] < 0.05
        assert summary["synthetic_max_curve_error"][name] < 0.15


def test_intervals_of_scores_and_norms_hold_their_means(tmp_path):
    summary = run(tmp_path / "run", epochs=400, learning_rate=1.0, runs=2)
    for quantity in ("topic_score", "topic_norm", "other_score", "other_norm", "accuracy"):
        for of_classifier in summary[f"synthetic_{quantity}"].values():
            assert of_classifier["low"] <= of_classifier["mean"] <= of_classifier["high"]
    assert summary["synthetic_accuracy"]["FC"]["high"] <= 1


@pytest.mark.parametrize("experiment", ["ablation", "query"])
def test_other_synthetic_experiments_report_their_models(experiment, tmp_path):
    summary = run(tmp_path / "run", experiment=experiment, runs=1, epochs=4)
    assert_documented(summary)
    models = set(summary[f"{experiment}_accuracy"])
    assert models == ({"TC", "TC-KF", "TC-EF"} if experiment == "ablation" else set(summary["query_max_curve_error"]))
    assert len(list((tmp_path / "run").glob("*.png"))) == 1
    if experiment == "ablation":
        assert set(summary["ablation_enhancement"]) == {"word", "epoch", "score", "norm"}
    else:
        assert len(models) == 12


def test_the_cnn_learns_from_pairs(tmp_path):
    summary = run(tmp_path / "run", experiment="cnn", epochs=2, runs=1)
    assert_documented(summary)
    assert set(summary["cnn_topic_score"]) == {"TC"}
    assert {path.stem for path in (tmp_path / "run").glob("*.png")} == {"cnn_distributions", "cnn_curves"}


def test_real_sentences_have_words_curves_and_competition(reviews, tmp_path):
    folder = tmp_path / "run"
    summary = run(folder, experiment="sst2", sst2=reviews / "two", hidden_size=4, epochs=40, top_words=4)
    assert_documented(summary)
    assert summary["sst2_accuracy"]["FC"]["mean"] > 0.5
    with open(folder / "sst2_words.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    vocabulary = json.loads((folder / "sst2_vocabulary.json").read_text())
    assert vocabulary[:2] == ["[PAD]", "[UNK]"]
    assert "indeed" not in vocabulary
    assert json.loads((folder / "models" / "sst2" / "FC" / "vocabulary.json").read_text()) == vocabulary
    model = AutoModelForSequenceClassification.from_pretrained(folder / "models" / "sst2" / "TC")
    scores = (model.keys.weight @ model.query).detach()
    scores[:2] = float("-inf")  # in no sentence of the training set
    best = [vocabulary[word] for word in scores.topk(4).indices]
    assert best == summary["sst2_top_words"]["TC"] == [row["word"] for row in rows if row["model"] == "TC"]
    assert float(rows[4]["score"]) == pytest.approx(scores.max().item(), abs=1e-6)
    assert {row["purity"] for row in rows if row["occurrences"] == "2"} == {"1.0"}
    assert set(summary["sst2_attended"]["FC"]) >= {"purity_first", "occurrences_last"}
    pictures = {"curves", "competition", "competition_curves", "attended", "attended_by_word"}
    assert {path.stem.removeprefix("sst2_") for path in folder.glob("*.png")} == pictures


def test_five_classes_have_no_purity_and_all_makes_what_there_is(reviews, tmp_path):
    five = run(tmp_path / "five", experiment="sst5", sst5=reviews / "five", hidden_size=6, models="TL")
    assert_documented(five)
    assert set(five["sst5_accuracy"]) == {"TL"}
    assert "sst5_attended" not in five
    args = score_norm.ScoreNormArguments(experiment="all", sst5=str(reviews))
    assert args.experiments() == ["synthetic", "ablation", "sst5", "cnn", "query"]


def test_a_run_stops_where_the_loss_on_dev_rises(tmp_path):
    for split, labels in (("train", (1, 0)), ("dev", (0, 1)), ("test", (1, 0))):
        lines = [f"{text}\t{label}" for text, label in zip((GOOD, BAD), labels)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines * 2) + "\n")
    folder = tmp_path / "run"
    summary = run(folder, experiment="sst2", sst2=tmp_path, patience=3, hidden_size=4, epochs=500, runs=3)
    assert all(epoch < 50 for epochs in summary["sst2_epochs"].values() for epoch in epochs)
    # What is shown of a run is how it ended, though others in its stack may have gone on.
    with open(folder / "sst2_words.csv", encoding="utf-8") as file:
        largest = {row["model"]: float(row["score"]) for row in reversed(list(csv.DictReader(file)))}
    for name, score in largest.items():
        model = AutoModelForSequenceClassification.from_pretrained(folder / "models" / "sst2" / name)
        assert (model.keys.weight @ model.query).max().item() == pytest.approx(score, abs=1e-6)


def test_words_may_lose_their_punctuation(reviews):
    for punctuation, words in ((True, {"the", "worst", ","}), (False, {"the", "worst"})):
        vocabulary, splits = score_norm.load_treebank(str(reviews / "two"), punctuation)
        assert words == set(vocabulary) & {"the", "worst", ",", ""}
        assert ([vocabulary[word] for word in splits["test"][0][0]][-1] == "[UNK]") == punctuation


def test_a_label_that_training_lacks_is_refused(reviews, tmp_path, capsys):
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text((reviews / "two" / f"{split}.tsv").read_text())
    (tmp_path / "test.tsv").write_text(f"{MIXED}\t2\n")
    with pytest.raises(SystemExit):
        run(tmp_path / "run", experiment="sst5", sst5=tmp_path)
    assert "test.tsv has the label '2', which the train file lacks" in capsys.readouterr().err


def test_labels_have_one_number_in_all_files(tmp_path):
    for split, labels in (("train", "bad fair good"), ("dev", "fair good"), ("test", "good")):
        (tmp_path / f"{split}.tsv").write_text("".join(f"a film\t{label}\n" for label in 2 * labels.split()))
    _, splits = score_norm.load_treebank(str(tmp_path))
    assert [splits[split][1] for split in ("train", "dev", "test")] == [2 * [0, 1, 2], 2 * [1, 2], 2 * [2]]
    (tmp_path / "dev.csv").write_text("text,label\na film,bad\n")
    with pytest.raises(ValueError, match="holds dev.csv and dev.tsv; leave one of them"):
        score_norm.load_treebank(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experiment": "sst3"}, "experiment must be synthetic, ablation, sst2, sst5, cnn, query or all, got 'sst3'"),
        ({"experiment": "sst2"}, "experiment sst2 needs --sst2, a folder with train, dev and test files"),
        ({"experiment": "sst2", "sst2": "nowhere"}, "nowhere holds no file train.tsv"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"models": "TC KF"}, "classifiers must be among FC, TC, TL, TC-KF, TC-EF, got 'KF'"),
        ({"classifiers": "FC FC"}, "classifiers must be non-empty and unique, got ['FC', 'FC']"),
        ({"learning_rate": 0}, "learning_rate must be greater than 0, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"sst2": "nowhere"}, "sst2=nowhere has no effect here; only the experiment sst2 reads it"),
        ({"models": "TC"}, "classifiers=['TC'] has no effect here; only the experiments sst2 and sst5 read it"),
        ({"experiment": "all", "patience": 5}, "patience=5 has no effect here; only the experiments sst2 and"),
        (
            {"experiment": "sst5", "sst5": "x", "sst2": "y"},
            "sst2=y has no effect here; only the experiment sst2 reads it",
        ),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, capsys, settings, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", **settings)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
