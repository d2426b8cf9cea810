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

from hf_attn_dynamics.recipes import reproduction
from hf_attn_dynamics.recipes import run as runs
from hf_attn_dynamics.recipes.arguments.reproduction import ReproductionArguments
from hf_attn_dynamics.recipes.ledger import Ledger, check_ledger, checked_summaries, read_ledger, summaries_below
from hf_attn_dynamics.recipes.sweeps import Sweep


ROOT = Path(__file__).parents[2]


DOCS = ROOT / "docs"
LEDGER = read_ledger(DOCS / "reproduction.yaml")
SUMMARIES = summaries_below(DOCS / "results")
ITEM = {
    "what": "Table 1: loss",
    "theirs": "3 → 2",
    "experiment": "run",
    "command": "python train.py",
    "scale": "small",
    "summaries": "run/seed-*",
    "values": {
        "plain": "loss",
        "guided": ["rows", {"method": "guided", "heads": 2}, "losses", 0],
        "single": ["rows", {"method": "guided", "heads": 1}, "losses", 0],
    },
    "ours": "{plain:.1f} → {guided:.1f}",
    "order": ["guided < plain"],
}


@pytest.fixture
def results(tmp_path):
    for seed, loss in ((1, 3.0), (2, 5.0)):
        rows = [{"method": "guided", "heads": heads, "losses": [loss - heads]} for heads in (1, 2)]
        add_summary(tmp_path / "results", f"run/seed-{seed}", loss=loss, name="x", rows=rows)
    return tmp_path / "results"


def add_summary(results, folder, **summary):
    (results / folder).mkdir(parents=True)
    (results / folder / "summary.json").write_text(json.dumps(summary))


def ledger_of(folder, *items, experiments=None, not_claims=None):
    path = folder / "ledger.yaml"
    parts = {
        "experiments": experiments or {"run": ["run/*"]},
        "not_claims": not_claims or {},
        "papers": [{"paper": "A paper", "items": list(items)}],
    }
    path.write_text(yaml.safe_dump(parts, allow_unicode=True))
    return path


def page(ledger, results, render=reproduction.render):
    ledger = read_ledger(ledger)
    return render(ledger, checked_summaries(ledger, results))


def lines_of(ledger, results):
    """Cells of the lines in the table of a ledger."""
    text = page(ledger, results)
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]


def test_the_ledger_in_the_documentation_is_that_of_the_summaries():
    text = reproduction.render(LEDGER, checked_summaries(LEDGER, DOCS / "results"))
    assert (DOCS / "REPRODUCTION.md").read_text(encoding="utf-8") == text


def test_the_page_of_failures_is_that_of_the_summaries_and_has_all_of_them():
    text = reproduction.render_failures(LEDGER, SUMMARIES)
    assert (DOCS / "what_did_not_replicate.md").read_text(encoding="utf-8") == text
    counts = re.search(r"(\d+) not, (\d+) not run", (DOCS / "REPRODUCTION.md").read_text(encoding="utf-8"))
    assert (text.count("\n### "), text.partition("## Not run")[2].count("\n- ")) == tuple(map(int, counts.groups()))


def test_a_failure_stands_with_all_its_settings_and_its_reason(results, tmp_path):
    failed = {**ITEM, "order": ["guided > plain"], "why": "It is too small."}
    other = {"what": "Table 2", "theirs": "7", "why": "There are no data."}
    text = page(ledger_of(tmp_path, failed, other), results, reproduction.render_failures)
    start = "### Table 1: loss\n\n- in the paper: 3 → 2\n- here: "
    assert f"{start}4.0 → 2.0 (small)\n\nIt is too small." in text
    settings = [
        {"scale": "seed 1", "summaries": "run/seed-1"},
        {"scale": "seed 2", "summaries": "run/seed-2", "left_out": "other data"},
    ]
    several = {key: value for key, value in failed.items() if key not in ("scale", "summaries")}
    found = ledger_of(tmp_path, {**several, "settings": settings}, other)
    text = page(found, results, reproduction.render_failures)
    assert f"{start}3.0 → 1.0 (seed 1)\n- here: 5.0 → 3.0 (seed 2): left out: other data\n\nIt" in text
    del settings[1]["left_out"]
    found = ledger_of(tmp_path, {**several, "settings": settings}, other)
    text = page(found, results, reproduction.render_failures)
    assert f"{start}3.0 → 1.0 (seed 1): not\n- here: 5.0 → 3.0 (seed 2): not\n\nIt" in text
    assert "- Table 2 (A paper). There are no data." in text
    assert "These 1 of 2 tables" in text
    del failed["why"]
    ledger = ledger_of(tmp_path, failed, other)
    with pytest.raises(ValueError, match="'Table 1: loss' does not come out; say `why`"):
        page(ledger, results, reproduction.render_failures)


