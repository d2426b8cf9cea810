"""Trainings whose target is a speed-up, or a fraction of FLOPs."""

import json
import logging

import datasets
import pytest
import torch
from tiny_training import STILL, assert_accumulation_is_exact, build, collate, examples, train_gates, trainer
from transformers import TrainerCallback

import hf_attn_dynamics as had
from hf_attn_dynamics import GateHistory, HeadwiseTrainingArguments
from hf_attn_dynamics.analysis.heads import latency
from hf_attn_dynamics.analysis.heads.latency import count_flops_table
from hf_attn_dynamics.models.cost_table import CostTable
from hf_attn_dynamics.models.gate_costs import expected_cost
from hf_attn_dynamics.models.hard_concrete import HardConcreteGate
from hf_attn_dynamics.models.head_gates import gates_of
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.unit_roles import locate_units
from hf_attn_dynamics.training.gates import TargetCost, TargetHeads, expected_open, gate_noise


ALL = ["heads", "units", "blocks"]


def gated(task="SequenceClassification", kind="roberta", parts=tuple(ALL), gates=None, **changes):
    gates = gates or {"parts": [*parts]}
    if kind == "marian":
        gates = {"encoder": gates, "decoder": gates, "cross": {"parts": ["heads", "blocks"]}}
    return build(task, kind, guidance=None, gates=gates, **{**STILL, **changes})


def flops(model):
    return count_flops_table(model, length=16)


def phis(model):
    return [phi for gate in gates_of(model) for phi in gate.parameters()]


@pytest.mark.parametrize(
    ("kind", "task"), [("roberta", "SequenceClassification"), ("marian", "Translation"), ("electra", "ReplacedTokens")]
)
def test_accumulated_micro_batches_give_the_step_of_one_batch(tmp_path, kind, task):
    target = {"target_flops": 0.5, "latency_length": 16, "target_learning_rate": 0.01}
    assert_accumulation_is_exact(tmp_path, lambda: gated(task, kind), examples(task), ["expected_cost"], **target)


def test_the_step_is_that_of_the_task_loss_and_the_expected_cost_at_the_noise_of_the_step(tmp_path):
    settings = {"optim": "sgd", "learning_rate": 1.0, "gate_learning_rate": 1.0, "max_grad_norm": 0.0}
    twin = gated().train()
    table = flops(twin)
    noise = gate_noise(twin.head_gates(), 7, 0, twin.unit_gates())
    assert len(noise) == sum(map(len, phis(twin)))
    soft = expected_cost(twin, table, HardConcreteGate.approximate_counts).item()
    # 100·r·e, where a percent of the cost counts as a head, and the penalty is a fraction.
    weight = 100 * 100 * 0.01 * 100 * (soft - 1 / 1.5)
    outputs = twin(
        **collate(examples("SequenceClassification").to_list()),
        gate_penalty_weight=weight,
        gate_cost=table,
        gate_noise=noise,
    )
    outputs.loss.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    one_step = gated()
    made = train_gates(
        tmp_path,
        one_step,
        examples("SequenceClassification"),
        target_speedup=1.5,
        latency_table=table,
        target_warmup=0.0,
        target_learning_rate=0.01,
        seed=7,
        callbacks=[Stop(1)],
        max_steps=100,
        lr_scheduler_type="constant",
        load_best_model_at_end=False,
        **settings,
    )
    assert made.state.log_history[0]["gate_penalty_weight"] == pytest.approx(weight, rel=1e-4)
    for name, p in twin.named_parameters():
        if "log_alpha" in name:
            continue  # moved to the target at the end
        expected = p.detach() - gradients.get(name, 0)
        torch.testing.assert_close(one_step.get_parameter(name).detach(), expected, rtol=1e-4, atol=1e-6)


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def test_the_multiplier_grows_by_the_excess_cost_in_percent():
    model = gated()
    table = flops(model)
    target = TargetCost(2.0, 0.01, 0.5, table)
    soft = expected_cost(model, table, HardConcreteGate.approximate_counts).item()
    planned = [1.0, 0.75, 0.5, 0.5]
    weights = [target.step(model, step, 4).item() for step in range(4)]
    multiplier = 0.0
    for weight, plan in zip(weights, planned):
        excess = 100 * (soft - plan)
        assert weight == pytest.approx(100 * (multiplier + 100 * 0.01 * excess), rel=1e-4)
        multiplier += 0.01 * excess
    assert target.multiplier == pytest.approx(multiplier, rel=1e-4)


