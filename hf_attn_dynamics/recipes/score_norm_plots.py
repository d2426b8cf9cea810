# Licensed under the Apache License, Version 2.0.
"""Pictures of scores and embedding norms over training (Lu et al. 2021)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..analysis.plots.base import COLOURS, clean_axes, finish_figure
from ..analysis.score_norm import run_interval, score_norm_curve, share_by_bin


class Curves(NamedTuple):
    """One panel of [`plot_score_norm_curves`].

    Args:
        title (`str`): Its title.
        scores, norms (`torch.Tensor` of shape `(epochs, runs)`): One curve per run.
        others (`float`): Number of other words m, for the theoretical curve.
    """

    title: str
    scores: torch.Tensor
    norms: torch.Tensor
    others: float


class Series(NamedTuple):
    """One panel of [`plot_series`].

    Args:
        title (`str`): Its title.
        name (`str`): Name of the quantity.
        epochs (`list[int]`): Epochs of the values.
        values (`dict[str, torch.Tensor]`): Values of shape `(epochs,)`, by name of the line.
        log (`bool`): Whether the vertical axis is logarithmic.
    """

    title: str
    name: str
    epochs: Sequence[int]
    values: Mapping[str, torch.Tensor]
    log: bool = False


def _grid(rows: Sequence[Sequence], width: float, height: float, name: str):
    """A figure with axes for each panel; shorter rows leave the rest of their line empty."""
    if not rows or not all(rows):
        raise ValueError(f"{name} are empty: nothing to draw.")
    columns = max(map(len, rows))
    figure = Figure(figsize=(width * columns, height * len(rows) + 0.3), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, row in zip(axes, rows):
        for missing in line[len(row) :]:
            missing.set_axis_off()
    return figure, [(one, panel) for line, row in zip(axes, rows) for one, panel in zip(line, row)]


def plot_score_norm_curves(rows: Sequence[Sequence[Curves]], path: str | Path | None = None) -> Figure:
    """Norm against score over training, one line per run, with the theoretical curve (figures 2, 4, 9 and 10).

    Args:
        rows (`list[list[Curves]]`): Panels, row by row.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    figure, panels = _grid(rows, 2.9, 2.6, "rows")
    for axes, panel in panels:
        runs = panel.scores.shape[1]
        for run in range(runs):
            line = {"color": COLOURS[run % len(COLOURS)], "linewidth": 1.6, "alpha": 0.9}
            label = None if run else "training" if runs == 1 else "each run"
            axes.plot(panel.scores[:, run], panel.norms[:, run], label=label, **line)
        low, high = min(0.0, panel.scores.min().item()), panel.scores.max().item()
        grid = torch.linspace(0, max(high, 1e-6), 200)
        theory = {"color": "black", "linestyle": "--", "linewidth": 1.3, "label": "theory"}
        axes.plot(grid, score_norm_curve(grid, panel.others), **theory)
        axes.set_title(panel.title, fontsize=10)
        axes.set(xlabel="score", xlim=(low - 0.03 * (high - low), None), ylim=(0, None))
        clean_axes(axes)
    for axes, _ in panels[:: max(map(len, rows))] if len({len(row) for row in rows}) == 1 else panels[:1]:
        axes.set_ylabel("norm")
    panels[0][0].legend(frameon=False, fontsize=8)
    return finish_figure(figure, path)


def plot_series(rows: Sequence[Sequence[Series]], path: str | Path | None = None) -> Figure:
    """Values over training, several lines per panel (figures 3 and 5).

    Args:
        rows (`list[list[Series]]`): Panels, row by row.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    figure, panels = _grid(rows, 3.0, 2.6, "rows")
    # A name has the same colour in every panel.
    names = list(dict.fromkeys(name for _, panel in panels for name in panel.values))
    for axes, panel in panels:
        for name, values in panel.values.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            axes.plot(panel.epochs, values, color=colour, linewidth=1.6, label=name)
        if panel.log:
            axes.set_yscale("log")
        axes.set_title(panel.title, fontsize=10)
        axes.set(xlabel="epoch", ylabel=panel.name)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.legend(frameon=False, fontsize=8)
        clean_axes(axes)
    return finish_figure(figure, path)


def plot_distributions(
    panels: Mapping[str, Mapping[str, torch.Tensor]],
    path: str | Path | None = None,
    bins: int = 40,
    confidence: float = 0.95,
) -> Figure:
    """Histograms over words, means over runs with confidence intervals (figures 1 and 8).

    Args:
        panels (`dict[str, dict[str, torch.Tensor]]`): Values of shape `(runs, words)`, by panel title and by
            classifier.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.
        bins (`int`): Number of bins.
        confidence (`float`): Confidence level of the intervals.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    figure, drawn = _grid([list(panels.items())] if panels else [], 2.9, 2.7, "panels")
    for axes, (title, models) in drawn:
        low = min(values.min().item() for values in models.values())
        high = max(values.max().item() for values in models.values())
        edges = torch.linspace(low, high, bins + 1) if high > low else torch.tensor([low - 0.5, low + 0.5])
        for colour, (name, values) in zip(COLOURS, models.items()):
            shares = run_interval(share_by_bin(values, edges), confidence, limits=(0, 1))
            axes.stairs(shares.mean, edges, color=colour, fill=True, alpha=0.35, label=name)
            axes.stairs(shares.mean, edges, color=colour, linewidth=1)
            if shares.low.isfinite().all():
                width = torch.stack([shares.mean - shares.low, shares.high - shares.mean])
                some = shares.mean > 0
                centres = (edges[1:] + edges[:-1]) / 2
                axes.errorbar(
                    centres[some], shares.mean[some], width[:, some], fmt="none", ecolor=colour, elinewidth=0.9
                )
        axes.set_title(title, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylim(0, None)
        clean_axes(axes)
    drawn[0][0].set_ylabel("fraction of words")
    drawn[0][0].legend(frameon=False, fontsize=8)
    return finish_figure(figure, path)


def plot_attended(
    rows: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]]],
    path: str | Path | None = None,
) -> Figure:
    """Mean topic purity and number of occurrences of the words with the highest attention (figures 6 and 7).

    Args:
        rows (`dict[str, dict[str, tuple]]`): Epochs, purities and occurrences, by name of the row and by panel title.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    red, blue = COLOURS[1], COLOURS[0]
    titled = [
        [(": ".join(filter(None, (row, title))), *values) for title, values in line.items()]
        for row, line in rows.items()
    ]
    figure, panels = _grid(titled, 3.1, 2.4, "rows")
    for axes, (title, epochs, purity, occurrences) in panels:
        axes.plot(epochs, purity, color=red, linewidth=1.8)
        axes.set(xlabel="epoch", ylabel="topic purity", ylim=(0, 1.03))
        axes.yaxis.label.set_color(red)
        axes.set_title(title, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        clean_axes(axes)
        counts = axes.twinx()
        counts.plot(epochs, occurrences, color=blue, linewidth=1.8, linestyle="--")
        counts.set(ylabel="occurrences (dashed)", ylim=(0, None))
        counts.yaxis.label.set_color(blue)
        counts.spines["top"].set_visible(False)
    return finish_figure(figure, path)
