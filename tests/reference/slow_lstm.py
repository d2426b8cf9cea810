# Licensed under the Apache License, Version 2.0.
"""LSTMs, attention over their states, and bags of words, as the equations read: one word at a time."""

from typing import NamedTuple

import torch


def slow_lstm(lstm, vectors, state=None):
    """Outputs of one sentence, and the last (h, c) of each layer and direction."""
    last = []
    for layer in range(lstm.num_layers):
        read = []
        for suffix in [f"_l{layer}"] + [f"_l{layer}_reverse"] * lstm.bidirectional:
            w_ih, w_hh, b_ih, b_hh = (
                getattr(lstm, name + suffix) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            h, c = state[len(last)] if state else (w_hh.new_zeros(lstm.hidden_size),) * 2
            is_backward = suffix.endswith("reverse")
            outputs = []
            for x in reversed(vectors) if is_backward else vectors:
                i, f, g, o = (w_ih @ x + b_ih + w_hh @ h + b_hh).chunk(4)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                outputs.append(h)
            last.append((h, c))
            read.append(outputs[::-1] if is_backward else outputs)
        vectors = [torch.cat(directions) for directions in zip(*read)]
    return vectors, last


def slow_softmax(scores):
    exponentials = [torch.exp(score) for score in scores]
    return [one / sum(exponentials) for one in exponentials]


class Translation(NamedTuple):
    """Of each target word: logits, weights of each head, context and state."""

    logits: torch.Tensor  # (target, words)
    weights: torch.Tensor  # (heads, target, source)
    contexts: torch.Tensor
    states: torch.Tensor


def slow_translation(model, source, target, weights=None):
    """What an encoder–decoder makes of one source sentence and of the words that its decoder reads.

    `weights`, one a source word, stand for those that all heads compute at all target words.
    """
    config, encoder = model.config, model.encoder
    sources, state = slow_lstm(encoder.lstm, [encoder.embeddings.weight[word] for word in source])
    if config.bidirectional:
        if config.directions == "added":
            sources = [sum(both.chunk(2)) for both in sources]
        join = sum if config.directions == "added" else torch.cat
        state = [tuple(map(join, zip(*both_ways))) for both_ways in zip(state[::2], state[1::2], strict=True)]
    table = encoder.embeddings if config.share_encoder_decoder_embeddings else model.decoder_embeddings
    states, _ = slow_lstm(model.decoder, [table.weight[word] for word in target], state)
    every = []
    for s in states:
        heads = []
        for head in range(config.num_attention_heads):
            if weights is not None:
                alpha = weights
            elif config.attention == "uniform":
                alpha = [s.new_tensor(1 / len(source))] * len(source)
            else:
                size = config.hidden_size
                matrix = model.attention.query.weight[head * size : (head + 1) * size]
                # query() is W applied to s_t, so that its rows belong to h_l.
                alpha = slow_softmax([h @ (matrix @ s) for h in sources])
            heads.append(torch.stack(list(alpha)))
        context = sum(sum(a * h for a, h in zip(alpha, sources)) for alpha in heads)
        every.append((slow_readout(model.readout, context, s), torch.stack(heads), context, s))
    logits, alphas, contexts, states = (torch.stack(parts) for parts in zip(*every))
    return Translation(logits, alphas.transpose(0, 1), contexts, states)


def slow_readout(readout, context, state):
    if hasattr(readout, "context"):
        matrix = torch.cat([readout.context.weight, readout.state.weight], 1)
        hidden = (matrix @ torch.cat([context, state]) + readout.context.bias).clamp(min=0)
    else:
        hidden = context + state
    return readout.output.weight @ hidden + readout.output.bias


def slow_classification(model, words, weights=None):
    """Probabilities of the classes, and the weights of the words, computed or given."""
    states, _ = slow_lstm(model.lstm, [model.embeddings.weight[word] for word in words])
    if weights is None and model.config.attention == "uniform":
        weights = [states[0].new_tensor(1 / len(words))] * len(words)
    elif weights is None:
        first, _, second = model.attention
        hidden = [(first.weight @ h + first.bias).clamp(min=0) for h in states]
        weights = slow_softmax([second.weight[0] @ one + second.bias[0] for one in hidden])
    logits = model.classifier.weight @ sum(a * h for a, h in zip(weights, states)) + model.classifier.bias
    if model.config.num_labels == 2:
        positive = 1 / (1 + torch.exp(-logits[0]))
        probabilities = [1 - positive, positive]
    else:
        probabilities = slow_softmax(logits)
    return torch.stack(list(probabilities)), torch.stack(list(weights))


def slow_bag(model, words):
    """Probabilities that a bag of words gives to words or classes."""
    mean = sum(model.embeddings.weight[word] for word in words) / len(words)
    return torch.stack(slow_softmax(model.classifier.weight @ mean))


def all_translations(model, source, length):
    """Every translation of up to so many words, with the sum of the logarithms of their probabilities, the best first.

    Score of a translation: that sum over its number of words, as a length penalty of 1 has it.
    """
    config = model.config
    ended, running = [], [((), 0.0)]
    for _ in range(length):
        longer = []
        for words, score in running:
            logits = slow_translation(model, source, [config.decoder_start_token_id, *words]).logits[-1]
            longer += [((*words, word), score + value) for word, value in enumerate(logits.log_softmax(-1).tolist())]
        ended += [one for one in longer if one[0][-1] == config.eos_token_id]
        running = [one for one in longer if one[0][-1] != config.eos_token_id]
    return sorted(((list(words), score / len(words)) for words, score in ended + running), key=lambda one: -one[1])
