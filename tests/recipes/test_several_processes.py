# Licensed under the Apache License, Version 2.0.
"""Two processes give the losses and figures of one with the same batches, whatever the recipe.

They run all recipes one after another, since starting them takes longer than what they do.
"""

import json

import pytest
import recipe_runs
from launching import ROOT, fsdp2_environment, run_together
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from hf_attn_dynamics import prune_heads


EVERYWHERE = "--disable_tqdm true --device cpu --cpu_threads 1"
# Steps that Adam takes are whole ones even where a gradient is nothing but rounding.
TRAINED = (
    f"{EVERYWHERE} --optim sgd --learning_rate 0.3 --logging_steps 1 --train_sampling_strategy random "
    "--ddp_find_unused_parameters false"
)
TINY = "--num_hidden_layers 2 --hidden_size 16 --num_attention_heads 4"
SENTENCES = "--train_file {sentences} --validation_file {sentences}"
CLASSES = "--train_file {classes} --validation_file {classes}"
PRETRAINING = (
    f"{TRAINED} {TINY} {SENTENCES} --vocab_size 300 --block_size 16 --max_steps 3 --eval_steps 2 --save_steps 2 "
    "--validation_examples 7 --guidance_weight auto --compare false --dropout 0.0 --attention_dropout 0.0"
)
PRUNING = (
    f"{TRAINED} {TINY} --vocab_size 290 --max_length 16 --keep 3 --importance_examples 16 --latency_batch 2 "
    "--dropout 0.0"
)
TRANSLATING = (
    f"{TRAINED} --source_file {{text}}/train.de --target_file {{text}}/train.en --validation_source_file "
    "{text}/valid.de --validation_target_file {text}/valid.en --hidden_size 16 --vocab_size 36 --max_length 24 "
    "--max_steps 4 --save_steps 2 --eval_strategy steps --eval_steps 2 --max_eval_examples 7"
)
TRANSFORMER = (
    f"{TRANSLATING} --encoder_layers 1 --decoder_layers 1 --num_attention_heads 4 --warmup_steps 2 --dropout 0.0"
)
LEXICAL = (
    f"{TRAINED} --embedding_size 6 --hidden_size 8 --num_hidden_layers 1 --dropout 0 --max_steps 3 --checkpoints 0 2"
)
FINE_TUNING = f"{TRAINED} --model_name_or_path {{start}} --num_seeds 1 --max_length 40"
COPYING = f"{EVERYWHERE} --length 4 --drawn_from 7 --hidden_size 12 --batch_size 8 --steps 5 --runs 2"
READING = f"{EVERYWHERE} --model {{start}} --data {{sentences}}"
# Name -> recipe, sentences of a batch, command line; what is in braces is put in its place by `material`.
RUNS = {
    "pretraining, masked words": ("pretrain_ag", 4, PRETRAINING),
    "pretraining, masked words and next sentences": ("pretrain_ag", 4, f"{PRETRAINING} --objective mlm+nsp"),
    "pretraining, replaced words": ("pretrain_ag", 4, f"{PRETRAINING} --objective rtd"),
    "pretraining, two models": ("pretrain_ag", 4, f"{PRETRAINING} --objective rtd --generator trained"),
    "a guided head": (
        "supervise_mlm",
        4,
        f"{TRAINED} {TINY} --vocab_size 300 --max_length 32 --max_steps 3 --eval_strategy steps --eval_steps 2 "
        "--dropout 0.0",
    ),
    "pruning": ("prune_heads", 4, f"{PRUNING} {CLASSES} --importance gates michel"),
    "pruning, masked words": ("prune_heads", 4, f"{PRUNING} {SENTENCES} --task masked-lm"),
    "fine-tuning": ("finetune", 6, f"{FINE_TUNING} {CLASSES} --ema_decay 0.3"),
    "GLUE": ("run_glue", 4, f"{FINE_TUNING} --data_dir {{glue}} --tasks mrpc stsb --learning_rate 0.02"),
    "rationales": ("supervise_classifier", 6, f"{TRAINED} --model {{start}} --max_length 40 {CLASSES}"),
    "distillation": (
        "distil_heads",
        6,
        # The loss is small, and its rounding is multiplied by the square of the temperature.
        f"{TRAINED} --model {{start}} --max_length 40 {CLASSES} --teacher_epochs 1 --eval_steps 2 "
        "--distillation_temperature 1 --guidance_weight 1",
    ),
    "pruned translation": (
        "train_translation",
        8,
        # Without any head of cross-attention the encoder would be of no use, and get no gradient.
        f"{TRANSFORMER} --gate_steps 4 --finetune_steps 2 --keep 5 --gate_sites encoder decoder",
    ),
    "compared translation": ("compare_translation", 8, TRANSFORMER),
    "aligned translation": ("align_translation", 8, TRANSFORMER),
    "LSTM translation": ("train_lstm_translation", 8, TRANSLATING),
    "words and attention of classes": ("lexical_knowledge", 8, f"{LEXICAL} {CLASSES} --frozen_beta"),
    "words and attention of translations": (
        "lexical_knowledge",
        8,
        f"{LEXICAL} --task translation --train_file {{text}}/train.de {{text}}/train.en "
        "--validation_file {text}/valid.de {text}/valid.en --vocab_size 36",
    ),
    "copying": ("learn_to_copy", None, COPYING),
    "one experiment": ("learn_to_copy", None, f"{COPYING} --experiments control"),
    "keywords": (
        "keyword_drift",
        None,
        f"{EVERYWHERE} --words 6 --length 5 --hidden_size 6 --embedding_size 5 --steps 8 --measurements 4 "
        "--positive 10",
    ),
    "scores and norms": ("score_norm", None, f"{EVERYWHERE} --experiment ablation --epochs 6 --runs 2 --records 3"),
    "heads": (
        "analyze_heads",
        None,
        f"{READING} --importance_sentences 0 --relevance_sentences 0 --frequent 20",
    ),
    "contributions": ("attribute_heads", None, f"{READING} --pairs false --max_length 25 --max_sentences 6"),
    "coreference": (
        "probe_coreference",
        None,
        f"{EVERYWHERE} --models one={{start}} --random_seeds 3 4 --max_items 4",
    ),
}
# How much is removed depends on measured times.
TIMED = "pruning to a speed-up"
RUNS_OF_TWO = RUNS | {
    TIMED: (
        "prune_heads",
        4,
        f"{PRUNING.replace('--keep 3', '--target_speedup 1.2')} {CLASSES} --parts heads units blocks "
        "--importance gates fisher --latency_shapes 1x8 --num_train_epochs 0 --finetune_epochs 0",
    )
}
SHARDED = ("pretraining, masked words", "pruning")


