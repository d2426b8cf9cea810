# Licensed under the Apache License, Version 2.0.
"""Faithfulness of attributions, against one sentence and one removal after the other."""

import pytest
import torch
import transformers
from stock_models import build_stock
from tiny_models import padded_batch, tiny_model, vivid

from hf_attn_dynamics import Faithfulness, faithfulness


SENTENCES = [[2, 9, 7, 12, 8, 3], [2, 6, 5, 3], [2, 4, 6, 11, 10, 14, 13, 3]]
KEPT = (2, 3)


def classifier():
    torch.manual_seed(0)
    return vivid(tiny_model("bert", "ForSequenceClassification", num_labels=3)).double().eval()


def attribution_of(sentences, seed=0):
    generator = torch.Generator().manual_seed(seed)
    longest = max(map(len, sentences))
    return torch.rand(len(sentences), longest, generator=generator)


@torch.no_grad()
def slow_curves(model, sentences, attribution, steps, replacement=None, kept=KEPT, causal=False):
    curves = torch.zeros(2, steps + 1, dtype=torch.float64)

    def probabilities(ids):
        logits = model(torch.tensor([ids])).logits[0]
        return (logits[-1] if causal else logits).float().softmax(-1)

    for ids, scores in zip(sentences, attribution.tolist()):
        predicted = probabilities(ids).argmax()
        last = len(ids) - 1 if causal else None
        choices = [i for i, token in enumerate(ids) if token not in kept and i != last]
        ranked = sorted(choices, key=lambda i: -scores[i])
        for order, line in enumerate((ranked, ranked[::-1])):
            for step in range(steps + 1):
                removed = set(line[: round(step / steps * len(line))])
                if replacement is None:
                    left = [token for i, token in enumerate(ids) if i not in removed]
                else:
                    left = [replacement if i in removed else token for i, token in enumerate(ids)]
                curves[order, step] += float(probabilities(left)[predicted]) / len(sentences)
    return curves


@pytest.mark.parametrize("replacement", [None, 4])
@pytest.mark.parametrize("steps", [1, 3, 10])
def test_curves_are_those_of_one_removal_after_the_other(steps, replacement):
    model, attribution = classifier(), attribution_of(SENTENCES)
    expected = slow_curves(model, SENTENCES, attribution, steps, replacement)
    for batch_size in (1, 5, 64):
        found = faithfulness(model, padded_batch(SENTENCES, pad=0), attribution, steps, KEPT, replacement, batch_size)
        assert found.sentences == 3
        torch.testing.assert_close(found.most_first, expected[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found.least_first, expected[1], rtol=1e-5, atol=1e-7)
    assert found.comprehensiveness == pytest.approx(float((expected[0, :1] - expected[0, 1:]).mean()))
    assert found.gap == pytest.approx(float((expected[1, 1:] - expected[0, 1:]).mean()))
    assert Faithfulness.from_dict(found.to_dict()) == found


def test_the_opposite_order_has_the_opposite_gap():
    model, attribution = classifier(), attribution_of(SENTENCES)
    batch = padded_batch(SENTENCES, pad=0)
    found, opposite = (faithfulness(model, batch, sign * attribution, 4, KEPT) for sign in (1, -1))
    assert found.gap == pytest.approx(-opposite.gap)
    torch.testing.assert_close(found.most_first, opposite.least_first)


def test_next_tokens_of_a_language_model_are_predicted():
    model = vivid(build_stock("llama")).double().eval()
    sentences = [[5, 9, 7, 12, 8], [8, 6, 4]]
    attribution = attribution_of(sentences)
    expected = slow_curves(model, sentences, attribution, 4, kept=(), causal=True)
    found = faithfulness(model, padded_batch(sentences, pad=1), attribution, 4)
    torch.testing.assert_close(found.most_first, expected[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.least_first, expected[1], rtol=1e-4, atol=1e-6)


def test_one_token_stays_where_none_is_kept():
    model, ids, attribution = classifier(), [9, 7, 12], torch.tensor([[1.0, 0.0, 0.5]])
    found = faithfulness(model, {"input_ids": torch.tensor([ids])}, attribution, 2)
    with torch.no_grad():
        whole, one, last = (model(torch.tensor([left])).logits[0].float().softmax(-1) for left in (ids, [7, 12], [7]))
    expected = [value[whole.argmax()].item() for value in (whole, one, last)]
    assert found.most_first.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 64])
