# Licensed under the Apache License, Version 2.0.
"""Integrated gradients by captum, and how well they agree with global contributions."""

import sys

import pytest
import torch
from attribution import body_of, integrated_gradients, text_of, tiny
from scipy import stats
from tiny_models import padded_batch

from hf_attn_dynamics import (
    IntegratedGradientsAgreement,
    global_contribution,
    integrated_gradients_agreement,
    prune_heads,
)
from hf_attn_dynamics.models.head_roles import locate_heads


SENTENCES = [[5, 6, 7, 8], [9, 4, 11], [12, 13, 14, 15, 16]]


@pytest.fixture
def captum():
    return pytest.importorskip("captum")


@pytest.mark.parametrize("name", ["bert", "roberta", "electra"])
@pytest.mark.parametrize(("layer", "position"), [(-1, 0), (0, 2), (1, -1)])
def test_attributions_are_the_integral_of_gradients(captum, name, layer, position):
    model = tiny(name)
    body = body_of(model)
    found = integrated_gradients_agreement(
        model, padded_batch(SENTENCES), layer=layer, position=position, steps=12, baseline_id=3
    )
    if name == "electra":  # embeddings are projected first, which changes no product with gradients
        embeddings = body.embeddings.forward
        body.embeddings.forward = lambda *args, **kwargs: body.embeddings_project(embeddings(*args, **kwargs))
    for number, sentence in enumerate(SENTENCES):
        ids = torch.tensor([sentence])
        projection = locate_heads(body)[layer].output
        expected, difference = integrated_gradients(body, ids, torch.full_like(ids, 3), projection, position, steps=12)
        # The weights of captum's quadrature are in single precision.
        torch.testing.assert_close(found.attributions[number, : len(sentence)], expected, rtol=1e-6, atol=1e-8)
        assert found.attributions[number, len(sentence) :].eq(0).all()
        assert found.incompleteness[number].item() == pytest.approx(expected.sum().item() / difference - 1, abs=1e-6)


def test_correlations_are_those_of_scipy_with_the_mean_over_heads(captum):
    model = tiny("bert")
    prune_heads(model, {1: [2]})
    batch = padded_batch(SENTENCES)
    whole = global_contribution(model, batch)
    found = integrated_gradients_agreement(model, batch, whole, position=1)
    for number, sentence in enumerate(SENTENCES):
        row = whole[1, number, [0, 1, 3], 1, : len(sentence)].mean(0)
        torch.testing.assert_close(found.contributions[number, : len(sentence)], row)
        attributions = found.attributions[number, : len(sentence)].abs()
        assert found.pearson[number].item() == pytest.approx(stats.pearsonr(row, attributions).statistic)
        assert found.spearman[number].item() == pytest.approx(stats.spearmanr(row, attributions).statistic)


def test_padding_and_other_sentences_change_nothing(captum):
    model = tiny("roberta")
    together = integrated_gradients_agreement(model, padded_batch(SENTENCES))
    left = {
        "input_ids": torch.tensor([[1, 1, *SENTENCES[0]]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]),
    }
    for name in ("pearson", "spearman", "incompleteness"):
        alone = [integrated_gradients_agreement(model, padded_batch([one])) for one in SENTENCES]
        torch.testing.assert_close(getattr(together, name), torch.cat([getattr(one, name) for one in alone]))
        padded = integrated_gradients_agreement(model, left)
        torch.testing.assert_close(getattr(padded, name), getattr(together, name)[:1])


def test_padding_that_moves_what_is_read_is_refused(captum):
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [0, 9, 4, 11]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]),
    }
    with pytest.raises(
        ValueError, match="head outputs of sentence 1 of the batch depend on padding: pad on the right"
    ):
        integrated_gradients_agreement(tiny("bert"), batch)


def test_contributions_may_be_given_and_segments_count(captum):
    model = tiny("bert")
    batch = {**padded_batch(SENTENCES), "token_type_ids": torch.tensor([[0, 1, 1, 1, 1]]).expand(3, -1)}
    whole = global_contribution(model, batch)
    found = integrated_gradients_agreement(model, batch, whole)
    torch.testing.assert_close(found.pearson, integrated_gradients_agreement(model, batch).pearson)
    without = integrated_gradients_agreement(model, padded_batch(SENTENCES), whole)
    assert not torch.allclose(found.attributions, without.attributions)


