# Licensed under the Apache License, Version 2.0.
"""Text tables."""

from typing import Any


def format_table(header: list[str], rows: list[list[Any]]) -> str:
    """Formats a Markdown table with aligned columns.

    Example:
        >>> print(format_table(["run", "loss"], [["guided", 5.25], ["unguided", None]]))
        | run      |  loss |
        |----------|-------|
        | guided   | 5.250 |
        | unguided |     – |
    """
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    right = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]
    lines = [
        "| " + " | ".join(f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(line, widths, right)) + " |"
        for line in [header, *cells]
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
