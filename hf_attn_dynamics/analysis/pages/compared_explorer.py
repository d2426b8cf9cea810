# Licensed under the Apache License, Version 2.0.
"""The parts of a page that show two models: their grids side by side, and what moved.

Both are HTML that needs no script. `assets/comparison.js` adds the values of both models to the card of a head.
"""

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from ..head_scores import Head
from ..sentence_maps import ATTENTION, MAX_CHARACTERS
from .comparison import COMPARED, LETTERS, Comparison
from .grid import head_rows
from .head_explorer import add_explorer, head_grid, head_names, page_data
from .html import HtmlPage, embedded_json
from .sentence_view import LABELS


MARKS = {
    "+": f"gained functions in {LETTERS[1]}",
    "−": f"lost functions in {LETTERS[1]}",
    "±": f"gained and lost functions in {LETTERS[1]}",
    "×": "removed in the other model",
}
LONGEST_NAME = 40  # characters of a name in menus and above weights
RESERVED = 60_000  # characters of the page for the second grid and what moved


def shortened(name: str) -> str:
    """A name with an ellipsis in its middle, if it is long.

    Example:
        >>> shortened("minilm"), shortened("runs/" + 50 * "x" + "/model")
        ('minilm', 'runs/xxxxxxxxxxxxxx…xxxxxxxxxxxxx/model')
    """
    half = (LONGEST_NAME - 1) // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def add_compared_explorer(page: HtmlPage, comparison: Comparison) -> None:
    """Adds the grids of both models, and the elements that the script fills: card, sentence, and weights."""
    second = page_data(comparison.second)
    data = {
        **{name: second[name] for name in ("heads", "measures", "roles", "offsets")},
        "models": [f"{letter}: {name}" for letter, name in zip(LETTERS, comparison.names)],
        "labels": {
            measure: f"{LABELS[ATTENTION]} · {shortened(name)}"
            for measure, name in zip((ATTENTION, COMPARED), comparison.names)
        },
        "compared": COMPARED,
    }
    page.data("compared", data)
    every = comparison.first.sentence_maps
    some = comparison.sentences(MAX_CHARACTERS - RESERVED - len(embedded_json(data)))
    both = sum(COMPARED in one.weights for one in some)
    if len(some) < len(every):
        page.paragraph(f"The page holds the first {len(some)} of {len(every)} example sentences, to stay small.")
    if both < len(some):
        page.paragraph(
            f"{LETTERS[1]} has weights of the same tokens in {both} of {len(some)} example sentences; the other "
            f"sentences show {LETTERS[0]} only."
        )
    add_explorer(page, replace(comparison.first, sentence_maps=some), _grids(comparison))


def _grids(comparison: Comparison) -> str:
    moved = comparison.moved_heads()
    marks = {head: (one.mark, one.words) for head, one in moved.items()}
    grids = []
    for letter, name, reading in zip(LETTERS, comparison.names, (comparison.first, comparison.second)):
        title = escape(f"{letter}: {name}")
        grids.append(
            f'<section aria-label="Functions of the heads of {title}"><h3>{title}</h3>{head_grid(reading, marks)}'
            "</section>"
        )
    counts = {mark: sum(one.mark == mark for one in moved.values()) for mark in MARKS}
    entries = [
        f'<li><span class="mark">{mark}</span> {escape(text)} ({counts[mark]})</li>' for mark, text in MARKS.items()
    ]
    legend = f'<ul class="legend" aria-label="Marks of heads">{"".join(entries)}</ul>'
    return f'<div class="models">{"".join(grids)}</div>{legend}'


def functions_of_models(comparison: Comparison) -> dict[str, dict[Head, str]]:
    """Columns of the table of heads: the functions in both models, and their change."""
    columns: dict[str, dict[Head, str]] = {}
    for letter, reading in zip(LETTERS, (comparison.first, comparison.second)):
        names = head_names(reading)
        columns[f"functions {letter}"] = {
            head: ", ".join(names[head]) if head in names else "removed" for head in comparison.heads
        }
    return {**columns, "change": {head: moved.words for head, moved in comparison.heads.items()}}


