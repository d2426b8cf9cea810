# Licensed under the Apache License, Version 2.0.
"""The page of a timeline: the data of its script, its tables, its size, and timelines without scores of heads."""

import json
import math
import re

import pytest
import torch
from browsing import ATTACK

from hf_attn_dynamics import HeadScores, HeadTimeline
from hf_attn_dynamics.analysis.head_timeline import HeadRecord


NAN = math.nan


def recorded(**statistics):
    """A timeline of statistics, each a value per step; steps are 0, 10, 20, …"""
    timeline = HeadTimeline()
    for name, values in statistics.items():
        for index, value in enumerate(values):
            timeline.record(10 * index, name, value if isinstance(value, float) else HeadScores({"encoder": value}))
    return timeline


def written(timeline, path, **settings):
    timeline.save_page(path, **settings)
    return path.read_text(encoding="utf-8")


def data_of(page):
    return json.loads(re.search(r'id="timeline-data">(.*?)</script>', page)[1])


def rows_of(page):
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)]


def test_the_data_are_the_records_to_four_digits(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tables = torch.rand(3, 2, 4, generator=generator, dtype=torch.float64)
    timeline = recorded(confidence=[*tables], importance=[*(tables / 1000)], guidance_weight=[0.5, 0.123456, 0.0])
    timeline.record(10, "entropy", HeadScores({"decoder": tables[0], "cross": -tables[1]}))
    data = data_of(written(timeline, tmp_path / "page.html"))
    found = [
        HeadRecord(step, one["name"], kind, layer, head, values[index])
        for one in data["statistics"]
        for kind, layers in one["values"].items()
        for layer, row in enumerate(layers)
        for head, values in enumerate(row)
        for index, step in enumerate(one["steps"])
    ]
    found += [
        HeadRecord(step, one["name"], None, None, None, value)
        for one in data["metrics"]
        for step, value in zip(one["steps"], one["values"])
    ]
    assert sorted(map(str, found)) == sorted(
        str(record._replace(value=float(f"{record.value:.4g}"))) for record in timeline
    )
    lowest, highest = tables[1].max().item(), tables[0].max().item()
    assert data["statistics"][-1]["limits"] == [float(f"{-lowest:.4g}"), float(f"{highest:.4g}")]


def test_heads_are_removed_after_their_last_value(tmp_path):
    timeline = recorded(
        confidence=[[[0.1, 0.2, NAN, NAN]], [[0.1, NAN, NAN, NAN]], [[0.1, NAN, NAN, NAN]]],
        entropy=[[[1.0, 2.0, 3.0, NAN]], [[1.0, NAN, 4.0, NAN]], [[1.0, NAN, 5.0, NAN]]],
    )
    page = written(timeline, tmp_path / "page.html")
    assert data_of(page)["last"] == {"encoder": [[20, 0, 20, None]]}
    assert "3 heads, measured at 3 steps" in page
    assert page.count('<td class="removed"') == 1


def test_a_statistic_without_the_last_heads_keeps_its_place(tmp_path):
    timeline = recorded(distance=[[[0.1, 0.2], [0.3, 0.4]], [[0.5]]])
    values = data_of(written(timeline, tmp_path / "page.html"))["statistics"][0]["values"]
    assert values == {"encoder": [[[0.1, 0.5], [0.2, None]], [[0.3, None], [0.4, None]]]}


def random_timeline(steps, layers, heads, statistics):
    values = torch.rand(steps, len(statistics), layers, heads, generator=torch.Generator().manual_seed(0))
    return recorded(**{name: [*values[:, index]] for index, name in enumerate(statistics)})


def test_two_hundred_steps_of_twelve_layers_fit_into_a_megabyte(tmp_path):
    page = written(random_timeline(200, 12, 12, ["confidence", "entropy", "importance"]), tmp_path / "page.html")
    assert len(page.encode()) < 1_000_000
    assert len(data_of(page)["statistics"][0]["steps"]) == 200
    assert "at even distances" not in page


def test_a_longer_timeline_is_thinned_evenly(tmp_path):
    timeline = random_timeline(1000, 12, 24, ["confidence"])
    page = written(timeline, tmp_path / "page.html")
    steps = data_of(page)["statistics"][0]["steps"]
    assert len(page.encode()) < 1_000_000
    assert (steps[0], steps[-1]) == (0, 9990)
    assert {later - earlier for earlier, later in zip(steps, steps[1:])} == {20, 30}
    assert f"Grid and curves show {len(steps)} of these steps, at even distances" in page


def test_tables_need_no_script(tmp_path):
    timeline = recorded(
        confidence=[[[0.25, 0.25], [0.5, NAN]], [[0.9, 0.25], [0.25, NAN]], [[1.0, 0.25], [0.25, NAN]]],
        loss=[4.0, 3.0, 2.5],
    )
    rows = rows_of(written(timeline, tmp_path / "page.html", title="a model"))
    assert ["confidence", "0", "20", "0.3333", "0.5000", "0.1667"] in rows
    assert ["loss", "0", "20", "4.0000", "2.5000", "-1.5000"] in rows
    changed = [row for row in rows if len(row) == 5]
    assert changed[1:] == [
        ["confidence", "0.0", "0.2500", "1.0000", "0.7500"],
        ["confidence", "1.0", "0.5000", "0.2500", "-0.2500"],
    ]
    assert ["confidence ≥ 0.8", "1", "0.0 (10)"] in rows


def test_thresholds_can_be_chosen(tmp_path):
    timeline = recorded(confidence=[[[0.25, 0.25]], [[0.9, 0.25]]], entropy=[[[2.0, 1.0]], [[1.0, 2.5]]])
    rows = rows_of(written(timeline, tmp_path / "page.html", thresholds={"entropy": 1.5}))
    assert [row for row in rows if "≥" in row[0]] == [["entropy ≥ 1.5", "2", "0.0 (0), 0.1 (10)"]]
    assert "reached a threshold" not in written(timeline, tmp_path / "page.html", thresholds={})


@pytest.mark.parametrize(
    ("timeline", "settings", "message"),
    [
        (HeadTimeline(), {}, "the timeline has no measurements; its page needs a statistic with a score per head"),
        (recorded(loss=[1.0]), {}, "the timeline has only metrics of the whole model: loss; its page needs"),
        (recorded(entropy=[[[1.0]]]), {"thresholds": {"entropi": 1.0}}, "no statistic 'entropi', but entropy"),
        (recorded(entropy=[[[1.0]]], loss=[1.0]), {"thresholds": {"loss": 1.0}}, "needs one number per head"),
    ],
)
def test_what_has_no_scores_of_heads_is_refused(tmp_path, timeline, settings, message):
    with pytest.raises(ValueError, match=message):
        timeline.save_page(tmp_path / "page.html", **settings)
    assert not (tmp_path / "page.html").exists()


def test_names_are_text_and_never_html(tmp_path):
    timeline = recorded(**{ATTACK: [[[0.1, 0.2]], [[0.3, 0.4]]], f"{ATTACK} again": [1.0, 2.0]})
    page = written(timeline, tmp_path / "page.html", title=ATTACK, thresholds={ATTACK: 0.2})
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert [one["name"] for one in data_of(page)["statistics"]] == [ATTACK]


def test_only_the_statistics_of_the_timeline_are_defined(tmp_path):
    weights = {"guidance_weight": [0.5], "guidance_weight_prev": [0.5]}
    page = written(recorded(confidence=[[[0.1]]], mine=[[[1.0]]], **weights), tmp_path / "page.html")
    assert re.findall("<dt>(.*?)</dt>", page) == ["confidence", *weights]
    assert "factor α of the guidance loss of prev; a metric" in page
    assert "<details>" in page
    assert "<details>" not in written(recorded(mine=[[[1.0]]]), tmp_path / "page.html")


def test_values_that_never_change_or_are_not_finite_have_a_scale(tmp_path):
    timeline = recorded(zero=[[[0.0, 0.0]]], infinite=[[[math.inf, NAN]]], same=[[[2.0, 2.0]], [[2.0, 2.0]]])
    page = written(timeline, tmp_path / "page.html")
    assert [one["limits"] for one in data_of(page)["statistics"]] == [[0, 1], [0, 1], [0, 2]]
    assert "changed most" not in page
