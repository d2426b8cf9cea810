# Licensed under the Apache License, Version 2.0.
"""With `ema_decay`, what is evaluated, saved and returned is the average of what is trained, as if made by hand."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import build, examples, trainer
from torch import nn
from transformers import TrainerCallback

from hf_attn_dynamics import HeadwiseTrainer, HeadwiseTrainingArguments
from hf_attn_dynamics.training import checkpoint_damage
from hf_attn_dynamics.training.weight_average import TRAINED_WEIGHTS, WeightAverage


DATA = examples("SequenceClassification")
DECAY = 0.25  # above that of the first two steps, 2/11 and 3/12, and below that of later ones


class TrainedWeights(TrainerCallback):
    """The weights that are trained, at the start and after each step."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen.append({name: p.detach().clone() for name, p in model.named_parameters()})

    def on_step_end(self, *args, **kwargs):
        self.on_train_begin(*args, **kwargs)

    def averages(self, decay):
        """The average at the start and after each step, one weight after another."""
        averages = [{name: value.double() for name, value in self.seen[0].items()}]
        for step, weights in enumerate(self.seen[1:], 1):
            d = min(decay, (1 + step) / (10 + step))
            averages.append(
                {name: d * averages[-1][name] + (1 - d) * value.double() for name, value in weights.items()}
            )
        return [{name: a.to(self.seen[0][name].dtype) for name, a in weights.items()} for weights in averages]


def prepared(folder, decay=DECAY, callbacks=(), model=None, **settings):
    model = model or build("SequenceClassification", guidance=None)
    settings = {"max_steps": 4, "guidance_weight": None, "learning_rate": 1e-2, "ema_decay": decay, **settings}
    return trainer(folder, model, DATA, DATA, list(callbacks), **settings)


def weights_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **{"rtol": 0, "atol": 0, **tolerance}, msg=name)


CLOSE = {"rtol": 1e-6, "atol": 1e-7}
# What lies between two numbers of half precision may be rounded to either.
TOLERANCES = {torch.float32: CLOSE, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-7}}
OFTEN = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


def test_the_first_averages_are_short_and_later_ones_have_the_decay():
    weight = nn.Parameter(torch.tensor([8.0]))
    average = WeightAverage({"weight": weight}, 0.5)
    expected = 8.0
    for step, value in enumerate([0.0, 4.0, -2.0, 1.0, 6.0, 3.0, 5.0, 9.0, 2.0], 1):
        with torch.no_grad():
            weight.fill_(value)
        average.update(step)
        d = [2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17, 0.5, 0.5][step - 1]
        expected = d * expected + (1 - d) * value
        with average.applied() as trained:
            assert weight.item() == pytest.approx(expected, rel=1e-6)
            assert trained["weight"].item() == value
        assert weight.item() == value
    average.apply()
    assert weight.item() == pytest.approx(expected, rel=1e-6)


def test_small_steps_are_not_lost_in_half_precision():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    average = WeightAverage({"weight": weight}, 0.999)
    with torch.no_grad():
        weight.fill_(2.0)
    for step in range(9_000, 10_500):
        average.update(step)  # by 0.001, where the next number is 1.0078
    average.apply()
    assert weight.item() == pytest.approx(2 - 0.999**1500, abs=2**-8)


def test_what_is_trained_comes_back_after_an_error():
    weight = nn.Parameter(torch.tensor([8.0]))
    average = WeightAverage({"weight": weight}, 0.5)
    with torch.no_grad():
        weight.fill_(1.0)
    with pytest.raises(KeyError), average.applied():
        raise KeyError
    assert weight.item() == 1.0


@pytest.fixture(scope="module", params=TOLERANCES, ids=str)
def dtype(request):
    return request.param


def untrained(dtype):
    return build("SequenceClassification", guidance=None).to(dtype)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, dtype):
    """A run with an evaluation and a checkpoint after each step, and the weights that it trained."""
    folder, watch = tmp_path_factory.mktemp("averaged"), TrainedWeights()
    run = prepared(folder, callbacks=[watch], model=untrained(dtype), **OFTEN)
    run.train()
    return run, watch


