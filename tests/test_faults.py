# Licensed under the Apache License, Version 2.0.
"""What happens to runs that are killed, run out of space, find damaged files, or a loss that is no number."""

import errno
import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from fresh_processes import python
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tiny_training import build, collate, examples, trainer
from transformers import TrainerCallback

from hf_attn_dynamics import HeadwiseTrainer, HeadwiseTrainingArguments
from hf_attn_dynamics._files import write_text
from hf_attn_dynamics.recipes.run import begin_run, check_output_dir
from hf_attn_dynamics.training import WeightAverageTrainer, checkpoint_damage, newest_checkpoint


ROOT = Path(__file__).parents[1]
KILLS = 20


def sentences(folder):
    nouns, verbs = ["cat", "dog", "bird", "fox", "cow"], ["sees", "likes", "hears", "follows"]
    lines = [f"The {a} {v} the {b} ." for a in nouns for v in verbs for b in nouns]
    (folder / "train.txt").write_text("\n".join(lines * 3))
    (folder / "valid.txt").write_text("\n".join(reversed(lines)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_run_that_is_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path):
    sentences(tmp_path)
    files = ["--train_file", str(tmp_path / "train.txt"), "--validation_file", str(tmp_path / "valid.txt")]
    # Half of the time goes into saving.
    flags = (
        "--num_hidden_layers 1 --hidden_size 16 --num_attention_heads 4 --vocab_size 300 --block_size 16 "
        "--max_steps 8 --eval_steps 4 --logging_steps 2 --save_steps 1 --save_total_limit 2 "
        "--per_device_train_batch_size 4 --validation_examples 6 --guidance_weight auto --dropout 0.1 "
        "--disable_tqdm true --device cpu --cpu_threads 1"
    )
    script = ROOT / "tests" / "reference" / "killing.py"
    (finished,) = python([script, tmp_path, KILLS, "pretrain_ag", *files, *flags.split()])
    assert finished.returncode == 0, finished.stderr[-4000:]
    report = json.loads(finished.stdout.splitlines()[-1])
    assert report["killed"] == KILLS
    alone, *disturbed = map(Path, report["ended"])
    for place in disturbed:
        for model in ("model", "model_unguided"):
            expected, found = (load_file(folder / model / "model.safetensors") for folder in (alone, place))
            assert all(torch.equal(expected[name], found[name]) for name in expected | found)
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in (alone, place)]
        unlike = {key for key in summaries[0] if summaries[0][key] != summaries[1][key]}
        assert all("second" in key or key == "command" for key in unlike), unlike
        # Nothing half-written stays among the results.
        assert not [path for path in place.rglob("*.part") if not path.name.startswith(".")]


