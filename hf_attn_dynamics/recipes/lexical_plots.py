# Licensed under the Apache License, Version 2.0.
"""Pictures of attention, lexical probe and saliency: agreement over training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..analysis.plots.figures import COLOURS, MARKERS, clean_axes, finish_figure

# Public, and found here by the earlier path until 0.2.
from ..analysis.plots.lexical import SourceMap as SourceMap
from ..analysis.plots.lexical import plot_source_maps as plot_source_maps


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