@pytest.mark.parametrize("name", ["albert", "distilbert", "modernbert"])
def test_more_steps_make_attributions_complete(captum, name):
    model = tiny(name)
    few, many = (
        integrated_gradients_agreement(model, padded_batch(SENTENCES), steps=steps, baseline_id=3).incompleteness.abs()
        for steps in (1, 60)
    )
    assert (many < few).all()
    assert many.max() < 1e-4


def test_each_call_of_a_shared_module_is_a_layer(captum):
    model = tiny("albert")
    batch = padded_batch(SENTENCES[:1])
    first, later = (integrated_gradients_agreement(model, batch, layer=layer) for layer in (0, 4))
    assert not torch.allclose(first.attributions, later.attributions)
    assert later.incompleteness.abs().max() < 0.01


def test_what_does_not_vary_has_no_correlation(captum):
    model = tiny("bert")
    batch = padded_batch(SENTENCES)
    even = torch.full_like(global_contribution(model, batch), 0.2)
    assert integrated_gradients_agreement(model, batch, even).pearson.isnan().all()


def test_the_model_is_afterwards_as_before(captum):
    model = tiny("bert", torch.float32)
    model.train()
    integrated_gradients_agreement(model, text_of(model))
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_result_is_saved_and_loaded(captum, tmp_path):
    found = integrated_gradients_agreement(tiny("bert"), padded_batch([[5, 6, 7], [4]]))
    assert found.pearson.isnan().tolist() == [False, True]
    found.save(tmp_path / "agreement.json")
    loaded = IntegratedGradientsAgreement.load(tmp_path / "agreement.json")
    torch.testing.assert_close(vars(loaded), vars(found), equal_nan=True)
    assert [row[0] for row in loaded.records()] == [0, 1]
    (tmp_path / "other.json").write_text('{"pearson": 3}')
    with pytest.raises(ValueError, match=r"other\.json does not hold IntegratedGradientsAgreement"):
        IntegratedGradientsAgreement.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bert", {"steps": 0}, "steps must be a whole number, at least 1, got 0"),
        ("bert", {"layer": 2}, "layer must be one of 2 layers, got 2"),
        ("bert", {"position": 3}, "position must be a token of every sentence, and one has 3, got 3"),
        ("bert", {"baseline_id": 60}, "baseline_id must be a token of the model, from 0 to 59, got 60"),
        ("bert", {"contribution": torch.ones(2, 2)}, r"contribution must have the shape \(2, 2, 4, 6, 6\)"),
        ("modernbert", {"baseline_id": None}, "ModernBertModel names no padding token; give a baseline_id below 60"),
        ("gpt2", {"baseline_id": 3}, "GPT2Model has no module `embeddings`"),
    ],
)
def test_what_is_not_possible_is_said(captum, name, arguments, message):
    model = tiny(name, torch.float32)
    model.config.pad_token_id = model.config.pad_token_id if name == "bert" else None
    with pytest.raises(ValueError, match=message):
        integrated_gradients_agreement(model, text_of(model), **arguments)


def test_images_have_no_baseline_of_tokens(captum):
    model = tiny("bert", torch.float32)
    with pytest.raises(ValueError, match="batch has no input_ids"):
        integrated_gradients_agreement(model, {"inputs_embeds": torch.ones(1, 3, 32)})


def test_layers_without_heads_are_refused(captum):
    model = prune_heads(tiny("bert", torch.float32), {1: [0, 1, 2, 3]})
    with pytest.raises(ValueError, match="layer -1 has no heads left; choose another"):
        integrated_gradients_agreement(model, text_of(model))


def test_without_captum_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    model = tiny("bert", torch.float32)
    with pytest.raises(ImportError, match=r"needs captum; install hf_attn_dynamics\[captum\]"):
        integrated_gradients_agreement(model, text_of(model))
