# Licensed under the Apache License, Version 2.0.
"""Write the ledger of the five papers: each table and figure, theirs, ours, and whether it holds.

    python recipes/reproduction.py
    python recipes/reproduction.py --ledger docs/reproduction.yaml --results docs/results --output docs/REPRODUCTION.md

Nothing is trained. The ledger says which `summary.json` files an item is about, which of their values it shows, and
what must be true of them; values and verdicts are read anew each time. It is a list of papers, `{paper, items}`; an
item has

    what       the table or figure, and its quantity
    theirs     the figure of the paper, as text
    command    what made the summaries: `…` for what is left out, `&&` between two
    scale      at which scale, and on which data
    summaries  folders below `--results`, with `*` for several, whose values are averaged
    values     name: place of a number in a summary, a key, or a list of keys that follow each other; in a list of rows
               a number is a place, and `{column: value}` the one row that has it
    ours       text with values in braces, for instance `{guided:.2f}`
    order      comparisons that the paper's qualitative claim comes down to, `a < b` or `a > b` with names or numbers
    same       comparisons that make it the same figure: those, or `a within 0.01 of b`
    test       for what needs no run: the test that holds the claim, `FILE::NAME`, with what it finds as `ours`
    why        what stands in the way, for items without summaries and test; or a reason for the verdict

The verdict is **reproduced** if all comparisons hold and there is one of `same`, or if there is a test, **ordering
only** if those of `order` hold, **not** if they do not, and **not run** without summaries and test.
"""

import argparse
import json
import operator
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from hf_attn_dynamics._files import write_text
from hf_attn_dynamics.runs import SUMMARY, refuse_bad_input


