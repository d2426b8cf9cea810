# Licensed under the Apache License, Version 2.0.
"""Contributions through whole layers (ALTI, GlobEnc), against one pair of tokens after the other."""

import pytest
import torch
from stock_models import build_stock
from tiny_models import UNEVEN, padded_batch, tiny_model, vivid

from hf_attn_dynamics import encoder_decoder_contribution, layer_contribution, prune_heads
from hf_attn_dynamics.analysis.attribution.layers import _Summands
from hf_attn_dynamics.models.head_roles import locate_heads


SENTENCES = [[5, 9, 7, 12], [8, 6], [4, 6, 11]]


def normal(norm, vector, inputs):
    """A layer norm of `inputs` as a linear map of one of its summands."""
    deviation = (inputs.var(correction=0) + norm.eps).sqrt()
    return (vector - vector.mean()) / deviation * norm.weight


@torch.no_grad()
def slow_bert(model, ids, method):
    """Contributions within the layers of a BERT, `(layers, query, key)`."""
    outputs = model(torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
    tables = []
    for layer, states, maps in zip(model.encoder.layer, outputs.hidden_states, outputs.attentions):
        states, maps = states[0], maps[0].double()
        attention, output = layer.attention.self, layer.attention.output
        size = attention.attention_head_size
        attended = torch.zeros_like(states)
        parts = torch.zeros(len(ids), len(ids), states.shape[-1]).double()
        for i in range(len(ids)):
            for j in range(len(ids)):
                for head, weights in enumerate(maps):
                    at = slice(head * size, (head + 1) * size)
                    value = attention.value(states[j])[at]
                    parts[i, j] += weights[i, j] * (output.dense.weight[:, at] @ value)
            parts[i, i] += states[i]
            attended[i] = parts[i].sum(0) + output.dense.bias
        table = torch.zeros(len(ids), len(ids)).double()
        for i in range(len(ids)):
            after = output.LayerNorm(attended[i])
            inner = layer.output.dense(layer.intermediate(after))
            for j in range(len(ids)):
                part = normal(output.LayerNorm, parts[i, j], attended[i])
                if method == "alti":
                    table[i, j] = max(0, float(after.abs().sum() - (after - part).abs().sum()))
                else:
                    table[i, j] = normal(layer.output.LayerNorm, part, after + inner).norm()
        tables.append(table / table.sum(-1, keepdim=True))
    return torch.stack(tables)


@pytest.mark.parametrize("method", ["alti", "globenc"])
def test_post_norm_layers_are_those_of_one_pair_after_the_other(method):
    model = vivid(build_stock("bert").bert).double().eval()
    model.set_attn_implementation("eager")
    for ids in SENTENCES:
        expected = slow_bert(model, ids, method)
        found = layer_contribution(model, {"input_ids": torch.tensor([ids])}, method, aggregate=False)
        torch.testing.assert_close(found[:, 0], expected, rtol=1e-6, atol=1e-9)
        rolled = layer_contribution(model, {"input_ids": torch.tensor([ids])}, method)
        torch.testing.assert_close(rolled[1, 0], expected[1] @ expected[0], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(rolled[2, 0], expected[2] @ expected[1] @ expected[0], rtol=1e-6, atol=1e-9)


@torch.no_grad()
def slow_llama(model, ids, scale=1.0):
    """Contributions within the layers of a Llama by ALTI; `scale` multiplies what attention adds."""
    outputs = model(torch.tensor([ids]), output_hidden_states=True, output_attentions=True, use_cache=False)
    tables = []
    for layer, states, maps in zip(model.layers, outputs.hidden_states, outputs.attentions):
        states, maps, attention = states[0], maps[0].double(), layer.self_attn
        values = attention.v_proj(layer.input_layernorm(states)).unflatten(-1, (-1, attention.head_dim))
        table = torch.zeros(len(ids), len(ids)).double()
        for i in range(len(ids)):
            parts = torch.zeros(len(ids), states.shape[-1]).double()
            for j in range(i + 1):
                for head, weights in enumerate(maps):
                    at = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
                    value = values[j, head // attention.num_key_value_groups]
                    parts[j] += scale * weights[i, j] * (attention.o_proj.weight[:, at] @ value)
            parts[i] += states[i]
            after = parts.sum(0) + (0 if attention.o_proj.bias is None else scale * attention.o_proj.bias)
            for j in range(len(ids)):
                table[i, j] = max(0, float(after.abs().sum() - (after - parts[j]).abs().sum()))
        tables.append(table / table.sum(-1, keepdim=True))
    return torch.stack(tables)


def test_pre_norm_layers_are_those_of_one_pair_after_the_other():
    model = vivid(build_stock("llama").model).double().eval()
    model.set_attn_implementation("eager")
    for ids in SENTENCES:
        found = layer_contribution(model, {"input_ids": torch.tensor([ids])}, aggregate=False)
        torch.testing.assert_close(found[:, 0], slow_llama(model, ids), rtol=1e-4, atol=1e-6)


def test_what_is_scaled_before_it_is_added_is_scaled():
    model = vivid(build_stock("granite", residual_multiplier=0.22).model).double().eval()
    model.set_attn_implementation("eager")
    for ids in SENTENCES:
        found = layer_contribution(model, {"input_ids": torch.tensor([ids])}, aggregate=False)
        torch.testing.assert_close(found[:, 0], slow_llama(model, ids, 0.22), rtol=1e-4, atol=1e-6)


def test_a_row_that_no_token_brings_nearer_is_zero():
    layer = object.__new__(_Summands)
    layer.vectors = torch.tensor([[[5.0, -5.0], [-4.9, 5.1]]])
    layer.output = layer.vectors.sum(1)
    assert layer.closeness().tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "method"),
    [("bert", "alti"), ("bert", "globenc"), ("gpt2", "alti"), ("qwen3", "alti"), ("modernbert", "alti")],
)
def test_padding_and_batches_change_nothing_and_rows_sum_to_one(name, method):
    model = vivid(build_stock(name)).double().eval()
    together = layer_contribution(model, padded_batch(SENTENCES, pad=1), method)
    for number, ids in enumerate(SENTENCES):
        own, size = together[:, number], len(ids)
        alone = layer_contribution(model, {"input_ids": torch.tensor([ids])}, method)
        torch.testing.assert_close(own[:, :size, :size], alone[:, 0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(own[:, :size].sum(-1), torch.ones(len(own), size, dtype=own.dtype))
        assert (own[:, size:] == 0).all()
        assert (own[:, :, size:] == 0).all()


def test_removed_heads_and_closed_gates_contribute_nothing():
    model = vivid(tiny_model("bert", "Model", gates={})).double().eval()
    batch = {"input_ids": torch.tensor([[5, 9, 7, 12]])}
    for site, gate in model.head_gates().items():
        gate.log_alpha.data.fill_(3.0)
        gate.log_alpha.data[UNEVEN["bert"][site.layer]] = -3.0
    closed = layer_contribution(model, batch)
    pruned = layer_contribution(prune_heads(model, UNEVEN["bert"]), batch)
    torch.testing.assert_close(closed, pruned, rtol=1e-6, atol=1e-9)
    # A layer without heads leaves each token to itself.
    alone = layer_contribution(model, batch, aggregate=False)[1, 0]
    torch.testing.assert_close(alone, torch.eye(4).double())


def test_the_bias_of_a_layer_without_heads_counts():
    model = vivid(build_stock("gpt2").transformer).double().eval()
    prune_heads(model, {0: range(locate_heads(model)[0].num_heads)})
    batch = {"input_ids": torch.tensor([[5]])}
    with torch.no_grad():
        [states] = model(**batch, output_hidden_states=True).hidden_states[0][0]
    for factor, closer in ((-0.4, 1.0), (-2.0, 0.0)):
        model.h[0].attn.c_proj.bias.data = factor * states
        assert layer_contribution(model, batch, aggregate=False)[0, 0].tolist() == [[closer]]


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("bert", "decompx", "method must be one of 'alti', 'globenc', got 'decompx'"),
        (
            "llama",
            "globenc",
            "GlobEnc is known for the layers of BERT.* and XLM-R, unlike LlamaDecoderLayer of .*'alti'",
        ),
        ("bart", "globenc", "GlobEnc is known for the layers of BERT.*, unlike BartEncoderLayer of"),
        ("albert", "alti", "the norms of AlbertLayer of AlbertForMaskedLM are not known"),
        ("gemma2", "alti", "Gemma2DecoderLayer of Gemma2ForCausalLM normalizes the output of its attention"),
    ],
)
def test_what_is_not_defined_is_named(name, method, message):
    with pytest.raises(ValueError, match=message):
        layer_contribution(build_stock(name), {"input_ids": torch.tensor([[5, 6]])}, method)


TARGETS = [[2, 7, 9], [2, 10], [2, 6, 6, 8]]


def marian_blocks(layer):
    """Attention modules of a decoder layer, `(norm before, module, norm after)`."""
    return [
        (None, layer.self_attn, layer.self_attn_layer_norm),
        (None, layer.encoder_attn, layer.encoder_attn_layer_norm),
    ]


def t5_blocks(layer):
    own, crossed, _ = layer.layer
    return [(own.layer_norm, own.SelfAttention, None), (crossed.layer_norm, crossed.EncDecAttention, None)]


@torch.no_grad()
def slow_decoder(model, layers, blocks_of, batch):
    """Contributions within the layers of a decoder: `(layers, target, source)` and `(layers, target, target)`."""
    outputs = model(**batch, output_hidden_states=True, output_attentions=True, use_cache=False)
    encoded = outputs.encoder_last_hidden_state[0]
    sources, targets = [], []
    for layer, states, *maps in zip(
        layers, outputs.decoder_hidden_states, outputs.decoder_attentions, outputs.cross_attentions
    ):
        states, found = states[0], []
        for (before, attention, after), weights in zip(blocks_of(layer), maps):
            is_cross = len(found) == 1
            value, output = (
                (attention.v_proj, attention.out_proj) if hasattr(attention, "v_proj") else (attention.v, attention.o)
            )
            inputs = states if before is None else before(states)
            values = value(encoded if is_cross else inputs)
            heads, size = weights.shape[1], values.shape[-1] // weights.shape[1]
            table, summed = [], []
            for i in range(len(states)):
                parts = []
                for j in range(len(values)):
                    part = torch.zeros_like(states[0])
                    for head in range(heads):
                        at = slice(head * size, (head + 1) * size)
                        part += weights[0, head, i, j] * (output.weight[:, at] @ values[j, at])
                    parts.append(part)
                if is_cross:
                    parts.append(states[i])
                else:
                    parts[i] = parts[i] + states[i]
                total = sum(parts) + (0 if output.bias is None else output.bias)
                result = total if after is None else after(total)
                if after is not None:
                    parts = [normal(after, part, total) for part in parts]
                row = [max(0, float(result.abs().sum() - (result - part).abs().sum())) for part in parts]
                table.append([one / sum(row) for one in row])
                summed.append(result)
            states = torch.stack(summed)
            found.append(torch.tensor(table).double())
        own, crossed = found
        sources.append(crossed[:, :-1])
        targets.append(crossed[:, -1:] * own)
    return torch.stack(sources), torch.stack(targets)


@pytest.mark.parametrize(("name", "blocks_of"), [("marian", marian_blocks), ("t5", t5_blocks)])
def test_decoders_are_those_of_one_pair_after_the_other(name, blocks_of):
    model = vivid(build_stock(name)).double().eval()
    model.set_attn_implementation("eager")
    decoder = model.get_decoder()
    layers = decoder.layers if name == "marian" else decoder.block
    for ids, target in zip(SENTENCES, TARGETS):
        batch = {"input_ids": torch.tensor([ids]), "decoder_input_ids": torch.tensor([target])}
        source, own = slow_decoder(model, layers, blocks_of, batch)
        found = encoder_decoder_contribution(model, batch, aggregate=False)
        # The precision of the attention weights of T5 is float32.
        torch.testing.assert_close(found.source[:, 0], source, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.target[:, 0], own, rtol=1e-4, atol=1e-6)
        encoder = layer_contribution(model, batch)[-1, 0]
        rolled = encoder_decoder_contribution(model, batch)
        first = source[0] @ encoder
        torch.testing.assert_close(rolled.source[0, 0], first, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(rolled.source[1, 0], source[1] @ encoder + own[1] @ first, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(rolled.target[1, 0], own[1] @ own[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["bart", "marian", "pegasus", "t5"])
def test_source_and_target_sum_to_one_without_regard_to_padding(name):
    model = vivid(build_stock(name)).double().eval()
    pad = model.config.pad_token_id
    padded = padded_batch(SENTENCES, pad=pad)
    target = padded_batch(TARGETS, pad=pad)
    padded |= {"decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}
    together = encoder_decoder_contribution(model, padded)
    for number, (ids, words) in enumerate(zip(SENTENCES, TARGETS)):
        alone = encoder_decoder_contribution(
            model, {"input_ids": torch.tensor([ids]), "decoder_input_ids": torch.tensor([words])}
        )
        pairs = (together.source, alone.source, len(ids)), (together.target, alone.target, len(words))
        for own, single, keys in pairs:
            torch.testing.assert_close(own[:, number, : len(words), :keys], single[:, 0], rtol=1e-5, atol=1e-7)
            assert (own[:, number, len(words) :] == 0).all()
            assert (own[:, number, :, keys:] == 0).all()
        totals = alone.source.sum(-1) + alone.target.sum(-1)
        torch.testing.assert_close(totals, torch.ones_like(totals))
        assert (alone.target.triu(1) == 0).all()


def test_without_heads_on_the_source_all_comes_from_the_target():
    model = vivid(build_stock("marian")).double().eval()
    cross = [layer for layer in locate_heads(model) if layer.site.kind == "cross"]
    prune_heads(model, {"cross": {layer.site.layer: range(layer.num_heads) for layer in cross}})
    batch = {"input_ids": torch.tensor([[5, 9, 7]]), "labels": torch.tensor([[7, 9, 0]])}
    found = encoder_decoder_contribution(model, batch)
    assert (found.source == 0).all()
    torch.testing.assert_close(found.target.sum(-1), torch.ones_like(found.target[..., 0]))
    rows = list(found.records())
    assert len(rows) == 3 * (3 + 3)
    assert rows[3] == (0, 0, "target", 0, pytest.approx(1.0))


def test_a_model_without_a_decoder_is_named():
    message = "BertForMaskedLM has no decoder beside an encoder; layer_contribution"
    with pytest.raises(ValueError, match=message):
        encoder_decoder_contribution(build_stock("bert"), {"input_ids": torch.tensor([[5, 6]])})
