import copy
import math
from types import SimpleNamespace

import pytest
import torch
from tiny_models import GUIDANCE, SIZES, tiny_config
from tiny_training import STILL, build, collate, examples, trainer
from torch.nn.utils import parameters_to_vector
from transformers import (
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForQuestionAnswering,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import HPSearchBackend

from hf_attn_dynamics import (
    HeadwiseRobertaForMaskedLM,
    HeadwiseSeq2SeqTrainer,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
    prune_heads,
)


EVERYWHERE = {"encoder": {}, "decoder": {}, "cross": {}}


def gradient_of_one_step(folder, task, kind, batch, accumulation, guidance=None, own_loss=None, **settings):
    """Every parameter's gradient, read off a step of plain gradient descent."""
    model = build(task, kind, **STILL, **({} if guidance is None else {"guidance": guidance}))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = trainer(
        folder,
        model,
        examples(task),
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        guidance_schedule="constant",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **settings,
    )
    run.compute_loss_func = own_loss
    run.train()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, run.state.log_history[0]


TASKS = [
    ("roberta", "MaskedLM"),
    ("bert", "MaskedLM"),
    ("bert", "PreTraining"),
    ("roberta", "SequenceClassification"),
    ("roberta", "TokenClassification"),
    ("roberta", "QuestionAnswering"),
    ("electra", "ReplacedTokens"),
    ("marian", "Translation"),
]


@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_accumulated_micro_batches_give_the_gradient_and_the_log_of_one_batch(tmp_path, kind, task):
    whole, whole_log = gradient_of_one_step(tmp_path / "1x8", task, kind, 8, 1)
    parts, parts_log = gradient_of_one_step(tmp_path / "4x2", task, kind, 2, 4)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=2e-7, msg=lambda m, n=name: f"{n}: {m}")
    terms = {"loss", "task_loss", "guidance_loss"}
    if task == "PreTraining":
        terms |= {"mlm_loss", "nsp_loss"}
        assert whole_log["task_loss"] == pytest.approx(whole_log["mlm_loss"] + whole_log["nsp_loss"], rel=1e-5)
    if task == "QuestionAnswering":
        terms |= {"start_loss", "end_loss"}
    assert terms == {key for key in whole_log if key.endswith("loss")}
    for term in terms:
        assert parts_log[term] == pytest.approx(whole_log[term], rel=1e-5)
    assert whole_log["loss"] == pytest.approx(whole_log["task_loss"] + 2 * whole_log["guidance_loss"], rel=1e-5)


