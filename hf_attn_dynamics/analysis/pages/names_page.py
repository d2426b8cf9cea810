# Licensed under the Apache License, Version 2.0.
"""HTML page of [`HeadNames`]: what each head of a model is known as."""

from typing import TYPE_CHECKING

from ..head_scores import Head
from .grid import head_rows
from .html import HtmlPage


if TYPE_CHECKING:
    from ..heads.names import HeadNames


def names_page(names: "HeadNames") -> HtmlPage:
    """The page: a picture of all heads, the best heads of each name, and a table with all scores."""
    from ..heads.names import MARGIN, NAMES

    page = HtmlPage(f"What the heads of {names.model} are known as")
    page.definitions({name: f"{NAMES[name].meaning} ({NAMES[name].probe})" for name in names.scores})
    page.heading("Names")
    page.picture(names.plot(), "Names of each head; several share a cell. Crosses: removed heads.")
    page.paragraph(
        f"A head has a name if its score reaches the threshold, and exceeds chance by {MARGIN:g}. Chance is what "
        "uniform attention reaches."
    )
    rows = []
    for name, scores in names.scores.items():
        ranked = scores.ranked()
        heads = names.heads(name)
        best = ", ".join(f"{head.layer}.{head.head} ({head.score:.2f})" for head in ranked[:3])
        chance = max(names.chance[name].values())
        rows.append([name, NAMES[name].probe, len(heads), names.thresholds[name], chance, best])
    page.table(["name", "probe", "heads", "threshold", "chance", "best heads (layer.head, score)"], rows)
    if names.not_measured:
        page.paragraph("Not measured:")
        page.table(["name", "why"], [[name, why] for name, why in names.not_measured.items()])
    page.heading("Table of heads")
    page.html('<div id="heads-filters" class="controls script-only" hidden></div>')
    page.html(_table(names))
    page.data("names", list(names.scores))
    page.program("common", "table", "names")
    return page


def _table(names: "HeadNames") -> str:
    of_head = names.names()
    cells: dict[Head, list] = {}
    for scores in names.scores.values():
        for site, layer, head, score in scores.records():
            cells.setdefault((site, layer, head), []).append(score)
    rows = {head: [", ".join(of_head.get(head, ())), *values] for head, values in cells.items()}
    return head_rows(["names", *names.scores], set(names.scores), rows, of_head, label="Scores of all heads")
