# Licensed under the Apache License, Version 2.0.
"""Two models on one page in headless Chromium: a click selects in both grids, and both attentions are shown."""

from dataclasses import replace

import pytest
import torch
from browsing import ATTACK, HOVER, check_log, choose, click, find, opened, shown, wait
from tiny_models import vivid, vivid_bert
from transformers import BartConfig, BartForConditionalGeneration

from hf_attn_dynamics import attention_maps, prune_heads, read_heads
from hf_attn_dynamics.analysis.pages.comparison import Comparison
from hf_attn_dynamics.data import embedded_trees


REMOVED = {(0, 1), (1, 0), (1, 3)}
NAMES = ("dense", f"{ATTACK} pruned")


@pytest.fixture(scope="module")
def models(model, tokenizer, reading):
    """A model, the same one without three heads, their readings, and the tokenizer."""
    pruned = prune_heads(vivid_bert(tokenizer), {0: [1], 1: [0, 3]})
    some = reading, read_heads(pruned, embedded_trees(), tokenizer, frequent=20)
    return (model, pruned), [replace(one, model=name) for one, name in zip(some, NAMES)], tokenizer


def saved(browser, path, first, second):
    first.save_page(path, compare=second)
    return opened(browser, path)


@pytest.fixture
def page(browser, models, tmp_path):
    """The page of both models, opened; afterwards, nothing was logged and nothing requested."""
    yield saved(browser, tmp_path / "page.html", *models[1])
    check_log(browser, tmp_path / "page.html")


def head(layer, number, grid=1):
    return f'.models section:nth-child({grid}) button[data-layer="{layer}"][data-head="{number}"]'


def weights_of(models, which, sentence, layer, number):
    """Attention of a head; heads that were removed before it do not count in the maps of the pruned model."""
    model, tokenizer = models[0][which], models[2]
    maps = attention_maps(model, tokenizer(sentence.text, return_tensors="pt"))["encoder"][layer, 0]
    return maps[number]


@pytest.mark.parametrize("grid", [1, 2])
def test_a_click_in_either_grid_selects_in_both(page, grid):
    click(page, head(1, 2, grid))
    pressed = find(page, '.grid button[data-head][aria-pressed="true"]')
    assert [(one.get_attribute("data-layer"), one.get_attribute("data-head")) for one in pressed] == [("1", "2")] * 2
    assert "Layer 1, head 2" in find(page, "#card h3")[0].text
    assert len(find(page, ".grid td.removed.selected")) == 0


def test_the_card_has_both_values_and_the_difference(page, models):
    click(page, head(1, 2))
    first, second = (one["confidence"]["encoder"][1, 2].item() for one in models[1])
    difference = f"{round(second, 4) - round(first, 4):+.3f}".replace("-", "−").replace("+0.000", "0.000")
    assert f"confidence {first:.3f} {second:.3f} {difference}" in find(page, "#card")[0].text
    assert len(find(page, "#card .offsets")) == 2
    assert NAMES[1] in find(page, "#card")[0].text


@pytest.mark.parametrize("number", [0, 3])
def test_both_weights_of_a_token_are_those_of_attention_maps(page, models, number):
    click(page, head(1, 2, 2))
    sentence = models[1][0].sentence_maps[number]
    choose(page, "#sentence", str(number))
    wait(page, f"return document.querySelectorAll('.queries button').length == {2 * len(sentence.tokens)}")
    expected = [weights_of(models, which, sentence, 1, 2) for which in (0, 1)]
    assert (expected[0] - expected[1]).abs().max() > 0.01
    for query in (0, 4):
        page.execute_script(HOVER, find(page, "#panels .panel:nth-child(1) .queries button")[query])
        for panel, weights in enumerate(expected):
            found = torch.tensor(shown(page, panel=panel))
            torch.testing.assert_close(found, weights[query], rtol=0, atol=1 / 510 + 1e-5)
    titles = [one.text for one in find(page, "#panels h4")]
    assert titles[0] == "attention · dense"
    assert titles[1].startswith("attention · </script>")


