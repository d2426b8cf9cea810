# Licensed under the Apache License, Version 2.0.
import re

import pytest
from transformers import BertConfig, BertForMaskedLM, BertModel, RobertaConfig, RobertaModel

from hf_attn_dynamics import prune_heads
from hf_attn_dynamics.recipes.checkpoints import load_checkpoint, load_config, load_tokenizer


SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_models_have_the_head_they_were_saved_with(tmp_path):
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path / "model")
    assert type(load_checkpoint("model", tmp_path / "model")) is BertForMaskedLM
    prune_heads(BertModel(BertConfig(**SIZES)), {0: [1]}).save_pretrained(tmp_path / "pruned")
    pruned = load_checkpoint("model", tmp_path / "pruned")
    assert pruned.encoder.layer[0].attention.self.query.weight.shape == (4, 8)


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_checkpoint])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-folder/minilm", "--model 'no-such-folder/minilm' cannot be loaded: there is no such folder, nor"),
        ("runs/no-such-folder/minilm", "--model 'runs/no-such-folder/minilm' cannot be loaded: no such folder."),
        ("./minilm", "--model './minilm' cannot be loaded: no such folder."),
        ("a-file", "cannot be loaded: it is a file; name the folder of a checkpoint."),
        ("a-folder", "cannot be loaded: the folder has no config.json."),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path, monkeypatch, load, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    (tmp_path / "a-folder").mkdir()
    with pytest.raises(ValueError, match=re.escape(message)):
        load("--model", name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            [],
            r"--model '.*/model' has no tokenizer, which would be one of tokenizer.json, .*save_pretrained",
        ),
        (
            ["vocab.json", "tokenizer_config.json"],
            r"--model '.*/model': its tokenizer cannot be read; the folder has vocab.json, tokenizer_config.json of "
            r"its files, but not merges.txt. Save it",
        ),
        (["vocab.json"], r"the folder has vocab.json of its files, but not merges.txt. Save it there"),
        (["tokenizer_config.json"], r"has no tokenizer, which would be one of tokenizer.json, .*save_pretrained"),
        (["tokenizer.json", "vocab.json"], r"its tokenizer cannot be read; the folder has tokenizer.json, vocab.json"),
    ],
)
def test_a_tokenizer_that_is_missing_is_named(tmp_path, files, message):
    RobertaModel(RobertaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    for name in files:
        (tmp_path / "model" / name).write_text("{}")
    with pytest.raises(ValueError, match=message):
        load_tokenizer("--model", tmp_path / "model")
