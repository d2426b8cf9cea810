# Licensed under the Apache License, Version 2.0.
"""Learning rates fall from the last layer to the embeddings, and nothing else changes."""

import pytest
import torch
from tiny_training import build, examples, trainer
from torch import nn

from hf_attn_dynamics import HeadwiseTrainingArguments
from hf_attn_dynamics.training import layer_factors


DATA = examples("SequenceClassification")
GATE_RATE = 0.05


def layer_of(name, layers):
    """Number of the layer that a parameter of a tiny RoBERTa or BERT is of: -1 below, the last one above."""
    if ".layer." in name:
        return int(name.partition(".layer.")[2].partition(".")[0])
    return -1 if "embeddings" in name else layers - 1


@pytest.mark.parametrize("kind", ["roberta", "bert", "electra"])
def test_each_layer_has_the_rate_of_the_next_one_times_the_decay(kind):
    model = build("SequenceClassification", kind, guidance=None)
    layers = model.config.num_hidden_layers
    factors = layer_factors(model, 0.5)
    assert factors.keys() == {name for name, _ in model.named_parameters()}
    assert layers > 1
    for name, factor in factors.items():
        assert factor == 0.5 ** (layers - 1 - layer_of(name, layers)), name


def steps_of(folder, decay, **settings):
    """How far a step of plain gradient descent moves each parameter."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = build("SequenceClassification", guidance=None, gates={}, **still)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "guidance_weight": None}
    settings = {"learning_rate": 1.0, "gate_learning_rate": GATE_RATE, "weight_decay": 0.1, **plain, **settings}
    run = trainer(folder, model, DATA, layer_rate_decay=decay, **settings)
    run.train()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}, run


def test_steps_are_as_much_smaller_and_those_of_gates_are_not(tmp_path):
    whole, _ = steps_of(tmp_path, 1.0)
    falling, run = steps_of(tmp_path, 0.5)
    factors = layer_factors(run.model, 0.5)
    for name, step in whole.items():
        factor = 1.0 if name.endswith("log_alpha") else factors[name]
        torch.testing.assert_close(falling[name], factor * step, rtol=1e-4, atol=1e-7, msg=name)
    assert len(set(factors.values())) == run.model.config.num_hidden_layers + 1
    # What is logged is the rate of the last layer.
    assert run.state.log_history[0]["learning_rate"] == 1.0
    decayed = {id(p): group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"]}
    for name, p in run.model.named_parameters():
        assert decayed[id(p)] == (0.1 if p.ndim == 2 else 0.0), name


def test_all_rates_follow_the_schedule(tmp_path):
    _, run = steps_of(tmp_path, 0.5, lr_scheduler_type="linear", max_steps=4)
    rates = {group["initial_lr"]: group["lr"] for group in run.optimizer.param_groups}
    assert len(rates) == run.model.config.num_hidden_layers + 2
    assert set(rates.values()) == {0.0}


def test_a_resumed_run_ends_like_one_that_was_not_stopped(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2}
    _, whole = steps_of(tmp_path / "whole", 0.5, **saved)
    model = build("SequenceClassification", guidance=None, gates={}, seed=1)
    settings = {"gate_learning_rate": GATE_RATE, "weight_decay": 0.1, "guidance_weight": None, "max_grad_norm": 0.0}
    again = trainer(
        tmp_path / "again", model, DATA, layer_rate_decay=0.5, lr_scheduler_type="constant", **settings, **saved
    )
    again.model.config.hidden_dropout_prob = again.model.config.attention_probs_dropout_prob = 0.0
    for module in again.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, found), expected in zip(again.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_a_second_training_goes_on_with_the_same_rates(tmp_path):
    settings = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1, "guidance_weight": None}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    trained = []
    for times in (1, 2):
        model = build("SequenceClassification", guidance=None, **still)
        run = trainer(tmp_path, model, DATA, layer_rate_decay=0.5, max_steps=2 // times, **settings)
        for _ in range(times):
            run.train()
        trained.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*trained)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (build("Translation", "marian", guidance=None), "several stacks"),
        (nn.Linear(2, 2), "no stack"),
    ],
    ids=["two stacks", "no stack"],
)
def test_models_without_one_stack_of_layers_are_refused(model, found):
    message = f"layer_rate_decay needs one stack of layers, but {type(model).__name__} has {found}; set it to 1"
    with pytest.raises(ValueError, match=message):
        layer_factors(model, 0.5)


def test_they_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="HeadwiseMarianMTModel has several stacks"):
        trainer(tmp_path, build("Translation", "marian", guidance=None), None, layer_rate_decay=0.5, guidance_weight=0)


def test_an_optimizer_of_the_user_has_rates_of_its_own(tmp_path):
    model = build("SequenceClassification", guidance=None)
    run = trainer(tmp_path, model, DATA, layer_rate_decay=0.5, guidance_weight=None)
    run.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"layer_rate_decay=0.5 has no effect on the optimizer"):
        run.train()


@pytest.mark.parametrize("decay", [0.0, 1.1, float("nan")])
def test_decays_that_are_none_are_refused(tmp_path, decay):
    with pytest.raises(ValueError, match="layer_rate_decay must be above 0 and at most 1, got "):
        HeadwiseTrainingArguments(str(tmp_path), layer_rate_decay=decay)
