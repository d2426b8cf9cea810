"""Compensation: against replaced activations, and refitting against torch.linalg.lstsq."""

import copy

import pytest
import torch
from slow_unit_scores import MODELS, lone_sentences, output_projections, padded, scored_model
from stock_models import build_stock

from hf_attn_dynamics import (
    RefitErrors,
    compensate,
    load_pruned,
    masked_heads,
    mean_head_outputs,
    mean_unit_outputs,
    prune_heads,
    prune_units,
    refit_outputs,
)
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.unit_roles import locate_units


EXACT = {"rtol": 1e-9, "atol": 1e-11}


def pruned(model):
    """A copy with half of the heads and units removed, and one block of each sort without any."""
    model, heads, units = copy.deepcopy(model), {}, {}
    for layer in locate_heads(model):
        kind, number = layer.site
        groups = layer.groups()
        gone = groups if number == 1 else groups[number % 2 :: 2]
        heads.setdefault(kind, {})[number] = [head for group in gone for head in group]
    for layer in locate_units(model):
        kind, number = layer.site
        units.setdefault(kind, {})[number] = layer.units if number == 2 else layer.units[number % 2 :: 2]
    return prune_units(prune_heads(model, heads), units), heads, units


def test_blocks_that_the_data_does_not_run_are_named():
    dense = build_stock("bert", is_decoder=True, add_cross_attention=True)
    model = prune_heads(copy.deepcopy(dense), {"cross": {1: [0]}})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="data does not run the heads of cross layer 1"):
        compensate(model, dense, {"input_ids": torch.tensor([[5, 7, 8]])})
    with pytest.raises(ValueError, match="data does not run the heads of cross layer 1"):
        refit_outputs(model, dense, {"input_ids": torch.tensor([[5, 7, 8]])})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    text = {"input_ids": torch.tensor([[5, 7, 8]])}
    whole = {**text, "encoder_hidden_states": torch.randn(1, 2, dense.config.hidden_size)}
    with pytest.raises(ValueError, match="a batch does not run the heads of cross layer 0, as the first one does"):
        refit_outputs(model, dense, [whole, text])


def output(model, batch):
    with torch.no_grad():
        logits = model(**batch).logits
    labels = (
        batch["labels"]
        if model.config.is_encoder_decoder
        else batch["attention_mask"].where(batch["attention_mask"] > 0, -100)
    )
    return logits[labels != -100]


def activations(name, model, batch, part, kind, layer):
    """Inputs and outputs of an output projection at tokens, by a hook."""
    found = []
    module = output_projections(name, model)[part, kind][layer]
    hook = module.register_forward_hook(lambda module, inputs, output: found.append((inputs[0], output)))
    with torch.no_grad():
        model(**batch)
    hook.remove()
    of_targets = kind != "encoder" and model.config.is_encoder_decoder
    real = (batch["labels"] != -100 if of_targets else batch["attention_mask"] > 0).flatten()
    return tuple((one.flatten(0, 1) if one.dim() > 2 else one)[real] for one in found[0])


@pytest.mark.parametrize("name", ["bert", "marian", "opt", "gpt2"])
def test_mean_activations_are_over_tokens_however_they_are_padded_and_batched(name):
    model = scored_model(name)
    alone = lone_sentences(model)
    batch = padded(alone, length=12)
    means = mean_unit_outputs(model, batch)
    for kind, table in means.items():
        for layer, found in enumerate(table):
            expected = activations(name, model, batch, "units", kind, layer)[0].mean(0)
            torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(mean_unit_outputs(model, iter(alone)), means, **EXACT)


def test_removed_units_have_no_mean():
    model = prune_units(scored_model("bert"), {0: [3, 4], 1: "0-23"})
    means = mean_unit_outputs(model, padded(lone_sentences(model)))["encoder"]
    assert means.isnan().sum(1).tolist() == [2, 24, 0]