def test_decoders_that_classify_are_read_at_the_last_token(batch_size):
    torch.manual_seed(0)
    config = build_stock("llama").config
    config.num_labels = 3
    model = vivid(transformers.LlamaForSequenceClassification(config)).double().eval()
    sentences, kept = [[5, 9, 7, 12, 8], [8, 6, 4]], (8, 4)
    attribution = attribution_of(sentences)
    expected = slow_curves(model, sentences, attribution, 4, kept=kept)
    found = faithfulness(model, padded_batch(sentences, pad=1), attribution, 4, kept, batch_size=batch_size)
    torch.testing.assert_close(found.most_first, expected[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.least_first, expected[1], rtol=1e-4, atol=1e-6)


def test_the_batch_stays_as_it_was():
    model, batch = classifier(), padded_batch(SENTENCES, pad=0)
    before = {name: value.clone() for name, value in batch.items()}
    faithfulness(model, batch, attribution_of(SENTENCES), 3, KEPT, 4)
    assert all(torch.equal(batch[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (
            {"attribution": torch.zeros(3, 2)},
            r"attribution must have shape \(3, 8\), .* got \(3, 2\)",
        ),
        ({"attribution": torch.full((3, 8), torch.nan)}, "attribution must be finite at all tokens"),
        ({"batch": {"input_ids": torch.zeros(8).long()}}, r"batch needs input_ids of shape \(batch, length\)"),
        ({"kept_ids": range(60)}, "sentence 0 has no token that can be removed; leave it out"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"batch": padded_batch(SENTENCES, pad=0), "attribution": attribution_of(SENTENCES), **change}
    with pytest.raises(ValueError, match=message):
        faithfulness(classifier(), **arguments)


def test_models_without_such_a_prediction_are_refused():
    batch, attribution = {"input_ids": torch.tensor([[5, 6]])}, torch.zeros(1, 2)
    with pytest.raises(ValueError, match="BertForMaskedLM is neither a classifier of sentences nor a causal language"):
        faithfulness(build_stock("bert"), batch, attribution)
    one = tiny_model("bert", "ForSequenceClassification", num_labels=1)
    with pytest.raises(ValueError, match="has a single output, not probabilities of classes"):
        faithfulness(one, batch, attribution)
    several = tiny_model("bert", "ForSequenceClassification", problem_type="multi_label_classification")
    with pytest.raises(ValueError, match="has several labels for a sentence, not probabilities of classes"):
        faithfulness(several, batch, attribution)


def test_what_has_no_number_per_token_is_refused_and_not_left_out():
    model, attribution = classifier(), attribution_of(SENTENCES[:1])
    batch = padded_batch(SENTENCES[:1], pad=0)
    with pytest.raises(ValueError, match=r"tokens cannot be removed from attention_mask of shape \(1, 1, 6, 6\)"):
        faithfulness(model, {**batch, "attention_mask": torch.ones(1, 1, 6, 6)}, attribution)
    decoder = vivid(build_stock("llama")).double().eval()
    packed = {"input_ids": batch["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    with pytest.raises(ValueError, match="from rows of one sentence, but this batch has several in a row"):
        faithfulness(decoder, packed, attribution)
    alone = faithfulness(decoder, batch, attribution)
    positions = {**batch, "position_ids": torch.arange(6)[None], "output_attentions": False}
    torch.testing.assert_close(faithfulness(decoder, positions, attribution).most_first, alone.most_first)
