"""Removing heads: pruned models equal models with these heads silenced, through saving, generation and training."""

import copy
import importlib
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune
import transformers
from fresh_processes import python
from stock_models import STOCK_MODELS, build_image_reader, build_stock, stock_inputs
from torch import nn
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from hf_attn_dynamics.analysis.head_scores import HeadScores
from hf_attn_dynamics.models import head_pruning, head_roles
from hf_attn_dynamics.models.head_pruning import apply_pruned_heads, locate_heads, prune_heads, retain_heads
from hf_attn_dynamics.models.head_roles import HeadRoles, register_attention
from hf_attn_dynamics.models.head_sites import HeadSite, config_value, kinds_of
from hf_attn_dynamics.models.pruned_checkpoints import load_pruned
from hf_attn_dynamics.models.retained import lowest_scored


EVERY = list(STOCK_MODELS)
SEQ2SEQ = ["bart", "m2m-100", "marian", "mbart", "mt5", "pegasus", "t5"]
CAUSAL = ["gpt2", *(name for name, (cls, *_) in STOCK_MODELS.items() if cls.endswith("ForCausalLM"))]
# Which layer loses all heads.
EMPTY = ["first", "middle", "all"]


def uneven(model, empty="middle"):
    """Heads to remove: one layer of each kind loses all, the one after it one group, and the last one two."""
    layers, chosen = locate_heads(model), {}
    for layer in layers:
        size = layer.group_size
        groups = [list(range(start, start + size)) for start in range(0, layer.num_heads, size)]
        last = max(other.site.layer for other in layers if other.site.kind == layer.site.kind)
        number = layer.site.layer
        if empty == "all" or number == (1 if empty == "middle" else 0):
            chosen[layer.site] = sum(groups, [])
        elif number == last:
            chosen[layer.site] = groups[0] + groups[-1]
        else:
            chosen[layer.site] = groups[1]
    return chosen


def as_argument(chosen):
    return config_value(chosen, kinds_of(chosen))


def silenced(model, chosen):
    """The reference: a copy whose output projections read zeros from the chosen heads."""
    model = copy.deepcopy(model)
    for layer in locate_heads(model):
        width = layer.output.nx if hasattr(layer.output, "nx") else layer.output.in_features
        open_heads = torch.ones(width // layer.head_dim, layer.head_dim)
        open_heads[[layer.heads.index(head) for head in chosen.get(layer.site, [])]] = 0
        gate = open_heads.flatten()

        def silence(module, arguments, gate=gate):
            return (arguments[0] * gate.to(arguments[0].dtype), *arguments[1:])

        layer.output.register_forward_pre_hook(silence)
    return model


def logits(model, **changes):
    with torch.no_grad():
        return model(**inputs_of(model), **changes)[0]


def inputs_of(model):
    return {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in stock_inputs(model).items()
    }


def pruned(name, empty="middle", **changes):
    model = build_stock(name, **changes)
    return prune_heads(model, as_argument(uneven(model, empty)))


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("name", EVERY)
def test_a_pruned_model_equals_one_with_these_heads_silenced(name, empty):
    model = build_stock(name).double()
    chosen = uneven(model, empty)
    expected = logits(silenced(model, chosen))
    before = logits(model)
    assert prune_heads(model, as_argument(chosen)) is model
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)
    # The heads mattered.
    assert (before - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_removing_heads_in_steps_equals_removing_them_at_once(name):
    at_once, in_steps = build_stock(name), build_stock(name)
    chosen = uneven(at_once)
    prune_heads(at_once, as_argument(chosen))
    # The last groups of every layer go first, then all others.
    size = locate_heads(in_steps)[0].group_size
    last = {site: heads[-size:] for site, heads in chosen.items()}
    prune_heads(in_steps, as_argument(last))
    rest = {site: heads[:-size] for site, heads in chosen.items()}
    prune_heads(in_steps, config_value(rest, kinds_of(rest)))
    assert in_steps.config.pruned_heads == at_once.config.pruned_heads == as_argument(chosen)
    expected = at_once.state_dict()
    assert in_steps.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in in_steps.state_dict().items())
    assert torch.equal(logits(in_steps), logits(at_once))


@pytest.mark.filterwarnings("error")
def test_removing_all_heads_of_a_layer_warns_of_nothing():
    model = prune_heads(build_stock("bert"), {0: range(4)})
    assert head_pruning.locate_heads(model)[0].heads == []


@pytest.mark.parametrize("name", EVERY)
def test_heads_are_located_in_the_original_numbering(name):
    model = build_stock(name)
    before = locate_heads(model)
    chosen = uneven(model)
    prune_heads(model, as_argument(chosen))
    for old, new in zip(before, locate_heads(model), strict=True):
        assert (new.site, new.num_heads, new.head_dim) == (old.site, old.num_heads, old.head_dim)
        assert new.heads == [head for head in old.heads if head not in chosen[old.site]]
        assert new.output.weight.numel() % (len(new.heads) * new.head_dim or 1) == 0
        assert (new.output.weight.numel() == 0) == (not new.heads)


@pytest.mark.parametrize("name", EVERY)
def test_a_saved_model_comes_back(name, tmp_path):
    model = pruned(name)
    model.save_pretrained(tmp_path)
    back, info = load_pruned(tmp_path, output_loading_info=True)
    assert type(back) is type(model)
    assert not back.training
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    # Where tensors lie in memory changes the last digits.
    torch.testing.assert_close(logits(back), logits(model), rtol=1e-5, atol=1e-6)
    assert back.config.pruned_heads == model.config.pruned_heads
    assert [layer.heads for layer in locate_heads(back)] == [layer.heads for layer in locate_heads(model)]
    # And again, from what came back.
    back.save_pretrained(tmp_path / "again")
    state = load_pruned(tmp_path / "again").state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def greedy(model, **changes):
    inputs = inputs_of(model)
    inputs.pop("decoder_input_ids", None)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 1, **changes}
    return model.generate(**inputs, **settings)