def test_the_model_that_is_returned_has_the_average(averaged):
    run, watch = averaged
    close = TOLERANCES[run.model.dtype]
    assert_same(weights_of(run.model), watch.averages(DECAY)[-1], **close)
    assert max((watch.seen[-1][name] - p).abs().max() for name, p in weights_of(run.model).items()) > 1e-3


def test_evaluations_and_checkpoints_are_of_the_average(averaged):
    run, watch = averaged
    close = TOLERANCES[run.model.dtype]
    losses = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    for step, (loss, weights) in enumerate(zip(losses, watch.averages(DECAY)[1:], strict=True), 1):
        folder = f"{run.args.output_dir}/checkpoint-{step}"
        saved = type(run.model).from_pretrained(folder)
        assert_same(weights_of(saved), weights, **close)
        assert prepared(run.args.output_dir, 0, model=saved).evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
        beside = load_file(f"{folder}/{TRAINED_WEIGHTS}")
        assert_same({name: beside[name] for name in watch.seen[step]}, watch.seen[step])
        assert (len(beside) > len(watch.seen[step])) == (run.model.dtype == torch.bfloat16)
        assert checkpoint_damage(folder) is None
    # Now the model has the average, which is evaluated and saved as it is.
    assert run.evaluate()["eval_loss"] == pytest.approx(losses[-1], rel=1e-6)


def test_what_is_trained_is_the_same_as_without_averaging(averaged, dtype, tmp_path):
    _, watch = averaged
    bare = TrainedWeights()
    prepared(tmp_path, 0.0, [bare], untrained(dtype), **OFTEN).train()
    for found, expected in zip(watch.seen, bare.seen, strict=True):
        assert_same(found, expected)


def test_a_resumed_run_ends_like_one_that_was_not_stopped(averaged, tmp_path):
    run, _ = averaged
    again = prepared(tmp_path, model=untrained(run.model.dtype), **OFTEN)
    again.train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-2")
    assert_same(weights_of(again.model), weights_of(run.model))


def test_a_second_training_begins_an_average_of_its_own(tmp_path):
    model, watch = build("SequenceClassification", guidance=None, seed=1), TrainedWeights()
    run = prepared(tmp_path, callbacks=[watch], model=model, max_steps=2)
    run.train()
    watch.seen.clear()
    run.train()
    assert_same(weights_of(model), watch.averages(DECAY)[-1], **CLOSE)


def test_a_model_saved_after_training_is_the_one_that_is_returned(averaged, tmp_path):
    run, _ = averaged
    run.save_model(tmp_path)
    assert_same(weights_of(type(run.model).from_pretrained(tmp_path)), weights_of(run.model))
    assert not (tmp_path / TRAINED_WEIGHTS).exists()


def test_a_push_during_training_saves_to_the_folder_of_the_run(averaged):
    run, _ = averaged
    # As `push_to_hub` of the stock trainer does.
    run.save_model(_internal_call=True)
    assert_same(weights_of(type(run.model).from_pretrained(run.args.output_dir)), weights_of(run.model))


def test_the_best_model_is_the_average_that_was_best(tmp_path):
    # The first one, since the loss falls.
    worst = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    run = prepared(tmp_path, **OFTEN, **worst)
    run.train()
    step = run.state.best_global_step
    assert step < 4
    best = type(run.model).from_pretrained(tmp_path / f"checkpoint-{step}")
    assert_same(weights_of(run.model), weights_of(best))


