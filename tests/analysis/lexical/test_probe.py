# Licensed under the Apache License, Version 2.0.
"""What a model would say if it attended to a single source word."""

import pytest
import torch
from slow_lstm import slow_bag, slow_classification, slow_translation
from slow_score_norm import padded
from tiny_lstms import CLASSES, IDS, LEXICAL_MODELS, SOURCES, TARGETS, labelled, labels_of, tiny_lexical
from torch import nn

from hf_attn_dynamics import ProxyConfig, ProxyForSeq2Seq, lexical_probe


TRANSLATOR = "LstmSeq2SeqForConditionalGeneration"
CLASSIFIER = "LstmForSequenceClassification"
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def batch_for(name, side="right", extra=0):
    return {"input_ids": padded(SOURCES, side, extra), "labels": labelled(name)}


def one_hots(source):
    return torch.eye(len(source), dtype=torch.float64)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"attention": "uniform"},
        {"num_attention_heads": 3, "readout": "additive"},
        {"bidirectional": True, "target_vocab_size": 9, "share_encoder_decoder_embeddings": False},
    ],
    ids=["learned", "uniform", "heads", "tables"],
)
@pytest.mark.parametrize(("side", "extra"), [("right", 1), ("left", 0)])
def test_beta_of_a_translator_is_the_probability_with_all_attention_at_one_word(kind, side, extra):
    model, batch = tiny_lexical(TRANSLATOR, **kind), batch_for(TRANSLATOR, side, extra)
    found = lexical_probe(model, batch)
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS)):
        real = batch["input_ids"][row] != 0
        for column, weights in zip(found.beta[row][: len(target), real].T, one_hots(source), strict=True):
            logits = slow_translation(model, source, [1, *target[:-1]], weights).logits
            torch.testing.assert_close(column, logits.softmax(-1)[range(len(target)), target], **EXACT)
        assert not found.beta[row][: len(target), ~real].any()
    assert found.beta.isnan().any(2).equal(batch["labels"] == -100)


@pytest.mark.parametrize("kind", [{}, {"attention": "uniform"}, {"num_labels": 3, "bidirectional": False}], ids=str)
def test_beta_of_a_classifier_is_the_probability_with_all_attention_at_one_word(kind):
    model, batch = tiny_lexical(CLASSIFIER, **kind), batch_for(CLASSIFIER, "left", 1)
    found = lexical_probe(model, batch)
    for row, (source, label) in enumerate(zip(SOURCES, CLASSES)):
        expected = [slow_classification(model, source, weights)[0][label] for weights in one_hots(source)]
        torch.testing.assert_close(found.beta[row, batch["input_ids"][row] != 0], torch.stack(expected), **EXACT)
    assert not found.beta[batch["input_ids"] == 0].any()


@pytest.mark.parametrize("name", ["ProxyForSeq2Seq", "ProxyForSequenceClassification"])
def test_beta_of_a_proxy_is_the_probability_for_a_sentence_of_one_word(name):
    model, batch = tiny_lexical(name), batch_for(name)
    beta = lexical_probe(model, batch).beta
    for row, source in enumerate(SOURCES):
        labels = batch["labels"][row]
        expected = torch.stack([slow_bag(model, [word])[labels.clamp(min=0)] for word in source], -1)
        expected = expected.masked_fill((labels == -100)[..., None], torch.nan)
        torch.testing.assert_close(beta[row, ..., : len(source)], expected, equal_nan=True, **EXACT)


def test_log_odds_of_two_classes_are_what_the_sigmoid_is_given():
    # Equation 22.
    model, ids = tiny_lexical(CLASSIFIER), torch.tensor([SOURCES[1]])
    gamma = (model(ids).states @ model.classifier.weight[0]) + model.classifier.bias
    for label, sign in ((1, 1), (0, -1)):
        found = lexical_probe(model, {"input_ids": ids, "labels": torch.tensor([label])})
        torch.testing.assert_close(found.log_odds, sign * gamma, **EXACT)


@pytest.mark.parametrize("name", LEXICAL_MODELS)
def test_log_odds_are_those_of_beta(name):
    found = lexical_probe(tiny_lexical(name), batch_for(name))
    real = found.beta > 0
    torch.testing.assert_close(found.log_odds[real], (found.beta / (1 - found.beta)).log()[real])
    assert (found.log_odds[~real & ~found.beta.isnan()] == -torch.inf).all()


