# Licensed under the Apache License, Version 2.0.
"""Bag-of-words attention: values, padding, what is frozen, and checkpoints."""

import itertools

import pytest
import torch
import transformers
from datasets import Dataset
from slow_score_norm import padded, ragged_words, slow_context, slow_logits
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_attn_dynamics import BowAttentionConfig, BowAttentionForSequenceClassification


CLASSIFIERS = ("fixed", "linear", "mlp")
KINDS = list(itertools.product(CLASSIFIERS, (False, True)))
SENTENCES = ragged_words(7, 12, shortest=2)


def model_of(classifier="linear", convolution=False, **changes):
    """A model whose weights all matter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "hidden_size": 5, "key_size": 3, "num_labels": 4, "embedding_std": 1.0, "key_std": 1.0}
    settings = {**sizes, "classifier": classifier, "convolution": convolution, **changes}
    return BowAttentionForSequenceClassification(BowAttentionConfig(**settings)).double().eval()


@pytest.mark.parametrize(("classifier", "convolution"), KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_what_the_equations_give_for_each_sentence(classifier, convolution, side):
    model = model_of(classifier, convolution)
    ids = padded(SENTENCES, side, extra=2)
    output = model(ids)
    torch.testing.assert_close(output.logits, slow_logits(model, SENTENCES))
    torch.testing.assert_close(output.context, torch.stack([slow_context(model, words) for words in SENTENCES]))
    torch.testing.assert_close(output.attention_weights.sum(-1), torch.ones(len(ids)).double())
    units = torch.tensor([len(words) - convolution for words in SENTENCES])
    assert torch.equal((output.attention_weights > 0).sum(-1), units)


def test_a_mask_says_what_is_padding_whatever_the_words():
    model, ids = model_of(), padded(SENTENCES)
    mask = (ids != 0).long()
    expected = model(ids).logits
    torch.testing.assert_close(model(ids.masked_fill(ids == 0, 7), attention_mask=mask).logits, expected)
    assert not torch.allclose(model(ids, attention_mask=torch.ones_like(ids)).logits, expected)


@pytest.mark.parametrize("convolution", [False, True])
def test_a_sentence_without_words_is_refused_as_by_other_lexical_models(convolution):
    with pytest.raises(ValueError, match="sentence 1 of the batch is empty; leave it out"):
        model_of("mlp", convolution)(torch.tensor([[3, 4, 5], [0, 0, 0]]))


def test_a_sentence_of_one_word_has_no_pair_no_context_and_no_gradient():
    model = model_of("mlp", convolution=True)
    output = model(torch.tensor([[3, 0, 0]]), labels=torch.tensor([1]))
    assert not output.context.any()
    output.loss.backward()
    assert not model.embeddings.weight.grad.any()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_at_first_all_words_have_the_same_weight():
    model = BowAttentionForSequenceClassification(
        BowAttentionConfig(vocab_size=4000, num_labels=4, classifier="fixed")
    )
    assert not model.keys.weight.any()
    assert model.query.norm().item() == pytest.approx(1, abs=1e-6)
    assert model.embeddings.weight.std().item() == pytest.approx(1e-3, rel=0.02)
    columns = model.classifier.weight
    torch.testing.assert_close(columns @ columns.T, torch.eye(4), rtol=0, atol=1e-6)


def test_a_query_has_the_variance_that_is_asked_for():
    model = BowAttentionForSequenceClassification(BowAttentionConfig(vocab_size=9, key_size=4000, query_std=2.0))
    assert model.query.std().item() == pytest.approx(2, rel=0.05)


def test_the_loss_is_the_mean_over_labels_or_over_those_of_the_whole_batch():
    model, ids = model_of(), padded(SENTENCES)
    labels = torch.tensor([0, 1, -100, 3, 2, 1, 0])
    logits = model(ids).logits
    counted = labels >= 0
    each = logits.logsumexp(-1)[counted] - logits[counted, labels[counted]]
    torch.testing.assert_close(model(ids, labels=labels).loss, each.mean())
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=24).loss, each.sum() / 24)


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({}, {"query"}),
        ({"classifier": "fixed"}, {"query", "classifier.weight"}),
        ({"freeze_keys": True}, {"query", "keys.weight"}),
        ({"freeze_embeddings": True}, {"query", "embeddings.weight"}),
        ({"freeze_query": False, "classifier": "mlp"}, set()),
    ],
)
def test_what_is_frozen_stays_frozen_in_a_checkpoint(settings, frozen, tmp_path):
    model = model_of(**settings)
    model.save_pretrained(tmp_path)
    loaded, _ = BowAttentionForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    for one in (model, AutoModelForSequenceClassification.from_pretrained(tmp_path), loaded):
        assert {name for name, parameter in one.named_parameters() if not parameter.requires_grad} == frozen


@pytest.mark.parametrize(("classifier", "convolution"), KINDS)
def test_auto_classes_bring_back_the_same_model(classifier, convolution, tmp_path):
    model, ids = model_of(classifier, convolution), padded(SENTENCES)
    model.save_pretrained(tmp_path)
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype="auto").eval()
    assert type(back) is type(model)
    assert type(AutoConfig.from_pretrained(tmp_path)) is BowAttentionConfig
    assert torch.equal(back(ids).logits, model(ids).logits)


def test_the_saved_code_works_by_itself(tmp_path):
    model, ids = model_of("mlp", True), padded(SENTENCES)
    model.save_pretrained(tmp_path)
    remote = transformers.dynamic_module_utils.get_class_from_dynamic_module(
        "modeling_bow_attention.BowAttentionForSequenceClassification", str(tmp_path)
    )
    assert remote is not type(model)
    assert torch.equal(remote.from_pretrained(tmp_path, dtype="auto").eval()(ids).logits, model(ids).logits)


def test_a_trainer_makes_the_same_step_with_and_without_accumulation(tmp_path):
    data = Dataset.from_dict({"input_ids": padded(SENTENCES).tolist(), "labels": [0, 1, 2, 3, 0, 1, 2]})
    trained = []
    for batch_size, accumulated in ((7, 1), (2, 4)):
        model = model_of()
        args = TrainingArguments(
            tmp_path / str(batch_size),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulated,
            max_steps=1,
            learning_rate=0.1,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, args, train_dataset=data).train()
        trained.append(model.state_dict())
    before = model_of().state_dict()
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value)
        assert torch.equal(value, before[name]) == (name == "query"), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classifier": "cnn"}, "classifier must be one of fixed, linear, mlp, got 'cnn'"),
        ({"vocab_size": 0}, "vocab_size must be an integer from 1 to .* got 0"),
        ({"vocab_size": 4, "pad_token_id": 4}, "pad_token_id must be None or from 0 to 3 .vocab_size is 4., got 4"),
        ({"num_labels": 1}, "num_labels must be at least 2, got 1"),
        ({"problem_type": "regression"}, "problem_type must be single_label_classification, got 'reg"),
        ({"embedding_std": -1.0}, "embedding_std must not be negative, got -1.0"),
        ({"key_std": -0.5}, "key_std must not be negative, got -0.5"),
        ({"query_std": 0.0}, "query_std must be greater than 0, got 0.0"),
        (
            {"classifier": "fixed", "hidden_size": 3, "num_labels": 4},
            "hidden_size=3 and num_labels=4; raise hidden_size",
        ),
    ],
)
def test_impossible_configurations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BowAttentionConfig(**settings)


@pytest.mark.parametrize("changes", [{"classifier": "mpl"}, {"query_std": -1.0}])
def test_values_are_checked_as_well_when_a_checkpoint_is_loaded_with_them(changes, tmp_path):
    model_of().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="|".join(changes)):
        BowAttentionForSequenceClassification.from_pretrained(tmp_path, ignore_mismatched_sizes=True, **changes)


def test_a_configuration_for_much_more_than_the_weights_hold_takes_no_memory(tmp_path):
    model = model_of()
    model.config.vocab_size, model.config.hidden_size = 2**24, 2**12
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"needs 6\d,...,...,... elements that are missing from the weights"):
        BowAttentionForSequenceClassification.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_what_would_be_ignored_is_refused():
    model = model_of()
    with pytest.raises(TypeError, match="head_mask"):
        model(padded(SENTENCES), head_mask=torch.ones(1))
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(1, 3\), .* got \(3,\)"):
        model(torch.tensor([[3, 4, 5]]), attention_mask=torch.ones(3))
    with pytest.raises(ValueError, match="input_ids have 1 words; a convolution of width 2 needs two"):
        model_of(convolution=True)(torch.tensor([[3]]))
