# Licensed under the Apache License, Version 2.0.
"""Pictures of attention, lexical probe and saliency: agreement over training, and heat maps over words."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from ..analysis.plots.base import COLOURS, MARKERS, clean_axes, finish_figure, panel_grid


class SourceMap(NamedTuple):
    """One panel of [`plot_source_maps`].

    Args:
        title (`str`): Its title.
        rows (`list[str]`): Output words, or names of quantities.
        columns (`list[str]`): Source words.
        values (`torch.Tensor` of shape `(rows, columns)`): Values, ≥ 0.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: torch.Tensor


def plot_agreement(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    path: str | Path | None = None,
    title: str = "",
    chance: float | None = None,
    levels: Mapping[str, float] | None = None,
) -> Figure:
    """Agreement over training, one line per model (Snell et al. 2021, figure 2 and appendix A.7).

    Args:
        curves (`dict[str, tuple[list[int], list[float]]]`): Steps and agreement, by name.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.
        title (`str`): Model and data; the picture itself says what it shows.
        chance (`float`, *optional*): Agreement by chance, drawn as a horizontal line.
        levels (`dict[str, float]`, *optional*): Other agreements by name, drawn as horizontal lines.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    if not curves:
        raise ValueError("curves are empty: nothing to draw.")
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for colour, marker, (name, (steps, values)) in zip(COLOURS, MARKERS, curves.items()):
        axes.plot(steps, values, color=colour, marker=marker, markersize=4, linewidth=1.8, label=name)
    for colour, (name, value) in zip(reversed(COLOURS), (levels or {}).items()):
        axes.axhline(value, color=colour, linestyle="--", linewidth=1.3, label=name)
    if chance is not None:
        axes.axhline(chance, color="0.45", linestyle=":", linewidth=1.3, label="chance")
    # Early checkpoints are close to each other.
    axes.set_xscale("symlog", linthresh=50)
    last = max(max(steps) for steps, _ in curves.values())
    ticks = [0, *(factor * 10**power for power in range(1, 7) for factor in (1, 5) if factor * 10**power <= last)]
    # The last step has a label, also where it is near the last round number.
    ticks = [tick for tick in ticks if tick <= 0.55 * last] + [last]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set(
        xlabel="optimizer step (logarithmic from 50)",
        ylabel="agreement A of two orders of words",
        ylim=(0, None),
        xlim=(0, None),
    )
    figure.legend(frameon=False, fontsize=9, loc="outside right center")
    clean_axes(axes)
    return finish_figure(figure, path, title, "Agreement of attention and lexical knowledge over training")


def plot_source_maps(panels: Sequence[Sequence[SourceMap]], path: str | Path | None = None, title: str = "") -> Figure:
    """Heat maps over source words; each row is divided by its largest value.

    Args:
        panels (`list[list[SourceMap]]`): Maps, row by row.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.
        title (`str`): Model and data; the picture itself says what it shows.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    if not panels or not all(panels):
        raise ValueError("panels are empty: nothing to draw.")
    columns = max(map(len, panels))
    lengths = [max(len(line[index].columns) for line in panels if index < len(line)) for index in range(columns)]
    # As wide as a page on which the tokens can be read.
    cell = min(0.34, (8.6 - 1.1 * columns) / sum(lengths))
    if cell < 0.17 and columns > 1:
        return plot_source_maps([[panel] for line in panels for panel in line], path, title)
    widths = [0.9 + cell * length for length in lengths]
    heights = [1.35 + max(cell, 0.17) * max(len(panel.rows) for panel in line) for line in panels]
    ratios = {"width_ratios": widths, "height_ratios": heights}
    figure, grid = panel_grid(panels, sum(widths) + 0.8, sum(heights) + 0.6, gridspec_kw=ratios)
    for axes, panel in grid:
        largest = panel.values.amax(1, keepdim=True).clamp(min=1e-30)
        picture = axes.imshow((panel.values / largest).numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set_title(panel.title, fontsize=9.5)
        # The mark of SentencePiece at the start of words is read as an underscore.
        words, rows = ([word.replace("▁", "") or "▁" for word in some] for some in (panel.columns, panel.rows))
        axes.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.tick_params(length=0, pad=2)
        axes.spines[:].set_visible(False)
    figure.supxlabel("source word", fontsize=9)
    label = "fraction of the largest value of the row"
    figure.colorbar(picture, ax=figure.axes, label=label, shrink=0.8, aspect=40).outline.set_visible(False)
    return finish_figure(figure, path, title, "Attention and lexical knowledge, word by word")
