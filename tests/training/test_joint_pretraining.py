"""ELECTRA's generator and discriminator under the trainer."""

import pytest
import torch
from tiny_training import build, collate, examples, trainer


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def step(folder, batch, accumulation):
    """Every parameter's gradient, read off a step of plain gradient descent, and what was logged."""
    model = build("JointPreTraining", "electra", initializer_range=0.5, **NO_DROPOUT)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = trainer(
        folder,
        model,
        examples("JointPreTraining"),
        optim="sgd",
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    run.train()
    return {name: (before[name] - p.detach()) / 1e-2 for name, p in model.named_parameters()}, run.state.log_history[0]


def test_accumulated_micro_batches_give_the_gradient_and_both_losses_of_one_batch(tmp_path):
    whole, whole_log = step(tmp_path / "1x8", 8, 1)
    parts, parts_log = step(tmp_path / "4x2", 2, 4)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for term in ("loss", "task_loss", "guidance_loss", "mlm_loss", "replaced_loss"):
        assert parts_log[term] == pytest.approx(whole_log[term], rel=1e-5), term
    assert whole_log["task_loss"] == pytest.approx(whole_log["mlm_loss"] + 50 * whole_log["replaced_loss"], rel=1e-5)


def test_the_gradient_is_that_of_the_model_s_own_loss(tmp_path):
    found, _ = step(tmp_path, 2, 4)
    model = build("JointPreTraining", "electra", initializer_range=0.5, **NO_DROPOUT).train()
    model(**collate(examples("JointPreTraining").to_list()), guidance_weight=2.0).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_evaluation_reports_both_losses_over_all_labels_whatever_the_batch_size(tmp_path):
    data, model = examples("JointPreTraining", 7), build("JointPreTraining", "electra", initializer_range=0.5)
    with torch.no_grad():
        outputs = model.eval()(**collate(data.to_list()))
    for size in (1, 3):
        found = trainer(tmp_path, model, None, data, per_device_eval_batch_size=size).evaluate()
        assert found["eval_mlm_loss"] == pytest.approx(outputs.generator_loss.item(), rel=1e-5)
        assert found["eval_replaced_loss"] == pytest.approx(outputs.discriminator_loss.item(), rel=1e-5)
        assert found["eval_loss"] == pytest.approx(outputs.loss.item(), rel=1e-5)


def test_training_moves_every_parameter_and_starts_from_balanced_losses(tmp_path):
    model = build("JointPreTraining", "electra", gates={})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = trainer(
        tmp_path,
        model,
        examples("JointPreTraining"),
        max_steps=2,
        learning_rate=1e-2,
        guidance_weight="auto",
        gate_penalty=0.1,
    )
    run.train()
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    first = next(entry for entry in run.state.log_history if "task_loss" in entry)
    # The weight was found without dropout.
    assert first["guidance_weight"] * first["guidance_loss"] == pytest.approx(first["task_loss"], rel=0.1)
