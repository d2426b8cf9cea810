# Licensed under the Apache License, Version 2.0.
"""The attention of all heads in a text, and contributions to them: values, models, frames, bad input."""

import html
import json
import re

import pytest
import torch
from stock_models import build_stock
from tiny_models import vivid
from transformers import AutoModelForSeq2SeqLM, BertConfig, BertModel, MarianConfig

from hf_attn_dynamics import (
    attention_maps,
    global_contribution,
    local_contribution,
    prune_heads,
    show_contributions,
    show_heads,
    value_weighted_attention,
)
from hf_attn_dynamics.analysis.pages.text_view import HeadView
from hf_attn_dynamics.analysis.sentence_maps import SentenceMaps, Side
from hf_attn_dynamics.data import train_byte_level_bpe


TEXT, OTHER = "the cat sat on the mat .", "a dog ran home"


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe([TEXT, OTHER], 300, kind="bert")


@pytest.fixture
def bert():
    return vivid(build_stock("bert", vocab_size=300))


def marian():
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0, "forced_eos_token_id": 3}
    config = MarianConfig(vocab_size=300, d_model=16, max_position_embeddings=80, **sizes, **heads, **ids)
    return vivid(AutoModelForSeq2SeqLM.from_config(config))


def close(found, expected, scale=1.0):
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=scale / 510 + 1e-6)


@pytest.mark.parametrize("build", ["bert", "gpt2", "llama"])
def test_weights_are_those_of_attention_maps(build, tokenizer):
    model = vivid(build_stock(build, vocab_size=300))
    view = show_heads(model, tokenizer, [TEXT, OTHER])
    for text, one in zip((TEXT, OTHER), view.sentences):
        inputs = tokenizer(text, return_tensors="pt")
        (kind, expected), *_ = attention_maps(model, inputs).items()
        close(one.unpacked()[kind], expected[:, 0])
        assert one.text == text
        assert len(one.tokens) == inputs["input_ids"].shape[1]


def test_a_pair_is_read_as_one_input(bert, tokenizer):
    (one,) = show_heads(bert, tokenizer, TEXT, text_pair=OTHER).sentences
    inputs = tokenizer(TEXT, OTHER, return_tensors="pt")
    assert inputs["token_type_ids"].any()
    close(one.unpacked()["encoder"], attention_maps(bert, inputs)["encoder"][:, 0])


def test_an_encoder_decoder_reads_the_target_at_three_kinds_of_sites(tokenizer):
    model = marian()
    (one,) = show_heads(model, tokenizer, TEXT, target=OTHER).sentences
    labels = tokenizer(text_target=OTHER, return_tensors="pt")["input_ids"]
    inputs = {key: value for key, value in tokenizer(TEXT, return_tensors="pt").items() if key != "token_type_ids"}
    expected = attention_maps(
        model, {**inputs, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}
    )
    found = one.unpacked()
    assert found.keys() == expected.keys() == {"encoder", "decoder", "cross"}
    for kind, table in expected.items():
        close(found[kind], table[:, 0])
    assert found["cross"].shape[2:] == (len(one.sides[1].tokens), len(one.sides[0].tokens))


def test_without_a_target_an_encoder_decoder_writes_one_as_generate_does(tokenizer):
    model = marian()
    inputs = {key: value for key, value in tokenizer(TEXT, return_tensors="pt").items() if key != "token_type_ids"}
    written = model.eval().generate(**inputs, max_new_tokens=64, do_sample=False, num_beams=1)
    model.train()
    (one,) = show_heads(model, tokenizer, TEXT).sentences
    assert model.training
    assert len(one.sides[1].tokens) == written.shape[1] - 1
    close(
        one.unpacked()["cross"],
        attention_maps(model, {**inputs, "decoder_input_ids": written[:, :-1]})["cross"][:, 0],
    )


def test_removed_heads_are_crossed(tokenizer):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = prune_heads(vivid(BertModel(BertConfig(vocab_size=300, **sizes))), {1: [0, 3]})
    view = show_heads(model, tokenizer, TEXT)
    assert view.heads == {"encoder": [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]}
    page = view.page().render()
    assert page.count('class="removed"') == 2
    assert page.count("<canvas>") == 6


def test_contributions_are_those_of_their_functions_on_scales_of_their_own(bert, tokenizer):
    (one,) = show_contributions(bert, tokenizer, TEXT, method="exact").sentences
    inputs = tokenizer(TEXT, return_tensors="pt")
    for name, function in (
        ("value_weighted", value_weighted_attention),
        ("local", local_contribution),
        ("global", global_contribution),
    ):
        expected = function(bert, inputs)[:, 0]
        assert one.weights[name]["encoder"].scale == pytest.approx(expected.max().item())
        close(one.unpacked(name)["encoder"], expected, expected.max().item())


