# Licensed under the Apache License, Version 2.0.
"""Pictures of scores and embedding norms over training (Lu et al. 2021)."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..analysis.plots.figures import COLOURS, clean_axes, equal_panels, finish_figure

# Public, and found here by the earlier path until 0.2.
from ..analysis.plots.score_norm import Curves as Curves
from ..analysis.plots.score_norm import plot_score_norm_curves as plot_score_norm_curves
from ..analysis.score_norm import run_interval, share_by_bin


CLASSIFIER_NAMES = "FC: fixed, TC: linear, TL: two-layer classifier"  # of the keys of `CLASSIFIERS`


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


class Histogram(NamedTuple):
    """Fractions of words by bin, see [`histograms`].

    Args:
        edges (`torch.Tensor` of shape `(bins + 1,)`): Ascending edges of the bins.
        mean, low, high (`torch.Tensor` of shape `(bins,)`): Mean over runs with its confidence interval, which is NaN
            for a single run.
    """

    edges: torch.Tensor
    mean: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def plot_series(rows: Sequence[Sequence[Series]], path: str | Path | None = None, title: str = "") -> Figure:
    """Values over training, several lines per panel (figures 3 and 5).

    Args:
        rows (`list[list[Series]]`): Panels, row by row.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.
        title (`str`): Model and data; the picture itself says what it shows.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    figure, panels = equal_panels(rows, 3.0, 2.6)
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
    return finish_figure(figure, path, title, "Scores and norms of words over training")


def histograms(
    panels: Mapping[str, Mapping[str, torch.Tensor]], bins: int = 40, confidence: float = 0.95
) -> dict[str, dict[str, Histogram]]:
    """Histograms over words: those of one panel have the same bins.

    Args:
        panels (`dict[str, dict[str, torch.Tensor]]`): Values of shape `(runs, words)`, by panel title, such as "score
            of topic words", and by classifier.
        bins (`int`): Number of bins.
        confidence (`float`): Confidence level of the intervals.

    Returns:
        `dict[str, dict[str, Histogram]]`: histograms by panel title and classifier.
    """
    found: dict[str, dict[str, Histogram]] = {}
    for kind, models in panels.items():
        low = min(values.min().item() for values in models.values())
        high = max(values.max().item() for values in models.values())
        edges = torch.linspace(low, high, bins + 1) if high > low else torch.tensor([low - 0.5, low + 0.5])
        found[kind] = {
            name: Histogram(edges, *run_interval(share_by_bin(values, edges), confidence, limits=(0, 1)))
            for name, values in models.items()
        }
    return found


def plot_histograms(
    panels: Mapping[str, Mapping[str, Histogram]],
    path: str | Path | None = None,
    title: str = "",
    runs: int = 1,
    confidence: float = 0.95,
) -> Figure:
    """Histograms over words, means over runs with confidence intervals (figures 1 and 8).

    Each classifier has a row, so that no histogram hides another; the panels of a column share their axes.

    Args:
        panels (`dict[str, dict[str, Histogram]]`): Histograms by panel title and classifier, see [`histograms`].
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.
        title (`str`): Model and data; the picture itself says what it shows.
        runs (`int`): Number of runs.
        confidence (`float`): Confidence level of the intervals.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    if not panels:
        raise ValueError("panels are empty: nothing to draw.")
    names = list(dict.fromkeys(name for models in panels.values() for name in models))
    size = 2.3 * len(panels) + 0.4, 1.25 * len(names) + 1.4
    shared = {"sharex": "col", "sharey": "col", "squeeze": False}
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(names), len(panels), **shared)
    for column, (kind, models) in zip(grid.T, panels.items()):
        for axes, colour, name in zip(column, itertools.cycle(COLOURS), names):
            if name not in models:
                axes.set_axis_off()
                continue
            edges, mean, low, high = models[name]
            axes.stairs(mean, edges, color=colour, fill=True, alpha=0.6)
            if low.isfinite().all():
                some = mean > 0
                width, centres = torch.stack([mean - low, high - mean]), (edges[1:] + edges[:-1]) / 2
                axes.errorbar(centres[some], mean[some], width[:, some], fmt="none", ecolor="0.2", elinewidth=0.8)
            clean_axes(axes)
        column[0].set_title(kind, fontsize=10)
        column[0].set_ylim(0, None)
        column[0].xaxis.set_major_locator(MaxNLocator(3))
        # The quantity, such as the score of words.
        column[-1].set_xlabel(kind.split()[0])
        if column[-1].axison is False:
            column[0].tick_params(labelbottom=True)
    for line, name in zip(grid, names):
        line[0].set_ylabel(name, fontsize=10)
    figure.supylabel("fraction of words", fontsize=10)
    over = f", means of {runs} runs with {confidence:.0%} intervals" if runs > 1 else ""
    return finish_figure(figure, path, title, f"Scores and norms of words after training{over}")


def plot_distributions(
    panels: Mapping[str, Mapping[str, torch.Tensor]],
    path: str | Path | None = None,
    bins: int = 40,
    confidence: float = 0.95,
    title: str = "",
) -> Figure:
    """Histograms of values of shape `(runs, words)`, see [`histograms`] and [`plot_histograms`]."""
    runs = max((len(values) for models in panels.values() for values in models.values()), default=1)
    return plot_histograms(histograms(panels, bins, confidence), path, title, runs, confidence)


def plot_attended(
    rows: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]]],
    path: str | Path | None = None,
    title: str = "",
) -> Figure:
    """Mean topic purity and number of occurrences of the words with the highest attention (figures 6 and 7).

    Each profile has two panels with one axis each: purity above occurrences.

    Args:
        rows (`dict[str, dict[str, tuple]]`): Epochs, purities and occurrences, by name of the row and by panel title.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.
        title (`str`): Model and data; the picture itself says what it shows.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    lines = {
        name: {": ".join(filter(None, (name, panel))): values for panel, values in line.items()}
        for name, line in rows.items()
    }
    if not lines or not all(lines.values()):
        raise ValueError("rows are empty: nothing to draw.")
    columns = max(map(len, lines.values()))
    figure = Figure(figsize=(max(2.5 * columns + 0.4, 5), 3.6 * len(lines) + 0.5), layout="constrained")
    grid = figure.subplots(2 * len(lines), columns, squeeze=False, sharex=True)
    for axes in grid.flatten():
        axes.set_axis_off()
    for (above, below), line in zip(zip(grid[::2], grid[1::2]), lines.values()):
        for one, other, (panel, (epochs, purity, occurrences)) in zip(above, below, line.items()):
            quantities = (
                (one, purity, "topic purity", (0, 1.03)),
                (other, occurrences, "number of\nsentences with it", (0, None)),
            )
            for colour, (axes, values, name, limits) in zip((COLOURS[1], COLOURS[0]), quantities):
                axes.set_axis_on()
                axes.plot(epochs, values, color=colour, linewidth=1.8)
                axes.set(ylim=limits, ylabel=name if axes in (above[0], below[0]) else "")
                axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
                clean_axes(axes)
            one.set_title(panel, fontsize=10)
            other.set_xlabel("epoch")
    return finish_figure(figure, path, title, "The word with the largest attention weight in each sentence")