def test_heads_and_units_that_are_gone_are_no_excess_below_the_plan():
    model = gated()
    table = flops(model)
    had.prune_units(model, {0: "0-15", 1: "0-15"})
    for phi in phis(model):
        phi.data.fill_(30.0)
    assert TargetCost(2.0, 0.01, 1.0, table).step(model, 0, 4).item() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("parts", [("heads", "units", "blocks"), ("heads", "units"), ("units",), ("blocks",)])
@pytest.mark.parametrize("target", [{"target_flops": 0.7}, {"target_speedup": 1.35}])
def test_trained_and_pruned_models_cost_what_was_asked_for(tmp_path, target, parts):
    model, history = gated(parts=parts), GateHistory(every=20)
    table = flops(model)
    speedup = 1 / 0.7 if "target_flops" in target else 1.35
    made = train_gates(
        tmp_path,
        model,
        examples("SequenceClassification", 16),
        max_steps=60,
        logging_steps=20,
        gate_learning_rate=0.3,
        latency_length=16,
        latency_table=table if "target_speedup" in target else None,
        callbacks=[history],
        **target,
    )
    log = [entry for entry in made.state.log_history if "task_loss" in entry]
    assert log[0]["expected_cost"] > log[-1]["expected_cost"]
    assert all(entry["gate_penalty"] <= 1 for entry in log)
    gates = {"heads": model.head_gates(), "units": model.unit_gates()}
    for name in ("heads", "units"):
        assert (f"expected_{name}_encoder" in log[0]) == bool(gates[name])
    assert sorted(history.settled_units) == (["encoder"] if gates["units"] else [])
    pruned = made.prune()
    assert table.speedup_of(pruned) >= speedup
    assert gates_of(pruned) == []
    # One more element would be too much.
    heads = {layer.site: len(layer.heads) for layer in locate_heads(pruned)}
    units = {layer.site: len(layer.units) for layer in locate_units(pruned)}
    for part, counts, other, full in (("heads", heads, units, 4), ("units", units, heads, 32)):
        for site, count in counts.items() if part in parts else ():
            if count < full:
                more = {**counts, site: count + 1}
                cost = table.cost(more, other) if part == "heads" else table.cost(other, more)
                assert table.dense / cost < speedup
    if history.settled_units:
        assert history.settled_units["encoder"][-1] == sum(units.values())
        assert history.open_units["encoder"][0] > 32


def test_gates_of_units_and_blocks_are_in_the_optimizer_group_of_gates(tmp_path):
    model = gated()
    made = trainer(
        tmp_path, model, examples("SequenceClassification"), guidance_weight=0, gate_learning_rate=0.3, ema_decay=0.9
    )
    groups = made.create_optimizer().param_groups
    ids = {id(phi) for phi in phis(model)}
    own = [group for group in groups if ids & {id(p) for p in group["params"]}]
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in own] == [(8, 0.3, 0.0)]
    averaged = made._averaged_parameters()
    assert not any("log_alpha" in name for name in averaged)


