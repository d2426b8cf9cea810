"""Scores of heads and units the slow way: a mask for each of them, and autograd for each sentence alone."""

import torch
import torch.nn.functional as F
from stock_models import build_stock


def _bart(m):
    encoder, decoder = m.model.encoder.layers, m.model.decoder.layers
    return {
        ("heads", "encoder"): [layer.self_attn.out_proj for layer in encoder],
        ("heads", "decoder"): [layer.self_attn.out_proj for layer in decoder],
        ("heads", "cross"): [layer.encoder_attn.out_proj for layer in decoder],
        ("units", "encoder"): [layer.fc2 for layer in encoder],
        ("units", "decoder"): [layer.fc2 for layer in decoder],
    }


def _t5(m):
    return {
        ("heads", "encoder"): [block.layer[0].SelfAttention.o for block in m.encoder.block],
        ("heads", "decoder"): [block.layer[0].SelfAttention.o for block in m.decoder.block],
        ("heads", "cross"): [block.layer[1].EncDecAttention.o for block in m.decoder.block],
        ("units", "encoder"): [block.layer[1].DenseReluDense.wo for block in m.encoder.block],
        ("units", "decoder"): [block.layer[2].DenseReluDense.wo for block in m.decoder.block],
    }


def _albert(m):
    layers = [layer for group in m.albert.encoder.albert_layer_groups for layer in group.albert_layers]
    return {
        ("heads", "encoder"): [layer.attention.dense for layer in layers],
        ("units", "encoder"): [layer.ffn_output for layer in layers],
    }


# Changes of the settings, and output projections by part and kind of site, found without the tables of the package.
MODELS = {
    "bert": (
        {},
        lambda m: {
            ("heads", "encoder"): [layer.attention.output.dense for layer in m.bert.encoder.layer],
            ("units", "encoder"): [layer.output.dense for layer in m.bert.encoder.layer],
        },
    ),
    "llama": (
        {},
        lambda m: {
            ("heads", "decoder"): [layer.self_attn.o_proj for layer in m.model.layers],
            ("units", "decoder"): [layer.mlp.down_proj for layer in m.model.layers],
        },
    ),
    "marian": ({}, _bart),
    "t5": ({"feed_forward_proj": "gated-gelu"}, _t5),
    "gpt2": (
        {},
        lambda m: {
            ("heads", "decoder"): [block.attn.c_proj for block in m.transformer.h],
            ("units", "decoder"): [block.mlp.c_proj for block in m.transformer.h],
        },
    ),
    "opt": (
        {},
        lambda m: {
            ("heads", "decoder"): [layer.self_attn.out_proj for layer in m.model.decoder.layers],
            ("units", "decoder"): [layer.fc2 for layer in m.model.decoder.layers],
        },
    ),
    "modernbert": (
        {},
        lambda m: {
            ("heads", "encoder"): [layer.attn.Wo for layer in m.model.layers],
            ("units", "encoder"): [layer.mlp.Wo for layer in m.model.layers],
        },
    ),
    "albert": ({}, _albert),
}


def scored_model(name):
    """A model in double precision, without dropout."""
    return build_stock(name, **MODELS[name][0]).double()


def output_projections(name, model):
    return MODELS[name][1](model)


