# Licensed under the Apache License, Version 2.0.
"""Counterparts of heads in another model."""

import copy
import itertools
import math

import pytest
import torch
from roles import maps_of
from stock_models import build_stock
from tiny_models import padded_batch, ragged_sentences, vivid

from hf_attn_dynamics import HeadMatching, compare_heads, prune_heads


pytest.importorskip("scipy")
BATCH = padded_batch(ragged_sentences(6), pad=1)
ORDER = [2, 0, 3, 1]


def model_of(name="bert", seed=0):
    return vivid(build_stock(name), seed).double().eval()


@torch.no_grad()
def permuted(model):
    """The same BERT with its heads in another order."""
    other = copy.deepcopy(model)
    for layer in other.bert.encoder.layer:
        attention = layer.attention.self
        size = attention.attention_head_size
        index = torch.tensor([head * size + i for head in ORDER for i in range(size)])
        for projection in (attention.query, attention.key, attention.value):
            projection.weight.copy_(projection.weight[index])
            projection.bias.copy_(projection.bias[index])
        layer.attention.output.dense.weight.copy_(layer.attention.output.dense.weight[:, index])
    return other


def test_heads_in_another_order_are_found():
    model = model_of()
    matching = compare_heads(model, permuted(model), BATCH)
    pairs = matching.pairs()
    assert len(pairs) == 12
    for pair in pairs:
        assert (pair.layer, pair.head) == (pair.other_layer, ORDER[pair.other_head])
        assert pair.distance < 1e-9
    assert torch.equal(matching.layers("encoder"), 4 * torch.eye(3, dtype=torch.long))
    assert matching.nearest("encoder", 1, 2)[3:5] == (1, ORDER.index(2))


def divergence(one, other):
    middle = (one + other) / 2

    def entropy(row):
        return -sum(p * math.log(p) for p in row.tolist() if p > 0)

    return entropy(middle) - (entropy(one) + entropy(other)) / 2


def test_distances_and_assignment_are_those_of_one_pair_after_the_other():
    models = [model_of("gpt2"), model_of("gpt2", seed=1)]
    sentences = [[5, 9, 7], [8, 6]]
    matching = compare_heads(*models, padded_batch(sentences, pad=1), rows_per_sentence=None)
    maps = [[maps_of(model, ids)["decoder"].flatten(0, 1) for ids in sentences] for model in models]
    rows = sum(map(len, sentences))
    expected = torch.zeros(12, 12, dtype=torch.float64)
    for i, j in itertools.product(range(12), range(12)):
        for one, other in zip(*maps):
            expected[i, j] += sum(divergence(*pair) for pair in zip(one[i], other[j])) / rows
    torch.testing.assert_close(matching.distances["decoder"], expected, rtol=0, atol=1e-6)
    total = sum(pair.distance for pair in matching.pairs())
    assert total <= min(expected[torch.arange(12), torch.randperm(12)].sum() for _ in range(200)) + 1e-9
    assert len({pair[1:3] for pair in matching.pairs()}) == len({pair[3:5] for pair in matching.pairs()}) == 12
    assert HeadMatching.from_dict(matching.to_dict()) == matching
    batches = [padded_batch([one], pad=1) for one in sentences]
    one_by_one = compare_heads(*models, batches, rows_per_sentence=None)
    torch.testing.assert_close(one_by_one.distances["decoder"], matching.distances["decoder"], rtol=0, atol=1e-9)


def test_models_may_have_other_numbers_of_heads():
    model = model_of()
    pruned = prune_heads(copy.deepcopy(model), {0: [1], 2: [0, 1, 2, 3]})
    matching = compare_heads(model, pruned, BATCH)
    assert len(matching.pairs()) == 7
    exact = [pair for pair in matching.pairs() if pair.distance < 1e-9]
    # The first layer reads the same input in both.
    assert [pair[:5] for pair in sorted(exact)][:3] == [("encoder", 0, head, 0, head) for head in (0, 2, 3)]
    scores = matching.head_scores()["distance"]["encoder"]
    assert scores.isnan().sum() == 5
    assert "counterpart" in matching._repr_html_()


def test_what_cannot_be_compared_is_named():
    with pytest.raises(ValueError, match="the models attend at different sites, encoder and decoder"):
        compare_heads(model_of(), model_of("gpt2"), BATCH)
    with pytest.raises(ValueError, match="there is no head 7.0 of the encoder"):
        compare_heads(model_of(), model_of(), BATCH).nearest("encoder", 7, 0)
    with pytest.raises(ValueError, match="data is empty"):
        compare_heads(model_of(), model_of(), [])


def test_a_model_with_learnt_sinks_is_at_no_distance_from_itself():
    model = model_of("gpt-oss")
    matching = compare_heads(model, model, BATCH)
    assert all(pair[1:3] == pair[3:5] and pair.distance < 1e-6 for pair in matching.pairs())
    table = matching.distances["decoder"]
    assert table.fill_diagonal_(1).min() > 1e-3


def test_layers_without_heads_have_their_rows():
    model = model_of()
    pruned = prune_heads(copy.deepcopy(model), {2: [0, 1, 2, 3]})
    matching = compare_heads(pruned, model, BATCH)
    assert matching.head_scores()["distance"]["encoder"].shape == (3, 4)
    assert matching.layers("encoder").shape == (3, 3)
    assert HeadMatching.from_dict(matching.to_dict()) == matching


@pytest.mark.parametrize("rows", [0, -1, 1.5])
def test_rows_per_sentence_are_checked(rows):
    with pytest.raises(ValueError, match="rows_per_sentence must be an integer of at least 1, or None for all"):
        compare_heads(model_of(), model_of(), BATCH, rows_per_sentence=rows)
