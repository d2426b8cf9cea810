"""Alignments from hidden states, held against one pair at a time and loops over words."""

import copy

import pytest
import torch
from stock_models import build_stock
from tiny_models import vivid
from transformers import PreTrainedTokenizerFast

from hf_attn_dynamics import prune_heads
from hf_attn_dynamics.analysis import embedding_alignment
from hf_attn_dynamics.data import encode_words, train_byte_level_bpe


TEXTS = [
    "the old king sleeps",
    "a queen reads",
    "kings and queens sleep",
    "der alte König schläft",
    "eine Königin liest",
]
PAIRS = [
    (TEXTS[0].split(), TEXTS[3].split()),
    (TEXTS[1].split(), TEXTS[4].split()),
    (TEXTS[2].split(), ["König"]),
    ([], ["König"]),
    (["a"], TEXTS[3].split() * 2),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_byte_level_bpe(TEXTS, vocab_size=280)


def encoder(name="bert"):
    return vivid(build_stock(name, vocab_size=280).double()).eval()


def expected_links(model, tokenizer, pair, layer, threshold):
    """Over words and tokens, with the model itself on each sentence alone."""
    states, words = [], []
    for side in pair:
        ids, of_token = encode_words(list(side), tokenizer)
        with torch.no_grad():
            states.append(model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0])
        words.append(of_token)
    links = set()
    dots = {
        (i, j): float(states[0][i] @ states[1][j])
        for i, one in enumerate(words[0])
        for j, other in enumerate(words[1])
        if one is not None and other is not None
    }
    for (i, j), dot in dots.items():
        of_source = sum(torch.tensor(other - dot).exp().item() for (k, _), other in dots.items() if k == i)
        of_target = sum(torch.tensor(other - dot).exp().item() for (_, k), other in dots.items() if k == j)
        if 1 / of_source > threshold and 1 / of_target > threshold:
            links.add((words[0][i], words[1][j]))
    return sorted(links)


@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("threshold", [1e-3, 0.2])
def test_links_are_those_of_a_loop_over_tokens(tokenizer, layer, threshold):
    model = encoder()
    found = embedding_alignment(model, tokenizer, PAIRS, layer=layer, threshold=threshold)
    expected = [expected_links(model.bert, tokenizer, pair, layer, threshold) if all(pair) else [] for pair in PAIRS]
    assert found == expected
    assert any(expected)


def test_links_do_not_depend_on_batches_modes_and_the_order_of_pairs(tokenizer):
    model = encoder().train()
    expected = embedding_alignment(model, tokenizer, PAIRS)
    assert model.training
    assert embedding_alignment(model, tokenizer, PAIRS, batch_size=1) == expected
    assert embedding_alignment(model, tokenizer, PAIRS[::-1], batch_size=2) == expected[::-1]
    # Two thirds of three layers.
    assert embedding_alignment(model, tokenizer, iter(PAIRS), layer=2) == expected
    exchanged = embedding_alignment(model, tokenizer, [(target, source) for source, target in PAIRS])
    assert exchanged == [sorted((source, target) for target, source in links) for links in expected]


def test_a_sentence_is_aligned_with_itself_by_its_embeddings(tokenizer):
    model = encoder()
    model.get_input_embeddings().weight.data.mul_(20)
    words = TEXTS[2].split()
    # Tokens that two words share find each other, too, with half of the probability each.
    found = embedding_alignment(model, tokenizer, [(words, words)], layer=0, threshold=0.6)
    assert found == [[(word, word) for word in range(len(words))]]


@pytest.mark.parametrize("name", ["bart", "t5", "roberta"])
def test_encoders_of_translators_and_pruned_models_align(tokenizer, name):
    model = encoder(name)
    reader = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    found = embedding_alignment(model, tokenizer, PAIRS, layer=1)
    assert found == [expected_links(reader, tokenizer, pair, 1, 1e-3) if all(pair) else [] for pair in PAIRS]
    heads = {0: [0, 1]} if not model.config.is_encoder_decoder else {"encoder": {0: [0, 1]}}
    fewer = prune_heads(copy.deepcopy(model), heads)
    reader = fewer.get_encoder() if model.config.is_encoder_decoder else fewer.base_model
    found = embedding_alignment(fewer, tokenizer, PAIRS, layer=1)
    assert found == [expected_links(reader, tokenizer, pair, 1, 1e-3) if all(pair) else [] for pair in PAIRS]


@pytest.mark.parametrize(
    ("pairs", "settings", "message"),
    [
        (PAIRS, {"layer": 4}, r"layer must be an integer from 0 \(embeddings\) to 3, got 4"),
        (PAIRS, {"layer": 1.0}, "layer must be an integer"),
        (PAIRS, {"threshold": 1}, "threshold must be at least 0 and below 1, got 1"),
        (PAIRS, {"threshold": "x"}, "threshold must be at least 0"),
        (PAIRS, {"batch_size": 0}, "batch_size must be at least 1"),
        (
            [*PAIRS, (["a"], ["word"] * 70)],
            {},
            r"the target of pair 5 has \d+ tokens, but the model has positions for 64",
        ),
        ([(["a", ""], ["b"])], {}, "a list of words: '' does not follow"),
        ([("a b", ["c"])], {}, "pair 0 of pairs has the string 'a b' for a list of words"),
        ([["a"]], {}, "pair 0 of pairs must be"),
    ],
)
def test_what_cannot_be_aligned_is_refused_before_a_forward_pass(tokenizer, pairs, settings, message):
    model = encoder()
    model.register_forward_hook(lambda *args: pytest.fail("the model runs"))
    with pytest.raises(ValueError, match=message):
        embedding_alignment(model, tokenizer, pairs, **settings)
