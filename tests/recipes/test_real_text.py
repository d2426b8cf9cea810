"""The recipe on real text, for long enough to see it learn."""

import json
import zipfile

import pytest
from recipe_runs import Recipe


def test_guided_heads_take_their_patterns_while_the_model_learns_english(real_data, tmp_path):
    with zipfile.ZipFile(real_data / "inaugural" / "inaugural.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        speeches = "\n".join(archive.read(name).decode("utf-8", "replace") for name in names)
    (tmp_path / "speeches.txt").write_text(speeches)
    summary = Recipe("pretrain_ag").run(
        tmp_path / "run",
        train_file=[tmp_path / "speeches.txt", real_data / "wikitext-2" / "test.txt"],
        validation_file=real_data / "wikitext-2" / "valid.txt",
        num_hidden_layers=2,
        vocab_size=1000,
        max_steps=80,
        per_device_train_batch_size=8,
        eval_steps=40,
        learning_rate=3e-3,
        guidance_weight=1,
        compare="false",
        save_strategy="no",
    )
    history = json.loads((tmp_path / "run/checkpoints/guided/run.json").read_text())["history"]
    guidance = [entry["guidance_loss"] for entry in history if "guidance_loss" in entry]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    # Two layers with a `next` and a `prev` head each: 4 · 63/64 for uniform attention, 0 for heads that obey.
    assert guidance[0] == pytest.approx(3.94, abs=0.15)
    assert guidance[-1] < 1
    assert losses[-1] < losses[0] < summary["plateau"] + 1