def test_a_table_is_measured_when_training_starts_and_a_resumed_run_continues_with_it(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    measured = []

    def measure(model, batch, length, device):
        measured.append((batch, length, torch.device(device).type))
        values = flops(model).to_dict()
        # Another machine load each time.
        return CostTable.from_dict({**values, "quantity": "seconds", "rest": 1e4 * len(measured)})

    monkeypatch.setattr(latency, "measure_latency_table", measure)
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "target_speedup": 1.5,
        "latency_batch": 4,
        "target_learning_rate": 0.01,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 1e-2,
        "gate_learning_rate": 0.2,
        "guidance_weight": None,
    }
    data = examples("SequenceClassification", 14)
    whole = trainer(tmp_path, gated(), data, callbacks=[GateHistory(every=2)], **settings)
    assert measured == []
    whole.train()
    limit = whole.model.config.max_positions()
    assert measured == [(4, min(128, limit), "cpu")]
    assert "what pruning can gain:\n|" in caplog.text
    history = GateHistory(every=2)
    resumed = trainer(tmp_path, gated(seed=5), data, callbacks=[history], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    # Those of its checkpoint; nothing is measured.
    assert len(measured) == 1
    for (name, expected), found in zip(whole.model.state_dict().items(), resumed.model.state_dict().values()):
        assert torch.equal(expected, found), name
    logs = [
        [(e["gate_penalty_weight"], e["expected_cost"]) for e in made.state.log_history if "task_loss" in e]
        for made in (whole, resumed)
    ]
    assert logs[0] == logs[1]
    assert len(set(logs[0])) == 6
    assert history.steps == [0, 2, 4, 6]
    assert len(history.settled_units["encoder"]) == 4


def test_the_decoder_is_left_as_it_was_if_only_the_encoder_is_pruned(tmp_path):
    model = build("Translation", "marian", guidance=None, gates={"encoder": {"parts": ALL}}, **STILL)
    before = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    train_gates(tmp_path, model, examples("Translation"), target_flops=0.9, max_steps=2, latency_length=8)
    for name, p in model.named_parameters(remove_duplicate=False):
        if name.startswith("model.decoder."):
            assert torch.equal(p, before[name]), name


def test_all_closed_feed_forward_blocks_are_told_of(tmp_path, caplog):
    model = gated(parts=("units",))
    for phi in phis(model):
        phi.data.fill_(-3.0)
    train_gates(tmp_path, model, examples("SequenceClassification"), gate_penalty=0.1, max_steps=2)
    assert caplog.text.count("every feed-forward block now outputs zero. Lower gate_penalty, or set a target_spe") == 1
    assert "every attention layer" not in caplog.text


def test_the_history_of_earlier_versions_is_read(tmp_path):
    earlier = {"steps": [0], "log_alpha": {}, "open_heads": {"encoder": [7.5]}, "settled_heads": {"encoder": [8]}}
    (tmp_path / "history.json").write_text(json.dumps(earlier))
    assert GateHistory.load(tmp_path / "history.json").to_dict() == {
        **earlier,
        "open_units": {},
        "settled_units": {},
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_speedup": 1.0}, "target_speedup must be finite and above 1, got 1.0"),
        ({"target_speedup": float("inf")}, "target_speedup must be finite and above 1, got inf"),
        ({"target_speedup": "fast"}, "target_speedup must be a number, got 'fast'"),
        ({"target_flops": 1}, "target_flops must be between 0 and 1, got 1.0"),
        ({"target_flops": 0}, "target_flops must be between 0 and 1, got 0.0"),
        ({"target_flops": 0.5, "target_speedup": 2}, "target_speedup=2.0 and target_flops=0.5 both set the penalty"),
        ({"target_heads": 3, "target_speedup": 2}, "target_heads=3 and target_speedup=2.0 both set the penalty"),
        ({"gate_penalty": 0.1, "target_flops": 0.5}, "gate_penalty=0.1 and target_flops=0.5 both set the penalty"),
        ({"latency_table": "costs.json"}, "latency_table=costs.json needs a target_speedup"),
        ({"latency_batch": 0}, "latency_batch must be at least 1, got 0"),
        ({"latency_length": 2.5}, "latency_length must be an integer, got 2.5"),
        (
            {"target_flops": 0.5, "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
            "load_best_model_at_end=True conflicts with target_flops=0.5",
        ),
    ],
)
def test_impossible_arguments_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        HeadwiseTrainingArguments(str(tmp_path), **settings)


def ungated():
    return build("SequenceClassification", guidance=None)


def other_table():
    return flops(build("SequenceClassification", num_hidden_layers=3, guidance=None))


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            lambda: build("SequenceClassification", guidance=None),
            {"target_speedup": 2},
            "target_speedup=2.0, but .* no",
        ),
        (lambda: build("SequenceClassification", guidance=None), {"target_flops": 0.5}, "target_flops=0.5, but .* no"),
        (
            gated,
            {"target_speedup": 2, "latency_table": other_table},
            "cost table does not fit: .* num_hidden_layers 3, not 2",
        ),
        (gated, {"latency_table": other_table}, "got a latency_table, but target_speedup is not set"),
        (
            gated,
            {"target_speedup": 2, "latency_table": lambda: flops(gated()), "latency_batch": 3},
            "latency_batch=3, but latency_table was made for",
        ),
        (
            lambda: gated(parts=("heads",)),
            {"target_speedup": 5, "latency_table": lambda: flops(gated())},
            r"5 × cannot be reached by heads alone: at most .*; by heads and units",
        ),
        (
            lambda: gated(parts=("blocks",)),
            {"target_heads": 3},
            "target_heads=3, but the attention blocks of .* have gates without those of heads",
        ),
        (lambda: gated(parts=("units",)), {"target_heads": 3}, "target_heads=3, but .* has 0 gated heads"),
    ],
)
def test_what_the_model_can_not_do_is_refused_before_training(tmp_path, model, settings, message):
    table = settings.get("latency_table")
    settings = {**settings, "latency_table": table() if table else None}
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, model(), datasets.Dataset.from_list([]), guidance_weight=0, **settings)


