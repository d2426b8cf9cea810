# Licensed under the Apache License, Version 2.0.
"""Pictures of heads and feed-forward units that pruned models keep."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...models.head_sites import SITE_KINDS
from .figures import SITE_COLOURS, SITE_NAMES, clean_axes, finish_figure, new_figure
from .matplotlib_names import Axes, Figure, MaxNLocator


LEFT = "0.92"  # colour of what was removed


def plot_parts_per_layer(
    heads: Mapping[str, Sequence[int]],
    units: Mapping[str, Sequence[int]],
    path: str | Path | None = None,
    num_heads: Mapping[str, int] | None = None,
    num_units: Mapping[str, int] | None = None,
    title: str = "",
) -> Figure:
    """Number of heads and units that stay in each layer: a column of panels for each kind of site.

    Args:
        heads, units (`dict[str, list[int]]`): Number of heads or units that stay in each layer, by kind of site.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        num_heads, num_units (`dict[str, int]`, *optional*): Number in a dense layer, by kind of site; adds pale bars.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there is nothing to draw, or a kind of site is unknown.
    """
    kinds = [kind for kind in SITE_KINDS if kind in heads or kind in units]
    if unknown := sorted({*heads, *units} - set(kinds)):
        raise ValueError(f"heads or units name the site {unknown[0]!r}, which is not one of {', '.join(SITE_KINDS)}.")
    if not kinds:
        raise ValueError("heads and units are empty: nothing to draw.")
    rows = [("heads", heads, num_heads or {}), ("units", units, num_units or {})]
    rows = [row for row in rows if row[1]]
    layers = max(len(left) for _, tables, _ in rows for left in tables.values())
    width = max(3.2, 1 + 0.34 * layers)
    figure, panels = new_figure(0.8 + width * len(kinds), 0.9 + 2 * len(rows), len(rows), len(kinds))
    for line, (part, tables, dense) in zip(panels, rows):
        for axes, kind in zip(line, kinds):
            if kind in tables:
                _draw(axes, tables[kind], dense.get(kind), kind, part)
            else:
                axes.set_axis_off()
    return finish_figure(figure, path, title, "What is left in each layer")


def _draw(axes: Axes, left: Sequence[int], dense: int | None, kind: str, part: str) -> None:
    layers = range(len(left))
    if dense is not None:
        axes.bar(layers, [dense] * len(left), width=0.75, color=LEFT)
    bars = axes.bar(layers, left, width=0.75, color=SITE_COLOURS[kind])
    axes.bar_label(bars, fontsize=7 if max(left, default=0) > 99 else 9, color="0.3", padding=1)
    name = SITE_NAMES[kind] if part == "heads" else f"{kind} feed-forward blocks"
    of = "" if dense is None else f" of {dense * len(left):,}"
    axes.set_title(f"{name}: {sum(left):,}{of} {part}", fontsize=9)
    axes.set(xlabel="layer", ylabel=part)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    clean_axes(axes)
