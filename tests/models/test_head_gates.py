import copy
import math

import pytest
import torch
from tiny_models import padded_batch, ragged_sentences, tiny_config

import hf_attn_dynamics as had
from hf_attn_dynamics.models.hard_concrete import HardConcreteGate, expected_open_heads
from hf_attn_dynamics.models.head_gates import gate_penalty
from hf_attn_dynamics.models.head_settings import GateSettings
from hf_attn_dynamics.models.settled_gates import settle_gates


def gate(log_alpha, **settings):
    made = HardConcreteGate(len(log_alpha), GateSettings.from_dict(settings))
    made.log_alpha.data = torch.tensor(log_alpha)
    return made


def build(kind="roberta", head="ForMaskedLM", gates=None, **changes):
    torch.manual_seed(0)
    name = f"Headwise{kind.capitalize()}{head}"
    return getattr(had, name)(tiny_config(kind, guidance=None, gates={} if gates is None else gates, **changes)).eval()


def batch(pad=1):
    return padded_batch(ragged_sentences(), pad=pad)


def close(model, closed):
    """Closes these heads of each site, opens all others."""
    for site, site_gate in model.head_gates().items():
        values = [-3.0 if head in closed.get(site, []) else 3.0 for head in range(len(site_gate.log_alpha))]
        site_gate.log_alpha.data = torch.tensor(values)


def locations(model):
    return torch.cat([site_gate.log_alpha.detach() for site_gate in model.head_gates().values()])


@pytest.mark.parametrize("phi", [-2.0, 0.0, 0.7, 3.0])
def test_samples_follow_the_probabilities_of_the_paper(phi):
    many = gate([phi] * 200_000).train()
    torch.manual_seed(0)
    sample = many()
    # P(g ≠ 0) = σ(φ + 0.791), P(g = 1) = σ(φ − 0.791), to four standard deviations.
    for found, location in ((sample.ne(0), phi + 0.791), (sample.eq(1), phi - 0.791)):
        expected = 1 / (1 + math.exp(-location))
        assert abs(found.float().mean().item() - expected) < 4 * math.sqrt(expected * (1 - expected) / 200_000) + 1e-4
    torch.testing.assert_close(many.expected_open_heads() / 200_000, torch.tensor(1 / (1 + math.exp(-phi - 0.7913))))


def test_a_sample_is_the_stretched_concrete_variable_of_its_noise():
    noise = torch.tensor([0.5, 0.9, 1e-9])
    found = gate([0.0, 1.0, 2.5]).train()(noise)
    logits = [(0.0 + 0.0) / 0.33, (math.log(9.0) + 1.0) / 0.33, (math.log(1e-6) + 2.5) / 0.33]
    expected = [min(1.0, max(0.0, 1.2 / (1 + math.exp(-x)) - 0.1)) for x in logits]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_the_gradient_of_a_sample_reaches_phi_in_double_precision():
    noise = torch.tensor([0.4, 0.6, 0.5], dtype=torch.float64)
    phi = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64, requires_grad=True)
    made = gate([0.0] * 3).train()

    def sample(value):
        del made.log_alpha
        made.log_alpha = value
        return made(noise)

    assert torch.autograd.gradcheck(sample, (phi,))


def test_gates_outside_training_are_zero_or_one_or_as_the_code_has_them():
    values = [-0.3, 0.0, 0.3, 5.0]
    assert gate(values).eval()().tolist() == [0, 0, 1, 1]
    fractional = gate(values, evaluation="fractional").eval()()
    expected = [min(1.0, max(0.0, 1.2 / (1 + math.exp(-x)) - 0.1)) for x in values]
    torch.testing.assert_close(fractional, torch.tensor(expected))


def test_a_gate_outside_training_is_at_its_likelier_end_under_lopsided_limits():
    made = gate([0.0], limits=[-0.5, 1.1]).eval()
    for phi in (made.threshold - 0.05, made.threshold + 0.05):
        made.log_alpha.data = torch.tensor([phi] * 100_000)
        sample = made.train()()
        assert bool(made.eval()()[0]) == bool(sample.eq(1).sum() > sample.eq(0).sum())


@pytest.mark.parametrize("evaluation", ["binary", "fractional"])
def test_a_gate_is_open_outside_training_above_its_threshold_alone(evaluation):
    made = gate([0.0, 0.0], limits=[-0.5, 1.1], evaluation=evaluation).eval()
    made.log_alpha.data = torch.tensor([made.threshold - 1e-3, made.threshold + 1e-3])
    assert made().ne(0).tolist() == [False, True]


