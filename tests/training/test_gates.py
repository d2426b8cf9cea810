import copy
from types import SimpleNamespace

import datasets
import pytest
import torch
from tiny_training import STILL, assert_accumulation_is_exact, build, collate, examples, train_gates, trainer
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_attn_dynamics import (
    GateHistory,
    HeadwiseSeq2SeqTrainer,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
    prune_closed_gates,
)
from hf_attn_dynamics.models.hard_concrete import HardConcreteGate
from hf_attn_dynamics.training.gates import gate_noise


def gated(task="SequenceClassification", kind="roberta", gates=None, **changes):
    every = {"encoder": {}, "decoder": {}, "cross": {}} if kind == "marian" else {}
    return build(task, kind, guidance=None, gates=every if gates is None else gates, **{**STILL, **changes})


def log_alpha(model):
    return torch.cat([gate.log_alpha.detach() for gate in model.head_gates().values()])


@pytest.mark.parametrize(
    ("kind", "task"),
    [("roberta", "SequenceClassification"), ("electra", "ReplacedTokens"), ("marian", "Translation")],
)
@pytest.mark.parametrize("pressure", [{"gate_penalty": 0.3}, {"target_heads": 3, "target_learning_rate": 0.1}])
def test_accumulated_micro_batches_give_the_step_of_one_batch(tmp_path, kind, task, pressure):
    assert_accumulation_is_exact(tmp_path, lambda: gated(task, kind), examples(task), **pressure)


def test_the_step_is_that_of_the_task_loss_and_the_penalty_at_the_noise_of_the_step(tmp_path):
    settings = {"optim": "sgd", "learning_rate": 1.0, "gate_learning_rate": 1.0, "max_grad_norm": 0.0}
    model, twin = gated(), gated().train()
    train_gates(tmp_path, model, examples("SequenceClassification"), gate_penalty=0.3, seed=7, **settings)
    outputs = twin(
        **collate(examples("SequenceClassification").to_list()),
        gate_penalty_weight=0.3,
        gate_noise=gate_noise(twin.head_gates(), 7, 0),
    )
    outputs.loss.backward()
    for name, p in twin.named_parameters():
        expected = p.detach() - (0 if p.grad is None else p.grad)
        torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=1e-4, atol=1e-6)


def test_gates_have_an_optimizer_group_without_decay_and_with_their_rate(tmp_path):
    model = gated()
    made = trainer(
        tmp_path,
        model,
        examples("SequenceClassification"),
        guidance_weight=0,
        weight_decay=0.5,
        gate_learning_rate=0.3,
    )
    groups = made.create_optimizer().param_groups
    ids = {id(gate.log_alpha) for gate in model.head_gates().values()}
    own = [group for group in groups if ids & {id(p) for p in group["params"]}]
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in own] == [(2, 0.3, 0.0)]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_an_optimizer_that_was_given_stays_as_it_is(tmp_path):
    model = gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    made = trainer(tmp_path, model, examples("SequenceClassification"), guidance_weight=0)
    made.optimizer = optimizer
    assert [len(group["params"]) for group in made.create_optimizer().param_groups] == [len(list(model.parameters()))]


def test_no_price_keeps_all_heads_a_high_one_closes_all_and_in_between_it_is_monotone(tmp_path):
    data = examples("SequenceClassification", 16)
    left = []
    for price in (0.0, 0.02, 5.0):
        model = gated()
        made = train_gates(tmp_path, model, data, gate_penalty=price, max_steps=60, logging_steps=60)
        left.append(made.state.log_history[0]["expected_heads_encoder"])
    assert left == sorted(left, reverse=True)
    assert left[0] > 7
    assert left[2] < 0.5


def test_gates_that_do_not_move_and_gates_that_all_close_are_told_of(tmp_path, caplog):
    data = examples("SequenceClassification", 16)
    train_gates(tmp_path, gated(), data, gate_penalty=5.0, max_steps=60, logging_steps=20)
    assert caplog.text.count("all gates are closed") == 1
    assert "no gate has moved" not in caplog.text
    caplog.clear()
    train_gates(tmp_path, gated(), data, gate_penalty=1e-4, gate_learning_rate=1e-5, max_steps=3)
    assert "no gate has moved by more than 0.05 in 3 steps: raise gate_learning_rate" in caplog.text


