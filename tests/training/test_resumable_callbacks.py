# Licensed under the Apache License, Version 2.0.
"""Whatever callbacks remember over a run, they remember of that run alone, however it begins, goes on and ends."""

import pytest
import torch
from tiny_training import build, collate, examples, trainer
from transformers import TrainerCallback

from hf_attn_dynamics import CheckpointCallback, GateHistory, HeadConfidence, HeadDynamicsCallback
from hf_attn_dynamics.training import checkpoint_damage


DATA = examples("SequenceClassification")
SAVED = {
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 1,
    "guidance_weight": None,
    "gate_penalty": 0.1,
    # Gates have moved by half of what counts after the first step, and by a little more than that after the last.
    "gate_learning_rate": 0.03,
}


def size_of(model):
    return {"size": torch.nn.utils.parameters_to_vector(model.parameters()).norm().item()}


CALLBACKS = {
    HeadDynamicsCallback: lambda: HeadDynamicsCallback([HeadConfidence([])], [collate(DATA.to_list())], every=2),
    CheckpointCallback: lambda: CheckpointCallback([0, 2], size_of),
    GateHistory: lambda: GateHistory(every=2),
}
each_callback = pytest.mark.parametrize("kind", CALLBACKS, ids=lambda kind: kind.__name__)


def record_of(callback):
    """What was seen, by step."""
    match callback:
        case HeadDynamicsCallback():
            return {step: scores["encoder"].tolist() for step, scores in callback.history.of("gate_open").items()}
        case CheckpointCallback():
            return {entry["step"]: entry["size"] for entry in callback.history}
        case GateHistory():
            return dict(zip(callback.steps, callback.log_alpha["encoder"], strict=True))


def prepared(folder, callbacks=(), **settings):
    # An evaluation draws a number, which dropout would go on from.
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = build("SequenceClassification", guidance=None, gates={}, **still)
    return trainer(folder, model, DATA, DATA, list(callbacks), **{**SAVED, "learning_rate": 1e-2, **settings})


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Folder of a run with a checkpoint at each step, and without a callback."""
    folder = tmp_path_factory.mktemp("bare")
    prepared(folder).train()
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What each callback has recorded of that run."""
    callbacks = {kind: make() for kind, make in CALLBACKS.items()}
    prepared(tmp_path_factory.mktemp("plain"), callbacks.values()).train()
    return {kind: record_of(callback) for kind, callback in callbacks.items()}


@pytest.mark.parametrize("settings", [{"load_best_model_at_end": True}, {"eval_on_start": True}], ids=list)
@each_callback
def test_evaluations_and_the_best_weights_change_no_record(tmp_path, caplog, plain, kind, settings):
    callback = CALLBACKS[kind]()
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score", **settings}
    made = prepared(tmp_path, [callback], **evaluated)
    scores = iter([3, 2, 1, 0])
    made.compute_metrics = lambda _: {"score": next(scores)}
    made.train()
    assert record_of(callback) == plain[kind]
    assert list(plain[kind]) == [0, 2, 3]
    assert "no gate has moved" not in caplog.text


@pytest.mark.parametrize("best", [False, True])
@each_callback
def test_a_run_that_is_stopped_early_ends_with_a_record_unless_its_weights_are_gone(tmp_path, kind, best):
    class Stop(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_training_stop = True

    callback = CALLBACKS[kind]()
    prepared(tmp_path, [callback, Stop()], eval_strategy="steps", eval_steps=1, load_best_model_at_end=best).train()
    assert list(record_of(callback)) == ([0] if best else [0, 1])


@each_callback
def test_a_run_that_is_resumed_with_a_new_callback_is_recorded_from_there_on(tmp_path, bare, kind):
    callback = CALLBACKS[kind]()
    prepared(tmp_path / "earlier", [callback], max_steps=1).train()
    assert list(record_of(callback)) == [0, 1]
    prepared(tmp_path / "resumed", [callback]).train(resume_from_checkpoint=str(bare / "checkpoint-1"))
    assert list(record_of(callback)) == [2, 3]
    assert checkpoint_damage(tmp_path / "resumed/checkpoint-3") is None


def test_a_run_that_is_resumed_with_a_number_of_heads_instead_of_a_price_goes_on(tmp_path, bare):
    made = prepared(tmp_path, target_heads=3, gate_penalty=0)
    made.train(resume_from_checkpoint=str(bare / "checkpoint-1"))
    assert checkpoint_damage(tmp_path / "checkpoint-3") is None
    assert sum(int(gate.settled().ne(0).sum()) for gate in made.model.head_gates().values()) == 3


@each_callback
def test_a_trainer_that_would_build_a_callback_anew_is_refused_also_when_it_gets_it_later(tmp_path, kind):
    message = f"restore_callback_states_from_checkpoint=True would build {kind.__name__} again"
    settings = {"restore_callback_states_from_checkpoint": True, "gate_penalty": 0}
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, [CALLBACKS[kind]()], **settings)
    model = build("SequenceClassification", guidance=None)
    made = trainer(tmp_path, model, DATA, **{**SAVED, **settings})
    made.add_callback(CALLBACKS[kind]())
    with pytest.raises(ValueError, match=message):
        made.train()


@pytest.mark.parametrize("pressure", [{"gate_penalty": 0.1}, {"gate_penalty": 0, "target_heads": 3}])
def test_a_trainer_that_would_build_the_drivers_of_gates_anew_is_refused(tmp_path, pressure):
    with pytest.raises(ValueError, match="restore_callback_states_from_checkpoint=True would build GateWatch again"):
        prepared(tmp_path, restore_callback_states_from_checkpoint=True, **pressure)
