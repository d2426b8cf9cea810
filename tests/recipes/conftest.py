import re
import runpy
import sys

import glue_files
import pytest
import torch
from launching import ROOT
from rough_pictures import draw_roughly
from transformers import BertConfig, BertForSequenceClassification
from translating import PAIRS, write_pairs

from hf_attn_dynamics.data import train_byte_level_bpe


@pytest.fixture(scope="session", autouse=True)
def rough_pictures():
    """Recipes draw without layout and in few dots here, for time: what pictures show is tested with the plots."""
    with pytest.MonkeyPatch.context() as patch:
        draw_roughly(patch)
        yield


@pytest.fixture
def run_as_script(monkeypatch, capsys):
    """Runs a recipe with a command line, as a script but in this process; returns what it prints."""

    def run(recipe, *argv):
        script = str(ROOT / "recipes" / recipe)
        monkeypatch.setattr(sys, "argv", [script, *map(str, argv)])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Files of simple sentences, aligned by line: the training text is all of them, the others are parts."""
    folder = tmp_path_factory.mktemp("text")
    for name, pairs in (("train", PAIRS), ("valid", PAIRS[::4]), ("test", PAIRS[1::6])):
        write_pairs(folder, name, pairs)
    return folder


@pytest.fixture(scope="session")
def material(tmp_path_factory, text):
    """Words of a command line, with files and a checkpoint in place of their names in braces."""
    folder = tmp_path_factory.mktemp("material")
    lines = [pair[1] for pair in PAIRS]
    (folder / "sentences.txt").write_text("\n\n".join("\n".join(lines[i : i + 6]) for i in range(0, len(lines), 6)))
    rows = [f"the {animal} number {i} sat here\t{animal}" for i in range(12) for animal in ("cat", "dog")]
    (folder / "classes.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    (folder / "glue").mkdir()
    glue_files.write_tsv(folder / "glue")
    tokenizer = train_byte_level_bpe(rows, vocab_size=290, kind="bert")
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    # From smaller weights all texts get nearly the same score, and correlations would be those of rounding.
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "start")
    places = {"sentences": "sentences.txt", "classes": "classes.tsv", "glue": "glue", "start": "start"}
    places = {"text": text, **{name: folder / file for name, file in places.items()}}

    def placed(text):
        # A folder may have spaces in its name: words are told apart before.
        return [re.sub(r"\{(\w+)\}", lambda found: str(places[found[1]]), word) for word in text.split(" ")]

    return placed