def test_gates_are_as_they_were_trained_and_as_many_open_as_asked(tmp_path):
    model = build("SequenceClassification", guidance=None, gates={})
    watch = TrainedWeights()
    run = prepared(tmp_path, 0.9, [watch], model, target_heads=3, save_strategy="steps", save_steps=4)
    run.train()
    gates = model.head_gates().values()
    assert sum(int(gate.settled().ne(0).sum()) for gate in gates) == 3
    is_gate = {name: name.endswith("log_alpha") for name in watch.seen[0]}
    assert any(is_gate.values())
    expected = watch.averages(0.9)[-1]
    found, saved = weights_of(model), weights_of(type(model).from_pretrained(tmp_path / "checkpoint-4"))
    for weights in (found, saved):
        assert_same(
            {name: value for name, value in weights.items() if not is_gate[name]},
            {name: value for name, value in expected.items() if not is_gate[name]},
            **CLOSE,
        )
        for name in filter(is_gate.get, is_gate):
            assert torch.equal(weights[name], found[name])
    assert not any(is_gate[name] for name in load_file(tmp_path / "checkpoint-4" / TRAINED_WEIGHTS))


def test_frozen_parameters_are_left_alone(tmp_path):
    model = build("SequenceClassification", guidance=None)
    model.get_input_embeddings().requires_grad_(False)
    run = prepared(tmp_path, model=model, max_steps=1, save_strategy="steps", save_steps=1)
    run.train()
    names = load_file(tmp_path / "checkpoint-1" / TRAINED_WEIGHTS).keys()
    assert set(names) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_run_that_fails_has_what_it_trained(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyError("stop")

    watch = TrainedWeights()
    run = prepared(tmp_path, callbacks=[watch, Fails()])
    with pytest.raises(KeyError):
        run.train()
    assert_same(weights_of(run.model), watch.seen[-1])
    run.evaluate()
    assert_same(weights_of(run.model), watch.seen[-1])


def test_a_checkpoint_with_averages_is_not_resumed_without(averaged, tmp_path):
    run, _ = averaged
    with pytest.raises(ValueError, match=r"checkpoint-2 has averaged weights, but ema_decay is 0.0: resume"):
        prepared(tmp_path, 0.0).train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-2")


def test_a_checkpoint_without_averages_is_not_resumed_with_some(tmp_path):
    prepared(tmp_path, 0.0, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=r"checkpoint-1 has no averaged weights, but ema_decay is 0.25"):
        prepared(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_of_the_model_only_has_the_average_alone(tmp_path):
    run = prepared(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, save_only_model=True)
    run.train()
    assert not list(tmp_path.rglob(TRAINED_WEIGHTS))
    assert_same(weights_of(type(run.model).from_pretrained(tmp_path / "checkpoint-1")), weights_of(run.model))
    with pytest.raises(ValueError, match="start a new run from its model .as after save_only_model=True"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_of_other_parameters_is_refused(averaged, tmp_path):
    run, _ = averaged
    model = build("SequenceClassification", guidance=None)
    model.get_input_embeddings().requires_grad_(False)
    with pytest.raises(
        ValueError, match=f"{TRAINED_WEIGHTS} belongs to another model.*: roberta.embeddings.word_embeddings"
    ):
        prepared(tmp_path, model=model).train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-2")


def test_a_run_that_trains_gates_alone_is_not_averaged(tmp_path):
    model = build("SequenceClassification", guidance=None, gates={}).requires_grad_(False)
    for gate in model.head_gates().values():
        gate.requires_grad_(True)
    run = trainer(tmp_path, model, examples("SequenceClassification"), guidance_weight=None, ema_decay=0.9)
    with pytest.raises(ValueError, match=r"ema_decay=0.9, but HeadwiseRoberta\w+ has no trained parameters"):
        run.train()


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_decays_that_are_none_are_refused(tmp_path, decay):
    with pytest.raises(ValueError, match="ema_decay must be at least 0 and below 1, got "):
        HeadwiseTrainingArguments(str(tmp_path), ema_decay=decay)


def test_weights_that_are_spread_over_processes_are_refused(tmp_path, monkeypatch):
    original = HeadwiseTrainer.create_accelerator_and_postprocess

    def spread(self):
        original(self)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(HeadwiseTrainer, "create_accelerator_and_postprocess", spread)
    with pytest.raises(ValueError, match=r"ema_decay=0.25 does not support weights sharded by FSDP or DeepSpeed"):
        prepared(tmp_path)
