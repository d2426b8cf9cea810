# Licensed under the Apache License, Version 2.0.
"""Decomposition into tokens (DecompX): sums against the model, shares against gradients and a loop over tokens."""

import pytest
import torch
import transformers
from stock_models import build_stock
from tiny_models import UNEVEN, padded_batch, stock_config, tiny_model, vivid

from hf_attn_dynamics import prune_heads, prune_units, token_decomposition
from hf_attn_dynamics.analysis.attribution import decomposition
from hf_attn_dynamics.analysis.attribution.decomposition import slope_from_zero


SENTENCES = [[5, 9, 7, 12], [8, 6], [4, 6, 11, 7, 9]]
CLASSIFIERS = ["Bert", "Roberta", "Electra", "Camembert", "XLMRoberta", "Data2VecText"]


def classifier(name="Bert", **changes):
    """A stock classifier of sentences in double precision, with three labels."""
    sizes = stock_config("bert").to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    settings = {key: sizes[key] for key in kept} | {"num_labels": 3, "pad_token_id": 1, **changes}
    settings |= {"embedding_size": 12} if name == "Electra" else {}
    model = getattr(transformers, f"{name}ForSequenceClassification")
    return vivid(model(getattr(transformers, f"{name}Config")(**settings))).double().eval()


@pytest.mark.parametrize("biases", ["absdot", "norm", "equal", "apart"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_shares_add_up_to_the_logits(name, biases):
    model, batch = classifier(name), padded_batch(SENTENCES)
    found = token_decomposition(model, batch, biases)
    with torch.no_grad():
        expected = model(**batch).logits
    torch.testing.assert_close(found.logits.sum(-1) + found.biases, expected, rtol=0, atol=1e-9)
    assert (biases == "apart") == bool(found.biases.any())
    assert not found.logits[1, :, 2:].any()
    assert list(found.records())[16] == (1, 0, 1, found.logits[1, 0, 1].item())
    assert not found.contributions[:, 1, 2:].any()
    rows = found.contributions.sum(-1)
    torch.testing.assert_close(rows, batch["attention_mask"].expand_as(rows).to(rows), rtol=0, atol=1e-12)


class FrozenNorm(torch.nn.Module):
    """A layer norm whose standard deviation is a constant for gradients."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, states):
        deviation = (states.var(-1, correction=0, keepdim=True) + self.norm.eps).sqrt().detach()
        return (states - states.mean(-1, keepdim=True)) / deviation * self.norm.weight + self.norm.bias


class FrozenSlope(torch.nn.Module):
    """An activation whose slope from zero is a constant for gradients."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, inputs):
        return inputs * (self.activation(inputs) / inputs).detach()


def attend(module, query, key, value, mask, scaling, **kwargs):
    """Attention whose weights are constants for gradients."""
    weights = (query @ key.mT * scaling).softmax(-1).detach()
    return (weights @ value).transpose(1, 2), weights


def gradients_of_the_frozen_model(model, ids):
    """⟨x_k, ∂logit/∂x_k⟩ for each label and token, `(labels, tokens)`, of embeddings x."""
    transformers.AttentionInterface.register("frozen_weights", attend)
    model.set_attn_implementation("frozen_weights")
    for layer in model.base_model.encoder.layer:
        for part in (layer.attention.output, layer.output):
            part.LayerNorm = FrozenNorm(part.LayerNorm)
        layer.intermediate.intermediate_act_fn = FrozenSlope(layer.intermediate.intermediate_act_fn)
    model.base_model.pooler.activation = FrozenSlope(torch.tanh)
    embedded = []
    hook = model.base_model.encoder.layer[0].register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    logits = model(torch.tensor([ids])).logits[0]
    hook.remove()
    return torch.stack(
        [(torch.autograd.grad(one, embedded[0], retain_graph=True)[0] * embedded[0]).sum(-1)[0] for one in logits]
    )


@pytest.mark.parametrize("ids", SENTENCES)
def test_without_biases_shares_are_gradients_of_the_model_with_constant_weights(ids):
    found = token_decomposition(classifier(), {"input_ids": torch.tensor([ids])}, "apart")
    expected = gradients_of_the_frozen_model(classifier(), ids)
    torch.testing.assert_close(found.logits[0], expected, rtol=0, atol=1e-9)


def shared(bias, vectors):
    """Vectors after a bias was added to their sum, one after the other."""
    weights = [float(abs(bias @ one)) for one in vectors]
    return [one + bias * weight / sum(weights) for one, weight in zip(vectors, weights)]


@torch.no_grad()
def slow_decomposition(model, ids):
    """Lengths of the vectors of each pair of tokens, `(layers, query, key)`, and shares of logits by `absdot`."""
    model.set_attn_implementation("eager")
    outputs = model(torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
    count = len(ids)
    first = outputs.hidden_states[0][0]
    vectors = [[first[i] if i == k else torch.zeros_like(first[i]) for k in range(count)] for i in range(count)]
    tables = []

    def linear(layer, parts):
        return shared(layer.bias, [layer.weight @ one for one in parts])

    def normal(norm, parts):
        total = sum(parts)
        deviation = (total.var(correction=0) + norm.eps).sqrt()
        return shared(norm.bias, [(one - one.mean()) / deviation * norm.weight for one in parts])

    def bent(activation, parts):
        total = sum(parts)
        return [one * activation(total) / total for one in parts]

    for layer, maps in zip(model.base_model.encoder.layer, outputs.attentions):
        size = layer.attention.self.attention_head_size
        values = [linear(layer.attention.self.value, parts) for parts in vectors]
        after = []
        for i in range(count):
            mixed = []
            for k in range(count):
                heads = [
                    sum(maps[0, h, i, j] * values[j][k][h * size : (h + 1) * size] for j in range(count))
                    for h in range(maps.shape[1])
                ]
                mixed.append(torch.cat(heads))
            attended = linear(layer.attention.output.dense, mixed)
            attended = normal(layer.attention.output.LayerNorm, [a + b for a, b in zip(vectors[i], attended)])
            inner = bent(torch.nn.functional.gelu, linear(layer.intermediate.dense, attended))
            added = linear(layer.output.dense, inner)
            after.append(normal(layer.output.LayerNorm, [a + b for a, b in zip(attended, added)]))
        vectors = after
        tables.append(torch.tensor([[one.norm() for one in parts] for parts in vectors]).double())
    logits = linear(model.classifier, bent(torch.tanh, linear(model.base_model.pooler.dense, vectors[0])))
    return torch.stack([table / table.sum(-1, keepdim=True) for table in tables]), torch.stack(logits, -1)


@pytest.mark.parametrize("ids", SENTENCES)
def test_biases_are_shared_out_in_proportion_to_inner_products(ids, monkeypatch):
    model = classifier()
    contributions, logits = slow_decomposition(model, ids)
    found = token_decomposition(model, {"input_ids": torch.tensor([ids])})
    torch.testing.assert_close(found.contributions[:, 0], contributions, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.logits[0], logits, rtol=0, atol=1e-9)
    monkeypatch.setattr(decomposition, "MAX_BLOCK", 1)  # one position after the other
    one_by_one = token_decomposition(model, {"input_ids": torch.tensor([ids])})
    torch.testing.assert_close(one_by_one.contributions, found.contributions, rtol=0, atol=1e-12)


def test_sentences_of_a_batch_are_those_alone():
    model = classifier()
    together = token_decomposition(model, padded_batch(SENTENCES))
    for number, ids in enumerate(SENTENCES):
        alone = token_decomposition(model, {"input_ids": torch.tensor([ids])})
        size = len(ids)
        own = together.contributions[:, number, :size, :size]
        torch.testing.assert_close(own, alone.contributions[:, 0], rtol=0, atol=1e-9)
        torch.testing.assert_close(together.logits[number, :, :size], alone.logits[0], rtol=0, atol=1e-9)


def test_gates_and_removed_parts_change_shares_as_they_change_logits():
    batch = padded_batch(SENTENCES)
    model = vivid(tiny_model("bert", "ForSequenceClassification", gates={}, unit_gates=True)).double().eval()
    for site, gate in model.head_gates().items():
        gate.log_alpha.data.fill_(0.3)
        gate.log_alpha.data[UNEVEN["bert"][site.layer]] = -3.0
    for gate in model.unit_gates().values():
        gate.log_alpha.data[::2] = 0.5
    stock = classifier()
    prune_heads(stock, UNEVEN["bert"])  # a layer without heads
    prune_units(stock, {0: [0, 3, 4]})
    for changed in (model, stock):
        found = token_decomposition(changed, batch)
        with torch.no_grad():
            expected = changed(**batch).logits
        torch.testing.assert_close(found.logits.sum(-1), expected, rtol=0, atol=1e-8)


def test_a_base_model_has_no_logits():
    found = token_decomposition(build_stock("bert"), {"input_ids": torch.tensor([[5, 9, 7]])})
    assert found.contributions.shape == (3, 1, 3, 3)
    assert found.logits.shape == (1, 0, 3)
    assert list(found.records()) == []


def test_slopes_of_activations_are_quotients_and_the_derivative_at_zero():
    inputs = torch.tensor([-2.0, 0.0, 1e-300, 3.0], dtype=torch.float64)
    found = slope_from_zero(torch.nn.functional.gelu, inputs)
    torch.testing.assert_close(found[[0, 3]], (torch.nn.functional.gelu(inputs) / inputs)[[0, 3]])
    assert found[1:3].tolist() == [0.5, 0.5]
    assert slope_from_zero(torch.relu, inputs).tolist()[0::3] == [0.0, 1.0]
    with pytest.raises(ValueError, match="sigmoid is 0.5 at 0, so that it is not the product of its input and"):
        slope_from_zero(torch.sigmoid, inputs)


def test_half_precision_is_decomposed_in_single_precision():
    model, batch = classifier().to(torch.bfloat16), padded_batch(SENTENCES)
    found = token_decomposition(model, batch)
    assert found.logits.dtype == found.contributions.dtype == torch.float32
    exact = token_decomposition(classifier(), batch)
    torch.testing.assert_close(found.contributions.double(), exact.contributions, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("model", "biases", "message"),
    [
        ("bert", "abs", "biases must be one of 'absdot', 'norm', 'equal', 'apart', got 'abs'"),
        ("llama", "norm", "post-norm layers of BERT, .*, which LlamaDecoderLayer of LlamaForCausalLM is not"),
        ("albert", "norm", "post-norm layers of BERT, .*, which AlbertLayer"),
    ],
)
def test_what_cannot_be_decomposed_is_named(model, biases, message):
    with pytest.raises(ValueError, match=message):
        token_decomposition(build_stock(model), {"input_ids": torch.tensor([[5, 6]])}, biases)


def test_classifiers_that_are_not_known_or_read_padding_are_refused():
    batch = {"input_ids": torch.tensor([[5, 6, 7], [1, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    with pytest.raises(ValueError, match="reads the first position, which is padding in text 1; pad on the right"):
        token_decomposition(classifier(), batch)
    model = classifier()
    model.classifier = torch.nn.Sequential(model.classifier)
    with pytest.raises(ValueError, match=r"the classifier of BertForSequenceClassification is not known; pass its"):
        token_decomposition(model, padded_batch(SENTENCES))
    assert token_decomposition(model.base_model, padded_batch(SENTENCES)).logits.numel() == 0
