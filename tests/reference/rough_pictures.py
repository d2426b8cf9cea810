# Licensed under the Apache License, Version 2.0.
"""Pictures of which only the words are written, for tests in which drawing takes most of the time."""

import html
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image


DRAW = Figure.savefig


def draw_truly(patch) -> None:
    """Undoes [`draw_roughly`], which lasts for all later tests of its process."""
    patch.setattr(Figure, "savefig", DRAW)


def draw_roughly(patch) -> None:
    """Has SVG pictures hold nothing but their words from now on, a line each; those that are dots are blank.

    Args:
        patch (`pytest.MonkeyPatch`): What can undo it.
    """

    def rough(figure, path, **settings):
        if hasattr(path, "write") or Path(path).suffix == ".png":
            Image.new("L", (8, 6)).save(path, "PNG")
            return
        words = [f"<text>{html.escape(text.get_text())}</text>" for text in figure.findobj(Text)]
        Path(path).write_text("\n".join(["<svg>", *words, "</svg>"]))

    patch.setattr(Figure, "savefig", rough)
