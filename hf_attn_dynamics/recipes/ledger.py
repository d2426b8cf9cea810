# Licensed under the Apache License, Version 2.0.
"""Ledger of comparisons between papers and summaries of runs, its checks and its verdicts.

Folders are relative to that of the results, and `*` matches several. The ledger has three parts:

    experiments  name: list of folders whose summaries bear on the same claims
    not_claims   folder: what it is, for summaries that no paper claims anything about
    papers       list of `{paper, items}`

and an item has

    what        the table or figure, and its quantity
    theirs      the value in the paper, as text
    experiment  name of its experiment, or a list of names
    settings    list of what was run, `{scale, summaries, command}`, each with `values` and `ours` of its own if they
                differ; and with `left_out`, a reason, if the claim is not about it. An item with one setting has these
                keys itself
    scale       at which scale, and on which data
    summaries   folders of the setting, whose values are averaged; or `{group: folders}`
    command     what made the summaries: `…` for what is left out, `&&` between two
    values      name: place of a number in a summary, a key, or a list of keys that follow each other (the first is
                the group, if there are groups); in a list of rows a number is a place, and `{column: value}` the one
                row that has it. A claim that is not judged, whose `holds` is null, counts as 0
    ours        text with values in braces, for instance `{guided:.2f}`
    order       comparisons that the paper's qualitative claim comes down to, `a < b` or `a > b` with names or numbers
    same        comparisons that make it the same value or claim: those, or `a within 0.01 of b`
    only        a sentence on which part of the summaries the item is about, if they hold the same quantity for more
    test        for what needs no run: the test that holds the claim, `FILE::NAME`, with what it finds as `ours`
    why         what stands in the way, for items without summaries and test; or a reason for the verdict

The verdict on a setting is **reproduced** if all comparisons hold and there is one of `same`, **ordering only** if
those of `order` hold, and **not** if they do not. The verdict on an item is that of its worst setting; it is
**reproduced** with a test, and **not run** without summaries and test.

So that an item claims no more than its summaries show, a ledger is refused

    - if an item uses some summaries of its experiment and not all of them; a setting with `left_out` stands in the
      table, with its values, and does not count. The summary of a sweep stands for the runs below it, if they are as
      many as it counts, and they stand for it
    - if a setting averages summaries whose commands differ in more than the seed
    - if a summary has the same quantity for another model, relation or row, no item shows that, and the item does not
      say what it is about (`only`)
    - if a summary is in no experiment and not among `not_claims`, or an experiment in no item
"""

import json
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from types import NoneType
from typing import Any

import yaml

from .run import SUMMARY


PARTS = ("experiments", "not_claims", "papers")
SETTING_KEYS = ("scale", "summaries", "command", "values", "ours", "left_out")
KEYS = (
    *("what", "theirs", "experiment", "settings", "scale", "summaries", "command", "values", "ours"),
    *("order", "same", "only", "test", "why"),
)
VERDICTS = ("reproduced", "ordering only", "not", "not run")  # from best to worst
COMPARISONS = {"<": operator.lt, ">": operator.gt}
SEED_FLAGS = re.compile(r" --(seed|output_dir|resume) ('[^']*'|\S+)")


@dataclass(frozen=True)
class Ledger:
    """What is compared with the papers.

    Attributes:
        papers (`list[dict[str, Any]]`): `{paper, items}`.
        experiments (`dict[str, list[str]]`): Folders of each experiment, with `*` for several.
        not_claims (`dict[str, str]`): Folders whose summaries are not about a claim, and what they are.
    """

    papers: list[dict[str, Any]]
    experiments: dict[str, list[str]]
    not_claims: dict[str, str]

    @property
    def items(self) -> list[dict[str, Any]]:
        return [item for paper in self.papers for item in paper["items"]]

    @property
    def commands(self) -> list[str]:
        settings = (setting for item in self.items for setting in settings_of(item))
        return sorted({setting["command"] for setting in settings if "command" in setting})


def read_ledger(path: Path) -> Ledger:
    """The ledger in a file.

    Raises:
        ValueError: if the file is not a ledger; the message names the item.
    """
    parts = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(parts, dict) or set(parts) != set(PARTS):
        raise ValueError(f"{path} must have the parts {', '.join(PARTS)}.")
    papers = parts["papers"]
    if not isinstance(papers, list) or not all(isinstance(paper, dict) and "items" in paper for paper in papers):
        raise ValueError(f"`papers` in {path} must be a list of papers, each with `paper` and `items`.")
    ledger = Ledger(papers, parts["experiments"] or {}, parts["not_claims"] or {})
    for item in ledger.items:
        _check_keys(item, path)
    return ledger


