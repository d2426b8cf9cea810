# Licensed under the Apache License, Version 2.0.
"""The picture of `distil_heads`: accuracy of students over training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..analysis.plots.base import COLOURS, clean_axes, finish_figure


def plot_students(
    curves: Mapping[str, Sequence[Sequence[float]]],
    path: str | Path | None = None,
    teacher: float | None = None,
    title: str = "",
) -> Figure:
    """Draws the accuracy of each student over training, beside the teacher; a star marks the best evaluation.

    Args:
        curves (`dict[str, list[list[float]]]`): [step, accuracy] of the evaluations, by name of the student.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        teacher (`float`, *optional*): Accuracy of the teacher, drawn as a line.
        title (`str`): Model and data; the picture itself says what it shows.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if a student has no evaluation.
    """
    if not curves or not all(curves.values()):
        raise ValueError("curves are empty: nothing to draw.")
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for colour, (name, curve) in zip(COLOURS, curves.items()):
        steps, accuracies = zip(*curve)
        axes.plot(steps, accuracies, color=colour, linewidth=1.8, marker="o", markersize=3.5, label=name)
        best = max(range(len(curve)), key=lambda index: accuracies[index])
        axes.plot(steps[best], accuracies[best], color=colour, marker="*", markersize=12, linestyle="none")
    if teacher is not None:
        axes.axhline(teacher, color="0.45", linestyle=":", linewidth=1.2, label="teacher")
    axes.set(xlabel="optimizer step", ylabel="accuracy on the validation text")
    axes.legend(frameon=False, fontsize=9)
    clean_axes(axes)
    return finish_figure(figure, path, title, "Accuracy of students over training")
