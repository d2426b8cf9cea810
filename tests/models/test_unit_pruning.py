"""Removing feed-forward units, blocks and layers: pruned models equal models with zeroed activations."""

import copy
import json
import pickle

import pytest
import torch
import transformers
from fresh_processes import python
from stock_models import STOCK_MODELS, build_stock, stock_inputs
from torch import nn

from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseMarianConfig
from hf_attn_dynamics.models import unit_roles
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


@pytest.mark.parametrize("name", ["albert", "bert", "gpt2", "llama", "marian", "modernbert", "t5"])
def test_heads_and_units_are_removed_in_any_order(name):
    units = uneven(build_stock(name), "first")
    heads = {layer.site: layer.heads[: layer.group_size] for layer in locate_heads(build_stock(name))}
    model = build_stock(name).double()
    expected = logits(silenced(model, units, heads))
    steps = [lambda one: prune_units(one, as_argument(units)), lambda one: prune_heads(one, as_argument(heads))]
    for order in (steps, steps[::-1]):
        pruned_both = copy.deepcopy(model)
        for step in order:
            step(pruned_both)
        torch.testing.assert_close(logits(pruned_both), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["albert", "bert", "gpt2", "llama", "marian", "t5"])
def test_removing_units_in_steps_equals_removing_them_at_once(name):
    at_once, in_steps = build_stock(name), build_stock(name)
    chosen = uneven(at_once)
    prune_units(at_once, as_argument(chosen))
    last = {site: units[-2:] for site, units in chosen.items()}
    prune_units(in_steps, as_argument(last))
    # Units that are gone are ignored.
    prune_units(in_steps, as_argument(chosen))
    assert in_steps.config.pruned_units == at_once.config.pruned_units
    expected = at_once.state_dict()
    assert in_steps.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in in_steps.state_dict().items())


@pytest.mark.parametrize("name", EVERY)
def test_units_are_located_in_the_original_numbering(name):
    model = build_stock(name)
    before = locate_units(model)
    # Every layer of heads has a block of units.
    assert {layer.site for layer in before} == {one.site for one in locate_heads(model) if one.site.kind != "cross"}
    chosen = uneven(model)
    prune_units(model, as_argument(chosen))
    for old, new in zip(before, locate_units(model), strict=True):
        assert (new.site, new.num_units) == (old.site, old.num_units)
        assert new.units == [unit for unit in old.units if unit not in chosen[old.site]]


@pytest.mark.parametrize("name", EVERY)
def test_a_saved_model_comes_back(name, tmp_path):
    model = pruned(name)
    model.save_pretrained(tmp_path)
    back, info = load_pruned(tmp_path, output_loading_info=True)
    assert type(back) is type(model)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(back), logits(model), rtol=1e-5, atol=1e-6)
    assert back.config.pruned_units == json.loads(json.dumps(model.config.pruned_units), object_hook=with_integer_keys)
    assert [layer.units for layer in locate_units(back)] == [layer.units for layer in locate_units(model)]


def with_integer_keys(pairs):
    return {int(key) if key.isdecimal() else key: value for key, value in pairs.items()}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "marian", "t5", "vit"])
def test_auto_classes_bring_back_the_headwise_twin(name, tmp_path):
    model = prune_heads(pruned(name), as_argument(first_groups(build_stock(name))))
    model.save_pretrained(tmp_path)
    auto_of = {file.partition(".")[2]: auto for auto, file in model.config.code_map().items()}
    back = getattr(transformers, auto_of[f"Headwise{type(model).__name__}"]).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(back), logits(model), rtol=1e-5, atol=1e-6)
    assert [layer.units for layer in locate_units(back)] == [layer.units for layer in locate_units(model)]
    assert [layer.heads for layer in saved_heads(tmp_path)] == [layer.heads for layer in sorted_layers(model)]


def first_groups(model):
    return {layer.site: layer.heads[: layer.group_size] for layer in locate_heads(model) if layer.site.layer == 0}


def sorted_layers(model):
    return sorted(
        locate_heads(model), key=lambda one: (("encoder", "decoder", "cross").index(one.site.kind), one.site.layer)
    )


FRESH = """
import json, sys, torch, hf_attn_dynamics, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    found = model(torch.tensor(json.loads(sys.argv[2])))[0].flatten().tolist()
print(json.dumps([type(model).__name__, found]))
"""