@pytest.mark.parametrize("empty", ["first", "all"])
@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ, "whisper", "gpt2-cross"])
def test_generation_with_a_cache_equals_generation_without(name, empty):
    model = build_stock(name)
    chosen = uneven(model, empty)
    expected = greedy(silenced(model, chosen), use_cache=False)
    prune_heads(model, as_argument(chosen))
    assert torch.equal(greedy(model, use_cache=False), expected)
    assert torch.equal(greedy(model, use_cache=True), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5", "marian"])
def test_generation_with_a_static_cache_and_with_beams(name):
    model = build_stock(name)
    chosen = uneven(model, "first")
    reference = silenced(model, chosen)
    prune_heads(model, as_argument(chosen))
    assert torch.equal(greedy(model, cache_implementation="static"), greedy(reference))
    assert torch.equal(greedy(model, num_beams=3), greedy(reference, num_beams=3))


def loss_of(outputs):
    return outputs[0].float().pow(2).mean()


@pytest.mark.parametrize("name", EVERY)
def test_training_moves_every_parameter_as_in_the_silenced_model(name):
    model = build_stock(name).double()
    chosen = uneven(model, "first")
    reference = silenced(model, chosen)
    prune_heads(model, as_argument(chosen))
    for one in (reference, model):
        loss_of(one(**inputs_of(one))).backward()
    expected = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        if expected[key].grad is None:
            # Unused by this loss in the stock model as well.
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, key
        if parameter.shape == expected[key].shape:
            # Some norms compute in float32.
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-5, atol=1e-8, msg=key)
        else:
            assert parameter.grad.norm() > 0, key


@pytest.mark.parametrize(
    ("name", "dropouts"),
    [
        ("albert", {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.0}),
        ("gpt2", {"resid_pdrop": 0.5, "attn_pdrop": 0.0}),
        ("modernbert", {"attention_dropout": 0.0, "mlp_dropout": 0.5}),
        ("starcoder2", {"residual_dropout": 0.5}),
    ],
)
def test_a_layer_without_heads_drops_its_output_out_as_before(name, dropouts):
    model = build_stock(name, **dropouts).train()
    chosen = uneven(model, "first")
    reference = silenced(model, chosen)
    prune_heads(model, as_argument(chosen))
    found = []
    for one in (reference, model):
        torch.manual_seed(0)
        found.append(one(**inputs_of(one))[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bert", "llama", "t5", "marian", "gpt2"])
def test_activation_checkpointing_gives_the_same_gradients(name, reentrant):
    model = pruned(name, "first").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    checkpointed = copy.deepcopy(model)
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})
    for one in (model, checkpointed):
        one.enable_input_require_grads()
        loss_of(one(**inputs_of(one), use_cache=False) if one.can_generate() else one(**inputs_of(one))).backward()
    for key, parameter in checkpointed.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(key).grad, msg=key)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "deberta-v3"])
def test_attention_weights_have_one_entry_for_each_layer(name):
    model = build_stock(name, attn_implementation="eager")
    # Recording has begun before heads are removed.
    before = model(**stock_inputs(model), output_attentions=True)
    prune_heads(model, as_argument(uneven(model)))
    after = model(**stock_inputs(model), output_attentions=True)
    fields = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    layers = locate_heads(model)
    for kind in kinds_of({layer.site: 0 for layer in layers}):
        field = fields[kind] if fields[kind] in after else "attentions"
        heads = [len(layer.heads) for layer in layers if layer.site.kind == kind]
        if name == "albert":
            heads = [heads[layer] for layer in (0, 1, 0, 1, 2, 3, 2, 3)]
        assert [weights.shape[1] for weights in after[field]] == heads
        for old, new in zip(before[field], after[field], strict=True):
            assert old.shape[2:] == new.shape[2:]
            assert old.shape[0] == new.shape[0]


@pytest.mark.parametrize("name", ["albert", "bert", "deberta-v2", "gpt2", "llama", "marian", "mpnet", "t5"])
def test_pruned_models_can_be_copied_pickled_and_pruned_further(name, tmp_path):
    model = pruned(name, "first")
    torch.save(model, tmp_path / "model.pt")
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ]
    expected = logits(model)
    rest = {layer.site: layer.heads for layer in locate_heads(model) if layer.heads}
    prune_heads(model, config_value(rest, kinds_of({layer.site: 0 for layer in locate_heads(model)})))
    for one in copies:
        assert torch.equal(logits(one), expected)
        assert [type(module) for module in one.modules()] != [type(module) for module in model.modules()]
        prune_heads(one, config_value(rest, kinds_of({layer.site: 0 for layer in locate_heads(one)})))
        assert torch.equal(logits(one), logits(model))


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mpnet", "gpt2"])
def test_pruned_models_compile_without_graph_breaks(name):
    model = pruned(name, "first")
    expected = logits(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("empty", ["first", "middle"])
def test_unevenly_pruned_models_can_be_exported(name, empty):
    model = pruned(name, empty, use_cache=False)
    inputs = stock_inputs(model)
    exported = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(exported(**inputs)[0], logits(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "marian", "t5"])
def test_parameters_keep_precision_gradients_and_contiguity(name, tmp_path):
    model = build_stock(name).to(torch.bfloat16)
    chosen = uneven(model)
    layers = {layer.site: layer for layer in locate_heads(model)}
    frozen = []
    for layer in layers.values():
        for projection in (*layer.module.children(), layer.output):
            weight = getattr(projection, "weight", None)
            if weight is not None and weight.dim() == 2:
                # As after loading a transposed checkpoint.
                weight.data = weight.data.t().contiguous().t()
        layer.output.weight.requires_grad_(layer.site.layer != 2)
    expected = logits(silenced(model, chosen))
    prune_heads(model, as_argument(chosen))
    for layer in locate_heads(model):
        if layer.heads:
            frozen.append(not layer.output.weight.requires_grad)
            assert layer.output.weight.is_contiguous()
    assert any(frozen)
    assert not all(frozen)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits(model), expected, rtol=0.05, atol=0.05)
    model.save_pretrained(tmp_path)
    back = load_pruned(tmp_path)
    assert back.dtype == torch.bfloat16
    state = back.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert load_pruned(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_shards_and_tied_weights_come_back(name, tmp_path):
    model = build_stock(name, tie_word_embeddings=True)
    model.tie_weights()
    prune_heads(model, as_argument(uneven(model)))
    model.save_pretrained(tmp_path, max_shard_size="8kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    back = load_pruned(tmp_path, device_map="cpu")
    torch.testing.assert_close(logits(back), logits(model), rtol=1e-5, atol=1e-6)
    assert back.get_output_embeddings().weight is back.get_input_embeddings().weight


FRESH = """
import json, sys
import torch, transformers
from hf_attn_dynamics.models.pruned_checkpoints import load_pruned
folder, auto, ids = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[3]))
model = getattr(transformers, auto).from_pretrained(folder) if auto else load_pruned(folder)
with torch.no_grad():
    print(json.dumps([type(model).__name__, model.eval()(ids)[0].flatten().tolist()]))
"""


@pytest.mark.parametrize(
    ("name", "auto", "expected"),
    [("llama", "", "LlamaForCausalLM"), ("bert", "AutoModelForMaskedLM", "HeadwiseBertForMaskedLM")],
)
def test_a_fresh_process_loads_the_same_model(name, auto, expected, tmp_path):
    model = pruned(name)
    model.save_pretrained(tmp_path)
    ids = [[4, 7, 5, 9, 11]]
    (result,) = python(["-c", FRESH, tmp_path, auto, json.dumps(ids)])
    assert result.returncode == 0, result.stderr
    name, found = json.loads(result.stdout.splitlines()[-1])
    assert name == expected
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found), model(torch.tensor(ids))[0].flatten(), rtol=1e-5, atol=1e-6)


