# Licensed under the Apache License, Version 2.0.
"""A subclass may read batches whose columns have other names than the model's: what is counted stays the same."""

import pytest
import torch
from tiny_training import STILL, build, collate, examples, trainer

from hf_attn_dynamics import HeadwiseSeq2SeqTrainer, HeadwiseTrainer


NAMES = {
    "labels": "actions",
    "next_sentence_label": "follows",
    "start_positions": "from",
    "end_positions": "to",
}


class Renaming:
    """Gives columns the names that the model knows, as an override of `compute_loss` does."""

    names = NAMES

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs = {**inputs}
        for own, name in self.names.items():
            if name in inputs:
                inputs[own] = inputs.pop(name)
        return super().compute_loss(model, inputs, *args, **kwargs)


def renamed(rows, names=NAMES):
    return {names.get(name, name): column for name, column in collate(rows).items()}


def renaming_trainer(folder, model, data, evaluation=None, names=NAMES, **settings):
    """A trainer of data under other names; its columns get them in the collator."""
    columns = [names.get(name, name) for name in model.label_columns]
    plain = trainer(folder, model, data, label_names=columns, remove_unused_columns=False, **settings)
    base = HeadwiseSeq2SeqTrainer if isinstance(plain, HeadwiseSeq2SeqTrainer) else HeadwiseTrainer
    kind = type("RenamingTrainer", (Renaming, base), {"names": names})
    return kind(
        model,
        plain.args,
        data_collator=lambda rows: renamed(rows, names),
        train_dataset=data,
        eval_dataset=evaluation,
    )


def step(made):
    """Every parameter's gradient, read off a step of plain gradient descent; and what was logged."""
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.train()
    log = next(entry for entry in made.state.log_history if "loss" in entry)
    return {name: before[name] - p.detach() for name, p in made.model.named_parameters()}, log


DESCENT = {
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "guidance_schedule": "constant",
}
TASKS = [
    ("roberta", "MaskedLM"),
    ("bert", "PreTraining"),
    ("roberta", "SequenceClassification"),
    ("electra", "ReplacedTokens"),
    ("marian", "Translation"),
    ("bert", "QuestionAnswering"),
]


@pytest.mark.parametrize(
    ("kind", "task", "names"),
    [(*task, NAMES) for task in TASKS]
    # Positions count by the length of the sentences, which are not read then.
    + [(*task, {**NAMES, "input_ids": "observations"}) for task in TASKS if task[1] != "QuestionAnswering"],
)
def test_the_gradient_of_micro_batches_under_other_names_is_that_of_the_stock_loss_of_the_whole(
    tmp_path, kind, task, names
):
    model = build(task, kind, **STILL).double().train()
    outputs = model(**collate(examples(task).to_list()), output_guidance_loss=True)
    (outputs.loss + 2 * outputs.guidance_loss).backward()
    fresh = build(task, kind, **STILL).double()
    found, log = step(
        renaming_trainer(
            tmp_path,
            fresh,
            examples(task),
            names=names,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            **DESCENT,
        )
    )
    assert log["task_loss"] == pytest.approx(outputs.loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def hundredfold(outputs, labels, num_items_in_batch):
    summed = torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return 100 * summed / num_items_in_batch


@pytest.mark.parametrize(
    ("settings", "own_loss"),
    [({"label_smoothing_factor": 0.1}, None), ({}, hundredfold), ({"guidance_weight": "auto"}, None)],
    ids=["smoothed", "own", "auto"],
)
def test_whatever_the_loss_it_is_the_one_of_columns_with_the_models_names(tmp_path, settings, own_loss):
    found = []
    for make, folder in ((renaming_trainer, "renamed"), (trainer, "plain")):
        model = build(**STILL).double()
        made = make(
            tmp_path / folder,
            model,
            examples("MaskedLM"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            **DESCENT,
            **settings,
        )
        made.compute_loss_func = own_loss
        found.append((*step(made), made.initial_guidance_weight))
    (gradients, log, weight), (expected, plain_log, plain_weight) = found
    assert weight == plain_weight
    assert log["loss"] == plain_log["loss"]
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("settings", [{}, {"label_smoothing_factor": 0.1}])
@pytest.mark.parametrize(("kind", "task"), [task for task in TASKS if task[1] in ("MaskedLM", "Translation")])
def test_evaluation_under_other_names_is_the_mean_over_labels_whatever_the_batch_size(tmp_path, kind, task, settings):
    data, model = examples(task), build(task, kind)
    expected = trainer(tmp_path, model, data, data, **settings).evaluate()["eval_loss"]
    for size in (8, 3):
        made = renaming_trainer(tmp_path, model, data, data, per_device_eval_batch_size=size, **settings)
        assert made.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_labels_that_a_subclass_makes_are_averaged_over_micro_batches(tmp_path):
    class Making(HeadwiseTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
            return super().compute_loss(model, {**inputs, "labels": labels}, *args, **kwargs)

    data = examples("MaskedLM").remove_columns("labels")
    made = trainer(
        tmp_path, build(**STILL), data, per_device_train_batch_size=2, gradient_accumulation_steps=4, **DESCENT
    )
    _, log = step(Making(build(**STILL), made.args, data_collator=collate, train_dataset=data))
    model = build(**STILL).train()
    losses = []
    for start in range(0, 8, 2):
        batch = collate(data.to_list()[start : start + 2])
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        losses.append(model(**batch, labels=labels).loss.item())
    assert log["task_loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_a_loss_of_a_subclass_that_is_the_mean_of_each_batch_is_averaged_over_micro_batches(tmp_path):
    class Own(HeadwiseTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            return torch.nn.functional.cross_entropy(logits, inputs["actions"])

    found = []
    for size, parts in ((8, 1), (2, 4)):
        model = build("SequenceClassification", guidance=None, **STILL).double()
        made = renaming_trainer(
            tmp_path / str(size),
            model,
            examples("SequenceClassification"),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            **{**DESCENT, "guidance_weight": None},
        )
        found.append(
            step(Own(model, made.args, data_collator=made.data_collator, train_dataset=made.train_dataset))[0]
        )
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-7, atol=1e-10)


def test_the_weight_of_guidance_balances_the_models_own_losses_where_a_subclass_has_another(tmp_path):
    class Own(HeadwiseTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).logits.square().mean()

    settings = {"guidance_weight": "auto", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    made = trainer(tmp_path, build(**STILL), examples("MaskedLM"), **DESCENT, **settings)
    own = Own(build(**STILL), made.args, data_collator=collate, train_dataset=made.train_dataset)
    for each in (made, own):
        each.train()
    assert own.initial_guidance_weight == made.initial_guidance_weight > 0