def test_a_fresh_process_loads_the_same_model(tmp_path):
    model = pruned("bert")
    model.save_pretrained(tmp_path)
    ids = [[4, 7, 5, 9, 11]]
    (result,) = python(["-c", FRESH, tmp_path, json.dumps(ids)])
    assert result.returncode == 0, result.stderr
    name, found = json.loads(result.stdout.splitlines()[-1])
    assert name == "HeadwiseBertForMaskedLM"
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found), model(torch.tensor(ids))[0].flatten(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_training_moves_every_parameter_as_in_the_silenced_model(name):
    model = build_stock(name).double()
    chosen = uneven(model, "first")
    reference = silenced(model, chosen)
    prune_units(model, as_argument(chosen))
    for one in (reference, model):
        inputs = {
            key: value.double() if value.is_floating_point() else value for key, value in stock_inputs(one).items()
        }
        one(**inputs)[0].pow(2).mean().backward()
    expected = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        if expected[key].grad is None:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, key
        if parameter.shape == expected[key].shape:
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-5, atol=1e-8, msg=key)


@pytest.mark.parametrize("name", ["albert", "bert", "gpt2", "llama", "marian", "modernbert", "t5"])
def test_pruned_models_can_be_copied_pickled_and_pruned_further(name, tmp_path):
    model = pruned(name, "first")
    torch.save(model, tmp_path / "model.pt")
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ]
    expected = logits(model)
    rest = {layer.site: layer.units for layer in locate_units(model)}
    prune_units(model, as_argument(rest))
    assert not any(layer.units for layer in locate_units(model))
    for one in copies:
        assert torch.equal(logits(one), expected)
        prune_units(one, as_argument(rest))
        assert torch.equal(logits(one), logits(model))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "modernbert", "t5"])
def test_pruned_models_compile_without_graph_breaks(name):
    model = pruned(name, "first")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("empty", ["first", "middle"])
def test_unevenly_pruned_models_can_be_exported(name, empty):
    model = build_stock(name, use_cache=False)
    prune_units(model, as_argument(uneven(model, empty)))
    inputs = stock_inputs(model)
    exported = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(exported(**inputs)[0], logits(model), rtol=1e-5, atol=1e-6)


def test_onnx_of_a_model_with_empty_blocks_gives_the_same_logits():
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model = prune_layers(pruned("bert", "first"), [0])
    exported = OnnxExporter().export(model, stock_inputs(model), config=OnnxConfig(dynamic=True))
    torch.testing.assert_close(
        torch.as_tensor(exported(**stock_inputs(model))["logits"]), logits(model), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_parameters_keep_precision_and_whether_they_are_trained(name, tmp_path):
    model = build_stock(name).to(torch.bfloat16)
    first = locate_units(model)[1]
    first.output.weight.requires_grad_(False)
    prune_units(model, as_argument(uneven(model, "first")))
    after = locate_units(model)[1]
    assert not after.output.weight.requires_grad
    assert all(projection.weight.requires_grad for projection in after.inputs.values())
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    back = load_pruned(tmp_path, dtype=torch.bfloat16)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in back.state_dict().items())
    assert {value.dtype for value in back.state_dict().values() if value.is_floating_point()} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_put_on_top():
    peft = pytest.importorskip("peft")
    model = pruned("llama", "middle")
    expected = logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj", "down_proj"], r=2))
    torch.testing.assert_close(logits(adapted.base_model.model), expected)
    adapted(**stock_inputs(model))[0].square().mean().backward()
    moved = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert any("lora" in name for name in moved)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "gpt2"])
@pytest.mark.parametrize("units", ["some", "all"])
def test_stock_classes_refuse_a_pruned_checkpoint(name, units, tmp_path):
    model = build_stock(name)
    layer = locate_units(model)[1]
    chosen = {layer.site: list(range(2 if units == "some" else layer.num_units))}
    prune_units(model, config_value(chosen, kinds_of({one.site: 0 for one in locate_units(model)})))
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("recorded", [{"1": "0-3"}, {"0": "0-23"}])
def test_weights_that_do_not_fit_the_record_are_refused(recorded, tmp_path):
    prune_units(build_stock("bert"), {0: [1, 2]}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pruned_units": recorded}))
    with pytest.raises(ValueError, match="do not fit pruned_units in its config.json"):
        load_pruned(tmp_path)
    with pytest.raises(ValueError, match="do not fit pruned_units in its config.json"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["bert", "llama", "marian", "t5", "vit"])
def test_a_removed_layer_equals_one_without_heads_and_units(name):
    model = build_stock(name).double()
    kinds = kinds_of({layer.site: 0 for layer in locate_units(model)})
    units = {layer.site: layer.units for layer in locate_units(model) if layer.site.layer == 1}
    heads = {layer.site: layer.heads for layer in locate_heads(model) if layer.site.layer == 1}
    expected = logits(silenced(model, units, heads))
    prune_layers(model, [1] if len(kinds) == 1 else {kind: [1] for kind in kinds})
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)
    assert all(not layer.heads for layer in locate_heads(model) if layer.site.layer == 1)
    assert all(not layer.units for layer in locate_units(model) if layer.site.layer == 1)


