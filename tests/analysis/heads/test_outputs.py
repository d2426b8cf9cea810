"""Outputs of heads: masked ones act as heads whose columns of the output projection are zero."""

import copy

import pytest
import torch
from stock_models import STOCK_MODELS, build_stock, stock_inputs
from tiny_models import ALL_GATES, KINDS, UNEVEN, batch_for, tiny_model, vivid
from torch import nn

from hf_attn_dynamics import (
    HeadScores,
    attention_maps,
    head_outputs,
    masked_heads,
    mean_head_outputs,
    prune_heads,
)
from hf_attn_dynamics.models.head_roles import locate_heads


EXACT = {"rtol": 1e-9, "atol": 1e-11}


def logits(model, inputs):
    return model(**inputs)[0]


def without(model, heads):
    """The slow way: a copy whose output projection takes nothing from these heads, `{site: [heads]}`."""
    model = copy.deepcopy(model)
    for layer in locate_heads(model):
        for head in heads.get(layer.site, []):
            rows = slice(layer.heads.index(head) * layer.head_dim, (layer.heads.index(head) + 1) * layer.head_dim)
            weight = layer.output.weight.data
            (weight[:, rows] if isinstance(layer.output, nn.Linear) else weight[rows]).zero_()
    return model


def some_heads(model):
    """An odd choice of heads at each kind of site: as arguments, and by site."""
    chosen = {layer.site: [0, layer.num_heads - 1] if layer.site.layer else [1] for layer in locate_heads(model)}
    by_kind = {}
    for site, heads in chosen.items():
        by_kind.setdefault(site.kind, {})[site.layer] = heads
    return by_kind, chosen


@pytest.mark.parametrize("name", STOCK_MODELS)
def test_masked_heads_give_nothing(name):
    model = build_stock(name).double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in stock_inputs(model).items()}
    by_kind, chosen = some_heads(model)
    before = logits(model, inputs)
    with masked_heads(model, by_kind):
        masked = logits(model, inputs)
    torch.testing.assert_close(masked, logits(without(model, chosen), inputs), **EXACT)
    assert not torch.allclose(masked, before)
    assert logits(model, inputs).equal(before)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_keep_their_numbers_in_pruned_and_gated_models(kind):
    model, inputs = prune_heads(vivid(tiny_model(kind, gates=ALL_GATES[kind])).double(), UNEVEN[kind]), batch_for(kind)
    layer = next(layer for layer in locate_heads(model) if 0 < len(layer.heads) < layer.num_heads)
    (kind, number), last = layer.site, layer.heads[-1]
    assert last != len(layer.heads) - 1  # its place is another than its number
    with masked_heads(model, {kind: {number: [last]}}):
        masked = logits(model, inputs)
    torch.testing.assert_close(masked, logits(without(model, {layer.site: [last]}), inputs), **EXACT)
    missing = head_outputs(model, inputs)[kind][number].isnan().all(-1).all(0).all(0)
    assert missing.tolist() == [head not in layer.heads for head in range(layer.num_heads)]


@pytest.fixture(scope="module")
def bert():
    model = build_stock("bert").double()
    return model, stock_inputs(model)