@pytest.mark.parametrize("name", MODELS)
def test_compensated_models_are_dense_ones_in_which_means_replace_what_was_removed(name):
    dense = scored_model(name)
    batch = padded(lone_sentences(dense))
    model, heads, units = pruned(dense)
    assert compensate(model, dense, batch) is model
    means = mean_unit_outputs(dense, batch)
    hooks = []
    for kind, layers in units.items():
        for number, gone in layers.items():

            def replace(module, inputs, gone=gone, mean=means[kind][number]):
                given = inputs[0].clone()
                given[..., gone] = mean[gone]
                return (given,)

            module = output_projections(name, dense)["units", kind][number]
            hooks.append(module.register_forward_pre_hook(replace))
    with masked_heads(dense, heads, mean_head_outputs(copy.deepcopy(scored_model(name)), batch)):
        expected = output(dense, batch)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(output(model, batch), expected, **EXACT)
    assert not torch.allclose(expected, output(dense, batch))


def test_units_that_never_change_are_compensated_exactly():
    dense = scored_model("llama")
    with torch.no_grad():
        # The attention gives zeros, so that the first block reads the same state at a token everywhere.
        for block in (dense.model.layers[0].mlp, dense.model.layers[2].mlp):
            block.up_proj.weight[:4] = 0
    model = prune_units(copy.deepcopy(dense), {0: "0-3", 2: [1]})
    batch = padded(lone_sentences(dense))
    compensate(model, dense, batch)
    torch.testing.assert_close(output(model, batch), output(dense, batch), **EXACT)


def test_added_biases_are_saved_and_loaded(tmp_path):
    dense = build_stock("llama", attention_bias=False)
    batch = padded(lone_sentences(dense))
    model, _, _ = pruned(dense)
    compensate(model, dense, batch)
    assert model.config.added_biases
    assert not getattr(dense.config, "added_biases", False)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(output(load_pruned(tmp_path), batch), output(model, batch))


def test_whole_models_need_no_compensation():
    dense = scored_model("llama")
    model = copy.deepcopy(dense)
    before = copy.deepcopy(model.state_dict())
    compensate(model, dense, padded(lone_sentences(dense)))
    assert model.state_dict().keys() == before.keys()
    assert all(before[name].equal(value) for name, value in model.state_dict().items())
    errors = refit_outputs(model, dense, padded(lone_sentences(dense)), add_biases=False)
    assert all(after == 0 for *_, after in errors.records())
    assert all(before[name].equal(value) for name, value in model.state_dict().items())


def test_compensation_is_not_added_twice():
    dense = scored_model("bert")
    batch = padded(lone_sentences(dense))
    model = compensate(pruned(dense)[0], dense, batch)
    with pytest.raises(ValueError, match="projection of the heads of encoder layer 0 has changed since pruning"):
        compensate(model, dense, batch)