def test_one_block_of_a_layer_can_be_removed():
    model = prune_layers(build_stock("bert"), [0], blocks=["feed_forward"])
    assert (model.config.pruned_heads, model.config.pruned_units) == (None, {0: "0-23"})
    prune_layers(model, [2], blocks="attention")
    assert (model.config.pruned_heads, model.config.pruned_units) == ({2: [0, 1, 2, 3]}, {0: "0-23"})
    # Mixtures of experts have attention blocks.
    assert not locate_heads(prune_layers(build_stock("mixtral"), [0], blocks=["attention"]))[0].heads


@pytest.mark.parametrize(
    ("layers", "blocks", "message"),
    [
        ([3], ["attention"], "layers names encoder layer 3, but the layers are 0 to 2"),
        ([True], ["attention"], "layers names encoder layer True"),
        ("1", ["attention"], "layers must be a list of layers, got '1'"),
        ([1], [], r"blocks must be one or both of attention, feed_forward, got \[\]"),
        ([1], ["mlp"], "blocks must be one or both of attention, feed_forward"),
        ({"cross": [1]}, ["attention"], "layers names the site 'cross'"),
    ],
)
def test_layers_that_do_not_exist_are_refused(layers, blocks, message):
    with pytest.raises(ValueError, match=message):
        prune_layers(build_stock("bert"), layers, blocks)


def test_layers_of_an_encoder_decoder_are_named_by_kind():
    with pytest.raises(ValueError, match="layers of a model with encoder and decoder must name them"):
        prune_layers(build_stock("marian"), [1])


def test_an_error_in_one_block_leaves_the_other_in_place():
    model = build_stock("bert")
    locate_units(model)[1].output.weight = locate_units(model)[0].output.weight
    with pytest.raises(ValueError, match="shares its weights with another module"):
        prune_layers(model, [1])
    assert model.config.to_dict().get("pruned_heads") is None
    assert all(len(layer.heads) == 4 for layer in locate_heads(model))


@pytest.mark.parametrize("name", sorted(MIXED))
def test_mixtures_of_experts_are_refused_by_name(name):
    model = build_stock(name)
    with pytest.raises(ValueError, match=r"has a mixture of experts, \w+ \(at .*\), whose units cannot be pruned"):
        prune_units(model, {0: [1]})
    found = {type(module).__name__ for module in model.modules()}
    assert found & MIXTURES


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({0: [24]}, "names unit 24, but the units of this layer are 0 to 23"),
        ({0: [-1]}, "names unit -1"),
        ({0: [1, 1]}, "names unit 1 twice"),
        ({0: [1.0]}, "must name units by integers, got 1.0"),
        ({3: [1]}, "names layer 3, but its layers are 0 to 2"),
        ({"0": [1]}, "must name layers by integers"),
        ({0: "0-99999999999"}, r"units \(layer 0\) names unit 99999999999, but a block has at most 262,144 units"),
        ({0: "1-"}, r"units \(layer 0\) must be ranges of units, such as '0-3,17', or a list, got '1-'"),
        ({0: "5-3"}, "has the range 5-3, whose end is before its start"),
        ({"cross": {0: [1]}}, "names the site 'cross', but the units of this model are at encoder"),
        ([(0, 1)], r"units must be \{layer: \[units\]\}, or a list of units"),
    ],
)
def test_units_that_cannot_be_removed_are_refused_and_nothing_changes(units, message):
    model = build_stock("bert")
    before = logits(model)
    with pytest.raises(ValueError, match=message):
        prune_units(model, units)
    assert torch.equal(logits(model), before)
    assert all(len(layer.units) == 24 for layer in locate_units(model))


@pytest.mark.parametrize("value", [{0: "x"}, {0: 3}, {7: "0"}, {0: ["1"]}])
def test_a_configuration_refuses_units_that_it_cannot_read(value):
    with pytest.raises(ValueError, match="pruned_units"):
        HeadwiseBertConfig(num_hidden_layers=2, pruned_units=value)


def test_a_configuration_writes_ranges():
    assert HeadwiseBertConfig(pruned_units={1: [5, 3, 4, 0], 2: []}).pruned_units == {1: "0,3-5"}
    config = HeadwiseMarianConfig(pruned_units={"decoder": {"0": "2-4"}})
    assert config.pruned_units == {"decoder": {0: "2-4"}}


