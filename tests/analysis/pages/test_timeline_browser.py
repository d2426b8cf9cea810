# Licensed under the Apache License, Version 2.0.
"""The page of a timeline in headless Chromium: slider, menu, grid, curves, keys; no error, and no request."""

import math

import pytest
import torch
from browsing import ATTACK, check_log, choose, click, find, number_of_changes, opened, wait

from hf_attn_dynamics import HeadScores, HeadTimeline


STEPS = (0, 20, 50, 60)
RIGHT, LEFT, DOWN, ENTER, HOME, END = "\ue014", "\ue012", "\ue015", "\ue007", "\ue011", "\ue010"
REMOVED, MISSING = (1, 2), (0, 3)  # from step 50 on, and at step 20 in one statistic


@pytest.fixture(scope="module")
def timeline():
    made, generator = HeadTimeline(), torch.Generator().manual_seed(0)
    for index, step in enumerate(STEPS):
        for name in ("confidence", ATTACK):
            encoder, cross = torch.rand(2, 2, 4, generator=generator, dtype=torch.float64)
            if step >= 50:
                encoder[REMOVED] = math.nan
            if step == 20 and name == ATTACK:
                encoder[MISSING] = math.nan
            made.record(step, name, HeadScores({"encoder": encoder, "cross": cross}))
        made.record(step + 5, "guidance_weight", 1 - index / 4)
    return made


@pytest.fixture
def page(browser, timeline, tmp_path):
    timeline.save_page(tmp_path / "page.html", title=ATTACK)
    yield opened(browser, tmp_path / "page.html")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    check_log(browser, tmp_path / "page.html")


def button(page, layer, head, site="encoder"):
    return find(page, f'.grid button[data-site="{site}"][data-layer="{layer}"][data-head="{head}"]')[0]


def four_digits(value):
    return f"{value:.4g}"


def move(page, index):
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
    page.execute_script(script, find(page, "#step")[0], index)


def shown(page):
    """Label, text and value on the scale of each head."""
    script = """return [...document.querySelectorAll(".grid button[data-head]")].map((one) =>
        [one.getAttribute("aria-label"), one.title, one.textContent, Number(one.style.getPropertyValue("--value"))])"""
    return page.execute_script(script)


def check_grid(page, scores):
    """Asserts that labels and colours of the buttons are these scores, on a scale from 0 to 1."""
    for (label, title, inside, shade), (kind, layer, head, value) in zip(shown(page), scores.records(), strict=True):
        assert label == title
        name, _, text = label.partition(": ")
        assert name == f"Layer {layer}, head {head} of the {kind}"
        if math.isnan(value):
            assert (text, inside) == (("removed", "×") if (layer, head) == REMOVED else ("no value", "–"))
        else:
            assert (text, inside) == (four_digits(value), "")
            assert shade == pytest.approx(value, abs=2e-4)


def test_the_slider_moves_the_grid(page, timeline):
    values = timeline.of("confidence")
    check_grid(page, values[60])
    colours = set()
    for index, step in enumerate(STEPS):
        move(page, index)
        assert find(page, "#step-text")[0].text == str(step)
        assert find(page, "#step")[0].get_attribute("aria-valuetext") == f"step {step}"
        check_grid(page, values[step])
        colours.add(button(page, 0, 0).value_of_css_property("background-color"))
    assert len(colours) == len(STEPS)
    assert find(page, "#scale .numbers")[0].text.split() == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_a_menu_chooses_the_statistic_and_keeps_the_step(page, timeline):
    move(page, 1)
    assert [one.text for one in find(page, "#statistic option")] == ["confidence", ATTACK]
    choose(page, "#statistic", "1")
    values = timeline.of(ATTACK)
    assert find(page, "#step-text")[0].text == "20"
    check_grid(page, values[20])
    assert find(page, "#curves h3")[0].text == ATTACK


def points(page, drawing="#head-curves"):
    """By curve: `(step, value as text, x, y)` of each point."""
    script = """const place = (point, name) => Number(point.getAttribute(name));
        return [...document.querySelectorAll(arguments[0] + " .curve")].map((curve) =>
            [...curve.querySelectorAll(".point")].map((point) => [Number(point.dataset.step),
                point.textContent.split(": ").pop(), place(point, "cx"), place(point, "cy")]))"""
    return page.execute_script(script, drawing)