def _check_keys(item: Mapping[str, Any], path: Path) -> None:
    if unknown := sorted(set(item) - set(KEYS)):
        raise ValueError(f"{item.get('what')!r} in {path} has the key {unknown[0]!r}; known are {', '.join(KEYS)}.")
    if "what" not in item or "theirs" not in item:
        raise ValueError(f"{item} in {path} needs `what` and `theirs`.")
    named = f"{item['what']!r} in {path}"
    settings = settings_of(item)
    for setting in settings:
        if unknown := sorted(set(setting) - set(SETTING_KEYS)):
            raise ValueError(f"a setting of {named} has the key {unknown[0]!r}; known are {', '.join(SETTING_KEYS)}.")
        if "summaries" not in setting or "scale" not in setting:
            raise ValueError(f"each setting of {named} needs `scale` and `summaries`.")
        if not (setting.get("values") and setting.get("ours") and item.get("order")):
            raise ValueError(f"{named} has summaries; it needs `values`, `ours` and `order`, too.")
    if settings and "experiment" not in item:
        raise ValueError(f"{named} has summaries; it needs `experiment`, too.")
    if settings and all("left_out" in setting for setting in settings):
        raise ValueError(f"{named} leaves out all of its settings.")
    if "test" in item and (settings or "ours" not in item):
        raise ValueError(f"{named} has a test; it needs `ours`, and no summaries.")
    if not settings and "test" not in item and "why" not in item:
        raise ValueError(f"{named} has no summaries; say `why`.")


