# Licensed under the Apache License, Version 2.0.
"""Pictures of attention and lexical knowledge over source words (Snell et al. 2021)."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .figures import NARROWEST, finish_figure, literal, panel_grid
from .matplotlib_names import Figure


class SourceMap(NamedTuple):
    """One panel of [`plot_source_maps`].

    Args:
        title (`str`): Its title.
        rows (`list[str]`): Output words, or names of quantities.
        columns (`list[str]`): Source words.
        values (`torch.Tensor` of shape `(rows, columns)`): Values, ≥ 0; cells with NaN are empty.
        row_label (`str`): What the rows are, such as "output word"; by default, their axis has no label.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: torch.Tensor
    row_label: str = ""


def plot_source_maps(
    panels: Sequence[Sequence[SourceMap]],
    path: str | Path | None = None,
    title: str = "",
    quantity: str | None = None,
    heading: str = "Attention and lexical knowledge, word by word",
) -> Figure:
    """Heat maps over source words.

    Args:
        panels (`list[list[SourceMap]]`): Maps, row by row.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.
        quantity (`str`, *optional*): Name of the values, which are then drawn as they are, on a scale from 0 to the
            largest one. By default, each row is divided by its largest value.
        heading (`str`): What the figure shows, the first line of its title.

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
        return plot_source_maps([[panel] for line in panels for panel in line], path, title, quantity, heading)
    widths = [0.9 + cell * length for length in lengths]
    heights = [1.35 + max(cell, 0.17) * max(len(panel.rows) for panel in line) for line in panels]
    ratios = {"width_ratios": widths, "height_ratios": heights}
    # Room for the title, also of a few words.
    width, height = max(sum(widths) + 0.8, NARROWEST), sum(heights) + 0.6
    figure, grid = panel_grid(panels, width, height, gridspec_kw=ratios)
    highest = 1.0
    if quantity is not None:
        highest = max(panel.values.nan_to_num().max().item() for _, panel in grid) or 1.0
    for axes, panel in grid:
        values = panel.values
        if quantity is None:
            values = values / values.nan_to_num().amax(1, keepdim=True).clamp(min=1e-30)
        picture = axes.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=highest, aspect="auto")
        axes.set_title(panel.title, fontsize=9.5)
        # The mark of SentencePiece at the start of words is read as an underscore.
        words, rows = ([word.replace("▁", "") or "▁" for word in some] for some in (panel.columns, panel.rows))
        axes.set_xticks(range(len(words)), [literal(word) for word in words], rotation=90, fontsize=8)
        axes.set_yticks(range(len(rows)), [literal(row) for row in rows], fontsize=8)
        axes.tick_params(length=0, pad=2)
        axes.spines[:].set_visible(False)
        if panel.row_label:
            axes.set_ylabel(panel.row_label, fontsize=9)
    figure.supxlabel("source word", fontsize=9)
    label = "fraction of the largest value of the row" if quantity is None else quantity
    bar = figure.colorbar(picture, ax=figure.axes, shrink=0.8, aspect=40)
    bar.set_label(textwrap.fill(label, int(11 * height)), fontsize=9)  # not longer than the bar
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    return finish_figure(figure, path, title, heading)