@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_the_gradient_is_that_of_the_stock_loss_plus_the_guidance_loss(tmp_path, kind, task):
    found, _ = gradient_of_one_step(tmp_path, task, kind, 2, 4)
    model = build(task, kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    outputs = model(**collate(examples(task).to_list()), output_guidance_loss=True)
    (outputs.loss + 2 * outputs.guidance_loss).backward()
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=2e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_without_guidance_the_log_has_the_task_loss_alone(tmp_path):
    _, log = gradient_of_one_step(tmp_path, "MaskedLM", "roberta", 4, 2, guidance_weight=0)
    assert log["task_loss"] == pytest.approx(log["loss"], rel=1e-6)
    assert "guidance_loss" not in log


def hundredfold(outputs, labels, num_items_in_batch):
    summed = torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return 100 * summed / num_items_in_batch


@pytest.mark.parametrize(("smoothing", "own_loss"), [(0.0, None), (0.5, None), (0.0, hundredfold)])
def test_auto_weight_balances_the_losses_of_the_first_batch_and_falls_to_zero(tmp_path, smoothing, own_loss):
    model = build(**STILL)
    run = trainer(
        tmp_path,
        model,
        examples("MaskedLM"),
        guidance_weight="auto",
        max_steps=5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.0,
        label_smoothing_factor=smoothing,
    )
    run.compute_loss_func = own_loss
    run.train()
    history = [entry for entry in run.state.log_history if "guidance_loss" in entry]
    assert history[0]["guidance_weight"] * history[0]["guidance_loss"] == pytest.approx(
        history[0]["task_loss"], rel=1e-4
    )
    initial = history[0]["guidance_weight"]
    assert [h["guidance_weight"] / initial for h in history] == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_losses_that_can_not_be_balanced_are_refused(tmp_path):
    unlabelled = examples("MaskedLM").map(lambda row: {"labels": [-100] * len(row["labels"])})
    with pytest.raises(ValueError, match="found a task loss of 0.0 .* set guidance_weight to a number"):
        trainer(tmp_path, build(), unlabelled, guidance_weight="auto").train()


@pytest.mark.parametrize(("stop", "order"), [(3, "random"), (6, "random"), (5, "group_by_length")])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, stop, order):
    """Also where the run was stopped between its last step and its end."""
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "guidance_weight": "auto",
        "save_strategy": "steps",
        "save_steps": stop,
        "train_sampling_strategy": order,
        "learning_rate": 1e-2,
    }
    data = examples("MaskedLM", 14)
    whole = trainer(tmp_path / "whole", build(), data, **settings)
    whole.train()
    stopped = trainer(tmp_path / "stopped", build(), data, **settings)
    stopped.train()
    resumed = trainer(tmp_path / "stopped", build(seed=5), data, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{stop}"))
    assert resumed.initial_guidance_weight == whole.initial_guidance_weight > 0
    for (name, expected), found in zip(whole.model.state_dict().items(), resumed.model.state_dict().values()):
        assert torch.equal(expected, found), name
    logged = [[e for e in run.state.log_history if "task_loss" in e] for run in (whole, resumed)]
    for expected, found in zip(*logged):
        assert {k: expected[k] for k in ("task_loss", "guidance_loss", "guidance_weight")} == {
            k: found[k] for k in ("task_loss", "guidance_loss", "guidance_weight")
        }


@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_evaluation_reports_the_task_loss_over_all_labels_whatever_the_batch_size(tmp_path, kind, task):
    data = examples(task, 7)
    model = build(task, kind)
    found = [
        trainer(tmp_path, model, data, data, per_device_eval_batch_size=size).evaluate()["eval_loss"]
        for size in (1, 3, 7)
    ]
    with torch.no_grad():
        expected = model.eval()(**collate(data.to_list())).loss.item()
    assert found == pytest.approx([expected] * 3, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing_factor": 0.1}])
def test_a_batch_that_is_generated_from_is_read_once_more_for_its_loss(tmp_path, settings):
    data, model = examples("Translation", 7), build("Translation", "marian")
    settings = {"guidance_weight": None, "per_device_eval_batch_size": 4, **settings}
    expected = trainer(tmp_path, model, data, data, **settings).predict(data)
    made = trainer(tmp_path, model, data, data, predict_with_generate=True, **settings)
    read = []
    model.get_encoder().register_forward_hook(lambda *_: read.append(1))
    found = made.predict(data, max_new_tokens=4)
    assert len(read) == 2 * 2
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)
    assert len(found.predictions) == len(found.label_ids) == 7


@pytest.mark.parametrize("by", ["argument", "generation_config"])
def test_all_sequences_that_are_generated_for_a_sentence_are_kept(tmp_path, by):
    data, model = examples("Translation", 5), build("Translation", "marian")
    made = trainer(tmp_path, model, data, data, predict_with_generate=True, per_device_eval_batch_size=4)
    stock = Seq2SeqTrainer(model, made.args, data_collator=collate)
    settings = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 4}
    if by == "generation_config":
        model.generation_config.update(**settings)
        settings = {}
    found, expected = (each.predict(data, **settings).predictions for each in (made, stock))
    assert len(found) == 10
    assert (found == expected).all()


def test_arguments_that_know_nothing_of_generation_are_refused(tmp_path):
    model, args = build("Translation", "marian"), HeadwiseTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match="needs args of HeadwiseSeq2SeqTrainingArguments or .* got HeadwiseTraining"):
        HeadwiseSeq2SeqTrainer(model, args)


def test_evaluation_of_several_terms_names_each(tmp_path):
    metrics = trainer(tmp_path, build("PreTraining", "bert"), None, examples("PreTraining")).evaluate()
    assert metrics["eval_loss"] == pytest.approx(metrics["eval_mlm_loss"] + metrics["eval_nsp_loss"])


def test_training_moves_every_parameter(tmp_path):
    model = build("PreTraining", "bert")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer(tmp_path, model, examples("PreTraining"), max_steps=3, learning_rate=1e-2).train()
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []


