import dataclasses
import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
from accelerate import PartialState
from cards import write_card
from tiny_models import tiny_model
from transformers import TrainingArguments

from hf_attn_dynamics import cli
from hf_attn_dynamics._files import ENDS, write_text
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes import JOBS
from hf_attn_dynamics.recipes import run as runs
from hf_attn_dynamics.recipes.arguments.merge_curves import MergeArguments
from hf_attn_dynamics.recipes.arguments.parsing import trainer_flags
from hf_attn_dynamics.recipes.arguments.sweep import SweepArguments
from hf_attn_dynamics.recipes.run import check_output_dir, provenance, write_json


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"loss": 1.5})
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"loss": 2.5})
    assert json.loads(path.read_text()) == {"loss": 1.5}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_folders_are_made_and_files_readable_by_others(tmp_path):
    write_text(tmp_path / "a" / "b.txt", "text")
    assert (tmp_path / "a" / "b.txt").stat().st_mode & 0o777 == 0o644


def test_an_empty_or_missing_folder_is_free(tmp_path):
    assert check_output_dir(tmp_path / "new", {}, resume=False) == tmp_path / "new"
    assert check_output_dir(tmp_path, {}, resume=False) == tmp_path
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "resume", "message"),
    [
        ({"other.txt": ""}, False, "already holds files"),
        ({"other.txt": ""}, True, "holds no config.yaml"),
        ({"config.yaml": "seed: 3\n"}, True, "holds a run with seed=3, which cannot be resumed with seed=4"),
        ({"config.yaml": "{}\n"}, True, "holds a run with seed unset, which cannot be resumed with seed=4"),
        ({"config.yaml": "rate: 3\n"}, True, "holds a run with rate=3, which cannot be resumed with rate unset"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path, content, resume, message):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        check_output_dir(tmp_path, {"seed": 4}, resume)


@pytest.mark.parametrize("changed", ["a.tsv", "model/weights", "model/new", None])
def test_a_run_of_files_that_have_changed_is_not_resumed(tmp_path, monkeypatch, changed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("a.tsv", "model/weights", "unnamed"):
        (tmp_path / name).write_bytes(b"1" * 3 * ENDS)
    config = {"seed": 4, "train_file": ["a.tsv"], "model": str(tmp_path / "model"), "task": "model", "text": None}
    runs.begin_run(tmp_path / "run", config)
    (tmp_path / "a.tsv").touch()
    (tmp_path / "unnamed").write_text("2")
    assert check_output_dir(tmp_path / "run", config, resume=True) == tmp_path / "run"
    if changed:
        # Of the same size for a file; the weights of a model are too many to be read.
        (tmp_path / changed).write_bytes(b"1" * (3 * ENDS - 1) + b"2" * (1 if changed == "a.tsv" else 2))
        name = "a.tsv" if changed == "a.tsv" else str(tmp_path / "model")
        with pytest.raises(ValueError, match=f"holds a run on {name}, which has changed since"):
            check_output_dir(tmp_path / "run", config, resume=True)


@pytest.mark.parametrize("value", ["data/*.txt", "*/b.txt", "TEST=data/b.txt", "model=data/[ab].txt"])
def test_changed_files_behind_patterns_and_names_are_noticed(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_text(f"data/{name}.txt", name)
    # Values that are longer than a path may be are no paths.
    config = {"train_file": [value], "note": "x/" * 9999}
    runs.begin_run(tmp_path / "run", config)
    assert check_output_dir(tmp_path / "run", config, resume=True)
    write_text("data/b.txt", "c")
    with pytest.raises(ValueError, match=f"holds a run on {re.escape(value)}, which has changed since"):
        check_output_dir(tmp_path / "run", config, resume=True)


def test_a_run_is_not_resumed_in_another_number_of_processes(tmp_path, monkeypatch):
    runs.begin_run(tmp_path / "run", {"seed": 4})
    monkeypatch.setattr(PartialState(), "num_processes", 2)
    with pytest.raises(ValueError, match="holds a run in 1 processes, which cannot be resumed in 2, whose batches"):
        check_output_dir(tmp_path / "run", {"seed": 4}, resume=True)
    (tmp_path / "run" / ".inputs.json").write_text("{}")  # as earlier versions have left it
    assert check_output_dir(tmp_path / "run", {"seed": 4}, resume=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2", "is not valid YAML"), ("- a", "must hold `name: value` lines, got list"), ("loss: 3", "loss")],
)
def test_a_configuration_that_cannot_be_read_is_one_message(tmp_path, capsys, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        runs.parse_yaml_or_flags(argv=[str(tmp_path / "config.yaml")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("word", ["config.json", "nowhere.yaml"])
def test_what_is_no_configuration_is_refused(capsys, word):
    with pytest.raises(SystemExit) as stop:
        runs.parse_yaml_or_flags(argv=[word])
    assert stop.value.code == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "way_out"),
    [
        (None, " before anything was written."),
        ([], "; the same command with --resume true starts again in {folder}, which has no checkpoint yet."),
        (["checkpoints/a/run.json"], "; the same command with --resume true continues from {folder}."),
    ],
)
def test_a_run_that_is_stopped_by_hand_says_how_to_continue(tmp_path, monkeypatch, capsys, written, way_out):
    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    monkeypatch.setattr(runs, "_locks", {})

    def main(args: runs.RunArguments):
        if written is not None:
            runs.begin_run(tmp_path / "run", {"seed": 4})
        for name in written or ():
            runs.write_json(tmp_path / "run" / name, {})
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        runs.run_recipe(main)
    assert capsys.readouterr().err == f"\nrecipe.py: stopped{way_out.format(folder=tmp_path / 'run')}\n"


def test_tables_align_numbers_right_and_words_left():
    table = format_table(["run", "steps"], [["a", 1200], ["longer", None]])
    assert table.splitlines() == [
        "| run    | steps |",
        "|--------|-------|",
        "| a      | 1,200 |",
        "| longer |     – |",
    ]


def test_the_flags_of_trainers_are_those_that_their_source_code_has():
    from hf_attn_dynamics import HeadwiseSeq2SeqTrainingArguments

    assert trainer_flags() == {one.name for one in dataclasses.fields(HeadwiseSeq2SeqTrainingArguments) if one.init}


ANSWERS = """
import contextlib, dataclasses, importlib, io, json, sys
from hf_attn_dynamics.cli import run
answers = {}
for name in sys.argv[1:]:
    module = importlib.import_module(f"hf_attn_dynamics.recipes.arguments.{name}")
    flag = next(one.name for one in dataclasses.fields(module.ARGUMENTS) if one.name != "resume")
    for word in ("--help", f"--{flag}x"):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
            sys.argv = [name, word]
            run(name)
        answers[f"{name} {word}"] = [flag, out.getvalue(), err.getvalue()]
print(json.dumps([answers, "torch" in sys.modules]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["a.yaml", "--output_dir", "b", "--resume"],
        ["--output_dir=b", "--resume", "a.yaml"],
        ["--resume", "true", "--output_dir", "b", "a.yaml"],
        ["--resume", "--output_dir", "b", "--sweep", "a.yaml"],
    ],
)
def test_words_that_no_flag_takes_are_the_positional_flag(words):
    expected = SweepArguments(sweep="a.yaml", output_dir="b", resume=True)
    assert runs.parse_yaml_or_flags(SweepArguments, argv=words) == (expected,)


def test_a_positional_flag_takes_all_words_only_if_it_is_a_list(capsys):
    words = ["a", "--title", "both", "b", "--output_dir", "c"]
    expected = MergeArguments(runs=["a", "b"], output_dir="c", title="both")
    assert runs.parse_yaml_or_flags(MergeArguments, argv=words) == (expected,)
    with pytest.raises(SystemExit, match="2"):
        runs.parse_yaml_or_flags(SweepArguments, argv=["a", "b", "--output_dir", "c"])
    assert "sweep takes one value, got a b." in capsys.readouterr().err


def test_an_unknown_recipe_is_refused_with_the_nearest_and_all_are_listed(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["prune_head"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "hf-attn: error: there is no recipe 'prune_head'; did you mean prune_heads?\n"
    cli.main([])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in JOBS)


def test_hyphens_in_the_name_of_a_recipe_stand_for_underscores(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["prune-heads", "--keep", "0"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "hf-attn prune_heads: error: keep must be at least 1, got 0.\n"


@pytest.mark.parametrize("name", JOBS)
def test_every_recipe_has_a_starter_and_takes_the_flags_that_are_checked_early(name):
    assert f'run("{name}")' in (Path(__file__).parents[1] / "recipes" / f"{name}.py").read_text()
    early = importlib.import_module(f"hf_attn_dynamics.recipes.arguments.{name}")
    main = importlib.import_module(f"hf_attn_dynamics.recipes.{name}").main
    first, *others = runs.flags_of(main)
    assert issubclass(first, early.ARGUMENTS)
    assert [issubclass(one, TrainingArguments) for one in others] == [True] * early.HAS_TRAINER


def test_the_command_of_a_summary_can_be_given_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hf-attn score_norm", "--output_dir", "a folder"])
    assert provenance(0, "cpu")["command"] == "hf-attn score_norm --output_dir 'a folder'"
    monkeypatch.setattr(sys, "argv", ["my recipes/score_norm.py", "--seed", "1"])
    assert provenance(0, "cpu")["command"] == "'my recipes/score_norm.py' --seed 1"
    package = Path(runs.__file__).parent
    monkeypatch.setattr(sys, "argv", [str(package / "score_norm.py"), "--seed", "1"])
    assert provenance(0, "cpu")["command"] == "-m hf_attn_dynamics.recipes.score_norm --seed 1"
    monkeypatch.setattr(sys, "argv", ["/elsewhere/score_norm.py"])
    assert provenance(0, "cpu")["command"] == "score_norm.py"


@pytest.mark.parametrize(
    ("command", "line"),
    [("hf-attn a --seed 1", "hf-attn a --seed 1"), ("recipes/a.py", "accelerate launch recipes/a.py")],
)
def test_the_command_of_a_card_starts_the_run(tmp_path, command, line):
    model = tiny_model("roberta")
    model.save_pretrained(tmp_path)
    write_card(tmp_path, model.config, provenance={**provenance(7, "cpu"), "command": command})
    assert f"\n{line}\n" in (tmp_path / "README.md").read_text()
