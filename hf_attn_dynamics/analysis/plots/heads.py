# Licensed under the Apache License, Version 2.0.
"""Pictures of what heads do: their functions, how well they play roles, where they look, how alike they are."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ..head_scores import HeadScores
from ..observers.distances import HeadDistances
from ..observers.positions import RelativeAttention
from ..observers.roles import RoleScores
from .base import COLOURS, MARKERS, REMOVED, clean_axes, clean_map, finish_figure


NONE = "0.93"  # grey of heads without a function


def plot_head_functions(
    functions: Mapping[str, Sequence[tuple] | None], scores: HeadScores, path: str | Path | None = None
) -> Figure:
    """Which functions each head has: a cell a head, its colours those of its functions (Voita et al. 2019, Figure 1).

    Args:
        functions (`dict[str, list]`): Heads by name of the function, as tuples that begin with site, layer and head;
            None for a function that was not measured.
        scores ([`HeadScores`]): Anything measured on the same model: tells which heads there are.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG; nothing is written without.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are more functions than colours.
    """
    if len(functions) > len(COLOURS):
        raise ValueError(f"functions are {len(functions)}, but there are {len(COLOURS)} colours; give fewer.")
    colours = dict(zip(functions, COLOURS))
    players = {name: {tuple(head[:3]) for head in found} for name, found in functions.items() if found is not None}
    cell = min(0.42, 11 / sum(table.shape[1] for table in scores.values()))
    width = sum(max(cell * table.shape[1], 1.6) + 0.5 for table in scores.values()) + 2.2
    height = max(table.shape[0] for table in scores.values()) * cell + 1.1
    figure = Figure(figsize=(width, max(height, 0.3 * len(functions) + 1.2)), layout="constrained")
    panels = figure.subplots(1, len(scores), squeeze=False)[0]
    for axes, (kind, table) in zip(panels, scores.items()):
        layers, heads = table.shape
        for layer in range(layers):
            for head in range(heads):
                own = [name for name, heads_of in players.items() if (kind, layer, head) in heads_of]
                # Several functions share the cell side by side.
                for place, name in enumerate(own or [None]):
                    share = 0.9 / max(len(own), 1)
                    left = head - 0.45 + place * share
                    colour = colours[name] if name else NONE
                    axes.add_patch(Rectangle((left, layer - 0.45), share, 0.9, facecolor=colour, edgecolor="none"))
        axes.set(xlim=(-0.5, heads - 0.5), ylim=(layers - 0.5, -0.5), aspect="equal")
        axes.set_title(kind if len(scores) > 1 else "", fontsize=10)
        clean_map(axes, table, cell)
    legend = [Patch(color=colour, label=name) for name, colour in colours.items() if name in players]
    legend.append(Patch(color=NONE, label="none of these"))
    unknown = [name for name in functions if name not in players]
    legend += [Patch(fill=False, linewidth=0, label=f"{name}: not measured") for name in unknown]
    figure.legend(handles=legend, loc="outside right", frameon=False)
    return finish_figure(figure, path)


def plot_functions_kept(kept: Mapping[str, Mapping[str, int | None]], path: str | Path | None = None) -> Figure:
    """How many of the heads with each function are among fewer heads (Voita et al. 2019, Figure 8).

    Args:
        kept (`dict[str, dict[str, int]]`): By name of the heads, such as a pruned model, how many there are as
            `heads`, and how many have each function, as `role_overlap` counts them, or None if it was not measured;
            all heads come first.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG; nothing is written without.

    Returns:
        `matplotlib.figure.Figure`
    """
    names = list(kept)
    all_functions = [name for name in kept[names[0]] if name != "heads"]
    functions = [name for name in all_functions if kept[names[0]][name] is not None]
    figure = Figure(figsize=(2.6 + 1.5 * len(names), 3.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(functions)
    for place, function in enumerate(functions):
        whole = kept[names[0]][function]
        shares = [kept[name][function] / whole if whole else 0.0 for name in names]
        lefts = [number - 0.4 + (place + 0.5) * width for number in range(len(names))]
        colour = REMOVED if function == "none" else COLOURS[all_functions.index(function)]
        bars = axes.bar(lefts, shares, width * 0.9, color=colour, label=f"{function} ({whole})")
        axes.bar_label(bars, [kept[name][function] for name in names], fontsize=7)
    axes.set_xticks(range(len(names)), [f"{name}\n{kept[name]['heads']} heads" for name in names], fontsize=8)
    axes.set(ylim=(0, 1.1), ylabel="fraction of the heads with the function")
    clean_axes(axes)
    figure.legend(loc="outside right", frameon=False, fontsize=9)
    return finish_figure(figure, path)


def plot_roles(scores: RoleScores, path: str | Path | None = None, title: str = "") -> Figure:
    """How well each head plays each role: a line a role, a dot a head, and what the baseline reaches.

    Args:
        scores ([`RoleScores`]): What was measured.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG; nothing is written without.
        title (`str`): Title of the picture.

    Returns:
        `matplotlib.figure.Figure`
    """
    figure = Figure(figsize=(7.5, 1.1 + 0.34 * len(scores.accuracy)), layout="constrained")
    axes = figure.subplots()
    for line, (role, tables) in enumerate(scores.accuracy.items()):
        for (kind, table), marker in zip(tables.items(), MARKERS):
            values = table[~table.isnan()]
            axes.plot(values, [line] * len(values), marker, color=COLOURS[0], alpha=0.35, markersize=4, linewidth=0)
            axes.plot([scores.baselines[role][kind]] * 2, [line - 0.35, line + 0.35], color=COLOURS[1], linewidth=2.5)
        best = scores.best(role)
        axes.annotate(f"{best.layer}.{best.head}", (best.score, line), (5, -3), textcoords="offset points", fontsize=8)
    axes.plot([], [], "o", color=COLOURS[0], label="a head; the best is named layer.head")
    axes.plot([], [], color=COLOURS[1], linewidth=2.5, label="baseline")
    axes.set_yticks(range(len(scores.accuracy)), scores.accuracy, fontsize=9)
    axes.set(xlim=(0, 1.04), xlabel="fraction of cases in which the largest weight is right")
    axes.set_ylim(len(scores.accuracy) - 0.4, -0.6)
    clean_axes(axes)
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return finish_figure(figure, path, title)


def plot_relative_attention(
    attention: RelativeAttention, heads: Sequence[tuple], path: str | Path | None = None, window: int = 6
) -> Figure:
    """Mean attention of some heads to the tokens around the one that attends.

    Args:
        attention ([`RelativeAttention`]): What was measured.
        heads (list of `tuple`): Which heads, as tuples that begin with site, layer and head.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG; nothing is written without.
        window (`int`): Tokens to each side.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if no head is named, or `window` is larger than the limit of what was measured.
    """
    if not heads:
        raise ValueError("heads are empty: nothing to draw.")
    if not 1 <= window <= attention.limit:
        raise ValueError(f"window must be from 1 to {attention.limit}, the limit of what was measured, got {window}.")
    columns = min(4, len(heads))
    lines = -(-len(heads) // columns)
    figure = Figure(figsize=(0.6 + 1.8 * columns, 0.4 + 1.7 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
    middle = slice(attention.limit - window, attention.limit + window + 1)
    for axes, (kind, layer, head, *_) in zip(panels, heads):
        axes.bar(range(-window, window + 1), attention.attention[kind][layer, head, middle], color=COLOURS[0])
        name = f"{layer}.{head}" if len(attention.attention) == 1 else f"{kind} {layer}.{head}"
        axes.set_title(name, fontsize=10)
        clean_axes(axes)
    for axes in panels[len(heads) :]:
        axes.set_axis_off()
    figure.supxlabel("offset of the token that is attended to", fontsize=10)
    figure.supylabel("mean attention", fontsize=10)
    return finish_figure(figure, path)


def plot_head_distances(distances: HeadDistances, path: str | Path | None = None) -> Figure:
    """Heads as points, those that attend alike near each other, coloured by layer (Clark et al. 2019, Figure 6).

    Args:
        distances ([`HeadDistances`]): What was measured.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG; nothing is written without.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: if there are fewer than two heads of a kind.
    """
    kinds = list(distances.heads)
    figure = Figure(figsize=(1 + 4.6 * len(kinds), 4.2), layout="constrained")
    last = max(layer for labels in distances.heads.values() for layer, _ in labels)
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds):
        points = distances.embedding(kind)
        layers = torch.tensor([layer for layer, _ in distances.heads[kind]])
        picture = axes.scatter(points[:, 0], points[:, 1], c=layers, cmap="viridis", vmin=0, vmax=max(last, 1), s=28)
        for (layer, head), (x, y) in zip(distances.heads[kind], points.tolist()):
            axes.annotate(f"{layer}.{head}", (x, y), (3, 3), textcoords="offset points", fontsize=6, color="0.4")
        axes.set_title(kind if len(kinds) > 1 else "", fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_aspect("equal", "datalim")
    bar = figure.colorbar(picture, ax=figure.axes, label="layer", shrink=0.8)
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()
    bar.outline.set_visible(False)
    return finish_figure(figure, path)
