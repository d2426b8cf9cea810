# Licensed under the Apache License, Version 2.0.
"""Pictures without layout and in few dots, for tests in which they take most of the time."""

from pathlib import Path

from matplotlib.figure import Figure


def draw_roughly(patch) -> None:
    """Has all pictures drawn roughly from now on, and once: an SVG, which shows the same, is empty.

    Args:
        patch (`pytest.MonkeyPatch`): What can undo it.
    """
    savefig = Figure.savefig

    def rough(figure, path, **settings):
        if Path(path).suffix == ".svg":
            Path(path).write_text("<svg/>")
            return
        figure.set_layout_engine(None)
        savefig(figure, path, **{**settings, "dpi": 20})

    patch.setattr(Figure, "savefig", rough)
