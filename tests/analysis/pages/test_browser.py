# Licensed under the Apache License, Version 2.0.
"""The interactive page in headless Chromium: clicks, weights, keys, sorting; no error, and no request."""

import re

import pytest
import torch
from browsing import ATTACK, HOVER, check_log, choose, click, find, number_of_changes, opened, shown, wait
from tiny_models import vivid
from transformers import BertConfig, BertModel

from hf_attn_dynamics import HeadReading, attention_maps, local_contribution, read_heads
from hf_attn_dynamics.data import embedded_trees


@pytest.fixture(scope="module")
def reading(model, tokenizer, reading):
    return model, tokenizer, reading


@pytest.fixture
def page(browser, reading, tmp_path):
    """The page of a reading of parsed sentences, opened; afterwards, nothing was logged and nothing requested."""
    reading[-1].save_page(tmp_path / "page.html")
    yield opened(browser, tmp_path / "page.html")
    check_log(browser, tmp_path / "page.html")


def choose_sentence(browser, reading, number):
    choose(browser, "#sentence", str(number))
    count = len(reading.sentence_maps[number].tokens)
    wait(browser, f"return document.querySelectorAll('.queries button').length == {count}")


def maps_of(reading, number):
    model, tokenizer, results = reading
    return attention_maps(model, tokenizer(results.sentence_maps[number].text, return_tensors="pt"))["encoder"][:, 0]


def test_a_click_on_a_head_shows_its_card(page, reading):
    results = reading[-1]
    button = click(page, '.grid button[data-layer="1"][data-head="2"]')
    assert button.get_attribute("aria-pressed") == "true"
    assert len(find(page, '.grid button[aria-pressed="true"]')) == 1
    card = find(page, "#card")[0].text
    assert "Layer 1, head 2" in card
    assert f"confidence {results['confidence']['encoder'][1, 2]:.2f}" in card
    assert f"entropy {results['entropy']['encoder'][1, 2]:.2f}" in card
    assert re.search(rf"All {len(results.roles())} roles", card)
    assert len(find(page, "#card .offsets span")) == 25


@pytest.mark.parametrize("number", [0, 3])
def test_weights_of_a_token_are_those_of_attention_maps(page, reading, number):
    click(page, '.grid button[data-layer="1"][data-head="2"]')
    choose_sentence(page, reading[-1], number)
    weights = maps_of(reading, number)[1, 2]
    for query in (0, 4):
        page.execute_script(HOVER, find(page, ".queries button")[query])
        torch.testing.assert_close(torch.tensor(shown(page)), weights[query], rtol=0, atol=1 / 510 + 1e-5)
        assert 0 < len(find(page, "#panels .lines line:not(.arc)")) <= len(weights)
    page.execute_script(HOVER, find(page, ".keys button")[2])
    torch.testing.assert_close(torch.tensor(shown(page, "queries")), weights[:, 2], rtol=0, atol=1 / 510 + 1e-5)


def test_a_click_keeps_a_token_until_escape(page):
    queries = find(page, ".queries button")
    page.execute_script("arguments[0].click()", queries[3])
    locked = shown(page)
    page.execute_script(HOVER, queries[1])
    assert shown(page) == locked
    assert queries[3].get_attribute("aria-pressed") == "true"
    assert "kept" in find(page, "#status")[0].text
    queries[3].send_keys("\ue00c")
    page.execute_script(HOVER, queries[1])
    assert shown(page) != locked


def test_hidden_tokens_are_renormalised(page, reading):
    choose_sentence(page, reading[-1], 0)
    click(page, '.grid button[data-layer="0"][data-head="1"]')
    click(page, "#hide-special")
    one = reading[-1].sentence_maps[0]
    count = len(one.tokens) - len(one.sides[0].special)
    wait(page, f"return document.querySelectorAll('.queries button').length == {count}")
    page.execute_script(HOVER, find(page, ".queries button")[2])
    kept = [index for index in range(len(one.tokens)) if index not in one.sides[0].special]
    row = maps_of(reading, 0)[0, 1][kept[2], kept]
    assert sum(shown(page)) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(torch.tensor(shown(page)), row / row.sum(), rtol=0, atol=0.02)


def test_arcs_of_a_role_are_those_of_the_tree(page, reading):
    number, one = next(
        (number, one) for number, one in enumerate(reading[-1].sentence_maps) if "det" in one.arcs and number
    )
    choose_sentence(page, reading[-1], number)
    choose(page, "#role", "det to head")
    arcs = sum(len(dependent) * len(head) for dependent, head in one.arcs["det"])
    wait(page, f"return document.querySelectorAll('#panels .lines line.arc').length == {arcs}")
    [dependent, head] = one.arcs["det"][0]
    page.execute_script(HOVER, find(page, ".queries button")[dependent[0]])
    targets = [int(button.get_attribute("data-index")) for button in find(page, ".keys button.target")]
    assert targets == head