def test_limits_that_hardly_reach_beyond_an_end_have_a_threshold():
    # ½·T·ln((1 − γ)·(−γ) / ((ζ − 1)·ζ)), with 1 − γ = 1.
    assert gate([0.0], limits=[-1e-14, 1.5]).threshold == pytest.approx(0.165 * math.log(1e-14 / 0.75))


def test_the_penalty_sums_over_modules_or_takes_their_mean():
    values = ([0.0, 1.0], [2.0])
    total = sum(1 / (1 + math.exp(-x - 0.33 * math.log(11))) for row in values for x in row)
    for penalty, factor in (("sum", 1.0), ("module_mean", 0.5)):
        found = gate_penalty([gate(row, penalty=penalty) for row in values])
        torch.testing.assert_close(found, torch.tensor(total * factor))


def test_the_code_of_the_paper_starts_between_open_and_closed():
    torch.manual_seed(0)
    made = HardConcreteGate(1000, GateSettings.from_dict({"variant": "paper_code"}))
    assert made.log_alpha.min() >= -0.61
    assert made.log_alpha.max() <= 0.61
    assert made.log_alpha.std() > 0.3
    assert (gate([0.0]).settings.penalty, made.settings.penalty) == ("sum", "module_mean")


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ({"variant": "code"}, "variant must be one of paper, paper_code, got 'code'"),
        ({"evaluation": "soft"}, "evaluation must be one of binary, fractional, got 'soft'"),
        ({"penalty": "mean"}, "penalty must be one of sum, module_mean"),
        ({"init": 2.5}, "has no key 'init'; its keys are variant"),
        ({"initial_log_alpha": "2.5"}, "a number or \\[low, high\\], got '2.5'"),
        ({"initial_log_alpha": [1, 0]}, "a number or \\[low, high\\], got \\[1, 0\\]"),
        ({"temperature": 0}, "temperature must be a number greater than 0, got 0"),
        ({"temperature": 10**400}, "temperature must be a number greater than 0, got 1000"),
        ({"limits": [0, 1]}, "must contain \\[0, 1\\] in their interior"),
        ({"cross": {}}, "names the site 'cross', but the heads of this model are at encoder"),
    ],
)
def test_impossible_settings_are_refused_when_the_configuration_is_made(gates, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(gates=gates)


def test_expected_open_heads_refuses_limits_inside_the_unit_interval():
    with pytest.raises(ValueError, match="interior"):
        expected_open_heads(torch.zeros(3), limits=(0.1, 1.1))


# ---- In models ----


def test_open_gates_change_nothing_and_closed_ones_take_their_heads_away():
    model = build()
    plain = had.HeadwiseRobertaForMaskedLM(tiny_config(guidance=None)).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
    close(model, {("encoder", 0): [1], ("encoder", 1): [0, 1, 2, 3]})

    def zero(layer, heads):
        def hook(module, args):
            hidden = args[0].clone()
            for head in heads:
                hidden[..., 4 * head : 4 * head + 4] = 0
            return (hidden, *args[1:])

        plain.roberta.encoder.layer[layer].attention.output.dense.register_forward_pre_hook(hook)

    zero(0, [1])
    zero(1, [0, 1, 2, 3])
    torch.testing.assert_close(model(**batch()).logits, plain(**batch()).logits, rtol=0, atol=1e-6)


def test_evaluation_is_free_of_noise_and_training_follows_the_noise_it_is_given():
    model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    assert torch.equal(model(**batch()).logits, model(**batch()).logits)
    model.train()
    noise = torch.rand(8)
    first, again = (model(**batch(), gate_noise=noise).logits for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, model(**batch(), gate_noise=1 - noise).logits)
    torch.manual_seed(1)
    first = model(**batch()).logits
    torch.manual_seed(1)
    assert torch.equal(first, model(**batch()).logits)


def test_every_head_has_its_own_number_of_the_noise():
    model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_size=16).train()
    close(model, {})
    for chosen in range(8):
        noise = torch.full((8,), 0.9)
        noise[chosen] = 1e-6
        found = model(**batch(), gate_noise=noise).logits
        layer, head = divmod(chosen, 4)
        close(model, {("encoder", layer): [head]})
        expected = model.eval()(**batch()).logits
        close(model, {})
        model.train()
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_checkpointing_recomputes_with_the_same_gates(reentrant, given):
    model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    data = {**batch(), "labels": batch()["input_ids"]}
    noise = {"gate_noise": torch.rand(8)} if given else {}

    def gradients():
        model.zero_grad()
        torch.manual_seed(3)
        model(**data, gate_penalty_weight=0.5, **noise).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    assert any(name.endswith("log_alpha") and value.abs().sum() > 0 for name, value in expected.items())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_a_compiled_model_has_the_same_gradients():
    model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_layers=1).train()
    data = {**batch(), "labels": batch()["input_ids"], "gate_noise": torch.rand(4)}
    model(**data, gate_penalty_weight=0.5).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(**data, gate_penalty_weight=0.5).loss.backward()
    for name, value in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, value, rtol=1e-4, atol=1e-7)