AUTO = {
    "bert": "AutoModelForMaskedLM",
    "electra": "AutoModelForPreTraining",
    "marian": "AutoModelForSeq2SeqLM",
    "roberta": "AutoModelForMaskedLM",
}


@pytest.mark.parametrize("name", AUTO)
def test_stock_classes_with_a_twin_come_back_through_auto_classes(name, tmp_path):
    model = pruned(name)
    assert model.config.model_type == f"headwise-{name}"
    model.save_pretrained(tmp_path)
    back = getattr(transformers, AUTO[name]).from_pretrained(tmp_path).eval()
    assert type(back).__name__ == f"Headwise{type(model).__name__}"
    torch.testing.assert_close(logits(back), logits(model), rtol=1e-5, atol=1e-6)
    # Asked for by the class that was saved, it is that.
    assert type(load_pruned(tmp_path)) is type(model)
    back.save_pretrained(tmp_path / "twin")
    assert type(load_pruned(tmp_path / "twin")) is type(back)
    body = transformers.AutoModel.from_pretrained(tmp_path)
    assert [layer.heads for layer in locate_heads(body)] == [layer.heads for layer in locate_heads(model)]


def test_classes_without_a_twin_say_how_they_come_back(caplog):
    transformers.utils.logging.warning_once.cache_clear()
    config = build_stock("bert").config
    with caplog.at_level("WARNING"):
        model = prune_heads(transformers.BertForMultipleChoice(config), {0: [1]})
    assert "not as part of another model, and load it with hf_attn_dynamics.load_pruned(path)" in caplog.text
    assert model.config.model_type == "bert"


def test_a_configuration_of_ones_own_stays_what_it_is(tmp_path):
    class MyConfig(transformers.BertConfig):
        pass

    model = transformers.BertForMaskedLM(MyConfig(**tiny_bert().config.to_dict())).eval()
    assert type(prune_heads(model, {0: [1]}).config) is MyConfig
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_pruned(tmp_path)), logits(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "xlm-roberta", "t5"])
@pytest.mark.parametrize("heads", ["some", "a whole layer"])
def test_stock_classes_refuse_a_pruned_checkpoint(name, heads, tmp_path):
    model = build_stock(name)
    layer = locate_heads(model)[1]
    chosen = {layer.site: list(range(layer.group_size if heads == "some" else layer.num_heads))}
    prune_heads(model, config_value(chosen, kinds_of({one.site: 0 for one in locate_heads(model)})))
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["llama", "gpt2", "xlm-roberta", "vit", "whisper"])
def test_auto_classes_bring_back_the_headwise_twin_of_a_pruned_model(name, tmp_path):
    model = build_stock(name)
    layer = locate_heads(model)[1]
    chosen = {layer.site: list(range(layer.group_size))}
    prune_heads(model, config_value(chosen, kinds_of({one.site: 0 for one in locate_heads(model)})))
    model.save_pretrained(tmp_path)
    opened = {file.partition(".")[2]: auto for auto, file in model.config.code_map().items()}
    back = getattr(transformers, opened[f"Headwise{type(model).__name__}"]).from_pretrained(tmp_path)
    with torch.no_grad():
        expected, found = (one(**stock_inputs(model)).logits for one in (model, back))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def write_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_checkpoints_of_transformers_4_load(tmp_path):
    model = build_stock("xlm-roberta")
    chosen = {0: [1, 2], 2: [3]}
    expected = logits(silenced(model, {HeadSite("encoder", layer): heads for layer, heads in chosen.items()}))
    prune_heads(model, chosen)
    model.save_pretrained(tmp_path)
    # Version 4 wrote string keys, one file of pickled weights, and buffers that are not saved any more.
    (tmp_path / "model.safetensors").unlink()
    state = {**model.state_dict(), "roberta.embeddings.position_ids": torch.arange(64)[None]}
    torch.save(state, tmp_path / "pytorch_model.bin")
    write_config(tmp_path, pruned_heads={"0": [1, 2], "2": [3]}, transformers_version="4.30.0")
    back = load_pruned(tmp_path)
    torch.testing.assert_close(logits(back), expected, rtol=1e-5, atol=1e-6)
    assert back.config.pruned_heads == chosen


@pytest.mark.parametrize("recorded", [{}, None])
def test_checkpoints_without_removed_heads_load_as_they_are(recorded, tmp_path):
    model = build_stock("distilbert")
    model.save_pretrained(tmp_path)
    write_config(tmp_path, pruned_heads=recorded)
    torch.testing.assert_close(logits(load_pruned(tmp_path)), logits(model), rtol=1e-5, atol=1e-6)