def test_targets_out_of_reach_of_the_gated_sites_are_refused_before_training(tmp_path):
    model = build("Translation", "marian", guidance=None, gates={"encoder": {"parts": ALL}}, **STILL)
    made = trainer(tmp_path, model, examples("Translation"), guidance_weight=None, target_flops=0.3, latency_length=8)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"cannot be reached: closing all gates of the encoder gives \d.\d\d ×"):
        made.train()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_table_is_read_from_its_file(tmp_path):
    model = gated()
    table = flops(model)
    table.save(tmp_path / "costs.json")
    settings = {"target_speedup": 1.5, "latency_table": str(tmp_path / "costs.json"), "guidance_weight": None}
    args = HeadwiseTrainingArguments(
        str(tmp_path), max_steps=2, report_to="none", use_cpu=True, save_strategy="no", **settings
    )
    made = had.HeadwiseTrainer(model, args, data_collator=collate, train_dataset=examples("SequenceClassification"))
    made.train()
    assert table.speedup_of(made.prune()) >= 1.5
    with pytest.raises(ValueError, match=r"got a latency_table, but latency_table=.*costs.json is set, too"):
        had.HeadwiseTrainer(gated(), args, latency_table=table)


def test_gates_may_be_on_several_devices():
    model = gated(parts=["heads", "units"])
    table = flops(model)
    expected = expected_cost(model, table)
    # The device `meta` takes values from others, and gives none.
    first = gates_of(model)[0]
    first.to("meta")
    assert expected_open(model.head_gates())["encoder"].device.type == "meta"
    assert expected_cost(model, table).device.type == "meta"
    assert TargetHeads(8, 4, 0.1, 0.5).step(model, 0, 4).device.type == "meta"
    assert expected.device.type == "cpu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_warmup": 0.1}, "target_warmup=0.1 needs target_heads or target_speedup or target_flops"),
        ({"target_learning_rate": "1e-3", "gate_penalty": 0.1}, "target_learning_rate=0.001 needs target_heads"),
        ({"latency_batch": 4, "target_heads": 3}, "latency_batch=4 needs target_speedup or target_flops"),
        ({"latency_length": 64}, "latency_length=64 needs target_speedup or target_flops"),
    ],
)
def test_arguments_of_a_target_are_refused_without_one(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        HeadwiseTrainingArguments(str(tmp_path), **settings)
