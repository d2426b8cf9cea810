# Licensed under the Apache License, Version 2.0.
"""Batched training of many LSTM encoder–decoders with attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, embedding

from ..models.modeling_lstm_seq2seq import LstmSeq2SeqForConditionalGeneration
from .stacked import check_alike


# Values that all models of a stack must share.
_ALIKE = (
    "vocab_size",
    "target_vocab_size",
    "embedding_size",
    "hidden_size",
    "num_attention_heads",
    "attention",
    "train_attention_only",
    "readout",
    "readout_size",
    "share_encoder_decoder_embeddings",
    "pad_token_id",
    "decoder_start_token_id",
)


class StackedOutput(NamedTuple):
    """Output of [`LstmSeq2SeqStack`] for each run.

    Args:
        losses (`torch.FloatTensor` of shape `(runs,)`): Mean cross-entropy of the target words, differentiable.
        accuracies (`torch.FloatTensor` of shape `(runs,)`): Fraction of target words that are predicted correctly.
        logits (`torch.FloatTensor` of shape `(runs, batch, target length, target words)`)
    """

    losses: torch.Tensor
    accuracies: torch.Tensor
    logits: torch.Tensor


class LstmSeq2SeqStack:
    """LSTM encoder–decoders of the same sizes, computed in one batch, with different weights and optionally sentences.

    Runs are independent: an elementwise optimizer, such as `torch.optim.Adam(stack.trained)`, trains each run as if it
    were alone. Sentences of a batch must have the same length, since padding is not supported.

    Args:
        models (`list[LstmSeq2SeqForConditionalGeneration]`): The runs, with one unidirectional layer. Their parameters
            are copied; `unstack` writes them back.

    Attributes:
        parameters (`dict[str, torch.Tensor]`): Parameters by their names in a model; the first dimension is the runs.

    Raises:
        ValueError: if there is no model, configurations differ, or they have several layers, a bidirectional encoder,
            or padding as the first word of the decoder.

    Example:
        >>> from hf_attn_dynamics import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
        >>> config = LstmSeq2SeqConfig(vocab_size=9, hidden_size=16)
        >>> stack = LstmSeq2SeqStack([LstmSeq2SeqForConditionalGeneration(config) for _ in range(3)])
        >>> sentences = torch.tensor([[3, 4, 5, 6], [6, 8, 3, 7]])
        >>> optimizer = torch.optim.Adam(stack.trained, lr=0.01)
        >>> for _ in range(40):
        ...     optimizer.zero_grad()
        ...     stack(sentences, labels=sentences).losses.sum().backward()
        ...     optimizer.step()
        >>> stack(sentences, labels=sentences).accuracies.tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, models: Sequence[LstmSeq2SeqForConditionalGeneration]):
        check_alike(models, _ALIKE)
        self.config = models[0].config
        for name, wanted in (("num_hidden_layers", 1), ("bidirectional", False)):
            if any(getattr(model.config, name) != wanted for model in models):
                raise ValueError(f"models of a stack must have {name}={wanted}; train others one by one.")
        if self.config.decoder_start_token_id == self.config.pad_token_id:
            raise ValueError(
                f"decoder_start_token_id must not be the padding token, {self.config.pad_token_id}, in a stack."
            )
        self.models = list(models)
        self.parameters: dict[str, torch.Tensor] = {}
        for name, parameter in models[0].named_parameters():
            stacked = torch.stack([model.get_parameter(name).detach() for model in models])
            self.parameters[name] = stacked.requires_grad_(parameter.requires_grad)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self.parameters.values())).device

    @property
    def trained(self) -> list[torch.Tensor]:
        """Parameters that the configuration does not freeze."""
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]

    def __call__(self, input_ids: torch.LongTensor, labels: torch.LongTensor) -> StackedOutput:
        """Losses, accuracies and logits of sentences without padding.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source length)` or `(runs, batch, source length)`): Source
                words, the same for all runs or different ones.
            labels (`torch.LongTensor` of shape `(batch, target length)` or `(runs, batch, target length)`): Target
                words.

        Returns:
            [`StackedOutput`]

        Raises:
            ValueError: if there is padding, a word is not in the vocabulary, or a shape does not fit.
        """
        input_ids = self._of_runs("input_ids", input_ids, self.config.vocab_size)
        labels = self._of_runs("labels", labels, self.config.num_target_words)
        # The LSTM kernel is called without the checks of `nn.LSTM`, and would write out of bounds.
        if input_ids.shape[1] != labels.shape[1]:
            raise ValueError(
                f"input_ids have {input_ids.shape[1]} sentences and labels {labels.shape[1]}; pass the same number."
            )
        start = torch.full_like(labels[..., :1], self.config.decoder_start_token_id)
        own = self.parameters
        source_words = own["encoder.embeddings.weight"]
        target_words = own.get("decoder_embeddings.weight", source_words)
        zeros = source_words.new_zeros(*input_ids.shape[:2], self.config.hidden_size)
        sources, cell = self._read("encoder.lstm", source_words, input_ids, zeros, zeros)
        decoder_ids = torch.cat([start, labels[..., :-1]], -1)
        states, _ = self._read("decoder", target_words, decoder_ids, sources[:, -1], cell)
        # In the layout of the LSTMs: (runs, target length, batch, words).
        logits = self._readout(self._contexts(states, sources), states)
        targets = labels.transpose(1, 2)
        losses = cross_entropy(logits.movedim(-1, 1), targets, reduction="none").mean((1, 2))
        accuracies = (logits.argmax(-1) == targets).to(losses.dtype).mean((1, 2))
        return StackedOutput(losses, accuracies, logits.transpose(1, 2))

    def _of_runs(self, name: str, ids: torch.LongTensor, num_words: int) -> torch.LongTensor:
        """Sentences of each run, of shape `(runs, batch, length)`."""
        runs = len(self.models)
        if ids.dim() not in (2, 3) or not ids.numel():
            raise ValueError(
                f"{name} must have a non-empty shape (batch, length) or (runs, batch, length), got {tuple(ids.shape)}."
            )
        if ids.dim() == 3 and len(ids) != runs:
            raise ValueError(f"{name} are for {len(ids)} runs, but the stack has {runs}.")
        # With flattened embeddings, an unknown word would be one of the next run.
        if ((ids == self.config.pad_token_id) | (ids < 0) | (ids >= num_words)).any():
            if (ids >= num_words).any():
                raise ValueError(f"{name} must be below the number of words, {num_words}, got {int(ids.max())}.")
            raise ValueError(f"{name} contain padding; a stack needs sentences of the same length.")
        return ids.expand(runs, *ids.shape[-2:])

    def _linear(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Applies a linear layer to values of shape `(runs, …, features)`."""
        weight, bias = (self.parameters.get(f"{name}.{kind}") for kind in ("weight", "bias"))
        flat = values.flatten(1, -2)
        mapped = flat @ weight.mT if bias is None else torch.baddbmm(bias[:, None], flat, weight.mT)
        return mapped.unflatten(1, values.shape[1:-1])

    def _read(
        self, name: str, words: torch.Tensor, ids: torch.LongTensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States h of shape `(runs, length, batch, hidden_size)`, and the last c, of `(runs, batch, hidden_size)`."""
        weights = [self.parameters[f"{name}.{kind}_l0"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        # On a CPU, the LSTM kernel is twice as fast as matrix products, and batching runs does not help; on a GPU,
        # kernel launches dominate.
        read = _read_together if words.is_cuda else _read_one_by_one
        return read(words, ids.transpose(1, 2), hidden, cell, *weights)

    def _contexts(self, states: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Sum of the contexts of all heads, for each state."""
        if self.config.attention == "uniform":
            return sources.mean(1, keepdim=True).expand_as(states)
        queries = self._linear("attention.query", states).unflatten(-1, (-1, self.config.hidden_size))
        by_sentence = sources.transpose(1, 2).contiguous()
        scores = queries.permute(0, 2, 3, 1, 4) @ by_sentence.mT[:, :, None]
        return (scores.softmax(-1).sum(2) @ by_sentence).transpose(1, 2)

    def _readout(self, contexts: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        if self.config.readout == "additive":
            return self._linear("readout.output", contexts + states)
        hidden = self._linear("readout.context", contexts) + self._linear("readout.state", states)
        return self._linear("readout.output", hidden.relu())

    @torch.no_grad()
    def keep(self, runs: Sequence[int], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Continues with some of the runs only. The others are written back to their models, as by `unstack`.

        Args:
            runs (sequence of `int` or `bool`): Indices of the runs to keep, at least one; or a mask of them.
            optimizer (`torch.optim.Optimizer`, *optional*): Optimizer of `trained`, from which other runs are removed.

        Raises:
            ValueError: if `runs` are empty, out of range or not unique.
        """
        chosen = torch.as_tensor(runs)
        runs = (chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen).tolist()
        if not runs:
            raise ValueError("runs are empty; keep at least one.")
        if len(set(runs)) < len(runs) or not set(runs) <= set(range(len(self.models))):
            raise ValueError(f"runs must be unique and from 0 to {len(self.models) - 1}, got {runs}.")
        self.unstack()
        self.models = [self.models[run] for run in runs]
        # New tensors, since autograd has stored the shape of the old ones.
        kept = {old: old.detach()[runs].requires_grad_(old.requires_grad) for old in self.parameters.values()}
        self.parameters = {name: kept[old] for name, old in self.parameters.items()}
        for group in [] if optimizer is None else optimizer.param_groups:
            for old in group["params"]:
                if old in kept and old in optimizer.state:
                    # State by element, such as Adam's averages; scalars, such as the number of steps, are kept.
                    optimizer.state[kept[old]] = {
                        name: value[runs] if torch.is_tensor(value) and value.shape == old.shape else value
                        for name, value in optimizer.state.pop(old).items()
                    }
            group["params"] = [kept.get(old, old) for old in group["params"]]

    @torch.no_grad()
    def unstack(self) -> list[LstmSeq2SeqForConditionalGeneration]:
        """Writes the parameters back into the models.

        Returns:
            `list[LstmSeq2SeqForConditionalGeneration]`: the models, without those that `keep` has removed.
        """
        for name, stacked in self.parameters.items():
            for model, value in zip(self.models, stacked):
                model.get_parameter(name).copy_(value)
        return self.models


def _read_one_by_one(words, ids, hidden, cell, *weights):
    """Computes `_read_together` one run after the other."""
    read = [
        torch.lstm(embedding(own_ids, own_words), (h[None], c[None]), own, True, 1, 0.0, True, False, False)
        for own_ids, own_words, h, c, *own in zip(ids, words, hidden, cell, *weights)
    ]
    states, _, cells = zip(*read)
    return torch.stack(states), torch.cat(cells)


def _read_together(words, ids, hidden, cell, of_input, of_state, *biases):
    """Runs the LSTMs of all runs together. The vocabulary, not the longer input, is projected to the gates.

    Args:
        words (`torch.Tensor` of shape `(runs, words, embedding_size)`): Embeddings.
        ids (`torch.LongTensor` of shape `(runs, length, batch)`)
        hidden, cell (`torch.Tensor` of shape `(runs, batch, size)`): Initial state.
        of_input, of_state, biases (`torch.Tensor`): Parameters of the LSTMs.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: states of shape `(runs, length, batch, size)`, and the last c.
    """
    mapped = torch.baddbmm(sum(biases)[:, None], words, of_input.mT)
    first = torch.arange(len(words), device=ids.device)[:, None, None] * words.shape[1]
    return _LstmSteps.apply(embedding(ids + first, mapped.flatten(0, 1)), of_state, hidden, cell)


def _of_sigmoid(value, gate, out=None):
    """`value · s'(x)` for the sigmoid s, given `gate = s(x)`."""
    return torch.mul(value * (1 - gate), gate, out=out)


def _of_tanh(value, gate, out=None):
    """`value · tanh'(x)`, given `gate = tanh(x)`."""
    return torch.mul(value, 1 - gate * gate, out=out)


class _LstmSteps(torch.autograd.Function):
    """An LSTM over inputs that have been projected to the gates, in PyTorch's order i, f, g, o.

    The backward pass computes as much as possible for all steps at once: it has one matrix product per step, and a
    single one for the gradient of the weights.
    """

    @staticmethod
    def forward(ctx, inputs, weight, hidden, cell):
        """States and last cell, of shapes `(runs, steps, batch, size)` and `(runs, batch, size)`.

        Args:
            inputs (`torch.Tensor` of shape `(runs, steps, batch, 4 · size)`)
            weight (`torch.Tensor` of shape `(runs, 4 · size, size)`)
            hidden, cell (`torch.Tensor` of shape `(runs, batch, size)`)
        """
        runs, steps, batch, size = *inputs.shape[:3], hidden.shape[-1]
        gates = torch.empty_like(inputs)
        # Index 0 has the initial state.
        states, cells = (inputs.new_empty(runs, steps + 1, batch, size) for _ in range(2))
        states[:, 0], cells[:, 0] = hidden, cell
        squashed = torch.empty_like(states[:, 1:])
        for step in range(steps):
            now, after = gates[:, step], step + 1
            torch.baddbmm(inputs[:, step], states[:, step], weight.mT, out=now)
            i, f, g, o = now.chunk(4, -1)
            now[..., : 2 * size].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            torch.mul(f, cells[:, step], out=cells[:, after]).addcmul_(i, g)
            torch.mul(torch.tanh(cells[:, after], out=squashed[:, step]), o, out=states[:, after])
        ctx.save_for_backward(gates, states, cells, squashed, weight)
        return states[:, 1:], cells[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, of_states, of_cell):
        gates, states, cells, squashed, weight = ctx.saved_tensors
        i, f, g, o = gates.chunk(4, -1)
        # Factors of the gradient of c for those of i, f and g before their nonlinearity, and of the gradient of h for
        # that of o before its sigmoid and, in `into_cell`, for that of c.
        slopes = torch.empty_like(gates)
        for slope, value, gate, out in zip(
            (_of_sigmoid, _of_sigmoid, _of_tanh, _of_sigmoid),
            (g, cells[:, :-1], i, squashed),
            (i, f, g, o),
            slopes.chunk(4, -1),
        ):
            slope(value, gate, out=out)
        into_cell = _of_tanh(o, squashed)
        found = torch.empty_like(gates)
        of_hidden = of_states[:, -1]
        for step in reversed(range(gates.shape[1])):
            of_cell = torch.addcmul(of_cell, of_hidden, into_cell[:, step])
            now = found[:, step]
            values = (of_cell, of_cell, of_cell, of_hidden)
            for value, slope, out in zip(values, slopes[:, step].chunk(4, -1), now.chunk(4, -1)):
                torch.mul(value, slope, out=out)
            of_cell = of_cell * f[:, step]
            if step:
                of_hidden = torch.baddbmm(of_states[:, step - 1], now, weight)
        of_first = found[:, 0] @ weight if ctx.needs_input_grad[2] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = found.flatten(1, 2).mT @ states[:, :-1].flatten(1, 2)
        return found, of_weight, of_first, of_cell
