# Licensed under the Apache License, Version 2.0.
"""Pictures of scores and embedding norms of words over training (Lu et al. 2021)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..score_norm import score_norm_curve
from .figures import COLOURS, clean_axes, equal_panels, finish_figure
from .matplotlib_names import Figure


class Curves(NamedTuple):
    """One panel of [`plot_score_norm_curves`].

    Args:
        title (`str`): Its title.
        scores, norms (`torch.Tensor` of shape `(epochs, runs)`): One curve per run.
        others (`float`, *optional*): Number of other words m, for the theoretical curve; no such curve by default.
    """

    title: str
    scores: torch.Tensor
    norms: torch.Tensor
    others: float | None = None


def plot_score_norm_curves(
    rows: Sequence[Sequence[Curves]], path: str | Path | None = None, title: str = ""
) -> Figure:
    """Norm against score over training, one line per run, with the theoretical curve (Lu et al. 2021, figures 2, 4, 9
    and 10).

    Args:
        rows (`list[list[Curves]]`): Panels, row by row.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are no values.
    """
    # Not so wide that letters are small on a page.
    figure, panels = equal_panels(rows, min(2.9, 10.4 / max(map(len, rows), default=1)), 2.6)
    for axes, panel in panels:
        runs = panel.scores.shape[1]
        for run in range(runs):
            line = {"color": COLOURS[run % len(COLOURS)], "linewidth": 1.6, "alpha": 0.9}
            label = None if run else "training" if runs == 1 else "each run"
            axes.plot(panel.scores[:, run], panel.norms[:, run], label=label, **line)
        low, high = min(0.0, panel.scores.min().item()), panel.scores.max().item()
        if panel.others is not None:
            grid = torch.linspace(0, max(high, 1e-6), 200)
            theory = {"color": "black", "linestyle": "--", "linewidth": 1.3, "label": "theory"}
            axes.plot(grid, score_norm_curve(grid, panel.others), **theory)
        axes.set_title(panel.title, fontsize=10)
        axes.set(xlabel="score of the word", xlim=(low - 0.03 * (high - low), None), ylim=(0, None))
        clean_axes(axes)
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("norm of its embedding")
    # One legend, in a panel that has all kinds of lines.
    complete = next((axes for axes, panel in panels if panel.others is not None), panels[0][0])
    complete.legend(frameon=False, fontsize=8)
    return finish_figure(figure, path, title, "Norm against score of words over training")
