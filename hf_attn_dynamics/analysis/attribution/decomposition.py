# Licensed under the Apache License, Version 2.0.
"""Hidden states and logits as sums of one vector for each token of the text (DecompX, Modarressi et al. 2023).

With the attention weights, the standard deviation in each layer norm and the slope φ(z)/z of each activation held at
their values, a post-norm encoder is linear. The input of its first layer, one vector for each token, then reaches each
position of each layer as a sum of vectors, one for each token:

    attention      x_i←k = Σ_h W_O,h Σ_j a_hij W_V,h x_j←k + x_i←k
    layer norm     x_i←k = γ ∘ (x_i←k − mean(x_i←k)) / σ(x_i)
    feed-forward   x_i←k = W₂ (φ(z_i)/z_i ∘ W₁ x_i←k) + x_i←k,  z_i = W₁ x_i + b₁

Each bias is shared out among the tokens where it is added, so that the vectors add up to the hidden states, and those
of a classifier to its logits.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model_parts import block_of
from ..results import Result
from ..running import reader_of, unwrapped
from .across_layers import POST_NORM_NAMES, LayerNormAt, is_post_norm, save_states, state_of
from .local import gated_output, head_projections, weight_and_bias
from .trace import AttentionTrace, TracedAttention, rows_to_one, trace_attention


BIASES = ("absdot", "norm", "equal", "apart")
MAX_BLOCK = 2**24  # elements of an intermediate result


@dataclass(frozen=True, eq=False)
class TokenDecomposition(Result):
    """Contributions of the tokens of a text to its hidden states and to the logits of a classifier.

    Args:
        contributions (`torch.Tensor` of shape `(layers, batch, query, key)`): ‖x_i←k‖₂ after each layer, divided by
            the sum over k; 0 at padding.
        logits (`torch.Tensor` of shape `(batch, labels, tokens)`): What each token adds to each logit, with its sign;
            0 at padding. There are no labels for models without a classifier of sentences.
        biases (`torch.Tensor` of shape `(batch, labels)`): What the biases of the model add to each logit, if they
            were kept apart, otherwise 0: `logits.sum(-1) + biases` are the logits of the model.
    """

    contributions: torch.Tensor
    logits: torch.Tensor
    biases: torch.Tensor

    columns = ["text", "label", "token", "share"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`: the shares of logits."""
        for text, labels in enumerate(self.logits.tolist()):
            for label, shares in enumerate(labels):
                yield from ((text, label, token, share) for token, share in enumerate(shares))


def token_decomposition(
    model: PreTrainedModel, batch: Mapping[str, Any], biases: str = "absdot"
) -> TokenDecomposition:
    """Decomposes hidden states and logits into contributions of each token, through whole layers (DecompX).

    In contrast to [`layer_contribution`], feed-forward blocks take part, vectors rather than their lengths are
    multiplied from layer to layer, and contributions to logits have a sign. For n tokens, a layer needs as many
    operations as n forward passes, and memory for n² hidden states.

    Args:
        model (`PreTrainedModel`): A BERT, CamemBERT, data2vec, ELECTRA, RoBERTa or XLM-R, including headwise and
            pruned models. Only models for the classification of sentences have logits.
        batch (`dict`): Arguments of a forward pass; labels are ignored.
        biases (`str`): How a bias b is shared out among the vectors v_k to whose sum it is added: in proportion to
            |⟨b, v_k⟩| (`absdot`, as in the paper), to ‖v_k‖ (`norm`), in equal parts (`equal`), or not at all
            (`apart`).

    Returns:
        [`TokenDecomposition`]: at least in single precision.

    Raises:
        ValueError: if `biases` is unknown; the model has other layers, an activation that is not 0 at 0, or another
            classifier; a text whose classifier reads padding, since it is padded on the left; or
            [`local_contribution`] does not accept the model or the batch.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model, batch = BertForSequenceClassification(config).eval(), {"input_ids": torch.tensor([[5, 7, 8, 3]])}
        >>> found = token_decomposition(model, batch)
        >>> found.contributions.shape, found.logits.shape
        (torch.Size([2, 1, 4, 4]), torch.Size([1, 2, 4]))
        >>> torch.allclose(found.logits.sum(-1), model(**batch).logits, atol=1e-5)
        True
    """
    if biases not in BIASES:
        raise ValueError(f"biases must be one of {', '.join(map(repr, BIASES))}, got {biases!r}.")
    reader = reader_of(model)
    states: dict[nn.Module, list[torch.Tensor]] = {}
    trace = trace_attention(model, batch, partial(save_states, reader, states))
    blocks = [block_of(reader, call.layer) for call in trace.calls]
    if others := [type(block).__name__ for block in blocks if not is_post_norm(block)]:
        raise ValueError(
            f"DecompX is defined for the post-norm layers of {POST_NORM_NAMES}, which {others[0]} of "
            f"{type(model).__name__} is not; layer_contribution() and token_relevance() read pre-norm models."
        )
    head = _classifier_of(unwrapped(model))
    if head and not trace.real[:, 0].all():
        raise ValueError(
            f"the classifier of {type(model).__name__} reads the first position, which is padding in text "
            f"{int((~trace.real[:, 0]).nonzero()[0])}; pad on the right."
        )
    sharing = _Sharing(biases)
    with torch.no_grad():
        return _decompose(trace, blocks, states, head, sharing)