class StopAt(TrainerCallback):
    """Spoils the weights before a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)


def trained(folder, *callbacks, **changes):
    torch.manual_seed(0)
    ids = torch.randint(5, 40, (16, 8)).tolist()
    args = HeadwiseTrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=1,
        save_total_limit=None,
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **changes,
    )
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    return HeadwiseTrainer(tiny_model("roberta", "ForMaskedLM"), args, train_dataset=data, callbacks=list(callbacks))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trained(folder).train()
    return folder


def test_a_loss_that_is_no_number_stops_training_and_keeps_its_batch(tmp_path):
    trainer = trained(tmp_path, StopAt(2))
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 3; .*nonfinite_batch\.pt"):
        trainer.train()
    batch = torch.load(tmp_path / "nonfinite_batch.pt", weights_only=True)
    assert batch["input_ids"].shape == (4, 8)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0" * 7)


def empty(path):
    path.write_bytes(b"")


def forget(path):
    path.write_text("{}")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


DAMAGE = [
    ("trainer_state.json", Path.unlink, "trainer_state.json is missing"),
    ("trainer_state.json", truncate, "trainer_state.json is truncated or damaged"),
    ("model.safetensors", truncate, "model.safetensors is truncated or damaged"),
    ("model.safetensors", lengthen, "model.safetensors is truncated or damaged"),
    ("optimizer.pt", truncate, "optimizer.pt is truncated or damaged"),
    ("optimizer.pt", flip, "optimizer.pt is truncated or damaged"),
    ("rng_state.pth", truncate, "rng_state.pth is truncated or damaged"),
    ("config.json", truncate, "config.json is truncated or damaged"),
    ("trainer_state.json", empty, "trainer_state.json is truncated or damaged"),
    ("trainer_state.json", forget, "trainer_state.json has no global_step"),
    ("model.safetensors", empty, "model.safetensors is truncated or damaged"),
    ("model.safetensors", Path.unlink, "model.safetensors is missing"),
    ("optimizer.pt", empty, "optimizer.pt is truncated or damaged"),
    ("optimizer.pt", Path.unlink, "optimizer.pt is missing"),
    ("scheduler.pt", empty, "scheduler.pt is truncated or damaged"),
    ("scheduler.pt", Path.unlink, "scheduler.pt is missing"),
    ("rng_state.pth", empty, "rng_state.pth is truncated or damaged"),
    ("rng_state.pth", Path.unlink, "rng_state.pth is missing"),
    ("training_args.bin", truncate, "training_args.bin is truncated or damaged"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE, ids=[f"{n}-{d.__name__}" for n, d, _ in DAMAGE])
def test_damaged_checkpoints_are_named_and_passed_over(name, damage, message, checkpoints, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(checkpoints, folder)
    assert newest_checkpoint(folder) == folder / "checkpoint-4"
    damage(folder / "checkpoint-4" / name)
    assert checkpoint_damage(folder / "checkpoint-4") == message
    assert newest_checkpoint(folder) == folder / "checkpoint-3"
    assert f"checkpoint-4 is incomplete ({message})" in caplog.text


@pytest.mark.parametrize("kind", ["headwise", "averaged", "translation"])
def test_a_run_is_resumed_from_the_newest_checkpoint_that_is_whole(tmp_path, kind, caplog):
    def run(folder, steps):
        task = "Translation" if kind == "translation" else "MaskedLM"
        model = build(task, "marian" if kind == "translation" else "roberta", guidance=None)
        made = trainer(
            folder, model, examples(task), max_steps=steps, save_strategy="steps", save_steps=1, guidance_weight=None,
            per_device_train_batch_size=2, lr_scheduler_type="constant",
            **({"ema_decay": 0.5} if kind == "averaged" else {}),
        )  # fmt: skip
        if kind != "averaged":
            return made
        return WeightAverageTrainer(model, made.args, data_collator=collate, train_dataset=examples(task))

    run(tmp_path, 3).train()
    truncate(tmp_path / "checkpoint-3" / "model.safetensors")
    resumed = run(tmp_path, 4)
    resumed.train(resume_from_checkpoint=True)
    undisturbed = run(tmp_path / "undisturbed", 4)
    undisturbed.train()
    for found, expected in zip(resumed.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    (line,) = [record.message for record in caplog.records if "is incomplete" in record.message]
    assert "checkpoint-3 is incomplete (model.safetensors is truncated or damaged)" in line
    assert re.search(r"; the newest complete checkpoint is \S+checkpoint-2\.$", line)


def test_without_a_whole_checkpoint_a_run_is_not_resumed(checkpoints, tmp_path):
    with pytest.raises(ValueError, match="resume_from_checkpoint=True, but .* has no complete checkpoint"):
        trained(tmp_path).train(resume_from_checkpoint=True)
    shutil.copytree(checkpoints / "checkpoint-4", tmp_path / "checkpoint-4")
    truncate(tmp_path / "checkpoint-4" / "optimizer.pt")
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        trained(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(
        ValueError, match=r"checkpoint-4' is not a complete checkpoint: optimizer.pt is truncated or damaged"
    ):
        trained(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_checkpoint_of_the_model_only_is_whole(tmp_path):
    trained(tmp_path, save_only_model=True).train()
    assert checkpoint_damage(newest_checkpoint(tmp_path)) is None


def test_a_shard_that_is_missing_is_damage(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "checkpoint-4", tmp_path / "one")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "one" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(2)}, tmp_path / "one" / "model-00001-of-00002.safetensors")
    assert checkpoint_damage(tmp_path / "one") == "model-00002-of-00002.safetensors is missing"


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": 1}'])
def test_an_index_without_names_is_damage(content, checkpoints, tmp_path):
    shutil.copytree(checkpoints / "checkpoint-4", tmp_path / "one")
    (tmp_path / "one" / "model.safetensors.index.json").write_text(content)
    assert checkpoint_damage(tmp_path / "one") == "model.safetensors.index.json is not an index of weights"


def test_without_a_whole_checkpoint_there_is_none(checkpoints, tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere") is None
    shutil.copytree(checkpoints / "checkpoint-1", tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-best").mkdir()
    truncate(tmp_path / "checkpoint-1" / "model.safetensors")
    assert newest_checkpoint(tmp_path) is None


class FullDisk(TrainerCallback):
    """Lets no file grow beyond some kilobytes, from a step on."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))


def test_a_full_disk_leaves_earlier_checkpoints_to_go_on_from(checkpoints, tmp_path):
    try:
        with pytest.raises(Exception, match="too large|File|write"):
            trained(tmp_path, FullDisk()).train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    last = newest_checkpoint(tmp_path)
    assert last == tmp_path / "checkpoint-2"
    trained(tmp_path).train(resume_from_checkpoint=str(last))
    expected, found = (load_file(folder / "checkpoint-4" / "model.safetensors") for folder in (checkpoints, tmp_path))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_file_is_never_seen_in_part(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_text(path, "old")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def claimed_elsewhere(folder):
    """What another process is told that claims the folder, and ends."""
    code = f"from hf_attn_dynamics.recipes.run import begin_run; begin_run({str(folder)!r}, {{'seed': 2}})"
    (found,) = python(["-c", code])
    if found.returncode != 2:
        return "claimed"
    # Triton, which PyTorch imports, may write after it.
    return next(line for line in found.stderr.splitlines() if "error: " in line)


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    begin_run(tmp_path / "run", {"seed": 1})
    begin_run(tmp_path / "run", {"seed": 1})  # the same process goes on
    assert claimed_elsewhere(tmp_path / "run") == (
        f"-c: error: another run is writing to output_dir {tmp_path / 'run'}; wait for it, or name another folder."
    )
    assert (tmp_path / "run" / "config.yaml").read_text() == "seed: 1\n"
    # The claim of a process that has ended is gone.
    assert claimed_elsewhere(tmp_path / "free") == "claimed"
    begin_run(tmp_path / "free", {"seed": 3})


def test_what_a_killed_run_left_before_it_began_is_no_run(tmp_path):
    (tmp_path / ".config.yaml.abc.part").write_text("se")
    (tmp_path / ".lock").touch()
    assert check_output_dir(tmp_path, {"seed": 1}, resume=True) == tmp_path
    (tmp_path / "summary.json").touch()
    with pytest.raises(ValueError, match="holds no config.yaml"):
        check_output_dir(tmp_path, {"seed": 1}, resume=True)
