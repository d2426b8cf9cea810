# Licensed under the Apache License, Version 2.0.
"""Pictures of head statistics over training."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..head_scores import HeadScores
from ..head_timeline import HeadTimeline
from .figures import (
    COLOURS,
    SITE_NAMES,
    clean_axes,
    finish_figure,
    fix_layout,
    layer_colours,
    new_figure,
    number_heads,
    white_lines,
)
from .matplotlib_names import (
    Axes,
    BoundaryNorm,
    Figure,
    ListedColormap,
    MaxNLocator,
    Normalize,
    ScalarMappable,
)


# Thresholds of confident and positional heads (Voita et al. 2019, sections 4.1 and 5.1).
THRESHOLDS = {"confidence": 0.8, "relative_positions/best_offset_share": 0.9}
FEW_HEADS = 16  # drawn as lines with names; more heads are drawn as a heat map
ROW = 0.11  # inches of a row of a heat map, so that each can have a name
NEVER = "0.92"
UNITS = {"entropy": "nats", "center_of_mass": "tokens"}
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1, 1, 1)), (0, (9, 2)), (0, (3, 1, 1, 1, 1, 1)))


def plot_head_dynamics(
    timelines: HeadTimeline | Mapping[str, HeadTimeline],
    path: str | Path | None = None,
    title: str = "",
    statistics: Sequence[str] | None = None,
    thresholds: Mapping[str, float] | None = None,
) -> Figure:
    """Statistics of heads over training: a row per statistic and kind of site, a column per run.

    Each head is a line in the colour of its layer, named at its end, or, with more than 16 heads, a row of a heat map.
    Below statistics with a threshold, maps of layers × heads show the step at which each head first reached it. All
    runs share their scales.

    Args:
        timelines ([`HeadTimeline`], or `dict` of them): Statistics of a run, or of several runs by name.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.
        statistics (`list[str]`, *optional*): Statistics to draw, in this order; all by default.
        thresholds (`dict[str, float]`, *optional*): Thresholds by statistic. By default 0.8 for `confidence` and 0.9
            for `relative_positions/best_offset_share`.

    Raises:
        ValueError: if there is nothing to draw, or no run has one of the `statistics`.
    """
    runs = {"": timelines} if isinstance(timelines, HeadTimeline) else dict(timelines)
    known = list(dict.fromkeys(name for timeline in runs.values() for name in timeline.statistics))
    for name in [*(statistics or ()), *(thresholds or ())]:
        if name not in known:
            raise ValueError(f"no run has the statistic {name!r}, but {', '.join(known) or 'none has any'}.")
    panels = [_Row(runs, name, kind) for name in statistics or known for kind in _kinds(runs, name)]
    if not panels:
        raise ValueError("timelines are empty: nothing to draw.")
    levels = THRESHOLDS if thresholds is None else thresholds
    # Maps of first steps stand below their statistic, so that the figure is no wider than its runs.
    lines: list[tuple[_Row, float | None]] = []
    for row in panels:
        lines.append((row, None))
        if row.statistic in levels:
            lines.append((row, levels[row.statistic]))
    widths = [3.7] * len(runs) + [0.14]
    heights = [row.height if level is None else row.map_height for row, level in lines]
    size = sum(widths) + 0.3 * len(widths) + 0.7, sum(heights) + 0.7 * len(heights) + 0.5
    ratios = {"width_ratios": widths, "height_ratios": heights}
    figure, grid = new_figure(*size, len(lines), len(widths), gridspec_kw=ratios)
    for line in grid:
        for axes in line:
            axes.set_axis_off()
    named = []
    for line, (row, level) in zip(grid, lines):
        if level is None:
            named += row.draw(line[:-1], line[-1], levels.get(row.statistic))
        else:
            row.draw_first_steps(line[:-1], line[-1], level)
    finish_figure(figure, None, title, "Attention heads over training (layer.head)")
    if named:
        # Names at the right of a panel do not touch the numbers of the next one.
        figure.get_layout_engine().set(w_pad=0.08)
        # Only the layout of the whole figure tells how far names are from each other.
        figure.draw_without_rendering()
        for axes, ends in named:
            name_lines(axes, ends)
        # Names need room between the panels; the layout approaches its end in two passes.
        figure.draw_without_rendering()
        fix_layout(figure)
    return finish_figure(figure, path)


def name_lines(axes: Axes, ends: Mapping[str, tuple[float, float, Any]], fontsize: float = 7) -> None:
    """Names lines at their right ends, moved apart vertically; lines that end together share a row of names.

    Args:
        ends (`dict[str, tuple]`): Where the line of each name ends, and its colour.
    """
    height, frame = 1.25 * fontsize * axes.figure.dpi / 72, axes.get_window_extent()
    rows = max(1, int(frame.height // height))
    spots = sorted(
        (float(axes.transData.transform((x, y))[1]), name, x, colour) for name, (x, y, colour) in ends.items()
    )
    # From below: each name at its line, or just above the name below it; names that are too many share rows.
    groups: list[list] = []
    for spot in spots:
        crowded = groups and spot[0] - groups[-1][0][0] < 0.5 * height
        if crowded and (len(spots) > rows or len(groups[-1]) < 4) and len(groups[-1]) < 8:
            groups[-1].append(spot)
        else:
            groups.append([spot])
    bottoms: list[float] = []
    for group in groups:
        wanted = sum(spot[0] for spot in group) / len(group)
        bottoms.append(max(wanted, bottoms[-1] + height) if bottoms else wanted)
    # Names above the frame push those below them down.
    excess = max(0.0, bottoms[-1] - frame.y1)
    for index in range(len(bottoms) - 1, -1, -1):
        ceiling = frame.y1 if index == len(bottoms) - 1 else bottoms[index + 1] - height
        bottoms[index] = min(bottoms[index], ceiling) if excess else bottoms[index]
    for group, bottom in zip(groups, bottoms):
        _, _, x, colour = group[0]
        y = axes.transData.inverted().transform((0, bottom))[1]
        names = " ".join(name for _, name, _, _ in sorted(group, key=lambda spot: spot[1]))
        style = {"textcoords": "offset points", "fontsize": fontsize, "va": "center", "annotation_clip": False}
        axes.annotate(names, (x, y), (4, 0), color=colour if len({spot[3] for spot in group}) == 1 else "0.2", **style)


def _kinds(runs: Mapping[str, HeadTimeline], statistic: str) -> list[str | None]:
    """Kinds of sites of a statistic in any run; `[None]` for a metric of the whole model."""
    found = [timeline.of(statistic) for timeline in runs.values() if statistic in timeline.statistics]
    kinds = {kind for values in found for value in values.values() if isinstance(value, HeadScores) for kind in value}
    return [kind for kind in SITE_NAMES if kind in kinds] or [None]


class _Row:
    """One statistic of the heads of one kind of site, in all runs."""

    def __init__(self, runs: Mapping[str, HeadTimeline], statistic: str, kind: str | None):
        self.runs, self.statistic, self.kind = runs, statistic, kind
        self.name = statistic.replace("/", "\n").replace("_", " ")
        unit = UNITS.get(statistic.rpartition("/")[2])
        self.label = f"{self.name} ({unit})" if unit else self.name
        self.series: dict[str, tuple[list[int], torch.Tensor]] = {}  # by run: steps, and (steps, layers, heads)
        for run, timeline in runs.items():
            values = timeline.of(statistic) if statistic in timeline.statistics else {}
            if kind is not None:
                values = {step: scores[kind] for step, scores in values.items() if kind in scores}
            if values:
                tables = [torch.as_tensor(value, dtype=torch.float64) for value in values.values()]
                self.series[run] = list(values), torch.stack(tables).reshape(len(tables), *tables[0].shape or (1, 1))
        numbers = torch.cat([table.flatten() for _, table in self.series.values()])
        numbers = numbers[numbers.isfinite()]
        low, high = (numbers.min().item(), numbers.max().item()) if len(numbers) else (0.0, 1.0)
        # Fractions have the scale from 0 to 1.
        is_fraction = kind is not None and low >= 0 and high <= 1
        self.limits = (0.0, 1.0) if is_fraction else (min(low, 0.0), high)
        self.layers, self.heads = (max(table.shape[dim] for _, table in self.series.values()) for dim in (1, 2))
        self.last_step = max(steps[-1] for steps, _ in self.series.values())
        self.is_heat_map = self.layers * self.heads > FEW_HEADS
        self.height = min(max(2.6, ROW * self.layers * self.heads), 8.0) if self.is_heat_map else 2.3
        self.map_height = min(max(1.2, 0.26 * self.layers), 3.0)

    def draw(self, panels: Sequence[Any], bar: Any, level: float | None) -> list[tuple[Axes, dict]]:
        """Draws the statistic over the steps, with a panel per run.

        Returns:
            The panels whose lines need names, with the end of the line of each head.
        """
        named = []
        for axes, run in zip(panels, self.runs):
            if run not in self.series:
                continue
            axes.set_axis_on()
            if self.is_heat_map:
                self._draw_heat_map(axes, *self.series[run])
            else:
                ends = self._draw_lines(axes, *self.series[run])
                if ends:
                    named.append((axes, ends))
                if level is not None:
                    axes.axhline(level, color="0.45", linestyle=":", linewidth=1)
            where = "" if self.kind is None else SITE_NAMES[self.kind]
            axes.set_title("; ".join(filter(None, (run, where))), fontsize=9)
            axes.set_xlabel("optimizer step", fontsize=8)
            axes.tick_params(axis="x", labelsize=8)
            if not self.is_heat_map:
                axes.tick_params(axis="y", labelsize=8)
        first = next(axes for axes, run in zip(panels, self.runs) if run in self.series)
        first.set_ylabel(f"{self.label}\nlayer.head" if self.is_heat_map else self.label, fontsize=9)
        if self.is_heat_map:
            self._bar(bar, ScalarMappable(Normalize(*self.limits), "viridis"), self.label.split("\n")[-1])
        elif self.layers > 1:
            bounds = [layer - 0.5 for layer in range(self.layers + 1)]
            colours = ListedColormap([self._colour(layer) for layer in range(self.layers)])
            ticks = MaxNLocator(8, integer=True)
            self._bar(bar, ScalarMappable(BoundaryNorm(bounds, self.layers), colours), ticks=ticks)
            bar.set_title("layer", fontsize=8)
        return named

    def _colour(self, layer: int) -> Any:
        return layer_colours(self.layers)[layer]

    def _draw_lines(self, axes: Axes, steps: list[int], tables: torch.Tensor) -> dict[str, tuple[float, float, Any]]:
        """A line for each head; returns where it ends, and its colour, by the name of the head."""
        ends = {}
        layers, heads = tables.shape[1:]
        for layer in range(layers):
            colour = COLOURS[0] if self.kind is None else self._colour(layer)
            for head in range(heads):
                values = tables[:, layer, head]
                # Heads of one layer differ in their dashes.
                dashes = DASHES[head % len(DASHES)]
                measured = values.isfinite().nonzero()
                # A single value would be a line that is not seen.
                style = {"linewidth": 1.2, "alpha": 0.85, "linestyle": dashes, "markersize": 4}
                style["marker"] = "o" if len(measured) == 1 else None
                axes.plot(steps, values.numpy(), color=colour, **style)
                if self.kind is not None and len(measured):
                    last = int(measured[-1])
                    ends[f"{layer}.{head}"] = steps[last], values[last].item(), colour
        margin = 0.03 * (self.limits[1] - self.limits[0] or 1)
        axes.set_ylim(self.limits[0] - margin, self.limits[1] + margin)
        # Room for the names at the right.
        axes.set_xlim(0, 1.25 * self.last_step or 1)
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= self.last_step])
        clean_axes(axes)
        return ends

    def _draw_heat_map(self, axes: Any, steps: list[int], tables: torch.Tensor) -> None:
        low, high = self.limits
        rows = tables.flatten(1).T.numpy()
        axes.set_facecolor(NEVER)
        # A bitmap, since an SVG of so many cells would be large.
        style = {"cmap": "viridis", "vmin": low, "vmax": high, "rasterized": True}
        if len(steps) == 1:
            # Cells get their width from the distance of steps.
            edges = [steps[0] - 0.5, steps[0] + 0.5], [row - 0.5 for row in range(len(rows) + 1)]
            axes.pcolormesh(*edges, rows, shading="flat", **style)
            axes.set_xticks(steps)
        else:
            axes.pcolormesh(steps, range(len(rows)), rows, shading="nearest", **style)
        layers, heads = tables.shape[1:]
        for layer in range(1, layers):
            axes.axhline(layer * heads - 0.5, color="white", linewidth=1.2)
        every = math.ceil(ROW * len(rows) / self.height - 1e-6)
        named = [(layer, head) for layer in range(layers) for head in range(0, heads, every)]
        axes.set_yticks([layer * heads + head for layer, head in named], [f"{layer}.{head}" for layer, head in named])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0, labelsize=6.5, pad=1)
        axes.spines[:].set_visible(False)

    def draw_first_steps(self, panels: Sequence[Any], bar: Any, level: float) -> None:
        """Draws the step at which each head first reached a threshold, with a map per run."""
        colours = {"cmap": "viridis_r", "norm": Normalize(0, self.last_step or 1)}
        for axes, run in zip(panels, self.runs):
            if run not in self.series:
                continue
            first = self.runs[run].first_step(self.statistic, level)[self.kind]
            axes.set_axis_on()
            axes.set_facecolor(NEVER)
            axes.imshow(first.numpy(), aspect="auto", **colours)
            reached, present = int(first.isfinite().sum()), int(self.series[run][1][-1].isfinite().sum())
            above = f"{self.name} ≥ {level:g}: {reached} of {present} heads".replace("\n", ", ")
            axes.set_title("\n".join(filter(None, (run, above))), fontsize=9)
            axes.set_xlabel("head", fontsize=8)
            axes.set_ylabel("layer" if axes is panels[0] else "", fontsize=8)
            white_lines(axes, first, 1)
            number_heads(axes, first, 3.3 / first.shape[1])
            axes.tick_params(which="both", length=0, labelsize=8)
            axes.spines[:].set_visible(False)
        self._bar(bar, ScalarMappable(colours["norm"], colours["cmap"]), "first step\n(grey: never)")

    @staticmethod
    def _bar(axes: Any, mappable: ScalarMappable, label: str = "", **settings: Any) -> None:
        axes.set_axis_on()
        bar = axes.figure.colorbar(mappable, cax=axes, **settings)
        bar.set_label(label, fontsize=8)
        bar.ax.tick_params(labelsize=7, length=0)
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)
