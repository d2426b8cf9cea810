# Licensed under the Apache License, Version 2.0.
"""Observers of induction, previous tokens, local attention, sinks and retrieval, against loops over eager maps."""

import math

import pytest
import torch
from roles import maps_of
from stock_models import build_stock
from tiny_models import padded_batch, tiny_model, vivid

import hf_attn_dynamics as had
from hf_attn_dynamics.analysis.observers.base import AttentionCall, ObservedTokens, neighbour_ids
from hf_attn_dynamics.models.head_roles import locate_heads


# Repeated tokens, before and after each other.
LONG = [11, 12, 13, 14, 11, 12, 13, 14, 15, 11, 20, 21, 22, 23]
TEXTS = [[5, 6, 7, 5, 6, 8, 7, 5, 6], [9, 9, 9, 4, 9], [4, 5], LONG]
MODELS = [("bert", "encoder"), ("gpt2", "decoder"), ("gpt-oss", "decoder"), ("qwen2", "decoder")]


def visible(kind, query, length):
    return range(query + 1) if kind == "decoder" else range(length)


def induction(kind, ids, query):
    return [
        key for key in visible(kind, query, len(ids)) if key > 0 and ids[key - 1] == ids[query] and key - 1 != query
    ]


def previous(kind, ids, query):
    return [query - 1] if query else []


def local(kind, ids, query):
    seen = visible(kind, query, len(ids))
    near = [key for key in seen if abs(query - key) < 3 or key < 2]
    return near if len(near) < len(seen) else []


OBSERVERS = {
    "induction": (lambda: had.InductionScore([]), induction),
    "previous_token": (had.PreviousToken, previous),
    "local_attention": (lambda: had.LocalAttention(3, 2), local),
}


@torch.no_grad()
def observed(model, observer, texts=TEXTS, batch_size=3, **arguments):
    with had.observe(model, observer, **arguments) as seen:
        for start in range(0, len(texts), batch_size):
            model(**padded_batch(texts[start : start + batch_size], pad=1))
    return seen.results()[observer.name]


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize(("architecture", "kind"), MODELS)
def test_attention_to_targets_is_that_of_one_query_after_the_other(architecture, kind, name):
    model = vivid(build_stock(architecture)).double().eval()
    make, targets_of = OBSERVERS[name]
    found = observed(model, make())
    attention, chance = [], []
    for ids in TEXTS:
        maps = maps_of(model, ids)[kind]
        for query in range(len(ids)):
            if targets := targets_of(kind, ids, query):
                attention.append(maps[:, :, query, targets].sum(-1))
                chance.append(len(targets) / len(visible(kind, query, len(ids))))
    assert found.counts == {kind: len(chance)}
    torch.testing.assert_close(found.attention[kind], torch.stack(attention).mean(0), rtol=0, atol=1e-6)
    if architecture == "gpt-oss":
        return  # some of its layers have a window
    assert math.isclose(found.chance[kind], sum(chance) / len(chance), rel_tol=1e-6)


@pytest.mark.parametrize(("architecture", "kind"), MODELS)
def test_sinks_are_attention_to_the_first_token_and_to_nothing(architecture, kind):
    model = vivid(build_stock(architecture)).double().eval()
    found = observed(model, had.AttentionSink())
    first, nothing, sizes = [], [], []
    for ids in TEXTS:
        maps = maps_of(model, ids)[kind]
        for query in range(1, len(ids)):
            first.append(maps[:, :, query, 0])
            nothing.append(1 - maps[:, :, query].sum(-1))
            sizes.append(len(visible(kind, query, len(ids))))
    if architecture != "gpt-oss":
        torch.testing.assert_close(found.first[kind], torch.stack(first).mean(0), rtol=0, atol=1e-6)
        assert math.isclose(found.chance[kind], sum(1 / n for n in sizes) / len(sizes), rel_tol=1e-6)
        assert found.nothing[kind].abs().max() < 1e-6
        for column, least in enumerate(found.lengths):
            of_bin = [one for one, n in zip(first, sizes) if least <= n < 2 * least]
            values = found.by_length[kind][:, :, column]
            if of_bin:
                torch.testing.assert_close(values, torch.stack(of_bin).mean(0), rtol=0, atol=1e-6)
            else:
                assert values.isnan().all()
    else:
        # The second of its three layers sees everything.
        torch.testing.assert_close(found.first[kind][1], torch.stack(first).mean(0)[1], rtol=0, atol=1e-6)
        torch.testing.assert_close(found.nothing[kind][1], torch.stack(nothing).mean(0)[1], rtol=0, atol=1e-6)
        assert found.nothing[kind].min() > 0.01
    assert had.SinkAttention.from_dict(found.to_dict()) == found


@pytest.mark.parametrize("last", [None, 1, 3])
@pytest.mark.parametrize(("architecture", "kind"), [("bert", "encoder"), ("qwen2", "decoder")])
def test_retrieval_is_the_strongest_key_of_one_query_after_the_other(architecture, kind, last):
    model = vivid(build_stock(architecture)).double().eval()
    found = observed(model, had.RetrievalScore(last, excluded_ids=[9]))
    hits, chance = [], []
    for ids in TEXTS:
        maps = maps_of(model, ids)[kind]
        for query in range(len(ids) - 1):
            if last is not None and len(ids) - 1 - query > last:
                continue
            competing = list(visible(kind, query, len(ids)))
            # The next token is no copy of itself, and special tokens compete.
            copies = [key for key in competing if ids[key] == ids[query + 1] and key != query + 1]
            if 9 in (ids[query], ids[query + 1]) or not copies:
                continue
            strongest = torch.tensor(competing)[maps[:, :, query, competing].argmax(-1)]
            hits.append(torch.isin(strongest, torch.tensor(copies)).double())
            chance.append(len(copies) / len(competing))
    assert found.counts == {"retrieval": {kind: len(hits)}}
    torch.testing.assert_close(found.accuracy["retrieval"][kind], torch.stack(hits).mean(0), rtol=0, atol=1e-12)
    assert math.isclose(found.baselines["retrieval"][kind], sum(chance) / len(chance), rel_tol=1e-6)


