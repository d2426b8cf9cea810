# Licensed under the Apache License, Version 2.0.
"""The ledger of reproduced figures."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from hf_attn_dynamics import runs


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
import reproduction  # noqa: E402
import sweep  # noqa: E402


DOCS = ROOT / "docs"
LEDGER = reproduction.read_ledger(DOCS / "reproduction.yaml")
COMMANDS = sorted({item["command"] for paper in LEDGER for item in paper["items"] if "command" in item})
ITEM = {
    "what": "Table 1: loss",
    "theirs": "3 → 2",
    "command": "python train.py",
    "scale": "small",
    "summaries": "run/seed-*",
    "values": {"plain": "loss", "guided": ["rows", {"method": "guided", "heads": 2}, "losses", 0]},
    "ours": "{plain:.1f} → {guided:.1f}",
    "order": ["guided < plain"],
}


@pytest.fixture
def results(tmp_path):
    for seed, loss in ((1, 3.0), (2, 5.0)):
        folder = tmp_path / "results" / "run" / f"seed-{seed}"
        folder.mkdir(parents=True)
        rows = [{"method": "guided", "heads": heads, "losses": [loss - heads]} for heads in (1, 2)]
        (folder / "summary.json").write_text(json.dumps({"loss": loss, "name": "x", "rows": rows}))
    return tmp_path / "results"


def ledger_of(folder, *items):
    path = folder / "ledger.yaml"
    path.write_text(yaml.safe_dump([{"paper": "A paper", "items": list(items)}]))
    return path


def test_the_ledger_in_the_documentation_is_that_of_the_summaries():
    text = reproduction.render(LEDGER, DOCS / "results")
    assert (DOCS / "REPRODUCTION.md").read_text(encoding="utf-8") == text


def test_tests_of_the_ledger_are_there():
    named = [item["test"].split("::") for paper in LEDGER for item in paper["items"] if "test" in item]
    assert named
    assert all(f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") for file, name in named)


@pytest.mark.parametrize("command", [part for command in COMMANDS for part in command.split(" && ")])
def test_recipes_take_the_flags_of_the_ledger(command, monkeypatch):
    # A flag goes with a value that is left out.
    words = shlex.split(re.sub(r"(--\w+ (\w+=)?)?…", "", command))
    [recipe] = (place for place, word in enumerate(words) if word.startswith("recipes/") and word.endswith(".py"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", words[recipe:])
    if words[recipe] == "recipes/sweep.py":
        monkeypatch.setattr(sweep, "run_sweep", lambda *_: {})
        monkeypatch.setattr(sweep, "publish", lambda *_: "")
        sweep.main()
    else:
        parsed = []
        monkeypatch.setattr(
            runs,
            "run_recipe",
            lambda _, *types, presets=None: parsed.append(runs.parse_yaml_or_flags(*types, presets=presets)),
        )
        runpy.run_path(words[recipe], run_name="__main__")
        assert parsed


def test_values_are_means_over_summaries_and_verdicts_follow_from_them(results, tmp_path):
    items = [
        {**ITEM, "same": ["guided within 0.1 of 2"]},
        {**ITEM, "same": ["guided within 0.1 of 2.2"], "why": "It is small."},
        ITEM,
        {**ITEM, "order": ["guided > plain"], "same": ["plain > 3"]},
        {"what": "Table 2", "theirs": "4", "why": "No data."},
        {"what": "Table 3", "theirs": "5", "test": "tests/test_it.py::test_five", "ours": "5.0"},
    ]
    output = tmp_path / "out" / "LEDGER.md"
    output.parent.mkdir()
    ledger = ledger_of(tmp_path, *items)
    reproduction.main(["--ledger", str(ledger), "--results", str(results), "--output", str(output)])
    rows = [line.split(" | ") for line in output.read_text().splitlines() if line.startswith("| Table")]
    assert [row[2] for row in rows] == ["4.0 → 2.0"] * 4 + ["–", "5.0"]
    assert [row[4].removesuffix(" |") for row in rows] == [
        "**reproduced**",
        "**ordering only**. It is small.",
        "**ordering only**",
        "**not**",
        "**not run**. No data.",
        "**reproduced**",
    ]
    assert "6 items: 2 reproduced, 2 ordering only, 1 not, 1 not run" in output.read_text()
    # A command that several items share is listed once.
    assert output.read_text().count("`python train.py`") == 1
    assert rows[-1][3] == "a test, tests/test_it.py"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": "yes"}, "has the key 'verdict'; known are what"),
        ({"summaries": "walk"}, "there is no summary.json in"),
        ({"values": {"plain": "name"}}, "'name' is no number|name is no number"),
        ({"values": {"plain": ["rows", {"method": "guided"}, "losses", 0]}}, "fits 2 rows"),
        ({"values": {"plain": ["rows", 7]}}, "there is no 7 on the way"),
        ({"values": {"plain": "accuracy"}}, "there is no 'accuracy'"),
        ({"order": ["guided = plain"]}, "'guided = plain' is no comparison"),
        ({"order": ["guided < paper"]}, "could not convert string to float: 'paper'"),
        ({"order": []}, "needs `values`, `ours` and `order`"),
        ({"test": "tests/test_it.py::test_five"}, "has a test; it needs `ours`, and no summaries"),
    ],
    ids=["key", "folder", "text", "two-rows", "place", "missing", "comparison", "name", "no-order", "test"],
)
def test_what_the_ledger_can_not_say_is_refused(changes, message, results, tmp_path, capsys):
    ledger = ledger_of(tmp_path, {**ITEM, **changes})
    with pytest.raises(SystemExit):
        reproduction.main(["--ledger", str(ledger), "--results", str(results), "--output", str(tmp_path / "x.md")])
    errors = capsys.readouterr().err
    assert any(part in errors for part in message.split("|"))
    assert not (tmp_path / "x.md").exists()
