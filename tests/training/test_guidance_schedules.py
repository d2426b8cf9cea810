"""Training in which patterns and targets have their own schedules of the guidance weight."""

import json

import pytest
import torch
from tiny_training import STILL, build, collate, guidance_to_targets, trainer, with_targets

import hf_attn_dynamics as had
from hf_attn_dynamics.recipes.arguments.parsing import parse_yaml_or_flags


DESCENT = {"optim": "sgd", "learning_rate": 0.3, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
SCHEDULES = {
    "roberta": {"guidance_schedule": {"syntax": "hold", "why": "constant"}, "guidance_hold_steps": {"syntax": 2}},
    "marian": {"guidance_schedule": {"aligned": "hold", "prev": "constant"}, "guidance_hold_steps": 2},
}
# α of each step of four, with α_0 = 2; `prev` of the encoder and of cross-attention is one name.
WEIGHTS = {
    "roberta": {"prev": [2, 4 / 3, 2 / 3, 0], "syntax": [2, 2, 0, 0], "why": [2, 2, 2, 2]},
    "marian": {
        "aligned": [2, 2, 0, 0],
        "prev": [2, 2, 2, 2],
        "syntax": [2, 4 / 3, 2 / 3, 0],
        "why": [2, 4 / 3, 2 / 3, 0],
    },
}
KINDS = [("roberta", "MaskedLM"), ("marian", "Translation")]


def summed(outputs, labels, num_items_in_batch):
    logits = outputs["logits"].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def trained(folder, kind, task, own_loss=None, **settings):
    """Weights and log after four steps over all examples."""
    model = build(task, kind, **STILL, guidance=guidance_to_targets(kind))
    run = trainer(folder, model, with_targets(task), **{**DESCENT, "max_steps": 4, **settings})
    run.compute_loss_func = own_loss
    run.train()
    return model.state_dict(), [entry for entry in run.state.log_history if "task_loss" in entry]


def assert_close(found, expected, rtol=1e-4, atol=5e-7):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("own_loss", [None, summed])
@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4)])
@pytest.mark.parametrize(("kind", "task"), KINDS)
def test_training_and_log_are_those_of_a_loop_with_a_weight_for_each_name(
    tmp_path, kind, task, batch, accumulation, own_loss
):
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    found, log = trained(tmp_path, kind, task, own_loss, **sizes, **SCHEDULES[kind])
    model = build(task, kind, **STILL, guidance=guidance_to_targets(kind)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    whole = collate(with_targets(task).remove_columns("unread").to_list())
    for step in range(4):
        outputs = model(**whole, output_guidance_loss=True)
        weights = {name: of_steps[step] for name, of_steps in WEIGHTS[kind].items()}
        assert weights.keys() == outputs.guidance_losses.keys()
        loss = outputs.loss + sum(weights[name] * own for name, own in outputs.guidance_losses.items())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected = {
            "loss": loss.item(),
            "task_loss": outputs.loss.item(),
            "guidance_loss": outputs.guidance_loss.item(),
        }
        expected |= {f"guidance_loss_{name}": own.item() for name, own in outputs.guidance_losses.items()}
        expected |= {f"guidance_weight_{name}": weight for name, weight in weights.items()}
        assert "guidance_weight" not in log[step]
        assert {name: log[step][name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert_close(found, model.state_dict())


@pytest.mark.parametrize("own_loss", [None, summed])
def test_one_schedule_for_all_names_is_the_schedule_without_names(tmp_path, own_loss):
    found, log = trained(
        tmp_path, *KINDS[0], own_loss, guidance_schedule=dict.fromkeys(("prev", "syntax", "why"), "linear")
    )
    expected, expected_log = trained(tmp_path, *KINDS[0], own_loss)
    assert_close(found, expected, rtol=0, atol=0)
    for one, other in zip(log, expected_log):
        for name in ("loss", "guidance_loss", "guidance_loss_prev", "guidance_weight"):
            assert one[name] == other[name]
        assert not any(name.startswith("guidance_weight_") for name in one)


def test_a_single_name_has_no_loss_of_its_own_in_the_log(tmp_path):
    run = trainer(tmp_path, build(guidance={"heads": {"prev": [0]}}), with_targets("MaskedLM"), max_steps=2)
    run.train()
    for entry in (entry for entry in run.state.log_history if "task_loss" in entry):
        assert [name for name in entry if name.startswith("guidance")] == ["guidance_loss", "guidance_weight"]


def test_hold_releases_the_heads(tmp_path):
    _, log = trained(tmp_path, *KINDS[0], guidance_schedule="hold", guidance_hold_steps=3)
    assert [entry["guidance_weight"] for entry in log] == [2, 2, 2, 0]
    assert log[3]["loss"] == pytest.approx(log[3]["task_loss"], rel=1e-6)


def test_the_automatic_weight_balances_the_sum_over_names(tmp_path):
    _, log = trained(tmp_path, *KINDS[0], guidance_weight="auto", **SCHEDULES["roberta"])
    weights = {name: log[0][f"guidance_weight_{name}"] for name in ("prev", "syntax", "why")}
    assert len(set(weights.values())) == 1
    assert weights["prev"] * log[0]["guidance_loss"] == pytest.approx(log[0]["task_loss"], rel=1e-4)


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    settings = {
        **SCHEDULES["roberta"],
        "guidance_weight": "auto",
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    data, guidance = with_targets("MaskedLM"), guidance_to_targets()
    whole = trainer(tmp_path / "whole", build(guidance=guidance), data, **settings)
    whole.train()
    trainer(tmp_path / "stopped", build(guidance=guidance), data, **settings).train()
    resumed = trainer(tmp_path / "stopped", build(seed=5, guidance=guidance), data, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-3"))
    assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    logs = [[entry for entry in run.state.log_history if "task_loss" in entry] for run in (whole, resumed)]
    for expected, found in zip(*logs):
        same = [name for name in expected if name.startswith(("guidance_", "task_loss"))]
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}


def test_schedules_survive_the_removal_of_all_heads_with_a_name(tmp_path):
    guidance = {"heads": {0: {"prev": [0]}, 1: {"first": [1], "self": [2]}}}
    schedule = {"guidance_schedule": {"prev": "constant", "first": "hold"}, "guidance_hold_steps": {"first": 1}}
    model = build(guidance=guidance)
    run = trainer(tmp_path, model, with_targets("MaskedLM"), max_steps=2, **schedule)
    run.train()
    had.prune_heads(model, {0: [0]})
    again = trainer(tmp_path, model, with_targets("MaskedLM"), max_steps=2, **schedule)
    again.train()
    entries = [entry for entry in again.state.log_history if "task_loss" in entry]
    assert entries[1]["guidance_weight_first"] == 0
    assert entries[0].keys() >= {"guidance_loss_first", "guidance_loss_self"}
    assert "guidance_loss_prev" not in entries[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"guidance_schedule": {"syntax": "cosine"}},
            "guidance_schedule of 'syntax' must be one of linear, hold_linear",
        ),
        ({"guidance_schedule": ["hold"]}, r"guidance_schedule must be one of .*, hold, got \['hold'\]"),
        ({"guidance_schedule": '{"syntax": "hold"'}, 'guidance_schedule={"syntax": "hold" is not valid JSON'),
        ({"guidance_schedule": "hold"}, "guidance_schedule='hold' needs guidance_hold_steps, .* got 0"),
        ({"guidance_schedule": {"why": "hold"}}, "guidance_schedule='hold' of 'why' needs guidance_hold_steps"),
        (
            {"guidance_schedule": {"why": "hold"}, "guidance_hold_steps": {"prev": 3, "why": 2}},
            "guidance_hold_steps=3 of 'prev' needs guidance_schedule='hold_linear' or 'hold', got {'why': 'hold'}",
        ),
        (
            {"guidance_hold_steps": 3},
            "guidance_hold_steps=3 needs guidance_schedule='hold_linear' or 'hold', got 'lin",
        ),
        (
            {"guidance_schedule": "hold", "guidance_hold_steps": {"why": -1}},
            "guidance_hold_steps of 'why' must be at least 0, got -1",
        ),
        (
            {"guidance_schedule": "hold", "guidance_hold_steps": {"why": "few"}},
            "guidance_hold_steps of 'why' must be a number, got 'few'",
        ),
        (
            {"guidance_schedule": "hold", "guidance_hold_steps": {"why": 1.5}},
            "guidance_hold_steps of 'why' must be an integer, got 1.5",
        ),
    ],
)
def test_impossible_schedules_are_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        had.HeadwiseTrainingArguments(str(tmp_path), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"guidance_schedule": {"next": "constant"}},
            "guidance_schedule={'next': 'constant'} names 'next', but heads are guided to prev, syntax, why",
        ),
        (
            {"guidance_schedule": "hold", "guidance_hold_steps": {"tree": 3}},
            "guidance_hold_steps={'tree': 3} names 'tree', but heads are guided to prev, syntax, why",
        ),
        (
            {"guidance_schedule": "hold", "guidance_hold_steps": {"why": 3, "prev": 3}},
            "guidance_schedule='hold' of 'syntax' needs guidance_hold_steps",
        ),
    ],
)
def test_schedules_for_other_names_are_refused_before_training(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, build(guidance=guidance_to_targets()), with_targets("MaskedLM"), **settings)


