# Licensed under the Apache License, Version 2.0.
"""Pictures of accuracy while models learn to copy, and of log-odds by position (Snell et al. 2021)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from ..analysis.plots.figures import COLOURS, clean_axes, finish_figure


def plot_copying_curves(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    path: str | Path | None = None,
    learnt: float = 0.99,
    title: str = "",
) -> Figure:
    """Accuracy over training, one line per model, which ends in a dot if the model has learnt (figures 3 and 6).

    Args:
        panels (`dict[str, dict[str, list[list[float]]]]`): Accuracies of each model at steps 0, 1, …, by panel title
            and by name of the setting. A setting has the same colour in all panels.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.
        learnt (`float`): Accuracy of a model that has learnt; the legend counts these models.
        title (`str`): Model and data; the picture itself says what it shows.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    names = list(dict.fromkeys(name for settings in panels.values() for name in settings))
    if not names:
        raise ValueError("panels are empty: nothing to draw.")
    colours = dict(zip(names, COLOURS))
    longest = max(len(curve) for settings in panels.values() for curves in settings.values() for curve in curves)
    figure = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for axes, (panel, settings) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items()):
        for name, curves in settings.items():
            reached = sum(max(curve) >= learnt for curve in curves)
            label = f"{name}: {reached} of {len(curves)} learn"
            for curve in curves:
                axes.plot(curve, color=colours[name], linewidth=0.9, alpha=0.75, label=label)
                if curve[-1] >= learnt:
                    axes.plot(len(curve) - 1, curve[-1], color=colours[name], marker="o", markersize=3, clip_on=False)
                label = None
        axes.set(xlabel="training step", xlim=(0, longest - 1), ylim=(0, 1.02))
        axes.set_title(panel, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17)}
        for line in axes.legend(frameon=False, fontsize=8, **below).get_lines():
            line.set_linewidth(2)
        clean_axes(axes)
    figure.axes[0].set_ylabel("accuracy on new sentences")
    return finish_figure(figure, path, title, "Accuracy while models learn to copy")


def plot_keyword_drift(
    steps: Sequence[int],
    log_odds: Mapping[str, Sequence[float]],
    path: str | Path | None = None,
    marks: Mapping[str, int | None] | None = None,
    title: str = "",
) -> Figure:
    """Mean log-odds γ of the positive class by position, over training (figure 7).

    Both axes are logarithmic above 1, since early changes are fast and small.

    Args:
        steps (`list[int]`): Steps of the measurements.
        log_odds (`dict[str, list[float]]`): Log-odds at these steps, by name of the position.
        path (`str` or `Path`, *optional*): File to save as PNG and SVG; by default, nothing is saved.
        marks (`dict[str, int | None]`, *optional*): Steps to mark, by label; no mark for None.
        title (`str`): Model and data; the picture itself says what it shows.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    if not steps or not log_odds:
        raise ValueError("steps or log_odds are empty: nothing to draw.")
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for colour, (name, values) in zip(COLOURS, log_odds.items()):
        axes.plot(steps, values, color=colour, linewidth=2, label=name)
    for style, (name, step) in zip((":", "--", "-."), (marks or {}).items()):
        if step is not None:
            axes.axvline(step, color="0.45", linestyle=style, linewidth=1.2, label=f"{name}: step {step}")
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_yscale("symlog", linthresh=1)
    axes.set(xlabel="training step", ylabel="log-odds γ of the positive class", xlim=(0, steps[-1]))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.legend(frameon=False, fontsize=8)
    clean_axes(axes)
    return finish_figure(figure, path, title, "Log-odds of words by position over training")
