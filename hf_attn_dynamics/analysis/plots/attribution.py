# Licensed under the Apache License, Version 2.0.
"""Pictures of attention beside contributions (Pascal, Brunner & Wattenhofer 2021, Figures 1–7)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..attribution.statistics import MAP_TYPES, MapCorrelation
from ..observers.positions import RelativeAttention
from .base import COLOURS, MARKERS, clean_axes, finish_figure, new_figure


def plot_map_correlation(correlation: MapCorrelation, path: str | Path | None = None, title: str = "") -> Figure:
    """Correlation of two kinds of maps by layer: a dot per head, a box per layer (Figures 1 and 6).

    The upper panel shows the Pearson, the lower panel the Spearman correlation.

    Args:
        correlation ([`MapCorrelation`]): The correlations.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Title of the figure.
    """
    layers = len(_table(correlation.pearson))
    figure, panels = new_figure(1.5 + 0.55 * max(layers, 6), 5, rows=2, sharex=True)
    panels = panels.flatten()
    for axes, (name, scores) in zip(panels, (("Pearson", correlation.pearson), ("Spearman", correlation.spearman))):
        of_layers = [layer[~layer.isnan()] for layer in _table(scores)]
        axes.boxplot(
            [layer.numpy() for layer in of_layers],
            positions=range(layers),
            widths=0.55,
            showfliers=False,
            medianprops={"color": COLOURS[1], "linewidth": 2},
            boxprops={"color": "0.5"},
            whiskerprops={"color": "0.5"},
            capprops={"color": "0.5"},
        )
        for layer, values in enumerate(of_layers):
            # Side by side, so that equal values do not hide each other.
            x = layer + torch.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else [layer] * len(values)
            axes.plot(x, values, "o", color=COLOURS[0], alpha=0.55, markersize=4, markeredgewidth=0)
        lowest = min((layer.min().item() for layer in of_layers if len(layer)), default=0)
        axes.set(ylabel=f"{name} correlation", ylim=(min(0, lowest) - 0.03, 1.03))
        clean_axes(axes)
    panels[1].set_xticks(range(layers), range(layers))
    panels[1].set_xlabel("layer")
    return finish_figure(figure, path, title)


def plot_relative_maps(
    maps: Mapping[str, RelativeAttention], path: str | Path | None = None, layers: Sequence[int] | None = None
) -> Figure:
    """Maps by relative position: a line per head, divided by its maximum (Figures 2 and 3).

    Args:
        maps (`dict[str, RelativeAttention]`): Histograms by kind of map; each is a row of the figure.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        layers (`list[int]`, *optional*): The columns; by default three layers at 1/6, 2/5 and 5/6 of the depth, as in
            the paper.

    Raises:
        ValueError: if there are no maps, or they have no such layer.
    """
    tables = {name: _histograms(one) for name, one in _given(maps).items()}
    depth = len(next(iter(tables.values())))
    if layers is None:
        layers = sorted({min(int(part * depth), depth - 1) for part in (1 / 6, 2 / 5, 5 / 6)})
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise ValueError(f"layers must be some of 0 to {depth - 1}, got {list(layers)}.")
    size = 0.7 + 3 * len(layers), 0.6 + 2 * len(tables)
    figure, panels = new_figure(*size, len(tables), len(layers), sharex=True, sharey=True)
    for row, (name, table) in zip(panels, tables.items()):
        row[0].set_ylabel(f"{name},\nrelative to its largest", fontsize=9)
        offsets = maps[name].offsets
        seen = ~table.isnan().all(0).all(0)
        for axes, layer in zip(row, layers):
            values = table[layer][:, seen]
            values = values[~values.isnan().all(-1)]
            for head in values:
                axes.plot(offsets[seen], head / head[~head.isnan()].max(), color=COLOURS[0], alpha=0.3, linewidth=0.8)
            mean = values.nanmean(0)
            axes.plot(offsets[seen], mean / mean.max(), color=COLOURS[1], linewidth=1.8)
            axes.axvline(0, color="0.6", linewidth=0.8, linestyle=":")
            axes.set_ylim(0, 1.05)
            clean_axes(axes)
    for axes, layer in zip(panels[0], layers):
        axes.set_title(f"layer {layer}", fontsize=10)
    panels[0][-1].plot([], [], color=COLOURS[0], alpha=0.5, linewidth=0.8, label="a head")
    panels[0][-1].plot([], [], color=COLOURS[1], linewidth=1.8, label="mean of heads")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.supxlabel("offset of the token that is attended to, or contributes", fontsize=9)
    return finish_figure(figure, path)


def plot_centers_of_mass(
    maps: Mapping[str, RelativeAttention], path: str | Path | None = None, title: str = ""
) -> Figure:
    """Center of mass of the histograms by relative position (Figures 4 and 5).

    A dot per head, and a line through the means of the layers. Negative values are the past, positive ones the future.

    Args:
        maps (`dict[str, RelativeAttention]`): Histograms by kind of map.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Title of the figure.

    Raises:
        ValueError: if there are no maps, or more kinds of maps than colours.
    """
    if len(_given(maps)) > len(COLOURS):
        raise ValueError(f"there are {len(maps)} maps, but only {len(COLOURS)} colours; give fewer.")
    figure, [[axes]] = new_figure(6.5, 4)
    for number, (name, positions) in enumerate(maps.items()):
        centers = _table(positions.center_of_mass())
        layers, heads = centers.shape
        colour, shift = COLOURS[number], 0.14 * (number - (len(maps) - 1) / 2)
        x = (torch.arange(layers)[:, None] + shift).expand(-1, heads)
        axes.plot(x.flatten(), centers.flatten(), "o", color=colour, alpha=0.25, markersize=3, markeredgewidth=0)
        axes.plot(range(layers), centers.nanmean(1), color=colour, marker=MARKERS[number], linewidth=2, label=name)
    axes.axhline(0, color="0.4", linewidth=1, linestyle=":")
    axes.set(xlabel="layer", ylabel="center of mass (tokens)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(frameon=False, fontsize=9)
    clean_axes(axes)
    return finish_figure(figure, path, title)


def plot_map_types(counts: Mapping[str, torch.Tensor], path: str | Path | None = None) -> Figure:
    """Fractions of the five types of maps in each layer, with a panel for each kind of map.

    Args:
        counts (`dict[str, torch.Tensor]`): Numbers of maps of shape `(layers, types)` in the order of `MAP_TYPES`, by
            kind of map.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.

    Raises:
        ValueError: if there are no counts, or they do not fit the types.
    """
    for name, table in _given(counts).items():
        if table.dim() != 2 or table.shape[1] != len(MAP_TYPES):
            raise ValueError(f"counts of {name} must have shape (layers, {len(MAP_TYPES)}), got {tuple(table.shape)}.")
    figure, [panels] = new_figure(0.8 + 3.4 * len(counts), 3.8, columns=len(counts), sharey=True)
    for axes, (name, table) in zip(panels, counts.items()):
        fractions = table / table.sum(-1, keepdim=True)
        below = torch.zeros(len(fractions))
        for colour, kind, fraction in zip(COLOURS, MAP_TYPES, fractions.T.nan_to_num()):
            axes.bar(range(len(fraction)), fraction, bottom=below, color=colour, width=0.85, label=kind)
            below = below + fraction
        axes.set(xlabel="layer", ylim=(0, 1))
        axes.set_title(name, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        clean_axes(axes)
    panels[0].set_ylabel("fraction of maps")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )
    return finish_figure(figure, path)


class MapExample(NamedTuple):
    """A head in one sentence: a title, its attention, and its contributions, both of shape `(query, key)`.

    `tokens` are those of the sentence, to label the axes.
    """

    title: str
    attention: torch.Tensor
    contribution: torch.Tensor
    tokens: Sequence[str] = ()


def plot_map_examples(examples: Sequence[MapExample], path: str | Path | None = None) -> Figure:
    """Attention (above) and contributions of the input (below) of single heads (Figure 7).

    Each map has its own colour scale, from 0 to its maximum.

    Args:
        examples (`list[MapExample]`): The maps; each example is a column.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.

    Raises:
        ValueError: if there are no examples.
    """
    if not examples:
        raise ValueError("examples are empty: nothing to draw.")
    figure, panels = new_figure(0.6 + 2.2 * len(examples), 4.9, 2, len(examples))
    for column, example in zip(panels.T, examples):
        column[0].set_title(example.title, fontsize=9)
        for axes, values in zip(column, (example.attention, example.contribution)):
            axes.imshow(values.numpy(), cmap="Blues", vmin=0)
            axes.set_xticks([])
            axes.set_yticks([])
    for axes, name in zip(panels[:, 0], ("attention", "contribution of the input")):
        axes.set_ylabel(name)
    figure.supxlabel("token that is attended to, or contributes", fontsize=9)
    return finish_figure(figure, path)


def _given(values: Mapping) -> Mapping:
    if not values:
        raise ValueError("maps are empty: nothing to draw.")
    return values


def _table(scores: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Scores of the single kind of site for which contributions are defined."""
    (table,) = scores.values()
    return table


def _histograms(positions: RelativeAttention) -> torch.Tensor:
    (table,) = positions.attention.values()
    return table
