# Licensed under the Apache License, Version 2.0.
"""What pictures share: figures and their files, axes, maps of layers × heads, and labels."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...models.head_sites import SITE_KINDS
from ..colours import COLOURS
from .matplotlib_names import (
    Axes,
    Figure,
    FigureCanvasAgg,
    FixedLocator,
    MaxNLocator,
    ScalarMappable,
    matplotlib,
)


# Colour-blind safe (Okabe & Ito); the first for the first run, and so on.
SITE_COLOURS = dict(zip(SITE_KINDS, COLOURS))
SITE_NAMES = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "decoder–encoder attention",
}
MARKERS = "osD^vP"
LINES = ("-", "--", ":")  # where colours repeat
Panel = TypeVar("Panel")
REMOVED = "0.65"  # colour of the crosses on removed heads
NARROWEST = 4.5  # width in inches of a figure whose title can be read


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **settings: Any) -> tuple[Figure, Any]:
    """An empty figure of a size in inches, and its panels as an array of shape `(rows, columns)`.

    Args:
        settings: Keyword arguments of `matplotlib.figure.Figure.subplots`; `layout` is "constrained" by default.
    """
    figure = Figure(figsize=(width, height), layout=settings.pop("layout", "constrained"))
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def panel_grid(
    lines: Sequence[Sequence[Panel]], width: float, height: float, **settings: Any
) -> tuple[Figure, list[tuple[Axes, Panel]]]:
    """A figure of a size in inches, and each panel with its axes; shorter lines leave the rest of their row empty.

    Args:
        lines (`list[list]`): Panels, row by row.
        settings: See [`new_figure`].
    """
    figure, grid = new_figure(width, height, len(lines), max(map(len, lines)), **settings)
    for axes, line in zip(grid, lines):
        for missing in axes[len(line) :]:
            missing.set_axis_off()
    return figure, [pair for axes, line in zip(grid, lines) for pair in zip(axes, line)]


def equal_panels(
    lines: Sequence[Sequence[Panel]], width: float, height: float
) -> tuple[Figure, list[tuple[Axes, Panel]]]:
    """The [`panel_grid`] of panels that have a size in inches, or are wider if there is only one in each row.

    Raises:
        ValueError: if there are no panels.
    """
    if not lines or not all(lines):
        raise ValueError("rows are empty: nothing to draw.")
    return panel_grid(lines, max(width * max(map(len, lines)), NARROWEST), height * len(lines) + 0.3)


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Saves a figure as PNG and SVG; returns the path of the PNG file."""
    path = Path(path).with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Text in the SVG file stays text, and equal figures give equal files.
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150)
        # Keeps the layout of the PNG file, whose computation takes half of the time; "none" would draw once more.
        figure.set_layout_engine(None)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path


def literal(text: str) -> str:
    """A text of the user, such as a token, for labels of ticks and wrapped texts: dollar signs enclose no formulas."""
    return text.replace("$", r"\$")