def test_architectures_that_are_not_known_load_where_no_head_is_removed(tmp_path):
    config = transformers.FNetConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, intermediate_size=8)
    transformers.FNetModel(config).save_pretrained(tmp_path)
    assert type(load_pruned(tmp_path)) is transformers.FNetModel


@pytest.fixture
def saved(tmp_path):
    pruned("llama").save_pretrained(tmp_path)
    return tmp_path


def test_a_checkpoint_without_its_configuration_is_refused(saved):
    (saved / "config.json").unlink()
    with pytest.raises(OSError, match="config.json"):
        load_pruned(saved)


def test_a_checkpoint_without_weights_is_refused(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        load_pruned(saved)


@pytest.mark.parametrize(
    ("architectures", "message"),
    [(None, "names no architectures; pass model_class"), (["Mine"], "architecture 'Mine', which transformers")],
)
def test_a_checkpoint_of_an_unknown_class_needs_one(architectures, message, saved):
    write_config(saved, architectures=architectures)
    with pytest.raises(ValueError, match=message):
        load_pruned(saved)
    assert type(load_pruned(saved, transformers.LlamaForCausalLM)) is transformers.LlamaForCausalLM


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (None, r"do not fit its config.json: .*k_proj.bias has shape \(16,\), but should have \(24,\)"),
        ({"0": [2, 3], "2": [0, 1]}, r"do not fit pruned_heads .*has shape"),
        ({"0": [0, 1, 2, 3, 4, 5]}, r"layers.0.self_attn.* has shape \(48, 32\), but should have \(48, 0\)"),
        ({"7": [0]}, "pruned_heads names layer 7, but its layers are 0 to 2"),
        ({"0": [2]}, r"query heads \[2, 3\] share one key/value head"),
    ],
)
def test_weights_that_do_not_fit_the_record_are_refused(recorded, message, saved):
    write_config(saved, pruned_heads=recorded)
    with pytest.raises(ValueError, match=message):
        load_pruned(saved)
    with pytest.raises(ValueError, match="could return random weights"):
        load_pruned(saved, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("model_class", [transformers.AutoModelForCausalLM, "LlamaForCausalLM"])
def test_what_is_no_class_of_models_cannot_be_loaded(model_class, saved):
    with pytest.raises(ValueError, match=r"model_class must be a model class, .*ForCausalLM'; leave it out"):
        load_pruned(saved, model_class)


def test_weights_that_are_missing_are_refused(saved):
    write_config(saved, num_hidden_layers=4)
    for model_class in (None, transformers.LlamaForSequenceClassification):
        with pytest.raises(ValueError, match=r"do not fit pruned_heads .*model.layers.3.* is missing"):
            load_pruned(saved, model_class)


def test_a_pruned_body_may_get_a_new_head(saved):
    before = load_pruned(saved)
    model = load_pruned(saved, transformers.LlamaForSequenceClassification, num_labels=3, pad_token_id=0)
    assert model.score.weight.shape == (3, before.config.hidden_size)
    assert model.config.pruned_heads == before.config.pruned_heads
    batch = inputs_of(before)
    torch.testing.assert_close(model.model(**batch)[0], before.model(**batch)[0])
    model.save_pretrained(saved / "three")
    with pytest.raises(ValueError, match=r"do not fit its config.json: score.weight has shape \(3, \d+\)"):
        load_pruned(saved / "three", num_labels=2)


def test_places_to_look_may_be_none(saved):
    assert load_pruned(saved, subfolder=None, revision=None).config.pruned_heads


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_damaged_weights_are_refused_by_name(size, saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_pruned(saved)


def tiny_bert(**changes):
    return build_stock("bert", **changes)


@pytest.mark.parametrize(
    ("name", "heads", "message"),
    [
        ("bert", {3: [0]}, "heads names layer 3, but its layers are 0 to 2"),
        ("bert", {0: [4]}, r"heads \(layer 0\) names head 4, but the heads of this layer are 0 to 3"),
        ("bert", {1: [1, 1]}, "names head 1 twice"),
        ("bert", {"1": [1]}, "must name layers by integers"),
        (
            "bert",
            [1],
            r"must be {layer: \[heads\]}, or a list of heads as HeadScores.ranked\(\) gives, .*got \[1\]",
        ),
        ("bert", [(0, 1)], r"heads must be {layer: .*got \[\(0, 1\)\]"),
        ("bert", None, "heads must be {layer: .*got None"),
        ("bert", "0", "heads must be {layer: .*got '0'"),
        ("bert", [("decoder", 0, 1)], "heads names the site 'decoder', but the heads of this model are at encoder"),
        ("bert", [("encoder", 1, 1), ("encoder", 1, 1)], "names head 1 twice"),
        ("marian", {1: [1]}, "must name them"),
        ("llama", {0: [0]}, r"LlamaForCausalLM, decoder layer 0: query heads \[0, 1\] share one key/value head"),
    ],
)
def test_heads_that_cannot_be_removed_are_refused_and_nothing_changes(name, heads, message):
    model = build_stock(name)
    if name == "bert":
        prune_heads(model, {0: [1]})
    before, config = {key: value.clone() for key, value in model.state_dict().items()}, model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        prune_heads(model, heads)
    assert model.config.to_dict() == config
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "heads"), [("bert", {0: [1]}), ("bert", [("encoder", 0, 1)]), ("llama", {0: [0, 1]}), ("llama", {0: [0]})]
)
def test_heads_that_are_gone_are_passed_over_as_in_transformers_4(name, heads):
    model = build_stock(name)
    layers = locate_heads(model)
    prune_heads(model, {0: [0, 1], 1: range(layers[1].num_heads)})
    config, weights, state = model.config, list(model.parameters()), model.config.to_dict()
    assert prune_heads(model, heads) is model
    assert model.config is config
    assert model.config.to_dict() == state
    assert all(one is other for one, other in zip(model.parameters(), weights))
    every = range(layers[0].num_heads)
    prune_heads(model, {0: every, 1: [2, 3]})
    assert {layer.site.layer: layer.heads for layer in locate_heads(model)} == {
        0: [],
        1: [],
        2: list(range(layers[2].num_heads)),
    }
    at_once = prune_heads(build_stock(name), {0: every, 1: every})
    torch.testing.assert_close(logits(model), logits(at_once), rtol=0, atol=0)


