# Licensed under the Apache License, Version 2.0.
"""The data of the interactive page, and the parts of the page that need no script."""

import json
import re

import pytest
import torch
from tiny_models import vivid, vivid_bert
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
)

from hf_attn_dynamics import HeadReading, attention_maps, prune_heads, read_heads
from hf_attn_dynamics.analysis import sentence_maps
from hf_attn_dynamics.analysis.pages.head_explorer import _rounded, page_data, verdict
from hf_attn_dynamics.analysis.pages.html import embedded_json
from hf_attn_dynamics.analysis.reading_examples import Example
from hf_attn_dynamics.analysis.sentences import Sentences
from hf_attn_dynamics.data import Tree, embedded_trees


TREES = embedded_trees()
TEXTS = [tree.text for tree in TREES]


def gpt2(tokenizer):
    return vivid(GPT2Model(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=4)))


def bart(tokenizer):
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    return vivid(BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), d_model=16, **sizes, **heads)))


@pytest.mark.parametrize("build", [vivid_bert, gpt2, bart])
def test_weights_are_those_of_attention_maps_to_eight_bits(build, tokenizer):
    model = build(tokenizer)
    maps = read_heads(model, TEXTS[:5], tokenizer).sentence_maps
    assert [one.text for one in maps] == [text for text in TEXTS[:5] if len(tokenizer(text)["input_ids"]) <= 40]
    read = model.get_encoder() if model.config.is_encoder_decoder else model
    for one in maps:
        (expected,) = attention_maps(read, {"input_ids": torch.tensor([tokenizer(one.text)["input_ids"]])}).values()
        (found,) = one.unpacked().values()
        torch.testing.assert_close(found, expected[:, 0], rtol=0, atol=1 / 510 + 1e-6)
        assert [one.tokens[index] for index in one.sides[0].special] == [
            t for t in one.tokens if t in ("[CLS]", "[SEP]")
        ]


def test_removed_heads_have_no_weights(tokenizer):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = prune_heads(vivid(BertModel(BertConfig(vocab_size=len(tokenizer), **sizes))), {1: [0, 3]})
    reading = read_heads(model, TEXTS[:3], tokenizer)
    weights = reading.sentence_maps[0].unpacked()["encoder"]
    assert weights.sum((-1, -2)).eq(0).nonzero().tolist() == [[1, 0], [1, 3]]
    data = page_data(reading)
    assert [tuple(head[:3]) for head in data["heads"]] == [
        ("encoder", layer, head) for layer in (0, 1) for head in range(4) if (layer, head) not in {(1, 0), (1, 3)}
    ]


def test_up_to_twenty_short_sentences_are_kept_and_parsed_ones_first(tokenizer):
    model = vivid_bert(tokenizer)
    ids = [[2, *[9] * (length - 2), 3] for length in range(2, 60)]
    chosen = sentence_maps.chosen_sentences(Sentences(ids, model, tokenizer))
    assert len(chosen) == 20
    assert max(len(ids[number]) for number in chosen) <= 40
    mixed = Sentences([*TEXTS, *TREES], model, tokenizer)
    assert {number >= len(TEXTS) for number in sentence_maps.chosen_sentences(mixed)} == {True}


def test_large_models_have_fewer_sentences(tokenizer, monkeypatch):
    whole = sentence_maps.collect_maps(vivid_bert(tokenizer), Sentences(TEXTS, vivid_bert(tokenizer), tokenizer))
    limit = sum(one.characters for one in whole[:3])
    monkeypatch.setattr(sentence_maps, "MAX_CHARACTERS", limit)
    some = sentence_maps.collect_maps(vivid_bert(tokenizer), Sentences(TEXTS, vivid_bert(tokenizer), tokenizer))
    assert 1 < len(some) < len(whole)
    assert sum(one.characters for one in some) <= limit


def test_arcs_lead_from_the_tokens_of_dependents_to_those_of_heads():
    tree = Tree(("Small", "dogs", "bark"), (1, 2, None), ("amod", "nsubj", "root"))
    sentence = Example([2, 10, 11, 12, 13, 3], [None, 0, 1, 1, 2, None], tree, tree.text)
    assert sentence.arcs() == {"amod": [[[1], [2, 3]]], "nsubj": [[[2, 3], [4]]]}
    assert Example([2, 10], []).arcs() == {}


