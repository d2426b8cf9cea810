# Licensed under the Apache License, Version 2.0.
"""Pictures of training, pruning and head scores. Each function returns a figure, and saves it if `path` is given."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...models.head_sites import SITE_KINDS
from .figures import (
    COLOURS,
    MARKERS,
    SITE_COLOURS,
    SITE_NAMES,
    arrange,
    clean_axes,
    clean_map,
    finish_figure,
    new_figure,
    number_heads,
    print_scores,
    scale_limits,
    white_lines,
)
from .matplotlib_names import (
    Axes,
    Figure,
    FixedLocator,
    LinearSegmentedColormap,
    MaxNLocator,
    NullLocator,
    Rectangle,
    ScalarFormatter,
    matplotlib,
)


# Closed gates are nearly white, open ones blue, undecided ones orange.
GATE_COLOURS = ((0, "#F4F4F4"), (0.25, "#F6D58A"), (0.5, "#E69F00"), (0.75, "#A9C4DE"), (1, "#0072B2"))
FEW_VALUES = 12  # of a line, which are marked


def plot_pretraining(
    histories: dict[str, list[dict]],
    path: str | Path | None = None,
    title: str = "",
    plateau: tuple[str, float] | None = None,
    crossing: tuple[int, float] | None = None,
    loss: str = "masked-language-model loss (nats)",
    keys: tuple[str, str] = ("task_loss", "eval_loss"),
) -> Figure:
    """Training and evaluation losses of runs, beside the guidance loss and its weight.

    Args:
        histories (`dict[str, list[dict]]`): `trainer.state.log_history` of each run, by name.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.
        plateau (`tuple[str, float]`, *optional*): Label and value of a reference loss, such as the entropy of the
            unigram distribution; drawn as a line.
        crossing (`tuple[int, float]`, *optional*): Step and loss at which the guided run reaches the final loss of the
            unguided run; marked by a star.
        loss (`str`): Label of the axis.
        keys (`tuple[str, str]`): Keys of the training and the evaluation loss in the log.
    """
    guided = any("guidance_loss" in entry for history in histories.values() for entry in history)
    # The loss of guidance above its weight: one axis each.
    mosaic = [["losses", "guidance"], ["losses", "weight"]] if guided else [["losses"]]
    figure = Figure(figsize=(10 if guided else 6.5, 4.4), layout="constrained")
    axes = figure.subplot_mosaic(mosaic, width_ratios=[1.7, 1] if guided else None)
    losses = axes["losses"]
    for colour, (name, history) in zip(COLOURS, histories.items()):
        train, evaluation = ([(e["step"], e[key]) for e in history if key in e] for key in keys)
        losses.plot(*zip(*train), color=colour, alpha=0.3, linewidth=0.9)
        losses.plot(*zip(*evaluation), color=colour, linewidth=2, marker="o", markersize=3.5, label=name)
    if plateau is not None:
        losses.axhline(plateau[1], color="0.45", linestyle=":", linewidth=1.2, label=plateau[0])
    if crossing is not None:
        label = f"end of the unguided run reached: step {crossing[0]}"
        losses.plot(
            crossing[:1], crossing[1:], marker="*", markersize=13, color="black", linestyle="none", label=label
        )
    losses.set(xlabel="optimizer step", ylabel=loss)
    losses.set_title("evaluation (dots) and training (faint)", fontsize=10)
    losses.legend(frameon=False, fontsize=9)
    clean_axes(losses)
    if guided:
        colour, history = next(
            (colour, history)
            for colour, history in zip(COLOURS, histories.values())
            if any("guidance_loss" in entry for entry in history)
        )
        entries = [entry for entry in history if "guidance_loss" in entry]
        guidance = [entry["guidance_loss"] for entry in entries]
        # A single value, or a few, would be a line that is not seen.
        style = {"linewidth": 2, "marker": "o" if len(entries) <= FEW_VALUES else None, "markersize": 4}
        axes["guidance"].plot([entry["step"] for entry in entries], guidance, color=colour, **style)
        # One weight, or one by pattern and target.
        names = sorted({key for entry in entries for key in entry if key.startswith("guidance_weight")})
        highest = max(entry[name] for entry in entries for name in names if name in entry)
        for own, name in zip(itertools.cycle(COLOURS) if len(names) > 1 else [colour], names):
            steps, values = zip(*((entry["step"], entry[name]) for entry in entries if name in entry))
            axes["weight"].plot(steps, values, color=own, label=name.removeprefix("guidance_weight_"), **style)
        if len(names) > 1:
            axes["weight"].legend(frameon=False, fontsize=8)
        for name, label in (("guidance", "guidance loss"), ("weight", "its weight α")):
            axes[name].set(ylabel=label, xlim=losses.get_xlim())
            clean_axes(axes[name])
        # Within one power of ten, logarithmic axes have few ticks with long labels.
        if max(guidance) > 10 * min(guidance) > 0:
            axes["guidance"].set_yscale("log")
        elif len(set(guidance)) == 1:
            axes["guidance"].set_ylim(0, 1.5 * abs(guidance[0]) or 1)
        axes["guidance"].set_title("guidance (training)", fontsize=10)
        axes["weight"].set_ylim(0, 1.05 * highest or 1)
        axes["weight"].set_xlabel("optimizer step")
    return finish_figure(figure, path, title, "Losses over training")


def plot_pruning_curve(
    rows: list[Mapping[str, Any]],
    path: str | Path | None = None,
    title: str = "",
    metric: str = "accuracy",
    dense: float | Sequence[float] | None = None,
    total: int | None = None,
) -> Figure:
    """A metric against the number of kept heads, with a line for each pruning method.

    Args:
        rows (`list[dict]`): A row per model with the keys `method` (`str`), `heads` (`int`) and `metric`. Rows with
            the same method and number of heads are seeds: the line is their mean, the band their range.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.
        metric (`str`): Key of the metric, also the label of the axis.
        dense (`float` or `list[float]`, *optional*): Metric of the dense model, or of its seeds.
        total (`int`, *optional*): Number of heads of the dense model; adds an axis in per cent.

    Raises:
        ValueError: if there are no rows, or one lacks a key.
    """
    if not rows:
        raise ValueError("rows are empty: nothing to draw.")
    methods: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if missing := [key for key in ("method", "heads", metric) if row.get(key) is None]:
            raise ValueError(f"a row of rows has no {missing[0]!r}: {dict(row)}.")
        methods.setdefault(row["method"], {}).setdefault(row["heads"], []).append(row[metric])
    figure, [[axes]] = new_figure(7, 4.4)
    if dense is not None:
        seeds = list(dense) if isinstance(dense, Sequence) else [dense]
        label = "all heads" if total is None else f"all {total} heads"
        axes.axhline(statistics.fmean(seeds), color="0.35", linestyle="--", linewidth=1.4, label=label, zorder=1)
        if len(seeds) > 1:
            axes.axhspan(min(seeds), max(seeds), color="0.35", alpha=0.1, linewidth=0, zorder=0)
    for index, (method, points) in enumerate(methods.items()):
        colour, heads = COLOURS[index % len(COLOURS)], sorted(points)
        values = [points[count] for count in heads]
        style = {"color": colour, "marker": MARKERS[index % len(MARKERS)], "markersize": 5, "linewidth": 2}
        axes.plot(heads, [statistics.fmean(seeds) for seeds in values], label=method, zorder=3, **style)
        if any(len(seeds) > 1 for seeds in values):
            lows, highs = map(min, values), map(max, values)
            axes.fill_between(heads, list(lows), list(highs), color=colour, alpha=0.15, linewidth=0, zorder=2)
    counts = sorted({count for points in methods.values() for count in points})
    # Curves diverge at few heads, so a wide range of counts gets a logarithmic axis.
    doubling = counts[0] > 0 and counts[-1] >= 8 * counts[0]
    if doubling:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_apart(counts, doubling)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set(xlabel="attention heads kept", ylabel=metric.replace("_", " "))
    clean_axes(axes)
    if total is not None:
        percent = axes.secondary_xaxis("top", functions=(lambda x: 100 * x / total, lambda x: x * total / 100))
        percent.xaxis.set_major_locator(FixedLocator([100 * tick / total for tick in axes.get_xticks()]))
        percent.xaxis.set_minor_locator(NullLocator())
        percent.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
        percent.tick_params(labelsize=8, colors="0.45", length=2)
        percent.spines["top"].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    what = axes.get_ylabel()
    return finish_figure(figure, path, title, f"{what[:1].upper()}{what[1:]} of pruned models")


def _apart(counts: list[int], doubling: bool) -> list[int]:
    """Counts whose labels do not overlap, chosen from the largest down."""
    width = (counts[-1] / counts[0]) ** 0.05 if doubling else (counts[-1] - counts[0]) * 0.05
    chosen = [counts[-1]]
    for count in counts[-2::-1]:
        if count * width <= chosen[-1] if doubling else count + width <= chosen[-1]:
            chosen.append(count)
    return chosen[::-1]


def plot_heads_per_layer(
    kept: Mapping[str, Any],
    path: str | Path | None = None,
    total: int | Mapping[str, int] | None = None,
    title: str = "",
) -> Figure:
    """Number of kept heads in each layer, for each kind of site (Voita et al. 2019, figure 10).

    Args:
        kept (`dict`): Heads per layer by kind of site, `{kind: [heads]}`; or of several models, `{name: {kind: …}}`.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        total (`int` or `dict[str, int]`, *optional*): Heads per layer of the dense model, drawn as a line.
        title (`str`): Model and data; the figure itself says what it shows.

    Raises:
        ValueError: if there is nothing to draw, or a kind of site is unknown.
    """
    models = {"": kept} if any(kind in SITE_KINDS for kind in kept) else dict(kept)
    kinds = _known_kinds({kind for model in models.values() for kind in model}, "kept")
    several = len(kinds) > 1
    figure, [panels] = new_figure(1.2 + (2.8 if several else 3.6) * len(kinds), 3.6, columns=len(kinds), sharey=True)
    for axes, kind in zip(panels, kinds):
        drawn = {name: model[kind] for name, model in models.items() if kind in model}
        for index, (name, heads) in enumerate(drawn.items()):
            layers = range(len(heads))
            if len(models) == 1:
                bars = axes.bar(layers, heads, width=0.75, color=SITE_COLOURS[kind])
                axes.bar_label(bars, fontsize=9, color="0.3", padding=1)
            else:
                # Models with fewer heads are darker.
                shade = 0.3 + 0.7 * _rank(sum(heads), [sum(other) for other in drawn.values()])
                style = {"marker": MARKERS[index % len(MARKERS)], "markersize": 5, "linewidth": 2}
                label = f"{name} ({sum(heads)})"
                colour = _mixed(SITE_COLOURS[kind], shade)
                axes.plot(layers, heads, color=colour, label=label, clip_on=False, zorder=3, **style)
        built = total.get(kind) if isinstance(total, Mapping) else total
        if built is not None:
            axes.axhline(built, color="0.45", linestyle=":", linewidth=1.2)
        axes.set(xlabel="layer")
        axes.set_axisbelow(True)
        count = f": {sum(drawn[''])} heads" if "" in drawn else ""
        axes.set_title(f"{SITE_NAMES[kind]}{count}", fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        clean_axes(axes)
        if len(models) > 1:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "handlelength": 1.4}
            axes.legend(frameon=False, fontsize=9, ncols=2 if several else 3, **below)
    panels[0].set(ylabel=f"heads kept of {total}" if isinstance(total, int) else "heads kept")
    panels[0].set_ylim(bottom=0)
    return finish_figure(figure, path, title, "Heads kept in each layer")


def _known_kinds(kinds: set[str], name: str) -> list[str]:
    if unknown := sorted(map(str, kinds - set(SITE_KINDS))):
        raise ValueError(f"{name} names the site {unknown[0]!r}, which is not one of {', '.join(SITE_KINDS)}.")
    if not kinds:
        raise ValueError(f"{name} is empty: nothing to draw.")
    return [kind for kind in SITE_KINDS if kind in kinds]


def _rank(value: float, values: list[float]) -> float:
    """1 for the smallest of several values, 0 for the largest."""
    order = sorted(set(values), reverse=True)
    return order.index(value) / (len(order) - 1) if len(order) > 1 else 1.0


def _mixed(colour: str, opacity: float) -> tuple[float, ...]:
    """A colour blended with white."""
    return tuple(1 - opacity * (1 - channel) for channel in matplotlib.colors.to_rgb(colour))


def plot_gate_history(
    steps: Sequence[int],
    open_heads: Mapping[str, Sequence[float]],
    path: str | Path | None = None,
    title: str = "",
    total: Mapping[str, int] | None = None,
    target: float | None = None,
    settled_heads: Mapping[str, Sequence[int]] | None = None,
    open_units: Mapping[str, Sequence[float]] | None = None,
    settled_units: Mapping[str, Sequence[int]] | None = None,
) -> Figure:
    """Number of open heads of each kind of site over training (compare Voita et al. 2019, figure 9), and of units.

    Args:
        steps (`list[int]`): Optimizer steps.
        open_heads (`dict[str, list[float]]`): Expected number of open heads at these steps, by kind of site; may be
            empty if only units have gates.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the figure itself says what it shows.
        total (`dict[str, int]`, *optional*): Number of heads of each kind of site, for the legend.
        target (`float`, *optional*): Target number of heads over all sites; adds a line of their sum.
        settled_heads (`dict[str, list[int]]`, *optional*): Heads with open deterministic gates at these steps, which a
            target refers to; the expected numbers then become dotted lines.
        open_units, settled_units (`dict`, *optional*): The same for feed-forward units, in a second panel.

    Raises:
        ValueError: if there is nothing to draw, a kind of site is unknown or has another number of values than steps.
    """
    panels = [("heads", open_heads, settled_heads, total, target)] if open_heads or not open_units else []
    if open_units:
        panels.append(("units", open_units, settled_units or None, None, None))
    for name, expected, settled, *_ in panels:
        _check_history(name, steps, expected, settled)
    figure, rows = new_figure(9, 4 * len(panels), rows=len(panels))
    for [axes], (name, expected, settled, of_all, aim) in zip(rows, panels):
        _draw_open(axes, name, steps, expected, settled, of_all or {}, aim)
    what = " and ".join(name for name, *_ in panels)
    return finish_figure(figure, path, title, f"Open {what} while gates are trained")


def _check_history(
    name: str, steps: Sequence[int], expected: Mapping[str, Sequence], settled: Mapping[str, Sequence] | None
) -> None:
    kinds = _known_kinds(set(expected), f"open_{name}")
    if not len(steps):
        raise ValueError("steps are empty: nothing to draw.")
    for argument, values in ((f"open_{name}", expected), (f"settled_{name}", settled or {})):
        for kind in kinds if values else ():
            if len(values[kind]) != len(steps):
                raise ValueError(f"{argument}[{kind!r}] has {len(values[kind])} values for {len(steps)} steps.")


def _draw_open(
    axes: Axes,
    name: str,
    steps: Sequence[int],
    expected: Mapping[str, Sequence[float]],
    settled: Mapping[str, Sequence[int]] | None,
    total: Mapping[str, int],
    target: float | None,
) -> None:
    """Draws the number of open heads or units of each kind of site over training."""
    kinds = _known_kinds(set(expected), f"open_{name}")
    # Units belong to layers of a stack, not to its self-attention.
    lines = {SITE_NAMES[kind] if name == "heads" else kind: (kind, SITE_COLOURS[kind]) for kind in kinds}
    if target is not None and len(kinds) > 1:
        lines["all sites"] = (None, "0.2")
    for label, (kind, colour) in lines.items():
        of_all = f" of {total[kind]}" if kind in total else ""
        drawn = _of_kind(expected if settled is None else settled, kind, kinds)
        last = f"{drawn[-1]:.1f}" if settled is None else f"{drawn[-1]:,}"
        axes.plot(steps, drawn, color=colour, linewidth=2, label=f"{label}: {last}{of_all}")
        # After the last step, gates may be moved to the target.
        axes.plot(steps[-1:], drawn[-1:], color=colour, marker="o", markersize=7, clip_on=False, zorder=4)
        if settled is not None:
            axes.plot(steps, _of_kind(expected, kind, kinds), color=colour, linewidth=1, linestyle=":", alpha=0.7)
    if settled is not None:
        number = sum(expected[kind][-1] for kind in kinds)
        axes.plot([], [], color="0.4", linewidth=1, linestyle=":", label=f"expected in training: {number:,.1f}")
        if len(steps) > 1:
            before, after = (sum(settled[kind][index] for kind in kinds) for index in (-2, -1))
            axes.plot([], [], "o", color="0.4", markersize=7, label=f"last record: {before:,} → {after:,} open")
    if target is not None:
        axes.axhline(target, color="0.45", linestyle="--", linewidth=1.3, label=f"target: {target:g}")
    axes.set(xlabel="optimizer step", ylabel=f"expected open {name}" if settled is None else f"{name} with open gates")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    # Outside of the axes, where it covers no line.
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)}
    axes.legend(frameon=False, fontsize=9, title="at the last step", title_fontsize=9, alignment="left", **beside)
    clean_axes(axes)


def _of_kind(values: Mapping[str, Sequence], kind: str | None, kinds: list[str]) -> list:
    """Values of one kind of site, or sums over all kinds if `kind` is `None`."""
    return list(values[kind]) if kind else [sum(column) for column in zip(*(values[kind] for kind in kinds))]


def plot_gates(
    log_alpha: Mapping[str, Any],
    path: str | Path | None = None,
    title: str = "",
    temperature: float = 0.33,
    limits: tuple[float, float] = (-0.1, 1.1),
    threshold: float | None = None,
) -> Figure:
    """Probability that the gate of each head is open: white if closed, blue if open, orange if undecided.

    Cells hold the probabilities. Gates that are open outside training have a frame; they are the heads that
    `prune_closed_gates` keeps.

    Args:
        log_alpha (`dict[str, torch.Tensor]`): Location φ of each gate's distribution, of shape `(layers, heads)`, by
            kind of site, as `gate_importance` returns it. NaN for removed heads, which get a cross.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data.
        temperature (`float`): Temperature of the gates.
        limits (`tuple[float, float]`): Stretch interval of the gates.
        threshold (`float`, *optional*): φ above which a gate is open outside training. By default, where the
            probabilities of a closed and of a fully open gate are equal, as for binary gates; see
            `HardConcreteGate.threshold`.

    Raises:
        ValueError: if there is nothing to draw, or a kind of site is unknown.
    """
    # Imported here: models are slow to import, and most pictures do not need them.
    from ...models.hard_concrete import expected_open_heads

    kinds = _known_kinds(set(log_alpha), "log_alpha")
    if threshold is None:
        low, high = limits
        threshold = 0.5 * temperature * round(math.log((1 - low) * -low / ((high - 1) * high)), 12)
    locations = [torch.as_tensor(log_alpha[kind]).detach().cpu() for kind in kinds]
    # P(gate ≠ 0) of single gates.
    tables = [expected_open_heads(table[..., None], temperature, limits) for table in locations]
    layers, heads = (max(table.shape[dim] for table in tables) for dim in (0, 1))
    cell = min(0.55, 7.4 / heads)
    width, height = max(cell * heads, 1.8) + 0.6, cell * layers + (0.95 if cell * heads > 3.5 else 1.15)
    rows, columns = arrange(len(kinds), width, height, 8.4)
    figure, panels = new_figure(columns * width + 1, rows * height + 0.5, rows, columns)
    panels, unused = panels.flatten()[: len(kinds)], panels.flatten()[len(kinds) :]
    for axes in unused:
        axes.set_axis_off()
    colours = LinearSegmentedColormap.from_list("gates", GATE_COLOURS)
    for axes, kind, location, table in zip(panels, kinds, locations, tables):
        picture = axes.imshow(table.numpy(), cmap=colours, vmin=0, vmax=1, aspect="equal")
        print_scores(axes, table, cell, picture)
        clean_map(axes, table, cell)
        axes.set(xticks=range(table.shape[1]), yticks=range(table.shape[0]))
        white_lines(axes, table, 1.5)
        is_open = location > threshold
        for layer, head in is_open.nonzero().tolist():
            frame = {"fill": False, "edgecolor": "black", "linewidth": 1.6, "zorder": 3}
            axes.add_patch(Rectangle((head - 0.46, layer - 0.46), 0.92, 0.92, **frame))
        present = int(table.isfinite().sum())
        counts = f"{int(is_open.sum())} of {present} open (framed)", f"{table.nansum():.1f} expected in training"
        # One line where the map is as wide.
        counts = ("; " if cell * table.shape[1] > 3.5 else "\n").join(counts)
        axes.set_title(f"{SITE_NAMES[kind]}\n{counts}", fontsize=9)
    bar = figure.colorbar(picture, ax=panels, shrink=0.9, ticks=[0, 0.5, 1], pad=0.02, aspect=30)
    bar.set_label("P(gate open) in training")
    bar.outline.set_visible(False)
    return finish_figure(figure, path, title, "Gates of the heads")


def plot_head_maps(
    rows: Mapping[str, Mapping[str, Any]],
    name: str,
    path: str | Path | None = None,
    limits: tuple[float, float] = (0, 1),
    title: str = "",
) -> Figure:
    """A map of layers × heads for each table of scores, with one colour scale.

    A ring marks the highest score of each map, if it is above the lower one of `limits`; the title of the map names
    the head. Cells hold the scores where there is room for them.

    Args:
        rows (`dict[str, dict[str, torch.Tensor]]`): Tables of shape `(layers, heads)` by titles of rows and columns of
            the figure, such as models and datasets; missing tables stay empty. NaN for removed heads, which get a
            cross.
        name (`str`): Name of the scores.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        limits (`tuple[float, float]`): Lowest and highest possible score. The colour scale ends at the highest score
            that occurs, and leaves out single outliers.
        title (`str`): Model and data.

    Raises:
        ValueError: if there is nothing to draw.
    """
    tables = {
        (row, column): torch.as_tensor(table).detach().cpu()
        for row, columns in rows.items()
        for column, table in columns.items()
    }
    if not tables:
        raise ValueError("rows are empty: nothing to draw.")
    columns = list(dict.fromkeys(column for _, column in tables))
    layers, heads = (max(table.shape[dim] for table in tables.values()) for dim in (0, 1))
    low, high, clipped = scale_limits(list(tables.values()), limits)
    # Keeps text readable when the figure is scaled to the width of a page.
    cell = min(0.48, (7.6 / len(columns) - 0.5) / heads)
    # Leaves room for the titles of small maps.
    width, height = max(cell * heads, 1.6) + 0.5, max(cell * layers, 0.8) + 0.85
    figure, panels = new_figure(1.2 + width * len(columns), height * len(rows) + 0.6, len(rows), len(columns))
    for line, row in zip(panels, rows):
        for axes, column in zip(line, columns):
            if (row, column) not in tables:
                axes.set_axis_off()
                continue
            table = tables[row, column]
            picture = axes.imshow(table.numpy(), cmap="viridis", vmin=low, vmax=high, aspect="equal")
            clean_map(axes, table, cell)
            number_heads(axes, table, cell)
            if cell > 0.28:
                print_scores(axes, table, cell, picture)
            layer, head = divmod(int(table.nan_to_num(-torch.inf).argmax()), table.shape[1])
            best = table[layer, head]
            if best > low:
                ring = {"markersize": 52 * cell, "markerfacecolor": "none", "markeredgecolor": COLOURS[1]}
                axes.plot(head, layer, marker="o", markeredgewidth=1.8, **ring)
                highest = f"highest: head {layer}.{head}, {best:.2f}"
            else:
                highest = f"no head above {low:g}"
            of_site = "; ".join(filter(None, (row if row != name else "", SITE_NAMES.get(column, column))))
            axes.set_title(f"{of_site}\n{highest}", fontsize=9)
    bar = figure.colorbar(
        picture, ax=panels, label=name, shrink=0.9, aspect=30, extend="max" if clipped else "neither"
    )
    bar.outline.set_visible(False)
    return finish_figure(figure, path, title, f"{name[:1].upper()}{name[1:]} by head (layer.head)")
