# Licensed under the Apache License, Version 2.0.
"""Hidden Token Attribution of single heads to the input of the model (Pascal, Brunner & Wattenhofer 2021, section 8).

Tangents of the input, one for each token and direction, are propagated through the layers once, which gives
‖∂o_hj/∂x_i‖ for every layer, head and position. In post-norm layers (BERT), propagation is a few matrix products:

    head outputs   do_j = Σ_m a_jm (dv_m + (v_m − o_j) ds_jm),  ds_jm = (dq_jᵀ k_m + q_jᵀ dk_m)/√d
    the rest       acts on single positions, by one matrix for each, LN₂ (I + W₂ diag(φ′) W₁) LN₁; forming it is
                   cheaper than applying its factors to every tangent

Other layers are differentiated by PyTorch's forward mode.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.autograd import forward_ad
from transformers import PreTrainedModel

from ...models.number_checks import is_integer
from ..model_parts import block_of
from ..model_views import ModelView
from ..running import arguments_of, reader_of
from .head_jacobians import largest_singular_values
from .local import check_norm, gated_output, head_projections, weight_and_bias
from .trace import AttentionTrace, TracedAttention, rows_to_one, trace_attention


EMBEDDINGS, EMBEDDING_SUM = "embeddings", "embedding_sum"

# Layers whose tangents are propagated by matrix products: attention, add, norm; feed-forward, add, norm.
_POST_NORM_LAYERS = (
    "BertLayer",
    "CamembertLayer",
    "Data2VecTextLayer",
    "ElectraLayer",
    "RobertaLayer",
    "XLMRobertaLayer",
)
POST_NORM_NAMES = "BERT, CamemBERT, data2vec, ELECTRA, RoBERTa and XLM-R"


@overload
def global_contribution(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    method: str = "exact",
    probes: int = 32,
    chunk_size: int = 768,
    source: str | int = EMBEDDINGS,
    seed: int = 0,
    return_standard_error: Literal[False] = False,
    norm: str = "frobenius",
    on_sentence: Callable[[], Any] | None = None,
) -> torch.Tensor: ...
@overload
def global_contribution(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    method: str = "exact",
    probes: int = 32,
    chunk_size: int = 768,
    source: str | int = EMBEDDINGS,
    seed: int = 0,
    *,
    return_standard_error: Literal[True],
    norm: str = "frobenius",
    on_sentence: Callable[[], Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def global_contribution(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    method: str = "exact",
    probes: int = 32,
    chunk_size: int = 768,
    source: str | int = EMBEDDINGS,
    seed: int = 0,
    return_standard_error: bool = False,
    norm: str = "frobenius",
    on_sentence: Callable[[], Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Contribution of each input token to each head of every layer (Pascal et al. 2021, section 8).

        C(x_i, o_hj) = ‖∂o_hj/∂x_i‖_F / Σ_m ‖∂o_hj/∂x_m‖_F

    `exact` propagates a tangent for each token and dimension of its embedding. `probes` draws k random orthonormal
    directions q for each token and estimates ‖J‖_F² ≈ (d/k)·Σ_q ‖J q‖², which is unbiased, and exact for k = d.
    Neither depends on padding or on the other sentences of the batch. The default is the Frobenius norm; the paper
    writes ‖·‖₂, literally `norm="spectral"`.

    Args:
        model (`PreTrainedModel`): See [`local_contribution`]. Layers of BERT, CamemBERT, data2vec, ELECTRA, RoBERTa
            and XLM-R, including headwise and pruned models, are fast. Other layers are differentiated by PyTorch's
            forward mode, several times slower; their queries and keys may be any function of the inputs.
        batch (`dict`): Arguments of a forward pass; labels are ignored.
        method (`str`): `exact` or `probes`.
        probes (`int`): Directions per token, from 2 to the size of the embeddings; only for `probes`.
        chunk_size (`int`): Tangents per chunk; lower it to save memory. The result does not depend on it. On a CPU,
            128 is faster for sentences of a hundred tokens.
        source (`str` or `int`): What contributes: `embeddings`, the input of the first layer (sum of word, position
            and segment embeddings, after layer norm); `embedding_sum`, the same before layer norm (post-norm layers
            only); or the number of a layer, for its input. In pre-norm models, the input of a layer is taken before
            its norm, whereas [`local_contribution`] starts after it.
        seed (`int`): Random seed of the directions.
        return_standard_error (`bool`): Whether to return standard errors as well.
        norm (`str`): `frobenius` or `spectral`, the largest singular value. The spectral norm is not available with
            `probes`, and stores a d × d matrix for each pair of tokens: use it for small models and short texts.
        on_sentence (callable, *optional*): Called after each sentence of the batch, e.g. to update a progress bar.

    Returns:
        `torch.Tensor` of shape `(layers, batch, heads, query, key)`: see [`local_contribution`]; layers before the
        source are NaN as well. With `return_standard_error`, a pair of such tensors: contributions, and their
        first-order standard errors over random directions (0 for `exact`). On sentences of MiniLM, ±1.96 standard
        errors cover 92 to 93 % of the exact contributions with 32 probes, and 84 to 85 % with 4, instead of 95 %:
        standard errors from few probes are too small.

        For half-precision models, hidden states have half precision and tangents through post-norm layers are float32:
        contributions are within 0.02 of those in single precision.

    Raises:
        ValueError: if `method`, `probes`, `chunk_size`, `source` or `norm` is unknown or out of range, or
            [`local_contribution`] does not accept the model or the batch.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model, batch = BertModel(config), {"input_ids": torch.tensor([[5, 7, 8, 3]])}
        >>> exact = global_contribution(model, batch)
        >>> exact.shape
        torch.Size([2, 1, 4, 4, 4])
        >>> estimate, error = global_contribution(model, batch, "probes", probes=8, return_standard_error=True)
        >>> bool(((estimate - exact).abs() < 6 * error).all())
        True
    """
    if method not in ("exact", "probes"):
        raise ValueError(f"method must be 'exact' or 'probes', got {method!r}.")
    check_norm(norm)
    if norm == "spectral" and method == "probes":
        raise ValueError(
            "norm='spectral' needs the whole Jacobian, of which probes are only some directions; pass method='exact' "
            "or norm='frobenius'."
        )
    if not is_integer(chunk_size) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a whole number of tangents, at least 1, got {chunk_size!r}.")
    if source not in (EMBEDDINGS, EMBEDDING_SUM) and not is_integer(source):
        raise ValueError(f"source must be {EMBEDDINGS!r}, {EMBEDDING_SUM!r} or the number of a layer, got {source!r}.")
    reader = reader_of(model)
    states: dict[nn.Module, list[torch.Tensor]] = {}
    trace = trace_attention(model, batch, partial(save_states, reader, states))
    start = int(source) if is_integer(source) else 0
    if not 0 <= start < len(trace.calls):
        raise ValueError(f"source is layer {start}, but the layers are 0 to {len(trace.calls) - 1}.")
    size, propagation = _propagation(model, batch, trace, states, start, source == EMBEDDING_SUM)
    if method == "probes" and not (is_integer(probes) and 2 <= probes <= size):
        raise ValueError(
            f"probes must be a whole number from 2 to {size}, the size of the embeddings, got {probes!r}; "
            "method='exact' uses all dimensions."
        )
    on_sentence = on_sentence or (lambda: None)
    contribution, error = trace.table(), trace.table()
    for table in (contribution, error):
        table[:start] = math.nan
    with torch.no_grad():
        for sentence, tokens in trace.sentences():
            if norm == "spectral":
                for number, norms in _spectral_norms(
                    propagation(sentence, tokens), len(tokens), size, chunk_size, error
                ):
                    trace.put(contribution, number, sentence, tokens, rows_to_one(norms))
                    trace.put(error, number, sentence, tokens, torch.zeros_like(norms))
                on_sentence()
                continue
            frames = _frames(len(tokens), size, probes if method == "probes" else None, seed, contribution)
            sums = _sums(propagation(sentence, tokens), frames, len(tokens), chunk_size)
            for number, (total, total_of_squares) in sums.items():
                values, deviations = _normalized(total, total_of_squares, frames.shape[1], size)
                trace.put(contribution, number, sentence, tokens, values)
                trace.put(error, number, sentence, tokens, deviations)
            on_sentence()
    return (contribution, error) if return_standard_error else contribution


