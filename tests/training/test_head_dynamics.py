import copy
import math
import random
import shutil

import numpy as np
import pytest
import torch
from tiny_training import build, collate, examples, trainer
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hf_attn_dynamics import HeadDynamicsCallback, HeadScores, HeadTimeline, Observer, observe, prune_heads
from hf_attn_dynamics.analysis.observers.base import HeadMeans
from hf_attn_dynamics.training.head_dynamics import gate_scores


TASKS = {"roberta": "MaskedLM", "electra": "ReplacedTokens", "marian": "Translation"}


class Highest(Observer):
    """Mean of the highest weight of each row."""

    name = "highest"

    def __init__(self):
        self.means = HeadMeans("Highest")

    def update(self, call):
        self.means.add(call, call.weights.amax(-1))

    def compute(self):
        return self.means.compute()


class Several(Highest):
    """A result of several tables."""

    name = "several"

    def compute(self):
        scores = super().compute()
        return type("Tables", (), {"head_scores": lambda self: {"one": scores, "other": scores}})()


class Words(Highest):
    name = "words"

    def compute(self):
        return "a word"


class Restless(Highest):
    """Draws random numbers of every kind."""

    def update(self, call):
        super().update(call)
        torch.rand(3), random.random(), np.random.rand(3)


def probe(task="MaskedLM", count=6):
    rows = examples(task, count).to_list()
    return [collate(rows[:4]), collate(rows[4:])]


def by_hand(model, task="MaskedLM"):
    with torch.no_grad(), observe(model, Highest()) as seen:
        for batch in probe(task):
            model(**batch)
    return seen.highest


def run(folder, callback=None, kind="roberta", model=None, **settings):
    task = TASKS[kind]
    model = model or build(task, kind)
    made = trainer(
        folder,
        model,
        examples(task, 12),
        callbacks=[callback] if callback else None,
        **{"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2, **settings},
    )
    made.train()
    return made


def losses(made):
    own = ("loss", "grad_norm", "task_loss", "guidance_loss", "gate_penalty", "guidance_weight", "eval_loss")
    entries = [{name: entry[name] for name in own if name in entry} for entry in made.state.log_history]
    return [entry for entry in entries if entry]


ALL_GATES = {"marian": {"encoder": {}, "decoder": {}, "cross": {}}}


@pytest.mark.parametrize("kind", TASKS)
def test_training_goes_on_as_if_nothing_had_happened(tmp_path, kind):
    settings = {"gradient_accumulation_steps": 2, "activation_checkpointing": True, "per_device_train_batch_size": 2}
    settings |= {"gate_penalty": 0.1, "max_steps": 4}
    runs = []
    for callback in (None, HeadDynamicsCallback([Restless()], probe(TASKS[kind]), every=1)):
        torch.manual_seed(7)
        model = build(TASKS[kind], kind, gates=ALL_GATES.get(kind, {}))
        made = run(tmp_path / str(callback is None), callback, kind, model, **settings)
        runs.append((losses(made), made.model.state_dict(), torch.rand(3), random.getstate(), np.random.rand(3)))
    (plain, weights, *drawn), (watched, same_weights, *same_drawn) = runs
    assert len(plain) == 4
    assert plain == watched
    assert all(torch.equal(weight, same_weights[name]) for name, weight in weights.items())
    assert torch.equal(drawn[0], same_drawn[0])
    assert drawn[1] == same_drawn[1]
    assert (drawn[2] == same_drawn[2]).all()


def test_the_first_and_the_last_measurement_are_those_of_the_models_at_both_ends(tmp_path):
    callback = HeadDynamicsCallback([Highest()], probe(), every=4)
    model = build()
    before = by_hand(model)
    made = run(tmp_path, callback, model=model)
    measured = callback.history.of("highest")
    assert list(measured) == [0, 4, 6]
    assert measured[0] == before
    assert measured[6] == by_hand(made.model)
    assert measured[4] != measured[6] != measured[0]
    # At step 4 it is that of a run of the same schedule that has got so far.
    stopped = run(tmp_path / "again", model=build(), save_strategy="steps", save_steps=4)
    at_four = type(stopped.model).from_pretrained(tmp_path / "again/checkpoint-4")
    assert measured[4] == by_hand(at_four)


def test_the_stock_trainer_is_watched_too(tmp_path):
    config = BertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    )
    data, results = examples("SequenceClassification"), []
    for watched in (False, True):
        torch.manual_seed(0)
        callback = HeadDynamicsCallback([Highest()], probe("SequenceClassification"), every=2)
        args = TrainingArguments(str(tmp_path), max_steps=4, report_to="none", use_cpu=True, save_strategy="no",
                                 disable_tqdm=True, logging_steps=1)  # fmt: skip
        callbacks = [callback] if watched else None
        made = Trainer(
            BertForSequenceClassification(config), args, data_collator=collate, train_dataset=data, callbacks=callbacks
        )
        made.train()
        results.append(losses(made))
    assert results[0] == results[1]
    assert list(callback.history.of("highest")) == [0, 2, 4]
    assert callback.history.of("highest")[4] == by_hand(made.model, "SequenceClassification")