def lone_sentences(model, count=5):
    """Sentences of 1 to 9 tokens with their labels, each as a batch of one."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 10, (count, 2), generator=generator)
    lengths[1, 0] = 1
    alone = []
    for source, target in lengths.tolist():
        ids = torch.randint(4, 60, (1, source), generator=generator)
        sentence = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        if model.config.is_encoder_decoder:
            sentence["labels"] = torch.randint(4, 60, (1, target), generator=generator)
        elif not _is_causal(model):
            sentence["labels"][:, 1::2] = -100
        alone.append(sentence)
    return alone


def padded(alone, length=0):
    """One batch of several sentences, padded on the right to `length` or more."""
    fill = {"input_ids": 1, "attention_mask": 0, "labels": -100}
    batch = {}
    for name in alone[0]:
        rows = [sentence[name][0] for sentence in alone]
        longest = max(length, *map(len, rows))
        batch[name] = torch.stack([F.pad(row, (0, longest - len(row)), value=fill[name]) for row in rows])
    return batch


def _is_causal(model):
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _summed_loss(model, sentence, logits):
    log_probabilities, labels = logits.log_softmax(-1), sentence["labels"][0]
    loss = 0 * log_probabilities.sum()
    for token in labels.ne(-100).nonzero().flatten().tolist():
        if not _is_causal(model):
            loss = loss - log_probabilities[token, labels[token]]
        elif token:
            loss = loss - log_probabilities[token - 1, labels[token]]
    return loss


def _width(model, module, part):
    size = module.weight.shape[0 if type(module).__name__ == "Conv1D" else 1]
    heads = getattr(model.config, "num_attention_heads", None) or model.config.num_heads
    return size // heads if part == "heads" else 1


class _Masked:
    """Context in which each output projection takes masked inputs; `masks` has those of each projection."""

    def __init__(self, model, outputs, by_token):
        self.model, self.outputs, self.by_token = model, outputs, by_token
        self.masks, self.inputs, self.hooks = {}, {}, []

    def __enter__(self):
        for (part, kind), modules in self.outputs.items():
            for layer, module in enumerate(modules):
                where, width = (part, kind, layer), _width(self.model, module, part)
                self.hooks.append(module.register_forward_pre_hook(self._hook(where, width)))
        return self

    def _hook(self, where, width):
        def mask(module, inputs):
            given = inputs[0].reshape(-1, inputs[0].shape[-1])  # the only sentence: tokens × inputs
            elements = given.shape[1] // width
            shape = (len(given), elements) if self.by_token else (elements,)
            own = self.masks.setdefault(where, [])
            # One mask for all runs of a module, but another one at each token.
            if self.by_token or not own:
                own.append(torch.ones(shape, dtype=torch.float64, requires_grad=True))
            self.inputs.setdefault(where, []).append(given.detach())
            masked = given.unflatten(-1, (elements, width)) * own[-1][..., None]
            return (masked.flatten(-2).reshape(inputs[0].shape),)

        return mask

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()


def _tables(outputs, values):
    return {
        (part, kind): torch.stack([values[part, kind, layer] for layer in range(len(modules))])
        for (part, kind), modules in outputs.items()
    }


def slow_scores(name, model, alone, method):
    """Scores `{(part, kind): (layers, elements)}` of `fisher`, `michel` or `magnitude`."""
    outputs = output_projections(name, model)
    totals, tokens, squares = {}, {}, {}
    for sentence in alone:
        with _Masked(model, outputs, by_token=method == "michel") as masked:
            logits = model(**sentence).logits[0]
        masks = [(where, mask) for where, own in masked.masks.items() for mask in own]
        gradients = torch.autograd.grad(_summed_loss(model, sentence, logits), [mask for _, mask in masks])
        for (where, _), gradient in zip(masks, gradients):
            value = gradient.square() if method == "fisher" else gradient.abs().sum(0)
            totals[where] = totals.get(where, 0) + value
        for where, runs in masked.inputs.items():
            tokens[where] = tokens.get(where, 0) + len(runs[0])
            for given in runs:
                squares[where] = squares.get(where, 0) + given.square().sum(0)
    if method == "fisher":
        return _tables(outputs, {where: total / len(alone) for where, total in totals.items()})
    if method == "michel":
        return _tables(outputs, {where: total / tokens[where] for where, total in totals.items()})
    magnitudes = {}
    for (part, kind), modules in outputs.items():
        for layer, module in enumerate(modules):
            weight = module.weight.T if type(module).__name__ == "Conv1D" else module.weight
            norms, width = squares[part, kind, layer].sqrt(), _width(model, module, part)
            scores = torch.zeros(len(norms) // width, dtype=torch.float64)
            for column, norm in enumerate(norms):
                scores[column // width] += weight[:, column].detach().abs().sum() * norm
            magnitudes[part, kind, layer] = scores
    return _tables(outputs, magnitudes)
