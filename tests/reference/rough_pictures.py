# Licensed under the Apache License, Version 2.0.
"""Pictures without layout and in few dots, for tests in which they take most of the time."""

from matplotlib.figure import Figure


def draw_roughly(patch) -> None:
    """Has all pictures drawn roughly from now on.

    Args:
        patch (`pytest.MonkeyPatch`): What can undo it.
    """
    savefig = Figure.savefig

    def rough(figure, path, **settings):
        figure.set_layout_engine("none")
        savefig(figure, path, **{**settings, "dpi": 20})

    patch.setattr(Figure, "savefig", rough)