@pytest.mark.parametrize("target", [1, 3, 8])
def test_exactly_so_many_heads_stay_open_as_were_asked_for(tmp_path, target):
    model, history = gated(), GateHistory(every=1)
    settings = {"max_steps": 120, "logging_steps": 120, "target_learning_rate": 1e-3, "gate_learning_rate": 0.3}
    train_gates(
        tmp_path, model, examples("SequenceClassification", 16), target_heads=target, callbacks=[history], **settings
    )
    assert int((log_alpha(model) > 0).sum()) == target
    one_step_before, at_the_end = history.settled_heads["encoder"][-2:]
    assert abs(one_step_before - target) <= 1
    assert at_the_end == target
    assert history.settled_heads["encoder"][0] == 8


@pytest.mark.parametrize("ending", ["in time", "early", "resumed"])
def test_the_model_that_is_evaluated_and_saved_last_is_the_one_that_training_leaves(tmp_path, caplog, ending):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = ending == "early" and state.global_step == 4

    data = examples("SequenceClassification")
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    settings |= {"target_heads": 2, "guidance_weight": None}
    made = trainer(tmp_path, gated(), data, data, callbacks=[Stop()], **settings)
    made.train()
    assert int((log_alpha(made.model) > 0).sum()) == 2
    assert caplog.text.count("gates were moved across their threshold after the last step") == 1
    if ending == "early":
        return
    last = tmp_path / "checkpoint-6"
    if ending == "resumed":
        made = trainer(tmp_path, gated(seed=5), data, data, **settings)
        made.train(resume_from_checkpoint=str(last))
        assert caplog.text.count("gates were moved across their threshold after the last step") == 1
    assert "no gate has moved" not in caplog.text
    saved = type(made.model).from_pretrained(last).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in made.model.state_dict().items())
    evaluated = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert evaluated[-1] == made.evaluate()["eval_loss"]


def test_so_many_fractional_gates_are_not_zero_as_were_asked_for(tmp_path, caplog):
    model = gated(gates={"evaluation": "fractional", "initial_log_alpha": -1.0})
    train_gates(tmp_path, model, examples("SequenceClassification"), target_heads=3, max_steps=2)
    assert "all gates are closed" not in caplog.text
    assert sum(int(gate.settled().ne(0).sum()) for gate in model.head_gates().values()) == 3
    assert sum(map(len, prune_closed_gates(model).config.pruned_heads.values())) == 5


def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "target_heads": 3,
        "target_learning_rate": 0.05,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 1e-2,
    }
    data = examples("SequenceClassification", 14)
    histories = [GateHistory(every=2) for _ in range(3)]
    whole = train_gates(tmp_path / "whole", gated(), data, callbacks=[histories[0]], **settings)
    train_gates(tmp_path / "stopped", gated(), data, callbacks=[histories[1]], **settings)
    resumed = trainer(tmp_path / "stopped", gated(seed=5), data, callbacks=[histories[2]], gate_learning_rate=0.2,
                      **{**settings, "guidance_weight": None})  # fmt: skip
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-3"))
    for (name, expected), found in zip(whole.model.state_dict().items(), resumed.model.state_dict().values()):
        assert torch.equal(expected, found), name
    logs = [
        [e["gate_penalty_weight"] for e in made.state.log_history if "task_loss" in e] for made in (whole, resumed)
    ]
    assert logs[0] == logs[1]
    assert len(set(logs[0])) == 6
    assert histories[2].to_dict() == histories[0].to_dict()


def test_training_over_again_starts_with_no_price(tmp_path):
    data = examples("SequenceClassification")
    settings = {"target_heads": 2, "target_learning_rate": 0.05, "max_steps": 4}
    made = train_gates(tmp_path, gated(), data, **settings)
    fresh = copy.deepcopy(made.model)
    made.train()
    prices = [
        [e["gate_penalty_weight"] for e in each.state.log_history if "task_loss" in e]
        for each in (made, train_gates(tmp_path, fresh, data, **settings))
    ]
    assert prices[0][0] == prices[1][0] != 0
    assert len(prices[0]) == 4


