# Licensed under the Apache License, Version 2.0.
"""What `distil_heads` compares; what it has in common with other recipes is in test_every_recipe.py."""

import json

import pytest
import torch
from documented import undocumented
from figure_texts import overlaps, smallest_text
from recipe_runs import Recipe
from transformers import AlbertConfig, AlbertModel

from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertForSequenceClassification, headwise_model
from hf_attn_dynamics.recipes import distil_heads
from hf_attn_dynamics.recipes.distil_plots import plot_students
from hf_attn_dynamics.recipes.summaries.distil_heads import SYSTEMS


SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_length": 24,
    "num_train_epochs": 2,
    "teacher_epochs": 2,
    "per_device_train_batch_size": 8,
    "learning_rate": 0.01,
    "eval_steps": 2,
    # Not the default, which only trainings with logits may change.
    "distillation_temperature": 3.0,
}
RECIPE = Recipe("distil_heads", **SMALL)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    rows = [f"the {animal} number {i} sat here\t{animal}" for i in range(16) for animal in ("cat", "dog")]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows[len(split) % 3 :]]) + "\n")
    return {f"{split}_file": folder / f"{split}.tsv" for split in ("train", "validation", "test")}


@pytest.fixture(scope="module")
def made(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    return folder, RECIPE.run(folder, **files)


@pytest.fixture
def teacher():
    torch.manual_seed(0)
    config = HeadwiseBertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=16,
        initializer_range=0.5,
    )  # fmt: skip
    return HeadwiseBertForSequenceClassification(config).eval()


def test_every_key_of_the_summary_is_documented(made):
    assert undocumented(distil_heads, made[1]) == set()


def test_results_follow_from_the_curves(made):
    folder, summary = made
    assert summary["steps"] == 8
    labels = max(value for _, value in summary["curve_labels"])
    for system in SYSTEMS:
        curve = summary[f"curve_{system}"]
        assert [step for step, _ in curve] == [2, 4, 6, 8]
        best = max(value for _, value in curve)
        assert summary[f"best_accuracy_{system}"] == best
        assert summary[f"steps_to_best_{system}"] == min(step for step, value in curve if value == best)
        reached = [step for step, value in curve if value >= labels]
        assert summary[f"steps_to_labels_{system}"] == (min(reached) if reached else None)
        assert summary[f"accuracy_{system}"] == curve[-1][1]
    picture = json.loads((folder / "students.plot.json").read_text())["arguments"]
    assert list(picture["curves"]) == list(SYSTEMS)


def test_each_student_learns_what_its_name_says(made):
    folder, _ = made
    guidance = {
        system: json.loads((folder / "model" / system / "config.json").read_text()).get("guidance")
        for system in SYSTEMS
    }
    assert guidance["labels"] is guidance["logits"] is None
    assert guidance["attention"]["teacher"]["layers"] == {"0": 1}
    assert guidance["relations"]["teacher"]["relations"] == ["value", "query_key"]
    history = json.loads((folder / "checkpoints" / "labels" / "run.json").read_text())
    assert history["guidance_weight_initial"] is None


def test_a_student_with_all_layers_starts_as_its_teacher_in_all_conditions(files, tmp_path):
    summary = RECIPE.run(tmp_path, **files, learning_rate=0, student_layers="0 1 2", guidance_weight=1)
    for system in SYSTEMS:
        assert summary[f"agreement_{system}"] == 1
        assert summary[f"accuracy_{system}"] == summary["teacher_accuracy"]
        assert summary[f"test_accuracy_{system}"] == summary["teacher_test_accuracy"]


def test_a_trained_teacher_is_taken_as_it_is(made, files, tmp_path):
    folder, before = made
    sizes = dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"))
    flags = {**files, **sizes, "model": folder / "teacher", "teacher_epochs": 0, "systems": "attention"}
    summary = RECIPE.run(tmp_path / "run", **flags)
    assert summary["teacher_accuracy"] == before["teacher_accuracy"]
    assert not (tmp_path / "run" / "teacher").exists()
    # Without labels, nothing is compared with them.
    assert (summary["steps_to_labels_attention"], summary["accuracy_labels"]) == (None, None)


def test_a_student_has_the_chosen_layers_of_its_teacher(teacher):
    student = distil_heads.student_of(teacher, [1, 3], None).eval()
    assert student.config.num_hidden_layers == 2
    layers = teacher.bert.encoder.layer
    for number in (2, 0):
        del layers[number]
    teacher.config.num_hidden_layers = 2
    ids = torch.randint(1, 30, (2, 6))
    torch.testing.assert_close(student(ids).logits, teacher(ids).logits, rtol=0, atol=0)


def test_weights_of_a_student_are_copies(teacher):
    student = distil_heads.student_of(teacher, [0], {"teacher": {"layers": {0: 0}}})
    with torch.no_grad():
        student.classifier.weight.zero_()
    assert teacher.classifier.weight.any()


def test_layers_that_a_teacher_lacks_are_refused(teacher):
    with pytest.raises(ValueError, match="student_layers name layer 4, but the teacher has 4 layers"):
        distil_heads.student_of(teacher, [0, 4], None)
    sizes = {"vocab_size": 20, "hidden_size": 8, "embedding_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}
    albert = headwise_model(AlbertModel(AlbertConfig(**sizes, intermediate_size=8)))
    with pytest.raises(ValueError, match="HeadwiseAlbertModel has no list with a module for each layer"):
        distil_heads.student_of(albert, [0], None)


CURVES = {"labels": [[1, 0.5], [2, 0.7], [3, 0.7]], "attention": [[1, 0.6], [2, 0.8], [3, 0.75]]}


def test_the_picture_marks_the_first_best_evaluation(tmp_path):
    figure = plot_students(CURVES, tmp_path / "students.png", teacher=0.9, title="a BERT; reviews")
    stars = [line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_marker() == "*"]
    assert stars == [[[2, 0.7]], [[2, 0.8]]]
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8
    for nothing in ({}, {"labels": []}):
        with pytest.raises(ValueError, match="curves are empty"):
            plot_students(nothing)
