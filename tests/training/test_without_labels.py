# Licensed under the Apache License, Version 2.0.
"""Training, evaluation and importance without any label are refused, where they would be of nothing."""

import pytest
import torch
from tiny_models import SIZES
from tiny_training import build, collate, examples, trainer
from transformers import BertConfig, BertForMaskedLM

from hf_attn_dynamics import head_importance


TASKS = [
    ("roberta", "MaskedLM", {"labels": -100}),
    ("bert", "PreTraining", {"labels": -100, "next_sentence_label": -100}),
    ("roberta", "QuestionAnswering", {"start_positions": 512, "end_positions": 512}),
    ("roberta", "SequenceClassification", {"labels": -100}),
    ("electra", "JointPreTraining", {"labels": -100}),
    ("marian", "Translation", {"labels": -100}),
]
UNGUIDED = {"guidance_weight": None, "learning_rate": 1e-3, "per_device_train_batch_size": 2}


def unlabelled(task, columns, count=8):
    def ignored(row):
        return {name: [value] * len(row[name]) if isinstance(row[name], list) else value
                for name, value in columns.items()}  # fmt: skip

    return examples(task, count).map(ignored)


@pytest.mark.parametrize(("kind", "task", "columns"), TASKS)
def test_a_run_without_any_label_is_refused(tmp_path, kind, task, columns):
    model = build(task, kind, guidance=None)
    made = trainer(tmp_path, model, unlabelled(task, columns), max_steps=50, **UNGUIDED)
    names = " and ".join(columns)
    with pytest.raises(ValueError, match=f"no labels in 4 steps: all {names} are ignored; pass labels"):
        made.train()
    with pytest.raises(ValueError, match="no labels in 2 steps"):
        trainer(tmp_path, model, unlabelled(task, columns), max_steps=2, **UNGUIDED).train()


@pytest.mark.parametrize("settings", [{"label_smoothing_factor": 0.1}, {"gate_penalty": 0.1}])
def test_neither_smoothing_nor_gates_make_labels(tmp_path, settings):
    model = build(guidance=None, gates={} if "gate_penalty" in settings else None)
    made = trainer(tmp_path, model, unlabelled("MaskedLM", {"labels": -100}), max_steps=3, **UNGUIDED, **settings)
    with pytest.raises(ValueError, match="no labels in 3 steps"):
        made.train()


def test_a_hundred_steps_without_a_label_are_enough(tmp_path):
    data = unlabelled("MaskedLM", {"labels": -100}, count=240)
    with pytest.raises(ValueError, match="no labels in 100 steps"):
        trainer(tmp_path, build(guidance=None), data, max_steps=120, **UNGUIDED).train()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_steps_without_labels_are_legal_among_others(tmp_path, smoothing):
    rows = unlabelled("MaskedLM", {"labels": -100}).to_list()[:4] + examples("MaskedLM").to_list()[4:]
    model = build(guidance=None)
    made = trainer(tmp_path, model, type(examples("MaskedLM")).from_list(rows), max_steps=4, **UNGUIDED,
                   label_smoothing_factor=smoothing)  # fmt: skip
    made.train()
    losses = [entry["task_loss"] for entry in made.state.log_history if "task_loss" in entry]
    assert [loss > 1 for loss in losses] == [False, False, True, False]
    assert losses.count(0) == 3
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_stock_model_whose_loss_is_the_mean_over_no_label_says_so(tmp_path):
    model = BertForMaskedLM(BertConfig(**SIZES))
    made = trainer(tmp_path, model, unlabelled("MaskedLM", {"labels": -100}), **UNGUIDED)
    with pytest.raises(FloatingPointError, match="loss is nan at step 1; .* All of its labels are ignored"):
        made.train()


def test_guidance_is_learnt_without_labels_and_says_so(tmp_path, caplog):
    data = unlabelled("MaskedLM", {"labels": -100})
    made = trainer(tmp_path, build(), data, max_steps=4, **{**UNGUIDED, "guidance_weight": 1.0})
    made.train()
    assert "no labels in 4 steps: all labels are ignored; only guidance is trained" in caplog.text


@pytest.mark.parametrize(("kind", "task", "columns"), TASKS)
def test_an_evaluation_set_without_any_label_is_refused_and_can_be_predicted(tmp_path, kind, task, columns):
    made = trainer(tmp_path, build(task, kind), examples(task), unlabelled(task, columns))
    with pytest.raises(ValueError, match="eval_dataset has no labels: all .* are ignored"):
        made.evaluate()
    found = made.predict(unlabelled(task, columns))
    assert "test_loss" not in found.metrics
    assert len(found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions) == 8


def test_a_term_without_labels_is_left_out_of_the_evaluation(tmp_path):
    data = examples("PreTraining").map(lambda row: {"next_sentence_label": -100})
    model = build("PreTraining", "bert")
    metrics = trainer(tmp_path, model, data, data).evaluate()
    batch = collate(data.to_list())
    with torch.no_grad():
        logits = model.eval()(**{n: v for n, v in batch.items() if "label" not in n}).prediction_logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert "eval_nsp_loss" not in metrics


@pytest.mark.parametrize("kind", ["headwise", "stock"])
def test_importance_without_any_label_is_refused(kind):
    model = build(kind="bert") if kind == "headwise" else BertForMaskedLM(BertConfig(**SIZES))
    labelled = collate(examples("MaskedLM").to_list())
    blank = {**labelled, "labels": torch.full_like(labelled["labels"], -100)}
    with pytest.raises(ValueError, match="data has no labels: all are ignored"):
        head_importance(model, [blank, blank])
    # A batch without labels beside others counts as tokens that nothing depends on.
    alone, beside = (head_importance(model, data)["encoder"] for data in ([labelled], [labelled, blank]))
    torch.testing.assert_close(beside, alone / 2)
