# Licensed under the Apache License, Version 2.0.
"""An LSTM over a padded batch is the same as over each sentence alone."""

import pytest
import torch
from slow_lstm import slow_lstm
from torch import nn

from hf_attn_dynamics.models import masked_lstm
from hf_attn_dynamics.models.masked_lstm import run_lstm


SHAPES = [(layers, bidirectional) for layers in (1, 2, 3) for bidirectional in (False, True)]
LENGTHS = torch.tensor([7, 1, 4, 8, 3])
RIGHT = torch.arange(9) < LENGTHS[:, None]
REAL = {
    "right": RIGHT,
    "left": RIGHT.flip(1),
    "interior": torch.rand(5, 9, generator=torch.Generator().manual_seed(0)).argsort(1) < LENGTHS[:, None],
    "none": torch.ones_like(RIGHT),
}


def lstm_of(layers=2, bidirectional=True, dtype=torch.float64):
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 4, layers, batch_first=True, bidirectional=bidirectional)
    for parameter in lstm.parameters():
        parameter.data.normal_(std=0.7)
    return lstm.to(dtype)


def inputs_of(dtype=torch.float64):
    return torch.randn(5, 9, 5, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def run_alone(lstm, inputs, real):
    """What `run_lstm` returns, from each sentence by itself."""
    outputs, states = [], []
    for row, is_word in zip(inputs, real):
        words, last = slow_lstm(lstm, list(row[is_word]))
        # Written at its place; differentiable.
        place = torch.eye(len(is_word), dtype=row.dtype)[:, is_word]
        outputs.append(place @ torch.stack(words))
        states.append([torch.stack(part) for part in zip(*last)])
    hidden, cell = (torch.stack(part, 1) for part in zip(*states))
    return torch.stack(outputs), (hidden, cell)


def values_and_gradients(run, lstm, inputs, real):
    outputs, (hidden, cell) = run(lstm, inputs, real)
    generator = torch.Generator().manual_seed(2)
    total = sum((one * torch.randn(one.shape, generator=generator).to(one)).sum() for one in (outputs, hidden, cell))
    return outputs, hidden, cell, torch.autograd.grad(total, [inputs, *lstm.parameters()])


@pytest.mark.parametrize("padding", REAL)
@pytest.mark.parametrize(("layers", "bidirectional"), SHAPES)
def test_values_and_gradients_are_those_of_each_sentence_alone(layers, bidirectional, padding):
    lstm, inputs, real = lstm_of(layers, bidirectional), inputs_of(), REAL[padding]
    found = values_and_gradients(run_lstm, lstm, inputs, real)
    torch.testing.assert_close(found, values_and_gradients(run_alone, lstm, inputs, real), rtol=1e-9, atol=1e-12)
    assert not found[0][~real].any()
    assert not found[-1][0][~real].any()


def run_gated(lstm, inputs, real):
    return masked_lstm._run_gated(lstm, inputs, real.sum(1))


def run_packed(lstm, inputs, real):
    """What runs on a GPU."""
    return masked_lstm._run_packed(lstm, inputs, real.sum(1))


@pytest.mark.parametrize("run", [run_gated, run_packed])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, {"rtol": 1e-9, "atol": 1e-12}),
        (torch.float32, {"rtol": 1e-5, "atol": 1e-5}),
        (torch.bfloat16, {"rtol": 0.05, "atol": 0.1}),
    ],
)
@pytest.mark.parametrize(("layers", "bidirectional"), SHAPES)
def test_both_ways_to_leave_out_padding_are_exact(layers, bidirectional, dtype, tolerance, run):
    lstm, inputs = lstm_of(layers, bidirectional, dtype), inputs_of(dtype)
    found = values_and_gradients(run, lstm, inputs, RIGHT)
    exact = lstm_of(layers, bidirectional)
    exact.load_state_dict(lstm.state_dict())
    expected = values_and_gradients(run_alone, exact, inputs.detach().double().requires_grad_(), RIGHT)
    assert all(part.dtype == dtype for part in (*found[:3], *found[3]))
    torch.testing.assert_close(found, expected, check_dtype=False, **tolerance)


@pytest.mark.parametrize("run", [run_gated, run_packed, run_lstm])
@pytest.mark.parametrize("value", [1e30, torch.inf, torch.nan])
def test_what_stands_at_padding_has_no_influence(run, value):
    lstm, inputs = lstm_of(), inputs_of()
    expected = values_and_gradients(run, lstm, inputs, RIGHT)
    spoilt = inputs.detach().masked_fill(~RIGHT[..., None], value).requires_grad_()
    torch.testing.assert_close(values_and_gradients(run, lstm, spoilt, RIGHT), expected, rtol=0, atol=0)


@pytest.mark.parametrize("run", [run_gated, run_packed])
def test_dropout_comes_between_layers_and_in_training_only(run):
    lstm, inputs = lstm_of(2), inputs_of()
    lstm.dropout = 0.999999
    plain = run(lstm.eval(), inputs, RIGHT)[0]
    torch.testing.assert_close(plain, run_alone(lstm, inputs, RIGHT)[0])
    # With nothing from the first layer, the second one gives the same to all sentences.
    dropped = run(lstm.train(), inputs, RIGHT)[0]
    torch.testing.assert_close(dropped[0, :4, :4], dropped[2, :4, :4])
    assert dropped[0, :4].abs().min() > 0
    single = lstm_of(1)
    single.dropout = 0.999999
    torch.testing.assert_close(run(single.train(), inputs, RIGHT)[0], run_alone(single, inputs, RIGHT)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("padding", REAL)
@pytest.mark.parametrize("training", [False, True])
def test_a_gpu_gives_the_same_values_and_gradients(padding, training):
    lstm, inputs, real = lstm_of().train(training), inputs_of(), REAL[padding]
    expected = values_and_gradients(run_lstm, lstm, inputs, real)
    on_gpu = inputs.detach().cuda().requires_grad_()

    def run(*arguments):
        outputs, (hidden, cell) = run_lstm(*arguments)
        return outputs.cpu(), (hidden.cpu(), cell.cpu())

    found = values_and_gradients(run, lstm.cuda(), on_gpu, real.cuda())
    torch.testing.assert_close(found, expected, check_device=False, rtol=1e-9, atol=1e-10)
