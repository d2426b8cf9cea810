"""Metrics of replaced-token detection, by hand and through the trainer, and of target tokens."""

import math

import numpy as np
import pytest
import torch
from tiny_training import build, collate, examples, trainer
from transformers import EvalPrediction

from hf_attn_dynamics import HeadwiseTrainer
from hf_attn_dynamics.training import (
    replaced_token_metrics,
    replaced_token_predictions,
    target_token_metrics,
    target_token_scores,
)


def metrics(predicted, truth):
    return replaced_token_metrics(EvalPrediction((np.array(predicted), np.array(truth)), label_ids=None))


def test_values_are_those_worked_out_by_hand():
    # Of 5 tokens, 3 were replaced; 2 are called so, of which 1 rightly.
    found = metrics([[1, 0, 0, 1], [0, 1, 1, 1]], [[1, 1, 1, 0], [0, -100, -100, -100]])
    assert found == pytest.approx({"accuracy": 0.4, "precision": 0.5, "recall": 1 / 3, "f1": 0.4, "share": 0.6})


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        ([[0, 0]], [[0, 1]], {"accuracy": 0.5, "precision": 0, "recall": 0, "f1": 0, "share": 0.5}),
        ([[1, 0]], [[0, 0]], {"accuracy": 0.5, "precision": 0, "recall": 0, "f1": 0, "share": 0}),
        ([[0, 0]], [[0, 0]], {"accuracy": 1, "precision": 0, "recall": 0, "f1": 0, "share": 0}),
    ],
)
def test_what_is_not_defined_is_zero(predicted, truth, expected):
    assert metrics(predicted, truth) == expected


def test_without_any_token_shares_are_not_numbers():
    found = metrics([[1]], [[-100]])
    assert np.isnan([found["accuracy"], found["share"]]).all()


def test_logits_become_bytes_and_truth_is_what_the_model_replaced_if_it_did():
    logits, labels = torch.tensor([[0.5, -2.0, 0.0]]), torch.tensor([[1, 0, -100]])
    predicted, truth = replaced_token_predictions(logits, labels)
    assert predicted.dtype == truth.dtype == torch.int8
    assert predicted.tolist() == [[1, 0, 0]]
    assert truth.tolist() == [[1, 0, -100]]
    replaced = torch.tensor([[0, 1, -100]])
    _, truth = replaced_token_predictions((logits, replaced), torch.tensor([[-100, 4021, -100]]))
    assert truth.tolist() == replaced.tolist()
    hidden_states = (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))
    _, truth = replaced_token_predictions((logits, hidden_states), labels)
    assert truth.tolist() == labels.tolist()


@pytest.mark.parametrize("task", ["ReplacedTokens", "JointPreTraining"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_evaluation_reports_them_whatever_the_batch_size(tmp_path, task, batch_size):
    data = examples("MaskedLM" if task == "JointPreTraining" else task, 7)
    model = build(task, "electra", initializer_range=1.0).eval()
    plain = trainer(tmp_path, model, None, data, per_device_eval_batch_size=batch_size)
    run = HeadwiseTrainer(
        model,
        plain.args,
        data_collator=collate,
        eval_dataset=data,
        compute_metrics=replaced_token_metrics,
        preprocess_logits_for_metrics=replaced_token_predictions,
    )
    found = run.evaluate()
    batch = collate(data.to_list())
    with torch.no_grad():
        outputs = model(**batch)
    real = batch["attention_mask"] == 1
    truth = (outputs.replaced if task == "JointPreTraining" else batch["labels"])[real] == 1
    predicted = outputs.logits[real] > 0
    right = (truth & predicted).sum().item()
    assert right > 0
    assert found["eval_accuracy"] == pytest.approx((truth == predicted).float().mean().item())
    assert found["eval_precision"] == pytest.approx(right / predicted.sum().item())
    assert found["eval_recall"] == pytest.approx(right / truth.sum().item())
    assert found["eval_share"] == pytest.approx(truth.float().mean().item())
    # What is collected is a byte a token.
    predictions = run.predict(data).predictions
    assert [values.dtype for values in predictions] == [np.int8, np.int8]


def test_target_tokens_count_alike_whatever_the_batches_are():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, 11, generator=generator)
    labels = torch.randint(0, 11, (5, 7), generator=generator)
    labels[torch.arange(7) >= torch.tensor([7, 1, 4, 3, 6])[:, None]] = -100
    counted = labels != -100
    log_probabilities = logits[counted].double().log_softmax(-1)
    expected = {
        "nll": -log_probabilities.gather(1, labels[counted][:, None]).mean().item(),
        "token_accuracy": (logits[counted].argmax(-1) == labels[counted]).double().mean().item(),
    }
    scores = target_token_scores((logits, "hidden states"), labels)
    parts = [target_token_scores(*part) for part in ((logits[:2], labels[:2]), (logits[2:], labels[2:]))]
    for nll, hits in (scores, [torch.cat(part) for part in zip(*parts)]):
        found = target_token_metrics(EvalPrediction((nll.numpy(), hits.numpy()), label_ids=labels.numpy()))
        assert found == pytest.approx(expected)
    assert scores[0].shape == scores[1].shape == labels.shape


def test_without_target_tokens_nothing_is_known():
    nothing = np.zeros((2, 3))
    found = target_token_metrics(EvalPrediction((nothing, nothing), label_ids=np.full((2, 3), -100)))
    assert all(math.isnan(value) for value in found.values())