def on_the_meta_device():
    with torch.device("meta"):
        return transformers.BertModel(tiny_bert().config)


def with_an_adapter():
    class Linear4bit(nn.Linear):
        pass

    model = tiny_bert()
    model.bert.encoder.layer[0].attention.self.key.__class__ = Linear4bit
    return model


def with_computed_weights():
    model = tiny_bert()
    torch.nn.utils.prune.l1_unstructured(model.bert.encoder.layer[0].attention.self.query, "weight", 0.5)
    return model


def with_shared_weights():
    model = tiny_bert()
    first, second = (layer.attention.self.query for layer in model.bert.encoder.layer[:2])
    second.weight = first.weight
    return model


def compiled_in_place():
    model = tiny_bert()
    model.compile(backend="eager")
    return model


def spread_over_devices():
    model = tiny_bert()
    attention = model.bert.encoder.layer[0].attention.self
    attention.forward = attention.forward
    return model


def with_attention_of_its_own():
    class MyAttention(transformers.models.bert.modeling_bert.BertSelfAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = tiny_bert()
    model.bert.encoder.layer[0].attention.self.__class__ = MyAttention
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "model must be a PreTrainedModel, got Linear"),
        (lambda: nn.DataParallel(tiny_bert()), "got DataParallel; unwrap it first"),
        (lambda: torch.compile(tiny_bert(), backend="eager"), "remove heads from model._orig_mod"),
        (compiled_in_place, "BertForMaskedLM is compiled: remove heads first"),
        (on_the_meta_device, "layer.0.attention.self.query is on the meta device: load the weights"),
        (with_an_adapter, r"self.key is a [\w.]*test_head_pruning\.\S*Linear4bit, not an nn.Linear or Conv1D: merge"),
        (with_computed_weights, "self.query is sharded, quantized or parametrized"),
        (with_shared_weights, "query shares its weights with another module"),
        (spread_over_devices, "the forward pass of bert.encoder.layer.0.attention.self has been replaced"),
        (with_attention_of_its_own, "BertForMaskedLM has attention of an unknown class, MyAttention"),
        (
            lambda: transformers.LongformerModel(
                transformers.LongformerConfig(
                    vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
                )
            ),
            r"class, LongformerSelfAttention \(at encoder.layer.0.attention.self\); supported attention classes",
        ),
        (
            # Of the name that a class of DeBERTa has, too.
            lambda: transformers.SEWDModel(
                transformers.SEWDConfig(
                    hidden_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    intermediate_size=8,
                    num_feat_extract_layers=1,
                    conv_dim=(8,),
                    conv_stride=(5,),
                    conv_kernel=(10,),
                    num_conv_pos_embeddings=4,
                    num_conv_pos_embedding_groups=2,
                    squeeze_factor=1,
                )
            ),
            "SEWDModel has attention of an unknown class, DisentangledSelfAttention",
        ),
        (
            lambda: transformers.FNetModel(
                transformers.FNetConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, intermediate_size=8)
            ),
            "FNetModel has no attention modules",
        ),
    ],
)
def test_models_that_cannot_be_cut_exactly_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        prune_heads(build(), {0: [0]})


class FusedAttention(nn.Module):
    """Query, key and value in one projection."""

    def __init__(self, width, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden_states):
        query, key, value = (
            states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for states in self.qkv(hidden_states).chunk(3, dim=-1)
        )
        outputs = nn.functional.scaled_dot_product_attention(query, key, value)
        return (self.out(outputs.transpose(1, 2).flatten(2)),)


class FusedModel(transformers.PreTrainedModel):
    config_class = transformers.PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(FusedAttention(16, 4) for _ in range(2))
        self.post_init()

    def forward(self, hidden_states):
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states)[0]
        return hidden_states


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(head_roles, "_REGISTERED", {})


def test_an_attention_class_that_was_registered_loses_heads_as_any_other(registry, tmp_path):
    model = FusedModel(transformers.PreTrainedConfig()).eval()
    with pytest.raises(ValueError, match=r"unknown class, FusedAttention .*; register_attention\(\) adds others"):
        prune_heads(model, {0: [0]})
    register_attention(FusedAttention, HeadRoles(queries=("qkv",), keys=(), output="out"))
    states = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    expected = silenced(model, {HeadSite("encoder", 0): [1, 2], HeadSite("encoder", 1): [0, 1, 2, 3]})(states)
    prune_heads(model, {0: [1, 2], 1: range(4)})
    torch.testing.assert_close(model(states), expected, rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(load_pruned(tmp_path, FusedModel)(states), expected, rtol=1e-5, atol=1e-6)


def test_a_forward_pass_of_its_own_can_be_registered(registry):
    model = with_attention_of_its_own()
    attention = type(model.bert.encoder.layer[0].attention.self)
    register_attention(attention, head_roles.ATTENTION_ROLES["BertSelfAttention"])
    assert locate_heads(prune_heads(model, {0: [1]}))[0].heads == [0, 2, 3]


@pytest.mark.parametrize(
    ("attention_class", "roles", "message"),
    [
        ("BertSelfAttention", HeadRoles(), "attention_class must be a class of modules, got 'BertSelfAttention'"),
        (transformers.models.llama.modeling_llama.LlamaAttention, HeadRoles(), "LlamaAttention is already supported"),
        (FusedAttention, {"output": "out"}, r"roles must be HeadRoles\(…\), got {'output': 'out'}"),
    ],
)
def test_what_is_no_new_attention_class_cannot_be_registered(attention_class, roles, message, registry):
    with pytest.raises(ValueError, match=message):
        register_attention(attention_class, roles)


def test_heads_are_removed_from_the_end_of_a_ranking():
    model = build_stock("marian")
    tables = {kind: torch.arange(12.0).view(3, 4) + shift for shift, kind in ((0, "encoder"), (2.5, "decoder"))}
    prune_heads(model, HeadScores(tables).ranked()[-4:])
    assert model.config.pruned_heads == {"encoder": {0: [0, 1, 2]}, "decoder": {0: [0]}}
    assert prune_heads(model, []) is model


def test_nothing_to_remove_changes_nothing():
    model = tiny_bert()
    assert prune_heads(model, {}) is model
    assert prune_heads(model, {0: []}) is model
    assert type(model.config) is transformers.BertConfig


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_built_from_one_configuration_record_their_own_heads_only(name, tmp_path):
    whole = build_stock(name)
    config, before = whole.config, whole.config.to_dict()
    other = type(whole)(config)
    prune_heads(other, {next(iter(kinds_of({layer.site: 0 for layer in locate_heads(other)}))): {0: [0]}})
    assert {id(module.config) for module in other.modules() if hasattr(module, "config")} == {id(other.config)}
    assert whole.config is config
    assert config.to_dict() == before
    whole.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_pruned(tmp_path)), logits(whole), rtol=1e-5, atol=1e-6)
    assert type(config) is type(whole.config) is getattr(transformers, STOCK_MODELS[name][1])


