"""Checkpoints that an earlier version wrote: they load, and give what they gave then."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_attn_dynamics import load_pruned


# Written by version 0.1.0 as of its first storey (commit 9c655e8), without the code that is saved beside checkpoints;
# `expected.safetensors` has the inputs of a forward pass, and its outputs, in evaluation mode.
CHECKPOINTS = sorted(
    (Path(__file__).parents[1] / "reference" / "checkpoints_0_1").iterdir(), key=lambda path: path.name
)


def loaded(folder: Path):
    """As users load it: by an Auto class where one knows it, and stock classes by `load_pruned`."""
    config = json.loads((folder / "config.json").read_text())
    (name,) = config["architectures"]
    if "auto_map" not in config:
        return load_pruned(folder)
    auto = next(
        auto for auto, target in config["auto_map"].items() if target.endswith(f".{name}") or stock(target) == name
    )
    return getattr(transformers, auto).from_pretrained(folder)


def stock(target: str) -> str:
    return target.rpartition(".")[2].removeprefix("Headwise")


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_an_earlier_checkpoint_gives_what_it_gave(folder):
    saved = load_file(folder / "expected.safetensors")
    inputs, expected = (
        {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
        for prefix in ("inputs.", "outputs.")
    )
    model = loaded(folder).eval()
    asked = {f"output_{name}": True for name in ("guidance_loss", "gate_penalty") if name in expected}
    with torch.no_grad():
        outputs = model(**inputs, **asked)
    assert expected
    for name, value in expected.items():
        # Rounding depends on the CPU: what was written is up to 2e-6 of the largest value from the exact output.
        tolerance = 4e-6 * value.abs().max().item()
        torch.testing.assert_close(outputs[name].float(), value, rtol=1e-5, atol=tolerance)


def test_there_is_a_checkpoint_of_every_kind_of_model():
    kinds = {json.loads((folder / "config.json").read_text())["model_type"] for folder in CHECKPOINTS}
    assert {f"headwise-{kind}" for kind in ("bert", "electra", "marian", "roberta")} <= kinds
    assert {"lstm-attention", "lstm-attention-seq2seq", "bag-of-words-proxy", "bow-attention", "gpt2", "t5"} <= kinds