def test_removed_heads_are_crossed_marked_and_said(page):
    crosses = find(page, ".models section:nth-child(2) td.removed")
    assert len(crosses) == 3
    assert not find(page, ".models section:nth-child(1) td.removed")
    for layer, number in REMOVED:
        button = click(page, head(layer, number))
        assert button.find_element("css selector", ".mark").text == "×"
        assert button.accessible_name.endswith("(removed in B)")
        (cross,) = find(page, ".grid td.removed.selected")
        assert cross in crosses
        wait(page, "return document.querySelectorAll('#panels .panel').length == 1")
        assert find(page, "#comparison-note")[0].text == "The head is removed in B."
        assert "yes → no" not in find(page, "#card")[0].text
        assert "removed" in find(page, "#card")[0].text
    choose(page, "#measure", "attention_compared")
    choose(page, "#beside", "")
    wait(page, "return document.querySelectorAll('#panels .panel').length == 0")
    assert "no such weights" in find(page, "#status")[0].text
    click(page, head(1, 2))
    wait(page, "return document.querySelectorAll('#panels .panel').length == 1")
    assert find(page, "#comparison-note")[0].text == ""


def test_several_heads_leave_out_removed_ones(page, models):
    sentence = models[1][0].sentence_maps[0]
    choose(page, "#sentence", "0")
    click(page, ".models section:nth-child(1) tr:nth-child(3) button.layer")
    wait(page, "return document.querySelectorAll('#panels .panel').length == 2")
    assert find(page, "#comparison-note")[0].text == "1.0, 1.3 are removed in B."
    page.execute_script(HOVER, find(page, "#panels .panel:nth-child(2) .queries button")[1])
    for which, heads in ((0, (0, 1, 2, 3)), (1, (1, 2))):
        mean = sum(weights_of(models, which, sentence, 1, number) for number in heads) / len(heads)
        torch.testing.assert_close(torch.tensor(shown(page, panel=which)), mean[1], rtol=0, atol=1 / 510 + 1e-5)


def test_rows_of_what_moved_select_their_heads(page, models):
    moved = Comparison(*models[1]).moved_heads()
    rows = find(page, ".moved")[0].find_elements("css selector", "tbody tr")
    assert len(rows) == len(moved)
    for row in (rows[0], rows[-1]):
        page.execute_script("arguments[0].querySelector('button').click()", row)
        name = f"Layer {row.get_attribute('data-layer')}, head {row.get_attribute('data-head')}"
        assert find(page, "#card h3")[0].text == name
        assert "selected" in row.get_attribute("class")


def test_heads_removed_in_the_first_model_have_cards(browser, models, tmp_path):
    page = saved(browser, tmp_path / "page.html", *models[1][::-1])
    click(page, head(1, 3, 2))
    assert find(page, "#card h3")[0].text == "Layer 1, head 3"
    assert "removed" in find(page, "#card")[0].text
    assert len(find(page, ".models section:nth-child(1) td.removed.selected")) == 1
    wait(page, "return document.querySelectorAll('#panels .panel').length == 1")
    assert find(page, "#comparison-note")[0].text == "The head is removed in A."
    assert len(find(page, "#heads-table tbody tr")) == 8
    check_log(browser, tmp_path / "page.html")


def test_both_grids_are_reached_by_keys(page):
    assert len(find(page, '.grid button[tabindex="0"]')) == 2
    first = click(page, head(0, 0, 2))
    first.send_keys("\ue014\ue007")  # right, over a removed head, and Enter
    assert "Layer 0, head 2" in find(page, "#card h3")[0].text
    for control in find(page, "select, input"):
        assert control.accessible_name


def test_sentences_of_other_tokens_show_the_first_model_only(browser, models, tmp_path):
    first, second = models[1]
    page = saved(browser, tmp_path / "page.html", first, replace(second, sentence_maps=second.sentence_maps[1:]))
    total = len(first.sentence_maps)
    assert f"weights of the same tokens in {total - 1} of {total} example sentences" in find(page, "body")[0].text
    click(page, head(1, 2))
    choose(page, "#sentence", "0")
    wait(page, "return document.querySelectorAll('#panels .panel').length == 1")
    assert find(page, "#comparison-note")[0].text == "B has no weights of these tokens."
    choose(page, "#measure", "attention_compared")
    choose(page, "#beside", "")
    assert find(page, "#panels h4")[0].text == "attention · dense"
    choose(page, "#sentence", "1")
    wait(page, "return document.querySelector('#panels h4').textContent.startsWith('attention · <')")
    check_log(browser, tmp_path / "page.html")


def test_encoders_of_encoder_decoders_are_compared(browser, models, tmp_path):
    tokenizer = models[2]
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_attention_heads=4, decoder_attention_heads=2, **sizes
    )
    texts = [tree.text for tree in embedded_trees()[:4]]
    one, other = (read_heads(vivid(BartForConditionalGeneration(config)), texts, tokenizer) for _ in range(2))
    page = saved(browser, tmp_path / "page.html", one, other)
    click(page, head(1, 2))
    assert find(page, "#card h3")[0].text == "Layer 1, head 2"
    check_log(browser, tmp_path / "page.html")