def test_tests_of_the_ledger_are_there():
    named = [item["test"].split("::") for item in LEDGER.items if "test" in item]
    assert named
    assert all(f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") for file, name in named)


@pytest.mark.parametrize("command", [part for command in LEDGER.commands for part in command.split(" && ")])
def test_recipes_take_the_flags_of_the_ledger(command, monkeypatch):
    # A flag goes with a value that is left out.
    words = shlex.split(re.sub(r"(--\w+ (\w+=)?)?…", "", command))
    [recipe] = (place for place, word in enumerate(words) if word.startswith("recipes/") and word.endswith(".py"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", words[recipe:])
    parsed = []
    monkeypatch.setattr(
        runs,
        "run_recipe",
        lambda main, presets=None, *_: parsed.append(runs.parse_yaml_or_flags(*runs.flags_of(main), presets=presets)),
    )
    runpy.run_path(words[recipe], run_name="__main__")
    [(args, *_)] = parsed
    if words[recipe] == "recipes/sweep.py":
        assert Sweep.load(args.sweep).runs()


@pytest.mark.parametrize("text", ["[]", "papers: []", "experiments: {}\nnot_claims: {}\npapers: [{paper: A}]"])
def test_a_file_that_is_not_a_ledger_is_refused(text, tmp_path):
    path = tmp_path / "ledger.yaml"
    path.write_text(text)
    with pytest.raises(
        ValueError, match="must have the parts experiments, not_claims, papers|must be a list of papers"
    ):
        read_ledger(path)


def test_values_are_means_over_summaries_and_verdicts_follow_from_them(results, tmp_path):
    items = [
        {**ITEM, "same": ["guided within 0.1 of 2"]},
        {**ITEM, "same": ["guided within 0.1 of 2.2"], "why": "It is small."},
        ITEM,
        {**ITEM, "order": ["guided > plain"], "same": ["plain > 3"], "why": "It differs."},
        {"what": "Table 2", "theirs": "4", "why": "No data."},
        {"what": "Table 3", "theirs": "5", "test": "tests/test_it.py::test_five", "ours": "5.0"},
    ]
    output = tmp_path / "out" / "LEDGER.md"
    output.parent.mkdir()
    ledger = ledger_of(tmp_path, *items)
    reproduction.main(ReproductionArguments(str(ledger), str(results), str(output), str(tmp_path / "failures.md")))
    rows = [line.split(" | ") for line in output.read_text().splitlines() if line.startswith("| Table")]
    assert [row[2] for row in rows] == ["4.0 → 2.0"] * 4 + ["–", "5.0"]
    assert [row[4].removesuffix(" |") for row in rows] == [
        "**reproduced**",
        "**ordering only**. It is small.",
        "**ordering only**",
        "**not**. It differs.",
        "**not run**. No data.",
        "**reproduced**",
    ]
    assert "6 items: 2 reproduced, 2 ordering only, 1 not, 1 not run" in output.read_text()
    # A command that several items share is listed once.
    assert output.read_text().count("`python train.py`") == 1
    assert rows[-1][3] == "a test, tests/test_it.py"


@pytest.mark.parametrize(
    ("answer", "verdict"), [(True, "reproduced"), (False, "ordering only"), (None, "ordering only")]
)
def test_a_claim_that_is_not_judged_is_not_reproduced(answer, verdict, tmp_path):
    claims = {"uniform": {"holds": answer, "distance": 0.1}, "faded": {"holds": True}}
    add_summary(tmp_path / "results", "run/one", claims=claims)
    values = {"distance": ["claims", "uniform", "distance"], "holds": ["claims", "uniform", "holds"]}
    item = {
        **ITEM,
        "summaries": "run/one",
        "values": values,
        "ours": "{distance:.1f}",
        "order": ["distance < 1"],
        "same": ["holds > 0"],
    }
    ((*_, shown),) = lines_of(ledger_of(tmp_path, item), tmp_path / "results")
    assert shown == f"**{verdict}**"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": "yes"}, "has the key 'verdict'; known are what"),
        ({"experiment": "walk"}, "'walk' is not one of run"),
        ({"settings": [{"summaries": "run/seed-*", "verdict": "yes"}]}, "has the key 'verdict'; known are scale"),
        ({"settings": [{"left_out": "It fails."}]}, "leaves out all of its settings"),
        ({"summaries": {"all": "run/seed-*"}}, "the first of its keys must be a group, all"),
        ({"summaries": "walk"}, "there is no summary.json in"),
        ({"values": {"plain": "name"}}, "'name' is no number|name is no number"),
        ({"values": {"plain": ["rows", {"method": "guided"}, "losses", 0]}}, "fits 2 rows"),
        ({"values": {"plain": ["rows", 7]}}, "there is no 7 on the way"),
        ({"values": {"plain": "accuracy"}}, "there is no 'accuracy'"),
        ({"order": ["guided = plain"]}, "'guided = plain' is no comparison"),
        ({"order": ["guided < paper"]}, "could not convert string to float: 'paper'"),
        ({"ours": "{paper}"}, "`ours` names 'paper', which has no value"),
        ({"order": []}, "needs `values`, `ours` and `order`"),
        ({"test": "tests/test_it.py::test_five"}, "has a test; it needs `ours`, and no summaries"),
    ],
    ids=[
        "key",
        "experiment",
        "setting",
        "none-left",
        "group",
        "folder",
        "text",
        "two-rows",
        "place",
        "missing",
        "comparison",
        "name",
        "no-value",
        "no-order",
        "test",
    ],
)
def test_what_the_ledger_can_not_say_is_refused(changes, message, results, tmp_path, capsys):
    ledger = ledger_of(tmp_path, {**ITEM, **changes})
    with pytest.raises(SystemExit):
        reproduction.main(
            ReproductionArguments(str(ledger), str(results), str(tmp_path / "x.md"), str(tmp_path / "y.md"))
        )
    errors = capsys.readouterr().err
    assert any(part in errors for part in message.split("|"))
    assert not (tmp_path / "x.md").exists()


A = {"scale": "A", "summaries": "run/a"}
B = {"scale": "B", "summaries": "run/b"}
C = {"scale": "C", "summaries": "run/c", "command": "python more.py"}
SETTINGS = {
    "what": "Figure 1",
    "theirs": "more than 2",
    "experiment": "run",
    "values": {"x": "x"},
    "ours": "{x:.0f}",
    "order": ["x > 0"],
    "same": ["x > 2"],
}


@pytest.fixture
def three_settings(tmp_path):
    for name, x in (("a", 3), ("b", 1), ("c", -1)):
        add_summary(tmp_path / "results", f"run/{name}", x=x)
    return tmp_path / "results"


def test_an_item_that_leaves_out_a_summary_of_its_experiment_is_refused(three_settings, tmp_path):
    ledger = ledger_of(tmp_path, {**SETTINGS, "settings": [A, B]})
    with pytest.raises(
        ValueError, match="'Figure 1': it leaves out run/c, of its experiment 'run'; make it a setting"
    ):
        lines_of(ledger, three_settings)


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [([A], "reproduced"), ([A, B], "ordering only"), ([B, A], "ordering only"), ([A, C, B], "not")],
    ids=["one", "a-worse-last", "a-worse-first", "worst-in-the-middle"],
)
def test_the_worst_setting_decides(settings, verdict, three_settings, tmp_path):
    folders = [setting["summaries"] for setting in settings]
    experiments = {"run": folders, "others": ["run/*"]}
    others = {**SETTINGS, "what": "Figure 2", "experiment": "others", "settings": [A, B, C]}
    ledger = ledger_of(tmp_path, {**SETTINGS, "settings": settings}, others, experiments=experiments)
    lines = lines_of(ledger, three_settings)
    assert lines[0][-1] == f"**{verdict}**"
    if len(settings) > 1:
        own = {"A": "reproduced", "B": "ordering only", "C": "not"}
        shown = [tuple(line[-2:]) for line in lines[1 : 1 + len(settings)]]
        assert [verdict for _, verdict in shown] == [own[scale[0]] for scale, _ in shown]
        assert [scale[0] for scale, _ in shown] == [setting["scale"] for setting in settings]


