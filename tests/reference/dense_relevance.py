"""Relevance of heads by explicit weight ratios, entry by entry (Voita et al. 2019, appendix A.2).

For one sentence and a `BertForMaskedLM`. Nothing is stabilised, so that no denominator may be zero.
"""

import math

import torch


def sum_ratios(summands, rule):
    """Shares of the summands of one neuron."""
    if rule == "alpha_beta":
        positive = [max(float(summand), 0.0) for summand in summands]
        summands = positive if sum(positive) > 0 else [min(float(summand), 0.0) for summand in summands]
    total = sum(float(summand) for summand in summands)
    return [float(summand) / total for summand in summands]


def product_ratios(first, second, rule):
    """Shares of the two factors of one neuron."""
    if rule == "attn_lrp":
        return 0.5, 0.5
    if rule == "alpha_beta":
        first, second = abs(first), abs(second)
    return first / (first + second), second / (first + second)


def weight_ratios(weight, bias, u, rule):
    """Matrix of the shares of inputs u in neurons W u + b, `(inputs, neurons)`; the share of the bias is left out."""
    columns = [
        sum_ratios([*(row[i] * u[i] for i in range(len(u))), constant], rule)[:-1]
        for row, constant in zip(weight, bias)
    ]
    return torch.tensor(columns, dtype=torch.float64).T


class Linear:
    """A linear map of each token, and how it hands relevance back."""

    def __init__(self, weight, bias, rule):
        self.weight, self.bias, self.rule = weight, bias, rule

    def forward(self, x):
        self.x = x
        return x @ self.weight.T + self.bias

    def back(self, relevance):
        return torch.stack(
            [weight_ratios(self.weight, self.bias, u, self.rule) @ r for u, r in zip(self.x, relevance)]
        )


class Norm:
    """Layer norm of each token: a linear map, since σ is taken as a constant."""

    def __init__(self, module, rule):
        self.module, self.rule = module, rule

    def forward(self, x):
        self.x = x
        return self.module(x)

    def back(self, relevance):
        rows, size = [], self.x.shape[1]
        for u, r in zip(self.x, relevance):
            sigma = math.sqrt(float(((u - u.mean()) ** 2).mean()) + self.module.eps)
            centring = torch.eye(size, dtype=torch.float64) - 1 / size
            weight = self.module.weight[:, None] * centring / sigma
            rows.append(weight_ratios(weight, self.module.bias, u, self.rule) @ r)
        return torch.stack(rows)


def back_through_sum(first, second, relevance, rule):
    of_first, of_second = torch.zeros_like(relevance), torch.zeros_like(relevance)
    for index in range(relevance.numel()):
        shares = sum_ratios([first.flatten()[index], second.flatten()[index]], rule)
        of_first.view(-1)[index], of_second.view(-1)[index] = (s * relevance.flatten()[index] for s in shares)
    return of_first, of_second


def back_through_products(left, right, relevance, rule, scale=1.0):
    """Neurons scale · Σ_k left_qk right_kd: each summand's share, then each factor's share of that."""
    of_left, of_right = torch.zeros_like(left), torch.zeros_like(right)
    for q in range(left.shape[0]):
        for d in range(right.shape[1]):
            shares = sum_ratios([scale * left[q, k] * right[k, d] for k in range(left.shape[1])], rule)
            for k, share in enumerate(shares):
                to_left, to_right = product_ratios(float(left[q, k]), float(right[k, d]), rule)
                of_left[q, k] += to_left * share * relevance[q, d]
                of_right[k, d] += to_right * share * relevance[q, d]
    return of_left, of_right


