"""Gates of feed-forward units and blocks: held against the stock model, with scaled output projections."""

import copy
import math
import pickle

import pytest
import torch
import transformers
from stock_models import STOCK_MODELS, build_stock, stock_inputs
from torch import nn

import hf_attn_dynamics as had
from hf_attn_dynamics.models.architectures import ARCHITECTURES
from hf_attn_dynamics.models.cost_table import CostTable
from hf_attn_dynamics.models.gate_costs import expected_cost
from hf_attn_dynamics.models.hard_concrete import HardConcreteGate
from hf_attn_dynamics.models.head_gates import gates_of
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.head_settings import GateSettings
from hf_attn_dynamics.models.head_sites import HeadSite, kinds_of
from hf_attn_dynamics.models.settled_gates import settle_gates, settle_gates_to_cost
from hf_attn_dynamics.models.unit_pruning import prune_layers, prune_units
from hf_attn_dynamics.models.unit_roles import locate_units


MIXED = {"gpt-oss", "mixtral", "qwen2-moe", "qwen3-moe"}
NAMES = [
    name
    for name, (_, config_class, _) in STOCK_MODELS.items()
    if getattr(transformers, config_class).model_type in ARCHITECTURES and name not in MIXED
]
WITHOUT_INTERFACE = ("deberta", "deberta-v2", "deberta-v3", "mpnet")
ALL = ("heads", "units", "blocks")


def by_kind(name, parts):
    """Gates of these parts at each kind of site."""
    kinds = kinds_of({layer.site: 1 for layer in locate_heads(build_stock(name))})
    own = {kind: {"parts": [part for part in parts if kind != "cross" or part != "units"]} for kind in kinds}
    return {kind: value for kind, value in own.items() if value["parts"]} if len(kinds) > 1 else own[kinds[0]]


def headwise(name, parts=ALL, **settings):
    """The headwise model of a stock one with random weights, in double precision, and its gates near their limits."""
    stock = build_stock(name).double()
    cls = getattr(had, f"Headwise{type(stock).__name__}")
    settings = {"gates": by_kind(name, parts), **STOCK_MODELS[name][2], "attn_implementation": "eager", **settings}
    model = cls(cls.config_class(**settings)).double().eval()
    model.load_state_dict(stock.state_dict(), strict=False)
    return stock, model


def scatter_gates(model, low=-1.0, high=2.0):
    """Sets φ of all gates to different values; the feed-forward block of one site is closed."""
    generator = torch.Generator().manual_seed(1)
    for gate in gates_of(model):
        for phi in gate.parameters():
            phi.data.uniform_(low, high, generator=generator)
        if gate.has_block:
            gate.block_log_alpha.data.fill_(0.4)
    closed = list(model.unit_gates().values())[-1:]
    for gate in closed:
        if gate.has_block:
            gate.block_log_alpha.data.fill_(-0.5)
    return model


def inputs_of(model):
    return {k: v.double() if v.is_floating_point() else v for k, v in stock_inputs(model).items()}


def without_dropout(model):
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)
    return model


def scaled(stock, head_factors, unit_factors):
    """A stock model with the columns of its output projections multiplied by factors of heads and units by site."""
    stock = copy.deepcopy(stock)
    factors = [
        (layer.output, head_factors[layer.site].repeat_interleave(layer.head_dim))
        for layer in locate_heads(stock)
        if layer.site in head_factors
    ]
    factors += [
        (layer.output, unit_factors[layer.site]) for layer in locate_units(stock) if layer.site in unit_factors
    ]
    for output, factor in factors:
        transposed = not isinstance(output, nn.Linear)
        output.weight.data.mul_(factor[:, None] if transposed else factor)
    return stock


def sample(phi, noise):
    """Equations 7 and 8, for numbers."""
    s = 1 / (1 + torch.exp(-(torch.log(noise) - torch.log(1 - noise) + phi) / 0.33))
    return (1.2 * s - 0.1).clamp(0, 1)


def factors_by_hand(model, noise):
    """Factors of the heads and units of each site, from φ and the random numbers of all gates in their order."""
    found, start = [], 0
    for gates in (model.head_gates(), model.unit_gates()):
        by_site = {}
        for site, gate in gates.items():
            factor = torch.ones(gate.num_elements, dtype=torch.float64)
            for phi, size in ((gate.log_alpha, gate.group_size), (gate.block_log_alpha, gate.num_elements)):
                if phi is not None:
                    own = sample(phi.detach(), noise[start : start + len(phi)])
                    factor = factor * own.repeat_interleave(size)
                    start += len(phi)
            by_site[site] = factor
        found.append(by_site)
    assert start == len(noise)
    return found


