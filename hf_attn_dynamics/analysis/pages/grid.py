# Licensed under the Apache License, Version 2.0.
"""Grids of heads: a button per head, which `assets/common.js` lets readers choose."""

from collections.abc import Callable, Mapping
from html import escape

from ..head_scores import Head


def head_grids(shapes: Mapping[str, tuple[int, int]], cell: Callable[[Head], str]) -> str:
    """A table of layers × heads for each kind of site.

    Args:
        shapes (`dict[str, tuple[int, int]]`): Numbers of layers and heads by kind of site.
        cell (callable): The HTML of the `td` of a head, see `head_button` and `REMOVED_CELL`.
    """
    grids = []
    for kind, (layers, heads) in shapes.items():
        numbers = "".join(f'<th scope="col">{head}</th>' for head in range(heads))
        rows = [f'<tr><td class="corner">layer</td>{numbers}</tr>']
        for layer in range(layers):
            cells = "".join(cell((kind, layer, head)) for head in range(heads))
            rows.append(f'<tr><th scope="row">{layer}</th>{cells}</tr>')
        caption = f"{kind}: " if len(shapes) > 1 else ""
        grids.append(
            f'<table class="grid"><caption>{escape(caption)}{layers} layers × {heads} heads</caption>'
            f"{''.join(rows)}</table>"
        )
    return f'<div class="grids scroll">{"".join(grids)}</div>'


def head_button(head: Head, label: str, content: str = "") -> str:
    """The cell of a head that can be chosen.

    Args:
        head (`tuple`): Kind of site, layer and head.
        label (`str`): What the button says to screen readers, and under the pointer.
        content (`str`): HTML within the button.
    """
    kind, layer, number = head
    return (
        f'<td><button type="button" data-site="{escape(kind)}" data-layer="{layer}" data-head="{number}" '
        f'title="{escape(label)}">{content}</button></td>'
    )


REMOVED_CELL = '<td class="removed" title="removed"><span aria-label="removed">×</span></td>'
