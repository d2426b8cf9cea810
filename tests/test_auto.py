"""The headwise model for a stock or headwise configuration or checkpoint."""

import pytest
import torch
import transformers
from tiny_models import KINDS, first_output, stock_config, tiny_config

import hf_attn_dynamics as had
from hf_attn_dynamics.models.architectures import ARCHITECTURES


HEADS = [(kind, auto) for kind in KINDS for auto in ARCHITECTURES[kind].stock_models()]


@pytest.mark.parametrize(("kind", "auto"), HEADS)
def test_a_stock_configuration_gives_the_class_behind_each_auto_class(kind, auto):
    config = stock_config(kind)
    before = config.to_dict()
    model = had.headwise_model(config, auto)
    assert type(model) is getattr(transformers, auto)._model_mapping[type(model.config)]
    assert config.to_dict() == before
    assert (model.config.model_type, model.config.gates, model.config.pruned_heads) == (f"headwise-{kind}", None, None)


def test_a_stock_configuration_keeps_its_kernel_and_its_removed_heads():
    config = stock_config("roberta", attn_implementation="eager", pruned_heads={"0": [1]})
    model = had.headwise_model(config)
    assert model.config._attn_implementation == "eager"
    assert model.config.kept_heads()["encoder", 0] == [0, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_headwise_configuration_is_taken_with_all_it_says(kind):
    gates = {"encoder": {}} if kind == "marian" else {}
    pruned = {"encoder": {1: [0]}} if kind == "marian" else {1: [0]}
    model = had.headwise_model(tiny_config(kind, gates=gates, pruned_heads=pruned))
    assert {site: len(gate.log_alpha) for site, gate in model.head_gates().items()} == {
        ("encoder", 0): 4,
        ("encoder", 1): 3,
    }
    assert model.config.guidance is not None
    assert model.config.pruned_heads == pruned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_path", [str, lambda folder: folder])
def test_a_stock_checkpoint_keeps_its_outputs_and_takes_settings_of_heads(kind, as_path, tmp_path):
    torch.manual_seed(0)
    stock = transformers.AutoModel.from_config(stock_config(kind)).eval()
    stock.save_pretrained(tmp_path)
    gates = {"encoder": {}} if kind == "marian" else {}
    model = had.headwise_model(as_path(tmp_path), gates=gates)
    assert not model.training
    assert torch.equal(first_output(model, kind), first_output(stock, kind))
    assert len(model.head_gates()) == 2


def test_keywords_of_from_pretrained_reach_it(tmp_path):
    transformers.RobertaModel(stock_config("roberta")).save_pretrained(tmp_path / "inner")
    model = had.headwise_model(
        tmp_path, "AutoModelForSequenceClassification", subfolder="inner", num_labels=5, dtype=torch.bfloat16
    )
    assert model.classifier.out_proj.weight.shape == (5, 16)
    assert model.dtype == torch.bfloat16


def test_a_headwise_checkpoint_comes_back_with_the_heads_it_has(tmp_path):
    model = had.HeadwiseBertForMaskedLM(tiny_config("bert", pruned_heads={0: [1], 1: [0, 1, 2, 3]})).eval()
    model.save_pretrained(tmp_path)
    back = had.headwise_model(tmp_path, "AutoModelForMaskedLM")
    assert torch.equal(first_output(back, "bert"), first_output(model, "bert"))


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (
            transformers.GPT2Config(),
            {},
            "no headwise class for the architecture 'gpt2', only for bert, electra, marian, roberta",
        ),
        (
            stock_config("marian"),
            {"auto_class": "AutoModelForMaskedLM"},
            "HeadwiseMarian has no head for 'AutoModelForMaskedLM', only for AutoModel, AutoModelForSeq2SeqLM",
        ),
        (stock_config("bert"), {"gates": {}}, "a configuration says all of a model; set gates in it"),
    ],
)
def test_what_there_is_no_model_for_is_refused(source, arguments, message):
    with pytest.raises(ValueError, match=message):
        had.headwise_model(source, **arguments)