def command_line(folder, name, processes, material):
    recipe, batch, line = RUNS_OF_TWO[name]
    if batch is not None:
        line += f" --per_device_train_batch_size {batch // processes}"
    return recipe, [*material(line), "--output_dir", str(folder / name)]


def run_by_two(folder, names, material, **environment):
    (folder / "jobs.json").write_text(json.dumps({name: command_line(folder, name, 2, material) for name in names}))
    results = folder / "results.json"
    run_together(ROOT / "tests/reference/recipe_runs.py", 2, folder / "jobs.json", results, **environment)
    return folder, json.loads(results.read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory, material):
    """Runs of this process, once each."""
    folder, made = tmp_path_factory.mktemp("one"), {}

    def get(name):
        if name not in made:
            made[name] = json.loads(json.dumps(recipe_runs.run(*command_line(folder, name, 1, material))))
        return made[name]

    return get


@pytest.fixture(scope="module")
def two(tmp_path_factory, material):
    return run_by_two(tmp_path_factory.mktemp("two"), RUNS_OF_TWO, material)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, material):
    return run_by_two(tmp_path_factory.mktemp("sharded"), (*SHARDED, TIMED), material, **fsdp2_environment())


def figures(run):
    """All numbers of a run by where they are, but for times."""
    times = ("seconds", "per_second", "time", "latency", "flos", "num_processes", "num_input_tokens")

    def walk(value, name):
        if isinstance(value, dict | list):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            return {key: one for part, inner in parts for key, one in walk(inner, f"{name}/{part}").items()}
        is_figure = isinstance(value, int | float) and not any(word in name for word in times)
        return {name: value} if is_figure else {}

    # Of models whose metrics have the likelihood, the stock trainer averages it over batches, too.
    log = [
        {key: one for key, one in line.items() if key != "eval_loss" or "eval_nll" not in line} for line in run["log"]
    ]
    return walk({**run, "log": log}, "")


def assert_alike(found, expected):
    assert found["summary"]["num_processes"] == 2
    expected, found = figures(expected), figures(found)
    assert found.keys() == expected.keys()
    # Figures near 0 are sums of others.
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7, nan_ok=True)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_the_losses_and_figures_of_one(one, two, name):
    _, runs = two
    assert_alike(runs[name], one(name))
    losses = [entry["loss"] for entry in runs[name]["log"] if "loss" in entry]
    assert bool(losses) == (RUNS[name][1] is not None)
    assert len(losses) == len(set(losses))


@pytest.mark.parametrize("name", SHARDED)
def test_two_processes_that_share_a_model_give_the_losses_and_figures_of_one(one, sharded, name):
    assert_alike(sharded[1][name], one(name))


def test_a_sharded_model_is_saved_as_others_and_heads_can_be_removed(sharded):
    folder, _ = sharded
    model = AutoModelForMaskedLM.from_pretrained(folder / "pretraining, masked words" / "model")
    assert prune_heads(model, {0: [1]}).config.pruned_heads == {0: [1]}
    checkpoint = folder / "pretraining, masked words" / "checkpoints" / "guided" / "checkpoint-3"
    assert (checkpoint / "pytorch_model_fsdp.bin").is_file()
    pruned = folder / "pruning" / "model-3"
    assert AutoModelForSequenceClassification.from_pretrained(pruned).config.architectures == [
        "HeadwiseBertForSequenceClassification"
    ]
    assert (pruned / "headwise_classes.py").is_file()
    assert not list(pruned.glob("_fsdp*"))


@pytest.mark.parametrize("kind", ["two", "sharded"])
def test_two_processes_prune_to_a_measured_speedup(kind, request):
    folder, runs = request.getfixturevalue(kind)
    rows = runs[TIMED]["summary"]["rows"]
    assert [row["method"] for row in rows] == ["gates", "fisher"]
    for row in rows:
        assert row["predicted_speedup"] >= 1.2
        assert row["speedup_1x8"] > 0
    # The dense model, which is not trained here, has the same loss whole and sharded.
    losses = [entry["eval_loss"] for entry in runs[TIMED]["log"] if "eval_loss" in entry]
    assert losses[0] == pytest.approx(request.getfixturevalue("two")[1][TIMED]["log"][0]["eval_loss"], rel=1e-6)
    model = AutoModelForSequenceClassification.from_pretrained(folder / TIMED / "model-1.2x")
    assert sum(map(len, model.config.kept_heads().values())) == rows[0]["heads"]


def test_models_are_saved_by_the_process_that_has_made_them(two):
    folder, _ = two
    saved = (folder / "copying" / "models").glob("*/model.safetensors")
    assert {path.parent.name for path in saved} == {"permutation", "control", "mixture"}
