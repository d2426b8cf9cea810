# Licensed under the Apache License, Version 2.0.
"""Pictures of models pruned to a speed-up: the metric against it, and what is left of each layer."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .figures import COLOURS, MARKERS, SITE_COLOURS, clean_axes, finish_figure, new_figure
from .matplotlib_names import Axes, Figure, MaxNLocator


PARTS = {"heads": "heads", "cross": "heads of cross-attention", "units": "feed-forward units"}
PART_COLOURS = {"heads": SITE_COLOURS["encoder"], "cross": SITE_COLOURS["cross"], "units": COLOURS[1]}
FEW_LAYERS = 12  # whose bars have numbers


def plot_speedup_curve(
    rows: list[Mapping[str, Any]],
    path: str | Path | None = None,
    title: str = "",
    metric: str = "accuracy",
    dense: float | Sequence[float] | None = None,
) -> Figure:
    """A metric against the measured speed-up, with a line for each pruning method.

    Args:
        rows (`list[dict]`): A row per model with the keys `method` (`str`), `speedup` (`float`) and `metric`. Rows
            of a method with the same `target`, if they have one, are seeds: the line goes through the mean of both
            values, and points are the seeds.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model, data, batch size and length of the timed passes; the figure itself says what it shows.
        metric (`str`): Key of the metric, also the label of the axis.
        dense (`float` or `list[float]`, *optional*): Metric of the dense model, or of its seeds.

    Raises:
        ValueError: if there are no rows, or one lacks a key.
    """
    if not rows:
        raise ValueError("rows are empty: nothing to draw.")
    methods: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for row in rows:
        if missing := [key for key in ("method", "speedup", metric) if row.get(key) is None]:
            raise ValueError(f"a row of rows has no {missing[0]!r}: {dict(row)}.")
        points = methods.setdefault(row["method"], {})
        points.setdefault(row.get("target", row["speedup"]), []).append((row["speedup"], row[metric]))
    figure, [[axes]] = new_figure(7, 4.4)
    if dense is not None:
        _draw_dense(axes, list(dense) if isinstance(dense, Sequence) else [dense])
    for index, (method, points) in enumerate(methods.items()):
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
        means = sorted(tuple(map(statistics.fmean, zip(*seeds))) for seeds in points.values())
        axes.plot(*zip(*means), label=method, linewidth=2, zorder=3, **style)
        if seeds := [seed for of_target in points.values() if len(of_target) > 1 for seed in of_target]:
            axes.plot(*zip(*seeds), linestyle="none", alpha=0.35, zorder=2, **style)
    axes.set(xlabel="measured speed-up (×)", ylabel=metric.replace("_", " "))
    axes.set_xlim(left=min(1.0, axes.get_xlim()[0]))
    clean_axes(axes)
    axes.legend(frameon=False, fontsize=9)
    what = axes.get_ylabel()
    return finish_figure(figure, path, title, f"{what[:1].upper()}{what[1:]} of models pruned to a speed-up")


def _draw_dense(axes: Axes, seeds: list[float]) -> None:
    axes.axhline(statistics.fmean(seeds), color="0.35", linestyle="--", linewidth=1.4, label="dense", zorder=1)
    if len(seeds) > 1:
        axes.axhspan(min(seeds), max(seeds), color="0.35", alpha=0.1, linewidth=0, zorder=0)


def plot_parts_per_layer(
    left: Mapping[str, Mapping[str, Mapping[str, Sequence[int]]]],
    path: str | Path | None = None,
    heads: Mapping[str, Sequence[int]] | None = None,
    units: Mapping[str, Sequence[int]] | None = None,
    title: str = "",
) -> Figure:
    """Fraction of heads and feed-forward units that is left in each layer, with their numbers.

    Args:
        left (`dict`): By the name of a model, which may be empty, `{"heads": {kind: [numbers]}, "units": {kind:
            [numbers]}}` with a number for each layer; a row of panels for each model.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        heads, units (`dict[str, list[int]]`): Numbers of the dense model by kind of site.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there is nothing to draw, or a layer of the dense model is missing.
    """
    heads, units = heads or {}, units or {}
    stacks = [kind for kind in ("encoder", "decoder") if kind in heads or kind in units]
    if not left or not stacks:
        raise ValueError("left is empty: nothing to draw.")
    layers = max(len(counts) for counts in (*heads.values(), *units.values()))
    size = (max(4.5, 1.2 + 0.75 * layers) * len(stacks), 0.8 + 1.7 * len(left))
    figure, panels = new_figure(*size, rows=len(left), columns=len(stacks), sharey=True)
    for row, (name, model) in zip(panels, left.items()):
        for axes, stack in zip(row, stacks):
            bars = {"heads": (model["heads"], heads, stack), "units": (model["units"], units, stack)}
            if stack == "decoder" and "cross" in heads:
                bars = {"heads": bars["heads"], "cross": (model["heads"], heads, "cross"), "units": bars["units"]}
            _draw_layers(axes, bars)
            axes.set_title(", ".join(filter(None, [name, stack * (len(stacks) > 1)])), fontsize=10)
        row[0].set_ylabel("left (%)")
    for axes in panels[-1]:
        axes.set_xlabel("layer")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return finish_figure(figure, path, title, "Heads and feed-forward units left in each layer")


def _draw_layers(axes: Axes, bars: dict[str, tuple[Mapping, Mapping, str]]) -> None:
    """Draws bars of each part beside each other in each layer."""
    width = 0.84 / len(bars)
    for index, (part, (counts, dense, kind)) in enumerate(bars.items()):
        if kind not in dense:
            continue
        if len(counts.get(kind, ())) != len(dense[kind]):
            raise ValueError(f"left has not the {len(dense[kind])} layers of the {kind} that the dense model has.")
        places = [layer + (index - (len(bars) - 1) / 2) * width for layer in range(len(dense[kind]))]
        percent = [100 * count / max(full, 1) for count, full in zip(counts[kind], dense[kind])]
        drawn = axes.bar(places, percent, width=width * 0.92, color=PART_COLOURS[part], label=PARTS[part])
        if len(dense[kind]) <= FEW_LAYERS:
            axes.bar_label(drawn, labels=[str(count) for count in counts[kind]], fontsize=7, color="0.3", padding=1)
    axes.set_ylim(0, 112)
    axes.set_yticks([0, 50, 100])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_axisbelow(True)
    clean_axes(axes)