def test_the_file_and_the_log_have_what_the_history_has(tmp_path):
    callback = HeadDynamicsCallback([Highest(), Several()], probe("Translation"), every=3)
    made = run(tmp_path / "run", callback, "marian")
    assert HeadTimeline.load(tmp_path / "run/head_dynamics.csv") == callback.history
    assert callback.history.statistics == ["highest", "several/one", "several/other", "guidance_weight"]
    entries = [entry for entry in made.state.log_history if "heads/seconds" in entry]
    assert [entry["step"] for entry in entries] == [0, 3, 6]
    for entry in entries:
        for kind, table in callback.history.of("highest")[entry["step"]].items():
            assert entry[f"heads/highest/{kind}"] == entry[f"heads/several/one/{kind}"] == table.mean().item()
    assert callback.seconds == pytest.approx(sum(entry["heads/seconds"] for entry in entries))
    assert callback.seconds > 0


def test_another_folder_and_another_log_are_taken(tmp_path):
    logged = []
    callback = HeadDynamicsCallback([Highest()], probe(), every=9, folder=tmp_path / "there", log=logged.append)
    made = run(tmp_path / "run", callback)
    assert (tmp_path / "there/head_dynamics.csv").is_file()
    assert not (tmp_path / "run/head_dynamics.csv").exists()
    assert [set(entry) for entry in logged] == [{"heads/highest/encoder", "heads/seconds"}] * 2
    assert not any("heads/seconds" in entry for entry in made.state.log_history)


def test_the_log_of_the_trainer_keeps_its_own_entries(tmp_path):
    plain = run(tmp_path / "plain", logging_steps=2)
    made = trainer(tmp_path / "run", build(), examples("MaskedLM", 12), max_steps=6, per_device_train_batch_size=4,
                   learning_rate=1e-2, logging_steps=2)  # fmt: skip
    made.add_callback(HeadDynamicsCallback([Highest()], probe(), every=2, log=made.log))
    made.train()
    assert [entry["step"] for entry in made.state.log_history if "heads/seconds" in entry] == [0, 2, 4, 6]
    assert losses(made)[:3] == losses(plain)[:3]


def test_the_weight_of_guidance_is_the_trainers(tmp_path):
    callback = HeadDynamicsCallback([Highest()], probe(), every=2)
    run(tmp_path, callback, guidance_weight=2.0, logging_steps=2)
    # Linear, from 2 at step 0 to 0 at step 5, the last of six; logged are steps 1, 3 and 5.
    assert callback.history.of("guidance_weight") == pytest.approx({2: 2 * 4 / 5, 4: 2 * 2 / 5, 6: 0})
    run(tmp_path, callback, guidance_weight="auto", guidance_schedule={"next": "constant"}, logging_steps=2)
    names = ("next", "prev", "first", "period")
    assert callback.history.statistics == ["highest", *(f"guidance_weight_{name}" for name in names)]
    constant, linear = (list(callback.history.of(f"guidance_weight_{name}").values()) for name in names[:2])
    assert constant[0] == constant[-1] > linear[0] > linear[-1] == 0
    run(tmp_path, callback, model=build(guidance=None), guidance_weight=0)
    assert callback.history.statistics == ["highest"]