def test_a_model_knows_of_heads_that_were_removed_from_its_body(tmp_path):
    model = tiny_bert()
    prune_heads(model.bert, {0: [0]})
    assert {id(module.config) for module in model.modules() if hasattr(module, "config")} == {id(model.config)}
    model.save_pretrained(tmp_path)
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(back), logits(model), rtol=1e-5, atol=1e-6)


def test_a_gate_loses_the_places_of_the_heads():
    class Gate(nn.Module):
        kept = ()

        def keep(self, places):
            self.kept = (*self.kept, places)

    model = tiny_bert()
    for layer in locate_heads(model):
        layer.module.gate = Gate()
    prune_heads(model, {0: [1], 2: [0, 1, 2, 3]})
    prune_heads(model, {0: [2]})
    # Places count among the heads that are there: of 0, 2 and 3 the first and the last stay.
    assert [layer.module.gate.kept for layer in locate_heads(model)] == [([0, 2, 3], [0, 2]), (), ([],)]


def test_albert_lists_the_heads_of_shared_layers_once():
    model = build_stock("albert", num_hidden_layers=6, num_hidden_groups=1, inner_group_num=1)
    assert [str(layer.site) for layer in locate_heads(model)] == ["encoder layer 0"]
    model = build_stock("albert", num_hidden_layers=6, num_hidden_groups=2, inner_group_num=2)
    names = {str(layer.site): layer.name.partition("groups.")[2] for layer in locate_heads(model)}
    assert names["encoder layer 2"] == "1.albert_layers.0.attention"
    assert len(names) == 4


def test_an_encoder_decoder_of_two_models_is_one_model():
    parts = [build_stock("bert").config, build_stock("bert-decoder").config]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = transformers.EncoderDecoderModel(config).eval()
    chosen = uneven(model, "first")
    assert kinds_of(chosen) == ["encoder", "decoder", "cross"]
    expected = logits(silenced(model, chosen))
    prune_heads(model, as_argument(chosen))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_models_that_read_images_lose_heads_of_both_parts(name, tmp_path):
    model, inputs = build_image_reader(name)
    chosen = {HeadSite("encoder", 0): [0, 1, 2, 3], HeadSite("encoder", 1): [2], HeadSite("decoder", 1): [0, 1]}
    with torch.no_grad():
        expected = silenced(model, chosen)(**inputs).logits
        assert (model(**inputs).logits - expected).abs().max() > 1e-5
        prune_heads(model, as_argument(chosen))
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-6)
        model.save_pretrained(tmp_path)
        back = load_pruned(tmp_path)
        torch.testing.assert_close(back(**inputs).logits, expected, rtol=1e-5, atol=1e-6)
    assert back.config.pruned_heads == as_argument(chosen)


def test_heads_removed_from_a_part_are_not_recorded_and_loading_says_so(tmp_path):
    model, _ = build_image_reader("gemma3")
    prune_heads(model.model.language_model, {0: [0, 1]})
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"do not fit its config.json.*prune_heads\(\) records heads in the model"):
        load_pruned(tmp_path)


@pytest.mark.parametrize("name", ["bart", "marian", "whisper", "t5", "mt5"])
def test_an_encoder_or_decoder_alone_is_refused(name):
    model = build_stock(name)
    before = model.config.to_dict()
    for part in (model.get_encoder(), model.get_decoder()):
        with pytest.raises(ValueError, match="is a part of an encoder–decoder model, .* pass the whole model"):
            prune_heads(part, {0: [0]})
    assert model.config.to_dict() == before
    assert prune_heads(model, {"encoder": {0: [0]}}).config.pruned_heads == {"encoder": {0: [0]}}


def test_applying_the_record_is_idempotent_and_takes_string_keys():
    model, expected = tiny_bert(), pruned("bert")
    model.config.pruned_heads = {"0": [1], "1": [0, 1, 2, 3], "2": [0, 3]}
    apply_pruned_heads(model)
    state = {key: value.data_ptr() for key, value in model.state_dict().items()}
    apply_pruned_heads(model)
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == state
    assert torch.equal(logits(model), logits(expected))
    assert model.config.pruned_heads == expected.config.pruned_heads


def test_a_headwise_model_is_built_with_heads_removed_and_fresh_weights():
    from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertModel

    config = HeadwiseBertConfig(**tiny_bert().config.to_dict(), pruned_heads={0: [1], 1: [0, 1, 2, 3]})
    model = HeadwiseBertModel(config)
    layers = locate_heads(model)
    assert [layer.heads for layer in layers] == [[0, 2, 3], [], [0, 1, 2, 3]]
    for layer in layers:
        assert not layer.output.bias.any()
        assert layer.output.weight.numel() == 0 or layer.output.weight.std() < 0.03


