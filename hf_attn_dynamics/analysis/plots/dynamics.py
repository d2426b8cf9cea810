# Licensed under the Apache License, Version 2.0.
"""Pictures of head statistics over training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..head_scores import HeadScores
from ..head_timeline import HeadTimeline
from .base import COLOURS, SITE_NAMES, clean_axes, finish_figure, new_figure, white_lines


# Thresholds of confident and positional heads (Voita et al. 2019, sections 4.1 and 5.1).
THRESHOLDS = {"confidence": 0.8, "relative_positions/best_offset_share": 0.9}
FEW_HEADS = 48  # drawn as lines; more heads are drawn as a heat map
NEVER = "0.92"


def plot_head_dynamics(
    timelines: HeadTimeline | Mapping[str, HeadTimeline],
    path: str | Path | None = None,
    title: str = "",
    statistics: Sequence[str] | None = None,
    thresholds: Mapping[str, float] | None = None,
) -> Figure:
    """Statistics of heads over training: a row per statistic and kind of site, a column per run.

    Each head is a line in the colour of its layer or, with many heads, a row of a heat map. For statistics with a
    threshold, maps of layers × heads show the step at which each head first reached it. All runs share their scales.

    Args:
        timelines ([`HeadTimeline`], or `dict` of them): Statistics of a run, or of several runs by name.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Title of the figure.
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
    has_maps = any(row.statistic in levels for row in panels)
    widths = [3.6] * len(runs) + [0.12] + ([1.9] * len(runs) + [0.12]) * has_maps
    heights = [row.height for row in panels]
    size = sum(widths) + 0.45 * len(widths), sum(heights) + 0.4
    ratios = {"width_ratios": widths, "height_ratios": heights}
    figure, grid = new_figure(*size, len(panels), len(widths), gridspec_kw=ratios)
    for line in grid:
        for axes in line:
            axes.set_axis_off()
    for line, row in zip(grid, panels):
        level = levels.get(row.statistic)
        row.draw(line[: len(runs)], line[len(runs)], level)
        if level is not None:
            row.draw_first_steps(line[len(runs) + 1 : -1], line[-1], level)
    return finish_figure(figure, path, title)


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
        self.height = min(max(2.6, 0.024 * self.layers * self.heads), 6.0) if self.is_heat_map else 2.6

    def draw(self, panels: Sequence[Any], bar: Any, level: float | None) -> None:
        """Draws the statistic over the steps, with a panel per run."""
        for axes, run in zip(panels, self.runs):
            if run not in self.series:
                continue
            axes.set_axis_on()
            if self.is_heat_map:
                self._draw_heat_map(axes, *self.series[run])
            else:
                self._draw_lines(axes, *self.series[run])
                if level is not None:
                    axes.axhline(level, color="0.45", linestyle=":", linewidth=1)
            where = "" if self.kind is None else SITE_NAMES[self.kind]
            axes.set_title("; ".join(filter(None, (run, where))), fontsize=9)
            axes.set_xlabel("optimizer step", fontsize=8)
            axes.tick_params(labelsize=8)
        first = next(axes for axes, run in zip(panels, self.runs) if run in self.series)
        first.set_ylabel(f"{self.name}\nlayer" if self.is_heat_map else self.name, fontsize=9)
        if self.is_heat_map:
            self._bar(bar, ScalarMappable(Normalize(*self.limits), "cividis"), self.name.split("\n")[-1])
        elif self.layers > 1:
            bounds = [layer - 0.5 for layer in range(self.layers + 1)]
            colours = matplotlib.colors.ListedColormap([self._colour(layer) for layer in range(self.layers)])
            ticks = MaxNLocator(8, integer=True)
            self._bar(bar, ScalarMappable(BoundaryNorm(bounds, self.layers), colours), ticks=ticks)
            bar.set_title("layer", fontsize=8)

    def _colour(self, layer: int) -> tuple[float, ...]:
        # The last colours of viridis are too light for lines.
        return matplotlib.colormaps["viridis"](0.9 * layer / max(self.layers - 1, 1))

    def _draw_lines(self, axes: Any, steps: list[int], tables: torch.Tensor) -> None:
        for layer in range(tables.shape[1]):
            colour = COLOURS[0] if self.kind is None else self._colour(layer)
            axes.plot(steps, tables[:, layer].numpy(), color=colour, linewidth=1.1, alpha=0.85)
        margin = 0.03 * (self.limits[1] - self.limits[0] or 1)
        axes.set_ylim(self.limits[0] - margin, self.limits[1] + margin)
        axes.set_xlim(0, self.last_step or 1)
        clean_axes(axes)

    def _draw_heat_map(self, axes: Any, steps: list[int], tables: torch.Tensor) -> None:
        low, high = self.limits
        rows = tables.flatten(1).T.numpy()
        axes.set_facecolor(NEVER)
        # A bitmap, since an SVG of so many cells would be large.
        style = {"shading": "nearest", "cmap": "cividis", "vmin": low, "vmax": high, "rasterized": True}
        axes.pcolormesh(steps, range(len(rows)), rows, **style)
        layers, heads = tables.shape[1:]
        for layer in range(1, layers):
            axes.axhline(layer * heads - 0.5, color="white", linewidth=0.8)
        axes.set_yticks([layer * heads + (heads - 1) / 2 for layer in range(layers)], range(layers))
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.spines[:].set_visible(False)

    def draw_first_steps(self, panels: Sequence[Any], bar: Any, level: float) -> None:
        """Draws the step at which each head first reached a threshold, with a map per run."""
        colours = {"cmap": "plasma", "norm": Normalize(0, self.last_step or 1)}
        for axes, run in zip(panels, self.runs):
            if run not in self.series:
                continue
            first = self.runs[run].first_step(self.statistic, level)[self.kind]
            axes.set_axis_on()
            axes.set_facecolor(NEVER)
            axes.imshow(first.numpy(), aspect="auto", **colours)
            reached, present = int(first.isfinite().sum()), int(self.series[run][1][-1].isfinite().sum())
            axes.set_title(f"{run}\n≥ {level:g}: {reached} of {present} heads".strip(), fontsize=9)
            axes.set_xlabel("head", fontsize=8)
            axes.set_ylabel("layer" if axes is panels[0] else "", fontsize=8)
            white_lines(axes, first, 1)
            for axis, ticks in ((axes.xaxis, 8), (axes.yaxis, 12)):
                axis.set_major_locator(MaxNLocator(ticks, integer=True, min_n_ticks=1))
            axes.tick_params(which="both", length=0, labelsize=8)
            axes.spines[:].set_visible(False)
        self._bar(bar, ScalarMappable(colours["norm"], colours["cmap"]), "first step (grey: never)")

    @staticmethod
    def _bar(axes: Any, mappable: ScalarMappable, label: str = "", **settings: Any) -> None:
        axes.set_axis_on()
        bar = axes.figure.colorbar(mappable, cax=axes, **settings)
        bar.set_label(label, fontsize=8)
        bar.ax.tick_params(labelsize=7, length=0)
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)
