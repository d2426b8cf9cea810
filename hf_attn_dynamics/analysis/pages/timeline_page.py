# Licensed under the Apache License, Version 2.0.
"""HTML page of a [`HeadTimeline`]: a slider over the steps moves the grid of heads.

Definitions and tables are HTML that needs no script. `assets/timeline.js` colours the grid and draws the curves.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..head_scores import Head, HeadScores
from ..head_timeline import HeadTimeline
from ..plots.dynamics import THRESHOLDS, UNITS
from .grid import head_grids
from .html import HtmlPage
from .reading_page import DEFINITIONS as READING_DEFINITIONS


MOST_VALUES = 110_000  # of heads; more would take a page of more than about 1 MB
MOST_STEPS = 1000  # of a metric of the whole model
DIGITS = 4  # of each value
MOST_CHANGED, NAMED_HEADS = 5, 12  # heads in the tables

DEFINITIONS = {
    **{name: READING_DEFINITIONS[name] for name in ("confidence", "entropy")},
    "delimiter_attention": "mean attention of all other tokens to special tokens such as [CLS] and [SEP]",
    "relative_positions/best_offset_share": "fraction of the tokens whose largest attention weight is at the most "
    "frequent offset of the head",
    "relative_positions/center_of_mass": "mean offset of attention, key − query, in tokens",
    "distance": "mean Jensen–Shannon divergence between the attention of the head and of the others, in nats",
    "syntactic_roles": "accuracy with which the largest attention weight finds the dependencies of a relation",
    "rare_words": "accuracy with which the largest attention weight is on the rarest token of the sentence",
    "duplicate_tokens": "accuracy with which the largest attention weight is on another occurrence of the token",
    "induction": "mean attention to the token after an earlier occurrence of the same token",
    "previous_token": "mean attention to the token before",
    "local_attention": "mean attention to the first and the last tokens",
    "sink/first": "mean attention to the first token",
    "sink/nothing": "mean attention that falls on no token, in models with learnt sinks",
    "retrieval": "accuracy with which the largest attention weight is on a copy of the next token",
    "gate_open": "probability that the gate of the head is not zero",
    "gate": "value of the gate of the head outside training; a head with gate 0 is without effect",
    "guidance_weight": "factor α of the guidance loss; a metric of the whole model",
}


class _Statistic(NamedTuple):
    """A statistic of the heads, with one shape over all steps."""

    name: str
    steps: list[int]
    values: dict[str, torch.Tensor]  # of shape (steps, layers, heads), by kind of site; NaN where there is no value

    @property
    def limits(self) -> tuple[float, float]:
        """The scale of all steps: from 0 or the lowest value to the highest."""
        numbers = torch.cat([table.flatten() for table in self.values.values()])
        numbers = numbers[numbers.isfinite()]
        low, high = (min(numbers.min().item(), 0.0), numbers.max().item()) if len(numbers) else (0.0, 0.0)
        return (low, high) if high > low else (low, low + 1)

    def changes(self) -> list[tuple[float, Head, float, float]]:
        """Change of each head that has a value at the first and the last step, and both; the largest changes first."""
        found = []
        for kind, table in self.values.items():
            for layer, head in ((table[-1] - table[0]).isfinite()).nonzero().tolist():
                first, last = table[0, layer, head].item(), table[-1, layer, head].item()
                found.append((last - first, (kind, layer, head), first, last))
        return sorted(found, key=lambda one: -abs(one[0]))


def timeline_page(timeline: HeadTimeline, title: str = "", thresholds: Mapping[str, float] | None = None) -> HtmlPage:
    """The page: definitions, grid and curves, values at the first and the last step, thresholds.

    Args:
        timeline ([`HeadTimeline`]): Statistics of heads.
        title (`str`): Model and data.
        thresholds (`dict[str, float]`, *optional*): Thresholds by statistic, as in `plot_head_dynamics`.

    Raises:
        ValueError: if no statistic has scores of heads, or a threshold names none of them.
    """
    statistics, metrics = _statistics(timeline), _metrics(timeline)
    if not statistics:
        held = f"only metrics of the whole model: {', '.join(metrics)}" if metrics else "no measurements"
        raise ValueError(f"the timeline has {held}; its page needs a statistic with a score per head.")
    if thresholds is None:
        names = {one.name for one in statistics}
        thresholds = {name: level for name, level in THRESHOLDS.items() if name in names}
    first_steps = {name: timeline.first_step(name, level) for name, level in thresholds.items()}

    page = HtmlPage(f"Attention heads over training{f': {title}' if title else ''}")
    if terms := _definitions([one.name for one in statistics] + list(metrics)):
        page.definitions(terms)
    page.heading("Heads at each step")
    _add_explorer(page, statistics, metrics, thresholds)
    page.heading("First and last step")
    _add_ends(page, statistics, metrics)
    if thresholds:
        page.heading("When heads reached a threshold")
        page.table(*_threshold_table(thresholds, first_steps))
    page.program("common", "timeline")
    return page


def _statistics(timeline: HeadTimeline) -> list[_Statistic]:
    """Statistics with scores of heads; heads and sites that a step lacks are NaN."""
    measured: dict[str, dict[int, HeadScores]] = {}
    for name in timeline.statistics:
        scores = {step: value for step, value in timeline.of(name).items() if isinstance(value, HeadScores)}
        if scores:
            measured[name] = scores
    shapes: dict[str, torch.Size] = {}
    for scores in measured.values():
        for one in scores.values():
            for kind, table in one.items():
                shapes[kind] = torch.Size(map(max, table.shape, shapes.get(kind, table.shape)))
    statistics = []
    for name, scores in measured.items():
        kinds = [kind for kind in shapes if any(kind in one for one in scores.values())]
        values = {kind: torch.stack([_padded(one, kind, shapes[kind]) for one in scores.values()]) for kind in kinds}
        statistics.append(_Statistic(name, list(scores), values))
    return statistics


def _padded(scores: HeadScores, kind: str, shape: torch.Size) -> torch.Tensor:
    padded = torch.full(shape, math.nan, dtype=torch.float64)
    if kind in scores:
        layers, heads = scores[kind].shape
        padded[:layers, :heads] = scores[kind]
    return padded


def _metrics(timeline: HeadTimeline) -> dict[str, dict[int, float]]:
    """Metrics of the whole model: values by step."""
    metrics = {}
    for name in timeline.statistics:
        values = {step: value for step, value in timeline.of(name).items() if not isinstance(value, HeadScores)}
        if values:
            metrics[name] = values
    return metrics


def _last_values(statistics: list[_Statistic]) -> dict[str, list[list[int | None]]]:
    """The last step at which each head has any value, by kind of site; a head is removed after it."""
    last: dict[str, torch.Tensor] = {}
    for one in statistics:
        for kind, table in one.values.items():
            steps = torch.tensor(one.steps)[:, None, None]
            found = torch.where(table.isnan(), -1, steps).amax(0)
            last[kind] = torch.maximum(last.get(kind, found), found)
    return {
        kind: [[None if step < 0 else step for step in row] for row in table.tolist()] for kind, table in last.items()
    }


def page_data(
    statistics: list[_Statistic], metrics: Mapping[str, Mapping[int, float]], thresholds: Mapping[str, float]
) -> dict[str, Any]:
    """Everything that the script shows, as JSON types; heads are lists `[layer][head][step]` by kind of site."""
    most = MOST_VALUES // sum(table[0].numel() for one in statistics for table in one.values.values())
    steps = [step for one in statistics for step in one.steps] + [step for one in metrics.values() for step in one]
    changes = statistics[0].changes()
    data = []
    for one in statistics:
        kept = _evenly(len(one.steps), most)
        data.append(
            {
                "name": one.name,
                "unit": UNITS.get(one.name.rpartition("/")[2], ""),
                "steps": [one.steps[index] for index in kept],
                "values": {
                    kind: [[_rounded(head) for head in layer] for layer in table[kept].permute(1, 2, 0).tolist()]
                    for kind, table in one.values.items()
                },
                "limits": _rounded(list(one.limits)),
                "threshold": thresholds.get(one.name),
            }
        )
    return {
        "statistics": data,
        "metrics": [_metric_data(name, values) for name, values in metrics.items()],
        "steps": [min(steps), max(steps)],
        "last": _last_values(statistics),
        "first": changes[0][1] if changes else None,
    }


def _metric_data(name: str, values: Mapping[int, float]) -> dict[str, Any]:
    records = list(values.items())
    kept = [records[index] for index in _evenly(len(records), MOST_STEPS)]
    return {"name": name, "steps": [step for step, _ in kept], "values": _rounded([value for _, value in kept])}


def _evenly(count: int, most: int) -> list[int]:
    """Indices of at most `most` of `count` steps, the first and the last among them, at even distances.

    Example:
        >>> _evenly(3, 5), _evenly(9, 3), _evenly(9, 0)
        ([0, 1, 2], [0, 4, 8], [0, 8])
    """
    if count <= max(most, 2):
        return list(range(count))
    gaps = max(most, 2) - 1
    return [round(index * (count - 1) / gaps) for index in range(gaps + 1)]


def _rounded(values: list[float]) -> list[float | None]:
    # Significant digits: relevance and importance can be far below 1.
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values]


def _definitions(names: list[str]) -> dict[str, str]:
    found = {name: DEFINITIONS.get(name, DEFINITIONS.get(name.partition("/")[0])) for name in names}
    for name in names:
        if name.startswith("guidance_weight_"):
            part = name.removeprefix("guidance_weight_")
            found[name] = f"factor α of the guidance loss of {part}; a metric of the whole model"
    return {name: meaning for name, meaning in found.items() if meaning is not None}


def _add_explorer(
    page: HtmlPage,
    statistics: list[_Statistic],
    metrics: Mapping[str, Mapping[int, float]],
    thresholds: Mapping[str, float],
) -> None:
    """Adds data, grids and the elements that the script fills."""
    data = page_data(statistics, metrics, thresholds)
    page.data("timeline", data)
    page.paragraph(_what_is_shown(statistics, data))
    last = data["last"]

    def cell(head: Head) -> tuple[str, str] | None:
        kind, layer, number = head
        return None if last[kind][layer][number] is None else ("", "")

    grids = head_grids({kind: (len(layers), len(layers[0])) for kind, layers in last.items()}, cell)
    page.html(
        f"""<div class="script-only" hidden>