def test_a_setting_that_is_left_out_is_shown_with_its_reason_and_does_not_count(three_settings, tmp_path):
    without = {**B, "values": {"y": "y"}, "left_out": "no such value"}
    settings = [A, without, {**C, "left_out": "other data"}]
    lines = lines_of(ledger_of(tmp_path, {**SETTINGS, "settings": settings}), three_settings)
    assert lines[0] == ["Figure 1", "more than 2", "3", "A", "**reproduced**"]
    assert [line[-3:] for line in lines[1:]] == [
        ["–", "B", "left out: no such value"],
        ["-1", "C [1]", "left out: other data"],
    ]


def test_only_seeds_are_averaged(tmp_path):
    results = tmp_path / "results"
    for seed, rate in ((1, "1e-3"), (2, "1e-3"), (3, "3e-3")):
        command = f"train.py --seed {seed} --rate {rate} --output_dir 'runs/λ {seed}' --resume true"
        add_summary(results, f"run/{seed}", x=seed, command=command)
    item = {**SETTINGS, "scale": "all", "summaries": "run/*"}
    with pytest.raises(ValueError, match="run/1, run/2, run/3 differ in more than the seed"):
        lines_of(ledger_of(tmp_path, item), results)
    settings = [{"scale": "1e-3", "summaries": ["run/1", "run/2"]}, {"scale": "3e-3", "summaries": "run/3"}]
    lines = lines_of(ledger_of(tmp_path, {**SETTINGS, "ours": "{x}", "settings": settings}), results)
    assert [line[-3] for line in lines[1:]] == ["1.5", "3.0"]


