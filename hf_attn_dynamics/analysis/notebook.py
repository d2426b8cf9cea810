# Licensed under the Apache License, Version 2.0.
"""Tables of results for notebooks: HTML with inline styles, which needs neither pandas nor matplotlib."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import torch


MOST_ROWS = 20  # of a table; the others are counted
# In both themes of a notebook: the colours of the text are inherited, those of cells come with their own text.
_TABLE = "border-collapse:collapse;margin:4px 0"
_CELL = "padding:2px 8px;border-bottom:1px solid #8884"


class Html(str):
    """Text that is HTML already; all other cells are escaped."""


def html_table(header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "", digits: int = 3) -> Html:
    """A table. Numbers are right-aligned, `None` and NaN are shown as a dash.

    Args:
        header (sequence of `str`): Headings of the columns.
        rows (sequence of sequences): Cells.
        caption (`str`): A line above the table.
        digits (`int`): Digits after the decimal point of floats.

    Example:
        >>> print(html_table(["head", "score"], [["<0>", 0.5]]).count("&lt;0&gt;"))
        1
    """
    lines = [_row([(escape(str(name)), "") for name in header], "th")]
    lines += [_row([(_text(cell, digits), _side(cell)) for cell in row], "td") for row in rows]
    return _table(lines, caption)


def heat_grid(tables: Mapping[str, torch.Tensor], name: str = "score", digits: int = 2) -> Html:
    """A grid of layers × heads for each kind of site: cells hold the scores, and are darker the higher they are.

    Args:
        tables (`dict[str, torch.Tensor]`): Scores of shape `(layers, heads)` by kind of site. NaN for removed heads,
            which are shown as a cross.
        name (`str`): Name of the scores.
        digits (`int`): Digits after the decimal point.
    """
    scores = torch.cat([table.flatten() for table in tables.values()])
    scores = scores[scores.isfinite()]
    low, high = (min(scores.min().item(), 0.0), scores.max().item()) if len(scores) else (0.0, 0.0)
    parts = []
    for kind, table in tables.items():
        lines = [_row([("layer", ""), *((f"head {head}", "") for head in range(table.shape[1]))], "th")]
        for layer, row in enumerate(table.tolist()):
            cells = [_shaded(score, low, high, digits, f"{kind} {layer}.{head}") for head, score in enumerate(row)]
            lines.append(_row([(f"<b>{layer}</b>", "text-align:right"), *cells], "td"))
        parts.append(_table(lines, f"{name}: {kind}, {table.shape[0]} layers × {table.shape[1]} heads"))
    return Html("".join(parts))


def _shaded(score: float, low: float, high: float, digits: int, head: str) -> tuple[str, str]:
    """Text and style of a cell, from white to blue."""
    if math.isnan(score):
        return f'<span title="{escape(head)}, removed">×</span>', "text-align:center;color:#888"
    part = (score - low) / (high - low) if high > low else 0.0
    part = min(max(part, 0.0), 1.0) if math.isfinite(part) else 1.0
    red, green, blue = (round(255 + part * (end - 255)) for end in (0x00, 0x72, 0xB2))
    ink = "#fff" if part > 0.6 else "#111"
    style = f"background:rgb({red},{green},{blue});color:{ink};text-align:right;border:1px solid #fff"
    return f'<span title="{escape(head)}">{score:.{digits}f}</span>', style


def _text(cell: Any, digits: int) -> str:
    if isinstance(cell, Html):
        return cell
    if cell is None or cell != cell:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.{digits}f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else escape(str(cell))


def _side(cell: Any) -> str:
    is_number = isinstance(cell, (int, float)) and not isinstance(cell, bool)
    return "text-align:right" if is_number or cell is None else "text-align:left"


def _row(cells: Sequence[tuple[str, str]], tag: str) -> str:
    return "<tr>" + "".join(f'<{tag} style="{_CELL};{style}">{text}</{tag}>' for text, style in cells) + "</tr>"


def _table(lines: Sequence[str], caption: str) -> Html:
    above = f"<div>{escape(caption)}</div>" if caption else ""
    return Html(f'{above}<div style="overflow-x:auto"><table style="{_TABLE}">{"".join(lines)}</table></div>')