def test_heads_and_tokens_are_reached_by_keys(page):
    first = click(page, '.grid button[data-layer="0"][data-head="0"]')
    assert len(find(page, '.grid button[tabindex="0"]')) == 1
    first.send_keys("\ue015\ue014\ue007")  # down, right, Enter
    assert "Layer 1, head 1" in find(page, "#card h3")[0].text
    (query,) = find(page, '.queries button[tabindex="0"]')
    query.send_keys("\ue015\ue015")
    assert find(page, ".queries button.chosen")[0].get_attribute("data-index") == "2"
    for control in find(page, "select, input"):
        assert control.accessible_name
    assert all(button.accessible_name for button in find(page, ".grid button"))


def test_the_table_is_sorted_and_filtered(page, reading):
    values = reading[-1]["confidence"]["encoder"].flatten()
    (header,) = [one for one in find(page, "#heads-table th") if one.text.startswith("confidence")]
    for order, sign in (("descending", -1), ("ascending", 1)):
        page.execute_script("arguments[0].querySelector('button').click()", header)
        assert header.get_attribute("aria-sort") == order
        first = find(page, "#heads-table tbody tr")[0]
        best = (sign * values).argmin().item()
        assert (first.get_attribute("data-layer"), first.get_attribute("data-head")) == (str(best // 4), str(best % 4))
    choose(page, "#filter-layer", "1")
    visible = [row for row in find(page, "#heads-table tbody tr") if row.is_displayed()]
    assert [row.get_attribute("data-layer") for row in visible] == ["1"] * 4
    assert find(page, "#heads-shown")[0].text == "4 of 8 heads"
    page.execute_script("arguments[0].querySelector('button.link').click()", visible[0])
    assert f"head {visible[0].get_attribute('data-head')}" in find(page, "#card h3")[0].text


def test_sentences_are_text_and_never_html(browser, reading, tmp_path):
    model, tokenizer, _ = reading
    read_heads(model, [ATTACK, f"{ATTACK} again"], tokenizer).save_page(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    assert find(page, "#sentence option")[0].get_attribute("textContent") == f"1. {ATTACK}"
    assert page.title.startswith("Attention heads")
    assert len(find(page, "script")) == 3
    assert find(page, "img:not([alt])") == []
    check_log(browser, tmp_path / "page.html")


def test_files_without_sentences_have_cards_all_the_same(browser, reading, tmp_path):
    values = reading[-1].to_dict()
    del values["sentence_maps"]
    HeadReading.from_dict(values).save_page(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    click(page, '.grid button[data-layer="1"][data-head="3"]')
    assert "Layer 1, head 3" in find(page, "#card")[0].text
    assert "no example sentences" in find(page, "#attention")[0].text
    check_log(browser, tmp_path / "page.html")


def test_a_click_changes_as_little_of_a_large_page_as_of_a_small_one(browser, tmp_path):
    sizes = {"hidden_size": 48, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 24}
    model = vivid(BertModel(BertConfig(vocab_size=200, **sizes)))
    ids = torch.randint(5, 200, (20, 40), generator=torch.Generator().manual_seed(0)).tolist()
    found = {}
    for count in (2, 20):
        read_heads(model, ids[:count]).save_page(tmp_path / f"{count}.html")
        page = opened(browser, tmp_path / f"{count}.html")
        clicks = [f"document.querySelectorAll('.grid button')[{number}].click()" for number in range(3, 144, 13)]
        found[count] = [number_of_changes(page, click) for click in clicks]
        check_log(browser, tmp_path / f"{count}.html")
    assert max(found[20]) <= 1.1 * max(found[2])


def test_several_heads_have_lines_in_colours_of_their_own_and_numbers_of_their_mean(page, reading):
    choose_sentence(page, reading[-1], 0)
    click(page, '.grid button[data-layer="1"][data-head="1"]')
    second = find(page, '.grid button[data-layer="1"][data-head="3"]')[0]
    page.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true, shiftKey: true}))", second)
    wait(page, "return document.querySelectorAll('#chosen-heads button').length == 2")
    page.execute_script(HOVER, find(page, ".queries button")[2])
    expected = maps_of(reading, 0)[1, [1, 3], 2].mean(0)
    torch.testing.assert_close(torch.tensor(shown(page)), expected, rtol=0, atol=1 / 510 + 1e-5)
    strokes = {line.get_attribute("style") for line in find(page, "#panels .lines line:not(.arc)")}
    assert len(strokes) == 2
    page.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true, shiftKey: true}))", second)
    wait(page, "return document.getElementById('chosen-heads').hidden")
    assert len(find(page, '.grid button[aria-pressed="true"]')) == 1