def test_a_model_that_is_not_guided_needs_no_names(tmp_path):
    run = trainer(tmp_path, build(guidance=None), with_targets("MaskedLM"), guidance_weight=0, **SCHEDULES["roberta"])
    run.train()
    assert run.state.global_step == 1


def test_dictionaries_may_be_json(tmp_path):
    as_json = {name: json.dumps(value) for name, value in SCHEDULES["roberta"].items()}
    arguments = had.HeadwiseTrainingArguments(str(tmp_path), use_cpu=True, **as_json)
    assert {name: getattr(arguments, name) for name in as_json} == SCHEDULES["roberta"]
    assert json.loads(arguments.to_json_string())["guidance_schedule"] == SCHEDULES["roberta"]["guidance_schedule"]
    again = had.HeadwiseTrainingArguments(
        str(tmp_path), use_cpu=True, guidance_schedule=None, guidance_hold_steps=None
    )
    assert (again.guidance_schedule, again.guidance_hold_steps) == ("linear", 0)


@pytest.mark.parametrize("kind", [had.HeadwiseTrainingArguments, had.HeadwiseSeq2SeqTrainingArguments])
def test_recipes_take_dictionaries_from_yaml_and_as_flags(tmp_path, kind):
    file = tmp_path / "run.yaml"
    file.write_text("guidance_schedule: {syntax: hold}\nguidance_hold_steps: {syntax: 2}\nuse_cpu: true\n")
    (arguments,) = parse_yaml_or_flags(kind, argv=[str(file)])
    assert (arguments.guidance_schedule, arguments.guidance_hold_steps) == ({"syntax": "hold"}, {"syntax": 2})
    flags = ["--guidance_schedule", '{"why": "hold_linear"}', "--guidance_hold_steps", "3"]
    (arguments,) = parse_yaml_or_flags(kind, argv=[str(file), *flags])
    assert (arguments.guidance_schedule, arguments.guidance_hold_steps) == ({"why": "hold_linear"}, 3)
    (arguments,) = parse_yaml_or_flags(kind, argv=["--use_cpu"])
    assert (arguments.guidance_schedule, arguments.guidance_hold_steps) == ("linear", 0)