def test_the_history_records_phi_and_comes_back_from_its_file(tmp_path):
    history = GateHistory(every=2)
    model = gated("Translation", "marian")
    train_gates(tmp_path, model, examples("Translation"), max_steps=5, gate_penalty=0.1, callbacks=[history])
    assert history.steps == [0, 2, 4, 5]
    assert history.log_alpha["encoder"][0] == [[2.5] * 4] * 2
    assert history.log_alpha["cross"][-1] == [
        model.head_gates()["cross", layer].log_alpha.tolist() for layer in range(2)
    ]
    assert [len(values) for values in history.open_heads.values()] == [4, 4, 4]
    assert [values[0] for values in history.settled_heads.values()] == [8, 4, 4]
    history.save(tmp_path / "history.json")
    assert GateHistory.load(tmp_path / "history.json").to_dict() == history.to_dict()


def test_pruning_the_encoder_alone_leaves_the_decoder_as_it_was(tmp_path):
    model = gated("Translation", "marian", gates={"encoder": {}})
    before = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    train_gates(tmp_path, model, examples("Translation"), gate_penalty=0.1, max_steps=2, learning_rate=1e-2)
    for name, p in model.named_parameters(remove_duplicate=False):
        moved = not torch.equal(p, before[name])
        inside = name.startswith("model.encoder.") and "embed" not in name
        # A key's bias shifts all scores of a row alike, so that its gradient is rounding.
        assert moved == inside or "k_proj.bias" in name, name
    assert all(p.requires_grad for name, p in model.named_parameters() if "embed_positions" not in name)
    train_gates(tmp_path, model, examples("Translation"), gate_penalty=0.1, freeze_decoder=False, learning_rate=1e-2)
    assert not torch.equal(model.model.decoder.layers[0].fc1.weight, before["model.decoder.layers.0.fc1.weight"])


def test_the_decoder_of_a_model_that_is_made_anew_is_left_as_it_was_too(tmp_path):
    models = []

    def make():
        models.append(gated("Translation", "marian", gates={"encoder": {}}))
        return models[-1]

    args = trainer(tmp_path, make(), None, gate_penalty=0.1, learning_rate=1e-2, guidance_weight=0).args
    data = examples("Translation")
    HeadwiseSeq2SeqTrainer(args=args, data_collator=collate, train_dataset=data, model_init=make).train()
    before, trained = (model.model.decoder.layers[0].fc1.weight for model in (models[0], models[-1]))
    assert torch.equal(trained, before)
    assert trained.requires_grad


def test_a_gated_model_trains_under_the_stock_arguments_too(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=2, report_to="none", use_cpu=True, save_strategy="no",
                             disable_tqdm=True)  # fmt: skip
    data = examples("SequenceClassification")
    for made in (HeadwiseTrainer, Trainer):
        model = gated()
        made(model, args, data_collator=collate, train_dataset=data).train()
        assert (log_alpha(model) != 2.5).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate_penalty": -1.0}, "gate_penalty must be finite and at least 0, got -1.0"),
        ({"gate_penalty": float("nan")}, "gate_penalty must be finite and at least 0, got nan"),
        ({"target_heads": 0}, "target_heads must be at least 1, got 0"),
        ({"target_heads": 4.5}, "target_heads must be an integer, got 4.5"),
        ({"gate_penalty": None}, "gate_penalty must be a number, got None"),
        ({"target_heads": 3, "gate_penalty": 0.1}, "pass one of them"),
        (
            {"target_heads": 3, "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
            "load_best_model_at_end=True conflicts with target_heads=3",
        ),
        ({"target_warmup": 1.5}, "target_warmup must be between 0 and 1, got 1.5"),
    ],
)
def test_impossible_arguments_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        HeadwiseTrainingArguments(str(tmp_path), **settings)


