# Licensed under the Apache License, Version 2.0.
"""The bag-of-words proxy: values, padding, how it starts to learn, and what is refused."""

import pytest
import torch
from slow_lstm import slow_bag
from slow_score_norm import padded, ragged_words
from tiny_lstms import CLASSES, IDS, SOURCES, TARGETS, gradients, labelled, labels_of, tiny_lexical

from hf_attn_dynamics import IbmModel1, ProxyConfig, ProxyForSeq2Seq, ProxyForSequenceClassification


NAMES = ("ProxyForSeq2Seq", "ProxyForSequenceClassification")
EXACT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize(("side", "extra"), [("right", 0), ("right", 2), ("left", 1)])
def test_each_target_word_has_the_probability_that_the_source_gives_it(side, extra):
    model = tiny_lexical("ProxyForSeq2Seq")
    output = model(padded(SOURCES, side, extra), labels=labels_of())
    losses = []
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS)):
        probabilities = slow_bag(model, source)
        torch.testing.assert_close(
            output.logits[row].softmax(-1), probabilities.expand(labels_of().shape[1], -1), **EXACT
        )
        losses += [-probabilities[word].log() for word in target]
    torch.testing.assert_close(output.loss, torch.stack(losses).mean(), **EXACT)
    one = model(padded(SOURCES, side, extra))
    assert one.loss is None
    assert one.logits.equal(output.logits[:, :1])


@pytest.mark.parametrize("num_labels", [2, 4])
@pytest.mark.parametrize(("side", "extra"), [("right", 0), ("left", 1)])
def test_each_class_has_the_probability_that_the_words_give_it(num_labels, side, extra):
    model = tiny_lexical("ProxyForSequenceClassification", num_labels=num_labels)
    output = model(padded(SOURCES, side, extra), labels=CLASSES)
    expected = torch.stack([slow_bag(model, words) for words in SOURCES])
    torch.testing.assert_close(output.logits.softmax(-1), expected, **EXACT)
    torch.testing.assert_close(output.loss, -expected[range(6), CLASSES].log().mean(), **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_neither_the_rest_of_the_batch_nor_what_stands_at_padding_change_anything(name):
    model, labels = tiny_lexical(name), labelled(name)
    together = model(IDS, labels=labels)
    expected = gradients(model, together.loss)
    counts = (labels >= 0).view(6, -1).sum(1)
    alone = [model(padded([words]), labels=label[None]).loss for words, label in zip(SOURCES, labels)]
    total = sum(loss * count for loss, count in zip(alone, counts)) / counts.sum()
    torch.testing.assert_close(gradients(model, total), expected, **EXACT)
    mask = (IDS != 0).long()
    torch.testing.assert_close(model(IDS.masked_fill(IDS == 0, 7), mask, labels=labels).loss, together.loss)
    embedded = model.get_input_embeddings()(IDS).masked_fill(IDS[..., None] == 0, torch.nan)
    torch.testing.assert_close(model(None, mask, inputs_embeds=embedded, labels=labels).loss, together.loss)
    torch.testing.assert_close(model(IDS, labels=labels, num_items_in_batch=9).loss, together.loss * counts.sum() / 9)


@pytest.mark.parametrize(("std", "expected"), [(None, 400**-0.5), (0.3, 0.3)])
def test_new_weights_have_the_deviation_that_is_asked_for(std, expected):
    model = ProxyForSeq2Seq(ProxyConfig(vocab_size=300, embedding_size=400, embedding_std=std))
    assert not model.embeddings.weight[0].any()
    for weight in (model.embeddings.weight[1:], model.classifier.weight):
        assert weight.std().item() == pytest.approx(expected, rel=0.02)
        assert weight.mean().item() == pytest.approx(0, abs=0.01 * expected)


def test_at_first_a_wide_proxy_learns_the_count_table_of_ibm_model_1():
    # Equation 15, of the logits θ_io = W_o·e_i; all words but padding are counted.
    sources, targets = ragged_words(30, 8, seed=4), ragged_words(30, 9, seed=5)
    table = IbmModel1(null_word=False).fit(zip(sources, targets), iterations=1)
    counts = torch.zeros(8, 9, dtype=torch.float64)
    rows, columns = torch.tensor(table.source_words), torch.tensor(table.target_words)
    counts[rows[:, None], columns] = torch.tensor(table.counts.toarray())
    expected = 2 * (counts - counts.mean(1, keepdim=True))
    labels = labels_of(targets)
    errors = []
    for size in (100, 3_000, 90_000):
        torch.manual_seed(0)
        model = ProxyForSeq2Seq(ProxyConfig(vocab_size=8, target_vocab_size=9, embedding_size=size)).double()
        loss = model(padded(sources), labels=labels, num_items_in_batch=1).loss
        found = gradients(model, loss)
        # By gradient flow, each parameter moves against its gradient.
        e, w = model.embeddings.weight, model.classifier.weight
        speed = -(found["embeddings.weight"] @ w.T + e @ found["classifier.weight"].T)
        errors.append((speed - expected)[1:].abs().max() / expected.abs().max())
    # They fall with the square root of the size.
    assert errors[0] > 2.5 * errors[1] > 2.5**2 * errors[2]
    assert errors[2] < 0.02


def test_a_translator_of_as_many_words_needs_one_number():
    assert ProxyForSeq2Seq(ProxyConfig(vocab_size=7)).classifier.weight.shape == (7, 256)
    assert ProxyForSequenceClassification(ProxyConfig(vocab_size=7)).classifier.weight.shape == (2, 256)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an integer from 1 to .* got 0"),
        ({"target_vocab_size": 0}, "target_vocab_size must be an integer from 1 to .* got 0"),
        ({"embedding_size": 0}, "embedding_size must be an integer from 1 to .* got 0"),
        ({"embedding_std": -1.0}, "embedding_std must not be negative, got -1.0"),
        ({"pad_token_id": -1}, "pad_token_id must be None or from 0 to 4999 .vocab_size is 5000., got -1"),
    ],
)
def test_impossible_configurations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ProxyConfig(**settings)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass either input_ids or inputs_embeds"),
        ({"input_ids": IDS, "inputs_embeds": torch.ones(6, 7, 5)}, "pass either input_ids or inputs_embeds"),
        ({"input_ids": IDS * (torch.arange(6) != 4)[:, None]}, "sentence 4 of the batch is empty; leave it out"),
        (
            {"inputs_embeds": torch.ones(6, 7, 4)},
            r"must have shape \(batch, length, 5\), got \(6, 7, 4\)",
        ),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(6, 1)},
            r"attention_mask must have shape \(6, 7\), .*, got \(6, 1\)",
        ),
    ],
)
def test_what_has_no_words_is_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_lexical(name)(**arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_labels": 1}, "num_labels must be at least 2, got 1"),
        ({"problem_type": "regression"}, "problem_type must be single_label_classification, got 'regression'"),
    ],
)
def test_a_classifier_without_a_choice_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ProxyForSequenceClassification(ProxyConfig(**settings))


@pytest.mark.parametrize("name", NAMES)
def test_what_would_be_ignored_is_refused(name):
    with pytest.raises(TypeError, match="decoder_input_ids"):
        tiny_lexical(name)(IDS, decoder_input_ids=IDS)
