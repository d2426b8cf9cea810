"""Headwise classes, which are made of the stock ones when they are asked for."""

import copy
import importlib
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from fresh_processes import python
from tiny_models import CLASSES, KINDS, first_output, headwise_class, sizes, stock_class, tiny_config, tiny_model

import hf_attn_dynamics as had
from hf_attn_dynamics.models import headwise_classes, headwise_outputs
from hf_attn_dynamics.models.architectures import ARCHITECTURES, Architecture


@pytest.mark.parametrize(("kind", "head"), CLASSES)
def test_a_class_is_the_stock_one_with_a_mixin_before_it(kind, head):
    cls, stock = headwise_class(kind, head), stock_class(kind, head)
    assert issubclass(cls, stock)
    assert cls.__name__ == f"Headwise{stock.__name__}"
    assert cls.__doc__.startswith(f"`{stock.__name__}` with guided, gated, removed and hard-coded heads.")
    assert issubclass(cls.config_class, getattr(transformers, stock.config_class.__name__))
    assert cls.config_class.model_type == f"headwise-{kind}"


def test_a_class_is_made_once_whoever_asks_for_it(monkeypatch):
    name = "HeadwiseBertForMaskedLM"
    first = getattr(had, name)
    assert first is getattr(headwise_classes, name) is headwise_classes.twin_class("BertForMaskedLM")
    assert first is transformers.AutoModelForMaskedLM._model_mapping[had.HeadwiseBertConfig]
    monkeypatch.setattr(headwise_classes, "_MADE", {})
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            made = set(pool.map(lambda _: headwise_classes.twin_class("BertForMaskedLM"), range(64)))
    finally:
        sys.setswitchinterval(interval)
    assert len(made) == 1
    assert made.isdisjoint({first})


@pytest.mark.parametrize("kind", KINDS)
def test_models_configurations_and_outputs_are_copied_and_pickled(kind):
    model = tiny_model(kind)
    expected = first_output(model, kind)
    for back in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(back) is type(model)
        assert type(back.config) is type(model.config)
        assert torch.equal(first_output(back, kind), expected)
    assert pickle.loads(pickle.dumps((type(model), model.config))) == (type(model), model.config)


@pytest.mark.parametrize("stock", ["CausalLMOutputWithPast", "BertForPreTrainingOutput"])
def test_outputs_are_those_of_the_stock_class_with_the_losses_of_heads(stock):
    owner = transformers.models.bert.modeling_bert if stock.startswith("Bert") else transformers.modeling_outputs
    cls = headwise_outputs.headwise_output(getattr(owner, stock))
    assert cls is headwise_outputs.headwise_output(getattr(owner, stock)) is headwise_outputs.headwise_output(cls)
    assert cls is getattr(headwise_outputs, f"Headwise{stock}")
    output = cls(torch.tensor(1.0), guidance_loss=torch.tensor(2.0), gate_penalty=torch.tensor(3.0))
    for back in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert type(back) is cls
        assert back.to_tuple() == output.to_tuple()
    leaves, structure = torch.utils._pytree.tree_flatten(output)
    assert leaves == [1.0, 2.0, 3.0]
    assert type(torch.utils._pytree.tree_unflatten(leaves, structure)) is cls


def test_the_former_names_of_outputs_and_places_of_classes_still_serve():
    for name, stock in headwise_outputs._OTHER_NAMES.items():
        assert getattr(headwise_outputs, name).stock_output.__name__ == stock
    with pytest.raises(AttributeError, match="no attribute 'HeadwiseNoOutput'"):
        headwise_outputs.HeadwiseNoOutput  # noqa: B018
    for kind, head in CLASSES:
        file = importlib.import_module(f"hf_attn_dynamics.models.modeling_headwise_{kind}")
        cls = headwise_class(kind, head)
        assert getattr(file, cls.__name__) is cls
        file = importlib.import_module(f"hf_attn_dynamics.models.configuration_headwise_{kind}")
        assert getattr(file, cls.config_class.__name__) is cls.config_class


