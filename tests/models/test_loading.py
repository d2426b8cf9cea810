"""Checkpoints through the Auto classes: with the package, and with nothing but the code saved beside the weights."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from tiny_models import padded_batch, ragged_sentences, tiny_config

import hf_attn_dynamics as had
from hf_attn_dynamics import _auto_registration
from hf_attn_dynamics.data import train_byte_level_bpe
from hf_attn_dynamics.models import head_guidance, modeling_headwise_bert, modeling_headwise_roberta


AUTO_CLASSES = {
    "headwise-bert": modeling_headwise_bert.AUTO_CLASSES,
    "headwise-roberta": modeling_headwise_roberta.AUTO_CLASSES,
}
HEADS = [(kind, auto) for kind, classes in AUTO_CLASSES.items() for auto in classes if auto != "AutoConfig"]

# Runs where importing the package fails, as if it were not installed.
REMOTE = """
import json, sys
sys.modules["hf_attn_dynamics"] = None
import torch, transformers
folder, auto_class, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
outputs = model(torch.tensor(ids), output_guidance_loss=True)
print(json.dumps([type(model).__name__, outputs.to_tuple()[0].flatten().tolist(), outputs.guidance_loss.item()]))
"""


def build(kind, auto, **changes):
    torch.manual_seed(0)
    return AUTO_CLASSES[kind][auto](tiny_config(kind.removeprefix("headwise-"), **changes)).eval()


def batch(kind):
    return padded_batch(ragged_sentences(), pad=1 if kind == "headwise-roberta" else 0)


def first_output(model, kind):
    with torch.no_grad():
        return model(**batch(kind)).to_tuple()[0]


def test_the_names_given_to_the_auto_classes_are_those_of_the_classes():
    assert AUTO_CLASSES.keys() == _auto_registration.ARCHITECTURES.keys()
    for model_type, (prefix, _, heads) in _auto_registration.ARCHITECTURES.items():
        names = {auto: cls.__name__ for auto, cls in AUTO_CLASSES[model_type].items()}
        assert names == {"AutoConfig": f"{prefix}Config", **{auto: prefix + head for auto, head in heads.items()}}


@pytest.mark.parametrize(("kind", "auto"), HEADS)
def test_auto_classes_bring_back_every_head_with_the_same_output(kind, auto, tmp_path):
    model = build(kind, auto)
    model.save_pretrained(tmp_path)
    back = getattr(transformers, auto).from_pretrained(tmp_path)
    assert type(back) is type(model)
    assert torch.equal(first_output(back.eval(), kind), first_output(model, kind))


def test_the_body_of_a_checkpoint_loads_through_auto_model(tmp_path):
    model = build("headwise-roberta", "AutoModelForMaskedLM")
    model.save_pretrained(tmp_path)
    body = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert type(body) is had.HeadwiseRobertaModel
    assert torch.equal(
        body(**batch("headwise-roberta")).last_hidden_state,
        model.roberta(**batch("headwise-roberta")).last_hidden_state,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_and_shards_come_back(dtype, tmp_path):
    model = build("headwise-roberta", "AutoModelForMaskedLM").to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="4kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert back.dtype == dtype
    assert torch.equal(first_output(back, "headwise-roberta"), first_output(model, "headwise-roberta"))


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        ("headwise-roberta", "AutoModelForMaskedLM", "AutoModelForMaskedLM"),
        ("headwise-bert", "AutoModelForPreTraining", "AutoModelForPreTraining"),
        # The head that was saved is not the only one the code knows.
        ("headwise-roberta", "AutoModelForMaskedLM", "AutoModel"),
        ("headwise-bert", "AutoModelForTokenClassification", "AutoModel"),
    ],
)
def test_the_saved_code_suffices_where_the_package_is_not_installed(kind, saved, loaded, tmp_path):
    model = build(kind, saved)
    model.save_pretrained(tmp_path)
    ids = [[4, 7, 5, 9, 11]]
    command = [sys.executable, "-c", REMOTE, str(tmp_path), loaded, json.dumps(ids)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    name, output, guidance_loss = json.loads(result.stdout.splitlines()[-1])
    here = getattr(transformers, loaded).from_pretrained(tmp_path).eval()
    expected = here(torch.tensor(ids), output_guidance_loss=True)
    assert name == type(here).__name__
    torch.testing.assert_close(torch.tensor(output), expected.to_tuple()[0].flatten(), rtol=0, atol=1e-6)
    assert guidance_loss == pytest.approx(expected.guidance_loss.item(), rel=1e-6)


def test_a_checkpoint_with_an_unknown_pattern_loads_without_guidance(tmp_path, monkeypatch):
    monkeypatch.setattr(head_guidance, "_PATTERNS", dict(head_guidance._PATTERNS))
    had.register_pattern("mine", head_guidance.first_token)
    build("headwise-roberta", "AutoModel", guidance={"heads": {"mine": [0]}}).save_pretrained(tmp_path)
    del head_guidance._PATTERNS["mine"]
    with pytest.raises(ValueError, match=r"pattern 'mine'.* or load the model with guidance=None"):
        had.HeadwiseRobertaModel.from_pretrained(tmp_path)
    for load in (had.HeadwiseRobertaModel, transformers.AutoModel):
        assert load.from_pretrained(tmp_path, guidance=None).config.guidance is None


def test_saving_leaves_the_configuration_as_it_was(tmp_path):
    model = build("headwise-bert", "AutoModel")
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "auto_map")


def test_the_saved_code_loads_from_a_folder_of_any_name(tmp_path):
    folder = tmp_path / "my modèl+x (2)"
    build("headwise-roberta", "AutoModel").save_pretrained(folder)
    remote = transformers.dynamic_module_utils.get_class_from_dynamic_module(
        "modeling_headwise_roberta.HeadwiseRobertaModel", str(folder)
    )
    assert remote.from_pretrained(folder)(torch.tensor([[4, 5]]), output_guidance_loss=True).guidance_loss > 0


def test_the_saved_code_and_the_package_work_in_one_process(tmp_path):
    model = build("headwise-roberta", "AutoModelForMaskedLM")
    model.save_pretrained(tmp_path)
    remote = transformers.dynamic_module_utils.get_class_from_dynamic_module(
        "modeling_headwise_roberta.HeadwiseRobertaForMaskedLM", str(tmp_path)
    )
    assert remote is not type(model)
    copy = remote.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[4, 7, 5, 9, 11]])
    for one in (model, copy, model):
        found = one(ids, output_guidance_loss=True)
        expected = model(ids, output_guidance_loss=True)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.guidance_loss, expected.guidance_loss)


PIPELINES = {
    "AutoModelForMaskedLM": ("fill-mask", "the cat <mask> here"),
    "AutoModelForSequenceClassification": ("text-classification", "the cat sat"),
    "AutoModelForTokenClassification": ("token-classification", "the cat sat"),
    "AutoModel": ("feature-extraction", "the cat sat"),
}


@pytest.mark.parametrize("auto", PIPELINES)
def test_pipelines_take_every_head(auto, tmp_path, caplog):
    tokenizer = train_byte_level_bpe(["the cat sat here on the mat"] * 3, vocab_size=290)
    build("headwise-roberta", auto, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    task, text = PIPELINES[auto]
    with caplog.at_level("ERROR", logger="transformers"):
        answer = transformers.pipeline(task, model=str(tmp_path))(text)
    assert answer
    assert "is not supported" not in caplog.text