def test_probes_are_as_many_as_the_embeddings_allow_and_are_mentioned(bert, tokenizer):
    size = bert.get_input_embeddings().weight.shape[1]
    view = show_contributions(bert, tokenizer, TEXT, contributions=["global"])
    assert f"{min(size, 32)} random directions" in view.page().render()
    expected = global_contribution(bert, tokenizer(TEXT, return_tensors="pt"), method="probes", probes=min(size, 32))[
        :, 0
    ]
    close(view.sentences[0].unpacked("global")["encoder"], expected, expected.max().item())


def test_contributions_to_an_encoder_decoder_are_those_to_its_encoder(tokenizer):
    model = marian()
    (one,) = show_contributions(model, tokenizer, TEXT, contributions=["local"]).sentences
    inputs = {key: value for key, value in tokenizer(TEXT, return_tensors="pt").items() if key != "token_type_ids"}
    expected = local_contribution(model, inputs)[:, 0]
    close(one.unpacked("local")["encoder"], expected, expected.max().item())
    assert one.shapes.keys() == {"encoder"}


def test_a_notebook_shows_the_page_in_a_frame_without_access_to_it(bert, tokenizer):
    view = show_heads(bert, tokenizer, 'the </script> & "cat" <iframe>')
    shown = view._repr_html_()
    assert re.fullmatch(r'<iframe srcdoc="[^"]*" sandbox="allow-scripts" title="[^"]*" style="[^"]*"></iframe>', shown)
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1])
    assert page == view.page().render()
    assert page.count("</script>") == 3  # data of heads, data of sentences, program


def test_a_saved_page_has_no_path_of_the_model(bert, tokenizer, tmp_path):
    bert.save_pretrained(tmp_path / "small")
    model = BertModel.from_pretrained(tmp_path / "small")
    show_heads(model, tokenizer, TEXT).save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1>Attention heads of small</h1>" in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": ""}, "none of them empty; got ''"),
        ({"text": []}, r"got \[\]"),
        ({"text": [TEXT, " "]}, "none of them empty"),
        ({"text": [TEXT, OTHER], "text_pair": OTHER}, "text_pair belongs to a single text, got 2 texts"),
        ({"text": TEXT, "target": OTHER}, "BertForMaskedLM reads no target, got target='a dog ran home'"),
    ],
)
def test_texts_that_cannot_be_meant_are_refused(arguments, message, bert, tokenizer):
    with pytest.raises(ValueError, match=message):
        show_heads(bert, tokenizer, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"contributions": ["lokal"]}, r"some of value_weighted, local, global, got \['lokal'\]"),
        ({"contributions": "local"}, "got 'local'"),
        ({"contributions": []}, "at least one of value_weighted, local, global"),
        ({"contributions": ["local"], "source": 1}, "source: only for global contributions"),
        ({"method": "exakt"}, "exakt"),
    ],
)
def test_contributions_that_cannot_be_meant_are_refused(arguments, message, bert, tokenizer):
    with pytest.raises(ValueError, match=message):
        show_contributions(bert, tokenizer, TEXT, **arguments)


def test_a_text_that_fills_no_page_is_refused_before_it_is_read(tokenizer):
    sizes = {"hidden_size": 96, "num_hidden_layers": 24, "num_attention_heads": 48, "intermediate_size": 8}
    model = BertModel(BertConfig(vocab_size=300, **sizes))
    model.forward = None
    with pytest.raises(ValueError, match=r"text has up to 102 tokens, for which 1152 heads have 11,985,408 weights"):
        show_heads(model, tokenizer, " ".join(["cat"] * 100))


def test_an_encoder_decoder_without_language_modeling_head_is_refused(tokenizer):
    with pytest.raises(ValueError, match="MarianModel cannot prepare a target for its decoder"):
        show_heads(marian().model, tokenizer, TEXT)


def test_heads_with_small_weights_are_not_removed_ones():
    # 8 bits round the weights of uniform attention over so many tokens to 0.
    weights = torch.full((1, 3, 600, 600), 1 / 600)
    weights[0, 1] = torch.nan
    side = Side(["word"] * 600, [], [])
    one = SentenceMaps.of("text", [side], {"attention": {"encoder": weights}})
    assert HeadView([one], "title").heads == {"encoder": [(0, 0), (0, 2)]}
    values = json.loads(json.dumps(one._asdict()))
    assert SentenceMaps.from_dict(values) == one
    earlier = SentenceMaps.of(
        "text", [Side(["a", "b"], [], [])], {"attention": {"encoder": torch.eye(2).expand(1, 2, 2, 2)}}
    )
    values = {name: value for name, value in earlier._asdict().items() if name != "heads"}
    assert SentenceMaps.from_dict(json.loads(json.dumps(values))).heads == {"encoder": [[0, 0], [0, 1]]}
