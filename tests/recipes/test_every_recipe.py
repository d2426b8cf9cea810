# Licensed under the Apache License, Version 2.0.
"""What every recipe does as all others do: refuse, explain, write, go on after a stop, and publish.

A row of the table says how a recipe is run in little time; tests about its figures are in a file of its own.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import pkgutil
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cards import loaded_as_its_card_says
from huggingface_hub import ModelCard
from launching import ROOT, words
from recipe_runs import Recipe

from hf_attn_dynamics import cli
from hf_attn_dynamics.recipes import JOBS
from hf_attn_dynamics.recipes import run as runs
from hf_attn_dynamics.recipes.run import write_yaml


STEP = "transformers.Trainer.training_step"


@dataclasses.dataclass(frozen=True)
class Row:
    """How a recipe is run in little time, and where it is stopped.

    Args:
        name: Its name.
        flags: Its command line; what is in braces is put in its place by `material`.
        bad: Words that are refused before PyTorch is imported, with the message.
        unreadable: The same, once files are read.
        work: The function that does the work, of this recipe unless it has dots.
        stops: Calls in place of which runs are stopped, with the work that is left then.
        stopped_in: The function of these calls; by default that of the work.
        again: Work of a run that goes on with a finished one.
        models: Folders of the models with cards.
        pushed: Which of them is pushed, if any.
        kept: More flags, of kinds that YAML has to keep.
        prints: What the run prints for people.
    """

    name: str
    flags: str
    bad: Mapping[str, str]
    unreadable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    work: str = STEP
    stops: Mapping[int, int] = dataclasses.field(default_factory=lambda: {1: 0})
    stopped_in: str | None = None
    again: int = 0
    models: tuple[str, ...] = ()
    pushed: str | None = None
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prints: tuple[str, ...] = ("Everything is in ",)

    def __str__(self):
        return self.name

    @property
    def recipe(self):
        return Recipe(self.name)

    @property
    def own_flags(self):
        """Names of the flags of the recipe itself, without those of its trainer."""
        fields = dataclasses.fields(self.recipe.types[0])
        return [one.name for one in fields if one.metadata.get("help") != argparse.SUPPRESS]

    @property
    def all_flags(self):
        """Names of the flags of the recipe and of its trainer."""
        return {one.name for cls in self.recipe.types for one in dataclasses.fields(cls)}

    @property
    def nearly_a_flag(self):
        """A flag of this command line with a letter too many."""
        return next(word for word in self.flags.split() if word.removeprefix("--") in self.own_flags) + "x"


EVERYWHERE = "--device cpu --cpu_threads 1 --disable_tqdm true"
TRAINED = f"{EVERYWHERE} --learning_rate 0.01 --logging_steps 1 --save_strategy steps --save_steps 2 --license mit"
BERT = "--num_hidden_layers 1 --hidden_size 16 --num_attention_heads 4 --vocab_size 290"
CLASSES = "--train_file {classes} --validation_file {classes} --per_device_train_batch_size 8"
PAIRS = (
    "--source_file {text}/train.de --target_file {text}/train.en --validation_source_file {text}/valid.de "
    "--validation_target_file {text}/valid.en --hidden_size 16 --vocab_size 36 --max_length 24 --max_steps 4 "
    "--per_device_train_batch_size 8"
)
PAIRS_REFUSED = {
    "--source_file nowhere.de": "nowhere.de",
    "--target_file {text}/valid.en": "lines",
    "--vocab_size 5000": "for these texts, got 5000",
    "--dropout 1.5": "dropout must be ",
    "--max_steps 0": "max_steps must be at least 1, got 0",
    "--num_beams 0": "num_beams must be at least 1, got 0",
    "--num_train_epochs 2": "num_train_epochs=2.0 has no effect here",
    "--generation_max_length 1000": "generation_max_length=1000",
}
MARIAN = "--encoder_layers 1 --decoder_layers 1 --num_attention_heads 4 --warmup_steps 2 --dropout 0.1"
ROWS = (
    Row(
        "pretrain_ag",
        f"{TRAINED} {BERT} --train_file {{sentences}} --validation_file {{sentences}} --block_size 16 --max_steps 4 "
        "--eval_steps 2 --per_device_train_batch_size 4 --validation_examples 6",
        bad={
            "--preset huge": "preset 'huge' is not one of ",
            "--device abacus": "device must be auto, cpu or cuda, got 'abacus'",
            "--cpu_threads 0": "cpu_threads must be at least 1, got 0",
            "--num_hidden_layers many": "invalid int value: 'many'",
            "--license My-Own": "license must be ",
        },
        unreadable={"--train_file nowhere.txt": "nowhere.txt"},
        stops={4: 6, 8: 2},
        models=("model", "model_unguided"),
        pushed="model",
    ),
    Row(
        "finetune",
        f"{TRAINED} {BERT} {CLASSES} --max_length 24 --num_seeds 2 --num_train_epochs 1",
        bad={
            "--task ner": "task must be one of sequence, token, cola, ",
            "--num_seeds 0": "num_seeds must be at least 1, got 0",
        },
        unreadable={"--train_file nowhere.tsv": "nowhere.tsv"},
        stops={6: 1},
        models=("model",),
        pushed="model",
        prints=("| accuracy", "model/"),
    ),
    Row(
        "run_glue",
        f"{TRAINED} {BERT} --data_dir {{glue}} --tasks sst2 --max_length 24 --num_seeds 2 --num_train_epochs 2 "
        "--per_device_train_batch_size 4",
        bad={
            "--tasks sst3": "task must be one of GLUE (cola, sst2",
            "--seeds 1 1": "num_seeds=2 and seeds=[1, 1] ",
        },
        unreadable={"--data_dir nowhere": "'nowhere' does not exist"},
        stops={8: 2},
        models=("model/sst2",),
        pushed="model/sst2",
        prints=("| all  | score ", "submission/"),
    ),
    Row(
        "prune_heads",
        f"{TRAINED} {BERT} {CLASSES} --max_length 24 --num_train_epochs 1 --gate_epochs 1 --finetune_epochs 1 "
        "--keep 2 --importance gates michel --importance_examples 8 --from_scratch --latency_batch 2",
        bad={
            "--keep 0": "keep must be at least 1, got 0",
            "--importance taylor": "importance must be among gates, michel, random, fisher, margin, got 'taylor'",
        },
        unreadable={"--train_file nowhere.tsv": "nowhere.tsv"},
        # With gates, and from scratch.
        stops={6: 19, 18: 7},
        models=("dense", "model-2"),
        pushed="model-2",
        prints=("| dense", "model-2/"),
    ),
    Row(
        "analyze_heads",
        f"{EVERYWHERE} --model {{start}} --data {{sentences}} --max_sentences 12 --frequent 20 "
        "--importance_sentences 0 --relevance_sentences 0",
        bad={
            "--batch_size 0": "batch_size must be at least 1, got 0",
            "--relevance_sentences -1": "relevance_sentences must be at least 0, got -1",
        },
        unreadable={"--model nowhere/at-all": "'nowhere/at-all' cannot be loaded"},
        work="read_heads",
        stops={1: 1},
        again=1,
        prints=("sentences read",),
    ),
    Row(
        "attribute_heads",
        f"{EVERYWHERE} --model {{start}} --data {{sentences}} --pairs false --max_length 25 --max_sentences 6 "
        "--batch_size 2",
        bad={
            "--method guess": "method must be auto, exact or probes, got 'guess'",
            "--min_length 65": "min_length is 65, but max_length 25",
        },
        unreadable={"--data missing.conllu": "missing.conllu"},
        work="Measurement.sums",
        # One sentence is tried first, each time.
        stops={4: 2},
        again=1,
        prints=("report.html",),
    ),
    Row(
        "probe_coreference",
        f"{EVERYWHERE} --models one={{start}} --random_seeds 3 4 --max_items 4",
        bad={
            "--data refl.0": "data must be KIND:PATH, got 'refl.0'",
            "--batch_size 0": "batch_size must be at least 1, got 0",
        },
        unreadable={"--data winobias:nowhere": "nowhere is neither a file nor a folder"},
        work="coreference_accuracy",
        stops={3: 1},
        prints=("| one ", "table.csv"),
    ),
    Row(
        "supervise_mlm",
        f"{TRAINED} {BERT} --max_length 24 --max_steps 4 --eval_strategy steps --eval_steps 2 "
        "--per_device_train_batch_size 8",
        bad={
            "--task tagging": "task must be parsing, antecedents, got 'tagging'",
            "--guidance_loss avoid": "guidance_loss must be cross_entropy, mass, squared, got 'avoid'",
            "--task antecedents --train_file refl.0 --test_file refl.1": "train_file must be KIND:PATH, got 'refl.0'",
        },
        unreadable={"--train_file nowhere.conllu --test_file nowhere.conllu": "nowhere.conllu"},
        # Of the unguided and of the guided model.
        stops={4: 6, 8: 2},
        models=("model", "model_unguided"),
        pushed="model",
        prints=("| guided ", "table.csv", "model/"),
    ),
    Row(
        "supervise_classifier",
        f"{TRAINED} {BERT} {CLASSES} --max_length 24 --num_train_epochs 1",
        bad={
            "--guidance_loss avoid": "guidance_loss must be mass, cross_entropy, squared, got 'avoid'",
            "--heads 1 1": "heads must be non-empty, unique and at least 0, got [1, 1]",
            "--min_fraction 2": "min_fraction must be from 0 to 1, got 2.0",
        },
        unreadable={
            "--lexicon_file nowhere.tsv": "nowhere.tsv",
            "--layer 7": "layer 7",
            "--min_count 99": "no sentence of the train text has a word that is in the lexicon with its class",
            "--guidance_weight 0": "guidance_weight must be greater than 0, or auto",
        },
        stops={6: 1},
        models=("model", "model_unguided"),
        pushed="model",
        prints=("| guided ", "table.csv"),
    ),
    Row(
        "distil_heads",
        f"{TRAINED} {BERT} {CLASSES} --max_length 24 --num_train_epochs 1 --teacher_epochs 1 --num_hidden_layers 2",
        bad={
            "--systems labels logit": "systems must be among labels, logits, attention, relations, got 'logit'",
            "--teacher_epochs 0": "teacher_epochs=0 takes a trained classifier as the teacher; it needs --model",
            "--relations values": "relations must be among query, key, value, query_key, got 'values'",
        },
        unreadable={
            "--student_layers 5": "student_layers name layer 5, but the teacher has 2 layers",
            "--num_train_epochs 0": "num_train_epochs must be greater than 0",
            "--distillation_weight 0": "distillation_weight must be greater than 0",
        },
        # Of the teacher, of the first student and of the last one.
        stops={3: 13, 6: 10, 15: 1},
        models=("model/labels", "model/logits", "model/attention", "model/relations"),
        prints=("| attention ", "students.png"),
    ),
    Row(
        "train_translation",
        f"{TRAINED} {PAIRS} {MARIAN} --gate_steps 4 --finetune_steps 4 --keep 6 --from_scratch",
        bad={
            "--keep 0": "keep must be at least 1, got 0",
            "--gate_sites middle": "gate_sites must be among encoder, decoder, cross, got 'middle'",
        },
        unreadable=PAIRS_REFUSED,
        # Of the model as it was, with gates, without heads, and from scratch.
        stops={4: 22, 8: 18, 12: 14, 16: 10},
        models=("dense", "model-6"),
        pushed="model-6",
        kept={"gate_penalty": [0.01, 1e-06], "guidance": '{"fraction": 0.5, "patterns": ["first"]}'},
        prints=("source     ", "reference  ", " pruned ", "table.csv"),
    ),
    Row(
        "compare_translation",
        f"{TRAINED} {PAIRS} {MARIAN} --eval_steps 2 --max_eval_examples 6",
        bad={
            "--systems best": "systems must be among base, guided, hard_coded, got 'best'",
            "--systems base base": "got ['base', 'base']",
        },
        unreadable=PAIRS_REFUSED,
        stops={8: 6},
        models=("base", "guided", "hard_coded"),
        kept={"systems": "guided", "guidance": '{"decoder": {"heads": {"prev": [0]}}}'},
        prints=("source     ", "reference  ", " guided ", "table.csv"),
    ),
    Row(
        "align_translation",
        f"{TRAINED} {PAIRS} {MARIAN} --eval_steps 2 --max_eval_examples 6",
        bad={
            "--units letters": "units must be words or tokens, got 'letters'",
            "--guided_layer 1": "guided_layer must be below 1, got 1",
        },
        unreadable={**PAIRS_REFUSED, "--alignment_method best": "method must be one of intersection, union, "},
        stops={4: 6},
        models=("unguided", "guided"),
        kept={"reference_alignments": ["forward.txt", "reverse.txt"], "guided_rows": "output", "units": "words"},
        prints=("source     ", "reference  ", "guided   layer 0, head 0, input rows", "table.csv"),
    ),
    Row(
        "train_lstm_translation",
        f"{TRAINED} {PAIRS} --num_hidden_layers 2 --dropout 0.3 --eval_steps 2",
        bad={
            "--model transformer": "'transformer'",
            "--preset huge": "preset 'huge' is not one of ",
        },
        unreadable=PAIRS_REFUSED,
        stops={4: 2},
        models=("model",),
        pushed="model",
        # What YAML takes for a truth value.
        kept={"readout": "additive", "languages": ["de", "no"]},
        prints=("source       ", "| token_accuracy", "curve.png"),
    ),
    Row(
        "lexical_knowledge",
        f"{TRAINED} {CLASSES} --embedding_size 6 --hidden_size 8 --num_hidden_layers 1 --dropout 0 --max_steps 4 "
        "--checkpoints 0 2 --frozen_beta",
        bad={
            "--task parsing": "task must be classification or translation, got 'parsing'",
            "--checkpoints 3 -1": "checkpoints must not be negative, got -1",
        },
        unreadable={
            "--train_file nowhere.tsv": "nowhere.tsv",
            "--max_steps 0": "max_steps must be at least 1, got 0",
            "--num_train_epochs 2": "num_train_epochs=2.0 has no effect here",
        },
        stops={8: 14},
        models=("standard", "uniform", "proxy", "frozen_beta"),
    ),
    Row(
        "learn_to_copy",
        f"{EVERYWHERE} --length 4 --hidden_size 12 --batch_size 8 --steps 5 --runs 3 --stack_size 2 "
        "--experiments permutation control --drawn_from 7 --license mit",
        bad={
            "--experiments sorting": "experiments must be among permutation, control, mixture, function, heads, got",
            "--candidates 30": "candidates=30 has no effect here; ",
            "--runs 0": " must be at least 1, got 0",
            "--seed -1": "seed must be at least 0, got -1",
        },
        work="train_copying_stack",
        stops={4: 1},
        models=("models/permutation", "models/control"),
    ),
    Row(
        "keyword_drift",
        f"{EVERYWHERE} --words 6 --length 5 --hidden_size 6 --embedding_size 5 --batch_size 8 --steps 8 "
        "--measurements 4 --positive 10 --license mit",
        bad={
            "--steps 0": "steps must be at least 1, got 0",
            "--words 1": "words must be at least 2, the keyword and another one, got 1",
            "--learning_rate nan": "learning_rate must be greater than 0, got nan",
        },
        work="train_keyword_classifier",
        stopped_in="draw",
        models=("model",),
    ),
    Row(
        "score_norm",
        f"{EVERYWHERE} --epochs 4 --runs 2 --records 3 --license mit",
        bad={
            "--epochs 0": "epochs must be at least 1, got 0",
            "--experiment sst3": "experiment must be synthetic, ablation, sst2, sst5, cnn, query or all, got 'sst3'",
        },
        unreadable={"--experiment sst2 --sst2 nowhere": "nowhere holds no file train.tsv"},
        work="run_experiment",
        stopped_in="read_json",
        models=("models/synthetic/FC", "models/synthetic/TC", "models/synthetic/TL"),
    ),
)
# These collect what others have left: what they write is no run, and they have tests of their own.
COLLECTING = (
    Row(
        "sweep",
        "a.yaml --output_dir a",
        bad={"--jobs 0": "jobs must be at least 1, got 0", "b.yaml": "sweep takes one value, got a.yaml b.yaml"},
    ),
    Row("merge_curves", "--runs a b --output_dir c", bad={"--runs a a": "got ['a', 'a']"}),
    Row("redraw", "--paths a b", bad={"--paths a a": "got ['a', 'a']"}),
    Row("reproduction", "--ledger a.yaml", bad={"b.yaml": "b.yaml"}),
)


def cases(name):
    """Words that are refused, of all rows, with the message."""
    rows = (*ROWS, *COLLECTING)
    return [pytest.param(row, *case, id=f"{row} {case[0]}") for row in rows for case in getattr(row, name).items()]


every_row = pytest.mark.parametrize("row", ROWS, ids=str)


@pytest.fixture(autouse=True)
def command_line(monkeypatch):
    """That of this process is as it was before a recipe has been called."""
    monkeypatch.setattr(sys, "argv", sys.argv)


def test_every_recipe_has_a_row():
    assert [row.name for row in (*ROWS, *COLLECTING)] == list(JOBS)


# ---------------------------------------------------------------------------------------------------------------------
# What is explained and refused
# ---------------------------------------------------------------------------------------------------------------------


# Importing PyTorch fails here.
ANSWERS = """
import contextlib, io, json, sys
sys.modules["torch"] = None
import transformers
from hf_attn_dynamics import cli
answers = []
for words in json.loads(sys.argv[1]):
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(words)
        except SystemExit as end:
            status = end.code
    answers.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What `hf-attn` answers without PyTorch: by the recipe, and the words after those of the row."""
    folder = tmp_path_factory.mktemp("answers")
    asked = {}
    for row in (*ROWS, *COLLECTING):
        for last in ("--help", f"{row.nearly_a_flag} 1", *row.bad):
            asked[row.name, last] = [row.name, *row.flags.split(), *last.split()]
    command = [sys.executable, "-c", ANSWERS, json.dumps(list(asked.values()))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    assert not list(folder.iterdir())
    return dict(zip(asked, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("row", [*ROWS, *COLLECTING], ids=str)
def test_help_explains_its_own_flags_before_pytorch_is_imported(row, answers):
    status, out, err = answers[row.name, "--help"]
    assert (status, err) == (0, "")
    usage, _, text = out.partition("\n\n")
    assert usage.startswith(f"usage: hf-attn {row.name} ")
    assert usage.endswith(" [--flag value …]")
    assert text.startswith(row.recipe.module.__doc__.rstrip())
    assert [name for name in row.own_flags if f"--{name} " not in text] == []
    assert "--max_grad_norm" not in text
    assert ("--help_all" in text) == (len(row.recipe.types) > 1)


@pytest.mark.parametrize("row", [*ROWS, *COLLECTING], ids=str)
def test_an_unknown_flag_is_refused_with_the_nearest_before_pytorch_is_imported(row, answers):
    flag = row.nearly_a_flag
    message = f"hf-attn {row.name}: error: there is no flag {flag}; did you mean {flag[:-1]}?\n"
    assert answers[row.name, f"{flag} 1"] == (2, "", message)


@pytest.mark.parametrize(("row", "words", "message"), cases("bad"))
def test_a_bad_value_is_refused_in_one_line_before_pytorch_is_imported(row, words, message, answers):
    status, out, err = answers[row.name, words]
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"hf-attn {row.name}: error: ")
    assert message in err


@pytest.mark.parametrize(("row", "words", "message"), cases("unreadable"))
def test_what_cannot_be_read_is_refused_before_anything_is_written(row, words, message, material, tmp_path, refused):
    with refused(f"hf-attn {row.name}: error: ", message):
        cli.main([row.name, *material(f"{row.flags} {words}"), "--output_dir", str(tmp_path / "run")])


WITH_TEACHER = ("distil_heads", "prune_heads")
WITHOUT_TEACHER = [row for row in ROWS if row.name not in WITH_TEACHER and "distillation_weight" in row.all_flags]


@pytest.mark.parametrize("row", WITHOUT_TEACHER, ids=str)
def test_flags_of_a_teacher_are_refused_where_there_is_none(row, material, tmp_path, refused):
    with refused("distillation_weight=0.5 has no effect here; only distil_heads and prune_heads have a teacher"):
        cli.main(
            [row.name, *material(f"{row.flags} --distillation_weight 0.5"), "--output_dir", str(tmp_path / "run")]
        )


@every_row
def test_no_file_and_no_folder_of_something_else_is_written_to(row, material, tmp_path, refused):
    argv = [row.name, *material(row.flags), "--output_dir"]
    (tmp_path / "file").write_text("mine")
    with refused(f"output_dir {tmp_path / 'file'} is a file; name a folder."):
        cli.main([*argv, str(tmp_path / "file")])
    with refused(f"output_dir {tmp_path} already holds files; name another folder"):
        cli.main([*argv, str(tmp_path)])
    with refused(f"output_dir {tmp_path} holds no config.yaml of a run that "):
        cli.main([*argv, str(tmp_path), "--resume"])
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("row", [row for row in ROWS if row.work == STEP], ids=str)
def test_a_push_that_cannot_be_meant_is_refused_before_anything_is_done(row, material, tmp_path, refused):
    argv = [row.name, *material(row.flags), "--output_dir", str(tmp_path / "run"), "--hub_model_id", "someone/mine"]
    with refused("hub_model_id='someone/mine' needs push_to_hub"):
        cli.main(argv)
    with refused("hub_token would be saved in the run"):
        cli.main([*argv, "--push_to_hub", "true", "--hub_token", "secret"])
    if not row.pushed:
        with refused("python -m hf_attn_dynamics.hub"):
            cli.main([*argv, "--push_to_hub", "true"])


# ---------------------------------------------------------------------------------------------------------------------
# Configurations
# ---------------------------------------------------------------------------------------------------------------------


@every_row
def test_the_commented_configuration_has_the_defaults_and_names_every_flag_of_its_own(row):
    path = ROOT / "recipes" / "configs" / f"{row.name}.yaml"
    assert row.recipe.values(path) == row.recipe.values()
    assert row.recipe.parse(path)[0] == row.recipe.parse()[0]
    named = {line.partition(":")[0] for line in path.read_text().splitlines()}
    assert set(row.own_flags) <= named


PRESETS = [(row, preset) for row in ROWS for preset in row.recipe.presets]


@pytest.mark.parametrize(("row", "preset"), [pytest.param(*both, id="-".join(map(str, both))) for both in PRESETS])
def test_a_saved_configuration_of_a_preset_repeats_the_run(row, preset, tmp_path):
    recipe = row.recipe
    # A default of the library, which is none of this preset.
    fields = {name: one for kind in recipe.types for name, one in kind.__dataclass_fields__.items()}
    named = {"learning_rate", "vocab_size"} & set(recipe.presets[preset])
    usual = {name: fields[name].default for name in named}
    for changed in ({}, {**usual, "seed": 7}, row.kept):
        argv = words(**changed, preset=preset)
        write_yaml(tmp_path / "config.yaml", recipe.values(*argv))
        (args, *of_trainer), (args_again, *again) = recipe.parse(*argv), recipe.parse(tmp_path / "config.yaml")
        assert args_again == args
        assert [one.to_dict() for one in again] == [one.to_dict() for one in of_trainer]


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Call:
    """What came of a command line: what `main` returned, what was printed, and how often the work was done."""

    returned: dict[str, Any] | None = None
    printed: str = ""
    errors: str = ""
    status: int = 0
    work: int = 0
    pushed: list = dataclasses.field(default_factory=list)


def call(row, argv, stop=None, script=False):
    """Calls a recipe as `hf-attn` does, or its script, in this process, with Ctrl-C in place of the call `stop`."""
    found, out, err = Call(), io.StringIO(), io.StringIO()
    module = row.recipe.module
    argv = [str(word) for word in argv]
    with pytest.MonkeyPatch.context() as patch:

        def worked():
            found.work += 1

        def watch(place, note, stop_at):
            place = place if place.startswith("transformers.") else f"{module.__name__}.{place}"
            function, calls = pkgutil.resolve_name(place), itertools.count(1)

            @functools.wraps(function)
            def watched(*args, **kwargs):
                if next(calls) == stop_at:
                    raise KeyboardInterrupt
                note()
                return function(*args, **kwargs)

            patch.setattr(place, watched)

        watch(row.work, worked, None if row.stopped_in else stop)
        if row.stopped_in:
            watch(row.stopped_in, lambda: None, stop)

        def push(folder, wanted):
            if wanted is not None:
                place = folder.parents[row.pushed.count("/")]
                found.pushed.append((folder.relative_to(place), wanted, (place / "summary.json").is_file()))

        @functools.wraps(module.main)
        def main(*args):
            found.returned = main.__wrapped__(*args)
            return found.returned

        patch.setattr(module, "main", main)
        patch.setattr(runs, "push_finished", push)
        patch.setattr(runs, "_locks", {})
        patch.setattr(sys, "argv", [f"recipes/{row.name}.py", *argv])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                if script:
                    runpy.run_path(str(ROOT / "recipes" / f"{row.name}.py"), run_name="__main__")
                else:
                    cli.main([row.name, *argv])
            except SystemExit as end:
                found.status = end.code
    assert found.status == (0 if stop is None else 130), err.getvalue()
    found.printed, found.errors = out.getvalue(), err.getvalue()
    return found


@dataclasses.dataclass
class Runs:
    """Of a row: a run, with its summary; and others that were stopped and have gone on, by the calls."""

    row: Row
    argv: list[str]
    folder: Path
    whole: Call
    summary: dict[str, Any]
    stopped: dict[int, tuple[Path, Call, Call]]


@pytest.fixture(scope="module", params=ROWS, ids=str)
def made(request, tmp_path_factory, material):
    row = request.param
    folder = tmp_path_factory.mktemp(row.name)
    argv = material(row.flags)
    whole = call(row, [*argv, "--output_dir", folder / "whole"])
    found = Runs(row, argv, folder / "whole", whole, read(folder / "whole"), {})
    for stop in row.stops:
        place = folder / f"stopped-{stop}"
        stopped = call(row, [*argv, "--output_dir", place], stop)
        assert not (place / "summary.json").exists()
        # It goes on with what its folder says, and not with flags.
        again = ["--output_dir", place, "--resume", *EVERYWHERE.split(), *["--license", "mit"] * bool(row.models)]
        again += ["--push_to_hub", "true", "--hub_model_id", "someone/mine"] * bool(row.pushed)
        found.stopped[stop] = place, stopped, call(row, [place / "config.yaml", *again], script=True)
    return found


def steady(value):
    """Figures without what is another in each run: times, the command, and what a trainer counts anew."""
    if isinstance(value, dict):
        timed = ("second", "runtime", "latency", "command", "train_loss", "flos")
        return {key: steady(one) for key, one in value.items() if not any(word in key for word in timed)}
    return [steady(one) for one in value] if isinstance(value, list | tuple) else value


def content(path):
    """What does not differ between runs: all of figures and weights, nothing of pictures, pages and cards."""
    if path.suffix == ".json":
        return steady(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".csv":
        lines = path.read_text(encoding="utf-8").splitlines()
        return None if "second" in lines[0] else [line for line in lines if "second" not in line]
    return path.read_bytes() if path.suffix == ".safetensors" else None


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read(folder):
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_a_run_leaves_what_it_found_and_where_that_comes_from(made):
    summary = made.summary
    assert summary == json.loads(json.dumps(made.whole.returned))
    origin = {"seed", "device", "command", "python_version", "num_processes", "hf_attn_dynamics_version"}
    assert origin | {f"{name}_version" for name in ("transformers", "torch", "accelerate", "datasets")} <= set(summary)
    assert summary["device"] == "cpu"
    shown = [example["source"] for example in summary.get("examples", ())[:1]]
    assert [text for text in (*made.row.prints, *shown, str(made.folder)) if text not in made.whole.printed] == []


def test_its_command_is_that_of_the_run_and_a_finished_run_is_read(made):
    expected, before = made.summary, files_in(made.folder)
    argv = [*made.argv, "--output_dir", str(made.folder)]
    program, name, *again = shlex.split(expected["command"])
    assert (program, name, again) == ("hf-attn", made.row.name, argv)
    found = call(made.row, [*again, "--resume", "true"])
    assert steady(found.returned) == steady(expected)
    assert found.work == made.row.again
    assert files_in(made.folder) == before


def test_a_stopped_run_says_how_to_go_on_and_ends_as_if_it_had_not_been(made):
    for stop, (folder, stopped, resumed) in made.stopped.items():
        last = stopped.errors.splitlines()[-1]
        assert last.startswith(f"hf-attn {made.row.name}: stopped; the same command with --resume ")
        assert str(folder) in last
        assert steady(read(folder)) == steady(made.summary)
        assert resumed.work == made.row.stops[stop]
        names = files_in(folder)
        assert names == files_in(made.folder)
        for name in names:
            if not name.startswith("checkpoints") or name.endswith("run.json"):
                found, expected = (content(place / name) for place in (folder, made.folder))
                assert found == expected, name


def test_its_configuration_has_the_values_of_its_flags(made):
    config = yaml.safe_load((made.folder / "config.yaml").read_text())
    assert made.row.recipe.values(made.folder / "config.yaml") == config
    # What is left open, the run has chosen.
    given = {key: value for key, value in made.row.recipe.values(*made.argv).items() if value is not None}
    assert {key: config[key] for key in given} == given


def test_a_run_with_other_values_is_not_resumed_and_none_is_overwritten(made, refused):
    before = {path: path.stat().st_mtime_ns for path in made.folder.rglob("*")}
    argv = [made.row.name, *made.argv, "--output_dir", str(made.folder)]
    with refused("already holds files; name another folder, or "):
        cli.main(argv)
    with refused(f"output_dir {made.folder} holds a run with seed", "cannot be resumed with seed=1234"):
        cli.main([*argv, "--seed", "1234", "--resume", "true"])
    assert {path: path.stat().st_mtime_ns for path in made.folder.rglob("*")} == before


def test_models_have_cards_and_one_is_pushed_last(made):
    for name in made.row.models:
        assert loaded_as_its_card_says(made.folder / name)["model"].config.model_type
        card = ModelCard.load(made.folder / name / "README.md")
        assert card.data.license == "mit"
        assert f"hf-attn {made.row.name} --" in card.text
    pushed = [(Path(made.row.pushed), ("someone/mine", None), True)] if made.row.pushed else []
    assert all(resumed.pushed == pushed for _, _, resumed in made.stopped.values())
