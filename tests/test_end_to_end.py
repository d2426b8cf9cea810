"""The path of docs/guides/end_to_end.md: pretrain guided, fine-tune, gate and prune, push, load elsewhere."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from fresh_processes import python
from hub_server import environment, running_hub
from recipe_runs import Recipe
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_attn_dynamics.hub.card import count_parameters


ROOT = Path(__file__).parents[1]


SENTENCES = [f"the {animal} number {i} sat here" for i in range(16) for animal in ("cat", "dog")]
LABELS = ["cat", "dog"] * 16
SMALL = {"logging_steps": 5, "report_to": "none"}
KEEP, TOTAL = 3, 8


def run(recipe, folder, **flags):
    """A recipe in this process; its summary."""
    return Recipe(recipe, **SMALL).run(folder, **flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs up to the pruned classifier, made from each other's models."""
    folder = tmp_path_factory.mktemp("end to end")
    (folder / "text.txt").write_text("\n".join(SENTENCES * 4) + "\n")
    rows = [f"{sentence}\t{label}" for sentence, label in zip(SENTENCES, LABELS)]
    (folder / "labelled.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    run(
        "pretrain_ag",
        folder / "guided",
        train_file=folder / "text.txt",
        validation_file=folder / "text.txt",
        num_hidden_layers=2,
        hidden_size=32,
        vocab_size=300,
        block_size=16,
        max_steps=5,
        learning_rate=1e-2,
        compare="false",
    )
    labelled = {"train_file": folder / "labelled.tsv", "validation_file": folder / "labelled.tsv", "max_length": 16}
    run(
        "finetune",
        folder / "classifier",
        model_name_or_path=folder / "guided" / "model",
        num_seeds=1,
        num_train_epochs=12,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        **labelled,
    )
    return folder


@pytest.fixture(scope="module")
def pushed(folder):
    """A Hub that refused the push which ends the last run, and took the second one; and that run."""
    with pytest.MonkeyPatch.context() as patch, running_hub(patch) as server:
        patch.setattr(sys, "stderr", lines := _Lines())
        server.failures["commit"] = 503
        with pytest.raises(SystemExit) as stop:
            run(
                "prune_heads",
                folder / "pruned",
                model_name=folder / "classifier" / "model",
                num_train_epochs=0,
                learning_rate=3e-3,
                per_device_train_batch_size=8,
                importance="gates",
                keep=KEEP,
                latency_batch=2,
                license="apache-2.0",
                push_to_hub="true",
                hub_model_id="tester/pruned",
                train_file=folder / "labelled.tsv",
                validation_file=folder / "labelled.tsv",
                max_length=16,
            )
        assert stop.value.code == 2
        assert not any(server.repositories.values())
        summary = json.loads((folder / "pruned" / "summary.json").read_text())
        server.failures.clear()
        command = shlex.split("".join(lines).partition("try again with: ")[2])
        assert command[0] == "python"
        (again,) = python(command[1:], bare=True, env=environment(server, folder / "home"))
        assert again.returncode == 0, again.stderr
        assert again.stdout.startswith(f"Pushed: {server.address}/tester/pruned/commit/")
        yield server, summary


class _Lines(list):
    """A stream that keeps what is written."""

    write = list.append

    def flush(self):
        pass


# Loads from the Hub, with the package or where importing it fails, as if it were not installed.
FRESH = """
import json, sys
package, name, sentences = json.loads(sys.argv[1])
if package:
    import hf_attn_dynamics
else:
    sys.modules["hf_attn_dynamics"] = None
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=not package)
model = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=not package)
with torch.no_grad():
    logits = model(**tokenizer(sentences, padding=True, return_tensors="pt")).logits
answers = pipeline("text-classification", model=model, tokenizer=tokenizer)(sentences)
print(json.dumps([type(model).__name__, logits.tolist(), [answer["label"] for answer in answers]]))
"""


def local(folder):
    """The pruned model on disk, with logits of all sentences."""
    path = folder / "pruned" / f"model-{KEEP}"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    inputs = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    with torch.no_grad():
        return model, inputs, model(**inputs).logits


@pytest.mark.parametrize("package", [True, False], ids=["plugin", "remote code"])
def test_a_fresh_process_loads_the_same_model_from_the_hub(folder, pushed, package, tmp_path):
    server, summary = pushed
    arguments = json.dumps([package, "tester/pruned", SENTENCES])
    env = {**environment(server, tmp_path / "home"), "PYTHONPATH": ""}
    (result,) = python(["-c", FRESH, arguments], bare=True, env=env)
    assert result.returncode == 0, result.stderr
    name, logits, answers = json.loads(result.stdout.splitlines()[-1])
    model, _, expected = local(folder)
    assert expected.std(0).min() > 0.01, "sentences should not all look the same"
    assert name == type(model).__name__ == "HeadwiseRobertaForSequenceClassification"
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=0, atol=1e-6)
    right = sum(answer == label for answer, label in zip(answers, LABELS)) / len(LABELS)
    assert right == pytest.approx(summary["metric_pruned"])


def test_what_is_on_the_hub_is_what_the_run_left(folder, pushed):
    server, summary = pushed
    path = folder / "pruned" / f"model-{KEEP}"
    files = server.repositories["tester/pruned"]
    for name, content in files.items():
        on_disk = (path / name).read_bytes()
        assert content == on_disk.replace(b"PATH_OR_NAME_OF_THIS_MODEL", b"tester/pruned")
    card = files["README.md"].decode()
    assert f"- Parameters: {sum(count_parameters(path).values()):,}\n" in card
    assert sum(count_parameters(path).values()) == summary["parameters_pruned"]
    assert f"{KEEP} of {TOTAL} heads" in card
    assert "license: apache-2.0" in card
    assert "![Remaining heads of each layer](heads.png)" in card
    assert "Voita" in card
    assert "training_args.bin" not in files


def test_the_heads_that_were_guided_are_known_to_the_end(folder, pushed):
    config = local(folder)[0].config
    assert sum(map(len, config.kept_heads().values())) == KEEP
    assert config.guidance["patterns"] == ["next", "prev"]
    assert config.gates is None


def test_onnx_gives_the_same_logits(folder, pushed):
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model, inputs, expected = local(folder)
    few = {name: value[:3] for name, value in inputs.items()}
    exported = OnnxExporter().export(model, few, config=OnnxConfig(dynamic=True))
    torch.testing.assert_close(torch.as_tensor(exported(**inputs)["logits"]), expected, rtol=1e-4, atol=1e-4)