class Layer:
    """One layer of the encoder."""

    def __init__(self, layer, heads, rule):
        attention, self.heads, self.rule = layer.attention, heads, rule
        modules = {
            "query": attention.self.query,
            "key": attention.self.key,
            "value": attention.self.value,
            "output": attention.output.dense,
            "up": layer.intermediate.dense,
            "down": layer.output.dense,
        }
        for name, module in modules.items():
            setattr(self, name, Linear(module.weight, module.bias, rule))
        self.first_norm, self.second_norm = Norm(attention.output.LayerNorm, rule), Norm(layer.output.LayerNorm, rule)

    def columns(self, head):
        size = self.query.weight.shape[0] // self.heads
        return slice(head * size, (head + 1) * size)

    def forward(self, x):
        self.x, self.q, self.k, self.v = x, self.query.forward(x), self.key.forward(x), self.value.forward(x)
        self.scale = (x.shape[1] // self.heads) ** -0.5
        self.scores, self.weights, contexts = [], [], []
        for head in range(self.heads):
            at = self.columns(head)
            self.scores.append(self.scale * self.q[:, at] @ self.k[:, at].T)
            self.weights.append(self.scores[-1].softmax(-1))
            contexts.append(self.weights[-1] @ self.v[:, at])
        self.projected = self.output.forward(torch.cat(contexts, 1))
        self.middle = self.first_norm.forward(x + self.projected)
        self.changed = self.down.forward(torch.nn.functional.gelu(self.up.forward(self.middle)))
        return self.second_norm.forward(self.middle + self.changed)

    def back(self, relevance):
        """Relevance of the input of the layer, and of its heads."""
        of_middle, of_changed = back_through_sum(
            self.middle, self.changed, self.second_norm.back(relevance), self.rule
        )
        of_middle = of_middle + self.up.back(self.down.back(of_changed))
        of_input, of_projected = back_through_sum(self.x, self.projected, self.first_norm.back(of_middle), self.rule)
        of_contexts = self.output.back(of_projected)
        of_q, of_k, of_v = (torch.zeros_like(self.q) for _ in range(3))
        for head in range(self.heads):
            at = self.columns(head)
            of_weights, of_v[:, at] = back_through_products(
                self.weights[head], self.v[:, at], of_contexts[:, at], self.rule
            )
            if self.rule == "attn_lrp":
                scores, weights = self.scores[head], self.weights[head]
                of_weights = scores * (of_weights - weights * of_weights.sum(-1, keepdim=True))
            of_q[:, at], of_keys = back_through_products(
                self.q[:, at], self.k[:, at].T, of_weights, self.rule, self.scale
            )
            of_k[:, at] = of_keys.T
        of_input = of_input + self.query.back(of_q) + self.key.back(of_k) + self.value.back(of_v)
        return of_input, [float(of_contexts[:, self.columns(head)].sum()) for head in range(self.heads)]


@torch.no_grad()
def dense_relevance(model, ids, position, rule):
    """Relevance for the top-1 logit at a position, if the logit has relevance 1.

    Returns that of each head, `(layers, heads)`, and of the input of the first layer at each position, `(tokens,)`.
    """
    embeddings, head = model.bert.embeddings, model.cls.predictions
    x = embeddings.LayerNorm(
        embeddings.word_embeddings.weight[ids]
        + embeddings.position_embeddings.weight[: len(ids)]
        + embeddings.token_type_embeddings.weight[0]
    )
    layers = [Layer(layer, model.config.num_attention_heads, rule) for layer in model.bert.encoder.layer]
    for layer in layers:
        x = layer.forward(x)
    transform = Linear(head.transform.dense.weight, head.transform.dense.bias, rule)
    norm = Norm(head.transform.LayerNorm, rule)
    decoder = Linear(head.decoder.weight, head.decoder.bias, rule)
    logits = decoder.forward(norm.forward(torch.nn.functional.gelu(transform.forward(x))))
    relevance = torch.zeros_like(logits)
    relevance[position, logits[position].argmax()] = 1.0
    # Rows of other tokens have no relevance, whatever the ratios.
    relevance = transform.back(norm.back(decoder.back(relevance)))
    of_heads = []
    for layer in reversed(layers):
        relevance, of_layer = layer.back(relevance)
        of_heads.insert(0, of_layer)
    return torch.tensor(of_heads, dtype=torch.float64), relevance.sum(-1)
