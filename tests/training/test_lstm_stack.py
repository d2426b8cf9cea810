# Licensed under the Apache License, Version 2.0.
"""Stacks of LSTM encoder–decoders against each model by itself."""

import copy

import pytest
import torch

from hf_attn_dynamics import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
from hf_attn_dynamics.training import LstmSeq2SeqStack, lstm_stack


RUNS, BATCH = 3, 4
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
KINDS = {
    "one head": {},
    "three heads": {"num_attention_heads": 3},
    "uniform attention": {"attention": "uniform"},
    "frozen attention": {"attention": "frozen"},
    "only attention is trained": {"train_attention_only": True},
    "additive readout": {"readout": "additive"},
    "a table for each side": {"share_encoder_decoder_embeddings": False, "target_vocab_size": 9},
}


def models_of(**changes):
    """Models in double precision with the weights of different seeds."""
    sizes = {"vocab_size": 11, "embedding_size": 5, "hidden_size": 6, "readout_size": 7}
    models = []
    for seed in range(RUNS):
        torch.manual_seed(seed)
        models.append(LstmSeq2SeqForConditionalGeneration(LstmSeq2SeqConfig(**{**sizes, **changes})).double())
    return models


def sentences(*lead, seed=0):
    """Sources of 5 words, targets of 4."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 9, (*lead, BATCH, length), generator=generator) for length in (5, 4)]


def train_alone(model, batches):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.05)
    for sources, targets in batches:
        optimizer.zero_grad()
        model(sources, labels=targets).loss.backward()
        optimizer.step()
    return model


def train_together(stack, optimizer, batches):
    for sources, targets in batches:
        optimizer.zero_grad()
        stack(sources, targets).losses.sum().backward()
        optimizer.step()


def assert_same_weights(found, expected):
    for (name, value), own in zip(found.named_parameters(), expected.parameters()):
        torch.testing.assert_close(value, own, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(params=["one by one", "together"])
def reading(request, monkeypatch):
    """Both ways to read sentences; left to itself, a stack takes the second one on a GPU only."""
    if request.param == "together":
        monkeypatch.setattr(lstm_stack, "_read_one_by_one", lstm_stack._read_together)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lead", [(), (RUNS,)], ids=["shared sentences", "own sentences"])
def test_a_stack_gives_the_logits_losses_and_gradients_of_its_models(reading, changes, lead):
    models = models_of(**changes)
    stack = LstmSeq2SeqStack(models)
    sources, targets = sentences(*lead)
    found = stack(sources, targets)
    found.losses.sum().backward()
    for run, model in enumerate(models):
        own_sources, own_targets = (ids[run] if lead else ids for ids in (sources, targets))
        expected = model(own_sources, labels=own_targets)
        expected.loss.backward()
        torch.testing.assert_close(found.logits[run], expected.logits, **CLOSE)
        torch.testing.assert_close(found.losses[run], expected.loss, **CLOSE)
        correct = (expected.logits.argmax(-1) == own_targets).double().mean()
        torch.testing.assert_close(found.accuracies[run], correct)
        for name, parameter in model.named_parameters():
            gradient = stack.parameters[name].grad
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient[run], parameter.grad, **CLOSE)


def test_single_precision_is_close(reading):
    models = [model.float() for model in models_of()]
    sources, targets = sentences()
    losses = LstmSeq2SeqStack(models)(sources, targets).losses
    for run, model in enumerate(models):
        torch.testing.assert_close(losses[run], model(sources, labels=targets).loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"attention": "frozen"}], ids=["learned", "frozen"])
def test_adam_moves_each_run_as_if_it_were_alone(reading, changes):
    models = models_of(**changes)
    alone = copy.deepcopy(models)
    batches = [sentences(RUNS, seed=step) for step in range(6)]
    stack = LstmSeq2SeqStack(models)
    train_together(stack, torch.optim.Adam(stack.trained, lr=0.05), batches)
    for run, (model, own) in enumerate(zip(stack.unstack(), alone)):
        assert_same_weights(model, train_alone(own, [[ids[run] for ids in batch] for batch in batches]))


def test_runs_that_are_kept_go_on_as_before_and_others_stay_where_they_are():
    models = models_of()
    alone = copy.deepcopy(models)
    batches = [sentences(seed=step) for step in range(6)]
    stack = LstmSeq2SeqStack(models)
    optimizer = torch.optim.Adam(stack.trained, lr=0.05)
    train_together(stack, optimizer, batches[:3])
    stack.keep([0, 2], optimizer)
    train_together(stack, optimizer, batches[3:])
    assert stack.unstack() == [models[0], models[2]]
    for model, own, steps in zip(models, alone, (6, 3, 6)):
        assert_same_weights(model, train_alone(own, batches[:steps]))


def test_runs_to_keep_are_numbers_or_marks():
    stacks = [LstmSeq2SeqStack(models_of()) for _ in range(2)]
    for stack, runs in zip(stacks, ([0, 2], [True, False, True])):
        stack.keep(runs)
    assert len(stacks[1].models) == 2
    for name, kept in stacks[0].parameters.items():
        assert torch.equal(kept, stacks[1].parameters[name])


def test_keeping_runs_without_an_optimizer_keeps_their_losses():
    stack = LstmSeq2SeqStack(models_of())
    before = stack(*sentences()).losses
    stack.keep([2, 0])
    torch.testing.assert_close(stack(*sentences()).losses, before[[2, 0]])


def test_the_gradients_of_the_steps_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 2, 12), (2, 12, 3), (2, 2, 3), (2, 2, 3)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lstm_stack._LstmSteps.apply, inputs)


def with_padding(place):
    ids = sentences()
    ids[place][1, -1] = 0
    return ids


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LstmSeq2SeqStack([]), "models are empty"),
        (
            lambda: LstmSeq2SeqStack([*models_of(), *models_of(hidden_size=7)]),
            r"models must have the same hidden_size, got \[6, 7\]",
        ),
        (
            lambda: LstmSeq2SeqStack([*models_of(), *models_of(attention="uniform")]),
            r"models must have the same attention, got \['learned', 'uniform'\]",
        ),
        (lambda: LstmSeq2SeqStack(models_of(num_hidden_layers=2)), "must have num_hidden_layers=1"),
        (lambda: LstmSeq2SeqStack(models_of(bidirectional=True)), "must have bidirectional=False"),
        (
            lambda: LstmSeq2SeqStack(models_of(decoder_start_token_id=0)),
            "decoder_start_token_id must not be the padding token, 0",
        ),
        (lambda: LstmSeq2SeqStack(models_of())(*with_padding(0)), "input_ids contain padding"),
        (lambda: LstmSeq2SeqStack(models_of())(*with_padding(1)), "labels contain padding"),
        (lambda: LstmSeq2SeqStack(models_of())(*sentences(2)), "input_ids are for 2 runs, but the stack has 3"),
        (
            lambda: LstmSeq2SeqStack(models_of())(sentences()[0], sentences(RUNS)[1][:, 1:]),
            "input_ids have 4 sentences and labels 3",
        ),
        (
            lambda: LstmSeq2SeqStack(models_of())(*(ids[0] for ids in sentences())),
            r"input_ids must have a non-empty shape .*\(5,\)",
        ),
        (
            lambda: LstmSeq2SeqStack(models_of())(*(ids[:, :0] for ids in sentences())),
            r"must have a non-empty shape .* got \(4, 0\)",
        ),
        (
            lambda: LstmSeq2SeqStack(models_of())(*(ids + 4 for ids in sentences())),
            "must be below the number of words, 11, got 12",
        ),
        (lambda: LstmSeq2SeqStack(models_of()).keep([]), "runs are empty; keep at least one"),
        (lambda: LstmSeq2SeqStack(models_of()).keep([1, 1]), r"must be unique and from 0 to 2, got \[1, 1\]"),
        (lambda: LstmSeq2SeqStack(models_of()).keep([0, 3]), r"must be unique and from 0 to 2, got \[0, 3\]"),
    ],
    ids=[
        *("none", "sizes", "kinds", "layers", "ways", "start", "source", "target", "runs"),
        *("batches", "no batch", "no words", "unknown", "kept", "twice", "not there"),
    ],
)
def test_impossible_stacks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
