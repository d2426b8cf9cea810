"""Rollout, flow and weighted values against their definitions."""

import itertools

import pytest
import torch
from attribution import text_of, tiny
from tiny_models import tiny_model, vivid

from hf_attn_dynamics import (
    attention_flow,
    attention_maps,
    attention_rollout,
    prune_heads,
    value_weighted_attention,
)
from hf_attn_dynamics.models.head_roles import locate_heads


def random_maps(layers=3, lengths=(4, 3), heads=2):
    generator = torch.Generator().manual_seed(0)
    length = max(lengths)
    maps = torch.rand(layers, len(lengths), heads, length, length, generator=generator, dtype=torch.float64)
    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    maps = maps * (real[:, None, :, None] & real[:, None, None])
    return maps / maps.sum(-1, keepdim=True).clamp(min=1e-9)


def test_rollout_is_the_sum_over_all_paths():
    maps = random_maps()
    mixed = 0.7 * maps.mean(2) + 0.3 * torch.diag_embed((maps.sum((0, 2, 4)) > 0).double())
    expected = torch.zeros_like(mixed[0])
    for path in itertools.product(range(4), repeat=4):
        weight = 1.0
        for layer, (below, above) in enumerate(itertools.pairwise(path)):
            weight = weight * mixed[layer, :, above, below]
        expected[:, path[-1], path[0]] += weight
    found = attention_rollout(maps, residual=0.3)
    torch.testing.assert_close(found[-1], expected)
    torch.testing.assert_close(found[0], mixed[0])


def test_rows_of_rollout_sum_to_one_over_tokens():
    sums = attention_rollout(random_maps()).sum(-1)
    torch.testing.assert_close(sums, torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0]]).double().expand(3, 2, 4))


def test_removed_heads_are_left_out_and_empty_layers_pass_on():
    maps = random_maps()
    some = maps.clone()
    some[0, :, 1] = torch.nan
    torch.testing.assert_close(attention_rollout(some)[0], attention_rollout(maps[:, :, :1])[0])
    some[1] = torch.nan
    torch.testing.assert_close(attention_rollout(some)[1], attention_rollout(some)[0])


def test_flow_is_the_smallest_cut():
    pytest.importorskip("scipy")
    maps = random_maps(layers=2, lengths=(3, 2))
    flow = attention_flow(maps)
    mixed = 0.5 * maps.mean(2) + 0.5 * torch.diag_embed((maps.sum((0, 2, 4)) > 0).double())
    for sentence, length in enumerate((3, 2)):
        for query, key in itertools.product(range(length), repeat=2):
            # Which positions of the middle are on the side of the query.
            cuts = []
            for side in itertools.product([True, False], repeat=length):
                above, below = mixed[1, sentence, query, :length], mixed[0, sentence, :length, key]
                cuts.append(sum(low if here else up for here, up, low in zip(side, above, below)).item())
            assert flow[sentence, query, key].item() == pytest.approx(min(cuts), abs=1e-6)
    assert flow[1, 2].eq(0).all()
    torch.testing.assert_close(attention_flow(maps, layer=0), mixed[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("function", [attention_rollout, attention_flow])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residual": 1.5}, "residual must lie between 0 and 1, got 1.5"),
        ({"maps": torch.ones(3, 3)}, r"maps must have the shape \(layers, batch, heads, query, key\)"),
    ],
)
def test_bad_arguments_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**{"maps": random_maps(), **arguments})


def test_flow_knows_its_layers():
    with pytest.raises(ValueError, match="layer must be one of 3 layers, got 3"):
        attention_flow(random_maps(), layer=3)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("projected", [False, True])
def test_values_are_weighted_by_their_length(name, projected):
    model = tiny(name)
    batch = text_of(model)
    (weights,) = attention_maps(model, batch).values()
    found = value_weighted_attention(model, batch, projected=projected, normalize=False)
    for number, layer in enumerate(locate_heads(model.base_model)):
        module, values = layer.module, []
        projection = {"bert": "value", "gpt2": "c_attn", "llama": "v_proj"}[name]
        hook = getattr(module, projection).register_forward_hook(
            lambda module, inputs, output, values=values: values.append(output)
        )
        model(**batch)
        hook.remove()
        heads, shared = len(layer.heads), layer.group_size
        value = values[0].chunk(3, -1)[-1] if name == "gpt2" else values[0]
        value = value.unflatten(-1, (heads // shared, -1)).repeat_interleave(shared, 2)
        for head in range(heads):
            own = value[:, :, head]
            if projected:
                rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
                matrix = layer.output.weight if name == "gpt2" else layer.output.weight.T
                own = own @ matrix[rows]
            expected = weights[number, :, head] * own.norm(dim=-1)[:, None]
            # Llama's eager softmax is in single precision.
            torch.testing.assert_close(found[number, :, head], expected.detach(), rtol=1e-5, atol=2e-6)


def test_weighted_values_are_normalised_like_contributions():
    model = vivid(tiny_model("bert", guidance=None))
    prune_heads(model, {0: [1], 1: [0, 1, 2, 3]})
    batch = {"input_ids": torch.tensor([[5, 6, 7]])}
    found = value_weighted_attention(model, batch)
    raw = value_weighted_attention(model, batch, normalize=False)
    torch.testing.assert_close(found, raw / raw.sum(-1, keepdim=True), equal_nan=True)
    assert found[0, 0, 1].isnan().all()
    assert found[1].isnan().all()


def test_heads_with_closed_gates_give_nothing():
    model = vivid(tiny_model("roberta", guidance=None, gates={"initial_log_alpha": 30.0})).eval()
    batch = text_of(model)
    whole = value_weighted_attention(model, batch, projected=True, normalize=False)
    gate = next(iter(model.head_gates().values()))
    gate.log_alpha.data[1] = -30.0
    found = value_weighted_attention(model, batch, projected=True, normalize=False)
    assert not found[0, :, 1].any()
    assert whole[0, :, 1].any()
    torch.testing.assert_close(found[0, :, [0, 2, 3]], whole[0, :, [0, 2, 3]])