def first(outputs):
    return next(value for value in outputs.values() if torch.is_tensor(value) and value.is_floating_point())


def noise_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    number = sum(gate.num_gates for gate in gates_of(model))
    return 0.3 + 0.4 * torch.rand(number, generator=generator, dtype=torch.float64)


def noisy(name):
    """A model with gates wherever noise can be given: cross-attention of GPT-2 does not get the keywords."""
    return headwise(name, **({"gates": {"decoder": {"parts": [*ALL]}}} if name == "gpt2-cross" else {}))


# ---- The gate ----


def test_the_factor_of_an_element_is_its_gate_times_that_of_its_block():
    gate = HardConcreteGate(3, GateSettings(), with_block=True).train()
    gate.log_alpha.data, gate.block_log_alpha.data = torch.tensor([0.3, -0.2, 1.0]), torch.tensor([0.5])
    noise = torch.tensor([0.5, 0.6, 0.4, 0.45])
    expected = sample(gate.log_alpha.data, noise[:3]) * sample(gate.block_log_alpha.data, noise[3:])
    torch.testing.assert_close(gate(noise).detach(), expected)
    torch.manual_seed(0)
    drawn = gate()
    torch.manual_seed(0)
    torch.testing.assert_close(drawn, gate(torch.cat([torch.rand(3), torch.rand(1)])))
    assert gate.eval()().tolist() == [1, 0, 1]
    gate.block_log_alpha.data.fill_(-0.1)
    assert gate().tolist() == [0, 0, 0]


def test_an_element_is_open_if_its_gate_and_its_block_are():
    gate = HardConcreteGate(2, GateSettings(), with_block=True)
    gate.log_alpha.data, gate.block_log_alpha.data = torch.tensor([0.3, -0.2]), torch.tensor([0.5])
    own = [1 / (1 + math.exp(-phi - 0.33 * math.log(11))) for phi in (0.3, -0.2, 0.5)]
    torch.testing.assert_close(gate.expected_open(), torch.tensor((own[0] + own[1]) * own[2]))
    count, block = gate.expected_counts()
    torch.testing.assert_close(count, torch.tensor(own[0] + own[1]))
    torch.testing.assert_close(block, torch.tensor(own[2]))
    soft = [1 / (1 + math.exp(-2 * phi)) for phi in (0.3, -0.2, 0.5)]
    count, block = gate.approximate_counts()
    torch.testing.assert_close(count, torch.tensor(soft[0] + soft[1]))
    torch.testing.assert_close(block, torch.tensor(soft[2]))


def test_a_block_may_have_a_gate_alone():
    gate = HardConcreteGate(4, GateSettings(), with_block=True, with_elements=False)
    assert gate.num_gates == 1
    assert gate.state_dict().keys() == {"block_log_alpha"}
    assert gate.train()(torch.tensor([0.7])).shape == (4,)
    assert gate.expected_counts()[0] == 4
    gate.keep([1, 2])
    assert gate().shape == (2,)
    gate.keep([])
    assert (gate.num_gates, gate().shape, list(gate.parameters())) == (0, (0,), [])


def test_gates_of_heads_alone_have_the_parameters_and_settings_of_heads_alone():
    gate = HardConcreteGate(4, GateSettings())
    assert gate.state_dict().keys() == {"log_alpha"}
    assert gate.expected_counts()[1] is None
    assert "parts" not in GateSettings.from_dict({"parts": ["heads"]}).to_dict()
    assert GateSettings.from_dict({"parts": ["blocks", "heads"]}).to_dict()["parts"] == ["heads", "blocks"]


@pytest.mark.parametrize("parts", [[], "units", ["unit"], ["heads", "heads"], None, [["heads"]]])
def test_impossible_parts_are_refused(parts):
    message = r"gates parts must be a list of some of heads, units, blocks, got"
    with pytest.raises(ValueError, match=message):
        had.HeadwiseBertConfig(gates={"parts": parts})


