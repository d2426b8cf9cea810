# Licensed under the Apache License, Version 2.0.
"""The interactive part of the page of a [`HeadReading`]: grid and table of heads, and the data for the script.

Grid and table are HTML that needs no script. `assets/heads.js` adds the card of a head, its attention in example
sentences, sorting and filters.
"""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

import torch

from ..head_scores import Head
from ..observers.delimiters import DELIMITER_THRESHOLD
from ..observers.positions import POSITIONAL_THRESHOLD
from ..observers.roles import MARGIN, RoleScores
from ..observers.syntactic_roles import TO_HEAD
from ..reading import FUNCTIONS, ROLE_OF_FUNCTION, ROLES, HeadReading
from .grid import head_grids, head_rows
from .html import HtmlPage
from .sentence_view import add_sentences, weights_menu


EQUAL = 0.01  # difference of accuracies that counts as none
WINDOW = 12  # largest offset of the profile of a head
SHOWN_FIRST = 10  # tokens of the sentence that is shown first
FUNCTION_OF_ROLE = {role: function for function, role in ROLE_OF_FUNCTION.items()}
# How an accuracy compares with its baseline.
VERDICTS = (
    "exceeds the baseline",
    "exceeds it by less than 10 points",
    "only equals the baseline",
    "below the baseline",
)
MEASURES = {
    "confidence": "confidence",
    "entropy": "entropy",
    "delimiter_attention": "attention to delimiters",
    "importance": "importance",
    "relevance": "relevance",
}


def verdict(score: float, baseline: float) -> str:
    """How an accuracy compares with its baseline, in words.

    Example:
        >>> verdict(0.5, 0.3), verdict(0.35, 0.3), verdict(0.301, 0.3), verdict(0.1, 0.3)
        ('exceeds the baseline', 'exceeds it by less than 10 points', 'only equals the baseline', 'below the baseline')
    """
    bounds = (baseline + MARGIN, baseline + EQUAL, baseline - EQUAL)
    return VERDICTS[next((index for index, bound in enumerate(bounds) if score >= bound), len(bounds))]


def head_names(reading: HeadReading) -> dict[Head, list[str]]:
    """The functions of each head that is not removed."""
    names: dict[Head, list[str]] = {
        head[:3]: [] for head in reading["confidence"].records() if not math.isnan(head[-1])
    }
    for function, heads in reading.functions().items():
        for head in heads or ():
            names[head[:3]].append(function)
    return names


def page_data(reading: HeadReading) -> dict[str, Any]:
    """Everything that the script shows, as JSON types; tables of heads are lists `[layer][head]` by kind of site."""
    results = reading.results
    measures = [
        {"name": text, "values": _rounded(results[name].scores)} for name, text in MEASURES.items() if name in results
    ]
    first = next(iter(reading.worth_knowing()), next(iter(head_names(reading)), None))
    positions = results["relative_positions"]
    window = min(WINDOW, positions.limit)
    return {
        "functions": list(FUNCTIONS),
        "heads": [[*head, functions] for head, functions in head_names(reading).items()],
        "first": first,
        "measures": measures,
        "roles": [one for name in ROLES if name in results for one in _roles(name, results[name])],
        "offsets": {
            "limit": window,
            "attention": {
                kind: _rounded(table[..., positions.limit - window : positions.limit + window + 1])
                for kind, table in positions.attention.items()
            },
            "best": {
                kind: [[best_offset(reading, (kind, layer, head)) for head in range(heads)] for layer in range(layers)]
                for kind, (layers, heads, _) in ((kind, table.shape) for kind, table in positions.attention.items())
            },
        },
        "threshold": {"delimiters": DELIMITER_THRESHOLD, "positional": POSITIONAL_THRESHOLD, "role": MARGIN},
        "verdicts": VERDICTS,
        "weights": (weights := weights_menu(reading.sentence_maps)),
        "beside": weights[-1]["name"] if len(weights) > 1 else "",
        "sentence": next((n for n, one in enumerate(reading.sentence_maps) if len(one.tokens) >= SHOWN_FIRST), 0),
    }


def _roles(result: str, scores: RoleScores) -> list[dict[str, Any]]:
    """Accuracies, baselines and cases of roles; of syntactic ones, also the relation and its direction."""
    roles = []
    for role, accuracy in scores.accuracy.items():
        relation, _, direction = role.partition(" ")
        arc = {"relation": relation, "toHead": direction == TO_HEAD} if result == "syntactic_roles" else None
        roles.append(
            {
                "name": role,
                "accuracy": _rounded(accuracy.scores),
                "baseline": {kind: _number(value) for kind, value in scores.baselines[role].items()},
                "count": scores.counts[role],
                "verdict": {
                    kind: [
                        [VERDICTS.index(verdict(one, scores.baselines[role][kind])) for one in row]
                        for row in table.tolist()
                    ]
                    for kind, table in accuracy.items()
                },
                "function": FUNCTION_OF_ROLE.get(role) if arc is None else "syntactic",
                "arc": arc,
            }
        )
    return roles


def _number(value: float, digits: int = 4) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def _rounded(values: Any) -> Any:
    """Tensors, or dictionaries of them, as lists of rounded numbers."""
    if isinstance(values, Mapping):
        return {kind: _rounded(table) for kind, table in values.items()}
    if isinstance(values, torch.Tensor):
        return _rounded(values.tolist())
    return [_rounded(one) for one in values] if isinstance(values, list) else _number(values)