def test_retained_heads_are_those_with_the_largest_scores():
    model = tiny_bert()
    scores = torch.tensor([[0.1, 0.9, 0.3, 0.2], [0.5, 0.4, 0.1, 0.0], [0.6, float("-inf"), 0.05, 0.7]])
    assert retain_heads(model, 5, scores) is model
    assert [layer.heads for layer in locate_heads(model)] == [[1], [0, 1], [0, 3]]
    # Scores of heads that are gone do not matter.
    scores[0, 0], scores[2, 3] = float("nan"), 0.0
    retain_heads(model, 3, scores.tolist())
    assert [layer.heads for layer in locate_heads(model)] == [[1], [0], [0]]


def test_of_equal_scores_the_first_are_retained():
    model = build_stock("marian")
    scores = {kind: torch.ones(3, 4).numpy() for kind in ("cross", "decoder", "encoder")}
    retain_heads(model, 14, scores)
    heads = {str(layer.site): layer.heads for layer in locate_heads(model) if layer.heads}
    everything = [0, 1, 2, 3]
    assert heads == {
        "encoder layer 0": everything,
        "encoder layer 1": everything,
        "encoder layer 2": everything,
        "decoder layer 0": [0, 1],
    }


def test_each_kind_can_have_its_own_number_of_heads():
    model = build_stock("t5")
    retain_heads(
        model, {"encoder": 2, "cross": 1}, {"encoder": torch.arange(12).view(3, 4), "cross": -torch.eye(3, 4)}
    )
    heads = {str(layer.site): layer.heads for layer in locate_heads(model)}
    assert heads["encoder layer 2"] == [2, 3]
    assert heads["cross layer 0"] == [1]
    assert heads["decoder layer 1"] == [0, 1, 2, 3]
    assert sum(map(len, heads.values())) == 2 + 1 + 12


def test_groups_are_retained_by_the_sum_of_their_scores():
    model = build_stock("llama")
    scores = torch.zeros(3, 6)
    scores[0, 0] = 0.9
    scores[1, 4:] = 0.5
    scores[2, 2:4] = 0.3
    retain_heads(model, 4, scores)
    assert [layer.heads for layer in locate_heads(model)] == [[0, 1], [4, 5], []]


NAN = torch.full((3, 4), float("nan"))
ZEROS = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("name", "keep", "scores", "message"),
    [
        ("bert", 0, ZEROS, "keep must be an integer from 1 to the number of heads, 12, got 0"),
        ("bert", -2, ZEROS, "got -2"),
        ("bert", 13, ZEROS, "got 13"),
        ("bert", True, ZEROS, "got True"),
        ("bert", 2.0, ZEROS, "got 2.0"),
        ("bert", torch.tensor(2.0), ZEROS, "must be an integer"),
        ("bert", "3", ZEROS, "got '3'"),
        ("bert", {"decoder": 1}, ZEROS, "keep names the site 'decoder'"),
        ("bert", 3, NAN, "scores must not be NaN, but the score of encoder layer 0, head 0 is"),
        ("bert", 3, torch.zeros(3, 5), r"scores of encoder must have shape \(layers, heads\) \(3, 4\), got \(3, 5\)"),
        ("bert", 3, "abc", "scores of encoder must be numbers"),
        ("bert", 3, [[1], [2, 3]], "scores of encoder must be numbers"),
        ("t5", 3, ZEROS, "scores must be a dictionary with the keys encoder, decoder, cross"),
        ("t5", 3, {"encoder": ZEROS}, "scores of the heads of decoder are missing"),
        ("t5", {}, {"encoder": ZEROS}, "keep must be a number of heads"),
        ("llama", 3, torch.zeros(3, 6), "keep must be a multiple of 2, the number of query heads per"),
    ],
)
def test_impossible_numbers_and_scores_are_refused(name, keep, scores, message):
    model = build_stock(name)
    with pytest.raises(ValueError, match=message):
        retain_heads(model, keep, scores)
    assert all(len(layer.heads) == layer.num_heads for layer in locate_heads(model))


@pytest.mark.parametrize("folder", ["minilm", "rxnmapper"])
def test_trained_models_are_pruned_exactly_and_come_back(folder, real_models, tmp_path):
    path = next(path.parent for path in (real_models / folder).rglob("config.json"))
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    chosen = {layer.site: [1, 3] if layer.site.layer else [0, 2] for layer in locate_heads(model)[:4]}
    if folder == "minilm":
        chosen[HeadSite("encoder", 2)] = list(range(locate_heads(model)[2].num_heads))
    inputs = {"input_ids": torch.randint(5, 100, (2, 30), generator=torch.Generator().manual_seed(0))}
    with torch.no_grad():
        expected = silenced(model, chosen)(**inputs)[0]
        prune_heads(model, as_argument(chosen))
        torch.testing.assert_close(model(**inputs)[0], expected, rtol=1e-4, atol=2e-5)
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(load_pruned(tmp_path)(**inputs)[0], expected, rtol=1e-4, atol=2e-5)


def test_code_saved_beside_a_checkpoint_and_the_package_understand_each_other(tmp_path, monkeypatch):
    shutil.copytree(Path(head_pruning.__file__).parent, tmp_path / "saved_code")
    monkeypatch.syspath_prepend(tmp_path)
    saved_code = importlib.import_module("saved_code.head_pruning")
    for name in ("bert", "t5"):
        model, expected = build_stock(name), pruned(name, "first")
        first, rest = {}, {}
        for site, heads in uneven(model, "first").items():
            first[site], rest[site] = (heads, []) if len(heads) == 4 else (heads[:1], heads[1:])
        saved_code.prune_heads(model, config_value(first, kinds_of(first)))
        prune_heads(model, config_value(rest, kinds_of(rest)))
        assert torch.equal(logits(model), logits(expected))
        assert model.config.pruned_heads == expected.config.pruned_heads


