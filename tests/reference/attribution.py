"""Contributions by reverse-mode differentiation: one backward pass for each layer, head, position and dimension."""

import numpy
import torch
from stock_models import build_stock, stock_inputs

from hf_attn_dynamics.models.head_roles import locate_heads


# What configurations call the number of layers, where it is not `num_hidden_layers`.
_LAYERS = {"distilbert": "n_layers", "gpt2": "n_layer", "marian": "encoder_layers", "t5": "num_layers"}


# Which masks tell the queries and the keys of a kind of site.
SIDES = {
    None: ("encoder", "encoder"),
    "encoder": ("encoder", "encoder"),
    "decoder": ("decoder", "decoder"),
    "cross": ("decoder", "encoder"),
}
ENCODED = ("key_value_states", "encoder_hidden_states")


def tiny(name, dtype=torch.float64):
    """A stock model of two layers, in evaluation mode, with eager attention; ALBERT runs each of its own twice."""
    layers = {} if name == "albert" else {_LAYERS.get(name, "num_hidden_layers"): 2}
    return build_stock(name, **layers, attn_implementation="eager").to(dtype)


def body_of(model):
    """What reads the text."""
    return model.get_encoder() if model.config.is_encoder_decoder else model.base_model


def text_of(model, length=6):
    """Two sentences, the second three tokens shorter."""
    inputs = stock_inputs(model, length)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def reverse_contribution(body, batch, source=None, norm="fro", kind=None):
    """Contributions to each head, sentence by sentence, `(layers, batch, heads, query, key)`.

    Args:
        body: What reads the batch, in evaluation mode.
        batch: `input_ids` and `attention_mask`.
        source: The module whose first input is differentiated; the inputs of each layer's projections if not given.
        norm: Of the Jacobians, as `torch.linalg.matrix_norm` calls it.
        kind: Of the layers, where the body has several; the batch then has `decoder_attention_mask`, too.
    """
    layers = [layer for layer in locate_heads(body) if kind in (None, layer.site.kind)]
    masks = [batch["attention_mask" if of == "encoder" else "decoder_attention_mask"] for of in SIDES[kind]]
    sentences = len(masks[0])
    heads = max(layer.num_heads for layer in layers)
    shape = len(layers), sentences, heads, masks[0].shape[1], masks[1].shape[1]
    table = torch.full(shape, torch.nan, dtype=torch.float64)
    for sentence in range(sentences):
        alone = {name: value[sentence : sentence + 1] for name, value in batch.items()}
        tokens, keys = (mask[sentence].nonzero().flatten() for mask in masks)
        inputs, contexts, start = _run(body, layers, alone, source)
        for number, layer in enumerate(layers):
            for place, head in enumerate(layer.heads):
                context = contexts[number].unflatten(-1, (len(layer.heads), -1))[0, :, place]
                rows = _rows(context, inputs[number] if source is None else start, tokens, keys, norm)
                table[number, sentence, head] = 0
                table[number, sentence, head].index_put_((tokens[:, None], keys), rows)
    return table


def _run(body, layers, batch, source):
    """Inputs of attention modules, inputs of their output projections, and the first input of the source."""
    inputs, contexts, starts = {}, {}, []

    def keep(into, number):
        def save(module, args, kwargs):
            encoded = next((name for name in ENCODED if kwargs.get(name) is not None), None)
            if encoded is None:
                into[number] = args[0] if args else kwargs["hidden_states"]
                return None
            # A copy, which no other layer reads.
            into[number] = kwargs[encoded].clone()
            return args, {**kwargs, encoded: into[number]}

        return save

    hooks = []
    for number, layer in enumerate(layers):
        hooks.append(layer.module.register_forward_pre_hook(keep(inputs, number), with_kwargs=True))
        hooks.append(layer.output.register_forward_pre_hook(keep(contexts, number), with_kwargs=True))
    if source is not None:
        hooks.append(source.register_forward_pre_hook(lambda module, args: starts.append(args[0])))
    body(**batch)
    for hook in hooks:
        hook.remove()
    return inputs, contexts, starts[0] if starts else None


def _rows(context, start, tokens, keys, norm):
    """‖∂o_j/∂x_i‖ divided by the sum over i, `(query, key)`, of one head."""
    rows = []
    for query in tokens:
        jacobian = [
            torch.autograd.grad(value, start, retain_graph=True)[0][0, keys].double() for value in context[query]
        ]
        norms = torch.linalg.matrix_norm(torch.stack(jacobian, 1), norm)  # of (key, head_dim, hidden)
        rows.append(norms / norms.sum())
    return torch.stack(rows)


def integrated_gradients(body, ids, baseline, projection, position, steps):
    """⟨x_i − b_i, ∫ ∂F/∂x_i⟩ of each token, and F(x) − F(b), of F = ⟨o, u⟩ with u the direction of o at the sentence.

    Args:
        body: A model with `embeddings` and `encoder`, in evaluation mode.
        ids, baseline: Tokens, `(1, length)`.
        projection: The module whose input at `position` is o.
        position: Of the token at which o is attributed.
        steps: Points of Gauss–Legendre quadrature.
    """
    outputs = []
    hook = projection.register_forward_pre_hook(lambda module, args: outputs.append(args[0][0, position]))

    def output_at(embeddings):
        body.encoder(embeddings)
        return outputs.pop()

    end, start = (body.embeddings(one).detach() for one in (ids, baseline))
    output = output_at(end).detach()
    direction = output / output.norm()
    difference = output.norm() - output_at(start) @ direction
    total = torch.zeros_like(end)
    for point, weight in zip(*numpy.polynomial.legendre.leggauss(steps)):
        between = (start + (1 + point) / 2 * (end - start)).requires_grad_()
        (gradient,) = torch.autograd.grad(output_at(between) @ direction, between)
        total += weight / 2 * gradient
    hook.remove()
    return ((end - start) * total).sum(-1)[0].detach(), difference.item()