def test_a_step_without_any_label_gives_no_nan(tmp_path):
    data = examples("MaskedLM").map(lambda row: {"labels": [-100] * len(row["labels"])})
    model = build()
    run = trainer(tmp_path, model, data, max_steps=1, learning_rate=1e-3)
    run.train()
    assert all(p.isfinite().all() for p in model.parameters())
    assert run.state.log_history[0]["task_loss"] == 0


@pytest.mark.parametrize("model_class", [RobertaForMaskedLM, RobertaForQuestionAnswering])
def test_a_stock_model_is_trained_as_by_the_stock_trainer(tmp_path, model_class):
    settings = {"max_steps": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "label_smoothing_factor": 0.1,
                "gradient_accumulation_steps": 2, "guidance_weight": None}  # fmt: skip
    data = examples(model_class.__name__.removeprefix("RobertaFor"))
    args = trainer(tmp_path, model_class(RobertaConfig(**SIZES)), data, **settings).args
    weights, losses = [], []
    for kind in (HeadwiseTrainer, Trainer):
        torch.manual_seed(0)
        made = kind(model_class(RobertaConfig(**SIZES)), args, data_collator=collate, train_dataset=data)
        made.train()
        weights.append(parameters_to_vector(made.model.parameters()))
        losses.append([entry.get("loss") for entry in made.state.log_history])
    assert torch.equal(*weights)
    assert losses[0] == losses[1]


def test_the_stock_trainer_gets_the_gradient_of_the_whole_batch_too(tmp_path):
    moved = []
    for batch, accumulation in ((8, 1), (2, 4)):
        model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        before = model.lm_head.dense.weight.detach().clone()
        args = TrainingArguments(
            str(tmp_path / str(batch)),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            report_to="none",
            save_strategy="no",
            use_cpu=True,
        )
        Trainer(model, args, data_collator=collate, train_dataset=examples("MaskedLM")).train()
        moved.append(before - model.lm_head.dense.weight.detach())
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=2e-7)


@pytest.mark.parametrize(
    ("task", "kind", "column", "message"),
    [
        ("MaskedLM", "roberta", "labels", "HeadwiseRobertaForMaskedLM needs labels for its loss"),
        ("PreTraining", "bert", "next_sentence_label", "needs labels and next_sentence_label for its loss"),
        ("QuestionAnswering", "roberta", "end_positions", "needs start_positions and end_positions"),
    ],
)
@pytest.mark.parametrize("weight", ["auto", 0])
def test_missing_labels_are_named(tmp_path, task, kind, column, message, weight):
    data = examples(task).remove_columns(column)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, build(task, kind), data, guidance_weight=weight).train()


def test_a_loss_can_be_computed_outside_training(tmp_path):
    model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    run = trainer(tmp_path, model, examples("MaskedLM"))
    batch = collate(examples("MaskedLM").to_list())
    found = run.compute_loss(model.train(), batch)
    torch.testing.assert_close(found, model(**batch).loss)


def test_a_loss_that_is_computed_after_an_error_is_of_its_batch_alone(tmp_path):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("interrupted")

    model = build(guidance=None, **STILL)
    run = trainer(tmp_path, model, examples("MaskedLM"), guidance_weight=None, callbacks=[Fail()])
    with pytest.raises(RuntimeError, match="interrupted"):
        run.train()
    batch = collate(examples("MaskedLM").to_list()[1:3])
    torch.testing.assert_close(run.compute_loss(model.train(), batch), model(**batch).loss)


class RecordingCollator:
    """Notes the epoch of every batch, and hands out the same mask in none of them."""

    def __init__(self):
        self.epoch = 0
        self.seen = []

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __call__(self, features):
        self.seen.append(self.epoch)
        return collate(features)


def test_evaluations_are_masked_alike_and_epochs_anew(tmp_path):
    data = examples("MaskedLM")
    run = trainer(
        tmp_path, build(), data, data, max_steps=3, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8
    )
    run = HeadwiseTrainer(
        run.model, run.args, data_collator=RecordingCollator(), train_dataset=data, eval_dataset=data
    )
    run.train()
    # One step an epoch, an evaluation after each.
    assert run.data_collator.seen == [0, 0, 1, 0, 2, 0]


