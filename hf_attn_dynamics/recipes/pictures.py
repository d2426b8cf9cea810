# Licensed under the Apache License, Version 2.0.
"""Pictures of runs, each drawn from a file beside it that keeps what it shows.

`gates.png` is drawn from `gates.plot.json`, so that `hf-attn redraw FOLDER` can draw it again without the models.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._files import read_json, write_text
from .._stub import public_names
from ..analysis.head_timeline import HeadTimeline


ENDING = ".plot.json"
DIGITS, DIGITS_OF_RESULTS = 6, 4  # significant ones; results have a number per head, or per head and offset
ANALYSIS = __package__.rpartition(".")[0] + ".analysis"
# Modules of the plots, of their panels and of results, which are imported only where they are drawn.
MODULES = {
    **public_names(ANALYSIS).module_of,
    "Histogram": f"{__package__}.score_norm_plots",
    "Series": f"{__package__}.score_norm_plots",
    "plot_agreement": f"{__package__}.lexical_plots",
    "plot_attended": f"{__package__}.score_norm_plots",
    "plot_copying_curves": f"{__package__}.copying_plots",
    "plot_heat_maps": f"{__package__}.sweep_plots",
    "plot_histograms": f"{__package__}.score_norm_plots",
    "plot_keyword_drift": f"{__package__}.copying_plots",
    "plot_series": f"{__package__}.score_norm_plots",
    "plot_students": f"{__package__}.distil_plots",
}
PLOTS = {name for name in MODULES if name.startswith("plot_")}
PANELS = ("Curves", "Histogram", "MapExample", "Series", "SourceMap")
RESULTS = (
    "Faithfulness",
    "HeadDistances",
    "HeadScores",
    "MapCorrelation",
    "RelativeAttention",
    "RoleScores",
    "SinkAttention",
)


def _imported(name: str) -> Any:
    return getattr(importlib.import_module(MODULES[name]), name)


def draw(plot: Callable[..., Any], path: str | Path, *args: Any, **settings: Any) -> None:
    """Writes what a picture shows to `NAME.plot.json`, and draws the picture from this file.

    Args:
        plot (callable): One of [`PLOTS`].
        path (`str` or `Path`): The picture, as PNG and SVG.
        args, settings: Other arguments of `plot`, in its order without `path`.
    """
    redraw(keep(plot, path, *args, **settings))


def keep_all(drawings: Mapping[str, Callable[..., Any]], folder: Path) -> None:
    """Writes what the pictures of a page show, for [`redraw`]; the page has drawn them.

    Args:
        drawings (`dict[str, functools.partial]`): Plots with their arguments, by name of the picture.
    """
    for name, drawing in drawings.items():
        keep(drawing.func, folder / name, *drawing.args, **drawing.keywords)


def keep(plot: Callable[..., Any], path: str | Path, *args: Any, **settings: Any) -> Path:
    """Writes what a picture shows to `NAME.plot.json`, see [`draw`]; returns this file."""
    signature = inspect.signature(plot)
    others = [parameter for name, parameter in signature.parameters.items() if name != "path"]
    values = signature.replace(parameters=others).bind(*args, **settings).arguments
    record = Path(path).with_suffix(ENDING)
    content = {"plot": plot.__name__, "arguments": {name: _packed(value) for name, value in values.items()}}
    write_text(record, json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n")
    return record


def redraw(record: str | Path) -> Path:
    """Draws a picture from its file.

    Args:
        record (`str` or `Path`): File that [`draw`] wrote, `NAME.plot.json`.

    Returns:
        `Path`: the picture as PNG; the SVG is beside it.

    Raises:
        ValueError: if the file is not one that [`draw`] wrote.
    """
    plot, arguments = load_picture(record)
    record = Path(record)
    picture = record.with_name(record.name.removesuffix(ENDING) + ".png")
    plot(**arguments, path=picture)
    return picture


def load_picture(record: str | Path) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The plot of a picture and its arguments, from the file that [`draw`] wrote."""
    content = read_json(record)
    if not isinstance(content, dict) or content.get("plot") not in PLOTS or "arguments" not in content:
        raise ValueError(f"{record} does not hold the plot and the arguments of a picture.")
    plot = _imported(content["plot"])
    arguments = {name: _unpacked(value) for name, value in content["arguments"].items()}
    if unknown := sorted(arguments.keys() - inspect.signature(plot).parameters.keys()):
        raise ValueError(f"{record} has the argument {unknown[0]!r}, which {plot.__name__} does not take.")
    return plot, arguments


def _packed(value: Any, digits: int = DIGITS) -> Any:
    """A value as JSON; objects have one key, which begins with `$`."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        tensor = torch.as_tensor(value).detach().cpu()
        return {"$tensor": _packed(tensor.tolist(), digits), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if isinstance(value, (float, np.floating)):
        # JSON has neither NaN nor infinity; no picture shows infinity.
        return float(f"{value:.{digits}g}") if np.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    if type(value).__name__ in RESULTS:
        return {f"${type(value).__name__}": _packed(value.to_dict(), DIGITS_OF_RESULTS)}
    if isinstance(value, HeadTimeline):
        return {"$HeadTimeline": value.to_csv()}
    if type(value).__name__ in PANELS:
        return {f"${type(value).__name__}": {name: _packed(own, digits) for name, own in value._asdict().items()}}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _packed(own, digits) for key, own in value.items()}
        return {"$pairs": [[_packed(key, digits), _packed(own, digits)] for key, own in value.items()]}
    if isinstance(value, (list, tuple, range)):
        return [_packed(own, digits) for own in value]
    return value


def _unpacked(value: Any) -> Any:
    """The inverse of [`_packed`], with lists in place of tuples."""
    if isinstance(value, list):
        return [_unpacked(own) for own in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(_with_nan(value["$tensor"]) if dtype.is_floating_point else value["$tensor"], dtype=dtype)
    if "$HeadTimeline" in value:
        return HeadTimeline.from_csv(value["$HeadTimeline"])
    if "$pairs" in value:
        return {_key(key): _unpacked(own) for key, own in value["$pairs"]}
    for name in RESULTS:
        if f"${name}" in value:
            return _imported(name).from_dict(value[f"${name}"])
    for name in PANELS:
        if f"${name}" in value:
            return _imported(name)(**{field: _unpacked(own) for field, own in value[f"${name}"].items()})
    return {key: _unpacked(own) for key, own in value.items()}


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _with_nan(values: Any) -> Any:
    if isinstance(values, list):
        return [_with_nan(own) for own in values]
    return float("nan") if values is None else values
