"""Checkpoints that are loaded, trained and saved again and again where this package and Triton are not installed."""

import json

import torch
import transformers
from fresh_processes import python
from stock_models import build_stock
from tiny_lstms import IDS, LEXICAL_MODELS, labelled, tiny_lexical
from tiny_models import KINDS, batch_for, tiny_model

from hf_attn_dynamics import BowAttentionConfig, BowAttentionForSequenceClassification, prune_heads


GENERATIONS = 3


def pruned_stock_model():
    """A stock class, whose configuration is saved as that of its headwise twin."""
    return prune_heads(build_stock("bert"), {0: [1], 2: [0, 3]})


def pruned_headwise_model(kind):
    model = tiny_model(
        kind, "ForMaskedLM" if kind == "bert" else None, gates={} if kind != "marian" else {"encoder": {}}
    )
    return prune_heads(model, {"encoder": {0: [1]}} if kind == "marian" else {0: [1]})


def bow_attention():
    return BowAttentionForSequenceClassification(BowAttentionConfig(vocab_size=11, embedding_size=5))


MODELS = {
    **{kind: lambda kind=kind: pruned_headwise_model(kind) for kind in KINDS},
    "stock": pruned_stock_model,
    **{name: lambda name=name: tiny_lexical(name) for name in LEXICAL_MODELS},
    "bow": bow_attention,
}


def inputs_of(name):
    if name in KINDS:
        return batch_for(name)
    if name == "stock":
        return batch_for("bert")
    return {"input_ids": IDS, "labels": labelled(name) if name != "bow" else torch.tensor([0, 1, 1, 0, 1, 0])}


def logits(model, inputs):
    return next(value for name, value in model(**inputs).items() if name.endswith("logits"))


def auto_class_of(model):
    return next(auto for auto, name in model.config.code_map().items() if name.endswith(f".{headwise_name(model)}"))


def headwise_name(model):
    name = type(model).__name__
    return f"Headwise{name}" if name.startswith("Bert") else name


# Each generation is saved by what was loaded from the one before: by the model, or by a stock Trainer.
_GENERATIONS = """
import sys
sys.modules["hf_attn_dynamics"] = sys.modules["triton"] = None
import torch, transformers
folder, generations, trains = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "train"
inputs, expected, auto = torch.load(f"{folder}/expected.pt")
auto = getattr(transformers, auto)
for number in range(generations + 1):
    model = auto.from_pretrained(f"{folder}/{number}", trust_remote_code=True, dtype="auto").eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        found = next(value for name, value in model(**inputs).items() if name.endswith("logits"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    config = transformers.AutoConfig.from_pretrained(f"{folder}/{number}", trust_remote_code=True)
    config.save_pretrained(f"{folder}/configuration-{number}")
    config = transformers.AutoConfig.from_pretrained(f"{folder}/configuration-{number}", trust_remote_code=True)
    fresh = auto.from_config(config, trust_remote_code=True)
    assert {n: p.shape for n, p in fresh.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    if trains:
        args = transformers.TrainingArguments(
            f"{folder}/trained-{number}", max_steps=1, save_steps=1, learning_rate=0.0, report_to=[], use_cpu=True
        )
        examples = [{"input_ids": ids, "labels": ids} for ids in inputs["input_ids"]]
        transformers.Trainer(model, args, train_dataset=examples).train()
        import shutil
        shutil.copytree(f"{folder}/trained-{number}/checkpoint-1", f"{folder}/{number + 1}")
    else:
        model.save_pretrained(f"{folder}/{number + 1}")
"""


def test_checkpoints_are_saved_again_by_code_that_was_saved_beside_them(tmp_path):
    commands, models = [], {}
    for name, build in MODELS.items():
        model, inputs, folder = build().eval(), inputs_of(name), tmp_path / name
        auto = auto_class_of(model) if name != "stock" else "AutoModelForMaskedLM"
        model.save_pretrained(folder / "0")
        with torch.no_grad():
            models[name] = inputs, logits(model, inputs), auto
        torch.save(models[name], folder / "expected.pt")
        way = "train" if name in ("bert", "roberta") else "save"
        commands.append(["-c", _GENERATIONS, folder, GENERATIONS, way])
    for name, result in zip(MODELS, python(*commands), strict=True):
        assert result.returncode == 0, f"{name}: {result.stderr}"
    for name, (inputs, expected, auto) in models.items():
        # With the package as well; and each file is there once more, as it was.
        first, last = tmp_path / name / "0", tmp_path / name / str(GENERATIONS + 1)
        model = getattr(transformers, auto).from_pretrained(last, dtype="auto").eval()
        assert type(model).__module__.startswith("hf_attn_dynamics.")
        with torch.no_grad():
            torch.testing.assert_close(logits(model, inputs), expected, rtol=0, atol=1e-6)
        code = {path.name: path.read_text() for path in first.glob("*.py")}
        assert {path.name: path.read_text() for path in last.glob("*.py")} == code
        assert {path.name for path in (tmp_path / name / "configuration-0").glob("*.py")} == code.keys()
        maps = [json.loads((path / "config.json").read_text())["auto_map"] for path in (first, last)]
        assert maps[0] == maps[1]
