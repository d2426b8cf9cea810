# Licensed under the Apache License, Version 2.0.
"""Heads of a model on a page: grids, layers × heads, with a button for each, and tables with a row for each."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from itertools import repeat
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
    *,
    label: str = "Table of heads",
    css_class: str | None = None,
    digits: int = 2,
    signed: Collection[str] = (),
    several: bool | None = None,
) -> str:
    """A table with a row per head, which `assets/table.js` sorts and filters unless it has a class.

    Args:
        header (`list[str]`): Headings of the columns after the name of the head.
        numeric (`set[str]`): Those whose cells are numbers.
        rows (`dict[Head, list]`): Cells of each head. Integers are shown with their sign, `None` and NaN as a dash.
        functions (`dict[Head, list[str]]`, *optional*): Functions of each head, for the filter.
        label (`str`): Name of the table for screen readers.
        css_class (`str`, *optional*): Class of the table, for one of several tables of a page.
        digits (`int`): Digits of floats after the decimal point.
        signed (`set[str]`): Columns whose floats are shown with their sign.
        several (`bool`, *optional*): Whether names contain the kind of site; by default if the rows have several.
    """
    if several is None:
        several = len({site for site, _, _ in rows}) > 1
    is_sorted = css_class is None
    kinds = ["", *(' class="number"' if name in numeric else "" for name in header)]
    lines = []
    for (site, layer, number), cells in rows.items():
        name = f"{site} {layer}.{number}" if several else f"{layer}.{number}"
        # Names of heads are sorted by layer, then by head.
        keys = [f' data-sort="{layer * 10_000 + number}"', *map(_sort_key, cells)] if is_sorted else repeat("")
        texts = [escape(name), *(_written(cell, digits, column in signed) for column, cell in zip(header, cells))]
        parts = [f"<td{kind}{key}>{text}</td>" for kind, key, text in zip(kinds, keys, texts)]
        own = "|".join((functions or {}).get((site, layer, number), ()))
        filtered = f' data-functions="{escape(own)}"' if is_sorted else ""
        lines.append(
            f'<tr data-site="{escape(site)}" data-layer="{layer}" data-head="{number}"{filtered}>{"".join(parts)}</tr>'
        )
    headings = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, ["head", *header]))
    which = 'id="heads-table"' if is_sorted else f'class="{css_class}"'
    return (
        f'<div class="scroll tall" tabindex="0" role="region" aria-label="{escape(label)}"><table {which}>'
        f"<thead><tr>{headings}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _sort_key(cell: Any) -> str:
    """Attribute with the value to sort by, where it differs from the written text."""
    return f' data-sort="{round(cell, 4)}"' if isinstance(cell, (int, float)) and not math.isnan(cell) else ""


def _written(cell: Any, digits: int, is_signed: bool) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, float):
        return f"{cell:{'+' if is_signed else ''}.{digits}f}".replace("-", "−")
    return f"{cell:+d}".replace("-", "−") if isinstance(cell, int) and cell else escape(str(cell)) or "–"
