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
from hf_attn_dynamics.analysis.heads.latency import count_flops_table
from hf_attn_dynamics.models.architectures import ARCHITECTURES
from hf_attn_dynamics.models.cost_table import CostTable
from hf_attn_dynamics.models.gate_costs import expected_cost
from hf_attn_dynamics.models.hard_concrete import HardConcreteGate
from hf_attn_dynamics.models.head_gates import gates_of
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.head_settings import GateSettings
from hf_attn_dynamics.models.head_sites import kinds_of
from hf_attn_dynamics.models.settled_gates import settle_gates, settle_gates_to_cost
from hf_attn_dynamics.models.unit_pruning import prune_layers
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


# Some models compute attention in their own way.
KERNELS = [(name, "eager") for name in NAMES]
KERNELS += [(name, "sdpa") for name in NAMES if name not in ("gemma2", *WITHOUT_INTERFACE)]


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_training_follows_the_noise_it_is_given(name, kernel):
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


# ---- Costs ----


def bert(parts=ALL, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = had.HeadwiseBertConfig(
        **{**sizes, "intermediate_size": 8, "gates": {"parts": [*parts]}, **settings},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return had.HeadwiseBertForMaskedLM(config).eval()


# Cost of 0, 1, … heads and units; concave for heads, so that a block costs something by itself.
HEAD_COSTS, UNIT_COSTS, REST = [0, 5, 7, 9, 11], [0, 4, 5, 6, 7, 8, 9, 10, 11], 6
TABLE = CostTable(
    "seconds",
    REST,
    {"encoder": [[0, 0], [1, 5], [4, 11]]},
    {"encoder": [[0, 0], [1, 4], [8, 11]]},
    {"encoder": 2},
)
DENSE = 2 * 11 + 2 * 11 + REST


def interpolated(costs, count):
    low = min(int(count), len(costs) - 2)
    return costs[low] + (count - low) * (costs[low + 1] - costs[low])


def test_the_expected_cost_of_a_block_is_that_of_its_expected_elements_if_it_is_open():
    model = scatter_gates(bert())
    expected = REST
    for gates, costs in ((model.head_gates(), HEAD_COSTS), (model.unit_gates(), UNIT_COSTS)):
        for gate in gates.values():
            count = sum(1 / (1 + math.exp(-phi - 0.33 * math.log(11))) for phi in gate.log_alpha.tolist())
            block = 1 / (1 + math.exp(-gate.block_log_alpha.item() - 0.33 * math.log(11)))
            expected += block * interpolated(costs, count)
    ids = torch.arange(10).view(2, 5)
    outputs = model(ids, labels=ids, gate_cost=TABLE, gate_penalty_weight=3.0)
    torch.testing.assert_close(outputs.gate_penalty, torch.tensor(expected / DENSE))
    torch.testing.assert_close(outputs.loss, outputs.task_loss + 3.0 * outputs.gate_penalty)
    outputs.gate_penalty.backward()
    assert all(phi.grad.min() > 0 for gate in gates_of(model) for phi in gate.parameters())
    soft = expected_cost(model, TABLE, HardConcreteGate.approximate_counts)
    assert soft < outputs.gate_penalty


def test_the_expected_cost_of_sites_without_gates_is_that_of_their_remaining_heads_and_units():
    model = bert(("heads",), pruned_units={0: "0-5", 1: "0-7"})
    had.prune_heads(model, {0: [1, 3]})
    for gate in gates_of(model):
        gate.log_alpha.data.fill_(30.0)
    ids = torch.arange(10).view(2, 5)
    found = model(ids, gate_cost=TABLE, output_gate_penalty=True).gate_penalty
    cost = REST + HEAD_COSTS[2] + HEAD_COSTS[4] + UNIT_COSTS[2] + UNIT_COSTS[0]
    torch.testing.assert_close(found, torch.tensor(cost / DENSE))


def test_costs_are_refused_without_the_penalty_that_reads_them():
    model = bert()
    with pytest.raises(ValueError, match=r"gate_cost is given to HeadwiseBertForMaskedLM, but only the gate penalty"):
        model(torch.ones(1, 3, dtype=torch.long), gate_cost=TABLE)


def cost_by_hand(model):
    heads = [int(gate.settled().sum()) for gate in model.head_gates().values()]
    units = [int(gate.settled().sum()) for gate in model.unit_gates().values()]
    return REST + sum(HEAD_COSTS[n] for n in heads) + sum(UNIT_COSTS[n] for n in units), heads, units


@pytest.mark.parametrize("parts", [ALL, ("heads", "units"), ("blocks",), ("units",), ("units", "blocks")])
@pytest.mark.parametrize("low", [-2.0, 1.0, -5.0])
@pytest.mark.parametrize("speedup", [1.1, 1.3, DENSE / 25])
def test_settled_gates_meet_the_target_and_nothing_more_fits(speedup, low, parts):
    model = scatter_gates(bert(parts), low, low + 3.0)
    if parts == ("units",) and speedup == DENSE / 25:
        before = [phi.clone() for gate in gates_of(model) for phi in gate.parameters()]
        with pytest.raises(ValueError, match=r"a speed-up of 2 × cannot be reached: closing all gates gives 1.79 ×"):
            settle_gates_to_cost(model, TABLE, speedup)
        after = [phi for gate in gates_of(model) for phi in gate.parameters()]
        assert all(map(torch.equal, before, after))
        return
    before = [phi > 0 for gate in gates_of(model) for phi in gate.parameters()]
    moved = settle_gates_to_cost(model, TABLE, speedup)
    after = [phi > 0 for gate in gates_of(model) for phi in gate.parameters()]
    assert moved == sum(int((one != other).sum()) for one, other in zip(before, after))
    cost, heads, units = cost_by_hand(model)
    heads = heads or [4, 4]
    cost = REST + sum(HEAD_COSTS[n] for n in heads) + sum(UNIT_COSTS[n] for n in units)
    budget = DENSE / speedup
    assert cost <= budget
    # Heads and units one by one, and blocks without gates of their elements as a whole.
    for counts, costs, part in ((heads, HEAD_COSTS, "heads"), (units, UNIT_COSTS, "units")):
        for count in counts:
            more = count + 1 if part in parts else len(costs) - 1
            if count < len(costs) - 1:
                assert cost - costs[count] + costs[more] > budget
    pruned = had.prune_closed_gates(model)
    assert TABLE.cost(
        {layer.site: len(layer.heads) for layer in locate_heads(pruned)},
        {layer.site: len(layer.units) for layer in locate_units(pruned)},
    ) == pytest.approx(cost)


def test_gates_of_the_lowest_phi_close_first_and_those_of_the_highest_open_first():
    model = bert()
    for gate in gates_of(model):
        gate.block_log_alpha.data.fill_(3.0)
        gate.log_alpha.data.fill_(3.0)
    heads, units = model.head_gates(), model.unit_gates()
    heads["encoder", 0].log_alpha.data[:] = torch.tensor([0.1, 2.0, 2.0, 2.0])
    units["encoder", 1].block_log_alpha.data.fill_(0.2)
    units["encoder", 1].log_alpha.data[2] = 4.0
    # Head 0 (2) and then the block (11) close; 50 - 13 = 37, so that 8 are left for one unit (4) and others (1 each).
    assert settle_gates_to_cost(model, TABLE, DENSE / 45) > 0
    assert heads["encoder", 0].settled().tolist() == [0, 1, 1, 1]
    assert heads["encoder", 1].settled().tolist() == [1] * 4
    assert units["encoder", 0].settled().tolist() == [1] * 8
    cost, _, (_, left) = cost_by_hand(model)
    assert (cost, left) == (45, 5)
    assert units["encoder", 1].settled()[2] == 1


def test_a_target_that_is_met_exactly_moves_nothing():
    model = bert()
    heads = model.head_gates()["encoder", 0]
    heads.log_alpha.data[:2] = -1.0
    # The dense model costs 50, without two heads 46.
    assert settle_gates_to_cost(model, TABLE, 50 / 46) == 0


def test_the_number_of_heads_is_met_with_gates_of_blocks():
    model = bert(("heads", "blocks"))
    first_gate, second = model.head_gates().values()
    first_gate.log_alpha.data[:] = torch.tensor([3.0, 2.0, 1.0, -1.0])
    second.log_alpha.data[:] = torch.tensor([9.0, 0.3, 8.0, 7.0])
    second.block_log_alpha.data.fill_(0.5)
    assert settle_gates(model, 4) == 3
    assert first_gate.settled().tolist() == [1, 1, 1, 0]
    assert second.settled().tolist() == [1, 0, 0, 0]
    assert settle_gates(model, 2) == 2
    assert (first_gate.settled().tolist(), second.settled().tolist()) == ([1, 1, 0, 0], [0] * 4)


def test_gates_of_single_query_heads_have_no_cost():
    model = had.headwise_model(build_stock("llama"), gates={"unit": "head"})
    with pytest.raises(ValueError, match=r"have unit='head', but \d query heads share a key/value head"):
        settle_gates_to_cost(model, TABLE, 1.5)


# ---- In models ----


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_compiled_model_has_the_same_gradients(name):
    _, model = headwise(name, attn_implementation="sdpa", num_hidden_layers=1)
    scatter_gates(without_dropout(model), -0.3, 0.3).train()
    noise, table = noise_of(model), count_flops_table(model, length=8)
    arguments = {**inputs_of(model), "gate_noise": noise, "gate_cost": table, "output_gate_penalty": True}

    def run(one):
        model.zero_grad()
        outputs = one(**arguments)
        (first(outputs).square().mean() + outputs.gate_penalty).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = run(model)
    torch.compiler.reset()
    found = run(torch.compile(model, backend="aot_eager", fullgraph=True))
    for leaf, value in expected.items():
        torch.testing.assert_close(found[leaf], value, rtol=1e-6, atol=1e-9)


def test_shared_layers_share_their_gates_and_their_noise():
    stock, model = headwise("albert", num_hidden_groups=1, inner_group_num=1, num_hidden_layers=3)
    assert [str(site) for site in model.unit_gates()] == ["encoder layer 0"]
    model.train()
    without_dropout(model)
    stock = build_stock("albert", num_hidden_groups=1, inner_group_num=1, num_hidden_layers=3).double()
    model.load_state_dict(stock.state_dict(), strict=False)
    noise = noise_of(model)
    reference = scaled(stock, *factors_by_hand(model, noise))
    inputs = inputs_of(stock)
    with torch.no_grad():
        stock.set_attn_implementation("eager")
        reference.set_attn_implementation("eager")
        expected = first(reference(**inputs))
        torch.testing.assert_close(first(model(**inputs, gate_noise=noise)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
def test_gates_come_back_from_a_checkpoint_in_single_precision(name, tmp_path):
    parts = by_kind(name, ALL)
    model = had.headwise_model(build_stock(name), gates=parts)
    scatter_gates(model)
    layer = locate_units(model)[0]
    removed = {layer.site.kind: {0: "0-3"}} if len({one.site.kind for one in locate_units(model)}) > 1 else {0: "0-3"}
    had.prune_units(model, removed)
    model.save_pretrained(tmp_path)
    model.eval()
    auto = next(auto for auto, cls in model.config.code_map().items() if cls.endswith(f".{type(model).__name__}"))
    inputs = stock_inputs(model)
    for dtype in (torch.float32, torch.bfloat16):
        for load in (type(model), getattr(transformers, auto)):
            back, info = load.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
            assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            assert back.config.gates == model.config.gates
            for own, other in zip(gates_of(back), gates_of(model), strict=True):
                assert own.state_dict().keys() == other.state_dict().keys()
                assert all(torch.equal(value, other.state_dict()[key]) for key, value in own.state_dict().items())
            if dtype == torch.float32:
                assert torch.equal(first(back(**inputs)), first(model(**inputs)))
            else:
                assert first(back(**inputs)).dtype == torch.bfloat16
                back.train()
                noise = torch.rand(sum(gate.num_gates for gate in gates_of(back)))
                first(back(**inputs, gate_noise=noise)).square().mean().backward()
                assert {gate.log_alpha.grad.dtype for gate in gates_of(back)} == {torch.float32}


@pytest.mark.parametrize("name", ["bert", "mpnet", "whisper"])
def test_models_are_copied_and_pickled_with_their_gates(name):
    _, model = headwise(name)
    inputs = inputs_of(model)
    before = first(model(**inputs))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        scatter_gates(other)
        with torch.no_grad():
            closed = first(other(**inputs))
            assert not torch.allclose(closed, before)
            torch.testing.assert_close(first(had.prune_closed_gates(other)(**inputs)), closed, rtol=1e-9, atol=1e-9)
        assert torch.equal(first(model(**inputs)), before)


def test_gates_added_later_are_removed_without_a_trace():
    stock = build_stock("llama")
    model = had.headwise_model(stock)
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    inputs = stock_inputs(model)
    before = first(model(**inputs))
    model.add_gates({"parts": [*ALL]})
    assert torch.equal(first(model.eval()(**inputs)), before)
    had.prune_closed_gates(model)
    assert [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.equal(first(model(**inputs)), before)


def test_gates_of_removed_units_and_blocks_are_removed():
    model = scatter_gates(bert(pruned_units={0: "0-2"}))
    first_gate, second = model.unit_gates().values()
    assert (first_gate.num_elements, first_gate.num_gates) == (5, 6)
    noise = noise_of(model)
    kept = first_gate.log_alpha[1:].clone()
    had.prune_units(model, {0: [3]})
    assert torch.equal(first_gate.log_alpha, kept)
    prune_layers(model, [1])
    assert [gate.num_gates for gate in gates_of(model)] == [5, 0, 5, 0]
    assert second.num_elements == 0
    ids = torch.arange(10).view(2, 5)
    model.train()
    with pytest.raises(ValueError, match=r"gate_noise must have shape \(10,\), one for each gate"):
        model(ids, gate_noise=noise)
    model(ids, gate_noise=noise_of(model), output_gate_penalty=True).gate_penalty.backward()
    assert all(parameter.numel() for parameter in model.parameters())


def test_noise_has_the_order_of_the_gates_and_its_own_number_for_each():
    model = bert().train()
    for gate in gates_of(model):
        for phi in gate.parameters():
            phi.data.fill_(5.0)
    ids = torch.arange(10).view(2, 5)
    sites = [(gates, site) for gates in (model.head_gates, model.unit_gates) for site in gates()]
    numbers = [(gates, site, index) for gates, site in sites for index in range(gates()[site].num_gates)]
    assert len(numbers) == 2 * 5 + 2 * 9
    for place, (gates, site, index) in enumerate(numbers):
        noise = torch.full((28,), 0.9)
        noise[place] = 1e-6
        with torch.no_grad():
            found = model.train()(ids, gate_noise=noise).logits
            gate = gates()[site]
            phi = gate.log_alpha if index < len(gate.log_alpha) else gate.block_log_alpha
            phi.data[index % len(gate.log_alpha) if phi is gate.log_alpha else 0] = -5.0
            torch.testing.assert_close(found, model.eval()(ids).logits, rtol=0, atol=1e-4)
            phi.data.fill_(5.0)


def test_the_importance_of_a_head_is_the_lower_phi_of_it_and_its_block():
    model = bert(("heads", "blocks"), pruned_heads={1: [0]})
    first_gate, second = model.head_gates().values()
    first_gate.log_alpha.data[:] = torch.tensor([3.0, -1.0, 1.0, 0.0])
    first_gate.block_log_alpha.data.fill_(0.5)
    second.block_log_alpha.data.fill_(-2.0)
    scores = had.gate_importance(model)["encoder"]
    torch.testing.assert_close(
        torch.as_tensor(scores),
        torch.tensor([[0.5, -1.0, 0.5, 0.0], [math.nan, -2.0, -2.0, -2.0]]).double(),
        equal_nan=True,
        check_dtype=False,
    )


def test_blocks_without_units_need_no_gate_on_any_device():
    model = bert(("blocks",), pruned_units={0: "0-7"}).train().to("meta")
    assert model(torch.ones(1, 3, dtype=torch.long, device="meta"))[0].device.type == "meta"
