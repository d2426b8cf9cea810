# Licensed under the Apache License, Version 2.0.
"""Heads of a model on a page: grids, layers × heads, with a button for each, and tables with a row for each."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import Any

from ..head_scores import Head


def head_grids(shapes: Mapping[str, tuple[int, int]], cell: Callable[[Head], tuple[str, str] | None]) -> str:
    """A grid for each kind of site.

    Args:
        shapes (`dict[str, tuple[int, int]]`): Number of layers and of heads by kind of site.
        cell (callable): Returns what a head does, in words, and the content of its button as HTML; `None` if the head
            is removed.
    """
    grids = []
    for kind, (layers, heads) in shapes.items():
        numbers = "".join(f'<th scope="col">{head}</th>' for head in range(heads))
        rows = [f'<tr><td class="corner">layer</td>{numbers}</tr>']
        for layer in range(layers):
            cells = "".join(_cell((kind, layer, head), cell((kind, layer, head))) for head in range(heads))
            rows.append(f'<tr><th scope="row">{layer}</th>{cells}</tr>')
        caption = f"{kind}: " if len(shapes) > 1 else ""
        grids.append(
            f'<table class="grid"><caption>{escape(caption)}{layers} layers × {heads} heads</caption>'
            f"{''.join(rows)}</table>"
        )
    return f'<div class="grids scroll">{"".join(grids)}</div>'


def _cell(head: Head, content: tuple[str, str] | None) -> str:
    if content is None:
        return '<td class="removed" title="removed"><span aria-label="removed">×</span></td>'
    kind, layer, number = head
    words, inner = content
    label = f"Layer {layer}, head {number}{': ' * bool(words)}{words}"
    return (
        f'<td><button type="button" data-site="{escape(kind)}" data-layer="{layer}" data-head="{number}" '
        f'title="{escape(label)}">{inner}</button></td>'
    )


def head_rows(
    header: Sequence[str],
    numeric: Collection[str],
    rows: Mapping[Head, Sequence[Any]],
    functions: Mapping[Head, Sequence[str]] | None = None,
) -> str:
    """A table with a row per head, which `assets/table.js` sorts and filters.

    Args:
        header (`list[str]`): Headings of the columns after the name of the head.
        numeric (`set[str]`): Those whose cells are numbers.
        rows (`dict[Head, list]`): Cells of each head. Floats are shown with two digits, integers with their sign,
            `None` and NaN as a dash.
        functions (`dict[Head, list[str]]`, *optional*): Functions of each head, for the filter.
    """
    several = len({site for site, _, _ in rows}) > 1
    kinds = ["", *(' class="number"' if name in numeric else "" for name in header)]
    lines = []
    for (site, layer, number), cells in rows.items():
        name = f"{site} {layer}.{number}" if several else f"{layer}.{number}"
        # Names of heads are sorted by layer, then by head.
        parts = [f'<td data-sort="{layer * 10_000 + number}">{escape(name)}</td>']
        parts += [f"<td{kind}{_sort_key(cell)}>{_written(cell)}</td>" for kind, cell in zip(kinds[1:], cells)]
        own = "|".join((functions or {}).get((site, layer, number), ()))
        lines.append(
            f'<tr data-site="{escape(site)}" data-layer="{layer}" data-head="{number}" '
            f'data-functions="{escape(own)}">{"".join(parts)}</tr>'
        )
    headings = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, ["head", *header]))
    return (
        '<div class="scroll tall" tabindex="0" role="region" aria-label="Table of heads"><table id="heads-table">'
        f"<thead><tr>{headings}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _sort_key(cell: Any) -> str:
    """Attribute with the value to sort by, where it differs from the written text."""
    return f' data-sort="{round(cell, 4)}"' if isinstance(cell, (int, float)) and not math.isnan(cell) else ""


def _written(cell: Any) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, float):
        return f"{cell:.2f}".replace("-", "−")
    return f"{cell:+d}".replace("-", "−") if isinstance(cell, int) and cell else escape(str(cell)) or "–"
