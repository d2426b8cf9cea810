# Licensed under the Apache License, Version 2.0.
import pytest
from transformers import AutoModelForMaskedLM, AutoTokenizer

from hf_attn_dynamics.recipes import demonstration


@pytest.fixture
def short(tmp_path, monkeypatch):
    """Few steps on few words, in a folder where there is no model yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(demonstration, "STEPS", 2)
    text = "\n".join(f"The {n} cats sleep. A dog barks at {n + 1} of them." for n in range(200))
    monkeypatch.setattr(demonstration, "embedded_splits", lambda: ([text], [text]))


def test_a_small_guided_model_is_trained_once(short, tmp_path):
    folder = demonstration.demonstration_model("heads", seed=1, disable_tqdm=True)
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.guidance["fraction"] == 0.5
    assert len(tokenizer) == model.config.vocab_size
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert demonstration.demonstration_model("heads", seed=1, disable_tqdm=True) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_the_model_of_the_pretraining_demonstration_is_taken(short, tmp_path):
    there = tmp_path / demonstration.PRETRAINED
    there.mkdir(parents=True)
    (there / "config.json").touch()
    assert demonstration.demonstration_model("heads", seed=1, disable_tqdm=True) == demonstration.PRETRAINED
