"""Training with targets of heads that a dataset brings."""

import pytest
import torch
from datasets import Dataset
from tiny_training import STILL, build, collate, guidance_to_targets, trainer, with_targets

from hf_attn_dynamics import MaskedLanguageModelCollator
from hf_attn_dynamics.data import (
    align_sparse_targets,
    embedded_trees,
    encode_words,
    train_byte_level_bpe,
    tree_targets,
)
from hf_attn_dynamics.training import GuidanceCollator


TASKS = [("roberta", "MaskedLM"), ("bert", "PreTraining"), ("electra", "JointPreTraining"), ("marian", "Translation")]


def step(folder, task, kind, batch, accumulation, own_loss=None, **settings):
    """Gradient and log of one step of plain gradient descent."""
    model = build(task, kind, **STILL, guidance=guidance_to_targets(kind))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    descent = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    run = trainer(folder, model, with_targets(task), **descent, **sizes, **settings)
    run.compute_loss_func = own_loss
    run.train()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, run.state.log_history[0]


def summed(outputs, labels, num_items_in_batch):
    logits = outputs["logits"].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_accumulated_micro_batches_give_the_gradient_and_the_log_of_one_batch(tmp_path, kind, task):
    """Also where a micro-batch has no target at all."""
    whole, whole_log = step(tmp_path / "1x8", task, kind, 8, 1)
    parts, parts_log = step(tmp_path / "4x2", task, kind, 2, 4)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=5e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert parts_log["guidance_loss"] == pytest.approx(whole_log["guidance_loss"], rel=1e-5)
    assert parts_log["loss"] == pytest.approx(whole_log["loss"], rel=1e-5)


@pytest.mark.parametrize(("kind", "task"), [TASKS[0], TASKS[3]])
def test_a_loss_that_the_trainer_computes_is_accumulated_with_the_same_means(tmp_path, kind, task):
    whole, whole_log = step(tmp_path / "1x8", task, kind, 8, 1, own_loss=summed)
    parts, parts_log = step(tmp_path / "4x2", task, kind, 2, 4, own_loss=summed)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=5e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert parts_log["guidance_loss"] == pytest.approx(whole_log["guidance_loss"], rel=1e-5)
    assert whole_log["guidance_loss"] == pytest.approx(step(tmp_path, task, kind, 8, 1)[1]["guidance_loss"], rel=1e-5)


@pytest.mark.parametrize(("kind", "task"), TASKS[:2])
def test_the_gradient_is_that_of_the_models_loss(tmp_path, kind, task):
    found, _ = step(tmp_path, task, kind, 2, 4)
    model = build(task, kind, **STILL, guidance=guidance_to_targets(kind)).train()
    batch = collate(with_targets(task).remove_columns("unread").to_list())
    outputs = model(**batch, output_guidance_loss=True)
    (outputs.loss + 2 * outputs.guidance_loss).backward()
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=5e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_the_automatic_weight_balances_both_losses(tmp_path):
    model = build("MaskedLM", **STILL, guidance=guidance_to_targets())
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    run = trainer(tmp_path, model, with_targets("MaskedLM"), guidance_weight="auto", **sizes)
    run.train()
    (log,) = [entry for entry in run.state.log_history if "guidance_loss" in entry]
    assert log["guidance_weight"] * log["guidance_loss"] == pytest.approx(log["task_loss"], rel=1e-4)


@pytest.mark.parametrize("subword", ["first", "last", "all"])
@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4)])
def test_all_dependents_of_words_guide_a_head(tmp_path, batch, accumulation, subword):
    """The loss is −Σ P log A over rows of words with a dependent, with the attention of the eager kernel."""
    tokenizer = train_byte_level_bpe([tree.text for tree in embedded_trees()], vocab_size=280)
    trees = embedded_trees()[:8]
    dependents = [tree_targets(tree, direction="dependent", several="all") for tree in trees]
    columns = tokenizer([tree.text for tree in trees])
    columns["guidance_deps"], columns["guidance_deps_weights"] = align_sparse_targets(
        columns, dependents, subword, spans=[tree.spans for tree in trees], lost="error"
    )
    guidance = {"heads": {1: {"deps": [1]}}, "targets": {"deps": "sparse"}, "loss": "cross_entropy"}
    size = max(map(len, columns["input_ids"])) + 8
    model = build(**STILL, guidance=guidance, vocab_size=len(tokenizer), max_position_embeddings=size)
    run = trainer(
        tmp_path,
        model,
        Dataset.from_dict(dict(columns)),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.0,
    )
    run.data_collator = GuidanceCollator(MaskedLanguageModelCollator(tokenizer))
    run.train()

    model.eval().set_attn_implementation("eager")
    losses = []
    part = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}[subword]
    collator = MaskedLanguageModelCollator(tokenizer)
    for tree, own in zip(trees, dependents):
        ids, words = encode_words(tree, tokenizer)
        with torch.no_grad():
            log = model(**collator([{"input_ids": ids}]), output_attentions=True).attentions[1][0, 1].log()
        tokens = [[at for at, word in enumerate(words) if word == number][part] for number in range(len(own))]
        for row, targets in [(row, targets) for word, targets in enumerate(own) for row in tokens[word] if targets]:
            losses.append(-sum(log[row, tokens[target]].mean() for target in targets) / len(targets))
    assert run.state.log_history[0]["guidance_loss"] == pytest.approx(float(sum(losses)) / len(losses), rel=1e-4)
    assert "guided_accuracy_deps" in run.state.log_history[0]


@pytest.mark.parametrize(("kind", "task", "column"), [("roberta", "MaskedLM", "guidance_why"),
                                                      ("marian", "Translation", "guidance_aligned")])  # fmt: skip
