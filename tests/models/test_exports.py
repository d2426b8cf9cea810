"""Models outside eager PyTorch: exported, as ONNX, and compiled. Headwise ones are unevenly pruned."""

import pytest
import torch
from slow_score_norm import padded
from tiny_lstms import IDS, LEXICAL_MODELS, TARGETS, tiny_lexical
from tiny_models import (
    ALL_GATES,
    KINDS,
    UNEVEN,
    batch_for,
    padded_batch,
    ragged_sentences,
    tiny_model,
    vivid,
)

import hf_attn_dynamics as had


def pruned(kind, head=None, **changes):
    changes = {"guidance": None, "use_cache": False, **changes}
    return had.prune_heads(vivid(tiny_model(kind, head, **changes)), UNEVEN[kind])


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_gives_the_same_logits(kind):
    model, inputs = pruned(kind), batch_for(kind)
    exported = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(exported(**inputs)[0], logits(model, inputs), rtol=1e-5, atol=1e-5)


def test_onnx_gives_the_same_logits_for_another_batch_and_length(tmp_path):
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model = pruned("bert", "ForMaskedLM", gates={})
    model.head_gates()["encoder", 0].log_alpha.data[1] = -3.0
    exported = OnnxExporter().export(model, batch_for("bert"), config=OnnxConfig(dynamic=True))
    others = padded_batch(ragged_sentences(3, seed=5), pad=model.config.pad_token_id, length=25)
    torch.testing.assert_close(
        torch.as_tensor(exported(**others)["logits"]), logits(model, others), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["electra", "marian"])
def test_a_compiled_model_gives_the_same_logits_and_gradients(kind):
    model = pruned(kind, gates=ALL_GATES[kind])
    inputs = batch_for(kind)
    expected = model(**inputs)[0]
    expected.square().mean().backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    torch.compiler.reset()
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.square().mean().backward()
    for name, value in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, value, rtol=1e-4, atol=1e-5)


def lexical_inputs(name, side):
    """A batch padded on this side, and translations if they are read."""
    ids = IDS if side == "right" else torch.stack([row.roll(int((row == 0).sum())) for row in IDS])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if name == "LstmSeq2SeqForConditionalGeneration":
        # A state that goes from step to step is no output of exported code.
        inputs |= {"decoder_input_ids": padded(TARGETS), "use_cache": False}
    return inputs


@pytest.mark.parametrize("name", LEXICAL_MODELS)
def test_an_exported_lstm_or_proxy_gives_the_same_logits_wherever_padding_lies(name):
    model = tiny_lexical(name)
    exported = torch.export.export(model, (), lexical_inputs(name, "right"), strict=False).module()
    for side in ("right", "left"):
        inputs = lexical_inputs(name, side)
        torch.testing.assert_close(exported(**inputs).logits, logits(model, inputs), rtol=1e-9, atol=1e-12)


def test_onnx_of_an_lstm_gives_the_same_logits_for_its_batch_and_length():
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model = tiny_lexical("LstmForSequenceClassification").float()
    exported = OnnxExporter().export(model, lexical_inputs("", "right"), config=OnnxConfig())
    others = lexical_inputs("", "left")
    torch.testing.assert_close(
        torch.as_tensor(exported(**others)["logits"]), logits(model, others), rtol=1e-4, atol=1e-5
    )