def test_gates_are_recorded_as_they_stand_under_the_numbers_of_their_heads(tmp_path):
    model = prune_heads(build(guidance=None, gates={}, num_attention_heads=4), {1: [2]})
    model.head_gates()["encoder", 0].log_alpha.data = torch.tensor([3.0, -3.0, 0.0, 0.5])
    state = gate_scores(model)
    # P(gate ≠ 0) = σ(φ + T·ln(ζ/−γ)), with T = 0.33, γ = −0.1 and ζ = 1.1.
    expected = [1 / (1 + math.exp(-phi - 0.33 * math.log(11))) for phi in (3.0, -3.0, 0.0, 0.5)]
    assert state["gate_open"]["encoder"][0].tolist() == pytest.approx(expected)
    assert state["gate"]["encoder"][0].tolist() == [1, 0, 0, 1]
    assert state["gate"]["encoder"][1].isnan().tolist() == [False, False, True, False]
    callback = HeadDynamicsCallback([Highest()], probe(), every=2)
    made = run(tmp_path, callback, model=model, guidance_weight=0, target_heads=2, max_steps=4)
    assert callback.history.of("gate_open")[0] == state["gate_open"]
    assert callback.history.of("gate")[4] == gate_scores(made.model)["gate"]
    # As they are settled when training ends.
    assert callback.history.of("gate")[4]["encoder"].nansum() == 2
    assert callback.history.of("highest")[4]["encoder"].isnan().nonzero().tolist() == [[1, 2]]


def test_a_model_without_gates_has_no_state_of_them():
    assert gate_scores(build()) == {}


