# Licensed under the Apache License, Version 2.0.
"""Pictures of sweeps: a metric over a grid of settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..analysis.plots.figures import finish_figure


def plot_heat_maps(
    panels: Mapping[str, Mapping[tuple[str, str], float]],
    rows: Sequence[str],
    columns: Sequence[str],
    name: str,
    path: str | Path | None = None,
    axes_names: tuple[str, str] = ("", ""),
    digits: int = 3,
    title: str = "",
) -> Figure:
    """Draws a grid of values for each panel, with one colour scale; each cell shows its value.

    Args:
        panels (`dict[str, dict[tuple[str, str], float]]`): Values by labels of row and column, by title of the panel;
            missing cells stay white.
        rows, columns (`list[str]`): Labels, in this order.
        name (`str`): Label of the colour bar.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG; the figure is not saved without.
        axes_names (`tuple[str, str]`): Labels of the vertical and the horizontal axis.
        digits (`int`): Digits after the decimal point.
        title (`str`): Model and data; the picture itself says what it shows.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there is no value.
    """
    values = [value for cells in panels.values() for value in cells.values()]
    if not values:
        raise ValueError("panels are empty; give at least one value.")
    low, high = min(values), max(values)
    width = 1.8 + len(panels) * (0.9 + 0.75 * len(columns))
    figure = Figure(figsize=(width, 2.3 + 0.55 * len(rows)), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (panel, cells) in zip(all_axes, panels.items()):
        grid = [[cells.get((row, column), float("nan")) for column in columns] for row in rows]
        image = axes.imshow(grid, cmap="viridis", vmin=low, vmax=high, aspect="auto")
        for (row, column), value in cells.items():
            # Dark cells take light letters.
            is_dark = high == low or (value - low) / (high - low) < 0.6
            centered = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if is_dark else "black"}
            axes.text(columns.index(column), rows.index(row), f"{value:.{digits}f}", **centered)
        axes.set_title(panel, fontsize=10)
        axes.set_xticks(range(len(columns)), columns, fontsize=8)
        axes.set_xlabel(axes_names[1])
        axes.set_yticks(range(len(rows)), rows if axes is all_axes[0] else [""] * len(rows), fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    all_axes[0].set_ylabel(axes_names[0])
    figure.colorbar(image, ax=all_axes, label=name, shrink=0.9).outline.set_visible(False)
    return finish_figure(figure, path, title, f"{name} over a grid of settings")