# Takes tangents, (tangents, size), and their positions, (tangents,); yields the number of each layer and the tangents
# of its head outputs, (heads, query, tangents, head_dim).
Propagation = Callable[[torch.Tensor, torch.Tensor], Iterator[tuple[int, torch.Tensor]]]


def _propagation(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    trace: AttentionTrace,
    states: dict[nn.Module, list[torch.Tensor]],
    start: int,
    before_norm: bool,
) -> tuple[int, Callable[[int, torch.Tensor], Propagation]]:
    """Size of the tangents, and a function that returns the propagation of a sentence, given its index and tokens."""
    reader = reader_of(model)
    blocks = [block_of(reader, call.layer) for call in trace.calls]
    size = trace.calls[start].inputs.shape[-1]
    if all(is_post_norm(block) for block in blocks):
        if before_norm:
            size = reader.embeddings.LayerNorm.weight.numel()
        return size, partial(_by_hand, trace, blocks, states, start, reader if before_norm else None)
    if before_norm:
        raise ValueError(
            f"source={EMBEDDING_SUM!r} is not supported for {type(model).__name__}; use {EMBEDDINGS!r}, the input of "
            "the first layer."
        )
    return size, partial(_by_forward_mode, model, batch, trace, blocks, start)


def is_post_norm(block: nn.Module) -> bool:
    # Other libraries may use the same names for other layers.
    return type(block).__name__ in _POST_NORM_LAYERS and type(block).__module__.startswith("transformers.models.")