def test_numbers_for_each_head_and_example_are_the_mask_of_each_example_alone(bert):
    model, inputs = bert
    masks = torch.rand(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with masked_heads(model, masks):
        together = logits(model, inputs)
    for row in range(2):
        with masked_heads(model, {"encoder": masks[row]}):
            alone = logits(model, {name: value[row : row + 1] for name, value in inputs.items()})
        real = inputs["attention_mask"][row].bool()
        torch.testing.assert_close(together[row][real], alone[0][real], **EXACT)
    with masked_heads(model, torch.ones(3, 4) > 0):
        torch.testing.assert_close(logits(model, inputs), model(**inputs).logits, **EXACT)


def test_heads_can_be_named_as_they_are_ranked(bert):
    model, inputs = bert
    ranked = HeadScores({"encoder": torch.arange(12.0).view(3, 4)}).ranked()[:3]
    with masked_heads(model, {2: [1, 2, 3]}):
        expected = logits(model, inputs)
    with masked_heads(model, ranked):
        assert logits(model, inputs).equal(expected)


def test_contexts_can_be_nested(bert):
    model, inputs = bert
    with masked_heads(model, {0: [1]}), masked_heads(model, {0: [2], 2: [0]}):
        nested = logits(model, inputs)
    with masked_heads(model, {0: [1, 2], 2: [0]}):
        assert nested.equal(logits(model, inputs))


def test_gradients_of_mask_and_replacement_are_those_of_differences(bert):
    model, inputs = bert
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(3, 4, dtype=torch.float64, generator=generator).requires_grad_()
    replacement = torch.randn(3, 4, 8, dtype=torch.float64, generator=generator).requires_grad_()

    def loss(mask, replacement):
        with masked_heads(model, mask, replacement):
            return logits(model, inputs).sin().sum()

    assert torch.autograd.gradcheck(loss, (mask, replacement), fast_mode=True)


def test_outputs_are_values_weighted_by_attention(bert):
    model, inputs = bert
    maps = attention_maps(model, inputs)["encoder"]
    states = model(**inputs, output_hidden_states=True).hidden_states
    real = inputs["attention_mask"].bool()
    for found, weights, hidden, layer in zip(
        head_outputs(model, inputs)["encoder"], maps, states, locate_heads(model)
    ):
        values = layer.module.value(hidden).unflatten(-1, (4, 8)).transpose(1, 2)
        expected = (weights.double() @ values).transpose(1, 2)
        torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-6)


def test_outputs_are_those_without_dropout_and_the_mode_stays(bert):
    model, inputs = copy.deepcopy(bert[0]).train(), bert[1]
    model.bert.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    found = head_outputs(model, inputs)["encoder"]
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(found, head_outputs(model.eval(), inputs)["encoder"], rtol=0, atol=0)


def test_patching_a_model_with_its_own_outputs_changes_nothing(bert):
    model, inputs = bert
    with masked_heads(model, torch.zeros(3, 4), head_outputs(model, inputs)):
        torch.testing.assert_close(logits(model, inputs), model(**inputs).logits, **EXACT)


def test_what_is_patched_in_is_what_heads_give(bert):
    model, inputs = bert
    other = head_outputs(model, {**inputs, "input_ids": inputs["input_ids"].flip(1)})
    own = head_outputs(model, inputs)["encoder"]
    with masked_heads(model, {0: [1], 2: [3]}, other):
        found = head_outputs(model, inputs)["encoder"]
    torch.testing.assert_close(found[0, ..., 1, :], other["encoder"][0, ..., 1, :], **EXACT)
    torch.testing.assert_close(found[2, ..., 3, :], other["encoder"][2, ..., 3, :], **EXACT)
    torch.testing.assert_close(found[0, ..., [0, 2, 3], :], own[0, ..., [0, 2, 3], :], **EXACT)


def test_the_mean_is_over_tokens_however_they_are_padded_and_batched(bert):
    model, inputs = bert
    outputs, real = head_outputs(model, inputs)["encoder"], inputs["attention_mask"].bool()
    expected = torch.stack([layer[real].mean(0) for layer in outputs])
    model.train()
    torch.testing.assert_close(mean_head_outputs(model, [inputs])["encoder"], expected, **EXACT)
    assert model.training
    model.eval()
    one_by_one = [{k: v[row : row + 1, : real[row].sum()] for k, v in inputs.items()} for row in range(2)]
    means = mean_head_outputs(model, iter(one_by_one))
    torch.testing.assert_close(means["encoder"], expected, **EXACT)
    with masked_heads(model, {1: [2]}, means):
        found = head_outputs(model, inputs)["encoder"][1, ..., 2, :]
    torch.testing.assert_close(found, expected[1, 2].expand_as(found), **EXACT)


def test_sites_of_an_encoder_decoder_have_tables_of_their_own():
    model = build_stock("marian").double()
    inputs = stock_inputs(model)
    outputs = head_outputs(model, inputs)
    assert {kind: tuple(table.shape) for kind, table in outputs.items()} == {
        "encoder": (3, 2, 11, 4, 8),
        "decoder": (3, 2, 6, 4, 8),
        "cross": (3, 2, 6, 4, 8),
    }
    with masked_heads(model, {"cross": torch.zeros(3, 4)}, {"cross": outputs["cross"]}):
        torch.testing.assert_close(logits(model, inputs), model(**inputs).logits, **EXACT)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2"])
