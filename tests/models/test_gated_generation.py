# Licensed under the Apache License, Version 2.0.
"""Generation of gated, pruned and guided models with every cache of Transformers that runs on a CPU."""

from functools import cache

import pytest
import torch
from stock_models import STOCK_MODELS, build_stock, stock_inputs
from torch.nn.functional import pad

import hf_attn_dynamics as had
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.head_sites import kinds_of


# Sliding windows are of 8 tokens; prompts have 5 and 11, to which 12 are added.
NAMES = ["bart", "gemma2", "gemma3", "gpt2", "llama", "mistral", "qwen3", "whisper"]
GROUPED = ["gemma2", "gemma3", "llama", "mistral", "qwen3"]
# Which layers slide, where some do.
SLIDING = {"gemma2": [True, False, True], "gemma3": [False, True, True], "mistral": [True, True, True]}
CHANGES = {"gemma3": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}}
# Their layers slide where those of the model do: Transformers deprecates the names "sliding_window" and "hybrid" for
# "static". Offloaded caches need an accelerator, quantized ones another library.
CACHES = ["dynamic", "static"]
# Name -> kernel, precision, tolerance. Only eager attention caps the scores of Gemma 2; its softmax is in single
# precision, in which the mask of double precision is infinite.
KERNELS = dict.fromkeys(NAMES, ("sdpa", torch.float64, 1e-9)) | {"gemma2": ("eager", torch.float32, 1e-5)}


def stock_of(name):
    """A stock model with random weights, with the kernel and in the precision of its row in `KERNELS`."""
    kernel, precision, _ = KERNELS[name]
    stock = build_stock(name, **CHANGES.get(name, {})).to(precision)
    stock.set_attn_implementation(kernel)
    return stock


def headwise_of(stock, name, **heads):
    """The headwise model of a stock one, with the same settings at each kind of site."""
    kinds = kinds_of({layer.site: 1 for layer in locate_heads(stock)})
    heads = {option: dict.fromkeys(kinds, value) if len(kinds) > 1 else value for option, value in heads.items()}
    cls = getattr(had, f"Headwise{type(stock).__name__}")
    kernel, precision, _ = KERNELS[name]
    settings = {**STOCK_MODELS[name][2], **CHANGES.get(name, {}), **heads}
    model = cls(cls.config_class(**settings, attn_implementation=kernel)).to(precision).eval()
    model.load_state_dict(stock.state_dict(), strict=False)
    return model


def prompts_of(model):
    """A short and a long prompt, padded on the left where a decoder reads it."""
    inputs = {key: value for key, value in stock_inputs(model).items() if not key.startswith("decoder_")}
    if model.config.is_encoder_decoder:
        return {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    ids, mask = inputs["input_ids"][:, -5:].clamp(min=4), torch.ones(2, 5, dtype=torch.long)
    long, start = inputs["input_ids"][:1], 11 - 5
    return {
        "input_ids": torch.cat([pad(ids, (start, 0), value=1), long]),
        "attention_mask": torch.cat([pad(mask, (start, 0)), torch.ones_like(long)]),
    }


def greedy(model, prompts, **settings):
    """Tokens, and the logits that each was chosen by, of shape (sentences, tokens, vocabulary)."""
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 1, **settings}
    found = model.generate(**prompts, **settings, return_dict_in_generate=True, output_logits=True)
    return found.sequences, torch.stack(found.logits, dim=1)


@cache
def gated_and_pruned(name, unit, empty):
    """A model with open, half-open and closed gates, the same one pruned, and what the latter writes without a cache.

    Args:
        name (`str`): Name in `STOCK_MODELS`.
        unit (`str`): What a gate is of.
        empty (`bool`): Whether all gates of the first layers are closed.
    """
    gated = headwise_of(stock_of(name), name, gates={"unit": unit})
    generator = torch.Generator().manual_seed(0)
    for number, (site, gate) in enumerate(gated.head_gates().items()):
        gate.log_alpha.data = torch.rand(gate.log_alpha.shape, generator=generator).to(gate.log_alpha)
        gate.log_alpha.data[number % len(gate.log_alpha)] = -3.0
        # The other query head of a group, in some layers: only a whole group is cut out.
        if unit == "head" and number % 2:
            gate.log_alpha.data[number % len(gate.log_alpha) ^ 1] = -3.0
        if empty and site.layer == 0:
            gate.log_alpha.data.fill_(-3.0)
    pruned = had.prune_closed_gates(gated)
    return gated, pruned, greedy(pruned, prompts_of(gated), use_cache=False)


def assert_same_text(found, expected, name):
    assert torch.equal(found[0], expected[0])
    tolerance = KERNELS[name][2]
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("implementation", [None, *CACHES])
@pytest.mark.parametrize(
    ("name", "unit", "empty"),
    [(name, "head" if name not in GROUPED else "group", empty) for name in NAMES for empty in (False, True)]
    + [(name, "head", False) for name in GROUPED],
)
def test_a_gated_model_writes_what_the_pruned_one_writes_whatever_the_cache(name, unit, empty, implementation):
    gated, pruned, expected = gated_and_pruned(name, unit, empty)
    settings = {"use_cache": False} if implementation is None else {"cache_implementation": implementation}
    for model in (gated, pruned):
        assert_same_text(greedy(model, prompts_of(gated), **settings), expected, name)


@pytest.mark.parametrize("name", GROUPED)
def test_sentences_padded_on_the_left_are_continued_as_alone(name):
    gated, _, (tokens, logits) = gated_and_pruned(name, "group", False)
    prompts = prompts_of(gated)
    for row in range(len(tokens)):
        length = int(prompts["attention_mask"][row].sum())
        for implementation in ("dynamic", "static"):
            alone = {key: value[row : row + 1, -length:] for key, value in prompts.items()}
            found = greedy(gated, alone, cache_implementation=implementation)
            expected = tokens[row : row + 1, -12:], logits[row : row + 1]
            assert_same_text((found[0][:, length:], found[1]), expected, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_guided_model_writes_what_the_stock_model_writes_whatever_the_cache(name):
    stock = stock_of(name)
    guided = headwise_of(stock, name, guidance={"fraction": 0.5, "patterns": ["prev", "first"]})
    for implementation in CACHES:
        expected = greedy(stock, prompts_of(stock), cache_implementation=implementation)
        found = greedy(guided, prompts_of(stock), cache_implementation=implementation)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected)), implementation


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("implementation", CACHES)
def test_caches_of_gated_and_pruned_models_slide_where_attention_does(name, implementation):
    gated, pruned, _ = gated_and_pruned(name, "group", False)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1, "return_dict_in_generate": True}
    for model in (gated, pruned):
        found = model.generate(**prompts_of(model), **settings, cache_implementation=implementation)
        assert found.cache.is_sliding == SLIDING[name]