def test_numbers_may_come_as_texts_and_whole_ones_as_any(tmp_path):
    args = HeadwiseTrainingArguments(str(tmp_path), gate_learning_rate="1e-3", target_heads=8 / 2)
    assert args.gate_learning_rate == 1e-3
    assert args.target_heads == 4
    assert isinstance(args.target_heads, int)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            lambda: build("SequenceClassification", guidance=None),
            {"target_heads": 3},
            "target_heads=3, but .* no gates",
        ),
        (lambda: build("SequenceClassification", guidance=None), {"gate_penalty": 1.0}, "gate_penalty=1.0, but .* no"),
        (gated, {"target_heads": 9}, "target_heads=9, but HeadwiseRobertaForSequenceClassification has 8 gated heads"),
        (gated, {"freeze_decoder": True}, "freeze_decoder=True needs an encoder–decoder"),
    ],
)
def test_what_the_model_can_not_do_is_refused_before_training(tmp_path, model, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, model(), datasets.Dataset.from_list([]), guidance_weight=0, **settings)


@pytest.mark.parametrize("pressure", [{"target_heads": 3}, {"gate_penalty": 0.3}])
def test_gates_that_an_adapter_froze_are_refused_as_none_would_close(tmp_path, pressure):
    model = gated()
    for gate in model.head_gates().values():
        gate.requires_grad_(False)
    with pytest.raises(ValueError, match=r"every gate of HeadwiseRoberta\w+ is frozen.*call requires_grad_\(True\)"):
        trainer(tmp_path, model, datasets.Dataset.from_list([]), guidance_weight=None, **pressure)
    next(iter(model.head_gates().values())).requires_grad_(True)
    trainer(tmp_path, model, datasets.Dataset.from_list([]), guidance_weight=None, **pressure)


def test_gates_that_checkpoints_of_an_adapter_would_not_have_are_refused(tmp_path):
    model = gated()
    model.peft_config = {}  # as PEFT leaves it, on its own class, too
    data = datasets.Dataset.from_list([])
    with pytest.raises(
        ValueError, match="checkpoints of its adapter would not contain them: add 'gate' to modules_to"
    ):
        trainer(tmp_path, model, data, guidance_weight=None, gate_penalty=0.1, save_strategy="steps")
    trainer(tmp_path, model, data, guidance_weight=None, gate_penalty=0.1)
    for gate in model.head_gates().values():
        gate.requires_grad_(False)
    trainer(tmp_path, model, data, guidance_weight=None, save_strategy="steps")


def test_gates_that_are_offloaded_are_refused_as_none_would_close(tmp_path, monkeypatch):
    monkeypatch.setattr(HardConcreteGate, "is_offloaded", True)
    with pytest.raises(
        ValueError, match=r"target_heads=3, but device_map has offloaded gates of HeadwiseRoberta.* without"
    ):
        trainer(tmp_path, gated(), datasets.Dataset.from_list([]), guidance_weight=None, target_heads=3)


@pytest.mark.parametrize("way", ["version 1 of FSDP", "stage 3 of DeepSpeed's ZeRO"])
def test_gates_that_are_sharded_beyond_reach_are_refused(tmp_path, way):
    class Sharded(HeadwiseTrainer):
        """Stands for a trainer with such a configuration, while it checks."""

        def _check_sharding(self, model):
            real = self.accelerator
            plugin = SimpleNamespace(zero_stage=3)
            self.accelerator = SimpleNamespace(is_fsdp2=False, state=SimpleNamespace(deepspeed_plugin=plugin))
            self.is_fsdp_enabled, self.is_deepspeed_enabled = "FSDP" in way, "ZeRO" in way
            try:
                super()._check_sharding(model)
            finally:
                self.accelerator, self.is_fsdp_enabled, self.is_deepspeed_enabled = real, False, False

    args = HeadwiseTrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    Sharded(build(guidance=None), args)
    with pytest.raises(ValueError, match=f"{way} shards gates"):
        Sharded(build(guidance=None, gates={}), args)
