# Licensed under the Apache License, Version 2.0.
"""Relevance of tokens, against explicit ratios and against gradients of a model with frozen factors."""

import pytest
import torch
import transformers
from dense_relevance import dense_relevance
from stock_models import build_stock
from tiny_models import KINDS, batch_for, headwise_class, tiny_config, vivid
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_attn_dynamics import relevance_conservation, token_relevance
from hf_attn_dynamics.analysis.relevance.rules import RULES


SENTENCES = [[5, 9, 7, 12], [8, 6], [4, 6, 11]]
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 6, "vocab_size": 11}


def bert(**settings):
    config = transformers.BertConfig(**SIZES, max_position_embeddings=8)
    return vivid(transformers.BertForMaskedLM(config)).double().eval()


@pytest.mark.parametrize("rule", RULES)
def test_tokens_have_the_relevance_of_explicit_ratios(rule):
    model, ids = bert(), torch.tensor([5, 7, 3])
    found = token_relevance(model, {"input_ids": ids[None]}, rule, epsilon=1e-12)["encoder"]
    expected = torch.stack([dense_relevance(model, ids, position, rule)[1] for position in range(3)])
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-9)


def halved(left, right):
    """A matrix product of which each factor gets half of the gradient."""
    return (left @ right.detach() + left.detach() @ right) / 2


def frozen_norm(norm, states):
    scale = norm(states).detach() / states.detach()
    return states * scale


def gradient_times_input(model, ids):
    """Relevance of tokens by AttnLRP for the top-1 logits of a Llama: `(positions, tokens)`."""
    body = model.model
    entry = body.embed_tokens(ids)[None].detach().requires_grad_()
    turns = body.rotary_emb(entry, torch.arange(len(ids))[None])
    later = torch.ones(len(ids), len(ids)).triu(1).bool()
    states = entry
    for layer in body.layers:
        attention, normal = layer.self_attn, frozen_norm(layer.input_layernorm, states)
        query, key, value = (
            getattr(attention, f"{name}_proj")(normal).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, *turns)
        key, value = (one.repeat_interleave(attention.num_key_value_groups, 1) for one in (key, value))
        scores = halved(query, key.mT) * attention.scaling
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        states = states + attention.o_proj(halved(weights, value).transpose(1, 2).flatten(2))
        normal = frozen_norm(layer.post_attention_layernorm, states)
        gate, up = layer.mlp.gate_proj(normal), layer.mlp.up_proj(normal)
        active = gate * (nn.functional.silu(gate) / gate).detach()
        states = states + layer.mlp.down_proj((active * up.detach() + active.detach() * up) / 2)
    logits = model.lm_head(frozen_norm(body.norm, states))[0].amax(-1)
    rows = []
    for logit in logits:
        (gradient,) = torch.autograd.grad(logit, entry, retain_graph=True)
        rows.append(((gradient * entry).sum(-1)[0] / logit).detach())
    return torch.stack(rows)


def test_attn_lrp_is_gradient_times_input_of_a_model_with_frozen_factors():
    model = vivid(build_stock("llama")).double().eval()
    ids = torch.tensor([5, 9, 7, 12])
    found = token_relevance(model, {"input_ids": ids[None]}, epsilon=1e-12)["decoder"]
    torch.testing.assert_close(found[0], gradient_times_input(model, ids), rtol=1e-4, atol=1e-6)
    # No token can speak for a prediction before it.
    assert (found[0].triu(1) == 0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_batches_change_nothing(kind, rule):
    head = "MTModel" if kind == "marian" else "ForMaskedLM"
    torch.manual_seed(0)
    model = vivid(headwise_class(kind, head)(tiny_config(kind))).double().eval()
    together = token_relevance(model, batch_for(kind, SENTENCES), rule)
    assert list(together) == (["encoder", "decoder"] if kind == "marian" else ["encoder"])
    for number, sentence in enumerate(SENTENCES):
        alone = token_relevance(model, batch_for(kind, [sentence]), rule)
        size = len(sentence)
        for name, relevance in alone.items():
            own = together[name][number]
            torch.testing.assert_close(own[:size, :size], relevance[0], rtol=1e-5, atol=1e-8)
            assert own[size:].isnan().all()
            assert (own[:size, size:] == 0).all()


def test_all_relevance_that_inputs_get_is_that_of_tokens():
    model = vivid(build_stock("marian")).double().eval()
    batch = {"input_ids": torch.tensor([[5, 9, 7]]), "decoder_input_ids": torch.tensor([[3, 6]])}
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    model.final_logits_bias.zero_()
    found = token_relevance(model, batch, "alpha_beta")
    totals = found["encoder"].sum(-1) + found["decoder"].sum(-1)
    torch.testing.assert_close(totals, torch.ones(1, 2).double(), rtol=0, atol=1e-6)


def test_classifiers_have_one_prediction_and_labels_say_which_count():
    torch.manual_seed(0)
    classifier = vivid(headwise_class("bert", "ForSequenceClassification")(tiny_config("bert"))).eval()
    found = token_relevance(classifier, batch_for("bert", SENTENCES))["encoder"]
    assert found.shape == (3, 1, 4)
    model, batch = bert(), batch_for("bert", SENTENCES)
    batch["input_ids"] = batch["input_ids"].clamp(max=10)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 1] = 5
    labelled = token_relevance(model, {**batch, "labels": labels})["encoder"]
    torch.testing.assert_close(labelled[0, 1], token_relevance(model, batch)["encoder"][0, 1])
    assert labelled[0, 0].isnan().all()
    assert labelled[1:].isnan().all()


def test_one_batch_at_a_time():
    batch = {"input_ids": torch.tensor([[5]])}
    with pytest.raises(ValueError, match="batch must be arguments of a forward pass by name, got list"):
        token_relevance(bert(), [batch, batch])


def test_a_rule_that_does_not_conserve_is_not_checked_for_it():
    with pytest.raises(ValueError, match="rule='attn_lrp' does not conserve relevance: softmax keeps a part"):
        relevance_conservation(bert(), {"input_ids": torch.tensor([[5]])}, "attn_lrp")
    with pytest.raises(ValueError, match="rule must be one of 'ratio', 'alpha_beta', 'attn_lrp', got 'lrp'"):
        token_relevance(bert(), {"input_ids": torch.tensor([[5]])}, "lrp")
