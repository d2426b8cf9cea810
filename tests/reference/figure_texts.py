# Licensed under the Apache License, Version 2.0.
"""Measures the texts of figures, as the Agg renderer draws them."""

import itertools

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def shown_texts(figure: Figure) -> list[Text]:
    """All texts that are drawn; labels of ticks beyond the limits of an axis are not."""
    drawn: dict[int, Text] = {}
    draw = Text.draw

    def recorded(text, *args, **kwargs):
        drawn[id(text)] = text
        return draw(text, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", recorded)
        FigureCanvasAgg(figure).draw()
    return [text for text in drawn.values() if text.get_text().strip() and text.get_visible()]


def overlaps(figure: Figure, least: float = 1.5) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other by more than a margin in pixels, in both directions."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown_texts(figure)]
    return [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > least and min(a.y1, b.y1) - max(a.y0, b.y0) > least
    ]


def smallest_text(figure: Figure) -> float:
    """Size in pixels of the smallest letters, if the figure is 800 pixels wide or, if it is narrower, as it is."""
    scale = min(800 / figure.get_figwidth(), 150) / 72
    return min(text.get_fontsize() for text in shown_texts(figure)) * scale


def drawn_panels(figure: Figure) -> list[Axes]:
    """Axes that are not switched off."""
    return [axes for axes in figure.axes if axes.axison]
