# Licensed under the Apache License, Version 2.0.
"""Pictures without layout and drawn once, for tests in which they take most of the time."""

from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image


def draw_roughly(patch) -> None:
    """Has all pictures drawn without layout from now on, as SVG; those that show the same in dots are blank.

    Args:
        patch (`pytest.MonkeyPatch`): What can undo it.
    """
    savefig = Figure.savefig

    def rough(figure, path, **settings):
        if Path(path).suffix == ".png":
            Image.new("L", (8, 6)).save(path)
            return
        figure.set_layout_engine(None)
        savefig(figure, path, **settings)

    patch.setattr(Figure, "savefig", rough)
