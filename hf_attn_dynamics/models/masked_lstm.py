# Licensed under the Apache License, Version 2.0.
"""LSTMs over padded batches, with results that do not depend on padding."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


# Added to a gate before its sigmoid, which is then exactly 0 or 1 in all floating-point dtypes.
_SATURATED = 1e4

LstmOutput = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def _with_missing_kernels(run: Callable[..., LstmOutput]) -> Callable[..., LstmOutput]:
    """Runs LSTMs without autocast on CPUs for which oneDNN has no half-precision LSTM, where PyTorch fails."""

    @wraps(run)
    def run_or_leave_autocast(lstm: nn.LSTM, inputs: torch.Tensor | PackedSequence, *arguments):
        weight = lstm.weight_ih_l0
        if weight.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or _has_half_kernels():
            return run(lstm, inputs, *arguments)
        with torch.autocast("cpu", enabled=False):
            return run(lstm, inputs.to(weight.dtype), *arguments)

    return run_or_leave_autocast


def _has_half_kernels() -> bool:
    if not torch.backends.mkldnn.is_available():
        return True  # PyTorch does not call it
    # float16 needs newer CPUs than AVX-512 ones, which PyTorch does not distinguish.
    return torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX512"


@_with_missing_kernels
def run_lstm(lstm: nn.LSTM, inputs: torch.Tensor, real: torch.BoolTensor) -> LstmOutput:
    """Outputs and last states of an LSTM, independent of padding on either side.

    On GPUs, sequences are packed. On CPUs, packing would exclude PyTorch's fast kernel, with which training is 1.3 to
    2.6 times as fast: an additional input closes the input gate and opens the forget gate at padding instead.

    Args:
        lstm (`nn.LSTM`): With `batch_first` and biases.
        inputs (`torch.Tensor` of shape `(batch, length, input_size)`)
        real (`torch.BoolTensor` of shape `(batch, length)`): False for padding; each row has at least one True.

    Returns:
        `tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]`: as from `nn.LSTM`, with outputs 0 at padding.
    """
    if torch.compiler.is_compiling():
        # Exported code cannot branch on the padding: use the method that is correct for all batches.
        return _with_padding_last(_run_gated, lstm, inputs, real, real.sum(1))
    where = real.cpu()  # one synchronisation instead of several
    if where.all():
        return call_lstm(lstm, inputs)
    run = _run_packed if inputs.is_cuda else _run_gated
    if (where[:, :-1] >= where[:, 1:]).all():
        return run(lstm, inputs, where.sum(1))
    return _with_padding_last(run, lstm, inputs, real, where.sum(1))


@_with_missing_kernels
def call_lstm(
    lstm: nn.LSTM,
    inputs: torch.Tensor | PackedSequence,
    state: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor | PackedSequence, tuple[torch.Tensor, torch.Tensor]]:
    """Calls `lstm(inputs, state)` with the fastest kernel; supports gradients in evaluation mode, unlike cuDNN.

    `state` is only supported for unidirectional LSTMs.
    """
    if lstm.training:
        return lstm(inputs, state)
    if torch.is_grad_enabled():
        with torch.backends.cudnn.flags(enabled=False):
            return lstm(inputs, state)
    if state is not None and inputs.device.type == "cpu" and inputs.shape[1] == 1 and len(inputs) <= 64:
        return _take_step(lstm, inputs, state)
    return lstm(inputs, state)


def _take_step(lstm: nn.LSTM, inputs: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> LstmOutput:
    """One step of a unidirectional LSTM for a small batch; the CPU kernel for sequences would reorder all weights."""
    outputs, hidden, cells = inputs[:, 0], [], []
    for layer, before in enumerate(zip(*state)):
        weights = (getattr(lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        outputs, cell = torch.lstm_cell(outputs, before, *weights)
        hidden.append(outputs)
        cells.append(cell)
    return outputs[:, None], (torch.stack(hidden), torch.stack(cells))


def _with_padding_last(
    run: Callable[..., LstmOutput], lstm: nn.LSTM, inputs: torch.Tensor, real: torch.BoolTensor, lengths: torch.Tensor
) -> LstmOutput:
    """Runs an LSTM with the words of each row moved to its front, and moves the outputs back."""
    place = torch.where(real, real.cumsum(1), real.sum(1, keepdim=True) + (~real).cumsum(1)) - 1
    moved = torch.zeros_like(inputs).scatter(1, place[..., None].expand_as(inputs), inputs)
    outputs, state = run(lstm, moved, lengths)
    return outputs.gather(1, place[..., None].expand_as(outputs)), state


def _run_packed(lstm: nn.LSTM, inputs: torch.Tensor, lengths: torch.Tensor) -> LstmOutput:
    packed = pack_padded_sequence(inputs, lengths.cpu(), batch_first=True, enforce_sorted=False)
    outputs, state = call_lstm(lstm, packed)
    return pad_packed_sequence(outputs, batch_first=True, total_length=inputs.shape[1])[0], state


def _run_gated(lstm: nn.LSTM, inputs: torch.Tensor, lengths: torch.Tensor) -> LstmOutput:
    """Runs an LSTM over right-padded rows; padding gates i = 0 and f = 1 (in the order i, f, g, o) keep the cell c."""
    directions = ["", "_reverse"] if lstm.bidirectional else [""]
    size = lstm.hidden_size
    lengths = lengths.to(inputs.device)[:, None, None]
    padding = torch.arange(inputs.shape[1], device=inputs.device)[:, None] >= lengths
    last_word = (lengths - 1).expand(-1, 1, size)
    outputs, hidden, cells = inputs.masked_fill(padding, 0), [], []
    for layer in range(lstm.num_layers):
        if layer:
            outputs = dropout(outputs, lstm.dropout, lstm.training)
        weights = []
        for direction in directions:
            own = {
                name: getattr(lstm, f"{name}_l{layer}{direction}")
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            }
            of_padding = own["weight_ih"].new_tensor([-_SATURATED, _SATURATED, 0, 0]).repeat_interleave(size)
            own["weight_ih"] = torch.cat([own["weight_ih"], of_padding[:, None]], 1)
            weights.extend(own.values())
        start = outputs.new_zeros(len(directions), len(outputs), size)
        # The function that `nn.LSTM` calls, with extended weights.
        outputs, _, cell = torch.lstm(
            torch.cat([outputs, padding.to(outputs)], -1),
            (start, start),
            weights,
            True,
            1,
            0.0,
            lstm.training,
            lstm.bidirectional,
            True,
        )
        # The output gate changes h at padding, so read h at the last word; a backward LSTM ends at the first word.
        hidden.append(outputs[..., :size].gather(1, last_word)[:, 0])
        if lstm.bidirectional:
            hidden.append(outputs[:, 0, size:])
        cells.append(cell)
    return outputs.masked_fill(padding, 0), (torch.stack(hidden), torch.cat(cells))
