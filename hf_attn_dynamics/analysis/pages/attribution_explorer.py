# Licensed under the Apache License, Version 2.0.
"""The interactive part of the page of [`AttributionFindings`]: heads by their scores, and weights in example texts."""

import math
from collections.abc import Sequence

from ..attribution.claims import AttributionFindings
from ..head_scores import Head
from ..sentence_maps import SentenceMaps
from .grid import head_grids, head_rows
from .html import HtmlPage
from .sentence_view import LABELS, add_sentences, weights_menu


# Shown first: what the weights of a head say of the model's input.
FIRST_SCORE = "pearson_global"

SCORES = {
    "pearson": "Pearson",
    "spearman": "Spearman",
    "center": "center of mass",
    "distance_to_uniform": "distance to uniform",
    "type": "type",
}


def add_contributions(page: HtmlPage, findings: AttributionFindings, sentence_maps: Sequence[SentenceMaps]) -> None:
    """Adds a grid of heads coloured by a score, their card, their weights in texts, and their table.

    Args:
        page ([`HtmlPage`]): The page.
        findings ([`AttributionFindings`]): The findings.
        sentence_maps (`list[SentenceMaps]`): Attention and contributions in some texts.
    """
    rows = {(row["site"], row["layer"], row["head"]): row for row in findings.rows() if row["type_attention"]}
    columns = [name for name in findings.columns if name not in ("site", "layer", "head")]
    written = {name: label_of(name) for name in columns}
    numeric = [name for name in columns if not name.startswith("type_")]

    def cell(head: Head) -> tuple[str, str] | None:
        return None if head not in rows else ("", "")

    layers, heads = findings.types.shape[:2]
    page.data(
        "heads",
        {
            "first": next(iter(rows), None),
            "score": written[FIRST_SCORE],
            "scores": [
                {"name": written[name], "values": {findings.kind: _table(findings, rows, name)}} for name in numeric
            ],
            "types": [[*head, row["type_attention"], row["type_global"]] for head, row in rows.items()],
            "weights": weights_menu(sentence_maps),
        },
    )
    grid = head_grids({findings.kind: (layers, heads)}, cell)
    page.html(
        f"""<div class="explorer">
<div><div id="score-menu" class="controls script-only" hidden></div>{grid}
<p id="scale" class="faint script-only" hidden></p>
<p class="faint script-only" hidden>Click a head, or move between heads with the arrow keys and press Enter.
With Shift, a click adds a head; the number of a layer shows all of its heads.</p></div>
<section id="card" class="script-only" aria-live="polite" aria-label="Selected head" hidden></section>
</div>
<noscript><p class="faint">The colours of the grid and the weights in example texts need a script; the pictures and
tables below need none.</p></noscript>"""
    )
    add_sentences(page, sentence_maps)
    cells = {head: [row[name] for name in columns] for head, row in rows.items()}
    page.html('<div id="heads-filters" class="controls script-only" hidden></div>')
    page.html(head_rows(list(written.values()), {written[name] for name in numeric}, cells))
    page.program("common", "sentence", "table", "attribution")


def label_of(column: str) -> str:
    """A column of the findings in words.

    Example:
        >>> label_of("pearson_global"), label_of("distance_to_uniform_attention")
        ('Pearson: contribution of the input', 'distance to uniform: attention')
    """
    score = next(name for name in SCORES if column.startswith(f"{name}_"))
    return f"{SCORES[score]}: {LABELS[column.removeprefix(f'{score}_')]}"


def _table(findings: AttributionFindings, rows: dict[Head, dict[str, float]], name: str) -> list[list[float | None]]:
    """A score as a list `[layer][head]`; `None` for removed heads, and where there is none."""
    layers, heads = findings.types.shape[:2]

    def value(head: Head) -> float | None:
        score = rows[head][name] if head in rows else math.nan
        return round(score, 4) if math.isfinite(score) else None

    return [[value((findings.kind, layer, head)) for head in range(heads)] for layer in range(layers)]