def test_a_headwise_model_is_built_with_units_removed():
    model = headwise_class(type(build_stock("bert")))
    config = model.config_class(**build_stock("bert").config.to_diff_dict(), pruned_units={0: "0-3", 1: "0-23"})
    built = model(config)
    assert [len(layer.units) for layer in locate_units(built)] == [20, 0, 24]
    apply_pruning(built)
    assert [len(layer.units) for layer in locate_units(built)] == [20, 0, 24]
    with pytest.raises(ValueError, match="names unit 24, but the units of this layer are 0 to 23"):
        model(model.config_class(**build_stock("bert").config.to_diff_dict(), pruned_units={0: "24"}))


def test_retained_units_are_those_with_the_largest_scores():
    scores = torch.arange(3 * 24).reshape(3, 24) % 25
    model = retain_units(build_stock("bert"), 30, scores)
    kept = {(layer.site.layer, unit) for layer in locate_units(model) for unit in layer.units}
    ranked = sorted((-int(scores[layer, unit]), layer, unit) for layer in range(3) for unit in range(24))
    assert kept == {(layer, unit) for _, layer, unit in ranked[:30]}


@pytest.mark.parametrize(
    ("keep", "scores", "message"),
    [
        (0, torch.zeros(3, 24), "keep must be an integer from 1 to the number of units, 72, got 0"),
        (73, torch.zeros(3, 24), "keep must be an integer from 1 to the number of units, 72"),
        (5, torch.zeros(3, 4), r"scores of encoder must have shape \(layers, units\) \(3, 24\), got \(3, 4\)"),
        (5, torch.full((3, 24), float("nan")), "scores must not be NaN, but the score of encoder layer 0, unit 0 is"),
    ],
)
def test_impossible_numbers_and_scores_of_units_are_refused(keep, scores, message):
    with pytest.raises(ValueError, match=message):
        retain_units(build_stock("bert"), keep, scores)


def test_models_built_from_one_configuration_record_their_own_units_only():
    config = build_stock("bert").config
    first, second = (type(build_stock("bert"))(config) for _ in range(2))
    prune_units(first, {0: [1]})
    assert getattr(second.config, "pruned_units", None) is None
    prune_units(second, {1: [2]})
    assert (first.config.pruned_units, second.config.pruned_units) == ({0: "1"}, {1: "2"})


def test_layers_of_albert_share_one_block():
    model = build_stock("albert")
    assert [layer.site for layer in locate_units(model)] == [HeadSite("encoder", layer) for layer in range(4)]


class OwnBlock(nn.Module):
    def __init__(self, width=8, units=6):
        super().__init__()
        self.up, self.down = nn.Linear(width, units), nn.Linear(units, width)

    def forward(self, hidden_states):
        return self.down(self.up(hidden_states).relu())


def test_a_block_of_ones_own_can_be_registered(monkeypatch):
    monkeypatch.setattr(unit_roles, "_REGISTERED", {})
    model = build_stock("vit")
    for layer in model.vit.layers:
        layer.mlp = OwnBlock(32)
    with pytest.raises(ValueError, match=r"has no feed-forward block of a known class; register_feed_forward\(\)"):
        locate_units(model)
    register_feed_forward(OwnBlock, UnitRoles(("up",), "down"))
    chosen = {HeadSite("encoder", 1): [0, 4]}
    expected = logits(silenced(model, chosen))
    torch.testing.assert_close(logits(prune_units(model, {1: [0, 4]})), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("block_class", "roles", "message"),
    [
        ("LlamaMLP", UnitRoles(("up",), "down"), "block_class must be a class of modules"),
        (OwnBlock, {"inputs": ["up"]}, r"roles must be UnitRoles\(…\)"),
    ],
)
def test_what_is_no_new_block_cannot_be_registered(block_class, roles, message):
    with pytest.raises(ValueError, match=message):
        register_feed_forward(block_class, roles)


def test_a_stock_block_is_not_registered_again():
    from transformers.models.llama.modeling_llama import LlamaMLP

    with pytest.raises(ValueError, match="block_class LlamaMLP is already supported"):
        register_feed_forward(LlamaMLP, FEED_FORWARD_ROLES["LlamaMLP"])


def test_a_trained_model_is_pruned_exactly(real_models):
    path = next(path.parent for path in (real_models / "minilm").rglob("config.json"))
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    batch = {"input_ids": torch.tensor([[101, 2023, 2003, 1037, 3231, 102]])}
    chosen = {HeadSite("encoder", layer): list(range(layer, 1536, 2)) for layer in range(6)}
    with torch.no_grad():
        expected = silenced(model, chosen)(**batch)[0]
        found = prune_units(model, as_argument(chosen))(**batch)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