def _decompose(
    trace: AttentionTrace,
    blocks: list[nn.Module],
    states: dict[nn.Module, list[torch.Tensor]],
    head: "_Classifier | None",
    sharing: "_Sharing",
) -> TokenDecomposition:
    count, length = trace.real.shape
    first = trace.calls[0].inputs
    table = first.new_zeros(
        len(trace.calls), count, length, length, dtype=torch.promote_types(first.dtype, torch.float32)
    )
    labels = head.labels if head else 0
    logits, remaining = table.new_zeros(count, labels, length), table.new_zeros(count, labels)
    for sentence, tokens in trace.sentences(first.device):
        number_of_tokens = len(tokens)
        own = first[sentence, tokens].to(table.dtype)
        vectors = sharing.with_place_for_biases(torch.diag_embed(own.T).permute(1, 2, 0))
        for number, (call, block) in enumerate(zip(trace.calls, blocks)):
            vectors = _Layer(call, block, states, sentence, tokens, sharing)(vectors)
            lengths = rows_to_one(vectors[:, :number_of_tokens].norm(dim=-1))
            table[number, sentence].index_put_((tokens[:, None], tokens), lengths)
        if head:
            shares = head(vectors[0], sharing)
            logits[sentence, :, tokens] = shares[:number_of_tokens].T
            remaining[sentence] = shares[number_of_tokens:].sum(0)
    return TokenDecomposition(table, logits, remaining)


