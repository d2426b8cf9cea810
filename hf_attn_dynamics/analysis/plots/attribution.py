# Licensed under the Apache License, Version 2.0.
"""Pictures of attention beside contributions (Pascal, Brunner & Wattenhofer 2021, Figures 1–7)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..attribution.statistics import MAP_TYPES, MapCorrelation
from ..attribution.token_removal import Faithfulness
from ..head_scores import HeadScores
from ..observers.positions import RelativeAttention
from .figures import COLOURS, LINES, MARKERS, clean_axes, finish_figure, fix_layout, label_points, literal, new_figure
from .matplotlib_names import Figure, MaxNLocator


def plot_map_correlation(
    correlation: MapCorrelation,
    path: str | Path | None = None,
    title: str = "",
    names: tuple[str, str] = ("attention", "contributions"),
) -> Figure:
    """Correlation of two kinds of maps by layer: a dot per head, a box per layer (Figures 1 and 6).

    The upper panel shows the Pearson, the lower panel the Spearman correlation. Heads outside of the whiskers of their
    box are named by layer and head.

    Args:
        correlation ([`MapCorrelation`]): The correlations.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.
        names (`tuple[str, str]`): Names of the two kinds of maps.
    """
    layers = len(_table(correlation.pearson))
    figure, panels = new_figure(max(6, 1.5 + 0.55 * layers), 5.4, rows=2, sharex=True)
    panels, named = panels.flatten(), []
    for axes, (name, scores) in zip(panels, (("Pearson", correlation.pearson), ("Spearman", correlation.spearman))):
        of_layers = [layer[~layer.isnan()] for layer in _table(scores)]
        boxes = axes.boxplot(
            [layer.numpy() for layer in of_layers],
            positions=range(layers),
            widths=0.55,
            showfliers=False,
            medianprops={"color": COLOURS[1], "linewidth": 2},
            boxprops={"color": "0.5"},
            whiskerprops={"color": "0.5"},
            capprops={"color": "0.5"},
        )
        outliers, dots = {}, []
        for layer, values in enumerate(of_layers):
            # Side by side, so that equal values do not hide each other.
            x = (
                layer + torch.linspace(-0.18, 0.18, len(values))
                if len(values) > 1
                else torch.full((len(values),), layer)
            )
            axes.plot(x, values, "o", color=COLOURS[0], alpha=0.55, markersize=4, markeredgewidth=0)
            low, high = (boxes["whiskers"][2 * layer + end].get_ydata()[1] for end in (0, 1))
            heads = (~_table(scores)[layer].isnan()).nonzero().flatten().tolist()
            for head, place in zip(heads, zip(x.tolist(), values.tolist())):
                dots.append(place)
                if not low <= place[1] <= high:
                    outliers[f"{layer}.{head}"] = place
        lowest = min((layer.min().item() for layer in of_layers if len(layer)), default=0)
        axes.set(ylabel=f"{name} correlation", ylim=(min(0, lowest) - 0.03, 1.03))
        clean_axes(axes)
        named.append((axes, outliers, dots))
    panels[1].set_xticks(range(layers), range(layers))
    panels[1].set_xlabel("layer")
    panels[0].plot([], [], "o", color=COLOURS[0], alpha=0.55, markersize=4, markeredgewidth=0, label="a head")
    panels[0].plot([], [], color=COLOURS[1], linewidth=2, label="median of the layer")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    finish_figure(figure, None, title, f"Correlation of {names[0]} with {names[1]}")
    # Only the layout of the whole figure tells where the dots are.
    fix_layout(figure)
    for axes, outliers, dots in named:
        label_points(axes, list(outliers.values()), list(outliers), dots)
    return finish_figure(figure, path)


def plot_relative_maps(
    maps: Mapping[str, RelativeAttention],
    path: str | Path | None = None,
    layers: Sequence[int] | None = None,
    title: str = "",
) -> Figure:
    """Maps by relative position: a line per head, divided by its maximum (Figures 2 and 3).

    Args:
        maps (`dict[str, RelativeAttention]`): Histograms by kind of map; each is a row of the figure.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        layers (`list[int]`, *optional*): The columns; by default three layers at 1/6, 2/5 and 5/6 of the depth, as in
            the paper.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there are no maps, or they have no such layer.
    """
    tables = {name: _histograms(one) for name, one in _given(maps).items()}
    depth = len(next(iter(tables.values())))
    if layers is None:
        layers = sorted({min(int(part * depth), depth - 1) for part in (1 / 6, 2 / 5, 5 / 6)})
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise ValueError(f"layers must be some of 0 to {depth - 1}, got {list(layers)}.")
    size = 0.7 + 2.7 * len(layers), 1.1 + 2 * len(tables)
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
    panels[0][-1].legend(edgecolor="none", framealpha=0.8, fontsize=9, loc="upper right")
    figure.supxlabel("offset of the token that is attended to, or contributes (tokens; − is the past)", fontsize=9)
    return finish_figure(figure, path, title, "Maps by relative position, each divided by its largest value")


def plot_centers_of_mass(
    maps: Mapping[str, RelativeAttention | HeadScores], path: str | Path | None = None, title: str = ""
) -> Figure:
    """Center of mass of the histograms by relative position (Figures 4 and 5).

    A dot per head, and a line through the means of the layers. Negative values are the past, positive ones the future.

    Args:
        maps (`dict[str, RelativeAttention]`): Histograms by kind of map, or their centers of mass as [`HeadScores`].
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there are no maps, or more kinds of maps than colours.
    """
    if len(_given(maps)) > len(COLOURS):
        raise ValueError(f"there are {len(maps)} maps, but only {len(COLOURS)} colours; give fewer.")
    figure, [[axes]] = new_figure(6.5, 4.3)
    for number, (name, given) in enumerate(maps.items()):
        centers = _table(given if isinstance(given, HeadScores) else given.center_of_mass())
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
    return finish_figure(figure, path, title, "Center of mass by layer; below 0 is the past")


def plot_faithfulness(results: Mapping[str, Faithfulness], path: str | Path | None = None, title: str = "") -> Figure:
    """Probability of the prediction while tokens are removed, a line for each attribution.

    Args:
        results (`dict[str, Faithfulness]`): Results by name of the attribution.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there are no results.
    """
    if not results:
        raise ValueError("results are empty: nothing to draw.")
    figure, [panels] = new_figure(9.5, 4.2, columns=2, sharey=True)
    for index, (name, result) in enumerate(results.items()):
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": LINES[index // len(COLOURS) % len(LINES)],
        }
        label = f"{name} ({result.gap:.2f})" if name else f"gap {result.gap:.2f}"
        for axes, curve in zip(panels, (result.most_first, result.least_first)):
            axes.plot(result.removed, curve, **style, markersize=3.5, linewidth=1.4, label=label)
    for axes, which in zip(panels, ("most", "least")):
        axes.set(xlabel=f"fraction of tokens removed,\n{which} important first", ylim=(0, 1.02))
        clean_axes(axes)
    panels[0].set_ylabel("probability of the prediction")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, title="attribution (gap)", loc="outside right", frameon=False, fontsize=8)
    return finish_figure(figure, path, title, "Faithfulness of attributions")


def plot_map_types(counts: Mapping[str, torch.Tensor], path: str | Path | None = None, title: str = "") -> Figure:
    """Fractions of the five types of maps in each layer, with a panel for each kind of map.

    Args:
        counts (`dict[str, torch.Tensor]`): Numbers of maps of shape `(layers, types)` in the order of `MAP_TYPES`, by
            kind of map.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there are no counts, or they do not fit the types.
    """
    for name, table in _given(counts).items():
        if table.dim() != 2 or table.shape[1] != len(MAP_TYPES):
            raise ValueError(f"counts of {name} must have shape (layers, {len(MAP_TYPES)}), got {tuple(table.shape)}.")
    figure, [panels] = new_figure(0.8 + 3.4 * len(counts), 4.2, columns=len(counts), sharey=True)
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
    handles, labels = panels[0].get_legend_handles_labels()
    columns = len(MAP_TYPES) if len(counts) > 1 else 3
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return finish_figure(figure, path, title, "Types of maps in each layer")


class MapExample(NamedTuple):
    """A head in one sentence: a title, its attention, and its contributions, both of shape `(query, key)`.

    `tokens` are those of the sentence, to label the axes.
    """

    title: str
    attention: torch.Tensor
    contribution: torch.Tensor
    tokens: Sequence[str] = ()


def plot_map_examples(examples: Sequence[MapExample], path: str | Path | None = None, title: str = "") -> Figure:
    """Attention (left) and contributions of the input (right) of single heads (Figure 7).

    Each map has its own colour scale, from 0 to its maximum.

    Args:
        examples (`list[MapExample]`): The maps; each example is a row.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there are no examples.
    """
    if not examples:
        raise ValueError("examples are empty: nothing to draw.")
    # Tokens need a line each.
    sides = [min(max(2.2, 0.115 * len(example.attention)), 3.5) for example in examples]
    longest = [max(map(len, example.tokens), default=0) for example in examples]
    size = 2 * max(sides) + 2.2, sum(side + 0.65 + 0.065 * length for side, length in zip(sides, longest)) + 0.6
    figure, panels = new_figure(*size, len(examples), 2, gridspec_kw={"height_ratios": sides})
    for line, example in zip(panels, examples):
        maps = {"attention weight": example.attention, "contribution of the input": example.contribution}
        for axes, (name, values) in zip(line, maps.items()):
            picture = axes.imshow(values.numpy(), cmap="Blues", vmin=0)
            is_left = axes is line[0]
            tokens = list(example.tokens)
            numbers = range(len(tokens))
            fontsize = 6.8 if len(tokens) <= 32 else 5.5
            tokens = [literal(token) for token in tokens]
            axes.set_xticks(numbers, tokens, rotation=90, fontsize=fontsize)
            axes.set_yticks(numbers, tokens if is_left else [""] * len(tokens), fontsize=fontsize)
            axes.tick_params(length=0, pad=1.5)
            axes.set_title("\n".join((example.title.replace("\n", ": "), name)), fontsize=9)
            bar = figure.colorbar(picture, ax=axes, shrink=0.75, pad=0.02)
            bar.ax.tick_params(labelsize=7)
            bar.outline.set_visible(False)
        line[0].set_ylabel("query", fontsize=9)
    figure.supxlabel("token that is attended to, or contributes", fontsize=9)
    return finish_figure(figure, path, title, "A head of each type of map, each in one sentence")


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