def settings_of(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Settings of an item, each with the keys that it shares with the others."""
    shared = {key: item[key] for key in SETTING_KEYS if key in item}
    if "settings" in item:
        return [{**shared, **setting} for setting in item["settings"]]
    return [shared] if "summaries" in item else []


def summaries_below(results: Path) -> dict[str, Any]:
    """All summaries, by their folder below `results`."""
    paths = sorted(results.rglob(SUMMARY))
    return {
        path.parent.relative_to(results).as_posix(): json.loads(path.read_text(encoding="utf-8")) for path in paths
    }


def folders_of(patterns: str | list[str], summaries: Mapping[str, Any]) -> list[str]:
    """Folders of the summaries that patterns such as `run/seed-*` name.

    Raises:
        ValueError: if a pattern names none.
    """
    found = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        wanted = pattern.split("/")
        folders = [
            folder
            for folder in summaries
            if len(parts := folder.split("/")) == len(wanted) and all(map(fnmatchcase, parts, wanted))
        ]
        if not folders:
            raise ValueError(f"there is no {SUMMARY} in {pattern}.")
        found.update(dict.fromkeys(folders))
    return list(found)


def groups_of(setting: Mapping[str, Any], summaries: Mapping[str, Any]) -> dict[str | None, list[str]]:
    """Folders of a setting, by group; the group is None where there are no groups."""
    named = setting["summaries"]
    return {
        group: folders_of(patterns, summaries)
        for group, patterns in (named if isinstance(named, dict) else {None: named}).items()
    }


def places_of(
    setting: Mapping[str, Any], summaries: Mapping[str, Any]
) -> Iterator[tuple[str, list[str], str | list[Any]]]:
    """Name, folders and place of each value of a setting."""
    groups = groups_of(setting, summaries)
    for name, place in setting["values"].items():
        if None in groups:
            yield name, groups[None], place
        elif isinstance(place, list) and place[0] in groups:
            yield name, groups[place[0]], place[1:]
        else:
            raise ValueError(f"{name} is at {place}; the first of its keys must be a group, {' or '.join(groups)}.")


def exact_place(summary: Any, place: str | list[Any]) -> tuple[str | int, ...]:
    """A place such as `[rows, {method: gates, heads: 36}, accuracy]`, with the number of each row.

    Raises:
        ValueError: if there is no such place.
    """
    found, exact = summary, []
    for key in [place] if isinstance(place, str) else place:
        if isinstance(key, dict) and isinstance(found, list):
            rows = [i for i, row in enumerate(found) if all(row.get(name) == value for name, value in key.items())]
            if len(rows) != 1:
                raise ValueError(f"{key} in {place} fits {len(rows)} rows; it must fit one.")
            key = rows[0]
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"there is no {key!r} on the way to {place}.") from error
        exact.append(key)
    return tuple(exact)


def number_at(summary: Any, place: str | list[Any]) -> float:
    """The number at a place; 0 for a claim that is not judged, whose `holds` is null.

    Raises:
        ValueError: if there is none, or not one.
    """
    exact = exact_place(summary, place)
    found = _value_at(summary, exact)
    if found is None and exact[-1] == "holds":
        return 0.0
    if not isinstance(found, (int, float)):
        raise ValueError(f"{place} is no number, but {found!r}.")
    return float(found)


def _value_at(summary: Any, exact: tuple[str | int, ...]) -> Any:
    for key in exact:
        summary = summary[key]
    return summary


def places_beside(summary: Any, exact: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Places of the same quantity for another model, relation or row: all but one key on the way are the same."""
    # Verdicts on claims are no quantity; one that is not judged is None.
    if isinstance(_value_at(summary, exact), (bool, NoneType)):
        return
    found = summary
    for depth, key in enumerate(exact[:-1]):
        others = enumerate(found) if isinstance(found, list) else found.items() if depth else ()
        for other, value in others:
            if other == key or not isinstance(value, dict):
                continue
            beside = (*exact[:depth], other, *exact[depth + 1 :])
            try:
                number_at(summary, list(beside))
            except ValueError:
                continue
            yield beside
        found = found[key]


def values_of(setting: Mapping[str, Any], summaries: Mapping[str, Any]) -> dict[str, float]:
    """Values of a setting, each the mean over its summaries.

    Raises:
        ValueError: if a summary lacks a value.
    """
    return {
        name: fmean(number_at(summaries[folder], place) for folder in folders)
        for name, folders, place in places_of(setting, summaries)
    }


def check_ledger(ledger: Ledger, summaries: Mapping[str, Any]) -> None:
    """Refuses a ledger whose items claim more than their summaries show.

    Raises:
        ValueError: the message names the item and the folder.
    """
    experiments = {name: folders_of(patterns, summaries) for name, patterns in ledger.experiments.items()}
    claimed = {folder for folders in experiments.values() for folder in folders}
    others = set(folders_of(list(ledger.not_claims), summaries))
    for folder in summaries:
        if (folder in claimed) == (folder in others):
            raise ValueError(
                f"{folder} must be in an experiment, or else among `not_claims`; it is in "
                f"{'both' if folder in claimed else 'neither'}."
            )
    used = set()
    shown = _shown_places(ledger, summaries)
    for item in ledger.items:
        try:
            names = item.get("experiment", [])
            names = [names] if isinstance(names, str) else names
            if unknown := [name for name in names if name not in experiments]:
                raise ValueError(f"experiment {unknown[0]!r} is not one of {', '.join(experiments)}.")
            used.update(names)
            _check_settings(item, {folder: name for name in names for folder in experiments[name]}, summaries)
            if "only" not in item:
                _check_places(item, shown, summaries)
        except ValueError as error:
            raise ValueError(f"{item['what']!r}: {error}") from error
    if unused := [name for name in experiments if name not in used]:
        raise ValueError(f"no item is about the experiment {unused[0]!r}.")


def checked_summaries(ledger: Ledger, results: Path) -> dict[str, Any]:
    """All summaries below a folder, by folder, if they support a ledger.

    Raises:
        ValueError: see [`check_ledger`].
    """
    summaries = summaries_below(results)
    check_ledger(ledger, summaries)
    return summaries


def _shown_places(ledger: Ledger, summaries: Mapping[str, Any]) -> set[tuple[str, tuple[str | int, ...]]]:
    shown = set()
    for item in ledger.items:
        for setting in settings_of(item):
            try:
                for _, folders, place in places_of(setting, summaries):
                    shown.update((folder, exact_place(summaries[folder], place)) for folder in folders)
            except ValueError as error:
                if "left_out" not in setting:
                    raise ValueError(f"{item['what']!r} in {setting['summaries']}: {error}") from error
    return shown


def _check_settings(item: Mapping[str, Any], bearing: Mapping[str, str], summaries: Mapping[str, Any]) -> None:
    """All summaries of the experiments (folder: experiment) are used, and averages are over seeds."""
    used = set()
    for setting in settings_of(item):
        for folders in groups_of(setting, summaries).values():
            used.update(folders)
            commands = {SEED_FLAGS.sub("", summaries[folder].get("command", "")) for folder in folders}
            if len(commands) > 1:
                raise ValueError(f"{', '.join(folders)} differ in more than the seed; make them different settings.")
    if others := sorted(used - set(bearing)):
        raise ValueError(f"{others[0]} is not in its experiment, {item['experiment']}.")
    covered = set(used)
    for folder in bearing:
        runs = {other for other in bearing if other.rpartition("/")[0] == folder}
        counted = summaries[folder].get("runs")
        if folder in used and counted == len(runs - used):
            covered |= runs
        elif counted is not None and runs and runs <= used:
            covered.add(folder)
    if left := [folder for folder in bearing if folder not in covered]:
        raise ValueError(
            f"it leaves out {left[0]}, of its experiment {bearing[left[0]]!r}; make it a setting, and say why in "
            "`left_out` if the claim is not about it."
        )


def _check_places(item: Mapping[str, Any], shown: set, summaries: Mapping[str, Any]) -> None:
    for setting in settings_of(item):
        if "left_out" in setting:
            continue
        for _, folders, place in places_of(setting, summaries):
            for folder in folders:
                for beside in places_beside(summaries[folder], exact_place(summaries[folder], place)):
                    if (folder, beside) not in shown:
                        raise ValueError(
                            f"it shows {place} of {folder}, and no item shows {list(beside)}; show it, or say in "
                            "`only` what the item is about."
                        )


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
    """One of `VERDICTS`, on one setting; without values, on an item that has none."""
    if values is None:
        return "reproduced" if "test" in item else "not run"
    if not all(holds(comparison, values) for comparison in item["order"]):
        return "not"
    same = item.get("same", [])
    return "reproduced" if same and all(holds(comparison, values) for comparison in same) else "ordering only"
