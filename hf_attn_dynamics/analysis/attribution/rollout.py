# Licensed under the Apache License, Version 2.0.
"""Cheaper attribution methods for comparison: attention rollout, attention flow, value-weighted attention."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from .local import gated_output
from .statistics import tokens_of_maps
from .trace import TracedAttention, rows_to_one, trace_attention


FLOW_UNITS = 2**24  # capacities are integers: the sum of a row


def attention_rollout(maps: torch.Tensor, residual: float = 0.5) -> torch.Tensor:
    """Attention rollout (Abnar & Zuidema 2020): products of the layers' mean attention and residual connection.

        rollout_l = Â_l · rollout_{l−1},  Â_l = (1 − r) · mean over heads of A_l + r · I

    Args:
        maps (`torch.Tensor` of shape `(layers, batch, heads, query, key)`): Attention, see `attention_maps`, or
            contributions within layers. Removed heads, NaN, are left out of the mean.
        residual (`float`): Weight r of the residual connection, from 0 to 1.

    Returns:
        `torch.Tensor` of shape `(layers, batch, query, key)`: attribution of each position of a layer's output to the
        inputs of the first layer; rows of tokens sum to 1, padding is 0.

    Raises:
        ValueError: if `maps` has another shape, or `residual` is out of range.

    Example:
        >>> maps = torch.tensor([[0.5, 0.5], [0.0, 1.0]]).expand(2, 1, 1, 2, 2)
        >>> attention_rollout(maps)[1, 0]
        tensor([[0.5625, 0.4375],
                [0.0000, 1.0000]])
    """
    mixed = _with_residual(maps, residual)
    rolled = [mixed[0]]
    for layer in mixed[1:]:
        rolled.append(layer @ rolled[-1])
    return torch.stack(rolled)


def attention_flow(maps: torch.Tensor, residual: float = 0.5, layer: int = -1) -> torch.Tensor:
    """Attention flow (Abnar & Zuidema 2020): maximum flow from each position of a layer down to each input.

    The network has a node for each position of each layer; its capacities are Â_l of [`attention_rollout`], rounded to
    multiples of 2⁻²⁴. Each pair of tokens needs a maximum flow, so use it for short sentences.

    Args:
        maps (`torch.Tensor` of shape `(layers, batch, heads, query, key)`): See [`attention_rollout`].
        residual (`float`): See [`attention_rollout`].
        layer (`int`): Layer whose outputs are attributed; the last by default.

    Returns:
        `torch.Tensor` of shape `(batch, query, key)`: maximum flows, each at most 1; rows do not sum to 1. Padding is
        0.

    Raises:
        ValueError: if `maps` has another shape, or `residual` or `layer` is out of range.
        ImportError: if SciPy is not installed.

    Example:
        >>> maps = torch.tensor([[0.5, 0.5], [0.0, 1.0]]).expand(2, 1, 1, 2, 2)
        >>> attention_flow(maps)[0]
        tensor([[0.7500, 0.5000],
                [0.0000, 1.0000]])
    """
    try:
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow
    except ImportError as error:
        raise ImportError("attention_flow() needs SciPy: pip install scipy.") from error
    mixed = _with_residual(maps, residual)
    if not -len(mixed) <= layer < len(mixed):
        raise ValueError(f"layer must be one of {len(mixed)} layers, got {layer}.")
    mixed = mixed[: layer % len(mixed) + 1]
    real = tokens_of_maps(maps)
    flow = torch.zeros_like(mixed[0])
    for sentence, of_sentence in enumerate(real):
        tokens = of_sentence.nonzero().squeeze(-1)
        capacities = (mixed[:, sentence][:, tokens[:, None], tokens].double() * FLOW_UNITS).round().int().cpu()
        count, size = len(tokens), len(capacities) * len(tokens)
        # Position i of the outputs of layer l is node (l + 1)·count + i; inputs come first.
        network = torch.zeros(size + count, size + count, dtype=torch.int32)
        for number, capacity in enumerate(capacities):
            below = slice(number * count, (number + 1) * count)
            network[(number + 1) * count : (number + 2) * count, below] = capacity
        network = csr_array(network.numpy())
        values = [
            [maximum_flow(network, size + query, key).flow_value for key in range(count)] for query in range(count)
        ]
        flow[sentence].index_put_((tokens[:, None], tokens), (torch.tensor(values) / FLOW_UNITS).to(flow))
    return flow


def _with_residual(maps: torch.Tensor, residual: float) -> torch.Tensor:
    """Â_l of all layers, `(layers, batch, query, key)`."""
    if not 0 <= residual <= 1:
        raise ValueError(f"residual must lie between 0 and 1, got {residual}.")
    real = tokens_of_maps(maps)
    # A layer without heads is an identity.
    mean = maps.nanmean(2)
    identity = torch.diag_embed(real.to(maps.dtype))
    return ((1 - residual) * mean + residual * identity).where(~mean.isnan(), identity)


def value_weighted_attention(
    model: PreTrainedModel, batch: Mapping[str, Any], projected: bool = False, normalize: bool = True
) -> torch.Tensor:
    """Attention weights times the norms of the value vectors: ‖a_ji v_i‖ (Kobayashi et al. 2020).

    Args:
        model (`PreTrainedModel`): See `local_contribution`; values may be any function of the inputs.
        batch (`dict`): Arguments of a forward pass; labels are ignored.
        projected (`bool`): Whether to apply the head's part of the output projection to the values, ‖a_ji W_O v_i‖.
        normalize (`bool`): Whether to divide rows by their sums, as for contributions.

    Returns:
        `torch.Tensor` of shape `(layers, batch, heads, query, key)`: 0 at padding, NaN where a head is removed.

    Raises:
        ValueError: see `local_contribution`.
    """
    trace = trace_attention(model, batch)
    table = trace.table()
    with torch.no_grad():
        for number, call in enumerate(trace.calls):
            if call.weights is not None:
                norms = _projected_norms(call) if projected else call.value.norm(dim=-1)
                values = call.weights * norms[:, :, None]
                for sentence, tokens in trace.sentences(values.device):
                    own = values[sentence][:, tokens[:, None], tokens]
                    trace.put(table, number, sentence, tokens, rows_to_one(own) if normalize else own)
    return table


def _projected_norms(call: TracedAttention) -> torch.Tensor:
    """‖W_O v_i‖ of each head's part of the output projection, `(batch, heads, length)`."""
    weight, _ = gated_output(call, call.value.dtype)
    mix = weight.T.unflatten(0, (call.value.shape[1], -1))  # (heads, head_dim, hidden)
    return (call.value @ (mix @ mix.mT) * call.value).sum(-1).clamp(min=0).sqrt()
