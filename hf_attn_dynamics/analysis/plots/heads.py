# Licensed under the Apache License, Version 2.0.
"""Pictures of head functions, roles, relative attention and distances between heads."""

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
from .base import COLOURS, MARKERS, REMOVED, clean_axes, clean_map, finish_figure, new_figure


NONE = "0.93"  # colour of heads without a function


def plot_head_functions(
    functions: Mapping[str, Sequence[tuple] | None], scores: HeadScores, path: str | Path | None = None
) -> Figure:
    """Functions of the heads: a cell per head, with a colour for each function (Voita et al. 2019, Figure 1).

    Args:
        functions (`dict[str, list]`): Heads by name of the function, as tuples that begin with site, layer and head;
            `None` for a function that was not measured.
        scores ([`HeadScores`]): Any scores of the same model; NaN for removed heads.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.

    Raises:
        ValueError: if there are more functions than colours.
    """
    if len(functions) > len(COLOURS):
        raise ValueError(f"there are {len(functions)} functions, but only {len(COLOURS)} colours; give fewer.")
    colours = dict(zip(functions, COLOURS))
    players = {name: {tuple(head[:3]) for head in found} for name, found in functions.items() if found is not None}
    cell = min(0.42, 11 / sum(table.shape[1] for table in scores.values()))
    width = sum(max(cell * table.shape[1], 1.6) + 0.5 for table in scores.values()) + 2.2
    height = max(table.shape[0] for table in scores.values()) * cell + 1.1
    figure, [panels] = new_figure(width, max(height, 0.3 * len(functions) + 1.2), columns=len(scores))
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
        axes.set_title(kind if len(scores) > 1 else "", fontsize=10)
        clean_map(axes, table, cell)
    legend = [Patch(color=colour, label=name) for name, colour in colours.items() if name in players]
    legend.append(Patch(color=NONE, label="none of these"))
    unknown = [name for name in functions if name not in players]
    legend += [Patch(fill=False, linewidth=0, label=f"{name}: not measured") for name in unknown]
    figure.legend(handles=legend, loc="outside right", frameon=False)
    return finish_figure(figure, path)


def plot_functions_kept(kept: Mapping[str, Mapping[str, int | None]], path: str | Path | None = None) -> Figure:
    """Number of heads with each function in subsets of the heads (Voita et al. 2019, Figure 8).

    Args:
        kept (`dict[str, dict[str, int]]`): For each subset, such as a pruned model, the number of `heads` and of heads
            with each function, as `role_overlap` counts them, or `None` if it was not measured; the set of all heads
            comes first.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
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
        axes.bar_label(bars, [kept[name][function] for name in names], fontsize=7)
    axes.set_xticks(range(len(names)), [f"{name}\n{kept[name]['heads']} heads" for name in names], fontsize=8)
    axes.set(ylim=(0, 1.1), ylabel="fraction of the heads with the function")
    clean_axes(axes)
    figure.legend(loc="outside right", frameon=False, fontsize=9)
    return finish_figure(figure, path)


def plot_roles(scores: RoleScores, path: str | Path | None = None, title: str = "") -> Figure:
    """Accuracy of the heads in each role: a line per role, a dot per head, and a mark at the baseline.

    Args:
        scores ([`RoleScores`]): The accuracies.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Title of the figure.
    """
    figure, [[axes]] = new_figure(7.5, 1.1 + 0.34 * len(scores.accuracy))
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
    """Mean attention of some heads by relative position.

    Args:
        attention ([`RelativeAttention`]): Attention of all heads.
        heads (list of `tuple`): The heads to draw, as tuples that begin with site, layer and head.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        window (`int`): The largest offset.

    Raises:
        ValueError: if `heads` is empty, or `window` is larger than the limit of `attention`.
    """
    if not heads:
        raise ValueError("heads are empty: nothing to draw.")
    if not 1 <= window <= attention.limit:
        raise ValueError(f"window must be from 1 to {attention.limit}, the limit of the offsets, got {window}.")
    columns = min(4, len(heads))
    lines = -(-len(heads) // columns)
    figure, panels = new_figure(0.6 + 1.8 * columns, 0.4 + 1.7 * lines, lines, columns, sharex=True, sharey=True)
    panels = panels.flatten()
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
    """Heads as points coloured by layer; heads with similar attention are close (Clark et al. 2019, Figure 6).

    Args:
        distances ([`HeadDistances`]): The distances.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.

    Raises:
        ValueError: if there are fewer than two heads at a kind of site.
    """
    kinds = list(distances.heads)
    figure, [panels] = new_figure(1 + 4.6 * len(kinds), 4.2, columns=len(kinds))
    last = max(layer for labels in distances.heads.values() for layer, _ in labels)
    for axes, kind in zip(panels, kinds):
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
