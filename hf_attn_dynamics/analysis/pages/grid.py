# Licensed under the Apache License, Version 2.0.
"""Grids of heads, layers × heads: a button for each head."""

from collections.abc import Callable, Mapping
from html import escape

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