KEYS = ("what", "theirs", "command", "scale", "summaries", "values", "ours", "order", "same", "test", "why")
VERDICTS = ("reproduced", "ordering only", "not", "not run")
HEADER = """# Reproduction

Tables and figures of the five papers beside what this package gave, at the scale of a CPU core where nothing else is
said. *Reproduced*: our figure is theirs, or the claim holds as stated. *Ordering only*: what is compared comes out in
the same order, with other numbers. *Not*: it does not. {items} items: {total}.

Written by `python recipes/reproduction.py` from [reproduction.yaml](reproduction.yaml) and the summaries in
[results](results/README.md), which says what `data` and `models/minilm` are in the commands."""
COMPARISONS = {"<": operator.lt, ">": operator.gt}


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Papers and their items.

    Raises:
        ValueError: if the file is no such list; the message names the item.
    """
    papers = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(papers, list) or not all(isinstance(paper, dict) and "items" in paper for paper in papers):
        raise ValueError(f"{path} must be a list of papers, each with `paper` and `items`.")
    for item in (item for paper in papers for item in paper["items"]):
        if unknown := sorted(set(item) - set(KEYS)):
            raise ValueError(
                f"{item.get('what')!r} in {path} has the key {unknown[0]!r}; known are {', '.join(KEYS)}."
            )
        if "what" not in item or "theirs" not in item:
            raise ValueError(f"{item} in {path} needs `what` and `theirs`.")
        if "summaries" in item and not (item.get("values") and item.get("ours") and item.get("order")):
            raise ValueError(f"{item['what']!r} in {path} has summaries; it needs `values`, `ours` and `order`, too.")
        if "test" in item and ("summaries" in item or "ours" not in item):
            raise ValueError(f"{item['what']!r} in {path} has a test; it needs `ours`, and no summaries.")
        if "summaries" not in item and "test" not in item and "why" not in item:
            raise ValueError(f"{item['what']!r} in {path} has no summaries; say `why`.")
    return papers


def number_at(summary: Any, place: str | list[Any]) -> float:
    """The number at a place such as `[rows, {method: gates, heads: 36}, accuracy]`.

    Raises:
        ValueError: if there is none, or not one.
    """
    found = summary
    for key in [place] if isinstance(place, str) else place:
        if isinstance(key, dict) and isinstance(found, list):
            rows = [row for row in found if all(row.get(name) == value for name, value in key.items())]
            if len(rows) != 1:
                raise ValueError(f"{key} in {place} fits {len(rows)} rows; it must fit one.")
            found = rows[0]
        else:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"there is no {key!r} on the way to {place}.") from error
    if not isinstance(found, (int, float)):
        raise ValueError(f"{place} is no number, but {found!r}.")
    return float(found)


def values_of(item: Mapping[str, Any], results: Path) -> dict[str, float]:
    """Values of an item, each the mean over its summaries.

    Raises:
        ValueError: if there is no summary, or one lacks a value; the message names both.
    """
    patterns = [item["summaries"]] if isinstance(item["summaries"], str) else item["summaries"]
    paths = [path for pattern in patterns for path in sorted(results.glob(f"{pattern}/{SUMMARY}"))]
    if not paths:
        raise ValueError(f"{item['what']!r}: there is no {SUMMARY} in {results / str(item['summaries'])}.")
    values = {}
    for name, place in item["values"].items():
        try:
            values[name] = fmean(number_at(json.loads(path.read_text(encoding="utf-8")), place) for path in paths)
        except ValueError as error:
            raise ValueError(f"{item['what']!r} in {item['summaries']}: {error}") from error
    return values


def holds(comparison: str, values: Mapping[str, float]) -> bool:
    """Whether a comparison such as `a < b` or `a within 0.01 of b` is true.

    Raises:
        ValueError: if it is none, or names an unknown value.
    """
    words = comparison.split()
    try:
        if len(words) == 5 and (words[1], words[3]) == ("within", "of"):
            a, tolerance, b = (_number(words[place], values) for place in (0, 2, 4))
            return abs(a - b) <= tolerance
        if len(words) == 3 and words[1] in COMPARISONS:
            return COMPARISONS[words[1]](_number(words[0], values), _number(words[2], values))
    except ValueError as error:
        raise ValueError(f"{comparison!r}: {error}") from error
    raise ValueError(f"{comparison!r} is no comparison; write `a < b`, `a > b` or `a within 0.01 of b`.")


def _number(word: str, values: Mapping[str, float]) -> float:
    return values[word] if word in values else float(word)


def verdict_of(item: Mapping[str, Any], values: Mapping[str, float] | None) -> str:
    """One of `VERDICTS`."""
    if values is None:
        return "reproduced" if "test" in item else "not run"
    if not all(holds(comparison, values) for comparison in item["order"]):
        return "not"
    same = item.get("same", [])
    return "reproduced" if same and all(holds(comparison, values) for comparison in same) else "ordering only"


def render(papers: list[dict[str, Any]], results: Path) -> str:
    """The ledger as Markdown."""
    parts, counts = [], Counter()
    for paper in papers:
        rows, commands = [], {}
        for item in paper["items"]:
            values = values_of(item, results) if "summaries" in item else None
            verdict = verdict_of(item, values)
            counts[verdict] += 1
            ours = item.get("ours", "–").format_map(values or {})
            scale = f"a test, {item['test'].partition('::')[0]}" if "test" in item else ""
            if "command" in item:
                number = commands.setdefault(item["command"], len(commands) + 1)
                scale = f"{item['scale']} [{number}]"
            notes = f"{verdict}. {item['why']}" if "why" in item else verdict
            rows.append(f"| {item['what']} | {item['theirs']} | {ours} | {scale} | {_marked(notes, verdict)} |")
        header = "| what | theirs | ours | our scale | verdict |\n|---|---|---|---|---|"
        footnotes = "\n".join(f"{number}. `{command}`" for command, number in commands.items())
        parts.append(f"## {paper['paper']}\n\n{header}\n" + "\n".join(rows) + "\n\n" + footnotes)
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    header = HEADER.format(items=sum(counts.values()), total=total)
    return header + "\n\n" + "\n\n".join(parts).rstrip() + "\n"


def _marked(notes: str, verdict: str) -> str:
    return notes.replace(verdict, f"**{verdict}**", 1)


def main(argv: list[str] | None = None) -> None:
    docs = Path(__file__).resolve().parents[1] / "docs"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ledger", type=Path, default=docs / "reproduction.yaml", help="papers, items, comparisons")
    parser.add_argument("--results", type=Path, default=docs / "results", help="folder of the summaries")
    parser.add_argument("--output", type=Path, default=docs / "REPRODUCTION.md", help="Markdown file to write")
    args = parser.parse_args(argv)
    with refuse_bad_input():
        text = render(read_ledger(args.ledger), args.results)
    write_text(args.output, text)
    print(text)


if __name__ == "__main__":
    main()