RESUMABLE = {
    "save_strategy": "steps",
    "save_steps": 1,
    "gate_penalty": 0.1,
    "guidance_weight": "auto",
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and timeline of a run with a checkpoint at each step."""
    folder, callback = tmp_path_factory.mktemp("whole"), HeadDynamicsCallback([Highest()], probe(), every=2)
    run(folder, callback, model=build(gates={}), **RESUMABLE)
    return folder, callback.history


@pytest.mark.parametrize("stop", [2, 3, 6])
def test_a_resumed_run_has_the_timeline_of_one_that_was_never_stopped(tmp_path, whole, stop):
    folder, history = whole
    # Its table has rows that are later than the checkpoint.
    shutil.copytree(folder, tmp_path / "stopped")
    callback = HeadDynamicsCallback([Highest()], probe(), every=2)
    made = trainer(tmp_path / "stopped", build(gates={}, seed=5), examples("MaskedLM", 12), callbacks=[callback],
                   max_steps=6, learning_rate=1e-2, **RESUMABLE)  # fmt: skip
    made.train(resume_from_checkpoint=str(tmp_path / f"stopped/checkpoint-{stop}"))
    assert callback.history == history
    assert (tmp_path / "stopped/head_dynamics.csv").read_bytes() == (folder / "head_dynamics.csv").read_bytes()
    entries = [entry for entry in made.state.log_history if "heads/seconds" in entry]
    assert [entry["step"] for entry in entries] == [0, 2, 4, 6]
    assert callback.seconds == pytest.approx(sum(entry["heads/seconds"] for entry in entries))


def test_a_run_that_began_without_it_is_watched_from_where_it_is_resumed(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3}
    run(tmp_path, **settings)
    callback = HeadDynamicsCallback([Highest()], probe(), every=4)
    made = trainer(tmp_path, build(), examples("MaskedLM", 12), callbacks=[callback], max_steps=6,
                   per_device_train_batch_size=4, learning_rate=1e-2, **settings)  # fmt: skip
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert list(callback.history.of("highest")) == [4, 6]


def test_training_over_again_starts_a_new_timeline(tmp_path):
    callback = HeadDynamicsCallback([Highest()], probe(), every=3)
    made = run(tmp_path, callback)
    first = callback.history
    made.train()
    assert list(callback.history.of("highest")) == [0, 3, 6]
    assert callback.history.of("highest")[0] == first.of("highest")[6]


def test_heads_are_measured_in_the_precision_of_training(tmp_path):
    callback = HeadDynamicsCallback([Highest()], probe(), every=9)
    made = run(tmp_path, callback, bf16=True, max_steps=2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = by_hand(build())
    assert callback.history.of("highest")[0] == expected
    assert callback.history.of("highest")[0] != by_hand(build())
    assert next(made.model.parameters()).dtype == torch.float32


def test_a_wrapped_model_is_unwrapped(tmp_path):
    callback, model = HeadDynamicsCallback([Highest()], probe(), every=9), build()
    args = trainer(tmp_path, model, None).args
    state = trainer(tmp_path, model, None).state
    callback.on_step_begin(args, state, None, model=torch.nn.DataParallel(model))
    assert callback.history.of("highest")[0] == by_hand(model)


def test_only_the_main_process_writes(tmp_path):
    callback, made = HeadDynamicsCallback([Highest()], probe()), trainer(tmp_path, build(), None)
    made.state.is_world_process_zero = False
    callback.on_step_begin(made.args, made.state, None, model=made.model)
    assert callback.history.of("highest")[0] == by_hand(made.model)
    assert not (tmp_path / "head_dynamics.csv").exists()


def test_the_probe_and_the_observers_stay_as_they_are(tmp_path):
    data, observer = probe(), Highest()
    kept = copy.deepcopy(data)
    callback = HeadDynamicsCallback([observer], iter(data), every=2)
    run(tmp_path, callback, max_steps=2)
    assert observer.means.sums == {}
    for batch, before in zip(data, kept):
        assert all(torch.equal(value, before[name]) for name, value in batch.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": 0}, "every must be a number of steps, at least 1, got 0"),
        ({"every": 2.5}, "every must be a number of steps, at least 1, got 2.5"),
        ({"probe_data": []}, "probe_data is empty"),
        ({"probe_data": [[5, 7, 8]]}, "batch 0 of probe_data must be a dictionary of tensors, got list"),
        ({"probe_data": [{"input_ids": [5, 7]}]}, "batch 0 of probe_data must be a dictionary of tensors, got dict"),
        ({"observers": []}, "observers are empty"),
        ({"observers": [Highest]}, "observers must be instances of Observer, got <class"),
        ({"observers": [type("Nameless", (Highest,), {"name": ""})()]}, "Nameless has no name"),
        ({"observers": [Highest(), Highest()]}, "two statistics have the name 'highest'"),
        ({"observers": [type("Own", (Highest,), {"name": "gate"})()]}, "two statistics have the name 'gate'"),
    ],
    ids=["no steps", "half a step", "no probe", "list", "lists", "no observer", "class", "nameless", "twice", "gate"],
)
def test_impossible_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        HeadDynamicsCallback(**{"observers": [Highest()], "probe_data": probe(), **changes})


def test_a_result_that_is_no_scores_is_refused_before_the_first_step(tmp_path):
    made = trainer(tmp_path, build(), examples("MaskedLM"), callbacks=[HeadDynamicsCallback([Words()], probe())])
    with pytest.raises(ValueError, match="the result of observer 'words', str, has no scores of heads"):
        made.train()
    assert made.state.global_step == 0


def test_two_callbacks_that_could_not_be_told_apart_are_refused(tmp_path):
    callbacks = [HeadDynamicsCallback([Highest()], probe()) for _ in range(2)]
    made = trainer(tmp_path, build(), examples("MaskedLM"), callbacks=callbacks)
    with pytest.raises(ValueError, match="the trainer has 2 HeadDynamicsCallbacks"):
        made.train()


def test_a_trainer_that_would_build_it_anew_is_refused(tmp_path):
    with pytest.raises(ValueError, match="restore_callback_states_from_checkpoint=True would build"):
        trainer(tmp_path, build(), examples("MaskedLM"), callbacks=[HeadDynamicsCallback([Highest()], probe())],
                restore_callback_states_from_checkpoint=True)  # fmt: skip


def test_scores_of_several_tables_are_named_after_their_observer(tmp_path):
    callback = HeadDynamicsCallback([Several()], probe(), every=9)
    run(tmp_path, callback, max_steps=1)
    one, other = (callback.history.of(f"several/{name}")[0] for name in ("one", "other"))
    assert isinstance(one, HeadScores)
    assert one == other