def y_axis(page, drawing="#head-curves"):
    """The function from values to heights that the numbers at the axis imply."""
    ticks = [(float(one.text), float(one.get_attribute("y")) - 4) for one in find(page, f"{drawing} .y-tick")]
    (low, bottom), (high, top) = ticks[0], ticks[-1]
    return lambda value: bottom + (top - bottom) * (value - low) / (high - low)


def test_the_curve_of_a_head_has_its_values(page, timeline):
    click(page, '.grid button[data-site="cross"][data-layer="1"][data-head="3"]')
    (curve,) = points(page)
    height = y_axis(page)
    assert [step for step, *_ in curve] == list(STEPS)
    for step, text, _, y in curve:
        value = timeline.of("confidence")[step]["cross"][1, 3].item()
        assert text == four_digits(value)
        assert y == pytest.approx(height(value), abs=0.15)
    assert [x for _, _, x, _ in curve] == sorted({x for _, _, x, _ in curve})
    move(page, 2)
    assert float(find(page, "#head-curves line.now")[0].get_attribute("x1")) == pytest.approx(curve[2][2], abs=0.06)
    value = four_digits(timeline.of("confidence")[50]["cross"][1, 3].item())
    assert find(page, "#curves .legend")[0].text == f"Layer 1, head 3 of the cross: {value}"


def test_removed_heads_have_no_points(page):
    click(page, '.grid button[data-site="encoder"][data-layer="1"][data-head="2"]')
    (curve,) = points(page)
    assert [step for step, *_ in curve] == [0, 20]
    assert find(page, "#head-curves circle.now")[0].get_attribute("visibility") == "hidden"
    assert find(page, "#curves .legend")[0].text.endswith(": –")


def test_several_heads_have_colours_and_a_legend(page):
    click(page, '.grid button[data-site="encoder"][data-layer="0"][data-head="0"]')
    add = "arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true, shiftKey: true}))"
    page.execute_script(add, button(page, 1, 1))
    names = [
        one.text.partition(":")[0] for one in find(page, "#curves .legend")[0].find_elements("css selector", "li")
    ]
    assert names == ["encoder 0.0", "encoder 1.1"]
    page.execute_script("arguments[0].click()", find(page, ".grid .layer")[3])  # layer 1 of the cross-attention
    assert len(find(page, '.grid button[aria-pressed="true"]')) == 4
    assert len(points(page)) == 4
    strokes = [one.value_of_css_property("stroke") for one in find(page, "#head-curves .curve path")]
    assert len(set(strokes)) == 4


def test_metrics_of_the_whole_model_have_a_curve(page, timeline):
    (curve,) = points(page, ".metric")
    assert [(step, text) for step, text, *_ in curve] == [(5, "1"), (25, "0.75"), (55, "0.5"), (65, "0.25")]
    height = y_axis(page, ".metric")
    for _, text, _, y in curve:
        assert y == pytest.approx(height(float(text)), abs=0.15)
    legend = find(page, "#curves .legend")[1]
    move(page, 0)
    assert legend.text == "guidance_weight: –"
    move(page, 3)
    assert legend.text == "guidance_weight: 0.5"  # of step 55, the last one before step 60


def test_a_click_on_a_curve_moves_the_slider(page):
    (curve,) = points(page)
    click_at = """const box = arguments[0].getBoundingClientRect();
        arguments[0].dispatchEvent(new MouseEvent("click", {bubbles: true, clientX: box.left + arguments[1]}))"""
    page.execute_script(click_at, find(page, "#head-curves svg")[0], curve[1][2] + 5)
    assert find(page, "#step-text")[0].text == "20"


def test_keys_move_slider_and_heads(page):
    slider = find(page, "#step")[0]
    slider.send_keys(HOME)
    assert find(page, "#step-text")[0].text == "0"
    slider.send_keys(RIGHT + RIGHT)
    assert find(page, "#step-text")[0].text == "50"
    slider.send_keys(END + LEFT)
    assert find(page, "#step-text")[0].text == "50"
    click(page, '.grid button[data-site="encoder"][data-layer="0"][data-head="0"]').send_keys(DOWN + RIGHT + ENTER)
    assert find(page, "#curves .legend")[0].text.startswith("Layer 1, head 1 of the encoder")
    for control in find(page, "select, input, button, #curves svg[role=img]"):
        assert control.accessible_name