def test_log_odds_are_exact_where_nothing_is_left_to_other_words():
    model, batch = tiny_lexical(TRANSLATOR), batch_for(TRANSLATOR)
    before = lexical_probe(model, batch)
    model.readout.output.bias.data[2] += 400
    after = lexical_probe(model, batch)
    ends = (batch["labels"] == 2)[..., None] & (IDS != 0)[:, None]
    assert (after.beta[ends] == 1).all()
    torch.testing.assert_close(after.log_odds[ends], before.log_odds[ends] + 400, **EXACT)


@pytest.mark.parametrize("name", LEXICAL_MODELS)
@pytest.mark.parametrize("chunk_size", [1, 100, 10_000])
def test_neither_chunks_nor_other_sentences_nor_padding_change_anything(name, chunk_size):
    model, batch = tiny_lexical(name), batch_for(name)
    together = lexical_probe(model, batch)
    for found in (
        lexical_probe(model, batch, chunk_size),
        lexical_probe(model, batch | {"input_ids": IDS.masked_fill(IDS == 0, 7), "attention_mask": IDS != 0}),
    ):
        for one, other in zip(found, together):
            torch.testing.assert_close(one, other, equal_nan=True, **EXACT)
    for row, source in enumerate(SOURCES):
        labels = batch["labels"][row, None]
        alone = lexical_probe(model, {"input_ids": torch.tensor([source]), "labels": labels}, chunk_size)
        for one, other in zip(alone, together):
            torch.testing.assert_close(one[0], other[row, ..., : len(source)], equal_nan=True, **EXACT)


@pytest.mark.parametrize("name", LEXICAL_MODELS)
def test_the_model_is_evaluated_and_left_as_it_was(name):
    model = tiny_lexical(name, **({"dropout": 0.5} if "Lstm" in name else {})).train()
    batch = batch_for(name)
    found = lexical_probe(model, batch)
    assert model.training
    assert not found.beta.requires_grad
    model.eval()
    torch.testing.assert_close(found, lexical_probe(model, batch), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_words_have_log_odds_of_their_own_in_half_precision(dtype):
    torch.manual_seed(0)
    model = ProxyForSeq2Seq(ProxyConfig(vocab_size=500, embedding_size=16))
    batch = {"input_ids": torch.arange(1, 101)[None], "labels": torch.tensor([[7]])}
    expected = lexical_probe(model, batch)
    found = lexical_probe(model.to(dtype), batch)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.01)
    assert len(found.log_odds.unique()) > 80


def test_embeddings_are_taken_in_the_place_of_words():
    model, batch = tiny_lexical(TRANSLATOR), batch_for(TRANSLATOR)
    given = {"inputs_embeds": model.get_input_embeddings()(IDS), "attention_mask": IDS != 0, "labels": labels_of()}
    torch.testing.assert_close(lexical_probe(model, given), lexical_probe(model, batch), equal_nan=True)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (nn.Linear(2, 2), {}, "model is a Linear, which has no lexical probe; give an LSTM model"),
        (tiny_lexical(CLASSIFIER), {"labels": None}, "batch has no labels"),
        (tiny_lexical(CLASSIFIER), {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        (tiny_lexical(CLASSIFIER), {"input_ids": IDS * 0}, "sentence 0 of the batch is empty"),
        (tiny_lexical(CLASSIFIER), {"labels": CLASSES[:1]}, r"shape \(batch,\) for 6 sentences, got \(1,\)"),
        (tiny_lexical(CLASSIFIER), {"labels": CLASSES[:, None]}, r"shape \(batch,\) for 6 sentences, got \(6, 1\)"),
        (
            tiny_lexical(CLASSIFIER),
            {"labels": CLASSES - 7},
            "labels must be outputs from 0 on, or -100 for none, got -7",
        ),
        (tiny_lexical(CLASSIFIER), {"labels": CLASSES + 7}, r"labels must be outputs from 0 to \d, got \d"),
        (tiny_lexical(CLASSIFIER), {"input_ids": SOURCES}, "input_ids of the batch are a list, not a tensor"),
        (tiny_lexical(CLASSIFIER), {"input_ids": None}, "pass either input_ids or inputs_embeds"),
    ],
    ids=["model", "labels", "chunk", "empty", "batches", "columns", "negative", "large", "lists", "words"],
)
def test_what_has_no_probe_is_refused(model, changes, message):
    batch = {**batch_for(CLASSIFIER), **changes}
    chunk_size = batch.pop("chunk_size", 256)
    with pytest.raises(ValueError, match=message):
        lexical_probe(model, batch, chunk_size)