def add_moved(page: HtmlPage, comparison: Comparison) -> None:
    """Adds what moved: numbers of heads, functions, the heads whose functions changed, and measures."""
    a, b = LETTERS
    page.paragraph(moved_sentences(comparison))
    page.subheading("Functions")
    page.table(*moved_table({name: moved._asdict() for name, moved in comparison.functions().items()}))
    page.paragraph(
        f"Kept: in both models. Gained: in {b} only. Lost: in {a} only. Removed: heads among the gained and lost ones "
        "that the other model lacks."
    )
    moved_heads = comparison.moved_heads()
    page.subheading(f"{len(moved_heads)} heads whose functions changed or which one model lacks")
    if moved_heads:
        functions = {
            head: [_functions(moved.before), _functions(moved.after), moved.words]
            for head, moved in moved_heads.items()
        }
        columns = [f"functions {a}", f"functions {b}", "change"]
        page.html(_table_of_heads(comparison, columns, functions, "Heads that moved"))
    page.subheading("Measures")
    scores = comparison.scores()
    page.table(
        ["measure", "heads", f"mean {a}", f"mean {b}", f"{b} − {a}"],
        [[name, one.heads, one.first, one.second, _signed(one.second - one.first)] for name, one in scores.items()],
        digits=3,
    )
    page.paragraph("Means over the heads that have the measure in both models.")
    for name, one in scores.items():
        rows = {head: [first, second, second - first] for head, (first, second) in one.largest.items()}
        table = _table_of_heads(comparison, [a, b, f"{b} − {a}"], rows, f"Largest changes of {name}")
        page.html(
            f"<details><summary>{escape(name.capitalize())}: the {len(rows)} heads whose score changed most</summary>"
            f"{table}</details>"
        )


def moved_table(functions: Mapping[str, Mapping[str, int | None]]) -> tuple[list[str], list[list]]:
    """Header and rows: the number of heads with each function in both models, see [`MovedFunction`]."""
    a, b = LETTERS
    header = ["function", f"heads {a}", f"heads {b}", "kept", "gained", "lost", "removed"]
    rows = []
    for name, moved in functions.items():
        first, second, *changes = moved.values()
        rows.append([name, *("not measured" if number is None else number for number in (first, second)), *changes])
    return header, rows


def moved_sentences(comparison: Comparison) -> str:
    """Numbers of heads that moved, in sentences."""
    a, b = LETTERS
    counts = comparison.counts()
    text = f"{_heads(counts['heads'])} in both models."
    removed = ((counts["removed_in_second"], a, b), (counts["removed_in_first"], b, a))
    parts = [f"{count} of {one} {_are(count)} removed in {other}" for count, one, other in removed if count]
    if parts:
        text += f" {' and '.join(parts)}; {counts['removed_with_functions']} of these had functions where they remain."
    text += (
        f" Of the heads in both, {counts['gained']} gained functions, {counts['lost']} lost functions "
        f"({counts['gained_and_lost']} did both), {counts['kept']} kept theirs, and {counts['none']} are without any "
        "in either model."
    )
    first, second = comparison.first, comparison.second
    if (first.sentences, first.tokens) != (second.sentences, second.tokens):
        numbers = (
            f"{letter} {one.sentences:,} sentences with {one.tokens:,} tokens"
            for letter, one in zip(LETTERS, (first, second))
        )
        text += f" The models did not read the same tokens: {', '.join(numbers)}."
    missing = [name for name in comparison.functions() if name not in comparison.functions_of_both]
    if missing:
        text += f" Not compared, since not measured in both: {', '.join(missing)}."
    return text


def _heads(count: int) -> str:
    return f"{count} head{'' if count == 1 else 's'} {_are(count)}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _functions(names: tuple[str, ...] | None) -> str:
    return "removed" if names is None else ", ".join(names) or "none"


def _table_of_heads(comparison: Comparison, header: list[str], rows: dict[Head, list[Any]], label: str) -> str:
    """A table with a row per head, whose last column is a difference; the script lets each row select its head."""
    numeric = {name for name, cell in zip(header, next(iter(rows.values()))) if isinstance(cell, float)}
    several = len(comparison.first["confidence"]) > 1
    signed = {header[-1]}
    return head_rows(header, numeric, rows, label=label, css_class="moved", digits=3, signed=signed, several=several)


def _signed(difference: float) -> str:
    return f"{difference:+.3f}".replace("-", "−")
