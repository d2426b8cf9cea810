"""Removing feed-forward units, blocks and layers: pruned models equal models with zeroed activations."""

import copy
import json
import pickle

import pytest
import torch
from fresh_processes import python
from stock_models import STOCK_MODELS, build_stock, stock_inputs
from torch import nn

from hf_attn_dynamics.models.head_pruning import prune_heads
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.head_sites import HeadSite, config_value, kinds_of
from hf_attn_dynamics.models.headwise_classes import headwise_class
from hf_attn_dynamics.models.pruned_checkpoints import load_pruned, saved_heads
from hf_attn_dynamics.models.unit_pruning import apply_pruning, prune_layers, prune_units, retain_units
from hf_attn_dynamics.models.unit_roles import (
    FEED_FORWARD_ROLES,
    MIXTURES,
    UnitRoles,
    locate_units,
    register_feed_forward,
)


MIXED = {"gpt-oss", "mixtral", "qwen2-moe", "qwen3-moe"}
EVERY = [name for name in STOCK_MODELS if name not in MIXED]
EMPTY = ["first", "middle", "all"]


def uneven(model, empty="middle"):
    """Units to remove: one layer loses all, the others some."""
    chosen = {}
    for layer in locate_units(model):
        number = layer.site.layer
        if empty == "all" or number == (1 if empty == "middle" else 0):
            chosen[layer.site] = list(range(layer.num_units))
        else:
            chosen[layer.site] = [0, *range(3, layer.num_units, 2 + number)]
    return chosen


def as_argument(chosen):
    return config_value(chosen, kinds_of(chosen))


def silenced(model, chosen, heads=None):
    """The reference: a copy whose output projections read zeros from the chosen units (and heads)."""
    model = copy.deepcopy(model)
    for layer in locate_units(model):
        kept = torch.ones(layer.num_units)
        kept[chosen.get(layer.site, [])] = 0
        layer.output.register_forward_pre_hook(multiply_by(kept))
    for layer in locate_heads(model) if heads else ():
        kept = torch.ones(layer.num_heads, layer.head_dim)
        kept[heads.get(layer.site, [])] = 0
        layer.output.register_forward_pre_hook(multiply_by(kept.flatten()))
    return model


def multiply_by(factors):
    return lambda module, arguments: (arguments[0] * factors.to(arguments[0].dtype), *arguments[1:])


def logits(model, **changes):
    inputs = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in stock_inputs(model).items()
    }
    with torch.no_grad():
        return model(**inputs, **changes)[0]


def pruned(name, empty="middle"):
    model = build_stock(name)
    return prune_units(model, as_argument(uneven(model, empty)))


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("name", EVERY)
def test_a_pruned_model_equals_one_with_these_units_zeroed(name, empty):
    model = build_stock(name).double()
    chosen = uneven(model, empty)
    expected, before = logits(silenced(model, chosen)), logits(model)
    assert prune_units(model, as_argument(chosen)) is model
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)
    # The units mattered.
    assert (before - expected).abs().max() > 1e-6