def test_a_layer_shows_all_its_heads_and_a_double_click_isolates_one(page, reading):
    from selenium.webdriver import ActionChains

    choose_sentence(page, reading[-1], 0)
    click(page, ".grid tr:nth-child(3) button.layer")  # the first row has the numbers of heads
    wait(page, "return document.querySelectorAll('#chosen-heads button').length == 4")
    assert [button.text for button in find(page, "#chosen-heads button")] == ["1.0", "1.1", "1.2", "1.3"]
    legend = find(page, "#chosen-heads button")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", legend[2])
    for pressed, heads in (("1.2", [2]), ("all", [0, 1, 2, 3])):
        ActionChains(page).double_click(legend[2]).perform()
        count = 1 if pressed == "1.2" else 4
        wait(
            page,
            f"return document.querySelectorAll('#chosen-heads button[aria-pressed=true]').length == {count}",
        )
        page.execute_script(HOVER, find(page, ".queries button")[4])
        expected = maps_of(reading, 0)[1, heads, 4].mean(0)
        torch.testing.assert_close(torch.tensor(shown(page)), expected, rtol=0, atol=1 / 510 + 1e-5)
    ActionChains(page).click(legend[0]).perform()
    wait(page, "return document.querySelectorAll('#chosen-heads button[aria-pressed=true]').length == 3")
    page.execute_script(HOVER, find(page, ".queries button")[4])
    expected = maps_of(reading, 0)[1, 1:, 4].mean(0)
    torch.testing.assert_close(torch.tensor(shown(page)), expected, rtol=0, atol=1 / 510 + 1e-5)


def test_a_double_click_on_a_head_of_the_grid_isolates_it(page, reading):
    from selenium.webdriver import ActionChains

    click(page, ".grid tr:nth-child(2) button.layer")
    assert len(find(page, '.grid button[aria-pressed="true"]')) == 4
    ActionChains(page).double_click(find(page, '.grid button[data-layer="0"][data-head="2"]')[0]).perform()
    assert len(find(page, '.grid button[aria-pressed="true"]')) == 1
    assert "layer 0, head 2" in find(page, "#attention-title")[0].text


def test_the_table_is_filtered_by_a_score(page, reading):
    values = reading[-1]["confidence"]["encoder"].flatten()
    limit = round(values.median().item(), 3)
    headings = [one.text.split(" ")[0] for one in find(page, "#heads-table th")]
    choose(page, "#filter-score", str(headings.index("confidence")))
    for bound, expected in (("least", (values >= limit).sum()), ("most", (values <= limit).sum())):
        choose(page, "#filter-bound", bound)
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
        page.execute_script(script, find(page, "#filter-limit")[0], limit)
        visible = [row for row in find(page, "#heads-table tbody tr") if row.is_displayed()]
        # The table has four digits.
        assert abs(len(visible) - expected.item()) <= 1
        assert find(page, "#heads-shown")[0].text == f"{len(visible)} of 8 heads"
        assert 0 < len(visible) < 8


def test_a_browser_that_cannot_unpack_weights_says_so(browser, reading, tmp_path):
    reading[-1].save_page(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    script = "<script>delete window.DecompressionStream;</script><style>"
    (tmp_path / "page.html").write_text(page.replace("<style>", script, 1), encoding="utf-8")
    page = opened(browser, tmp_path / "page.html")
    assert "no DecompressionStream" in find(page, "#attention")[0].text
    click(page, '.grid button[data-layer="1"][data-head="3"]')
    assert "Layer 1, head 3" in find(page, "#card")[0].text
    check_log(browser, tmp_path / "page.html")


def test_contributions_stand_beside_attention_where_they_are_measured(browser, reading, tmp_path):
    model, tokenizer, _ = reading
    texts = [tree.text for tree in embedded_trees()[:4]]
    results = read_heads(model, texts, tokenizer, frequent=20, contributions=["value_weighted", "local"])
    results.save_page(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    click(page, '.grid button[data-layer="1"][data-head="2"]')
    wait(page, "return document.querySelectorAll('.panel').length == 2")
    headings = [one.text for one in find(page, ".panel h4")]
    assert headings == ["attention", "contribution in the layer"]
    number = int(find(page, "#sentence")[0].get_attribute("value"))
    inputs = tokenizer(results.sentence_maps[number].text, return_tensors="pt")
    page.execute_script(HOVER, find(page, ".queries button")[3])
    for panel, maps in enumerate((attention_maps(model, inputs)["encoder"], local_contribution(model, inputs))):
        expected = maps[1, 0, 2, 3].float()
        scale = 1 if panel == 0 else maps.max().item()
        found = torch.tensor(shown(page, panel=panel))
        torch.testing.assert_close(found, expected, rtol=0, atol=scale / 510 + 1e-5)
    check_log(browser, tmp_path / "page.html")
