# Licensed under the Apache License, Version 2.0.
"""Views of texts, and the page of contributions, in headless Chromium: weights, measures, sites, frames."""

import csv

import pytest
import torch
from browsing import ATTACK, HOVER, check_log, choose, click, find, opened, shown, wait
from recipe_runs import Recipe
from stock_models import build_stock
from tiny_models import tiny_config, vivid
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertModel

from hf_attn_dynamics import attention_maps, global_contribution, local_contribution, show_contributions, show_heads
from hf_attn_dynamics.data import embedded_trees, train_byte_level_bpe


TEXT, OTHER = "the cat sat on the mat .", "a dog ran home"


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe([TEXT, OTHER], 300, kind="bert")


@pytest.fixture(scope="module")
def bert():
    return vivid(build_stock("bert", vocab_size=300))


def hover(page, side, index, panel=1):
    page.execute_script(HOVER, find(page, f"#panels .panel:nth-child({panel}) .{side} button")[index])


def select(page, site, layer, head):
    click(page, f'.grid button[data-site="{site}"][data-layer="{layer}"][data-head="{head}"]')
    wait(page, f"return document.getElementById('attention-title').textContent.includes('layer {layer}, head {head}')")


def close(found, expected, scale=1.0):
    torch.testing.assert_close(torch.tensor(found), expected.float(), rtol=0, atol=scale / 510 + 1e-5)