def test_cross_attention_has_no_units():
    with pytest.raises(ValueError, match=r"gates\['cross'\] parts names 'units', but cross-attention has no feed-for"):
        had.HeadwiseMarianConfig(gates={"cross": {"parts": ["heads", "units"]}})


@pytest.mark.parametrize("name", sorted(MIXED))
def test_experts_have_no_gates(name):
    message = r"mixture of experts, \w+ \(at .*\), whose units cannot be pruned"
    with pytest.raises(ValueError, match=message):
        had.headwise_model(build_stock(name), gates={"parts": ["units"]})
    model = had.headwise_model(build_stock(name))
    with pytest.raises(ValueError, match=message):
        model.add_gates({"parts": ["heads", "blocks"]})
    assert model.config.gates is None
    assert gates_of(model) == []


# ---- In every architecture ----


@pytest.mark.parametrize("parts", [ALL, ("units",), ("heads", "blocks")])
@pytest.mark.parametrize("name", NAMES)
def test_closed_gates_are_zeroed_and_removed_heads_and_units(name, parts):
    stock, model = headwise(name, parts)
    scatter_gates(model)
    settled = [
        {site: gate.settled().double() for site, gate in gates.items()}
        for gates in (model.head_gates(), model.unit_gates())
    ]
    assert {value for by_site in settled for one in by_site.values() for value in one.tolist()} == {0, 1}
    inputs = inputs_of(stock)
    with torch.no_grad():
        stock.set_attn_implementation("eager")
        expected = first(scaled(stock, *settled)(**inputs))
        torch.testing.assert_close(first(model(**inputs)), expected, rtol=1e-9, atol=1e-9)
        # The first output may be the same whatever is closed in the last layer.
        assert not torch.allclose(expected, first(stock(**inputs)), atol=1e-6)
        pruned = first(had.prune_closed_gates(model)(**inputs))
    torch.testing.assert_close(pruned, expected, rtol=1e-9, atol=1e-9)
    assert gates_of(model) == []
    assert model.config.gates is None
    assert not any("unit_site" in vars(module) for module in model.modules())
    for layer in locate_units(model):
        factors = settled[1][layer.site].tolist()
        assert layer.units == [unit for unit, factor in enumerate(factors) if factor]
    assert any(not layer.units for layer in locate_units(model)) == ("blocks" in parts)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_training_follows_the_noise_it_is_given(name, kernel):
    if kernel == "sdpa" and name in ("gemma2", *WITHOUT_INTERFACE):
        pytest.skip("it computes attention in its own way")
    stock, model = noisy(name)
    scatter_gates(without_dropout(model), -0.3, 0.3).train()
    for one in (stock, model):
        one.set_attn_implementation(kernel)
    noise = noise_of(model)
    inputs = inputs_of(stock)
    reference = scaled(stock, *factors_by_hand(model, noise))
    with torch.no_grad():
        expected = first(reference(**inputs))
        torch.testing.assert_close(first(model(**inputs, gate_noise=noise)), expected, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(first(model(**inputs, gate_noise=1 - noise)), expected)


def gradients(model, noise, given):
    model.zero_grad()
    torch.manual_seed(0)
    inputs = {**inputs_of(model), **({"gate_noise": noise} if given else {})}
    outputs = model(**inputs, output_gate_penalty=True)
    (first(outputs).square().mean() + 0.1 * outputs.gate_penalty).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_gate_and_are_the_same_under_checkpointing(name):
    _, model = noisy(name)
    scatter_gates(without_dropout(model), -0.3, 0.3).train()
    noise = noise_of(model)
    expected = gradients(model, noise, given=True)
    own = {name for name, _ in model.named_parameters() if name.endswith("log_alpha")}
    assert len(own) == sum(len(list(gate.parameters())) for gate in gates_of(model))
    assert own <= expected.keys()
    assert all(expected[name].abs().max() > 0 for name in own)
    if not model.supports_gradient_checkpointing:
        return
    for reentrant in (False, True):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        if name in WITHOUT_INTERFACE:
            with pytest.raises(ValueError, match=r"gate_noise does not reach.*activation_checkpointing_disable\(\)"):
                gradients(model, noise, given=True)
            continue
        found = gradients(model, noise, given=True)
        for leaf, value in expected.items():
            torch.testing.assert_close(found[leaf], value, rtol=1e-6, atol=1e-9, msg=lambda m, n=leaf: f"{n}: {m}")