def test_the_penalty_is_added_by_its_weight_and_returned_when_asked_for():
    model, data = build(), batch()
    labels = data["input_ids"]
    outputs = model(**data, labels=labels, gate_penalty_weight=0.25)
    torch.testing.assert_close(outputs.loss, model(**data, labels=labels).loss + 0.25 * outputs.gate_penalty)
    torch.testing.assert_close(outputs.gate_penalty, torch.tensor(8 / (1 + math.exp(-2.5 - 0.33 * math.log(11)))))
    assert model(**data).keys() == {"logits"}
    assert list(model(**data, output_gate_penalty=True)) == ["logits", "gate_penalty"]


def test_gates_on_disk_count_as_they_do_in_memory(tmp_path):
    model = build()
    close(model, {("encoder", 1): [0, 2]})
    model.save_pretrained(tmp_path / "model")
    layers = {f"roberta.encoder.layer.{layer}": "disk" if layer else "cpu" for layer in range(2)}
    places = {"device_map": {"roberta.embeddings": "cpu", "lm_head": "cpu", **layers}, "offload_folder": tmp_path}
    loaded = had.HeadwiseRobertaForMaskedLM.from_pretrained(tmp_path / "model", **places).eval()
    gates = loaded.head_gates()
    for _ in range(2):
        assert [gate.is_offloaded for gate in gates.values()] == [False, True]
        found, expected = (one(**batch(), output_gate_penalty=True) for one in (loaded, model))
        torch.testing.assert_close(found.gate_penalty, expected.gate_penalty)
        torch.testing.assert_close(found.logits, expected.logits)
    assert gates["encoder", 1].settled().tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="device_map has offloaded cannot be set: load the model without device_map"):
        gates["encoder", 1].set_locations(torch.ones(4))


