# Licensed under the Apache License, Version 2.0.
"""Analyses leave the batches that they are given as they were, and refuse tokens that there are none of."""

import copy

import pytest
import torch
from slow_score_norm import padded
from tiny_lstms import IDS, TARGETS, labelled, tiny_lexical
from tiny_models import batch_for, tiny_model

import hf_attn_dynamics as had
from hf_attn_dynamics.analysis.lexical.rows import performance
from hf_attn_dynamics.analysis.observers.measured_scores import measured_scores


def observed(model, batch):
    with had.observe(model, had.HeadConfidence(excluded_ids=[3]), had.RelativePositions(excluded_ids=[])) as seen:
        model(**batch)
    return seen.results()


def of_dynamics(model, batch):
    return measured_scores(model, [had.HeadConfidence(excluded_ids=[3])], [batch])


ENCODER = {
    "attention_maps": had.attention_maps,
    "global_contribution": lambda model, batch: had.global_contribution(model, batch, "probes", probes=2),
    "head_dynamics": of_dynamics,
    "head_importance": had.head_importance,
    "head_outputs": had.head_outputs,
    "head_relevance": had.head_relevance,
    "integrated_gradients": lambda model, batch: had.integrated_gradients_agreement(model, batch, steps=2),
    "local_contribution": had.local_contribution,
    "mean_head_outputs": had.mean_head_outputs,
    "observe": observed,
    "relevance_conservation": had.relevance_conservation,
    "value_weighted_attention": had.value_weighted_attention,
}
LEXICAL = {
    "lexical_probe": had.lexical_probe,
    "performance": lambda model, batch: performance(model, [batch]),
    "row_mask": lambda model, batch: had.row_mask([batch]),
    "source_rows": lambda model, batch: had.source_rows(model, [batch], "attention"),
}
# The model's own forward pass checks the tokens of the others.
TRACED = ["global_contribution", "integrated_gradients", "local_contribution", "value_weighted_attention"]


def encoder_batch():
    batch = batch_for("bert", [[5, 7, 8, 3], [9, 6, 3]])
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def unchanged(batch, run):
    given, before = dict(batch), copy.deepcopy(batch)
    run(given)
    assert given.keys() == before.keys()
    return all(given[name] is batch[name] and torch.equal(batch[name], before[name]) for name in before)


@pytest.mark.parametrize("name", ENCODER)
def test_an_analysis_of_heads_leaves_its_batch_as_it_was(name):
    model = tiny_model("bert", "ForMaskedLM")
    assert unchanged(encoder_batch(), lambda batch: ENCODER[name](model, batch))


@pytest.mark.parametrize("name", LEXICAL)
def test_an_analysis_of_a_translation_model_leaves_its_batch_as_it_was(name):
    model = tiny_lexical("LstmSeq2SeqForConditionalGeneration").float()
    batch = {"input_ids": IDS, "attention_mask": (IDS != 0).long(), "labels": labelled("Seq2Seq")}
    batch["decoder_input_ids"] = padded([[1, *words[:-1]] for words in TARGETS])
    assert unchanged(batch, lambda given: LEXICAL[name](model, given))


@pytest.mark.parametrize("name", TRACED)
def test_contributions_of_a_token_that_there_is_not_are_refused_by_name(name):
    batch = encoder_batch()
    batch["input_ids"][1, 0] = 60
    with pytest.raises(ValueError, match=r"input_ids must be from 0 to 59 \(vocab_size is 60\), got 60"):
        ENCODER[name](tiny_model("bert", "ForMaskedLM"), batch)