def test_whisper_finds_the_heads_it_reads_time_stamps_off():
    model = build_stock("whisper")
    model.generation_config.alignment_heads = [[0, 2], [1, 3], [2, 0]]
    prune_heads(model, {"cross": {0: [0], 2: [0]}})
    assert model.generation_config.alignment_heads == [[0, 1], [1, 3]]
    prune_heads(model, {"cross": {0: [1], 1: [3]}})
    assert model.generation_config.alignment_heads == [[0, 0]]
    prune_heads(model, {"cross": {0: [2]}})
    assert model.generation_config.alignment_heads is None


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bart"])
def test_prefilling_in_chunks_generates_the_same(name):
    model = build_stock(name)
    chosen = uneven(model)
    reference = silenced(model, chosen)
    prune_heads(model, as_argument(chosen))
    for settings in ({"cache_implementation": "static", "prefill_chunk_size": 2}, {"prefill_chunk_size": 2}):
        assert torch.equal(greedy(model, **settings), greedy(reference, **settings))


def laid_out_for_all_heads(model, batch):
    """Caches as their users lay them out: by one number of heads for all layers, off the configuration."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = transformers.StaticCache(config=config, max_cache_len=24)
    cache.early_initialization(batch, heads, size, model.dtype, model.device)
    if not model.config.is_encoder_decoder:
        return cache
    source = model.config.max_source_positions if hasattr(model.config, "max_source_positions") else 8
    cross = transformers.StaticCache(config=config, max_cache_len=source)
    cross.early_initialization(batch, heads, size, model.dtype, model.device)
    return transformers.EncoderDecoderCache(cache, cross)


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "whisper", "bart", "t5"])
def test_a_cache_that_is_laid_out_for_all_heads_serves_those_that_are_left(name, empty):
    model = pruned(name, empty)
    inputs = inputs_of(model)
    if model.config.is_encoder_decoder:
        with torch.no_grad():
            encoded = model.get_encoder()(inputs[model.main_input_name])
        ids, inputs = torch.tensor([[5, 7, 8, 9], [6, 4, 9, 7]]), {"encoder_outputs": encoded}
        if encoded[0].shape[1] > 8 and name != "whisper":
            inputs["encoder_outputs"] = (encoded[0][:, :8],)
        argument = "decoder_input_ids"
    else:
        ids, inputs, argument = torch.tensor([[5, 7, 8, 9], [6, 4, 9, 7]]), {}, "input_ids"
    with torch.no_grad():
        expected = model(**inputs, **{argument: ids}, use_cache=False).logits
        cache = laid_out_for_all_heads(model, len(ids))
        parts = [
            model(**inputs, **{argument: part}, cache=cache, use_cache=True).logits for part in ids.split([2, 1, 1], 1)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_cache_with_keys_of_other_heads_is_refused():
    dense, model = build_stock("llama"), prune_heads(build_stock("llama"), {1: [0, 1]})
    ids = torch.tensor([[5, 7, 8]])
    for cache in (transformers.DynamicCache(), transformers.StaticCache(config=dense.config, max_cache_len=8)):
        with torch.no_grad():
            dense(ids, cache=cache, use_cache=True)
            message = "the cache has keys and values of 3 heads in layer 1, which has 2; pass an empty cache"
            with pytest.raises(ValueError, match=message):
                model(ids, cache=cache, use_cache=True)


def test_models_with_a_cache_of_their_own_are_exported_once_it_fits():
    model = prune_heads(build_stock("llama"), {0: [0, 1], 1: range(6)})
    expected = model(torch.tensor([[5, 6, 7]])).logits[0]
    model.generation_config.cache_implementation, model.generation_config.use_cache = "static", True
    exportable = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=8, device="cpu")
    first = {"input_ids": torch.tensor([[5]]), "cache_position": torch.tensor([0])}
    with pytest.raises(ValueError, match="allocated for 3 heads in layer 0, which has 2: run the model once"):
        torch.export.export(exportable, (), first, strict=False)
    with torch.no_grad():
        exportable(**first)
    exportable.static_cache.reset()
    exported = torch.export.export(exportable, (), first, strict=False).module()
    for place, token in enumerate([5, 6, 7]):
        found = exported(input_ids=torch.tensor([[token]]), cache_position=torch.tensor([place]))
        torch.testing.assert_close(found[0, -1], expected[place], rtol=1e-4, atol=1e-5)


def test_a_paged_cache_is_refused_by_name():
    model = prune_heads(build_stock("llama"), {0: [0, 1]})
    paged = PagedAttentionCache.__new__(PagedAttentionCache)  # what generate_batch() gives to each layer
    states = torch.zeros(1, 3, model.config.hidden_size)
    attention, positions = model.model.layers[0].self_attn, (torch.ones(1, 3, 8), torch.zeros(1, 3, 8))
    with pytest.raises(
        ValueError, match=r"heads were removed from layer 0, but the paged cache of generate_batch\(\) has the same"
    ):
        attention(states, position_embeddings=positions, attention_mask=None, cache=paged)


def test_groups_of_different_sizes_fill_the_budget():
    groups = {HeadSite("encoder", 0): [[0], [1], [2]], HeadSite("decoder", 0): [[0, 1], [2, 3]]}
    counts = {HeadSite("encoder", 0): 3, HeadSite("decoder", 0): 4}
    scores = {"encoder": [[1.0, 9.0, 2.0]], "decoder": [[3.0, 3.0, 1.0, 2.0]]}

    def removed(keep):
        return lowest_scored(keep, scores, groups, counts, "head")

    # By the sums 9, 6, 3, 2 and 1; with three heads, the second pair of the decoder does not fit any more.
    assert removed(1) == {HeadSite("encoder", 0): [2, 0], HeadSite("decoder", 0): [0, 1, 2, 3]}
    assert removed(3) == {HeadSite("encoder", 0): [2, 0], HeadSite("decoder", 0): [2, 3]}
    assert removed(4) == {HeadSite("encoder", 0): [0], HeadSite("decoder", 0): [2, 3]}
    assert removed(7) == {}
    groups[HeadSite("encoder", 0)] = [[0, 1, 2]]
    with pytest.raises(ValueError, match="keep=4 cannot be reached with groups of 2 and 3 heads .*: keep 3, or give"):
        removed(4)
