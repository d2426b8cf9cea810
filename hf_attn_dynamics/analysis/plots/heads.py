# Licensed under the Apache License, Version 2.0.
"""Pictures of head functions, roles, relative attention and distances between heads."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..head_scores import HeadScores
from ..observers.distances import HeadDistances
from ..observers.positions import RelativeAttention
from ..observers.roles import SAME, RoleScores
from ..observers.sinks import SinkAttention
from .figures import (
    COLOURS,
    MARKERS,
    REMOVED,
    SITE_NAMES,
    arrange,
    clean_axes,
    clean_map,
    finish_figure,
    fix_layout,
    label_points,
    layer_colours,
    new_figure,
    number_heads,
)
from .matplotlib_names import Figure, Line2D, MaxNLocator, Patch, Rectangle


NONE = "0.93"  # colour of heads without a function
FUNCTION_COLOURS = (*COLOURS, "#F0E442", "#666666")


def plot_head_functions(
    functions: Mapping[str, Sequence[tuple] | None],
    scores: HeadScores,
    path: str | Path | None = None,
    title: str = "",
) -> Figure:
    """Functions of the heads: a cell per head, with a colour for each function (Voita et al. 2019, Figure 1).

    Args:
        functions (`dict[str, list]`): Heads by name of the function, as tuples that begin with site, layer and head;
            `None` for a function that was not measured.
        scores ([`HeadScores`]): Any scores of the same model; NaN for removed heads.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there are more functions than colours.
    """
    if len(functions) > len(FUNCTION_COLOURS):
        raise ValueError(
            f"there are {len(functions)} functions, but only {len(FUNCTION_COLOURS)} colours; give fewer."
        )
    colours = dict(zip(functions, FUNCTION_COLOURS))
    players = {name: {tuple(head[:3]) for head in found} for name, found in functions.items() if found is not None}
    cell = min(0.42, 11 / sum(table.shape[1] for table in scores.values()))
    width = sum(max(cell * table.shape[1], 1.6) + 0.5 for table in scores.values()) + 2.2
    height = max(table.shape[0] for table in scores.values()) * cell + 1.1
    figure, [panels] = new_figure(width, max(height, 0.3 * len(functions) + 1.2) + 0.3, columns=len(scores))
    for axes, (kind, table) in zip(panels, scores.items()):
        layers, heads = table.shape
        for layer in range(layers):
            for head in range(heads):
                own = [name for name, heads_of in players.items() if (kind, layer, head) in heads_of]
                # Several functions share the cell side by side.
                for index, name in enumerate(own or [None]):
                    part = 0.9 / max(len(own), 1)
                    left = head - 0.45 + index * part
                    colour = colours[name] if name else NONE
                    axes.add_patch(Rectangle((left, layer - 0.45), part, 0.9, facecolor=colour, edgecolor="none"))
        axes.set(xlim=(-0.5, heads - 0.5), ylim=(layers - 0.5, -0.5), aspect="equal")
        axes.set_title(SITE_NAMES[kind] if len(scores) > 1 else "", fontsize=10)
        clean_map(axes, table, cell)
        number_heads(axes, table, cell)
    legend = [
        Patch(color=colour, label=f"{name} ({len(players[name])})")
        for name, colour in colours.items()
        if name in players
    ]
    legend.append(Patch(color=NONE, label="none of these"))
    unknown = [name for name in functions if name not in players]
    legend += [Patch(fill=False, linewidth=0, label=f"{name}: not measured") for name in unknown]
    figure.legend(handles=legend, loc="outside right", frameon=False)
    return finish_figure(figure, path, title, "Functions of the attention heads")


def plot_functions_kept(
    kept: Mapping[str, Mapping[str, int | None]], path: str | Path | None = None, title: str = ""
) -> Figure:
    """Number of heads with each function in subsets of the heads (Voita et al. 2019, Figure 8).

    Args:
        kept (`dict[str, dict[str, int]]`): For each subset, such as a pruned model, the number of `heads` and of heads
            with each function, as `role_overlap` counts them, or `None` if it was not measured; the set of all heads
            comes first.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.
    """
    names = list(kept)
    all_functions = [name for name in kept[names[0]] if name != "heads"]
    functions = [name for name in all_functions if kept[names[0]][name] is not None]
    figure, [[axes]] = new_figure(2.6 + 1.5 * len(names), 3.4)
    width = 0.8 / len(functions)
    for index, function in enumerate(functions):
        whole = kept[names[0]][function]
        fractions = [kept[name][function] / whole if whole else 0.0 for name in names]
        centres = [number - 0.4 + (index + 0.5) * width for number in range(len(names))]
        colour = REMOVED if function == "none" else COLOURS[all_functions.index(function)]
        bars = axes.bar(centres, fractions, width * 0.9, color=colour, label=f"{function} ({whole})")
        axes.bar_label(bars, [kept[name][function] for name in names], fontsize=8)
    axes.set_xticks(range(len(names)), [f"{name}\n{kept[name]['heads']} heads" for name in names], fontsize=8)
    axes.set(ylim=(0, 1.1), ylabel="fraction of the heads with the function")
    clean_axes(axes)
    figure.legend(loc="outside right", frameon=False, fontsize=9)
    return finish_figure(figure, path, title, "Heads of each function that subsets of the heads keep")


def plot_roles(scores: RoleScores, path: str | Path | None = None, title: str = "") -> Figure:
    """Accuracy of the heads in each role: a line per role, a dot per head, and a mark at the baseline.

    Args:
        scores ([`RoleScores`]): The accuracies.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.
    """
    figure, [[axes]] = new_figure(7.8, 1.5 + 0.34 * len(scores.accuracy))
    single = sum(map(len, scores.accuracy.values())) == len(scores.accuracy)
    for line, (role, tables) in enumerate(scores.accuracy.items()):
        for (kind, table), marker in zip(tables.items(), MARKERS):
            values = table[~table.isnan()]
            axes.plot(values, [line] * len(values), marker, color=COLOURS[0], alpha=0.35, markersize=4, linewidth=0)
            axes.plot([scores.baselines[role][kind]] * 2, [line - 0.35, line + 0.35], color=COLOURS[1], linewidth=2.5)
        best = scores.best(role)
        # A head that is no better than the baseline has not been found to play the role.
        is_better = best.score > scores.baselines[role][best.site] + SAME
        named = f"{best.layer}.{best.head}" if single else f"{best.site} {best.layer}.{best.head}"
        style = {"textcoords": "offset points", "fontsize": 8, "color": "black" if is_better else "0.4"}
        axes.annotate(named if is_better else f"{named} = baseline", (best.score, line), (6, -3), **style)
    axes.plot([], [], "o", color=COLOURS[0], label="a head; the best one is named layer.head")
    axes.plot([], [], color=COLOURS[1], linewidth=2.5, label="baseline")
    axes.set_yticks(range(len(scores.accuracy)), scores.accuracy, fontsize=9)
    axes.set(xlim=(0, 1.04), xlabel="fraction of cases in which the largest attention weight is on a target")
    axes.set_ylim(len(scores.accuracy) - 0.4, -0.6)
    clean_axes(axes)
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return finish_figure(figure, path, title, "Roles of the attention heads")


def plot_relative_attention(
    attention: RelativeAttention,
    heads: Sequence[tuple],
    path: str | Path | None = None,
    window: int = 6,
    title: str = "",
) -> Figure:
    """Mean attention of some heads by relative position.

    Args:
        attention ([`RelativeAttention`]): Attention of all heads.
        heads (list of `tuple`): The heads to draw, as tuples that begin with site, layer and head.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        window (`int`): The largest offset.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if `heads` is empty, or `window` is larger than the limit of `attention`.
    """
    if not heads:
        raise ValueError("heads are empty: nothing to draw.")
    if not 1 <= window <= attention.limit:
        raise ValueError(f"window must be from 1 to {attention.limit}, the limit of the offsets, got {window}.")
    columns = min(4, len(heads))
    lines = -(-len(heads) // columns)
    figure, panels = new_figure(0.6 + 1.8 * columns, 0.8 + 1.7 * lines, lines, columns, sharex=True, sharey=True)
    panels = panels.flatten()
    middle = slice(attention.limit - window, attention.limit + window + 1)
    for axes, (kind, layer, head, *_) in zip(panels, heads):
        axes.bar(range(-window, window + 1), attention.attention[kind][layer, head, middle], color=COLOURS[0])
        name = f"layer {layer}, head {head}"
        axes.set_title(name if len(attention.attention) == 1 else f"{kind}\n{name}", fontsize=9)
        axes.axvline(0, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=3))
        axes.xaxis.set_major_formatter(lambda offset, _: f"{offset:+.0f}".replace("-", "−") if offset else "0")
        clean_axes(axes)
    for axes in panels[len(heads) :]:
        axes.set_axis_off()
    figure.supxlabel("offset of the token that is attended to (tokens; − is the past)", fontsize=10)
    figure.supylabel("mean attention weight", fontsize=10)
    return finish_figure(figure, path, title, "Attention by relative position")


def plot_sinks(sinks: SinkAttention, path: str | Path | None = None, title: str = "", count: int = 8) -> Figure:
    """Mean attention to the first token by the number of tokens that a query sees: a line for each of some heads.

    Args:
        sinks ([`SinkAttention`]): Attention to the first token.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.
        count (`int`): Number of heads, those with the most attention to the first token.
    """
    figure, [[axes]] = new_figure(6.5, 4.2)
    lengths = torch.tensor(sinks.lengths)
    several = len(sinks.first) > 1
    for colour, marker, head in zip(COLOURS, itertools.cycle(MARKERS), sinks.first.ranked()[:count]):
        values = sinks.by_length[head.site][head.layer, head.head]
        seen = ~values.isnan()
        name = f"{head.layer}.{head.head}" if not several else f"{head.site} {head.layer}.{head.head}"
        axes.plot(lengths[seen], values[seen], color=colour, marker=marker, markersize=4, label=name)
    mean = torch.cat([table.flatten(0, 1) for table in sinks.by_length.values()]).nanmean(0)
    axes.plot(lengths, mean, color="0.35", linestyle="--", label="all heads")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
    axes.set(
        ylim=(0, 1.02), xlabel="tokens that the query sees (at least)", ylabel="mean attention to the first token"
    )
    clean_axes(axes)
    figure.legend(title="layer.head", loc="outside right", frameon=False, fontsize=9)
    return finish_figure(figure, path, title, "Attention sinks")


def plot_head_distances(distances: HeadDistances, path: str | Path | None = None, title: str = "") -> Figure:
    """Heads as points, one colour and shape per layer; heads with similar attention are close (Clark et al. 2019,
    Figure 6).

    Labels (layer.head) are moved apart; a line leads from a label that is not beside its point.

    Args:
        distances ([`HeadDistances`]): The distances.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there are fewer than two heads at each kind of site; kinds with a single head are left out.
    """
    kinds = [kind for kind, heads in distances.heads.items() if len(heads) > 1]
    if not kinds:
        raise ValueError("distances have no two heads of one kind of site, which the picture could compare.")
    # Room for the labels.
    side = min(
        max(3.6, 0.72 * max(len(distances.heads[kind]) for kind in kinds) ** 0.5), 7.8 if len(kinds) == 1 else 5
    )
    rows, columns = arrange(len(kinds), side, side, 10)
    figure, panels = new_figure(columns * side + 1.3, rows * 0.92 * side + 0.5, rows, columns)
    layers = sorted({layer for kind in kinds for layer, _ in distances.heads[kind]})
    styles = _styles_of_layers(layers)
    panels = panels.flatten()
    for unused in panels[len(kinds) :]:
        unused.set_axis_off()
    for axes, kind in zip(panels, kinds):
        points = distances.embedding(kind)
        for layer in layers:
            own = [index for index, label in enumerate(distances.heads[kind]) if label[0] == layer]
            axes.plot(*points[own].T, linestyle="none", markersize=5.5, zorder=2, **styles[layer])
        axes.set_title(SITE_NAMES[kind] if len(kinds) > 1 else "", fontsize=10)
        axes.set(xlabel="first principal axis (√nats)", ylabel="second principal axis (√nats)")
        axes.tick_params(labelsize=8)
        axes.locator_params(nbins=5)
        axes.margins(0.08)
        axes.set_aspect("equal", "datalim")
        axes.spines[["top", "right"]].set_visible(False)
    marks = [Line2D([], [], linestyle="none", markersize=5.5, label=layer, **styles[layer]) for layer in layers]
    columns_of_legend = -(-len(layers) // 14)
    figure.legend(handles=marks, title="layer", loc="outside right", frameon=False, ncols=columns_of_legend)
    finish_figure(figure, None, title, "Heads (layer.head) with similar attention are close to each other")
    # Only the layout of the whole figure tells where the points are.
    fix_layout(figure)
    for axes, kind in zip(panels, kinds):
        names = [f"{layer}.{head}" for layer, head in distances.heads[kind]]
        label_points(axes, distances.embedding(kind).tolist(), names)
    return finish_figure(figure, path)


def _styles_of_layers(layers: Sequence[int]) -> dict[int, dict]:
    """Colour and shape of the points of each layer; with more layers than colours, shapes alternate."""
    shapes = itertools.cycle(MARKERS)
    return {
        layer: {"color": colour, "marker": shape}
        for layer, colour, shape in zip(layers, layer_colours(len(layers)), shapes)
    }