@pytest.mark.parametrize(
    ("experiments", "not_claims", "message"),
    [
        ({"run": ["run/a"]}, {"run/b": "time"}, "run/c must be in an experiment, or else among `not_claims`.*neither"),
        ({"run": ["run/*"]}, {"run/b": "time"}, "run/b must be .* it is in both"),
        ({"run": ["run/*"], "walk": ["run/c"]}, {}, "no item is about the experiment 'walk'"),
        ({"run": ["run/a"], "walk": ["run/b", "run/c"]}, {}, "run/b is not in its experiment, run"),
        ({"run": ["run/*", "walk/*"]}, {}, "there is no summary.json in walk"),
    ],
    ids=["neither", "both", "unused", "of-another", "missing"],
)
def test_no_summary_is_left_out_in_silence(experiments, not_claims, message, three_settings, tmp_path):
    item = {**SETTINGS, "settings": [A, B, C]}
    ledger = ledger_of(tmp_path, item, experiments=experiments, not_claims=not_claims)
    with pytest.raises(ValueError, match=message):
        lines_of(ledger, three_settings)


def test_summaries_that_are_not_about_a_claim_are_listed(three_settings, tmp_path):
    experiments, not_claims = {"run": ["run/a", "run/b"]}, {"run/c": "time"}
    ledger = ledger_of(tmp_path, {**SETTINGS, "settings": [A, B]}, experiments=experiments, not_claims=not_claims)
    assert "- `run/c`: time" in page(ledger, three_settings)


def test_the_summary_of_a_sweep_stands_for_as_many_runs_as_it_counts(three_settings, tmp_path):
    (three_settings / "run" / "summary.json").write_text(json.dumps({"x": 3, "runs": 3}))
    experiments = {"run": ["run", "run/*"]}
    sweep_alone = ledger_of(tmp_path, {**SETTINGS, "scale": "sweep", "summaries": "run"}, experiments=experiments)
    assert lines_of(sweep_alone, three_settings)[0][2] == "3"
    add_summary(three_settings, "run/d", x=-9)
    with pytest.raises(ValueError, match="it leaves out run/a"):
        lines_of(sweep_alone, three_settings)
    # The run that the sweep does not count is a setting of its own; or all runs are, which then stand for the sweep.
    settings = [{"scale": "sweep", "summaries": "run"}, {"scale": "D", "summaries": "run/d"}]
    ledger = ledger_of(tmp_path, {**SETTINGS, "settings": settings}, experiments=experiments)
    assert lines_of(ledger, three_settings)[0][-1] == "**not**"
    ledger = ledger_of(tmp_path, {**SETTINGS, "scale": "runs", "summaries": "run/*"}, experiments=experiments)
    assert lines_of(ledger, three_settings)[0][2] == "-2"


