# Licensed under the Apache License, Version 2.0.
"""Contributions of tokens through whole layers: all heads, output projection, residual connection and layer norm.

The output of an attention block at position i is a sum of vectors of the positions j,

    T_i(x_j) = Σ_h a_hij W_O,h v_hj  (+ x_i for j = i),

a bias, and in post-norm layers a layer norm, which is linear once its standard deviation is known. ALTI (Ferrando et
al. 2022) measures how close each summand is to the output, GlobEnc (Modarressi et al. 2022) how long it is.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...models.head_roles import locate_heads
from ..model_parts import block_of
from ..model_views import ModelView
from ..running import reader_of
from .across_layers import LayerNormAt, is_post_norm, save_states, state_of
from .local import gated_output
from .trace import TracedAttention, rows_to_one, trace_attention


METHODS = ("alti", "globenc")


def layer_contribution(
    model: PreTrainedModel, batch: Mapping[str, Any], method: str = "alti", aggregate: bool = True
) -> torch.Tensor:
    """Contribution of each token to each position of a layer, through all heads and the residual connection.

        alti     c_ij = max(0, ‖y_i‖₁ − ‖y_i − T_i(x_j)‖₁),  y_i the output of the attention block after its norm
        globenc  c_ij = ‖LN₂(T_i(x_j))‖₂, where the feed-forward block only counts in the residual of the second norm

    each divided by its sum over j. In pre-norm layers, y_i is the residual stream after the attention block. As in the
    papers, the feed-forward block mixes no tokens and is left out.

    Args:
        model (`PreTrainedModel`): See [`local_contribution`]; queries and keys may be any function of the inputs.
            Layers are those of a pre-norm model, or the post-norm layers of BERT, CamemBERT, data2vec, ELECTRA,
            RoBERTa and XLM-R, for which alone GlobEnc is defined.
        batch (`dict`): Arguments of a forward pass; labels are ignored.
        method (`str`): `alti` or `globenc`.
        aggregate (`bool`): Whether to multiply the layers, `C_l · C_{l−1} · … · C_1`: contributions of the input of
            the model. Otherwise they are those of the input of each layer.

    Returns:
        `torch.Tensor` of shape `(layers, batch, query, key)`: rows of tokens sum to 1, except that they are 0 where no
        token brings the output nearer (`alti`); padding is 0.

    Raises:
        ValueError: if `method` is unknown, layers normalize in another way than these methods know, or see
            [`local_contribution`].

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> found = layer_contribution(BertModel(config), {"input_ids": torch.tensor([[5, 7, 8]])})
        >>> found.shape, found.sum(-1).round(decimals=4).unique().tolist()
        (torch.Size([2, 1, 3, 3]), [1.0])
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}.")
    reader = reader_of(model)
    states: dict[nn.Module, list[torch.Tensor]] = {}
    residuals: list[torch.Tensor] = []
    trace = trace_attention(model, batch, partial(_save, reader, states, residuals))
    blocks = [block_of(reader, call.layer) for call in trace.calls]
    for call, block, residual in zip(trace.calls, blocks, residuals):
        _check(model, call, block, residual, method)
    count, length = trace.real.shape
    table = trace.calls[0].inputs.new_zeros(len(trace.calls), count, length, length)
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    with torch.no_grad():
        for number, (call, block, residual) in enumerate(zip(trace.calls, blocks, residuals)):
            for sentence, tokens in trace.sentences(residual.device):
                layer = _Summands(call, block, residual, states, sentence, tokens)
                found = rows_to_one(layer.closeness() if method == "alti" else layer.lengths()).to(table)
                # Layers may be on several devices.
                places = tokens.to(table.device)
                if aggregate and number:
                    found = found @ table[number - 1, sentence][places[:, None], places]
                table[number, sentence].index_put_((places[:, None], places), found)
    return table


def _save(
    reader: nn.Module,
    states: dict[nn.Module, list[torch.Tensor]],
    residuals: list[torch.Tensor],
    view: ModelView,
) -> None:
    """Saves the inputs of layers, beside what `save_states` saves."""

    def save(module: nn.Module, args: tuple, kwargs: dict) -> None:
        residuals.append(args[0] if args else kwargs["hidden_states"])

    save_states(reader, states, view)
    for block in dict.fromkeys(block_of(reader, layer) for layer in locate_heads(reader)):
        view.before(block, save)


def _check(
    model: PreTrainedModel, call: TracedAttention, block: nn.Module, residual: torch.Tensor, method: str
) -> None:
    """Raises ValueError for layers whose outputs are not sums that the method knows."""
    name = f"{type(block).__name__} of {type(model).__name__}"
    if is_post_norm(block):
        return
    if method == "globenc":
        raise ValueError(f"GlobEnc is defined for post-norm layers, which {name} is not; pass method='alti'.")
    # The first layer of ModernBERT reads the norm of the embeddings.
    has_norm = not isinstance(getattr(block, "attn_norm", None), nn.Identity)
    if has_norm and (call.inputs is residual or call.inputs.data_ptr() == residual.data_ptr()):
        raise ValueError(f"the norms of {name} are not known; pass a BERT, a RoBERTa, or a pre-norm model.")
    if hasattr(block, "pre_feedforward_layernorm"):
        raise ValueError(f"{name} normalizes the output of its attention, for which {method!r} is not defined.")


class _Summands:
    """The summands of the output of an attention block in one sentence.

    Attributes:
        vectors (`torch.Tensor` of shape `(query, key, size)`): T_i(x_j), after the norm in post-norm layers.
        output (`torch.Tensor` of shape `(query, size)`): y_i, the sum of all summands and biases.
    """

    def __init__(
        self,
        call: TracedAttention,
        block: nn.Module,
        residual: torch.Tensor,
        states: dict[nn.Module, list[torch.Tensor]],
        sentence: int,
        tokens: torch.Tensor,
    ):
        dtype = torch.promote_types(residual.dtype, torch.float32)
        own = residual[sentence, tokens].to(dtype)
        self.vectors = torch.diag_embed(own.T).permute(1, 2, 0)
        # Granite scales what it adds to the residual stream.
        scale = getattr(block, "residual_multiplier", 1.0)
        weight, bias = (scale * one.to(own) for one in gated_output(call, dtype))
        if call.weights is not None:
            values = call.value[sentence][:, tokens].to(own)
            projected = values @ weight.T.unflatten(0, (len(values), -1))  # (heads, key, size)
            weights = call.weights[sentence][:, tokens[:, None], tokens].to(own)
            self.vectors = self.vectors + torch.einsum("hij,hjd->ijd", weights, projected)
        self.output = self.vectors.sum(1) + bias
        self.output_scale = None
        if is_post_norm(block):
            first, second = block.attention.output.LayerNorm, block.output.LayerNorm
            scale, self.output_scale = (
                LayerNormAt(norm, state_of(states, norm, sentence, tokens).to(own)).scale for norm in (first, second)
            )
            self.vectors = (self.vectors - self.vectors.mean(-1, keepdim=True)) * scale[:, None]
            self.output = first(self.output.to(residual.dtype)).to(dtype)

    def closeness(self) -> torch.Tensor:
        """ALTI, before the division by sums."""
        distances = (self.output[:, None] - self.vectors).abs().sum(-1)
        return (self.output.abs().sum(-1, keepdim=True) - distances).clamp(min=0)

    def lengths(self) -> torch.Tensor:
        """GlobEnc, before the division by sums."""
        centered = self.vectors - self.vectors.mean(-1, keepdim=True)
        return (centered * self.output_scale[:, None]).norm(dim=-1)
