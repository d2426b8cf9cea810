# Licensed under the Apache License, Version 2.0.
"""Bag-of-words attention and what is measured of it, as the equations read: one sentence and one word at a time."""

import math
import random

import torch


def ragged_words(count, vocab_size, seed=0, shortest=1, longest=7):
    """Sentences of words from 1 on, some of them with repeated words."""
    generator = random.Random(seed)
    lengths = [generator.randint(shortest, longest) for _ in range(count)]
    lengths[0] = shortest
    return [[generator.randrange(1, vocab_size) for _ in range(length)] for length in lengths]


def padded(sentences, side="right", extra=0):
    length = max(map(len, sentences)) + extra
    rows = [[0] * (length - len(words)) for words in sentences]
    return torch.tensor([words + pad if side == "right" else pad + words for words, pad in zip(sentences, rows)])


def slow_context(model, words):
    """Σ softmax(qᵀκ) ν over the units of one sentence."""
    features = [model.embeddings.weight[word] for word in words]
    keys = [model.keys.weight[word] for word in words]
    if model.config.convolution:

        def convolved(convolution, vectors):
            first, second = convolution.weight.unbind(-1)
            return [first @ a + second @ b + convolution.bias for a, b in zip(vectors, vectors[1:])]

        features, keys = convolved(model.embedding_convolution, features), convolved(model.key_convolution, keys)
    weights = [torch.exp(model.query @ key) for key in keys]
    return sum(weight * feature for weight, feature in zip(weights, features)) / sum(weights)


def slow_logits(model, sentences):
    return torch.stack([model.classifier(slow_context(model, words)) for words in sentences])


def slow_descent(model, sentences, labels, learning_rate, epochs):
    """Gradient descent on one model by itself; returns the loss after each number of updates."""
    losses = []
    for epoch in range(epochs + 1):
        logits = slow_logits(model, sentences)
        loss = torch.stack([row.logsumexp(0) - row[label] for row, label in zip(logits, labels)]).mean()
        losses.append(loss.item())
        if epoch < epochs:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            with torch.no_grad():
                for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained)):
                    parameter -= learning_rate * gradient
    return losses


def slow_terms(scores, vectors, sentences, word):
    """Both terms of theorem 1."""
    ratios, means = [], []
    for words in sentences:
        rest = [other for other in words if other != word]
        if word in words and rest:
            total = sum(math.exp(scores[other]) for other in rest)
            ratios.append(1 / total)
            means.append(sum(math.exp(scores[other]) * vectors[other] for other in rest) / total)
    score = scores[word] + math.exp(scores[word]) * sum(ratios) / len(ratios)
    return float(score), float((vectors[word] - sum(means) / len(means)).square().sum() / 2)


def slow_purity(sentences, labels, word):
    own = [label for words, label in zip(sentences, labels) if word in words]
    return abs(sum(own) - (len(own) - sum(own))) / len(own)