def test_what_is_generated_is_what_a_model_without_these_heads_generates(name):
    model = build_stock(name)
    by_kind, chosen = some_heads(model)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = without(model, chosen).generate(**stock_inputs(model), **settings)
    whole = model.generate(**stock_inputs(model), **settings)
    with masked_heads(model, by_kind):
        assert model.generate(**stock_inputs(model), **settings).equal(expected)
    assert not expected.equal(whole)
    assert model.generate(**stock_inputs(model), **settings).equal(whole)


@pytest.mark.parametrize(
    ("mask", "replacement", "message"),
    [
        ({0: [4]}, None, r"mask \(layer 0\) names head 4, but the heads of this layer are 0 to 3"),
        ({3: [0]}, None, "mask names layer 3, but its layers are 0 to 2"),
        ({"decoder": {0: [1]}}, None, "mask names the site 'decoder', but the heads of this model are at encoder"),
        ([0, 1], None, r"mask must be {layer: \[heads\]}, or a list of heads .* got \[0, 1\]"),
        (
            torch.ones(4, 3),
            None,
            r"mask of the encoder must have the shape \(layers, heads\) = \(3, 4\).* got \(4, 3\)",
        ),
        (torch.ones(4), None, r"got \(4,\)"),
        ({0: [1]}, torch.ones(3, 4), r"replacement of the encoder .* \(3, 4, 8\), or .* got \(3, 4\)"),
        ({0: [1]}, {"encoder": 0.5}, "replacement of the encoder .* got 0.5"),
        ({0: [1]}, {}, r"replacement of the encoder .* got \{\}"),
    ],
)
def test_what_a_model_does_not_have_is_refused(bert, mask, replacement, message):
    with pytest.raises(ValueError, match=message), masked_heads(bert[0], mask, replacement):
        pass


def test_sites_have_to_be_named_where_there_are_several():
    model = build_stock("t5")
    named = {"cross": {0: [1]}}
    with pytest.raises(ValueError, match="mask must name the sites, {'encoder', 'decoder', 'cross': …}, got a tensor"):
        masked_heads(model, torch.ones(3, 4)).__enter__()
    with pytest.raises(ValueError, match="mask names the cross, but replacement does not"):
        masked_heads(model, named, {"encoder": torch.ones(3, 4, 6)}).__enter__()


def test_a_mask_for_other_examples_is_refused_and_leaves_nothing_behind(bert):
    model, inputs = bert
    before = logits(model, inputs)
    message = "mask is for 3 examples, but the outputs of encoder layer 0 are of 2"
    with pytest.raises(ValueError, match=message), masked_heads(model, torch.zeros(3, 3, 4)):
        model(**inputs)
    assert logits(model, inputs).equal(before)


def test_a_single_batch_has_a_mean(bert):
    model, inputs = bert
    torch.testing.assert_close(mean_head_outputs(model, inputs), mean_head_outputs(model, [inputs]), rtol=0, atol=0)


