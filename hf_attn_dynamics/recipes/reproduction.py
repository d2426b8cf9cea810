# Licensed under the Apache License, Version 2.0.
"""Compare the results of the five papers with ours, and write the comparison as Markdown.

    python recipes/reproduction.py
    python recipes/reproduction.py --ledger docs/reproduction.yaml --results docs/results --output docs/REPRODUCTION.md

A second page, `--failures`, is for readers who look for what did not come out, and why: items whose verdict is *not*,
with all settings, and items that were not run.

Nothing is trained. The ledger names the `summary.json` files of each item, the values to show, and the comparisons
that must hold; values are read from the files each time. `hf_attn_dynamics/recipes/ledger.py` describes its format,
and what it is refused for.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._files import write_text
from .._refusals import refuse_bad_input
from .arguments.reproduction import ReproductionArguments
from .ledger import VERDICTS, Ledger, checked_summaries, read_ledger, settings_of, values_of, verdict_of
from .run import run_recipe


HEADER = """# Reproduction

This page compares tables and figures of the five papers with the results of this package. Runs used one CPU core
unless stated otherwise. *Reproduced*: our value equals the value of the paper, or the claim holds as the paper states
it. *Ordering only*: the compared quantities have the same order, but other values or a weaker contrast. *Not*: the
order differs. All settings that were run are here; if there are several, each has a line of its own, and the worst
verdict counts for the item. Settings that are left out do not count; the table gives the reason.

{items} items: {total}.

Written by `python recipes/reproduction.py` from [reproduction.yaml](reproduction.yaml) and the summaries in
[results](results/README.md), which says what `data` and `models/minilm` are in the commands."""
FAILURES_HEADER = """# What did not replicate

These {failed} of {items} tables, figures and claims of five papers come out differently here than in the papers, in at
least one setting. The last section has {missing} items that were not run. All others are in
[REPRODUCTION](REPRODUCTION.md), with the commands of all runs.

Models and data are much smaller than in the papers, so that a difference says little about the paper itself. Where the
cause is known, it is named.

Written by `python recipes/reproduction.py` from [reproduction.yaml](reproduction.yaml)."""
FOOTER = """## Summaries that are not about a claim

These folders of [results](results/README.md) are about this package, and not about a claim of the papers:

{folders}"""
FOOTNOTE = re.compile(r" \[\d+\]")


def render(ledger: Ledger, summaries: Mapping[str, Any]) -> str:
    """The ledger as Markdown.

    Args:
        ledger (`Ledger`): The ledger.
        summaries (`dict`): Its [`checked_summaries`].

    Raises:
        ValueError: if an item lacks a value.
    """
    parts, counts = [], Counter()
    for paper in ledger.papers:
        rows, commands = [], {}
        for item in paper["items"]:
            verdict, lines = _lines(item, summaries, commands)
            counts[verdict] += 1
            rows += ["| " + " | ".join(cells) + " |" for cells in lines]
        header = "| what | theirs | ours | our scale | verdict |\n|---|---|---|---|---|"
        footnotes = "\n".join(f"{number}. `{command}`" for command, number in commands.items())
        parts.append(f"## {paper['paper']}\n\n{header}\n" + "\n".join(rows) + "\n\n" + footnotes)
    if ledger.not_claims:
        parts.append(
            FOOTER.format(folders="\n".join(f"- `{name}`: {what}" for name, what in ledger.not_claims.items()))
        )
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    header = HEADER.format(items=sum(counts.values()), total=total)
    return header + "\n\n" + "\n\n".join(part.rstrip() for part in parts) + "\n"


def render_failures(ledger: Ledger, summaries: Mapping[str, Any]) -> str:
    """Items that do not come out as in their paper, or were not run, as Markdown.

    See [`render`] for the arguments.

    Raises:
        ValueError: as [`render`], or if an item that does not come out has no `why`.
    """
    parts, missing, failed = [], [], 0
    for paper in ledger.papers:
        sections = []
        for item in paper["items"]:
            verdict, lines = _lines(item, summaries, {})
            if verdict == "not run":
                missing.append(f"- {item['what']} ({paper['paper']}). {item['why']}")
            if verdict != "not":
                continue
            if "why" not in item:
                raise ValueError(f"{item['what']!r} does not come out; say `why`.")
            failed += 1
            # A single setting stands in the first line, beside the notes of the item.
            (*_, first, scale, _), *others = lines
            found = [f"- here: {first} ({FOOTNOTE.sub('', scale)})"] if scale else []
            found += [f"- here: {ours} ({FOOTNOTE.sub('', where)}): {said}" for *_, ours, where, said in others]
            text = [f"### {item['what']}", f"- in the paper: {item['theirs']}\n" + "\n".join(found), item["why"]]
            sections.append("\n\n".join(text))
        if sections:
            parts.append(f"## {paper['paper']}\n\n" + "\n\n".join(sections))
    if missing:
        parts.append("## Not run\n\n" + "\n".join(missing))
    header = FAILURES_HEADER.format(failed=failed, items=len(ledger.items), missing=len(missing))
    return header + "\n\n" + "\n\n".join(parts) + "\n"


def _lines(
    item: Mapping[str, Any], summaries: Mapping[str, Any], commands: dict[str, int]
) -> tuple[str, list[tuple[str, ...]]]:
    """The verdict on an item, and its lines in the table: one, or one for each setting below that of the item."""
    counted, left_out = [], []
    for setting in settings_of(item):
        scale = setting["scale"]
        if "command" in setting:
            scale += f" [{commands.setdefault(setting['command'], len(commands) + 1)}]"
        try:
            values = values_of(setting, summaries)
            ours = setting["ours"].format_map(values)
            verdict = None if "left_out" in setting else verdict_of(item, values)
        except (ValueError, KeyError) as error:
            if "left_out" not in setting:
                reason = f"`ours` names {error}, which has no value." if isinstance(error, KeyError) else error
                raise ValueError(f"{item['what']!r} in {setting['summaries']}: {reason}") from error
            ours = "–"
        if "left_out" in setting:
            left_out.append(("", "", ours, scale, f"left out: {setting['left_out']}"))
        else:
            counted.append((ours, scale, verdict))
    verdict = max((verdict for *_, verdict in counted), key=VERDICTS.index, default=verdict_of(item, None))
    sentences = [item[key] for key in ("why", "only") if key in item]
    notes = ". ".join([f"**{verdict}**", *[" ".join(sentences)][: len(sentences)]])
    if not counted:
        scale = f"a test, {item['test'].partition('::')[0]}" if "test" in item else ""
        return verdict, [(item["what"], item["theirs"], item.get("ours", "–"), scale, notes)]
    if len(counted) == 1:
        (ours, scale, _), *_ = counted
        return verdict, [(item["what"], item["theirs"], ours, scale, notes), *left_out]
    first = (item["what"], item["theirs"], f"{len(counted)} settings:", "", notes)
    return verdict, [first, *(("", "", *line) for line in counted), *left_out]


def main(args: ReproductionArguments) -> str:
    """Writes the ledger; returns its text."""
    with refuse_bad_input():
        ledger = read_ledger(Path(args.ledger))
        summaries = checked_summaries(ledger, Path(args.results))
        text, failures = render(ledger, summaries), render_failures(ledger, summaries)
        write_text(args.output, text)
        write_text(args.failures, failures)
    print(text)
    return text


if __name__ == "__main__":
    run_recipe(main)