<div id="timeline-controls" class="controls"></div>
<div class="explorer">
<div>{grids}
<div id="scale"></div>
<p class="faint">Click a head, or move between heads with the arrow keys and press Enter. With Shift, a click adds a
head; the number of a layer shows all of its heads. A click on a curve moves the slider.</p></div>
<section id="curves" aria-label="Curves of the selected heads"></section>
</div></div>
<noscript><p class="faint">The tables below need no script; the grid and the curves do.</p></noscript>"""
    )


def _what_is_shown(statistics: list[_Statistic], data: Mapping[str, Any]) -> str:
    heads = sum(step is not None for layers in data["last"].values() for row in layers for step in row)
    recorded = {step for one in statistics for step in one.steps}
    shown = {step for one in data["statistics"] for step in one["steps"]}
    text = f"{heads:,} heads, measured at {len(recorded):,} steps from {min(recorded):,} to {max(recorded):,}."
    if len(shown) < len(recorded):
        text += f" Grid and curves show {len(shown):,} of these steps, at even distances; the tables use all of them."
    return text


def _head_name(head: Head, several: bool) -> str:
    kind, layer, number = head
    return f"{kind} {layer}.{number}" if several else f"{layer}.{number}"


def _add_ends(page: HtmlPage, statistics: list[_Statistic], metrics: Mapping[str, Mapping[int, float]]) -> None:
    """Adds tables of means at the first and the last step, and of the heads that changed most."""
    several = len({kind for one in statistics for kind in one.values}) > 1
    rows = []
    for one in statistics:
        for kind, table in one.values.items():
            name = f"{one.name} ({kind})" if several else one.name
            first, last = (table[index].nanmean().item() for index in (0, -1))
            rows.append([name, one.steps[0], one.steps[-1], first, last, last - first])
    for metric, values in metrics.items():
        first, last = values[min(values)], values[max(values)]
        rows.append([metric, min(values), max(values), first, last, last - first])
    page.paragraph("Means over the heads, and metrics of the whole model:")
    page.table(["statistic", "first step", "last step", "at first", "at last", "change"], rows, DIGITS)
    changed = [
        [one.name, _head_name(head, several), first, last, change]
        for one in statistics
        for change, head, first, last in one.changes()[:MOST_CHANGED]
        if change
    ]
    if changed:
        page.paragraph("Heads (layer.head) that changed most between the two steps:")
        page.table(["statistic", "head", "at first", "at last", "change"], changed, DIGITS)


def _threshold_table(
    thresholds: Mapping[str, float], first_steps: Mapping[str, HeadScores]
) -> tuple[list[str], list[list]]:
    """Header and rows: how many heads reached each threshold, and which at which step."""
    several = len({kind for scores in first_steps.values() for kind in scores}) > 1
    rows = []
    for name, level in thresholds.items():
        reached = sorted(
            (step, (kind, layer, head))
            for kind, layer, head, step in first_steps[name].records()
            if not math.isnan(step)
        )
        named = [f"{_head_name(head, several)} ({step:,.0f})" for step, head in reached[:NAMED_HEADS]]
        if len(reached) > NAMED_HEADS:
            named.append(f"and {len(reached) - NAMED_HEADS:,} more")
        rows.append([f"{name} ≥ {level:g}", len(reached), ", ".join(named) or None])
    return ["threshold", "heads", "heads (step at which each reached it first)"], rows