def _show_literally(figure: Figure) -> None:
    """Shows titles, names and annotations as they are: dollar signs enclose no formulas."""
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    texts = [*figure.texts, *(text for legend in legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    for text in texts:
        # Those that are wrapped are parsed in any case, see `literal`.
        if not text.get_wrap():
            text.set_parse_math(False)


def finish_figure(figure: Figure, path: str | Path | None, title: str = "", what: str = "") -> Figure:
    """Adds the title, and saves the figure if `path` is given.

    Args:
        title (`str`): Model and data, in the lines below the first.
        what (`str`): What the figure shows, in the first line.
    """
    if lines := "\n".join(filter(None, (what, title))):
        # Smaller letters where figures are narrow: a title is not wider than its figure.
        figure.suptitle(literal(lines), fontsize=min(11, 2 + 1.4 * figure.get_figwidth()), wrap=True)
    _show_literally(figure)
    if path is not None:
        save_figure(figure, path)
    return figure


def fix_layout(figure: Figure) -> None:
    """Computes the layout of a figure and keeps it, for texts whose places depend on it.

    Positions are rounded: the solver of the layout differs in the last digits, but equal figures give equal files.
    """
    _show_literally(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    for axes in figure.axes:
        axes.set_position([round(value, 6) for value in axes.get_position(original=True).bounds])


def clean_axes(axes: Axes) -> None:
    """Hides the top and right spines, and adds a faint horizontal grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)


def clean_map(axes: Axes, table: torch.Tensor, cell: float, names: tuple[str, str] = ("layer", "head")) -> None:
    """Labels the axes of a map of layers × heads, hides its frame, and marks removed heads by crosses.

    Args:
        axes (`Axes`): Axes of the map.
        table (`torch.Tensor` of shape `(layers, heads)`): NaN for removed heads.
        cell (`float`): Size of a cell in inches.
        names (`tuple[str, str]`): Labels of rows and columns.
    """
    for layer, head in table.isnan().nonzero().tolist():
        axes.plot(head, layer, marker="x", color=REMOVED, markersize=14 * cell)
    axes.set(xlabel=names[1], ylabel=names[0])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.tick_params(which="both", length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def scale_limits(tables: Sequence[torch.Tensor], limits: tuple[float, float]) -> tuple[float, float, bool]:
    """Ends of a colour scale on which most of the scores are told apart.

    The scale begins at the lower one of `limits`, and ends at the highest score. At most one score in fifty may be
    above it, if these are outliers by the rule of Tukey (1977): more than 1.5 interquartile ranges above the third
    quartile.

    Returns:
        `tuple[float, float, bool]`: both ends, and whether scores are above the scale.
    """
    low, high = limits
    scores = torch.cat([table.flatten().double() for table in tables])
    scores = scores[scores.isfinite()].clamp(max=high)
    if not len(scores) or scores.max() <= low:
        return low, high, False
    first, third = scores.quantile(torch.tensor([0.25, 0.75], dtype=scores.dtype))
    inside = scores[scores <= third + 1.5 * (third - first)]
    outliers = len(scores) - len(inside)
    clipped = 0 < outliers <= len(scores) / 50 and inside.max() > low
    return low, (inside if clipped else scores).max().item(), clipped


def print_scores(axes: Axes, table: torch.Tensor, cell: float, colours: ScalarMappable) -> None:
    """Prints the score of each head into its cell, with two digits; in white on dark cells."""
    for (layer, head), score in zip(torch.cartesian_prod(*map(torch.arange, table.shape)).tolist(), table.flatten()):
        if score.isfinite():
            red, green, blue, _ = colours.to_rgba(score.item())
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            style = {"ha": "center", "va": "center", "color": "white" if is_dark else "black"}
            axes.text(head, layer, short_number(score.item()), fontsize=min(8, 20 * cell), **style)


def short_number(value: float) -> str:
    """A number with two significant digits after the point, without a leading zero: `.07`, `1`, `-.5`, `12`."""
    if abs(value) >= 10:
        return f"{value:.0f}"
    text = f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"
    text = text.replace("0.", ".", 1) if abs(value) < 1 else text
    return {".00": "0", "-.00": "0", "1.00": "1", "1.0": "1", "-1.0": "-1"}.get(text, text)


def arrange(panels: int, width: float, height: float, widest: float) -> tuple[int, int]:
    """Rows and columns of panels of a size in inches, close to a page in landscape and at most `widest`."""
    fitting = [columns for columns in range(1, panels + 1) if columns == 1 or columns * width <= widest]
    shapes = {columns: columns * width / (-(-panels // columns) * height) for columns in fitting}
    columns = min(fitting, key=lambda columns: abs(math.log(shapes[columns] / 1.5)))
    return -(-panels // columns), columns


def layer_colours(count: int) -> list[Any]:
    """A colour for each of some layers: told apart if there are few, a continuum if there are many."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    # The last colours of viridis are too light for lines and letters.
    return [matplotlib.colormaps["viridis"](0.85 * index / (count - 1)) for index in range(count)]


def number_heads(axes: Axes, table: torch.Tensor, cell: float) -> None:
    """Numbers every layer and every head of a map, so that each head can be named; every few if cells are small.

    Args:
        cell (`float`): Size of a cell in inches.
    """
    for axis, count, room in ((axes.yaxis, table.shape[0], 0.13), (axes.xaxis, table.shape[1], 0.19)):
        every = math.ceil((room if count > 10 else 0.12) / cell - 1e-6)
        axis.set_major_locator(FixedLocator(range(0, count, every)))


def label_points(
    axes: Axes,
    points: Sequence[Sequence[float]],
    names: Sequence[str],
    others: Sequence[Sequence[float]] = (),
    fontsize: float = 7.5,
) -> None:
    """Writes a name beside each point such that names cover neither each other nor points, where there is room.

    The layout of the figure must be final. A thin line leads from names that are not beside their point.

    Args:
        others: Points without a name.
    """
    if not points:
        return
    axes.autoscale(False)
    renderer, dot = FigureCanvasAgg(axes.figure).get_renderer(), axes.figure.dpi / 72
    centres = axes.transData.transform(points)
    # Names and points that are already there: left, bottom, right, top in pixels.
    occupied = axes.transData.transform([*points, *others]).tolist()
    taken = [(x - 4 * dot, y - 4 * dot, x + 4 * dot, y + 4 * dot) for x, y in occupied]
    frame = axes.get_window_extent()
    for (x, y), point, name in zip(centres.tolist(), points, names):
        text = axes.annotate(name, point, (0, 0), textcoords="offset points", fontsize=fontsize, color="0.25")
        text.set(ha="center", va="center")
        box = text.get_window_extent(renderer)
        half_width, half_height = box.width / 2 + dot, box.height / 2

        def overlap(offset: tuple[float, float], x=x, y=y, size=(half_width, half_height)) -> float:
            left, bottom = x + offset[0] - size[0], y + offset[1] - size[1]
            right, top = left + 2 * size[0], bottom + 2 * size[1]
            outside = max(0, frame.x0 - left) + max(0, right - frame.x1)
            outside += max(0, frame.y0 - bottom) + max(0, top - frame.y1)
            areas = (
                max(0, min(right, one[2]) - max(left, one[0])) * max(0, min(top, one[3]) - max(bottom, one[1]))
                for one in taken
            )
            return sum(areas) + 100 * outside

        offsets = [
            ((half_width + reach * dot) * math.cos(angle), (half_height + reach * dot) * math.sin(angle))
            for reach in range(4, 120, 3)
            for angle in (math.pi / 8 * turn for turn in range(16))
        ]
        best = next((offset for offset in offsets if not overlap(offset)), None) or min(offsets, key=overlap)
        left, bottom = x + best[0] - half_width, y + best[1] - half_height
        taken.append((left, bottom, left + 2 * half_width, bottom + 2 * half_height))
        text.xyann = best[0] / dot, best[1] / dot
        if math.hypot(best[0], best[1]) > half_width + 12 * dot:
            ends = axes.transData.inverted().transform([(x, y), (x + 0.8 * best[0], y + 0.8 * best[1])])
            axes.plot(*ends.T, color="0.6", linewidth=0.5, zorder=1)


def white_lines(axes: Axes, table: torch.Tensor, width: float) -> None:
    """Draws white lines between the cells of a map of layers × heads."""
    axes.set_xticks([head - 0.5 for head in range(1, table.shape[1])], minor=True)
    axes.set_yticks([layer - 0.5 for layer in range(1, table.shape[0])], minor=True)
    axes.grid(which="minor", color="white", linewidth=width)