def test_twelve_layers_of_twelve_heads_and_twenty_long_sentences_stay_below_three_megabytes(tokenizer, tmp_path):
    sizes = {"hidden_size": 48, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 24}
    # Weights of this spread compress as badly as those of trained models.
    model = BertModel(BertConfig(vocab_size=len(tokenizer), initializer_range=0.25, **sizes))
    generator = torch.Generator().manual_seed(0)
    middle = torch.randint(5, len(tokenizer), (20, 38), generator=generator).tolist()
    reading = read_heads(model, [[2, *ids, 3] for ids in middle], tokenizer)
    reading.save_page(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 3_000_000
    assert len(reading.sentence_maps) > 10


def test_json_in_a_page_ends_no_script_and_stays_the_same():
    value = {"</script><!--": ["<b>&amp;", "\u2028", None, 0.5]}
    text = embedded_json(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value


def test_sentences_cannot_leave_their_place_in_the_page(tokenizer, tmp_path):
    attack = "</script><img src=x onerror=alert(2)>"
    read_heads(vivid_bert(tokenizer), [attack, "<b>bold</b>"], tokenizer).save_page(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert html.count("<script") == html.count("</script>") == 3
    assert "<img src=x" not in html
    assert "<b>" not in html


def test_nothing_in_the_page_is_loaded_from_elsewhere(reading, tmp_path):
    reading.save_page(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://", html)
    assert "default-src 'none'" in html
    assert set(re.findall(r'(?:src|href)="([^"]{0,5})', html)) == {"#sect", "data:"}


def test_every_head_is_in_the_grid_and_in_the_table_without_script(reading, tmp_path):
    reading.save_page(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    functions = {record[:3]: record[3] for record in reading.records()}
    for (kind, layer, head), names in functions.items():
        label = f"Layer {layer}, head {head}: {names or 'none of these functions'}"
        assert f'data-layer="{layer}" data-head="{head}" title="{label}"' in html
        pattern = f'<tr data-site="{kind}" data-layer="{layer}" data-head="{head}" data-functions="{names}">'.replace(
            ", ", "[|]"
        )
        assert re.search(pattern, html)
    assert html.index("<summary>Definitions</summary>") < html.index("What was measured</h2>")


def test_roles_whose_best_head_only_equals_the_baseline_are_marked(reading, tmp_path):
    reading.save_page(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    for role, best in reading.roles().items():
        row = re.search(rf"<tr><td>{role}</td>.*?</tr>", html)[0]
        assert verdict(best["score"], best["baseline"]) in row
    assert verdict(0.3, 0.3) == "only equals the baseline"


def test_the_data_of_the_page_are_the_results(reading):
    data = json.loads(embedded_json(page_data(reading)))
    confidence = next(one["values"]["encoder"] for one in data["measures"] if one["name"] == "confidence")
    torch.testing.assert_close(torch.tensor(confidence).double(), reading["confidence"]["encoder"], rtol=0, atol=1e-4)
    for role in data["roles"]:
        found = reading["syntactic_roles"].baselines.get(role["name"])
        if role["arc"] is not None:
            assert role["baseline"]["encoder"] == pytest.approx(found["encoder"], abs=1e-4)
            direction = "to head" if role["arc"]["toHead"] else "to dependent"
            assert role["name"] == f"{role['arc']['relation']} {direction}"
    positions = reading["relative_positions"]
    middle = positions.attention["encoder"][0, 0, positions.limit].item()
    assert data["offsets"]["attention"]["encoder"][0][0][data["offsets"]["limit"]] == pytest.approx(middle, abs=1e-4)


def test_files_of_earlier_versions_are_still_read(reading, tmp_path):
    values = reading.to_dict()
    del values["sentence_maps"], values["results"]["delimiter_attention"]
    earlier = HeadReading.from_dict(values)
    assert earlier.sentence_maps == []
    assert earlier.functions()["delimiters"] is None
    assert earlier.summary()["delimiter_heads"] == {"encoder": None}
    earlier.save_page(tmp_path / "page.html")
    assert "delimiters (not measured)" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_infinite_numbers_are_shown_as_missing():
    assert _rounded({"a": torch.tensor([1.23456, torch.inf, torch.nan])}) == {"a": [1.2346, None, None]}