@dataclass(frozen=True)
class _Sharing:
    """How biases are shared out among the vectors of tokens, see [`token_decomposition`]."""

    biases: str

    def with_place_for_biases(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors `(query, key, size)`, with one more key for biases that are kept apart."""
        return nn.functional.pad(vectors, (0, 0, 0, 1)) if self.biases == "apart" else vectors

    def add(self, vectors: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Adds a bias `(size,)` to the sum over the next-to-last dimension of `vectors`."""
        if self.biases == "apart":
            vectors = vectors.clone()
            vectors[..., -1, :] += bias
            return vectors
        if self.biases == "absdot":
            weights = (vectors @ bias).abs()
        elif self.biases == "norm":
            weights = vectors.norm(dim=-1)
        else:
            weights = vectors.new_ones(vectors.shape[:-1])
        weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, torch.ones_like(weights))
        return vectors + rows_to_one(weights)[..., None] * bias

    def linear(self, vectors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """A linear layer of the sum of vectors."""
        return self.add(vectors @ weight.T, bias)


def slope_from_zero(activation: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """φ(z)/z of an activation, or φ′(0) where z is 0.

    Args:
        activation (callable): φ, which acts on single numbers.
        inputs (`torch.Tensor`): z.

    Raises:
        ValueError: if φ(0) is not 0.
    """
    zero = inputs.new_zeros(1)
    at_zero, backward = torch.func.vjp(activation, zero)
    if at_zero.abs() > torch.finfo(inputs.dtype).eps:
        name = getattr(activation, "__name__", type(activation).__name__)
        raise ValueError(f"{name} is {at_zero.item():g} at 0, so that it is not the product of its input and a slope.")
    # The quotient of tiny numbers is not exact.
    is_tiny = inputs.abs() < torch.finfo(inputs.dtype).eps
    safe = torch.where(is_tiny, torch.ones_like(inputs), inputs)
    return torch.where(is_tiny, backward(torch.ones_like(zero))[0], activation(safe) / safe)


class _Layer:
    """A post-norm layer at the states of one sentence, as a function of vectors `(query, key, size)`."""

    def __init__(
        self,
        call: TracedAttention,
        block: nn.Module,
        states: dict[nn.Module, list[torch.Tensor]],
        sentence: int,
        tokens: torch.Tensor,
        sharing: _Sharing,
    ):
        self.sharing, self.has_heads = sharing, bool(call.layer.heads)
        self.dtype = torch.promote_types(call.inputs.dtype, torch.float32)

        def state(module: nn.Module) -> torch.Tensor:
            return state_of(states, module, sentence, tokens).to(self.dtype)

        def parts(projection: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
            weight, bias = weight_and_bias(projection, block)
            return weight.to(self.dtype), bias.to(self.dtype)

        self.norms = [
            (LayerNormAt(norm, state(norm)).scale, norm.bias.to(self.dtype))
            for norm in (block.attention.output.LayerNorm, block.output.LayerNorm)
        ]
        if self.has_heads:
            self.value = tuple(one.flatten(0, -2) for one in head_projections(call)[2])
            self.value = self.value[0], self.value[1].flatten()
            self.weights = call.weights[sentence][:, tokens[:, None], tokens].to(self.dtype)
            self.mix = gated_output(call, self.dtype)
        else:
            self.mix = parts(call.layer.output)
        self.up, self.down = parts(block.intermediate.dense), parts(block.output.dense)
        self.slope = slope_from_zero(block.intermediate.intermediate_act_fn, state(block.intermediate.dense))
        if (unit_gate := getattr(block, "unit_gate", None)) is not None:
            self.slope = self.slope * unit_gate.settled().to(self.dtype)

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        values = None
        if self.has_heads:
            weight, bias = self.value
            values = self.sharing.linear(vectors, weight, bias).unflatten(-1, (len(self.weights), -1))
        width = max(self.slope.shape[-1], vectors.shape[-1])
        queries = torch.arange(len(vectors), device=vectors.device)
        at_once = max(1, MAX_BLOCK // (vectors.shape[1] * width))
        return torch.cat([self._at(some, vectors[some], values) for some in queries.split(at_once)])

    def _at(self, queries: torch.Tensor, vectors: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
        """The output at some positions."""
        weight, bias = self.mix
        if values is None:
            attended = self.sharing.add(torch.zeros_like(vectors), bias)
        else:
            mixed = torch.einsum("hij,jkhd->ikhd", self.weights[:, queries], values).flatten(-2)
            attended = self.sharing.linear(mixed, weight, bias)
        attended = self._normalize(0, queries, vectors + attended)
        inner = self.sharing.linear(attended, *self.up) * self.slope[queries, None]
        return self._normalize(1, queries, attended + self.sharing.linear(inner, *self.down))

    def _normalize(self, number: int, queries: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        scale, bias = self.norms[number]
        return self.sharing.add((vectors - vectors.mean(-1, keepdim=True)) * scale[queries, None], bias)


@dataclass(eq=False)
class _Classifier:
    """A classifier of sentences: a projection of the first position, an activation, and a projection to the labels."""

    dense: nn.Module
    activation: Callable[[torch.Tensor], torch.Tensor]
    output: nn.Module

    @property
    def labels(self) -> int:
        return self.output.out_features

    def __call__(self, vectors: torch.Tensor, sharing: _Sharing) -> torch.Tensor:
        """Shares of the logits, `(key, labels)`, given the vectors of the first position."""
        weights = [[one.to(vectors) for one in weight_and_bias(layer, layer)] for layer in (self.dense, self.output)]
        inner = sharing.linear(vectors, *weights[0])
        inner = inner * slope_from_zero(self.activation, inner.sum(0))
        return sharing.linear(inner, *weights[1])


def _classifier_of(model: PreTrainedModel) -> _Classifier | None:
    """The classifier of sentences of a model, if it is one for their classification."""
    if not any(cls.__name__.endswith("ForSequenceClassification") for cls in type(model).__mro__):
        return None
    classifier = getattr(model, "classifier", None)
    if isinstance(classifier, nn.Linear):
        pooler = model.base_model.pooler
        return _Classifier(pooler.dense, pooler.activation, classifier)
    if all(isinstance(getattr(classifier, name, None), nn.Linear) for name in ("dense", "out_proj")):
        # Of the known ones, ELECTRA's alone names its activation.
        return _Classifier(classifier.dense, getattr(classifier, "activation", torch.tanh), classifier.out_proj)
    raise ValueError(
        f"the classifier of {type(model).__name__} is not known; pass its base model, model.base_model, to decompose "
        "hidden states alone."
    )