def test_gates_stay_in_single_precision_in_a_model_of_half_precision(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    loaded = had.HeadwiseRobertaForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = copy.deepcopy(model).to(torch.bfloat16)
    for one in (loaded, cast):
        assert {g.log_alpha.dtype for g in one.head_gates().values()} == {torch.float32}
        assert one(**batch()).logits.dtype == torch.bfloat16
        assert one(**batch(), output_gate_penalty=True).gate_penalty.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_are_sharded_apart_from_weights_in_half_precision(dtype):
    assert build()._get_dtype_plan(dtype) == {"log_alpha": torch.float32}


@pytest.mark.parametrize(
    ("cast", "dtype"), [("half", torch.float32), ("bfloat16", torch.float32), ("double", torch.float64)]
)
def test_casting_a_model_never_costs_its_gates_precision(cast, dtype):
    model = build()
    gate = next(iter(model.head_gates().values()))
    value = torch.tensor([2.5001, -1.3, 0.1, 1e-5])
    gate.set_locations(value)
    getattr(model, cast)()
    assert gate.log_alpha.dtype == dtype
    assert torch.equal(gate.log_alpha.float(), value)
    assert next(iter(model.to("meta").head_gates().values())).log_alpha.is_meta


def test_gates_are_initialised_on_a_stock_checkpoint_and_kept_from_a_gated_one(tmp_path):
    plain = had.HeadwiseRobertaForMaskedLM(tiny_config(guidance=None))
    plain.save_pretrained(tmp_path / "plain")
    fresh = had.HeadwiseRobertaForMaskedLM.from_pretrained(tmp_path / "plain", gates={"initial_log_alpha": 1.5})
    assert all((g.log_alpha == 1.5).all() for g in fresh.head_gates().values())
    close(fresh, {("encoder", 1): [2]})
    fresh.save_pretrained(tmp_path / "gated")
    again = had.HeadwiseRobertaForMaskedLM.from_pretrained(tmp_path / "gated").eval()
    assert torch.equal(again(**batch()).logits, fresh.eval()(**batch()).logits)
    assert again.head_gates()["encoder", 1].log_alpha.tolist() == [3, 3, -3, 3]


def test_gates_added_later_are_those_of_the_configuration():
    model = had.HeadwiseRobertaForMaskedLM(tiny_config(guidance=None, pruned_heads={0: [1], 1: [0, 1, 2, 3]})).train()
    assert model.add_gates({"initial_log_alpha": 1.5}) is model
    assert model.config.gates["initial_log_alpha"] == 1.5
    gates = model.head_gates()
    assert [gate.log_alpha.tolist() for gate in gates.values()] == [[1.5] * 3, []]
    assert all(gate.training for gate in gates.values())
    with pytest.raises(ValueError, match="has gates; prune_closed_gates"):
        model.add_gates({})


def test_models_built_from_one_configuration_have_their_own_gates():
    config = tiny_config(guidance=None)
    first, second = had.HeadwiseRobertaModel(config), had.HeadwiseRobertaModel(config)
    first.add_gates({})
    assert second.config.gates is None
    second.add_gates({})
    had.prune_closed_gates(first)
    assert second.config.gates is not None
    assert len(second.head_gates()) == 2


def test_impossible_gates_are_not_added():
    model = had.HeadwiseRobertaForMaskedLM(tiny_config(guidance=None))
    with pytest.raises(ValueError, match="variant must be one of paper, paper_code, got 'code'"):
        model.add_gates({"variant": "code"})
    with pytest.raises(ValueError, match="gates must be a dictionary, .* got None"):
        model.add_gates(None)
    assert model.config.gates is None
    assert not model.head_gates()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_gate_penalty": True}, "has no gates: load or build the model with gates={}"),
        ({"gate_noise": torch.rand(8)}, "gate_noise is given, but HeadwiseRobertaForMaskedLM has no gates"),
    ],
)
def test_a_model_without_gates_says_so(arguments, message):
    model = had.HeadwiseRobertaForMaskedLM(tiny_config(guidance=None))
    with pytest.raises(ValueError, match=message):
        model(**batch(), **arguments)


def test_noise_of_the_wrong_shape_or_outside_training_is_refused():
    model = build()
    with pytest.raises(ValueError, match="only sampled in training"):
        model(**batch(), gate_noise=torch.rand(8))
    with pytest.raises(ValueError, match=r"must have shape \(8,\), one for each gate, got \(4,\)"):
        model.train()(**batch(), gate_noise=torch.rand(4))
    with pytest.raises(ValueError, match="gate_penalty_weight needs a task loss: pass labels"):
        model(**batch(), gate_penalty_weight=1.0)


class AdaptedLinear(torch.nn.Linear):
    """A projection with something beside its weights, as adapters and quantized ones have."""

    def forward(self, states):
        return super().forward(states) + states.sum(-1, keepdim=True)


def test_gates_become_part_of_plain_output_projections_only():
    model = build(gates={"evaluation": "fractional", "initial_log_alpha": 0.3})
    model.head_gates()["encoder", 0].log_alpha.data[0] = -3.0
    model.roberta.encoder.layer[1].attention.output.dense.__class__ = AdaptedLinear
    expected = model(**batch()).logits
    with pytest.raises(ValueError, match=r"output projection of roberta.encoder.layer.1.* is a .*AdaptedLinear, not"):
        had.prune_closed_gates(model)
    assert torch.equal(model(**batch()).logits, expected)
    assert (len(model.head_gates()), model.config.pruned_heads) == (2, None)


def test_gates_are_settled_by_the_order_of_phi_and_as_little_as_needed():
    model = build()
    values = torch.tensor([3.0, -1.0, 0.5, 0.2, -0.1, 2.0, 1.0, -5.0])
    for gate, chosen in zip(model.head_gates().values(), values.split(4)):
        gate.log_alpha.data = chosen.clone()
    assert settle_gates(model, 3) == 2
    assert locations(model).tolist() == pytest.approx([3.0, -1.0, -1e-3, -1e-3, -0.1, 2.0, 1.0, -5.0])
    assert settle_gates(model, 6) == 3
    assert ((locations(model) > 0) == torch.tensor([1, 0, 1, 1, 1, 1, 1, 0]).bool()).all()
    with pytest.raises(ValueError, match="keep=9 heads cannot stay open: the model has 8 gated heads"):
        settle_gates(model, 9)
