# Licensed under the Apache License, Version 2.0.
"""The names of matplotlib that pictures use. Without matplotlib, functions that draw can still be imported."""

from typing import TYPE_CHECKING, Any, NoReturn


class _Missing:
    """Stands for all names of matplotlib where it is not installed: raises ImportError when a picture is drawn."""

    def _refuse(self) -> NoReturn:
        raise ImportError("pictures need matplotlib: pip install matplotlib.")

    def __call__(self, *args: Any, **settings: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        # Special methods are asked for by type annotations and by inspection.
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter
except ModuleNotFoundError:
    if not TYPE_CHECKING:
        matplotlib = Axes = FigureCanvasAgg = ScalarMappable = Figure = Line2D = Patch = Rectangle = _Missing()
        BoundaryNorm = LinearSegmentedColormap = ListedColormap = Normalize = _Missing()
        FixedLocator = MaxNLocator = NullLocator = ScalarFormatter = _Missing()

__all__ = [
    "Axes",
    "BoundaryNorm",
    "Figure",
    "FigureCanvasAgg",
    "FixedLocator",
    "Line2D",
    "LinearSegmentedColormap",
    "ListedColormap",
    "MaxNLocator",
    "Normalize",
    "NullLocator",
    "Patch",
    "Rectangle",
    "ScalarFormatter",
    "ScalarMappable",
    "matplotlib",
]
