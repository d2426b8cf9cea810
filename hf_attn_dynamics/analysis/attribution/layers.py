# Licensed under the Apache License, Version 2.0.
"""Contributions of tokens through whole layers: all heads, output projection, residual connection and layer norm.

The output of an attention block at position i is a sum of vectors of the positions j,

    T_i(x_j) = Σ_h a_hij W_O,h v_hj  (+ x_i for j = i),

a bias, and in post-norm layers a layer norm, which is linear once its standard deviation is known. ALTI (Ferrando et
al. 2022) measures how close each summand is to the output, GlobEnc (Modarressi et al. 2022) how long it is. In
cross-attention, the summands are those of the tokens of the source and the residual connection (ALTI+, Ferrando et al.
2022b).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...models.head_roles import HeadLayer, locate_heads
from ..model_parts import block_of
from ..model_views import ModelView
from ..results import Result
from ..running import is_seq2seq, reader_of, unwrapped
from .across_layers import POST_NORM_NAMES, LayerNormAt, is_post_norm, save_states, state_of
from .local import gated_output
from .trace import TracedAttention, rows_to_one, trace_attention


METHODS = ("alti", "globenc")
OUTPUT_NORMS = ("pre_feedforward_layernorm", "post_self_attn_layernorm")  # of Gemma 2 and GLM-4
UNKNOWN_NORMS = "the norms of {} are not known; pass a BERT, a BART, or a pre-norm model."


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
            Layers are pre-norm, or post-norm as those of BERT, DistilBERT, BART and Marian. GlobEnc is known for BERT,
            CamemBERT, data2vec, ELECTRA, RoBERTa and XLM-R. Of an encoder–decoder model, the encoder is read; see
            [`encoder_decoder_contribution`] for the decoder.
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
    table = _within_layers(model, batch, method)
    for number in range(1, len(table) if aggregate else 0):
        table[number] = table[number] @ table[number - 1]
    return table


@dataclass(frozen=True, eq=False)
class EncoderDecoderContribution(Result):
    """Contributions to the positions of a decoder, see [`encoder_decoder_contribution`].

    Args:
        source (`torch.Tensor` of shape `(layers, batch, target, source)`): Contributions of the tokens of the source.
        target (`torch.Tensor` of shape `(layers, batch, target, target)`): Those of the inputs of the decoder.
    """

    source: torch.Tensor
    target: torch.Tensor

    columns = ["text", "position", "side", "token", "contribution"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`: contributions to the last layer."""
        for text, (source, target) in enumerate(zip(self.source[-1].tolist(), self.target[-1].tolist())):
            for position, sides in enumerate(zip(source, target)):
                for side, row in zip(("source", "target"), sides):
                    yield from ((text, position, side, token, value) for token, value in enumerate(row))


def encoder_decoder_contribution(
    model: PreTrainedModel, batch: Mapping[str, Any], aggregate: bool = True
) -> EncoderDecoderContribution:
    """Contributions of the source and of the target prefix to each position of a decoder (ALTI+).

    In a decoder layer, self-attention has the contributions C of [`layer_contribution`]. The output of the
    cross-attention block is the sum of vectors of the encoder outputs and the residual connection, whose contributions
    by `alti` are E and r. With the contributions S to the encoder outputs, those of the inputs of the model are

        source_l = E_l S + r_l C_l source_{l−1},    target_l = r_l C_l target_{l−1}.

    Args:
        model (`PreTrainedModel`): An encoder–decoder model, such as BART, Marian, T5 or Whisper.
        batch (`dict`): Arguments of a forward pass with `decoder_input_ids` or `labels`.
        aggregate (`bool`): Whether contributions are those of the inputs of the model. Otherwise they are those of the
            encoder outputs, E, and of the inputs of each decoder layer, r C.

    Returns:
        [`EncoderDecoderContribution`]: the contributions of source and target to a position sum to 1, except as in
        [`layer_contribution`]; padding is 0. Whisper has a frame of its encoder for each token of the source.

    Raises:
        ValueError: if the model is no encoder–decoder, or see [`layer_contribution`].

    Example:
        >>> from transformers import BartConfig, BartModel
        >>> sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 50}
        >>> model = BartModel(BartConfig(**sizes, encoder_attention_heads=2, decoder_attention_heads=2))
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8]]), "decoder_input_ids": torch.tensor([[2, 9]])}
        >>> found = encoder_decoder_contribution(model, batch)
        >>> totals = found.source.sum(-1) + found.target.sum(-1)
        >>> found.source.shape, found.target.shape, totals.round(decimals=4).unique().tolist()
        (torch.Size([2, 1, 2, 3]), torch.Size([2, 1, 2, 2]), [1.0])
    """
    if not is_seq2seq(unwrapped(model)):
        raise ValueError(f"{type(model).__name__} has no decoder beside an encoder; layer_contribution() reads it.")
    own, crossed = (_within_layers(model, batch, "alti", kind) for kind in ("decoder", "cross"))
    source, target = crossed[..., :-1].clone(), crossed[..., -1:] * own
    if aggregate:
        source = source @ layer_contribution(model, batch)[-1].to(source)
        for number in range(1, len(own)):
            source[number] += target[number] @ source[number - 1]
            target[number] = target[number] @ target[number - 1]
    return EncoderDecoderContribution(source, target)


