# Licensed under the Apache License, Version 2.0.
"""Models are measured at the steps that were asked for, and training does not notice."""

import random
import shutil

import numpy as np
import pytest
import torch
from tiny_lstms import CLASSES, SOURCES, word_tokenizer
from torch.nn.utils import parameters_to_vector
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from hf_attn_dynamics import CheckpointCallback, LstmConfig, LstmForSequenceClassification, checkpoint_steps


def size_of(model):
    """A figure that changes with every step."""
    return {"size": parameters_to_vector(model.parameters()).norm().item()}


def restless(model):
    """Draws random numbers of every kind."""
    torch.rand(3), random.random(), np.random.rand(3)
    return size_of(model)


def run(folder, callbacks=(), model=None, resume=None, **settings):
    torch.manual_seed(0)
    model = model or LstmForSequenceClassification(LstmConfig(vocab_size=11, embedding_size=5, hidden_size=4))
    rows = [{"input_ids": words, "labels": label} for words, label in zip(SOURCES, CLASSES.tolist())]
    defaults = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 0.1, "save_strategy": "no"}
    args = TrainingArguments(
        folder, **{**defaults, **settings}, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    tokenizer = word_tokenizer()
    trainer = Trainer(
        model,
        args,
        train_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps_of(callback):
    return [entry["step"] for entry in callback.history]


@pytest.mark.parametrize(
    ("task", "max_steps", "expected"),
    [
        ("classification", 1000, [0, 10, 50, 100, 150, 200, 250, 500, 750, 1000]),
        ("classification", 501, [0, 10, 50, 100, 150, 200, 250, 500, 501]),
        ("classification", 10, [0, 10]),
        ("classification", 1, [0, 1]),
        ("translation", 5500, [0, 50, 100, 500, 1000, 1500, 3500, 5500]),
        ("translation", 6000, [0, 50, 100, 500, 1000, 1500, 3500, 5500, 6000]),
    ],
)
def test_the_schedule_is_the_papers_and_ends_with_training(task, max_steps, expected):
    assert checkpoint_steps(task, max_steps) == expected


def test_models_are_measured_at_the_steps_and_at_the_end(tmp_path):
    model = LstmForSequenceClassification(LstmConfig(vocab_size=11, embedding_size=5, hidden_size=4))
    before = size_of(model)["size"]
    callback = CheckpointCallback([0, 1, 4, 99], size_of)
    trainer = run(tmp_path / "run", [callback], model)
    assert steps_of(callback) == [0, 1, 4, 6]
    assert callback.history[0]["size"] == before
    assert callback.history[-1]["size"] == size_of(trainer.model)["size"]
    shorter = run(tmp_path / "shorter", max_steps=4, lr_scheduler_type="constant").model
    again = CheckpointCallback([4], size_of)
    run(tmp_path / "again", [again], lr_scheduler_type="constant")
    assert again.history[0] == {"step": 4, **size_of(shorter)}


def test_training_goes_on_as_if_nothing_had_happened(tmp_path):
    drawn = []
    for callbacks in ((), [CheckpointCallback(range(6), restless)]):
        trainer = run(tmp_path / str(len(callbacks)), callbacks)
        drawn.append(
            (parameters_to_vector(trainer.model.parameters()), torch.rand(2), random.random(), np.random.rand())
        )
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert drawn[0][2:] == drawn[1][2:]


def test_a_resumed_run_has_the_history_and_the_best_model_of_one_that_never_stopped(tmp_path):
    def callback(name):
        return CheckpointCallback([0, 2, 3, 5], size_of, "size", tmp_path / name)

    whole, part, rest = callback("whole"), callback("part"), callback("part")
    run(tmp_path / "whole_run", [whole])
    run(tmp_path / "run", [part], save_strategy="steps", save_steps=3)
    shutil.rmtree(tmp_path / "run/checkpoint-6")
    run(tmp_path / "run", [rest], resume=str(tmp_path / "run/checkpoint-3"), save_strategy="steps", save_steps=3)
    assert rest.history == part.history == whole.history
    assert steps_of(rest) == [0, 2, 3, 5, 6]
    # Used once more, it starts anew.
    run(tmp_path / "third", [rest], max_steps=1)
    assert steps_of(rest) == [0, 1]


def test_a_run_is_resumed_that_had_no_callback_before(tmp_path):
    run(tmp_path, save_strategy="steps", save_steps=3)
    callback = CheckpointCallback([0, 4], size_of)
    run(tmp_path, [callback], resume=str(tmp_path / "checkpoint-3"))
    assert steps_of(callback) == [4, 6]


def test_the_best_model_is_kept_and_loads_with_its_tokenizer(tmp_path):
    values = iter([1.0, float("nan"), 3.0, 3.0, 2.0])
    seen = []

    def measure(model):
        seen.append(parameters_to_vector(model.parameters()).detach().clone())
        return {"value": next(values)}

    callback = CheckpointCallback([0, 1, 2, 3], measure, "value", tmp_path / "best")
    trainer = run(tmp_path / "run", [callback])
    assert callback.best() == {"step": 2, "value": 3.0}
    best = LstmForSequenceClassification.from_pretrained(tmp_path / "best")
    assert torch.equal(parameters_to_vector(best.parameters()), seen[2])
    assert not torch.equal(parameters_to_vector(trainer.model.parameters()), seen[2])
    assert (
        type(trainer.processing_class).from_pretrained(tmp_path / "best").get_vocab() == word_tokenizer().get_vocab()
    )


@pytest.mark.parametrize("number", [np.float32, torch.tensor])
def test_figures_of_any_kind_are_kept_in_a_checkpoint(number, tmp_path):
    callback = CheckpointCallback([], lambda model: {"half": number(0.5)})
    run(tmp_path, [callback], max_steps=1, save_strategy="steps", save_steps=1)
    assert callback.history == [{"step": 1, "half": 0.5}]
    assert type(callback.history[0]["half"]) is float


def test_figures_reach_the_log(tmp_path):
    callback = CheckpointCallback([0, 3], size_of)
    logged = []
    callback.log = logged.append
    run(tmp_path, [callback])
    assert logged == [{"eval_size": entry["size"]} for entry in callback.history]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: checkpoint_steps("parsing", 10), "task must be classification or translation, got 'parsing'"),
        (lambda: checkpoint_steps("translation", 0), "max_steps must be at least 1, got 0"),
        (lambda: CheckpointCallback([3, -1], size_of), "steps must not be negative, got -1"),
        (lambda: CheckpointCallback([3], size_of, "size"), "best_by='size' and best_folder=None need each other"),
        (lambda: CheckpointCallback([3], size_of).best(), "no checkpoint has a value of best_by=None"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("callbacks", "settings", "message"),
    [
        (
            [CheckpointCallback([0], size_of, "accuracy", "there")],
            {},
            "best_by is 'accuracy', but measure returns size",
        ),
        (
            [CheckpointCallback([0], size_of), CheckpointCallback([0], size_of)],
            {},
            "the trainer has 2 CheckpointCallbacks",
        ),
        (
            [CheckpointCallback([0], size_of)],
            {"restore_callback_states_from_checkpoint": True},
            "restore_callback_states_from_checkpoint=True would build CheckpointCallback again",
        ),
    ],
    ids=["no such figure", "two callbacks", "restored"],
)
def test_a_trainer_that_can_not_go_well_is_refused(tmp_path, callbacks, settings, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, callbacks, **settings)