def test_every_pass_over_a_stream_is_an_epoch(tmp_path):
    stream = examples("MaskedLM").to_iterable_dataset()
    run = trainer(tmp_path, build(), stream, max_steps=7, per_device_train_batch_size=4)
    run = HeadwiseTrainer(run.model, run.args, data_collator=RecordingCollator(), train_dataset=stream)
    run.train()
    # A batch is fetched ahead of its step.
    assert run.data_collator.seen[:7] == [0, 0, 1, 1, 2, 2, 3]


def weights_after_a_stream(folder, count, resume=None, **settings):
    """Trained on a stream of so many sentences, and the epochs of the masks."""
    stream = examples("MaskedLM", 6).take(count).to_iterable_dataset()
    settings = {"per_device_train_batch_size": 1, "learning_rate": 1e-2, **settings}
    run = trainer(folder, build(seed=0 if resume is None else 5), stream, **settings)
    run = HeadwiseTrainer(run.model, run.args, data_collator=RecordingCollator(), train_dataset=stream)
    run.train(resume_from_checkpoint=resume)
    return parameters_to_vector(run.model.parameters()), run.data_collator.seen


def test_what_does_not_fill_a_step_at_the_end_of_a_stream_is_left_out(tmp_path):
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2}
    expected, _ = weights_after_a_stream(tmp_path, 4, **settings)
    found, _ = weights_after_a_stream(tmp_path, 5, **settings)
    assert torch.equal(found, expected)


def test_a_stream_that_is_shorter_than_a_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3 batches, but train_dataset has only 2"):
        weights_after_a_stream(tmp_path, 2, max_steps=1, gradient_accumulation_steps=3)


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_a_resumed_run_goes_on_within_its_pass_over_a_stream(tmp_path, stop):
    settings = {"max_steps": 5, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}
    expected, seen = weights_after_a_stream(tmp_path, 5, **settings)
    found, again = weights_after_a_stream(tmp_path, 5, str(tmp_path / f"checkpoint-{stop}"), **settings)
    assert torch.equal(found, expected)
    assert again[-1:] == (seen[-1:] if stop < 5 else [])


def test_workers_that_would_keep_the_first_epoch_are_refused(tmp_path):
    run = trainer(
        tmp_path, build(), examples("MaskedLM"), dataloader_persistent_workers=True, dataloader_num_workers=1
    )
    with pytest.raises(ValueError, match="dataloader_persistent_workers=True"):
        HeadwiseTrainer(run.model, run.args, data_collator=RecordingCollator())