def _within_layers(
    model: PreTrainedModel, batch: Mapping[str, Any], method: str, kind: str | None = None
) -> torch.Tensor:
    """Contributions of the inputs of each layer, `(layers, batch, query, key)`.

    In cross-attention, keys are those of the source, and the residual connection is the last one.
    """
    root = reader_of(model) if kind is None else unwrapped(model)
    record = _Record(root)
    trace = trace_attention(model, batch, record.prepare, kind=kind)
    blocks = [record.block(model, call, method) for call in trace.calls]
    is_cross = kind == "cross"
    shape = trace.real.shape if trace.encoded_real is None else (len(trace.real), trace.encoded_real.shape[1])
    table = trace.calls[0].inputs.new_zeros(len(blocks), *trace.real.shape, shape[1] + is_cross)
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    with torch.no_grad():
        for own, block in zip(table, blocks):
            for sentence, tokens, keys in trace.pairs(block.residual.device):
                layer = _Summands(block, sentence, tokens, keys)
                found = rows_to_one(layer.closeness() if method == "alti" else layer.lengths())
                columns = torch.cat((keys, keys.new_tensor([shape[1]]))) if is_cross else keys
                # Layers may be on several devices.
                places = tokens.to(table.device)[:, None], columns.to(table.device)
                own[sentence].index_put_(places, found.to(table))
    return table


@dataclass(eq=False)
class _Block:
    """An attention block, with its residual connection and the layer norm that follows.

    Args:
        call (`TracedAttention`): The call of its attention module.
        residual (`torch.Tensor` of shape `(batch, length, size)`): What the attention is added to.
        norm (`nn.LayerNorm`, *optional*): The norm after the sum, in post-norm layers.
        summed (`torch.Tensor` of shape `(batch, length, size)`, *optional*): The input of this norm.
        scale (`float`): Factor of the attention.
        record (`_Record`): Of the forward pass.
        layer (`nn.Module`): The layer.
    """

    call: TracedAttention
    residual: torch.Tensor
    record: "_Record"
    layer: nn.Module
    norm: nn.LayerNorm | None = None
    summed: torch.Tensor | None = None
    scale: float = 1.0


