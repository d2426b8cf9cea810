# Licensed under the Apache License, Version 2.0.
"""What `supervise_classifier` measures; what it has in common with other recipes is in test_every_recipe.py."""

import csv
import json

import pytest
import torch
from documented import undocumented
from recipe_runs import Recipe
from safetensors.torch import load_file

from hf_attn_dynamics import HeadwiseBertConfig, attention_maps, headwise_model, observe
from hf_attn_dynamics.recipes import supervise_classifier
from hf_attn_dynamics.recipes.summaries.supervise_classifier import SYSTEMS


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_length": 24,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "learning_rate": 0.01,
}
RECIPE = Recipe("supervise_classifier", **SMALL)
PHRASES = ["fine\t1", "lovely\t1", "dull\t0", "bore\t0", "a fine film\t1"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Texts in which one word decides, and a lexicon with this word."""
    folder = tmp_path_factory.mktemp("files")
    words = {"1": ("fine", "lovely"), "0": ("dull", "bore")}
    rows = [
        f"the {thing} number {number} was {words[label][number % 2]} to see\t{label}"
        for number in range(12)
        for thing in ("film", "plot")
        for label in words
    ]
    rows += ["nobody can say\t1", "nobody can say\t0"]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.tsv").write_text("\n".join(rows[len(split) % 3 :]) + "\n")
    (folder / "lexicon.tsv").write_text("\n".join(PHRASES) + "\n")
    return {f"{name}_file": folder / f"{name}.tsv" for name in ("train", "validation", "test", "lexicon")}


@pytest.fixture(scope="module")
def made(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    summary = RECIPE.run(folder, **files, guidance_weight=1)
    return folder, summary


def test_every_key_of_the_summary_is_documented(made):
    assert undocumented(supervise_classifier, made[1], PART=("train", "validation", "test")) == set()


def test_a_guided_head_learns_to_find_the_words_that_decide(made):
    _, summary = made
    assert summary["best_head_guided"] == [1, 0]
    assert summary["found_guided"] > 0.9 > summary["same_head"]
    assert summary["test_found_guided"] > 0.9
    assert summary["lexicon_words"] == 4
    assert summary["train_with_rationale"] < 1


def test_chance_is_the_fraction_of_tokens_in_rationales(files):
    args, training_args = RECIPE.parse_flags(**files, max_examples=10)
    supervise_classifier.choose_defaults(args, training_args)
    task = supervise_classifier.RationaleTask(args, seed=0)
    task.read(trains=True)
    splits = task.encode()
    assert len(splits["train"]) == 10
    lengths, inside = [], []
    for ids, text in zip(splits["validation"]["input_ids"], task.texts["validation"]["text"]):
        word = next((word for word in ("fine", "lovely", "dull", "bore") if word in text), None)
        if word is not None:
            lengths.append(len(ids))
            inside.append(len(task.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]))
    expected = sum(one / length for one, length in zip(inside, lengths)) / len(lengths)
    assert task.chance == pytest.approx(expected)
    assert task.with_rationale("validation") == len(lengths) / len(splits["validation"])


def test_heads_and_models_stand_in_table_and_picture(made):
    folder, summary = made
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["system"], row["layer"], row["head"]) for row in rows] == [
        (system, str(layer), str(head)) for system in SYSTEMS for layer in range(2) for head in range(4)
    ]
    guided = [row for row in rows if row["is_guided"] == "True"]
    assert [float(row["found"]) for row in guided] == [summary["found_guided"]]
    unguided = [float(row["found"]) for row in rows if row["system"] == "unguided"]
    assert max(unguided) == summary["found_unguided"]
    assert json.loads((folder / "heads.plot.json").read_text())["plot"] == "plot_head_maps"


def test_the_fraction_of_rows_is_the_accuracy_that_the_trainer_logs(files, made, tmp_path):
    """Of all tokens, in evaluation."""
    folder, summary = made
    args, training_args = RECIPE.parse_flags(output_dir=tmp_path, **files, guidance_weight=1)
    supervise_classifier.choose_defaults(args, training_args)
    task = supervise_classifier.RationaleTask(args, training_args.seed)
    task.read(trains=True)
    splits = task.encode()
    model = headwise_model(folder / "model", "AutoModelForSequenceClassification")
    training_args.num_train_epochs = 0
    trainer = supervise_classifier.train_classifier(task, "again", 0, splits, training_args, model)
    for split, key in (("validation", "found_by_rows_guided"), ("test", "test_found_by_rows_guided")):
        found = supervise_classifier.predict(trainer, splits[split]).metrics["test_guided_accuracy_rationale"]
        assert found == pytest.approx(summary[key], abs=1e-6)


def test_both_models_start_alike_and_see_the_same_batches(files, tmp_path):
    """Without learning, they stay alike; with another seed, they are others."""
    one = RECIPE.run(tmp_path / "one", **files, learning_rate=0)
    for name in ("accuracy", "loss", "test_loss"):
        assert one[f"{name}_guided"] == one[f"{name}_unguided"]
    assert one["same_head"] == one["found_guided"]
    weights = [load_file(tmp_path / "one" / place / "model.safetensors") for place in ("model", "model_unguided")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    other = RECIPE.run(tmp_path / "other", **files, learning_rate=0, seed=7)
    assert other["loss_guided"] != one["loss_guided"]


def test_hits_are_those_of_attention_maps():
    torch.manual_seed(0)
    config = HeadwiseBertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=16,
        initializer_range=1.0,
    )  # fmt: skip
    model = headwise_model(config, "AutoModel").eval()
    lengths = [7, 4, 5]
    mask = torch.tensor([[1] * length + [0] * (7 - length) for length in lengths])
    batch = {"input_ids": torch.randint(1, 30, (3, 7)), "attention_mask": mask}
    weights = torch.zeros(3, 7)
    weights[0, [2, 5]], weights[1, 1] = 1.0, 0.5
    hits = supervise_classifier.RationaleHits()
    hits.weights = weights
    with observe(model, hits), torch.inference_mode():
        model(**batch)
    maps = attention_maps(model, batch)["encoder"]
    for layer in range(2):
        for head in range(4):
            found = [
                [float(weights[s, maps[layer][s, head, row, : lengths[s]].argmax()] > 0) for row in range(lengths[s])]
                for s in (0, 1)
            ]
            first, rows = (scores["encoder"][layer, head].item() for scores in hits.compute())
            assert first == (found[0][0] + found[1][0]) / 2
            assert rows == pytest.approx(sum(map(sum, found)) / 11)


def test_a_lexicon_of_other_classes_is_refused(files, tmp_path, refused):
    (tmp_path / "lexicon.tsv").write_text("text\tlabel\nfine\tgood\ndull\tbad\n")
    with refused("has the classes bad, good, which are not those of the training text: 0, 1; name both alike"):
        RECIPE.run(tmp_path / "run", **{**files, "lexicon_file": tmp_path / "lexicon.tsv"})