@pytest.mark.parametrize(("task", "kind"), [("MaskedLM", "roberta"), ("SequenceClassification", "bert")])
def test_smoothed_losses_are_means_over_all_labels_whatever_the_batch_size(tmp_path, task, kind):
    model, data = build(task, kind), examples(task)
    settings = {"label_smoothing_factor": 0.1}
    losses = [
        trainer(tmp_path, model, data, data, per_device_eval_batch_size=size, **settings).evaluate()["eval_loss"]
        for size in (len(data), 3, 1)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    # The whole set at once is what the stock smoother takes the mean of.
    batch = collate(list(data))
    labels = batch["labels"]
    logits = model.eval()(**{name: value for name, value in batch.items() if name != "labels"}).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)
    assert losses[0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "task", "guidance"), [("roberta", "MaskedLM", GUIDANCE), ("marian", "Translation", EVERYWHERE)]
)
def test_with_smoothed_labels_the_gradient_of_any_batches_is_that_of_both_losses_of_the_whole(
    tmp_path, kind, task, guidance
):
    model = build(task, kind, guidance=guidance, **STILL).train()
    batch = collate(examples(task).to_list())
    outputs = model(**batch, output_guidance_loss=True)
    smoothed = torch.nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1
    )
    (smoothed + 2 * outputs.guidance_loss).backward()
    for size, accumulation in ((8, 1), (2, 4)):
        found, log = gradient_of_one_step(
            tmp_path / str(size), task, kind, size, accumulation, guidance, label_smoothing_factor=0.1
        )
        assert log["task_loss"] == pytest.approx(smoothed.item(), rel=1e-5)
        assert log["guidance_loss"] == pytest.approx(outputs.guidance_loss.item(), rel=1e-5)
        for name, p in model.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=5e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_a_loss_of_ones_own_that_is_told_no_count_is_the_mean_over_micro_batches(tmp_path):
    def own_loss(outputs, labels, num_items_in_batch):
        assert num_items_in_batch is None
        return outputs["start_logits"].square().mean()

    whole, whole_log = gradient_of_one_step(tmp_path / "1x8", "QuestionAnswering", "roberta", 8, 1, own_loss=own_loss)
    parts, parts_log = gradient_of_one_step(tmp_path / "4x2", "QuestionAnswering", "roberta", 2, 4, own_loss=own_loss)
    assert parts_log["loss"] == pytest.approx(whole_log["loss"], rel=1e-5)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=5e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_a_loss_that_is_in_no_table_is_averaged_over_micro_batches_beside_guidance_that_is_exact(tmp_path):
    class Unlisted(HeadwiseRobertaForMaskedLM):
        loss_terms = ()

    def unlisted():
        torch.manual_seed(0)
        return Unlisted(tiny_config(**STILL))

    data, model = examples("MaskedLM").to_list()[1:3], unlisted().train()
    made = trainer(tmp_path, unlisted(), examples("MaskedLM").select(range(1, 3)), optim="sgd", learning_rate=1.0,
                   lr_scheduler_type="constant", max_grad_norm=0.0, per_device_train_batch_size=1,
                   gradient_accumulation_steps=2)  # fmt: skip
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.train()
    losses = [model(**collate([row])).loss for row in data]
    guidance = model(**collate(data), output_guidance_loss=True).guidance_loss
    (sum(losses) / 2 + 2 * guidance).backward()
    logged = made.state.log_history[0]
    assert logged["task_loss"] == pytest.approx(sum(losses).item() / 2, rel=1e-5)
    assert logged["guidance_loss"] == pytest.approx(guidance.item(), rel=1e-5)
    for (name, p), trained in zip(model.named_parameters(), made.model.parameters()):
        torch.testing.assert_close(before[name] - trained, p.grad, rtol=1e-4, atol=5e-7, msg=name)


@pytest.mark.parametrize(
    ("kind", "task", "changes"),
    [
        ("roberta", "QuestionAnswering", {}),
        ("electra", "ReplacedTokens", {}),
        ("electra", "JointPreTraining", {}),
        ("bert", "PreTraining", {}),
        ("bert", "SequenceClassification", {"num_labels": 1}),
        ("bert", "SequenceClassification", {"problem_type": "multi_label_classification"}),
    ],
)
def test_labels_that_can_not_be_smoothed_are_refused(tmp_path, kind, task, changes):
    model = build(task, kind, **changes)
    with pytest.raises(
        ValueError,
        match=f"label_smoothing_factor=0.1 needs a single label column of classes, which {type(model).__name__}",
    ):
        trainer(tmp_path, model, examples(task), label_smoothing_factor=0.1)


def test_rows_for_guidance_are_those_that_count_and_change_nothing_else():
    model = build("Translation", "marian", guidance=EVERYWHERE).eval()
    batch = collate(examples("Translation").to_list())
    expected = model(**batch, output_guidance_loss=True)
    with pytest.raises(ValueError, match="guidance_rows are given beside labels, which tell which rows count"):
        model(**batch, guidance_rows=batch["labels"] != -100, output_guidance_loss=True)
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    found = model(**batch, guidance_rows=labels != -100, output_guidance_loss=True)
    assert found.loss is None
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.guidance_loss, expected.guidance_loss)
    assert found.guidance_loss != model(**batch, output_guidance_loss=True).guidance_loss


@pytest.mark.parametrize(("kind", "task", "asked"), [("marian", "Translation", False), ("roberta", "MaskedLM", True)])
def test_rows_for_guidance_that_nothing_reads_are_refused(kind, task, asked):
    batch = collate(examples(task).to_list())
    with pytest.raises(ValueError, match=r"guidance_rows are given to Headwise\w+, but only the guidance loss of"):
        build(task, kind)(**batch, guidance_rows=batch["labels"] != -100, output_guidance_loss=asked)


@pytest.mark.parametrize("weight", [2.0, "auto"])
def test_a_weight_for_a_model_without_guidance_is_refused(tmp_path, weight):
    with pytest.raises(ValueError, match=f"guidance_weight={weight}, but HeadwiseRobertaForMaskedLM has no guidance"):
        trainer(tmp_path, build(guidance=None), examples("MaskedLM"), guidance_weight=weight)