def test_weights_of_the_chosen_text_are_those_of_attention_maps(browser, bert, tokenizer, tmp_path):
    show_heads(bert, tokenizer, [TEXT, OTHER]).save(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    for number, text in enumerate((TEXT, OTHER)):
        maps = attention_maps(bert, tokenizer(text, return_tensors="pt"))["encoder"][:, 0]
        choose(page, "#sentence", str(number))
        wait(page, f"return document.querySelectorAll('.queries button').length == {maps.shape[-1]}")
        select(page, "encoder", 1, 2)
        hover(page, "queries", 3)
        close(shown(page), maps[1, 2, 3])
        # The grid has the map of each head, in a pixel per weight.
        script = """
            const canvas = arguments[0];
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [...data].filter((_, index) => index % 4 === 3);
        """
        # Chromium advises against reading a canvas twice.
        canvas = find(page, f'.grid button[data-layer="2"][data-head="{number}"] canvas')[0]
        opacities = torch.tensor(page.execute_script(script, canvas)).view(maps.shape[-2:])
        torch.testing.assert_close(opacities / 255, maps[2, number], rtol=0, atol=1 / 255 + 1e-5)
    check_log(browser, tmp_path / "page.html")


def test_weights_of_several_heads_are_told_apart(browser, bert, tokenizer, tmp_path):
    show_heads(bert, tokenizer, TEXT).save(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    heads = attention_maps(bert, tokenizer(TEXT, return_tensors="pt"))["encoder"][1, 0]
    assert find(page, ".shares") == []
    click(page, '.grid th[scope=row] button[title="All heads of layer 1"]')
    wait(page, f"return document.getElementById('attention-title').textContent == 'Attention of {len(heads)} heads'")
    for side, other, weights in (("queries", "keys", heads[:, 3]), ("keys", "queries", heads[:, :, 3])):
        hover(page, side, 3)
        close(shown(page, other), weights.mean(0))
        for row, boxes in enumerate(find(page, f".{other} .shares")):
            names, numbers = zip(*(line.split(": ") for line in boxes.get_attribute("title").split("\n")))
            assert names == tuple(f"1.{head}" for head in range(len(heads)))
            # Two digits of a weight that is packed into a byte.
            torch.testing.assert_close(torch.tensor([*map(float, numbers)]), weights[:, row], rtol=0, atol=0.0071)
            colours = boxes.value_of_css_property("background-image")
            assert colours.count("color(srgb") == 2 * len(heads)
        assert {boxes.get_attribute("title") for boxes in find(page, f".{side} .shares")} == {""}
        best = weights.mean(0).argmax().item()
        largest = weights[:, best].argmax().item()
        words = page.execute_script("return document.getElementById('status').textContent")
        assert "on average (largest head)" in words
        assert f"(1.{largest}: " in words
    check_log(browser, tmp_path / "page.html")


def test_a_cell_of_the_map_tells_its_weight(browser, bert, tokenizer, tmp_path):
    view = show_heads(bert, tokenizer, TEXT)
    view.save(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    select(page, "encoder", 1, 2)
    weights = view.sentences[0].unpacked()["encoder"][1, 2]
    query, key = 4, weights[4].argmin().item()
    page.execute_script(
        """
        const canvas = document.querySelector("#panels canvas"), [query, key, count] = arguments;
        const { left, top, width, height } = canvas.getBoundingClientRect();
        canvas.dispatchEvent(new MouseEvent("mousemove", {
          bubbles: true,
          clientX: left + (width * (key + 0.5)) / count,
          clientY: top + (height * (query + 0.5)) / count,
        }));
        """,
        query,
        key,
        len(weights),
    )
    names = view.sentences[0].tokens
    words = find(page, "#status")[0].text
    assert words.startswith(
        f"“{names[query].strip()}” attends to “{names[key].strip()}” {weights[query, key]:.2f}, most: "
    )
    (pointed,) = find(page, ".tokens .pointed")
    assert pointed == find(page, ".keys button")[key]
    hover(page, "queries", 2)
    assert find(page, ".tokens .pointed") == []
    check_log(browser, tmp_path / "page.html")


def test_all_numbers_of_a_head_are_in_a_table(browser, bert, tokenizer, tmp_path):
    view = show_heads(bert, tokenizer, [TEXT, OTHER])
    view.save(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    assert find(page, ".numbers table") == []
    click(page, ".numbers summary")
    for number, head in ((0, 1), (1, 3)):
        choose(page, "#sentence", str(number))
        select(page, "encoder", 2, head)
        weights = view.sentences[number].unpacked()["encoder"][2, head]
        # The table stays open for other heads and sentences.
        wait(page, f"return document.querySelectorAll('.numbers tbody tr').length == {len(weights)}")
        rows = page.execute_script(
            """
            const rows = [...document.querySelectorAll(".numbers tr")];
            return rows.map((row) => [...row.cells].map((one) => one.textContent));
            """
        )
        tokens = view.sentences[number].tokens
        assert rows[0] == ["query", *tokens]
        assert [row[0] for row in rows[1:]] == tokens
        found = torch.tensor([[float(cell) for cell in row[1:]] for row in rows[1:]])
        torch.testing.assert_close(found, weights, rtol=0, atol=0.0051)
    click(page, ".numbers summary")
    wait(page, "return document.querySelector('.numbers table') === null")
    check_log(browser, tmp_path / "page.html")


def test_cross_attention_leads_from_the_target_to_the_source(browser, tokenizer, tmp_path):
    model = vivid(build_stock("marian", vocab_size=300))
    view = show_heads(model, tokenizer, TEXT, target=OTHER)
    view.save(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    maps = view.sentences[0].unpacked()
    source, target = (side.tokens for side in view.sentences[0].sides)
    for site, queries, keys in (
        ("encoder", source, source),
        ("decoder", target, target),
        ("cross", target, source),
    ):
        select(page, site, 0, 1)
        hover(page, "queries", 2)
        close(shown(page), maps[site][0, 1, 2])
        assert [button.text for button in find(page, ".queries button")] == queries
        assert [button.text for button in find(page, ".keys button")] == keys
        assert [span.text for span in find(page, ".strip span")] == keys
        hover(page, "keys", 3)
        close(shown(page, "queries"), maps[site][0, 1, :, 3])
    check_log(browser, tmp_path / "page.html")


def test_attention_is_shown_beside_contributions(browser, bert, tokenizer, tmp_path):
    show_contributions(bert, tokenizer, TEXT, method="exact").save(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    inputs = tokenizer(TEXT, return_tensors="pt")
    attention = attention_maps(bert, inputs)["encoder"][:, 0]
    select(page, "encoder", 1, 0)
    hover(page, "queries", 4)
    for beside, function in (("global", global_contribution), ("local", local_contribution)):
        choose(page, "#beside", beside)
        label = find(page, f"#beside option[value={beside}]")[0].text
        wait(page, f"return document.querySelectorAll('.panel h4')[1]?.textContent == '{label}'")
        hover(page, "queries", 4)
        table = function(bert, inputs)[:, 0]
        close(shown(page, panel=0), attention[1, 0, 4])
        close(shown(page, panel=1), table[1, 0, 4], table.max().item())
        words = find(page, "#status")[0].text
        assert "attention" in words
        assert label in words
    choose(page, "#beside", "")
    wait(page, "return document.querySelectorAll('.panel').length == 1")
    check_log(browser, tmp_path / "page.html")


def test_a_frame_in_a_notebook_has_the_view_and_keeps_to_itself(browser, bert, tokenizer, tmp_path):
    views = [show_heads(bert, tokenizer, text) for text in (f"{ATTACK} \"cat\" & 'dog'", OTHER)]
    frames = "".join(view._repr_html_() for view in views)
    notebook = f"<!DOCTYPE html><html data-ready='true'><body>{frames}</body></html>"
    (tmp_path / "notebook.html").write_text(notebook, encoding="utf-8")
    page = opened(browser, tmp_path / "notebook.html")
    assert len(find(page, "iframe")) == 2
    assert find(page, "img") == []
    for view, frame in zip(views, find(page, "iframe")):
        page.switch_to.frame(frame)
        wait(page, "return document.documentElement.dataset.ready")
        select(page, "encoder", 0, 1)
        hover(page, "queries", 2)
        close(shown(page), view.sentences[0].unpacked()["encoder"][0, 1, 2])
        assert [button.text for button in find(page, ".keys button")] == view.sentences[0].tokens
        page.switch_to.default_content()
    assert browser.get_log("browser") == []


@pytest.fixture(scope="module")
def contributions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contributions")
    texts = [tree.text for tree in embedded_trees()[:13]]
    (folder / "text.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    tokenizer = train_byte_level_bpe(texts, 300, kind="bert")
    sizes = {"max_position_embeddings": 70, "pad_token_id": tokenizer.pad_token_id}
    model = vivid(AutoModelForMaskedLM.from_config(tiny_config("bert", vocab_size=len(tokenizer), **sizes)))
    for one in (model, tokenizer):
        one.save_pretrained(folder / "model")
    recipe = Recipe("attribute_heads", batch_size=2)
    recipe.run(folder / "run", model=folder / "model", data=folder / "text.txt", pairs="false", max_length=40)
    return folder


def test_heads_are_coloured_and_listed_by_their_contributions(browser, contributions):
    path = contributions / "run" / "report.html"
    page = opened(browser, path)
    rows = list(csv.DictReader((contributions / "run" / "heads.csv").open(encoding="utf-8")))
    for score, column in (
        ("Pearson: contribution of the input", "pearson_global"),
        ("center of mass: attention", "center_attention"),
    ):
        choose(page, "#score", score)
        values = {(int(row["layer"]), int(row["head"])): float(row[column]) for row in rows}
        low, high = min(values.values()), max(values.values())
        for (layer, head), value in values.items():
            (button,) = find(page, f'.grid button[data-layer="{layer}"][data-head="{head}"]')
            assert button.get_attribute("title").endswith(f"{score} {value:.2f}".replace("-", "−"))
            part = round(100 * (value - low) / (high - low))
            assert f"var(--blue) {part}%" in button.get_attribute("style")
    (heading,) = [
        one for one in find(page, "#heads-table th") if one.text.startswith("Pearson: contribution of the input")
    ]
    page.execute_script("arguments[0].querySelector('button').click()", heading)
    best = max(rows, key=lambda row: float(row["pearson_global"]))
    first = find(page, "#heads-table tbody tr")[0]
    assert (first.get_attribute("data-layer"), first.get_attribute("data-head")) == (best["layer"], best["head"])
    page.execute_script("arguments[0].querySelector('button.link').click()", first)
    card = find(page, "#card")[0].text
    assert f"Layer {best['layer']}, head {best['head']}" in card
    assert f"of its attention: {best['type_attention']}; of contributions of the input: {best['type_global']}." in card
    assert f"Pearson: contribution of the input {float(best['pearson_global']):.2f} 1 of {len(rows)}" in card
    check_log(browser, path)


def test_example_texts_have_attention_beside_contributions(browser, contributions):
    path = contributions / "run" / "report.html"
    page = opened(browser, path)
    model = AutoModelForMaskedLM.from_pretrained(contributions / "model")
    tokenizer = AutoTokenizer.from_pretrained(contributions / "model")
    text = find(page, "#sentence option")[1].get_attribute("textContent").removeprefix("2. ")
    inputs = tokenizer(text, return_tensors="pt")
    choose(page, "#sentence", "1")
    count = inputs["input_ids"].shape[1]
    wait(page, f"return document.querySelectorAll('.panel:first-child .queries button').length == {count}")
    select(page, "encoder", 1, 2)
    hover(page, "queries", 2)
    table = global_contribution(model, inputs)[:, 0]
    close(shown(page, panel=0), attention_maps(model, inputs)["encoder"][1, 0, 2, 2])
    close(shown(page, panel=1), table[1, 2, 2], table.max().item())
    check_log(browser, path)


def test_contributions_of_many_heads_in_a_long_text_are_shown(browser, tokenizer, tmp_path):
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 24}
    model = vivid(BertModel(BertConfig(vocab_size=300, **sizes)))
    text = " ".join(["cat", "dog", "ran"] * 60)
    view = show_contributions(model, tokenizer, text, contributions=["value_weighted"])
    view.save(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    click(page, ".grid tr:nth-child(2) button.layer")
    wait(page, "return document.querySelectorAll('#chosen-heads button').length == 12")
    wait(page, "return document.querySelectorAll('.panel').length == 2")
    hover(page, "queries", 7)
    table = view.sentences[0].unpacked("value_weighted")["encoder"]
    close(shown(page, panel=1), table[0, :, 7].mean(0), table.max().item())
    check_log(browser, tmp_path / "page.html")