def slow_fit(x, y, weight, bias, ridge):
    """The penalized problem as an ordinary one with further rows; weights `(outputs, inputs)`."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    x0, y0 = x - mean_x, y - mean_y
    penalty = ridge * x0.square().sum() / x.shape[1]
    rows = torch.cat([x0, penalty.sqrt() * torch.eye(x.shape[1], dtype=x.dtype)])
    right = torch.cat([y0, penalty.sqrt() * weight.T])
    fitted = torch.linalg.lstsq(rows, right, driver="gelsd").solution.T
    return fitted, mean_y - fitted @ mean_x


@pytest.mark.parametrize("ridge", [1e-4, 0.3])
@pytest.mark.parametrize("name", ["bert", "marian", "gpt2", "opt", "modernbert"])
def test_refitted_projections_are_those_of_least_squares_in_the_order_of_the_pass(name, ridge):
    dense = scored_model(name)
    batch = padded(lone_sentences(dense, 12))
    model, _, _ = pruned(dense)
    slow = copy.deepcopy(model)
    errors = refit_outputs(model, dense, batch, ridge=ridge)
    rows = list(errors.records())
    assert len(rows) == len(locate_heads(dense)) + len(locate_units(dense))
    fitted = output_projections(name, model)
    for part, kind, layer, before, after in rows:
        module = output_projections(name, slow)[part, kind][layer]
        _, target = activations(name, dense, batch, part, kind, layer)
        x, y = activations(name, slow, batch, part, kind, layer)
        spread = (target - target.mean(0)).square().sum()
        assert before == pytest.approx(float((y - target).square().sum() / spread), rel=1e-6, abs=1e-12)
        transposed = type(module).__name__ == "Conv1D"
        weight = module.weight.T if transposed else module.weight
        bias = module.bias if module.bias is not None else torch.zeros(len(weight), dtype=torch.float64)
        new_weight, new_bias = slow_fit(x, target, weight.detach(), bias, ridge)
        with torch.no_grad():
            if x.shape[1]:
                weight.copy_(new_weight)
            if module.bias is None:
                module.bias = torch.nn.Parameter(new_bias)
            module.bias.copy_(new_bias)
        own = fitted[part, kind][layer]
        torch.testing.assert_close(own.weight, module.weight, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(own.bias, module.bias, rtol=1e-6, atol=1e-9)
        x, y = activations(name, slow, batch, part, kind, layer)
        assert after == pytest.approx(float((y - target).square().sum() / spread), rel=1e-6, abs=1e-12)
        assert after <= before
    torch.testing.assert_close(output(model, batch), output(slow, batch), rtol=1e-6, atol=1e-8)


def test_heads_and_units_that_are_combinations_of_others_are_recovered():
    dense = scored_model("opt")
    layer = dense.model.decoder.layers[1]
    with torch.no_grad():
        # ReLU: the activation of unit 5 is twice that of unit 1. Head 2 repeats head 0.
        for weight in (layer.fc1.weight, layer.fc1.bias):
            weight[5] = 2 * weight[1]
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            for weight in (projection.weight, projection.bias):
                weight[16:24] = weight[:8]
    model = prune_units(prune_heads(copy.deepcopy(dense), {1: [2]}), {1: [5]})
    text, other = (padded(lone_sentences(dense, count)) for count in (60, 3))
    assert not torch.allclose(output(model, other), output(dense, other))
    errors = refit_outputs(model, dense, text, ridge=0)
    assert max(after for *_, after in errors.records()) < 1e-12
    torch.testing.assert_close(output(model, other), output(dense, other), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["bert", "llama", "marian", "t5", "albert"])
def test_refitting_depends_neither_on_padding_nor_on_batching(name):
    dense = scored_model(name)
    alone = lone_sentences(dense, 8)
    model, _, _ = pruned(dense)
    other = copy.deepcopy(model)
    errors = refit_outputs(model, dense, [padded(alone, length=14)])
    others = refit_outputs(other, dense, iter([padded(alone[:3]), padded(alone[3:])]))
    for (*place, _, after), (*place_too, _, after_too) in zip(errors.records(), others.records(), strict=True):
        assert place == place_too
        assert after == pytest.approx(after_too, rel=1e-6, abs=1e-12)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert", "t5", "albert"])
def test_errors_never_increase_in_lower_precision(name, dtype):
    dense = scored_model(name).to(dtype)
    batch = padded(lone_sentences(dense, 8))
    errors = refit_outputs(pruned(dense)[0], dense, batch)
    assert all(after <= before for *_, before, after in errors.records())
    assert any(after < before for *_, before, after in errors.records())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_each_way_of_compensation_is_closer_to_the_dense_model_on_other_texts(name):
    dense = scored_model(name)
    text = padded(lone_sentences(dense, 60))
    other = {**text, "input_ids": text["input_ids"].roll(7, 0).where(text["attention_mask"] > 0, 1)}
    other["attention_mask"] = other["input_ids"].ne(1).long()
    plain = prune_units(copy.deepcopy(dense), dict.fromkeys(range(3), "0-9"))
    by_bias = compensate(copy.deepcopy(plain), dense, text)
    refitted = copy.deepcopy(plain)
    refit_outputs(refitted, dense, text, ridge=1e-2)
    expected = output(dense, other)
    distance = [float((output(one, other) - expected).square().mean()) for one in (plain, by_bias, refitted)]
    assert distance[0] > distance[1] > distance[2]


def test_biases_are_added_only_on_request():
    dense = build_stock("llama", attention_bias=False).double()
    batch = padded(lone_sentences(dense, 8))
    model, _, _ = pruned(dense)
    errors = refit_outputs(model, dense, batch, add_biases=False)
    assert not model.config.added_biases
    assert all(layer.output.bias is None for layer in locate_units(model))
    assert any(after < before for *_, before, after in errors.records())
    refit_outputs(model, dense, batch)
    assert model.config.added_biases
    assert all(layer.output.bias is not None for layer in locate_units(model))


def test_models_are_left_in_their_mode_and_without_hooks():
    dense = scored_model("bert").train()
    model = pruned(dense)[0].requires_grad_(False)
    refit_outputs(model, dense, padded(lone_sentences(dense)))
    assert model.training
    assert dense.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for one in (model, dense) for module in one.modules())


def test_errors_are_saved_and_shown(tmp_path):
    dense = scored_model("bert")
    errors = refit_outputs(pruned(dense)[0], dense, padded(lone_sentences(dense)))
    errors.save(tmp_path / "errors.json")
    assert RefitErrors.load(tmp_path / "errors.json") == errors
    assert [row[:3] for row in errors.records()][:3] == [
        ("heads", "encoder", 0),
        ("units", "encoder", 0),
        ("heads", "encoder", 1),
    ]


@pytest.mark.parametrize("function", [compensate, refit_outputs])
def test_models_that_do_not_belong_together_are_refused(function):
    dense = scored_model("bert")
    batch = padded(lone_sentences(dense))
    model = prune_units(copy.deepcopy(dense), {1: [3]})
    before = copy.deepcopy(model.state_dict())
    for other, message in (
        (model, "dense is the pruned model itself; copy the model before pruning"),
        (
            build_stock("gpt2"),
            "dense must have the layers of model, but only one of them has heads of encoder layer 0",
        ),
        (build_stock("bert", intermediate_size=28), "it has 28 units of encoder layer 0, not 24"),
        (prune_units(copy.deepcopy(dense), {1: [3, 4]}), "dense lacks unit 4 of encoder layer 1, which model has"),
    ):
        with pytest.raises(ValueError, match=message):
            function(model, other, batch)
    for data, message in (([], "data is empty"), ([[1, 2]], "batch 0 of data must be a dictionary of tensors")):
        with pytest.raises(ValueError, match=message):
            function(model, dense, data)
    assert all(before[name].equal(value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("ridge", [-1, float("nan"), "much", None])
def test_impossible_penalties_are_refused(ridge):
    dense = scored_model("bert")
    with pytest.raises(ValueError, match="ridge must be a number of at least 0, got"):
        refit_outputs(pruned(dense)[0], dense, padded(lone_sentences(dense)), ridge=ridge)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
@pytest.mark.parametrize("function", [compensate, refit_outputs])
def test_adapted_projections_of_the_dense_model_are_refused(function):
    peft = pytest.importorskip("peft")
    dense = scored_model("llama")
    alone = lone_sentences(dense)
    model = prune_units(copy.deepcopy(dense), {0: [0, 1]})
    before = copy.deepcopy(model.state_dict())
    adapted = peft.get_peft_model(dense, peft.LoraConfig(target_modules=["down_proj"])).base_model.model
    with pytest.raises(ValueError, match=r"output projection of .*mlp.*(adapt|merge)"):
        function(model, adapted, alone)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
