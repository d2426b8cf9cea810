import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_attn_dynamics import cli
from hf_attn_dynamics._files import ENDS, write_text
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes import JOBS
from hf_attn_dynamics.recipes import run as runs
from hf_attn_dynamics.recipes.arguments.merge_curves import MergeArguments
from hf_attn_dynamics.recipes.arguments.parsing import given_values, trainer_flags
from hf_attn_dynamics.recipes.arguments.sweep import SweepArguments
from hf_attn_dynamics.recipes.run import check_output_dir, provenance, write_json, write_yaml


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
    ("content", "message"),
    [
        ({"config.yaml": "seed: 3\n"}, "holds a run with seed=3, which cannot be resumed with seed=4"),
        ({"config.yaml": "{}\n"}, "holds a run with seed unset, which cannot be resumed with seed=4"),
        ({"config.yaml": "rate: 3\n"}, "holds a run with rate=3, which cannot be resumed with rate unset"),
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path, content, message):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        check_output_dir(tmp_path, {"seed": 4}, resume=True)


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
        with pytest.raises(ValueError, match=f"holds a run of {name}, which has changed since"):
            check_output_dir(tmp_path / "run", config, resume=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2", "is not valid YAML"), ("- a", "must hold `name: value` lines, got list"), ("loss: 3", "loss")],
)
def test_a_configuration_that_cannot_be_read_is_one_message(tmp_path, refused, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with refused(message):
        runs.parse_yaml_or_flags(argv=[str(tmp_path / "config.yaml")])


@pytest.mark.parametrize("word", ["config.json", "nowhere.yaml"])
def test_what_is_no_configuration_is_refused(refused, word):
    with refused(word):
        runs.parse_yaml_or_flags(argv=[word])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--seed", "3", "--seed", "4", "--name=a=b"], {"seed": "4", "name": "a=b"}),
        (["--rate", "-1", "--flag", "--more", "1", "2"], {"rate": "-1", "flag": None, "more": "1 2"}),
        (["FILE", "--model", "lstm"], {"model": "lstm", "keep": [1, 2], "nothing": None}),
    ],
)
def test_a_command_line_is_read_before_its_flags_are_known(tmp_path, words, expected):
    write_yaml(tmp_path / "config.yaml", {"model": "transformer", "keep": [1, 2], "nothing": None})
    words = [str(tmp_path / "config.yaml") if word == "FILE" else word for word in words]
    assert given_values(words) == expected


def test_what_is_stopped_by_hand_before_it_begins_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    monkeypatch.setattr(runs, "_locks", {})

    def main(args: runs.RunArguments):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        runs.run_recipe(main)
    assert capsys.readouterr().err == "\nrecipe.py: stopped before anything was written.\n"


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