class _Record:
    """What a forward pass shows of norms and residual connections.

    Args:
        root (`PreTrainedModel`): The model that runs.

    Attributes:
        states (`dict[nn.Module, list[torch.Tensor]]`): See `save_states`.
    """

    def __init__(self, root: PreTrainedModel):
        self.root = root
        self.states: dict[nn.Module, list[torch.Tensor]] = {}
        self._norms: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._inputs: dict[nn.Module, list[torch.Tensor]] = {}

    def prepare(self, view: ModelView) -> None:
        """Adds hooks to the view of the model."""
        save_states(self.root, self.states, view)
        layers = locate_heads(self.root)
        for norm in dict.fromkeys(filter(None, map(self._norm_of, layers))):
            view.after(norm, self._save_norm)
        for block in dict.fromkeys(block_of(self.root, layer) for layer in layers):
            view.before(block, self._save_inputs)

    def _save_norm(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self._norms.setdefault(module, []).append((inputs[0], output))

    def _save_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._inputs.setdefault(module, []).append(args[0] if args else kwargs["hidden_states"])

    def _norm_of(self, layer: HeadLayer) -> nn.Module | None:
        """The norm before or after an attention block, if it has one of the known names."""
        path, _, name = layer.name.rpartition(".")
        owner = self.root.get_submodule(path)
        found = getattr(getattr(owner, "output", None), "LayerNorm", None)  # BERT
        for known in (f"{name}_layer_norm", "layer_norm", "sa_layer_norm"):  # BART, T5, DistilBERT
            found = getattr(owner, known, found)
        return found

    def block(self, model: PreTrainedModel, call: TracedAttention, method: str) -> _Block:
        """The block of the next call of an attention module.

        Raises:
            ValueError: if its output is not a sum that the method knows.
        """
        layer, norm = block_of(self.root, call.layer), self._norm_of(call.layer)
        name = f"{type(layer).__name__} of {type(model).__name__}"
        if method == "globenc" and not is_post_norm(layer):
            raise ValueError(
                f"GlobEnc is known for the layers of {POST_NORM_NAMES}, unlike {name}; pass method='alti'."
            )
        unknown = ValueError(UNKNOWN_NORMS.format(name))
        inputs = self._inputs[layer].pop(0) if norm is None else None
        if norm is not None:
            summed, output = self._norms[norm].pop(0)
            if _is_same(output, call.inputs):
                return _Block(call, summed, self, layer)
            if not isinstance(norm, nn.LayerNorm):
                raise unknown
            return _Block(call, call.inputs, self, layer, norm, summed)
        # The first layer of ModernBERT reads the norm of the embeddings.
        has_norm = not isinstance(getattr(layer, "attn_norm", None), nn.Identity)
        if call.encoded is not None or (has_norm and _is_same(inputs, call.inputs)):
            raise unknown
        if any(hasattr(layer, own) for own in OUTPUT_NORMS):
            raise ValueError(f"{name} normalizes the output of its attention, for which {method!r} is not defined.")
        # Granite scales what it adds to the residual stream.
        return _Block(call, inputs, self, layer, scale=getattr(layer, "residual_multiplier", 1.0))


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first is second or first.data_ptr() == second.data_ptr()


class _Summands:
    """The summands of the output of an attention block in one sentence.

    Attributes:
        vectors (`torch.Tensor` of shape `(query, key, size)`): T_i(x_j), after the norm in post-norm layers. In
            cross-attention, the residual connection is the last key.
        output (`torch.Tensor` of shape `(query, size)`): y_i, the sum of all summands and biases.
    """

    def __init__(self, block: _Block, sentence: int, tokens: torch.Tensor, keys: torch.Tensor):
        call, residual = block.call, block.residual
        dtype = torch.promote_types(residual.dtype, torch.float32)
        own = residual[sentence, tokens].to(dtype)
        weight, bias = (block.scale * one.to(own) for one in gated_output(call, dtype))
        attended = own.new_zeros(len(tokens), len(keys), own.shape[-1])
        if call.weights is not None:
            values = call.value[sentence][:, keys].to(own)
            projected = values @ weight.T.unflatten(0, (len(values), -1))  # (heads, key, size)
            weights = call.weights[sentence][:, tokens[:, None], keys].to(own)
            attended = torch.einsum("hij,hjd->ijd", weights, projected)
        if call.encoded is None:
            self.vectors = attended + torch.diag_embed(own.T).permute(1, 2, 0)
        else:
            self.vectors = torch.cat((attended, own[:, None]), dim=1)
        self.output = self.vectors.sum(1) + bias
        self._block, self._sentence, self._tokens = block, sentence, tokens
        if block.norm is not None:
            summed = block.summed[sentence, tokens].to(own)
            # Half precision rounds the sum in another order.
            precision = 1e-3 if residual.dtype in (torch.float32, torch.float64) else 5e-2
            if not (self.output - summed).abs().max() <= precision * summed.abs().max():
                raise ValueError(UNKNOWN_NORMS.format(type(block.layer).__name__))
            scale = LayerNormAt(block.norm, summed).scale
            self.vectors = (self.vectors - self.vectors.mean(-1, keepdim=True)) * scale[:, None]
            self.output = block.norm(self.output.to(residual.dtype)).to(dtype)

    def closeness(self) -> torch.Tensor:
        """ALTI, before the division by sums."""
        distances = (self.output[:, None] - self.vectors).abs().sum(-1)
        return (self.output.abs().sum(-1, keepdim=True) - distances).clamp(min=0)

    def lengths(self) -> torch.Tensor:
        """GlobEnc, before the division by sums."""
        norm = self._block.layer.output.LayerNorm
        states = state_of(self._block.record.states, norm, self._sentence, self._tokens).to(self.vectors)
        centered = self.vectors - self.vectors.mean(-1, keepdim=True)
        return (centered * LayerNormAt(norm, states).scale[:, None]).norm(dim=-1)