def test_a_dataset_without_the_column_is_refused_before_the_first_step(tmp_path, kind, task, column):
    model = build(task, kind, guidance=guidance_to_targets(kind))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = trainer(tmp_path, model, with_targets(task).remove_columns(column))
    with pytest.raises(ValueError, match=f"needs the column {column} of shape"):
        run.train()
    assert run.state.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_keys_beyond_the_sentence_are_refused_before_the_first_step(tmp_path):
    data = with_targets("MaskedLM").map(lambda row: {"guidance_syntax": [99] * len(row["input_ids"])})
    with pytest.raises(ValueError, match="guidance_syntax names key 99 .sentence 0, row 0"):
        trainer(tmp_path, build("MaskedLM", guidance=guidance_to_targets()), data).train()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_dataset_without_any_target_is_refused(tmp_path, steps):
    none = with_targets("MaskedLM").map(lambda row: {"guidance_why": [0.0] * len(row["input_ids"])})
    run = trainer(tmp_path, build("MaskedLM", guidance=guidance_to_targets()), none, max_steps=steps)
    with pytest.raises(ValueError, match="train_dataset had no target in guidance_why in 1 steps: all are -100, or"):
        run.train()


def test_a_first_step_without_targets_is_not_refused_if_others_follow(tmp_path):
    data = with_targets("MaskedLM")
    run = trainer(
        tmp_path, build("MaskedLM", guidance=guidance_to_targets()), data, per_device_train_batch_size=2, max_steps=4
    )
    run.train()
    assert run.state.global_step == 4


@pytest.mark.parametrize("own_loss", [None, summed])
@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4)])
def test_the_log_has_the_accuracy_in_the_last_step_of_each_window(tmp_path, own_loss, batch, accumulation):
    data, model = with_targets("MaskedLM"), build("MaskedLM", **STILL, guidance=guidance_to_targets())
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    run = trainer(tmp_path, model, data, **sizes, max_steps=4, logging_steps=2, learning_rate=0.0)
    run.compute_loss_func = own_loss
    run.train()
    hits = model.eval()(**collate(data.remove_columns("unread").to_list()), output_guided_hits=True).guided_hits
    entries = [entry for entry in run.state.log_history if "guidance_loss" in entry]
    assert len(entries) == 2
    for entry in entries:
        for name, of_sentences in hits.items():
            found, count = of_sentences.sum(0).tolist()
            assert entry[f"guided_accuracy_{name}"] == pytest.approx(found / count)


@pytest.mark.parametrize("when", [{"logging_strategy": "epoch"}, {"logging_first_step": True, "logging_steps": 100}])
def test_entries_at_other_times_have_accuracies_too(tmp_path, when):
    data, model = with_targets("MaskedLM"), build("MaskedLM", **STILL, guidance=guidance_to_targets())
    epochs = {"max_steps": -1, "num_train_epochs": 2} if "logging_strategy" in when else {"max_steps": 2}
    run = trainer(tmp_path, model, data, **{"per_device_train_batch_size": 4, "learning_rate": 0.0} | epochs | when)
    run.train()
    hits = model.eval()(**collate(data.remove_columns("unread").to_list()), output_guided_hits=True).guided_hits
    entries = [entry for entry in run.state.log_history if "guidance_loss" in entry]
    assert all(f"guided_accuracy_{name}" in entries[0] for name in hits)
    if "logging_strategy" in when:
        assert len(entries) == 2
        for name, of_sentences in hits.items():
            found, count = of_sentences.sum(0).tolist()
            assert entries[1][f"guided_accuracy_{name}"] == pytest.approx(found / count)


@pytest.mark.parametrize(("kind", "task", "generated"), [(*TASKS[0], False), (*TASKS[3], False), (*TASKS[3], True)])
def test_evaluation_reports_how_often_guided_heads_find_their_targets(tmp_path, kind, task, generated):
    data, model = with_targets(task), build(task, kind, guidance=guidance_to_targets(kind)).eval()
    settings = {"predict_with_generate": True, "generation_max_length": 4} if generated else {}
    metrics = trainer(tmp_path, model, data, data, per_device_eval_batch_size=3, **settings).evaluate()
    hits = model(**collate(data.remove_columns("unread").to_list()), output_guided_hits=True).guided_hits
    assert len(hits) == (3 if kind == "marian" else 2)
    for name, of_sentences in hits.items():
        found, count = of_sentences.sum(0).tolist()
        assert metrics[f"eval_guided_accuracy_{name}"] == pytest.approx(found / count)
    if not generated:
        # Whatever is left out of the predictions, they begin with the logits.
        found = trainer(tmp_path, model, data, data, per_device_eval_batch_size=3).predict(data, ignore_keys=["x"])
        predictions = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
        assert predictions.shape[-1] == model.config.vocab_size
    without = data.remove_columns([name for name in data.column_names if name.startswith("guidance_")])
    assert not any("accuracy" in name for name in trainer(tmp_path, model, data, without, **settings).evaluate())


@pytest.mark.parametrize("generated", [False, True])
def test_the_evaluation_loss_does_not_depend_on_targets(tmp_path, generated):
    data = with_targets("Translation")
    settings = {"predict_with_generate": True, "generation_max_length": 4} if generated else {}
    losses = []
    for guidance in (guidance_to_targets("marian"), {"encoder": {}, "cross": {}}):
        model = build("Translation", "marian", guidance=guidance)
        losses.append(trainer(tmp_path, model, data, data, **settings).evaluate()["eval_loss"])
    assert losses[0] == losses[1]
    unlabelled = trainer(
        tmp_path, build("Translation", "marian", guidance=guidance_to_targets("marian")), data, **settings
    )
    assert len(unlabelled.predict(data).predictions)