@pytest.mark.parametrize("make", [make for make, _ in OBSERVERS.values()] + [had.AttentionSink])
def test_batches_and_padding_change_nothing(make):
    model = vivid(tiny_model("bert", "Model")).double().eval()
    together, alone = (observed(model, make(), batch_size=size) for size in (4, 1))
    for name, scores in together.head_scores().items():
        torch.testing.assert_close(
            scores["encoder"], alone.head_scores()[name]["encoder"], rtol=0, atol=1e-12, equal_nan=True
        )
    assert together.chance == pytest.approx(alone.chance)


def test_left_padding_changes_nothing():
    model = vivid(build_stock("qwen2")).double().eval()
    ids, length = TEXTS[0], 12
    left = {
        "input_ids": torch.tensor([[1] * (length - len(ids)) + ids]),
        "attention_mask": torch.tensor([[0] * (length - len(ids)) + [1] * len(ids)]),
    }
    left["position_ids"] = (left["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for make in (lambda: had.InductionScore([]), had.PreviousToken, had.AttentionSink):
        with torch.no_grad(), had.observe(model, make(name="seen") if make is had.PreviousToken else make()) as seen:
            model(**left)
        [found] = seen.results().values()
        alone = observed(model, make(), [ids])
        for name, scores in found.head_scores().items():
            torch.testing.assert_close(scores["decoder"], alone.head_scores()[name]["decoder"], rtol=0, atol=1e-6)


def test_encoder_decoders_are_observed_at_self_attention():
    model = vivid(build_stock("marian")).eval()
    ids = torch.tensor([TEXTS[0]])
    with torch.no_grad(), had.observe(model, had.InductionScore([]), had.AttentionSink()) as seen:
        model(input_ids=ids, decoder_input_ids=ids)
    assert list(seen.induction.attention) == list(seen.sink.first) == ["encoder", "decoder"]


@pytest.mark.parametrize("make", [lambda: had.InductionScore([]), had.AttentionSink, had.HeadEntropy])
def test_sentences_that_share_a_row_are_refused(make):
    model = build_stock("llama").eval()
    batch = {"input_ids": torch.tensor([[5, 7, 9, 7]]), "position_ids": torch.tensor([[0, 1, 0, 1]])}
    with had.observe(model, make()) as seen, torch.no_grad():
        with pytest.raises(ValueError, match="observers read a sentence in each row, but this batch has several"):
            model(**batch, use_cache=False)
        model(input_ids=batch["input_ids"])
    assert seen.results()


def test_queries_are_those_of_the_layer_that_sees_most():
    # Windows of three tokens in the first and the last layer.
    sizes = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    model = build_stock("gemma2", **sizes).eval()
    period = [5, 6, 7, 8, 9]
    with torch.no_grad(), had.observe(model, had.InductionScore([])) as seen:
        model(input_ids=torch.tensor([period * 2]))
    assert seen.induction.counts == {"decoder": 5}


def test_neighbours_stand_in_the_sentence_and_not_beside_it():
    real = torch.tensor([[False, True, True, False, True]])
    tokens = ObservedTokens(torch.tensor([[0, 5, 6, 0, 7]]), real)
    assert neighbour_ids(tokens, 1).tolist() == [[-1, 6, 7, -1, -1]]
    assert neighbour_ids(tokens, -1).tolist() == [[-1, -1, 5, -1, 6]]
    assert neighbour_ids(tokens, 2).tolist() == [[-1, 7, -1, -1, -1]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: had.LocalAttention(0), "window must be a number of tokens, at least 1, got 0"),
        (lambda: had.LocalAttention(4, -1), "sinks must be a number of tokens, at least 0, got -1"),
        (lambda: had.RetrievalScore(0), "last must be a number of tokens, at least 1, or None for all, got 0"),
        (lambda: had.InductionScore("[SEP]"), "excluded_ids must be a list of token ids, or None, got '[SEP]'"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        make()


@pytest.mark.parametrize("make", [had.InductionScore, had.RetrievalScore])
def test_special_tokens_and_ids_have_to_be_known(make):
    model = tiny_model("bert", "Model").eval()
    with had.observe(model, make()), pytest.raises(ValueError, match=r"or excluded_ids=tokenizer\."):
        model(input_ids=torch.tensor([[5, 6]]))
    with had.observe(model, make(excluded_ids=[])), pytest.raises(ValueError, match="an observer needs token ids"):
        model(inputs_embeds=torch.zeros(1, 2, model.config.hidden_size))


def test_an_induction_head_by_hand_has_the_score_one():
    """A head whose queries are tokens and whose keys are the tokens before, both one-hot."""
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8]])
    weights = torch.zeros(1, 4, 8, 8, dtype=torch.float64)
    for query in range(8):
        earlier = induction("decoder", ids[0].tolist(), query) or [query]
        weights[0, :, query, earlier] = 1 / len(earlier)
    observer, layers = had.InductionScore([]), locate_heads(build_stock("gpt2"))
    tokens, whole = ObservedTokens(ids, torch.ones_like(ids, dtype=torch.bool)), slice(0, 8)
    call = AttentionCall(None, layers[0], layers, weights, tokens, tokens, slice(0, 1), whole, causal=True)
    observer.update(call)
    found = observer.compute()
    assert found.attention["decoder"][0].tolist() == [1.0] * 4
    assert found.counts == {"decoder": 4}
