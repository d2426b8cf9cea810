# Licensed under the Apache License, Version 2.0.
"""What the heads of a checkpoint are known as, and copying scores."""

import math

import pytest
import torch
import transformers
from stock_models import build_stock
from tiny_models import vivid

import hf_attn_dynamics as had
from hf_attn_dynamics.analysis.attribution.trace import trace_attention
from hf_attn_dynamics.analysis.heads.copying import final_norm
from hf_attn_dynamics.analysis.heads.names import NAMES
from hf_attn_dynamics.analysis.heads.probes import ANSWER, Probes
from hf_attn_dynamics.data import embedded_sentences, train_byte_level_bpe


@pytest.fixture(scope="module")
def tokenizer():
    texts = [tree.text for tree in embedded_sentences()]
    return train_byte_level_bpe(texts, vocab_size=400, kind="roberta")


def decoder(vocab_size=60, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = transformers.LlamaConfig(vocab_size=vocab_size, **{**sizes, **special, **settings})
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def slow_copying_scores(model, ids, layer):
    """Scores of a layer of a Llama: one head and one token after the other."""
    body = model.model
    states = model(ids, output_hidden_states=True).hidden_states[layer]
    block = body.layers[layer]
    values = block.self_attn.v_proj(block.input_layernorm(states))[0]
    size, heads = block.self_attn.head_dim, model.config.num_attention_heads
    groups = heads // model.config.num_key_value_heads
    scores = []
    for head in range(heads):
        of_head = values[:, head // groups * size : (head // groups + 1) * size]
        output = block.self_attn.o_proj.weight[:, head * size : (head + 1) * size]
        ranks = []
        for token, value in zip(ids[0], of_head):
            logits = model.lm_head.weight @ (body.norm.weight * (output @ value))
            ranks.append((logits < logits[token]).sum().item() / (len(logits) - 1))
        scores.append(sum(ranks) / len(ranks))
    return scores


def test_copying_is_the_rank_of_the_token_among_the_logits_of_its_value():
    model = vivid(decoder(num_key_value_heads=2)).double()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    found = had.copying_scores(model, {"input_ids": ids})["decoder"]
    for layer in range(2):
        torch.testing.assert_close(found[layer], torch.tensor(slow_copying_scores(model, ids, layer)).double())


def test_tokens_count_once_and_the_first_ones_do():
    model = vivid(decoder()).double()
    once = had.copying_scores(model, {"input_ids": torch.tensor([[5, 6, 7]])})
    for batch, most in (
        ({"input_ids": torch.tensor([[5, 6, 7, 6]])}, 64),
        ({"input_ids": torch.tensor([[5, 6, 7, 8]])}, 3),
        ({"input_ids": torch.tensor([[5, 6, 7, 1]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}, 64),
    ):
        found = had.copying_scores(model, batch, most)
        torch.testing.assert_close(found["decoder"], once["decoder"], rtol=0, atol=1e-12)


def test_a_head_that_writes_what_it_reads_copies():
    model = decoder(vocab_size=32, tie_word_embeddings=True, num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(32))
        attention.v_proj.weight.copy_(torch.eye(32))
        attention.o_proj.weight.copy_(torch.eye(32))
        # The last head writes against what it reads.
        attention.o_proj.weight[:, 24:] *= -1
    scores = had.copying_scores(model, {"input_ids": torch.arange(32)[None]})["decoder"][0]
    # Each head sees 8 of the 32 tokens; the others have no value in it, and rank at the bottom.
    assert scores.tolist() == pytest.approx([0.25, 0.25, 0.25, 0.0], abs=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "gpt-neox", "qwen3", "gemma", "phi"])
def test_the_final_norm_is_the_last_one(name):
    model = build_stock(name)
    trace = trace_attention(model, {"input_ids": torch.tensor([[5, 6]])})
    norm = final_norm(model, trace)
    names = [one for one, module in model.named_modules() if module is norm]
    assert names[0].split(".")[-1] in ("ln_f", "norm", "final_layer_norm", "final_layernorm")


def test_copying_needs_a_language_model():
    with pytest.raises(ValueError, match="BertModel has no language-modelling head"):
        had.copying_scores(build_stock("bert").bert, {"input_ids": torch.tensor([[5]])})
    with pytest.raises(ValueError, match="BertForMaskedLM is no causal language model"):
        had.copying_scores(build_stock("bert"), {"input_ids": torch.tensor([[5]])})
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        had.copying_scores(decoder(), {"input_ids": torch.tensor([[5]])}, 0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformed = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=True))
    with pytest.raises(ValueError, match="BertLMHeadModel has other layers than a norm before the matrix of its head"):
        had.copying_scores(transformed, {"input_ids": torch.tensor([[5]])})
    narrow = build_stock("opt", word_embed_proj_dim=16)
    with pytest.raises(ValueError, match=r"have \d+ dimensions, but the head of the model reads 16"):
        had.copying_scores(narrow, {"input_ids": torch.tensor([[5]])})


def test_probes_are_what_they_say(tokenizer):
    model = decoder(vocab_size=len(tokenizer), max_position_embeddings=512)
    probes = Probes(model, tokenizer, None, 4, 10, 2, 0)
    for tokens in probes.repeats():
        assert tokens[0] == tokenizer.bos_token_id
        assert tokens[1:11] == tokens[11:]
        assert len(set(tokens)) == 11
    needles = probes.needles()
    assert len(needles) == 4
    for tokens in needles:
        answer = tokens[-ANSWER:]
        # The answer stands once in the text before, after the same question.
        [place] = [i for i in range(len(tokens) - ANSWER) if tokens[i : i + ANSWER] == answer]
        assert tokens[place - 3 : place] == tokens[-ANSWER - 3 : -ANSWER]
        assert all(tokens.count(token) == 2 for token in answer)
        assert tokenizer.decode(tokens[place - 4 : place]).endswith(" is")


def test_every_name_is_measured_in_a_causal_language_model(tokenizer, tmp_path):
    model = vivid(decoder(vocab_size=len(tokenizer), max_position_embeddings=1024))
    names = had.name_heads(model, tokenizer, sequences=4, length=12)
    # The texts begin with <s>.
    assert list(names.scores) == list(NAMES)
    assert names.not_measured == {}
    for name, scores in names.scores.items():
        assert scores["decoder"].shape == (2, 4)
        assert 0 <= scores["decoder"].min() <= scores["decoder"].max() <= 1
        assert 0 < names.chance[name]["decoder"] < 1
    assert had.HeadNames.from_dict(names.to_dict()) == names
    assert had.name_heads(model, tokenizer, sequences=4, length=12) == names
    assert had.name_heads(model, tokenizer, sequences=4, length=12, seed=1) != names
    rows = list(names.records())
    assert len(rows) == len(NAMES) * 8
    named = {(site, layer, head) for site, layer, head, *_, is_named in rows if is_named}
    assert named == set(names.names())
    names.save_page(tmp_path / "names.html")
    page = (tmp_path / "names.html").read_text()
    assert all(name in page for name in NAMES)
    assert "prefix matching" in page
    assert "What the heads are known as" in names._repr_html_()


def test_names_need_a_threshold_and_more_than_chance():
    table = [[0.55, 0.3], [0.2, math.nan]]
    names = had.HeadNames(
        {"sink": had.HeadScores({"decoder": table}), "local": had.HeadScores({"decoder": table})},
        {"sink": {"decoder": 0.1}, "local": {"decoder": 0.48}},
        {"sink": 0.25, "local": 0.25},
        {"copying": "it was not asked for."},
    )
    assert names.heads("sink") == [("decoder", 0, 0, 0.55), ("decoder", 0, 1, 0.3)]
    assert names.heads("local") == []
    assert names.names() == {("decoder", 0, 0): ["sink"], ("decoder", 0, 1): ["sink"]}
    with pytest.raises(ValueError, match="got 'copying': it was not asked for"):
        names.heads("copying")
    with pytest.raises(ValueError, match="name must be one of 'sink', 'local', got 'sinks'"):
        names.heads("sinks")


def test_an_encoder_and_a_model_without_a_tokenizer_say_what_is_missing(tokenizer):
    encoder = vivid(build_stock("bert"))
    names = had.name_heads(encoder, sequences=2, length=5)
    assert list(names.scores) == ["induction", "previous token", "duplicate tokens"]
    assert names.not_measured == {
        "copying": "only causal language models are measured.",
        "retrieval": "only causal language models are measured.",
        **dict.fromkeys(("sink", "streaming", "delimiters"), "text needs a tokenizer."),
    }
    short = decoder(vocab_size=len(tokenizer), max_position_embeddings=16)
    names = had.name_heads(short, tokenizer, ["a code"], sequences=2)
    assert names.not_measured["retrieval"] == "the model reads 16 tokens, too few for a needle and a question."
    # No token sees beyond the window of so short a text.
    assert names.not_measured["streaming"] == "no token of the probe counts."
    assert "streaming" not in names._repr_html_()


def test_text_that_the_model_cannot_read_is_not_measured(tokenizer):
    short = decoder(vocab_size=len(tokenizer), max_position_embeddings=16)
    names = had.name_heads(short, tokenizer, ["a much longer text than such a model can read at all"], sequences=2)
    assert "induction" in names.scores
    assert all("16" in names.not_measured[name] for name in ("sink", "streaming", "delimiters", "retrieval"))


@torch.no_grad()
def test_attention_to_special_tokens_is_compared_with_uniform_attention(tokenizer):
    model = vivid(decoder(vocab_size=len(tokenizer)))
    texts = ["the first text of some words", "another text with a few more words than that"]
    names = had.name_heads(model, tokenizer, texts, sequences=2, length=5)
    scores, chance = [], []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        is_special = torch.tensor([token in tokenizer.all_special_ids for token in ids])
        model.set_attn_implementation("eager")
        maps = torch.stack(model(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]
        scores.append(maps[..., is_special].sum(-1))
        chance += [is_special[: query + 1].float().mean().item() for query in range(len(ids))]
    torch.testing.assert_close(
        names.scores["delimiters"]["decoder"], torch.cat(scores, -1).mean(-1).double(), rtol=1e-5, atol=1e-6
    )
    assert names.chance["delimiters"]["decoder"] == pytest.approx(sum(chance) / len(chance), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"thresholds": {"inductive": 0.5}},
            "thresholds name 'inductive', which is not one of 'induction', ",
        ),
        ({"thresholds": {"sink": 30}}, "thresholds must be numbers from 0 to 1, got 30 for 'sink'"),
        ({"thresholds": {"sink": math.nan}}, "thresholds must be numbers from 0 to 1, got nan for 'sink'"),
        ({"texts": ["a"]}, "texts are read with the tokenizer of the model; pass it, too"),
        ({"sequences": 0}, "sequences must be at least 1, got 0"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"length": 1}, "random sequences need at least two tokens that can be repeated"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        had.name_heads(decoder(), **arguments)


def test_thresholds_of_the_user_replace_the_defaults():
    names = had.name_heads(vivid(decoder()), sequences=2, length=5, thresholds={"induction": 0.125})
    assert names.thresholds == {name: 0.125 if name == "induction" else NAMES[name].threshold for name in names.scores}