def head_grid(reading: HeadReading, marks: Mapping[Head, tuple[str, str]] | None = None) -> str:
    """The functions of the heads: a button per head, layers × heads, for each kind of site, and a legend.

    Args:
        reading (`HeadReading`): The reading.
        marks (`dict[Head, tuple[str, str]]`, *optional*): A sign on the button of a head, and what it means.
    """
    names, functions = head_names(reading), list(FUNCTIONS)
    marks = marks or {}

    def cell(head: Head) -> tuple[str, str] | None:
        if head not in names:
            return None
        own = names[head]
        parts = "".join(f'<span class="function-{functions.index(name)}"></span>' for name in own)
        mark, meaning = marks.get(head, ("", ""))
        sign = f'<span class="mark" aria-hidden="true">{escape(mark)}</span>' if mark else ""
        words = ", ".join(own) or "none of these functions"
        return words + (f" ({meaning})" if meaning else ""), parts + sign

    shapes = {kind: tuple(table.shape) for kind, table in reading["confidence"].items()}
    return head_grids(shapes, cell) + _legend(reading)


def _legend(reading: HeadReading) -> str:
    entries = []
    for index, (function, heads) in enumerate(reading.functions().items()):
        count = "not measured" if heads is None else f"{len(heads)}"
        entries.append(f'<li><span class="chip function-{index}"></span>{escape(function)} ({count})</li>')
    without = sum(not own for own in head_names(reading).values())
    entries.append(f'<li><span class="chip"></span>none of these ({without})</li>')
    return f'<ul class="legend" aria-label="Number of heads with each function">{"".join(entries)}</ul>'


def head_table(reading: HeadReading, columns: Mapping[str, Mapping[Head, str]] | None = None) -> str:
    """A table with a row per head: its functions, measures, most frequent offset, and best role.

    Args:
        reading (`HeadReading`): The reading.
        columns (`dict[str, dict[Head, str]]`, *optional*): Columns to show instead of the functions, with texts for
            the same heads, which may be removed in the reading.
    """
    names, results = head_names(reading), reading.results
    columns = columns or {"functions": {head: ", ".join(functions) for head, functions in names.items()}}
    measured = {text: results[name] for name, text in MEASURES.items() if name in results}
    rows = {}
    for head in next(iter(columns.values())):
        kind, layer, number = head
        own = [texts[head] for texts in columns.values()]
        offset, share = best_offset(reading, head) or (None, None)
        values = [scores[kind][layer, number].item() if kind in scores else None for scores in measured.values()]
        rows[head] = [*own, *values, offset, share, *_best_role(reading, head)]
    numeric = [*measured, "offset", "fraction", "accuracy", "baseline"]
    header = [*columns, *measured, "offset", "fraction", "best role", "accuracy", "baseline"]
    return head_rows(header, numeric, rows, names)


def best_offset(reading: HeadReading, head: Head) -> tuple[int, float] | None:
    """The most frequent offset of the largest weight of a head, and the fraction of its tokens; `None` without any."""
    kind, layer, number = head
    positions = reading["relative_positions"]
    largest = positions.largest[kind][layer, number].nan_to_num(0)
    if not largest.any():
        return None
    best = largest.argmax()
    return positions.offsets[best].item(), _number(largest[best].item())


def _best_role(reading: HeadReading, head: Head) -> tuple[str, float | None, float | None]:
    """The role in which a head exceeds the baseline most, its accuracy, and the baseline."""
    kind, layer, number = head
    found = []
    for scores in (reading[name] for name in ROLES if name in reading.results):
        for role, accuracy in scores.accuracy.items():
            if kind in accuracy and not math.isnan(value := accuracy[kind][layer, number].item()):
                found.append((role, value, scores.baselines[role][kind]))
    return max(found, key=lambda one: one[1] - one[2], default=("", None, None))


def add_explorer(page: HtmlPage, reading: HeadReading, grids: str | None = None) -> None:
    """Adds the grid of heads, and the elements that the script fills: card, sentence, and weights.

    Args:
        page (`HtmlPage`): The page.
        reading (`HeadReading`): The reading.
        grids (`str`, *optional*): HTML to show instead of its grid.
    """
    page.data("heads", page_data(reading))
    page.html(
        f"""<div class="explorer">
<div>{grids or head_grid(reading)}
<p class="faint script-only" hidden>Click a head, or move between heads with the arrow keys and press Enter.
With Shift, a click adds a head; the number of a layer shows all of its heads.</p></div>
<section id="card" class="script-only" aria-live="polite" aria-label="Selected head" hidden></section>
</div>
<noscript><p class="faint">The pictures, tables and examples below need no script; the card of a head and its attention
in other sentences do.</p></noscript>"""
    )
    add_sentences(page, reading.sentence_maps)


def add_head_table(
    page: HtmlPage, reading: HeadReading, columns: Mapping[str, Mapping[Head, str]] | None = None
) -> None:
    """Adds the table of heads, and its filters."""
    page.html('<div id="heads-filters" class="controls script-only" hidden></div>' + head_table(reading, columns))