def test_without_a_weight_guided_models_alone_are_guided_and_by_the_papers_rule(tmp_path):
    settings = {"guidance_weight": None, "max_steps": 1}
    guided, automatic = (
        trainer(tmp_path, build(), examples("MaskedLM"), **{**settings, "guidance_weight": weight})
        for weight in (None, "auto")
    )
    unguided = trainer(tmp_path, build(guidance=None), examples("MaskedLM"), **settings)
    for made in (guided, automatic, unguided):
        made.train()
    assert guided.initial_guidance_weight == automatic.initial_guidance_weight > 0
    assert unguided.initial_guidance_weight is None


def test_under_plain_arguments_a_guided_model_is_guided_by_the_defaults(tmp_path):
    settings = {"max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
                "disable_tqdm": True, "use_cpu": True}  # fmt: skip
    weights, logs = [], []
    for arguments in (TrainingArguments, HeadwiseTrainingArguments):
        made = HeadwiseTrainer(
            build(), arguments(str(tmp_path), **settings), data_collator=collate, train_dataset=examples("MaskedLM")
        )
        made.train()
        weights.append(parameters_to_vector(made.model.parameters()))
        logs.append([(e["guidance_loss"], e["guidance_weight"]) for e in made.state.log_history if "task_loss" in e])
    assert torch.equal(*weights)
    assert logs[0] == logs[1]
    assert logs[0][0][1] > 0


def trainer_of_made_models(folder, **settings):
    made = trainer(folder, build(gates={}), examples("MaskedLM"), max_steps=2, **settings)
    return HeadwiseTrainer(
        args=made.args, data_collator=collate, train_dataset=made.train_dataset, model_init=lambda: build(gates={})
    )


CHOSEN = [{"guidance_weight": 3.0}, {"gate_penalty": 0.5}, {"target_heads": 3}, {"ema_decay": 0.5}]


@pytest.mark.parametrize("settings", CHOSEN, ids=lambda settings: next(iter(settings)))
def test_a_trial_of_a_hyperparameter_search_is_trained_with_what_it_chose(tmp_path, monkeypatch, settings):
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)
    expected, searching = (
        trainer_of_made_models(tmp_path, **{"guidance_weight": 0, **chosen}) for chosen in (settings, {})
    )
    expected.train()
    searching.hp_search_backend, searching.hp_space = HPSearchBackend.OPTUNA, lambda trial: trial.params
    searching.train(trial=SimpleNamespace(number=0, params=settings))
    assert torch.equal(*(parameters_to_vector(made.model.parameters()) for made in (expected, searching)))
    with pytest.raises(ValueError, match="gate_penalty must be finite and at least 0, got -1.0"):
        searching.train(trial=SimpleNamespace(number=1, params={"gate_penalty": -1.0}))


def test_layers_that_were_pruned_between_two_trainings_train_on(tmp_path):
    model = build(**STILL)
    made = trainer(tmp_path, model, examples("MaskedLM"), learning_rate=1e-2)
    made.train()
    fresh = trainer(tmp_path, copy.deepcopy(prune_heads(model, {0: [1, 2], 1: [0]})), examples("MaskedLM"),
                    learning_rate=1e-2)  # fmt: skip
    for each in (made, fresh):
        each.train()
    assert torch.equal(*(parameters_to_vector(each.model.parameters()) for each in (made, fresh)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance_weight": "big"}, "guidance_weight must be a number or 'auto', got 'big'"),
        ({"guidance_weight": -1}, "at least 0, got -1"),
        ({"guidance_weight": math.inf}, "finite"),
        (
            {"guidance_schedule": "cosine"},
            "guidance_schedule must be one of linear, hold_linear, constant, hold, got 'cosine'",
        ),
        ({"guidance_hold_steps": 5}, "guidance_hold_steps=5 needs guidance_schedule"),
        ({"guidance_hold_steps": 0.5}, "guidance_hold_steps must be an integer, got 0.5"),
        ({"ema_decay": "much"}, "ema_decay must be a number, got 'much'"),
    ],
)
def test_impossible_arguments_are_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        HeadwiseTrainingArguments(output_dir=str(tmp_path), **settings)