def test_no_data_has_no_mean(bert):
    with pytest.raises(ValueError, match="data is empty: mean of head outputs needs at least one batch"):
        mean_head_outputs(bert[0], [])


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "bart", "t5"])
def test_the_mask_of_an_example_holds_for_all_its_beams(name, settings):
    model = build_stock(name)
    inputs = stock_inputs(model)
    ids = inputs["input_ids"][:, :5].clamp(min=5)
    kinds = {layer.site.kind: layer.num_heads for layer in locate_heads(model)}
    counts = {kind: sum(layer.site.kind == kind for layer in locate_heads(model)) for kind in kinds}
    generator = torch.Generator().manual_seed(1)
    masks = {
        kind: torch.rand(len(ids), counts[kind], heads, generator=generator).round() for kind, heads in kinds.items()
    }
    settings = {**settings, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with masked_heads(model, masks):
        found = model.generate(ids, **settings)
    times = settings.get("num_return_sequences", 1)
    for example in range(len(ids)):
        with masked_heads(model, {kind: mask[example] for kind, mask in masks.items()}):
            alone = model.generate(ids[example : example + 1], **settings)
        assert found[example * times : (example + 1) * times].equal(alone)
    assert not found.equal(model.generate(ids, **settings))


def test_sampled_sequences_have_the_mask_of_their_example():
    model = build_stock("gpt2")
    ids = torch.tensor([[5, 7, 8], [9, 6, 4]])
    mask = torch.stack([torch.zeros(3, 4), torch.ones(3, 4)])
    with masked_heads(model, mask):
        scores = model.generate(
            ids, num_return_sequences=4, do_sample=True, max_new_tokens=1, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0,
        ).logits[0]  # fmt: skip
        alone = model(ids).logits[:, -1]
    torch.testing.assert_close(scores, alone.repeat_interleave(4, 0))


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_patching_at_another_length_is_refused(name):
    model = build_stock(name)
    inputs = stock_inputs(model)
    kind = "decoder"
    outputs = head_outputs(model, inputs)[kind]
    mask = {kind: torch.zeros(*outputs.shape[:1], outputs.shape[3])}
    length = outputs.shape[2]
    with masked_heads(model, mask, {kind: outputs[:, :, :-1]}):
        message = rf"replacement is for {length - 1} tokens, but the outputs of decoder layer 0 are of {length}\.$"
        with pytest.raises(ValueError, match=message):
            model(**inputs)
        with pytest.raises(
            ValueError, match=r"in generate\(\), where most steps have one token, give \(layers, heads"
        ):
            model.generate(inputs["input_ids"], max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    with masked_heads(model, mask, {kind: torch.cat([outputs, outputs[:, :1]], 1)}):
        message = rf"replacement is for {outputs.shape[1] + 1} examples, but the outputs of decoder layer 0 are of"
        with pytest.raises(ValueError, match=message):
            model(**inputs)


def test_one_sentence_can_be_patched_into_all(bert):
    model, inputs = bert
    outputs = head_outputs(model, inputs)["encoder"]
    mask = torch.zeros(3, 4)
    with masked_heads(model, mask, outputs[:, :1]):
        found = logits(model, inputs)
    with masked_heads(model, mask, outputs[:, :1].expand_as(outputs)):
        assert logits(model, inputs).equal(found)


# --- chosen tokens and steps -----------------------------------------------------------------------------------------


def slow_tokens(model, heads, inputs, chosen):
    """Logits with heads masked at some tokens: hooks that zero their outputs there."""
    hooks = []
    for layer in locate_heads(model):
        of_layer = heads.get(layer.site.layer, [])

        def zero(module, args, layer=layer, of_layer=of_layer):
            z = args[0].unflatten(-1, (layer.num_heads, -1)).clone()
            for head in of_layer:
                z[:, chosen, head] = 0
            return (z.flatten(-2),)

        hooks.append(layer.output.register_forward_pre_hook(zero))
    found = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("as_tensor", [False, True])
@torch.no_grad()
def test_heads_are_masked_at_chosen_tokens(name, as_tensor):
    model = vivid(build_stock(name)).double().eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    heads, chosen = {0: [1], 1: [0, 2]}, [1, 3]
    expected = slow_tokens(model, heads, inputs, chosen)
    positions = torch.tensor([False, True, False, True]) if as_tensor else chosen
    with masked_heads(model, heads, positions=positions):
        found = model(**inputs).logits
    torch.testing.assert_close(found, expected, **EXACT)
    assert not torch.allclose(found, model(**inputs).logits)


@torch.no_grad()
def test_examples_have_tokens_of_their_own_and_replacements():
    model = vivid(build_stock("llama")).double().eval()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    other = head_outputs(model, {"input_ids": ids.flip(1)})["decoder"]
    positions = torch.tensor([[True, False, False, True], [False, True, False, False]])
    with masked_heads(model, {0: [0]}, other, positions=positions):
        found = model(ids).logits
    for row in range(2):
        single = other[:, row : row + 1]
        with masked_heads(model, {0: [0]}, single, positions=positions[row].nonzero()[:, 0].tolist()):
            torch.testing.assert_close(found[row], model(ids[row : row + 1]).logits[0], **EXACT)


def new_tokens(model, ids, **settings):
    return model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=1, eos_token_id=None, **settings)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_steps_are_the_passes_of_generation(name):
    model = vivid(build_stock(name)).double().eval()
    ids, heads = torch.tensor([[5, 6, 7]]), {0: [0, 1], 2: [1, 3]}
    with masked_heads(model, heads, steps=range(1, 5)):
        by_steps = new_tokens(model, ids)
    # Step i reads token 3 + i - 1 of the sequence.
    with masked_heads(model, heads, positions=range(3, 7)):
        by_positions = new_tokens(model, ids)
    assert by_steps.tolist() == by_positions.tolist()
    with masked_heads(model, heads, steps=[0]):
        first = new_tokens(model, ids)
    with masked_heads(model, heads, positions=torch.ones(1, 3, dtype=torch.bool)):
        assert first.tolist() == new_tokens(model, ids).tolist()
    with masked_heads(model, heads, steps=range(5)):
        all_steps = new_tokens(model, ids)
    with masked_heads(model, heads):
        assert all_steps.tolist() == new_tokens(model, ids).tolist()
    assert len({str(one.tolist()) for one in (by_steps, first, all_steps, new_tokens(model, ids))}) > 1


@torch.no_grad()
def test_beams_have_the_tokens_of_their_example():
    model = vivid(build_stock("llama")).double().eval()
    ids, heads = torch.tensor([[5, 6, 7], [8, 9, 10]]), {0: [0, 1], 1: [1, 3]}
    positions = torch.tensor([[True, False, True, True], [False, True, False, False]])
    with masked_heads(model, heads, positions=positions):
        together = new_tokens(model, ids, num_beams=3)
    for row in range(2):
        with masked_heads(model, heads, positions=positions[row]):
            assert new_tokens(model, ids[row : row + 1], num_beams=3)[0].tolist() == together[row].tolist()


@torch.no_grad()
def test_sites_of_encoder_decoders_have_tokens_of_their_own():
    model = vivid(build_stock("marian")).double().eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    heads = {"encoder": {0: [0]}, "decoder": {1: [1]}}
    with masked_heads(model, heads, positions={"encoder": [2], "decoder": [0, 1]}):
        found = model(input_ids=ids, decoder_input_ids=ids[:, :3]).logits
    apart = (
        masked_heads(model, {"encoder": {0: [0]}}, positions={"encoder": [2]}),
        masked_heads(model, {"decoder": {1: [1]}}, positions={"decoder": [0, 1]}),
    )
    with apart[0], apart[1]:
        expected = model(input_ids=ids, decoder_input_ids=ids[:, :3]).logits
    torch.testing.assert_close(found, expected, **EXACT)
    assert not torch.allclose(found, model(input_ids=ids, decoder_input_ids=ids[:, :3]).logits)
    with masked_heads(model, {"decoder": {1: [1]}}, steps=[2]):
        assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (1, 5)


@pytest.mark.parametrize(
    ("name", "mask", "arguments", "message"),
    [
        ("llama", {0: [0]}, {"positions": [-1]}, "positions must be integers of at least 0, got -1"),
        (
            "llama",
            {0: [0]},
            {"positions": torch.tensor([1, 2])},
            "positions of the decoder must be indices, or a bool",
        ),
        ("llama", {0: [0]}, {"steps": [0.5]}, "steps must be integers of at least 0, got 0.5"),
        ("llama", {0: [0]}, {"positions": {"encoder": [1]}}, "positions name the encoder, but mask does not"),
        ("bert", {0: [0]}, {"steps": [1]}, "steps are those of a decoder in generate"),
        (
            "marian",
            {"decoder": {0: [0]}},
            {"positions": [1]},
            "positions must name the sites, {'encoder', 'decoder', ",
        ),
    ],
)
def test_chosen_queries_that_do_not_exist_are_named(name, mask, arguments, message):
    with pytest.raises(ValueError, match=message), masked_heads(build_stock(name), mask, **arguments):
        pass


@torch.no_grad()
def test_steps_that_are_not_known_are_refused():
    model = build_stock("llama").eval()
    ids = torch.tensor([[5, 6, 7]])
    steps, many = {"steps": [1]}, {"positions": torch.ones(3, 4, dtype=torch.bool)}
    cache = model(ids, use_cache=True).cache
    with masked_heads(model, {0: [0]}, **steps), pytest.raises(ValueError, match="by its cache: pass use_cache=True"):
        new_tokens(model, ids, use_cache=False)
    with masked_heads(model, {0: [0]}, **steps), pytest.raises(ValueError, match="reads 2 tokens after 3 cached ones"):
        model(torch.tensor([[8, 9]]), cache=cache)
    with masked_heads(model, {0: [0]}, **many), pytest.raises(ValueError, match="positions is for 3 examples"):
        model(ids.expand(2, 3))