def test_a_value_of_one_model_alone_is_refused_unless_the_item_says_so(tmp_path):
    results = tmp_path / "results"
    other = {"FC": {"near": 0.04, "median": 0.3}, "TC": {"near": 0.68, "median": 0.07}}
    add_summary(
        results, "run/a", other=other, rows=[{"heads": 6, "left": 4}, {"heads": 24, "left": 9}], note={"TC": "x"}
    )
    item = {**SETTINGS, **A, "values": {"x": ["other", "TC", "near"]}, "ours": "{x:.0%}"}
    with pytest.raises(ValueError, match=r"'Figure 1': it shows \['other', 'TC', 'near'\] of run/a.*'FC'"):
        lines_of(ledger_of(tmp_path, item), results)
    with pytest.raises(ValueError, match=r"no item shows \['rows', 1, 'left'\]"):
        lines_of(ledger_of(tmp_path, {**item, "values": {"x": ["rows", {"heads": 6}, "left"]}}), results)
    lines = lines_of(ledger_of(tmp_path, {**item, "only": "It is about TC.", "why": "It is."}), results)
    assert lines[0][-1] == "**ordering only**. It is. It is about TC."
    # Another item that shows the value will do.
    other = {**item, "what": "Figure 2", "values": {"x": ["other", "FC", "near"]}}
    assert [line[2] for line in lines_of(ledger_of(tmp_path, item, other), results)] == ["68%", "4%"]


def test_values_of_a_setting_come_from_groups_of_summaries(three_settings, tmp_path):
    item = {
        **SETTINGS,
        "scale": "both",
        "summaries": {"high": "run/a", "low": ["run/b", "run/c"]},
        "values": {"x": ["high", "x"], "y": ["low", "x"]},
        "ours": "{x:.0f} and {y:.0f}",
        "order": ["y < x"],
    }
    assert lines_of(ledger_of(tmp_path, item), three_settings)[0][2:] == ["3 and 0", "both", "**reproduced**"]


def changed(what, change):
    """The ledger with one item changed."""
    papers = json.loads(json.dumps(LEDGER.papers))  # not copy.deepcopy: items share settings
    [item] = (item for paper in papers for item in paper["items"] if item["what"] == what)
    change(item)
    return Ledger(papers, LEDGER.experiments, LEDGER.not_claims)


def lonely_settings():
    """Settings of the ledger whose summaries no other setting of their item uses."""
    for item in LEDGER.items:
        for number, setting in enumerate(item.get("settings", [])):
            if sum(setting["summaries"] == other["summaries"] for other in item["settings"]) == 1:
                yield pytest.param(item["what"], number, id=f"{item['what'][:40]}-{number}")


@pytest.mark.parametrize(("what", "number"), list(lonely_settings()))
def test_no_setting_can_be_taken_out_of_the_ledger(what, number):
    ledger = changed(what, lambda item: item["settings"].pop(number))
    with pytest.raises(ValueError, match=f"{re.escape(what)}': it leaves out "):
        check_ledger(ledger, SUMMARIES)


@pytest.mark.parametrize(
    ("start", "value"),
    [
        ("Figure 4, SST-2: fraction", "fc"),
        ("Figure 7, SST-2: topic purity", "fc_last"),
        ("Section 4.5: half of the heads", "most"),
        ("Table 2, WMT: pruned model", "scratch_6"),
        ("Section 5.1: the less capacity", "tl_norm"),
    ],
)
def test_no_model_or_row_can_be_taken_out_of_an_item(start, value):
    [what] = (item["what"] for item in LEDGER.items if item["what"].startswith(start))
    ledger = changed(what, lambda item: item["values"].pop(value))
    with pytest.raises(ValueError, match="and no item shows"):
        check_ledger(ledger, SUMMARIES)


def test_the_readme_counts_what_the_ledger_counts():
    total = r"(\d+) items: (\d+) reproduced, (\d+) ordering only, (\d+) not, (\d+) not run"
    sentence = (
        r"Of (\d+) tables, figures and claims of five papers, (\d+) are reproduced in all settings that were run, "
        r"(\d+) in their ordering only, (\d+) are not, and (\d+) were not run"
    )
    texts = [
        " ".join(path.read_text(encoding="utf-8").split()) for path in (DOCS / "REPRODUCTION.md", ROOT / "README.md")
    ]
    counts, in_readme = (re.search(pattern, text).groups() for pattern, text in zip((total, sentence), texts))
    assert in_readme == counts