def test_a_name_that_the_catalogue_does_not_have_is_no_attribute():
    for module in (had, headwise_classes):
        for name in ("HeadwiseGPT", "HeadwiseBertLayer", "Headwise", "BertForMaskedLM"):
            with pytest.raises(AttributeError, match=f"module {module.__name__!r} has no attribute {name!r}"):
                getattr(module, name)
    with pytest.raises(ImportError, match="cannot import name 'HeadwiseGPT' from 'hf_attn_dynamics'"):
        from hf_attn_dynamics import HeadwiseGPT  # noqa: F401


def test_all_classes_are_listed():
    names = {cls.__name__ for kind, head in CLASSES for cls in (headwise_class(kind, head),)}
    names |= {headwise_class(kind, head).config_class.__name__ for kind, head in CLASSES}
    names |= {"HeadwiseElectraForJointPreTraining"}
    names |= {"HeadwiseLlamaForCausalLM", "HeadwiseGPT2LMHeadModel", "HeadwiseViTConfig"}
    assert headwise_classes.headwise_names().keys() >= names
    for listed in (dir(had.models), had.__all__, dir(headwise_classes)):
        assert names <= {*listed}


def test_an_architecture_costs_one_row(monkeypatch, tmp_path):
    monkeypatch.setitem(ARCHITECTURES, "xlm-roberta", Architecture("xlm-roberta"))
    monkeypatch.setattr(headwise_classes, "_MADE", dict(headwise_classes._MADE))
    cls = headwise_classes.HeadwiseXLMRobertaForMaskedLM
    config = headwise_classes.HeadwiseXLMRobertaConfig(**sizes("roberta"), guidance={"fraction": 0.5}, gates={})
    torch.manual_seed(0)
    model = cls(config).eval()
    model.save_pretrained(tmp_path)
    back = cls.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[0, 7, 8, 9, 2]])
    found, expected = (one(ids, labels=ids, guidance_weight=1.0, gate_penalty_weight=1.0) for one in (back, model))
    assert found.loss == expected.loss > expected.guidance_loss + expected.gate_penalty


def test_a_configuration_is_made_without_the_code_of_models():
    code = (
        "import sys; from hf_attn_dynamics import HeadwiseElectraConfig; HeadwiseElectraConfig(gates={}); "
        "print(*(name for name in sys.modules if 'modeling_headwise' in name or 'modeling_electra' in name))"
    )
    (result,) = python(["-c", code], bare=True)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


_BY_NAME = "from hf_attn_dynamics import HeadwiseRobertaForMaskedLM as cls; import transformers"
_PACKAGE_FIRST = "import hf_attn_dynamics, transformers; cls = transformers.AutoModelForMaskedLM"
_TRANSFORMERS_FIRST = "from transformers import AutoModelForMaskedLM as cls; import hf_attn_dynamics"
_PICKLED = "import pickle, pathlib; cls = pickle.loads(pathlib.Path({pickle!r}).read_bytes())"


def test_a_fresh_process_finds_a_class_by_name_by_auto_class_and_in_a_pickle(tmp_path):
    model = tiny_model("roberta")
    model.save_pretrained(tmp_path)
    file = tmp_path / "class.pickle"
    file.write_bytes(pickle.dumps(type(model)))
    first_lines = (_BY_NAME, _PACKAGE_FIRST, _TRANSFORMERS_FIRST, _PICKLED.format(pickle=str(file)))
    commands = [
        ["-c", f"{first}; print(type(cls.from_pretrained({str(tmp_path)!r})).__name__)"] for first in first_lines
    ]
    for result in python(*commands, bare=True):
        assert result.stdout.strip() == "HeadwiseRobertaForMaskedLM", result.stderr