def _frames(length: int, size: int, probes: int | None, seed: int, like: torch.Tensor) -> torch.Tensor:
    """Orthonormal directions of each token, `(length or 1, directions, size)`."""
    if probes is None:
        return torch.eye(size, dtype=like.dtype, device=like.device)[None]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(length, size, probes, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(noise).Q.mT.to(like)


def _sums(
    propagate: Propagation, frames: torch.Tensor, length: int, chunk_size: int
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Sums over directions of squared norms and of their squares, `(heads, query, key)`, by layer."""
    sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for tangents in torch.arange(length * frames.shape[1], device=frames.device).split(chunk_size):
        positions, directions = tangents // frames.shape[1], tangents % frames.shape[1]
        for number, changes in propagate(frames[positions % len(frames), directions], positions):
            squares = changes.square().sum(-1).double()
            if number not in sums:
                sums[number] = tuple(squares.new_zeros(*squares.shape[:2], length) for _ in range(2))
            for total, addend in zip(sums[number], (squares, squares.square())):
                total.index_add_(2, positions, addend)
    return sums


def _spectral_norms(
    propagate: Propagation, length: int, size: int, chunk_size: int, like: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """Number of each layer, and the largest singular values of ∂o_j/∂x_i, `(heads, query, key)`, float64."""
    directions = torch.eye(size, dtype=like.dtype, device=like.device)
    norms: dict[int, list[torch.Tensor]] = {}
    for position in range(length):
        # J Jᵀ is a sum over directions.
        products: dict[int, torch.Tensor] = {}
        for some in directions.split(chunk_size):
            positions = torch.full((len(some),), position, device=like.device)
            for number, changes in propagate(some, positions):
                changes = changes.double()
                products[number] = products.get(number, 0) + changes.mT @ changes
        for number, product in products.items():
            norms.setdefault(number, []).append(largest_singular_values(product))
    for number, columns in norms.items():
        yield number, torch.stack(columns, -1)


def _normalized(
    total: torch.Tensor, total_of_squares: torch.Tensor, count: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contributions and their standard errors from sums over `count` of `size` orthonormal directions."""
    norms = (size / count * total).sqrt()
    contribution = rows_to_one(norms)
    if count == size:
        return contribution, torch.zeros_like(contribution)
    # Finite-population correction: directions are drawn without replacement.
    variance = (total_of_squares - total.square() / count).clamp(min=0) / (count - 1) * (1 - count / size) / count
    # First-order error propagation through the root and through r_i/Σr; errors of inputs are independent.
    variance = size**2 * variance / (4 * norms.square()).clamp(min=torch.finfo(norms.dtype).tiny)
    spread = (1 - 2 * contribution) * variance + contribution.square() * variance.sum(-1, keepdim=True)
    totals = norms.sum(-1, keepdim=True).clamp(min=torch.finfo(norms.dtype).tiny)
    return contribution, spread.clamp(min=0).sqrt() / totals


def save_states(reader: nn.Module, states: dict[nn.Module, list[torch.Tensor]], view: ModelView) -> None:
    """Saves inputs of layer norms and outputs of the first feed-forward projection, for module names of BERT."""

    def save(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        # Feed-forward layers may be called on chunks of a sentence.
        states.setdefault(module, []).append(inputs[0] if isinstance(module, nn.LayerNorm) else output)

    for name, module in reader.named_modules():
        if name.endswith(("LayerNorm", "intermediate.dense")):
            view.after(module, save)


def state_of(
    states: Mapping[nn.Module, list[torch.Tensor]], module: nn.Module, sentence: int, tokens: torch.Tensor
) -> torch.Tensor:
    """What `save_states` saved of a module at the tokens of a sentence, `(tokens, size)`."""
    return torch.cat(states[module], dim=1)[sentence, tokens]


class LayerNormAt:
    """Propagates tangents through a layer norm, at the states of one sentence.

    Args:
        norm (`nn.LayerNorm`): The module.
        states (`torch.Tensor` of shape `(length, size)`): Its input.
    """

    def __init__(self, norm: nn.LayerNorm, states: torch.Tensor):
        variance, mean = torch.var_mean(states, -1, correction=0, keepdim=True)
        inverse = (variance + norm.eps).rsqrt()
        self.normal = (states - mean) * inverse
        self.scale = norm.weight.to(states) * inverse

    def __call__(self, position: int | torch.Tensor, tangents: torch.Tensor) -> torch.Tensor:
        """Tangents `(tangents, size)` at one position, or at one position each."""
        normal = self.normal[position]
        centered = tangents - tangents.mean(-1, keepdim=True)
        return (centered - normal * (centered * normal).mean(-1, keepdim=True)) * self.scale[position]


class _PostNormLayer:
    """Propagates tangents of shape `(length, tangents, size)` through a post-norm layer, at the states of a sentence.

    Args:
        call (`TracedAttention`): The attention call of the layer.
        block (`nn.Module`): The layer.
        states (`dict[nn.Module, list[torch.Tensor]]`): See `save_states`.
        sentence (`int`), tokens (`torch.Tensor`): Sentence of the batch and positions of its tokens.
    """

    def __init__(
        self,
        call: TracedAttention,
        block: nn.Module,
        states: dict[nn.Module, list[torch.Tensor]],
        sentence: int,
        tokens: torch.Tensor,
    ):
        dtype = torch.promote_types(call.inputs.dtype, torch.float32)

        def state(module: nn.Module) -> torch.Tensor:
            return state_of(states, module, sentence, tokens).to(dtype)

        self.attention_norm = LayerNormAt(block.attention.output.LayerNorm, state(block.attention.output.LayerNorm))
        self.output_norm = LayerNormAt(block.output.LayerNorm, state(block.output.LayerNorm))
        # Raises errors for adapters.
        self.up = weight_and_bias(block.intermediate.dense, block)[0].to(dtype)
        self.down = weight_and_bias(block.output.dense, block)[0].to(dtype)
        inner = state(block.intermediate.dense)
        # Derivative of the activation, which acts on single units.
        self.slope = torch.func.vjp(block.intermediate.intermediate_act_fn, inner)[1](torch.ones_like(inner))[0]
        if (unit_gate := getattr(block, "unit_gate", None)) is not None:
            self.slope = self.slope * unit_gate.settled().to(dtype)
        self.has_heads = bool(call.layer.heads)
        if self.has_heads:
            self.query, self.key = (one[sentence][:, tokens] * call.scaling for one in (call.query, call.key))
            self.value = call.value[sentence][:, tokens]
            self.weights = call.weights[sentence][:, tokens[:, None], tokens]
            self.project = torch.cat([weight.flatten(0, 1) for weight, _ in head_projections(call)])
            self.mix = gated_output(call, dtype)[0]

    def heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Tangents of the head outputs, `(heads, length, tangents, head_dim)`, given tangents of the projections."""
        query, key, value = projected.unflatten(-1, (3, len(self.query), -1)).permute(2, 3, 0, 1, 4)
        outputs = torch.empty_like(value, memory_format=torch.contiguous_format)
        # Head by head, to save memory: intermediate tensors hold a number per pair of tokens and tangent.
        for number, output in enumerate(outputs):
            weights = self.weights[number]
            change = _products(query[number], self.key[number])  # (query, tangents, key)
            change += _products(key[number], self.query[number]).transpose(0, 2)
            change *= weights[:, None]
            change -= weights[:, None] * change.sum(-1, keepdim=True)
            through_values = (weights @ value[number].flatten(1)).view_as(output)
            torch.add(_products(change, self.value[number].mT), through_values, out=output)
        return outputs

    def rest(self, states: torch.Tensor, heads: torch.Tensor | None) -> torch.Tensor:
        """Tangents of the output, `(length, tangents, size)`, given tangents of the input and of the head outputs."""
        if heads is not None:
            mixed = heads.permute(1, 2, 0, 3).flatten(2)
            states = states.flatten(0, 1).addmm(mixed.flatten(0, 1), self.mix.T).view_as(states)
        return torch.stack([self._at(position, tangents) for position, tangents in enumerate(states)])

    def _at(self, position: int, tangents: torch.Tensor) -> torch.Tensor:
        """Tangents of the output at one position, `(tangents, size)`, given tangents of the first norm's input."""
        attended = self.attention_norm(position, tangents)
        # multi_dot chooses the cheapest order: for many tangents, W₂ diag(φ′) W₁ first.
        inner = torch.linalg.multi_dot((attended, self.up.T * self.slope[position], self.down.T))
        return self.output_norm(position, attended + inner)


def _products(tangents: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Inner products of tangents `(length, tangents, size)` with vectors `(count, size)`."""
    return (tangents.flatten(0, 1) @ vectors.mT).unflatten(0, tangents.shape[:2])


def _by_hand(
    trace: AttentionTrace,
    blocks: list[nn.Module],
    states: dict[nn.Module, list[torch.Tensor]],
    start: int,
    entry: PreTrainedModel | None,
    sentence: int,
    tokens: torch.Tensor,
) -> Propagation:
    """Propagation through post-norm layers from layer `start`, or from before the embedding norm of `entry`."""
    calls = zip(trace.calls[start:], blocks[start:])
    layers = [_PostNormLayer(call, block, states, sentence, tokens) for call, block in calls]
    if entry is not None:
        norm = entry.embeddings.LayerNorm
        embedding_norm = LayerNormAt(norm, state_of(states, norm, sentence, tokens).to(layers[0].up.dtype))

    def propagate(directions: torch.Tensor, positions: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        if entry is not None:
            directions = embedding_norm(positions, directions)
            if hasattr(entry, "embeddings_project"):
                directions = directions @ entry.embeddings_project.weight.to(directions.dtype).T
        # A tangent starts at a single position, so the first projection is needed there only.
        tangents = _spread(directions, positions, len(tokens))
        for number, layer in enumerate(layers):
            heads = None
            if layer.has_heads:
                projected = (tangents if number else directions) @ layer.project.T
                heads = layer.heads(projected if number else _spread(projected, positions, len(tokens)))
                yield start + number, heads
            if number < len(layers) - 1:
                tangents = layer.rest(tangents, heads)

    return propagate


def _spread(tangents: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Tangents `(tangents, size)` at their positions, with zeros elsewhere, `(length, tangents, size)`."""
    spread = tangents.new_zeros(length, *tangents.shape)
    spread[positions, torch.arange(len(positions), device=positions.device)] = tangents
    return spread


def _by_forward_mode(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    trace: AttentionTrace,
    blocks: list[nn.Module],
    start: int,
    sentence: int,
    tokens: torch.Tensor,
) -> Propagation:
    """Propagation through any layers in forward mode: a batch that repeats the sentence for each tangent."""
    count, length = trace.real.shape
    inputs = arguments_of(reader_of(model), batch)
    if all(value.shape == trace.real.shape for value in inputs.values() if torch.is_tensor(value)):
        # Drops padding on the right, which would be repeated as well.
        length = int(tokens[-1]) + 1
        inputs = {name: value[:, :length] if torch.is_tensor(value) else value for name, value in inputs.items()}

    def propagate(directions: torch.Tensor, positions: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        copies = torch.full_like(positions, sentence)
        repeated = {
            name: value.to(positions.device)[copies]
            if torch.is_tensor(value) and value.shape[:1] == (count,)
            else value
            for name, value in inputs.items()
        }
        tangents = _spread(directions, tokens[positions], length).transpose(0, 1)
        with forward_ad.dual_level():
            trace = trace_attention(model, repeated, partial(_give_tangents, blocks, start, tangents))
            for number, call in enumerate(trace.calls):
                if number >= start and call.output is not None:
                    change = forward_ad.unpack_dual(call.output).tangent[:, :, tokens]
                    yield number, change.permute(1, 2, 0, 3)

    return propagate


def _give_tangents(blocks: list[nn.Module], start: int, tangents: torch.Tensor, view: ModelView) -> None:
    """Sets the tangents of the input of layer `start`."""
    calls = itertools.count()

    def begin(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if next(calls) != start:
            return None
        if args:
            return (forward_ad.make_dual(args[0], tangents.to(args[0].dtype)), *args[1:]), kwargs
        states = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": forward_ad.make_dual(states, tangents.to(states.dtype))}

    for block in dict.fromkeys(blocks):
        view.before(block, begin)
