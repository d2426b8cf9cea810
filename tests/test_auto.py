"""The headwise model for a stock or headwise configuration or checkpoint."""

import pytest
import torch
import transformers
from architecture_table import FILE, table
from stock_models import build_stock, stock_inputs
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
            transformers.XLNetConfig(),
            {},
            "no headwise class for the architecture 'xlnet', only for albert, .*register_attention",
        ),
        (
            stock_config("marian"),
            {"auto_class": "AutoModelForMaskedLM"},
            "HeadwiseMarian has no head for 'AutoModelForMaskedLM', only for AutoModel, AutoModelForSeq2SeqLM",
        ),
        (stock_config("bert"), {"num_labels": 3}, "num_labels cannot be passed with a configuration"),
        (stock_config("bert"), {"gates": {"units": 1}}, "gates has no key 'units'"),
    ],
)
def test_what_there_is_no_model_for_is_refused(source, arguments, message):
    with pytest.raises(ValueError, match=message):
        had.headwise_model(source, **arguments)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mistral", "vit", "whisper", "bart"])
def test_a_loaded_model_shares_its_weights_with_the_headwise_one(name):
    stock = build_stock(name)
    inputs = stock_inputs(stock)
    with torch.no_grad():
        expected = stock(**inputs)
    model = had.headwise_model(stock)
    assert type(model).__name__ == f"Headwise{type(stock).__name__}"
    mine, theirs = dict(model.named_parameters()), dict(stock.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(mine[key] is theirs[key] for key in mine)
    with torch.no_grad():
        found = model(**inputs)
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert torch.equal(found[key], value), key
    if stock.can_generate() and "input_ids" in inputs and not stock.config.is_encoder_decoder:
        settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
        assert torch.equal(model.generate(**inputs, **settings), stock.generate(**inputs, **settings))


def test_a_loaded_model_gets_gates_and_guidance_and_stays_as_it_is():
    stock = build_stock("llama").train()
    model = had.headwise_model(stock, gates={"initial_log_alpha": 1.5}, guidance={"fraction": 0.5})
    assert model.training
    gates = model.head_gates().values()
    assert all(gate.log_alpha.dtype == torch.float32 and gate.log_alpha.tolist() == [1.5] * 3 for gate in gates)
    ids = stock_inputs(stock)["input_ids"]
    outputs = model(input_ids=ids, labels=ids, guidance_weight=1.0, gate_penalty_weight=0.1)
    outputs.loss.backward()
    assert stock.model.layers[0].self_attn.q_proj.weight.grad is not None
    assert type(stock) is transformers.LlamaForCausalLM
    assert not hasattr(stock.config, "gates")


def hooked(model):
    model.model.layers[1].register_forward_hook(lambda *arguments: None)
    return model


def on_meta(model):
    return model.to("meta")


def adapted(model):
    layer = model.model.layers[0].self_attn
    layer.q_proj = torch.nn.Sequential(layer.q_proj)
    return model


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (hooked, {}, "model.layers.1 of LlamaForCausalLM has hooks"),
        (on_meta, {}, "is not a plain parameter with values"),
        (adapted, {}, "does not have the weights of its class .*merge_and_unload"),
        (lambda model: model, {"num_labels": 3}, "LlamaForCausalLM is already loaded; .* got num_labels"),
        (lambda model: model, {"guidance": {"heads": {"next": [0]}}}, "attends to the next token"),
    ],
)
def test_a_loaded_model_that_cannot_be_shared_is_refused(change, arguments, message):
    with pytest.raises(ValueError, match=message):
        had.headwise_model(change(build_stock("llama")), **arguments)


def test_architectures_are_listed_with_their_classes():
    found = had.headwise_architectures()
    assert {"bert", "llama", "gpt2", "whisper", "vit", "qwen3_moe"} <= found.keys()
    for one in found.values():
        assert all(isinstance(getattr(had, name), type) for name in one.classes.values())


def test_the_table_of_architectures_is_what_tiny_models_show():
    assert FILE.read_text() == table()
    for model_type, one in had.headwise_architectures().items():
        line = next(line for line in FILE.read_text().splitlines() if line.startswith(f"| `{model_type}` |"))
        assert (line.split(" | ")[3] == "yes") == one.can_be_guided
