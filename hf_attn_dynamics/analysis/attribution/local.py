# Licensed under the Apache License, Version 2.0.
"""Hidden Token Attribution of single heads (Pascal, Brunner & Wattenhofer 2021): within a layer.

The contribution of input i to head h at position j is

    C(x_i, o_hj) = ‖∂o_hj/∂x_i‖_F / Σ_m ‖∂o_hj/∂x_m‖_F

where o_hj is the output of the head, before gates and before heads are concatenated. This module computes the closed
form for the inputs of the head's own layer; for inputs of earlier layers see `global_contribution`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...models.head_roles import qualified_name, roles_of
from .trace import AttentionTrace, TracedAttention, rows_to_one, trace_attention


NORMS = ("frobenius", "spectral")
MAX_BLOCK = 2**18  # elements of an intermediate result, to fit into the CPU cache


def local_contribution(model: PreTrainedModel, batch: Mapping[str, Any], norm: str = "frobenius") -> torch.Tensor:
    """Contribution of each input of a layer to each of its heads, in closed form (Pascal et al. 2021, section 6).

    Inputs x_i are the inputs of the projections to queries, keys and values: the hidden states or, in pre-norm models
    (GPT-2, Llama, T5), the output of the layer norm. With weights a_j, values v_i = W_V x_i, output o_j = Σ_i a_ji v_i
    and u_ji = W_Kᵀ q_j/√d,

        ∂o_j/∂x_i = a_ji (W_V + (v_i − o_j) u_jiᵀ)                            for i ≠ j, and for i = j plus
                    Σ_m a_jm (v_m − o_j) (W_Qᵀ k_m)ᵀ/√d

    The norms are expanded into products of size d × d, without computing a Jacobian. Biases, grouped-query attention,
    rotary position embeddings (of all or some layers), additive position biases, queries that the layer scales (OPT,
    Whisper) and attention sinks are supported. Gates cancel, since they scale the whole output of a head. The result
    of a sentence depends neither on padding nor on the other sentences. For n tokens, each head needs O(n³ + n² d)
    operations; with rotary position embeddings, O(n² d²).

    The default is the Frobenius norm. The paper writes ‖·‖₂, literally the spectral norm. On single sentences of
    MiniLM, the mean Pearson correlation of attention with contributions is 0.91 to 0.93 with the Frobenius norm and
    0.75 to 0.82 with the spectral norm.

    Args:
        model (`PreTrainedModel`): An encoder or decoder of an architecture in `ATTENTION_ROLES`, including headwise
            and pruned models; of an encoder–decoder model, the encoder is used. The model is not changed.
        batch (`dict`): Arguments of a forward pass; labels are ignored.
        norm (`str`): `frobenius` or `spectral`, the largest singular value. The spectral norm needs an eigenvalue of a
            d × d matrix for each pair of tokens, O(n² d³) operations: use it for small models and short texts.

    Returns:
        `torch.Tensor` of shape `(layers, batch, heads, query, key)`: rows sum to 1 over the tokens of a sentence;
        padding is 0, removed heads are NaN. Float32, also for half-precision models, and float64 in double precision.
        If a module serves several layers (ALBERT), each call counts as a layer.

    Raises:
        ValueError: if `norm` is unknown; the model has attention of an unknown class, cross-attention, or queries and
            keys that are not linear in the inputs (normalized queries and keys, capped scores); or the batch has more
            tokens than the model has positions for.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> ids, mask = torch.tensor([[5, 7, 8, 3], [9, 3, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        >>> contribution = local_contribution(BertModel(config), {"input_ids": ids, "attention_mask": mask})
        >>> contribution.shape
        torch.Size([2, 2, 4, 4, 4])
        >>> contribution[0, 1, 0].sum(-1).round(decimals=4)
        tensor([1., 1., 0., 0.])
    """
    check_norm(norm)
    trace = trace_attention(model, batch)
    table = trace.table()
    with torch.no_grad():
        for number, call in enumerate(trace.calls):
            if call.weights is not None:
                for sentence, tokens, norms in _jacobian_norms(trace, call, norm):
                    trace.put(table, number, sentence, tokens, rows_to_one(norms))
    return table


def check_norm(norm: str) -> None:
    """Checks the name of a norm.

    Raises:
        ValueError: if it is unknown.
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}.")


def head_projections(call: TracedAttention) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and biases of the projections of a layer's inputs to queries, keys and values, by head.

    Args:
        call (`TracedAttention`): A call of a module that has heads.

    Returns:
        `list[tuple[torch.Tensor, torch.Tensor]]`: for queries, keys and values, of shapes `(heads, head_dim, hidden)`
        and `(heads, 1, head_dim)`; projections of keys and values are repeated for each query head. In the precision
        of the trace.

    Raises:
        ValueError: if the module projects with something other than a linear layer.
    """
    module, roles = call.layer.module, roles_of(call.layer.module)
    names = [next(name for name in roles.queries if hasattr(module, name)), *roles.keys]
    blocks = [weight_and_bias(getattr(module, name), module) for name in names]
    heads, size = call.query.shape[1], call.query.shape[-1]
    if not roles.keys:
        # One fused projection, with queries, keys and values in blocks or interleaved by head.
        fused = [one.unflatten(0, (-1, roles.interleaved, size)).movedim(1, 0).flatten(0, 2) for one in blocks[0]]
        blocks = list(zip(*(one.chunk(3) for one in fused)))
    by_head = [(weight.unflatten(0, (-1, size)), bias.unflatten(0, (-1, 1, size))) for weight, bias in blocks]
    return [
        tuple(one.repeat_interleave(heads // len(one), 0).to(call.query.dtype) for one in pair) for pair in by_head
    ]


def weight_and_bias(projection: nn.Module, owner: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a linear layer, `nn.Linear` or `Conv1D`, of shapes `(out, in)` and `(out,)`.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(projection, nn.Linear):
        weight = projection.weight
    elif type(projection).__name__ == "Conv1D":
        weight = projection.weight.T
    else:
        raise ValueError(
            f"{type(owner).__name__} projects with {qualified_name(projection)}, not with a linear layer, so its "
            "contributions have no closed form; merge adapters first, by PEFT's merge_and_unload()."
        )
    bias = getattr(projection, "bias", None)
    return weight, weight.new_zeros(weight.shape[0]) if bias is None else bias


def _linear_form(
    call: TracedAttention,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
    """Projections, see [`head_projections`], and rotations that give the queries, keys and values of a call.

    Raises:
        ValueError: if they are not linear in the inputs.
    """
    projections = head_projections(call)
    factor = getattr(call.layer.module, "scaling", None)
    if call.scaling == 1.0 and isinstance(factor, float):
        # OPT and Whisper scale the queries instead of the scores.
        projections[0] = tuple(factor * one for one in projections[0])
    reasons = []
    for rotary in _readings(call.rotary, call.query.shape[-1]):
        turns = None if rotary is None else _rotations(rotary, call.query.shape[-1], call.query.dtype)
        different = _first_difference(call, projections, turns)
        if different is None:
            return projections, turns
        reasons.append(different)
    raise ValueError(
        f"the {reasons[0]} of {type(call.layer.module).__name__} is not a linear function of the layer's inputs "
        "(for example normalized), so local_contribution() has no closed form for it; "
        "global_contribution(source=layer) differentiates through it."
    )


def _readings(
    rotary: tuple[torch.Tensor, torch.Tensor] | None, size: int
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Cosines and sines that a layer with heads of a size may use, given those that are passed to it.

    A layer may also use them for each half of the features (gpt-oss), or not at all (layers of SmolLM3 without
    positions).
    """
    if rotary is None:
        return [None]
    halves = [tuple(torch.cat((one, one), dim=-1) for one in rotary)] if 2 * rotary[0].shape[-1] <= size else []
    return [rotary, *halves, None]


def _first_difference(call: TracedAttention, projections: list, turns: torch.Tensor | None) -> str | None:
    """Which of query, key and value is not the projection of the inputs; `None` if all are."""
    inputs = call.inputs.to(call.query.dtype)
    precision = 1e-3 if call.inputs.dtype in (torch.float32, torch.float64) else 5e-2
    for name, (weight, bias) in zip(("query", "key", "value"), projections):
        found = getattr(call, name)
        expected = torch.nn.functional.linear(inputs, weight.flatten(0, 1), bias.flatten())
        expected = expected.unflatten(-1, weight.shape[:2]).transpose(1, 2)
        if turns is not None and name != "value":
            expected = (turns[:, None] @ expected[..., None]).squeeze(-1)
        if not (found - expected).abs().max() <= precision * found.abs().max():
            return name
    return None


def _rotations(rotary: tuple[torch.Tensor, torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rotary position embeddings as matrices R_i that rotate the first features of a query or key at position i.

    Args:
        rotary (`tuple[torch.Tensor, torch.Tensor]`): Cosines and sines, each `(batch or 1, length, rotated features)`.
        size (`int`): Size of a head.
        dtype (`torch.dtype`): Data type of the result.

    Returns:
        `torch.Tensor` of shape `(batch or 1, length, head_dim, head_dim)`.
    """
    cos, sin = (one[..., None, :].to(dtype) for one in rotary)
    turned = cos.shape[-1]
    units = torch.eye(turned, dtype=dtype, device=cos.device)
    first, second = units.chunk(2, dim=-1)
    block = (units * cos + torch.cat((-second, first), dim=-1) * sin).mT
    matrices = torch.eye(size, dtype=dtype, device=cos.device).repeat(*block.shape[:2], 1, 1)
    matrices[..., :turned, :turned] = block
    return matrices


@dataclass(eq=False)
class _Heads:
    """A block of heads in one sentence, in double precision; the first dimension of all tensors is heads.

    Args:
        query, key, value (`torch.Tensor` of shape `(heads, length, head_dim)`): Scaled queries, scaled keys, values.
        weights (`torch.Tensor` of shape `(heads, query, key)`): Attention weights.
        qq, kq, kk, vq, vk (`torch.Tensor` of shape `(heads, head_dim, head_dim)`): Products of projections, such as
            `kq` = W_K W_Qᵀ.
        vv (`torch.Tensor` of shape `(heads,)`): ‖W_V‖².
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: torch.Tensor
    qq: torch.Tensor
    kq: torch.Tensor
    kk: torch.Tensor
    vq: torch.Tensor
    vk: torch.Tensor
    vv: torch.Tensor

    @cached_property
    def output(self) -> torch.Tensor:
        """o_j."""
        return self.weights @ self.value

    def outward(self, vectors: torch.Tensor) -> torch.Tensor:
        """vectorsᵀ_j (v_i − o_j), `(heads, query, key)`."""
        return vectors @ self.value.mT - (vectors * self.output).sum(-1, keepdim=True)


def _jacobian_norms(
    trace: AttentionTrace, call: TracedAttention, norm: str
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Index and token positions of each sentence, and the norms of ∂o_hj/∂x_i, of shape `(heads, query, key)`."""
    if call.softcap is not None:
        raise ValueError(
            f"{type(call.layer.module).__name__} caps its scores, so local_contribution() has no closed form for it; "
            "global_contribution(source=layer) differentiates through it."
        )
    projections, turns = _linear_form(call)
    (q, _), (k, _), (v, _) = projections
    grams = [q @ q.mT, k @ q.mT, k @ k.mT, v @ q.mT, v @ k.mT, v.square().sum((-2, -1))]
    terms = _plain_terms if turns is None else _rotary_terms
    for sentence, tokens in trace.sentences(call.weights.device):
        own_turns = () if turns is None else (turns[sentence % len(turns), tokens].double(),)
        query, key, value = (one[sentence][:, tokens] for one in (call.query, call.key, call.value))
        weights = call.weights[sentence][:, tokens[:, None], tokens]
        if norm == "spectral":
            scaled = (one.double() for one in (query * call.scaling, key * call.scaling, value, weights))
            yield sentence, tokens, _spectral_norms(*scaled, torch.cat([v, k, q], 1).double(), *own_turns).to(query)
            continue
        tensors = [query * call.scaling, key * call.scaling, value, weights, *grams]
        row = len(tokens) if turns is None else call.query.shape[-1] ** 2
        at_once = max(1, MAX_BLOCK // (len(tokens) * row))
        blocks = (_Heads(*(one.double() for one in block)) for block in zip(*(one.split(at_once) for one in tensors)))
        squares = torch.cat([_squared_norms(heads, *terms(heads, *own_turns)) for heads in blocks])
        # Rounding can make small squares negative.
        yield sentence, tokens, squares.clamp(min=0).sqrt().to(call.query.dtype)


def _spectral_norms(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: torch.Tensor,
    projections: torch.Tensor,
    turns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Largest singular value of ∂o_j/∂x_i = L_ji P, of shape `(heads, query, key)`.

    P stacks the projections to values, keys and queries, and L_ji = [a_ji 1, a_ji (v_i − o_j)(R_iᵀ q_j)ᵀ, M_j R_j],
    where the last block, with M_j = Σ_m a_jm (v_m − o_j) k_mᵀ, is zero for i ≠ j. The singular values of the Jacobian
    follow from the d × d matrix L_ji P Pᵀ L_jiᵀ.

    Args:
        query, key, value (`torch.Tensor` of shape `(heads, length, head_dim)`): Scaled queries, scaled keys, values.
        weights (`torch.Tensor` of shape `(heads, query, key)`): Attention weights.
        projections (`torch.Tensor` of shape `(heads, 3 · head_dim, hidden)`): P.
        turns (`torch.Tensor` of shape `(length, head_dim, head_dim)`, *optional*): R_i of rotary position embeddings.
    """
    size, gram, rows = value.shape[-1], projections @ projections.mT, []
    unit = torch.eye(size, dtype=value.dtype, device=value.device)
    for position in range(query.shape[1]):
        own, attention = query[:, position, None], weights[:, position, :, None]
        away = value - attention.mT @ value  # v_i − o_j
        # (R_iᵀ q_j)ᵀ = q_jᵀ R_i
        straight = own.expand_as(key) if turns is None else (own[:, :, None] @ turns).squeeze(-2)
        moment = (attention * away).mT @ key
        left = value.new_zeros(*value.shape, 3 * size)
        left[..., :size] = attention[..., None] * unit
        left[..., size : 2 * size] = (attention * away)[..., :, None] * straight[..., None, :]
        left[:, position, :, 2 * size :] = moment if turns is None else moment @ turns[position]
        rows.append(largest_singular_values(left @ gram[:, None] @ left.mT))
    return torch.stack(rows, 1)


def largest_singular_values(products: torch.Tensor) -> torch.Tensor:
    """Largest singular values of matrices J, `(…)`, given J Jᵀ of shape `(…, size, size)`."""
    # Rounding can make small eigenvalues negative.
    return torch.linalg.eigvalsh(products)[..., -1].clamp(min=0).sqrt()


def _squared_norms(
    heads: _Heads, outward: torch.Tensor, lengths: torch.Tensor, through_query: torch.Tensor
) -> torch.Tensor:
    """‖∂o_j/∂x_i‖² of shape `(heads, query, key)`.

    Args:
        heads (`_Heads`): The heads.
        outward (`torch.Tensor` of shape `(heads, query, key)`): (v_i − o_j)ᵀ W_V u_ji.
        lengths (`torch.Tensor` of shape `(heads, query, key or 1)`): ‖u_ji‖².
        through_query (`torch.Tensor` of shape `(heads, length)`): The terms for i = j, where the query depends on x_j.
    """
    value, output = heads.value, heads.output
    distances = (output.square().sum(-1, keepdim=True) - 2 * output @ value.mT) + value.square().sum(-1)[:, None]
    squares = heads.weights.square() * (heads.vv[:, None, None] + 2 * outward + distances * lengths)
    squares.diagonal(dim1=-2, dim2=-1).add_(through_query)
    return squares


def _plain_terms(heads: _Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The terms of [`_squared_norms`] without rotary position embeddings: u_ji = W_Kᵀ q_j depends on the query alone.

    The terms of B_j = Σ_m a_jm (v_m − o_j)(W_Qᵀ k_m)ᵀ are linear and quadratic forms in a_j, with the same matrices
    for all queries. Quadratic forms suffer cancellation for sharp attention, hence double precision.
    """
    query, key, value, weights, output = heads.query, heads.key, heads.value, heads.weights, heads.output
    outward = heads.outward(query @ heads.vk.mT)
    lengths = (query @ heads.kk * query).sum(-1, keepdim=True)

    # ⟨W_V + (v_j − o_j) u_jᵀ, B_j⟩
    crossed = (weights @ (value @ heads.vq * key).sum(-1, keepdim=True)).squeeze(-1)
    crossed -= (output @ heads.vq * (weights @ key)).sum(-1)
    crossed += (weights * heads.outward(value - output) * (query @ heads.kq @ key.mT)).sum(-1)
    # ‖B_j‖² = Σ_mp a_jm a_jp κ_mp (v_m − o_j)ᵀ(v_p − o_j) with κ_mp = k_mᵀ W_Q W_Qᵀ k_p
    kappa = key @ heads.qq @ key.mT
    around = output.square().sum(-1, keepdim=True) - 2 * output @ value.mT
    squared = ((weights @ (kappa * (value @ value.mT)) + (weights * around) @ kappa) * weights).sum(-1)
    return outward, lengths, 2 * weights.diagonal(dim1=-2, dim2=-1) * crossed + squared


def _rotary_terms(heads: _Heads, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The terms of [`_squared_norms`] with rotary position embeddings: u_ji = (R_i W_K)ᵀ q_j depends on the input.

    Args:
        heads (`_Heads`): The heads.
        turns (`torch.Tensor` of shape `(length, head_dim, head_dim)`): R_i.
    """
    query, key, value, weights, output = heads.query, heads.key, heads.value, heads.weights, heads.output
    outward = query @ (turns @ (value @ heads.vk)[..., None]).squeeze(-1).mT
    outward -= _forms(query, turns[None], output @ heads.vk)
    lengths = _forms(query, turns @ heads.kk[:, None] @ turns.mT, query)

    # B_j = M_j R_j W_Q with M_j = Σ_m a_jm (v_m − o_j) k_mᵀ
    moments = (weights @ _outer(value, key)).unflatten(-1, (value.shape[-1], -1))
    moments = (moments - output[..., :, None] * (weights @ key)[..., None, :]) @ turns
    straight = (query[..., None, :] @ turns).squeeze(-2) @ heads.kq
    crossed = (moments * heads.vq[:, None]).sum((-2, -1))
    crossed += ((value - output)[..., None, :] @ moments @ straight[..., None]).flatten(-3)
    squared = (moments @ heads.qq[:, None] * moments).sum((-2, -1))
    return outward, lengths, 2 * weights.diagonal(dim1=-2, dim2=-1) * crossed + squared


def _forms(left: torch.Tensor, matrices: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Bilinear forms leftᵀ_j A_i right_j of vectors `(heads, length, size)`, `(heads, length, matrices)`."""
    return _outer(left, right) @ matrices.flatten(2).mT


def _outer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left[..., :, None] * right[..., None, :]).flatten(2)