def test_playing_steps_through_and_pauses(page):
    text = "document.getElementById('step-text').textContent"
    click(page, "#play")
    assert find(page, "#play")[0].text == "Pause"
    assert find(page, "#step-text")[0].text == "0"  # from the start, since the slider was at the last step
    wait(page, f"return {text} === '20'")
    click(page, "#play")
    assert find(page, "#play")[0].text == "Play"
    move(page, 2)
    click(page, "#play")
    wait(page, "return document.getElementById('play').textContent === 'Play'")
    assert find(page, "#step-text")[0].text == "60"


def test_with_reduced_motion_the_button_moves_one_step(page):
    reduced = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": reduced})
    wait(page, "return document.getElementById('play').textContent === 'Next step'")
    click(page, "#play")
    assert find(page, "#step-text")[0].text == "0"
    page.execute_async_script("setTimeout(arguments[0], 700)")
    assert find(page, "#step-text")[0].text == "0"
    click(page, "#play")
    assert find(page, "#step-text")[0].text == "20"


def test_names_are_text_and_never_html(page):
    assert page.title == f"Attention heads over training: {ATTACK}"
    assert find(page, "img") == []
    assert len(find(page, "script")) == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_higher_values_stand_out_from_the_page(page, scheme):
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    script = """const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const lightness = (colour) => {
            probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
            return probe.getImageData(0, 0, 1, 1).data.slice(0, 3).reduce((sum, one) => sum + one);
        };
        const button = document.querySelector(".grid button[data-head]");
        button.style.transition = "none";
        const paper = lightness(getComputedStyle(document.body).backgroundColor);
        return [0, 0.25, 0.5, 0.75, 1].map((value) => {
            button.style.setProperty("--value", value);
            return Math.abs(lightness(getComputedStyle(button).backgroundColor) - paper);
        });"""
    distances = page.execute_script(script)
    assert distances == sorted(set(distances))


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (0.0, 0.97, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.51, 0.914, [-1, -0.5, 0, 0.5, 1]),
        (0.5, 4.158, [0, 1, 2, 3, 4, 5]),
        (0.0, 0.0003, [0, 0.0001, 0.0002, 0.0003]),
        (-41.0, -3.0, [-50, -40, -30, -20, -10, 0]),
        (0.0, 0.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_scales_end_at_round_numbers(browser, tmp_path, low, high, numbers):
    HeadTimeline({0: {"score": HeadScores({"encoder": [[low, high]]})}}).save_page(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    written = find(page, "#scale .numbers")[0].text.split()
    assert [float(one.replace("−", "-")) for one in written] == numbers
    assert [one.text for one in find(page, "#head-curves .y-tick")] == written
    shades = [shade for *_, shade in shown(page)]
    expected = [(value - numbers[0]) / (numbers[-1] - numbers[0]) for value in (low, high)]
    assert shades == pytest.approx(expected, abs=1e-4)
    check_log(browser, tmp_path / "page.html")


def test_a_step_changes_as_little_of_a_long_timeline_as_of_a_short_one(browser, tmp_path):
    values = torch.rand(200, 12, 12, generator=torch.Generator().manual_seed(0))
    found = {}
    for steps in (20, 200):
        path = tmp_path / f"{steps}.html"
        scores = {step: {"confidence": HeadScores({"encoder": one})} for step, one in enumerate(values[:steps])}
        HeadTimeline(scores).save_page(path)
        page = opened(browser, path)
        page.execute_script("document.querySelector('.grid .layer').click()")
        moves = [
            f"const slider = document.getElementById('step'); slider.value = {number}; "
            "slider.dispatchEvent(new Event('input'))"
            for number in range(1, 20, 3)
        ]
        found[steps] = [number_of_changes(page, move) for move in moves]
        check_log(browser, path)
    assert max(found[200]) <= 1.1 * max(found[20])