_WITHOUT_THE_PACKAGE = """
import sys
sys.modules["hf_attn_dynamics"] = None
import pickle, torch, transformers
folder, auto = sys.argv[1:]
model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
assert type(pickle.loads(pickle.dumps(model))) is type(model)
ids = torch.tensor([[5, 7, 8, 9]])
inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
outputs = model(ids, output_guidance_loss=True, **inputs)
assert type(pickle.loads(pickle.dumps(outputs))) is type(outputs)
print(*{name.rpartition(".")[2] for name in sys.modules if name.startswith("transformers_modules.")})
"""


def test_code_of_other_architectures_is_not_imported_where_a_checkpoint_brings_its_own(tmp_path):
    commands = []
    for kind, auto in (("bert", "MaskedLM"), ("electra", "PreTraining"), ("marian", "Seq2SeqLM")):
        head = "MTModel" if kind == "marian" else f"For{auto}"
        tiny_model(kind, head).save_pretrained(tmp_path / kind)
        commands.append(["-c", _WITHOUT_THE_PACKAGE, tmp_path / kind, f"AutoModelFor{auto}"])
    for kind, result in zip(("bert", "electra", "marian"), python(*commands), strict=True):
        assert result.returncode == 0, result.stderr
        imported = {*result.stdout.split()}
        assert {"headwise_classes", "modeling_headwise"} <= imported
        special = {f"{file}_headwise_{other}" for other in KINDS for file in ("modeling", "configuration")}
        own = {f"{file}_headwise_{kind}" for file in ("modeling", "configuration")} if kind != "bert" else set()
        assert imported & special == own


def test_a_decoder_comes_back_where_the_package_is_not_installed_and_is_saved_again(tmp_path):
    import hf_attn_dynamics as had

    torch.manual_seed(0)
    config = had.HeadwiseLlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, guidance={"fraction": 0.5}, gates={}, pruned_heads={1: [0, 1]},
    )  # fmt: skip
    model = had.HeadwiseLlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "first")
    code = (
        "import sys; sys.modules['hf_attn_dynamics'] = None\n"
        "import torch, transformers\n"
        "first, second = sys.argv[1:]\n"
        "load = transformers.AutoModelForCausalLM.from_pretrained\n"
        "load(first, trust_remote_code=True).save_pretrained(second)\n"
        "model = load(second, trust_remote_code=True).eval()\n"
        "ids = torch.tensor([[5, 6, 7, 8]])\n"
        "outputs = model(ids, labels=ids, guidance_weight=1.0, gate_penalty_weight=0.1)\n"
        "print(outputs.loss.item(), *model.generate(ids, max_new_tokens=4, do_sample=False)[0].tolist())\n"
    )
    (result,) = python(["-c", code, tmp_path / "first", tmp_path / "second"])
    assert result.returncode == 0, result.stderr
    loss, *tokens = result.stdout.split()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert float(loss) == pytest.approx(
        model(ids, labels=ids, guidance_weight=1.0, gate_penalty_weight=0.1).loss.item()
    )
    assert [*map(int, tokens)] == model.generate(ids, max_new_tokens=4, do_sample=False)[0].tolist()


def test_importing_everything_gives_every_name():
    code = "from hf_attn_dynamics import *; import hf_attn_dynamics as h; print({*h.__all__} - {*globals()})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr


def test_a_class_of_a_user_is_saved_with_its_own_code(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(
        "from hf_attn_dynamics import HeadwiseBertModel\n\n\nclass Mine(HeadwiseBertModel):\n    pass\n"
        "\n\nMine.register_for_auto_class('AutoModel')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("mine").Mine(tiny_config("bert", guidance=None))
    model.save_pretrained(tmp_path / "saved")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    assert config.auto_map["AutoModel"] == "mine.Mine"
    assert config.auto_map["AutoModelForMaskedLM"] == "headwise_classes.HeadwiseBertForMaskedLM"
    assert (tmp_path / "saved" / "mine.py").read_text() == file.read_text()
