import copy
import gc

import pytest
import torch
from stock_models import STOCK_MODELS, build_stock, stock_inputs
from tiny_models import ALL_GATES, KINDS, UNEVEN, batch_for, padded_batch, ragged_sentences, tiny_model, vivid
from transformers import (
    AutoConfig,
    AutoModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2Model,
    XLNetConfig,
    XLNetModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_attn_dynamics import prune_heads
from hf_attn_dynamics.analysis.observers import observation
from hf_attn_dynamics.analysis.observers.base import HeadMeans, Observer
from hf_attn_dynamics.analysis.observers.observation import observe


WITHOUT_INTERFACE = ("deberta", "deberta-v2", "deberta-v3", "mpnet")
OBSERVABLE = [name for name in STOCK_MODELS if name not in WITHOUT_INTERFACE]


class Maps(Observer):
    """Puts together whole maps of the last pass, `{site: (batch, heads, queries, keys)}`."""

    def __init__(self, name="maps"):
        self.name = name
        self.passes = 0

    def begin(self, batch):
        self.blocks = {}
        self.passes += 1

    def update(self, call):
        self.blocks.setdefault(call.site, []).append(call)

    def compute(self):
        maps = {}
        for site, calls in self.blocks.items():
            queries, keys, first = calls[0].queries, calls[0].keys, calls[0].weights
            batch, length = queries.real.shape
            whole = first.new_full((batch, first.shape[1], length, first.shape[-1]), torch.nan)
            for call in calls:
                assert whole[call.sentences, :, call.rows].isnan().all()  # no row comes twice
                whole[call.sentences, :, call.rows] = call.weights
            maps[site] = whole, queries.real, keys.real
        return maps


class MeanMaximum(Observer):
    name = "maximum"

    def __init__(self):
        self.means = HeadMeans("MeanMaximum")

    def update(self, call):
        self.means.add(call, call.weights.amax(-1))

    def compute(self):
        return self.means.compute()


def attentions_of(model, inputs):
    """Maps by kind of site as the eager functions return them."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    outputs = model(**inputs, output_attentions=True, return_dict=True)
    if model.config.is_encoder_decoder:
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
        return {kind: outputs[name] for kind, name in names.items()}
    causal = any(getattr(module, "is_causal", False) for module in model.modules())
    maps = {"decoder" if causal else "encoder": outputs.attentions}
    if outputs.get("cross_attentions"):
        maps["cross"] = outputs.cross_attentions
    return maps


def assert_maps_as_eager(model, inputs):
    model = model.double()
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.no_grad(), observe(model, Maps()) as seen:
        model(**inputs)
    expected = attentions_of(model, inputs)
    found = seen.maps
    assert {site.kind for site in found} == set(expected)
    for kind, layers in expected.items():
        present = {site.layer: found[site] for site in found if site.kind == kind}
        for layer, weights in enumerate(layers):
            if weights.shape[1] == 0:
                assert layer not in present  # all heads are removed
                continue
            maps, real, _ = present[layer]
            # Rows of padding mean nothing, and the eager functions take the softmax in single precision.
            found_rows, expected_rows = (one.transpose(1, 2)[real] for one in (maps, weights))
            torch.testing.assert_close(found_rows, expected_rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limit", [40, 10**6], ids=["rows", "whole"])
@pytest.mark.parametrize("name", OBSERVABLE)
def test_weights_are_those_of_eager_attention(name, limit, monkeypatch):
    monkeypatch.setitem(observation.MAX_WEIGHTS, "cpu", limit)
    # In double precision, rotary angles stay in single.
    model = build_stock(name)
    assert_maps_as_eager(model, stock_inputs(model))


@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_what_stands_in_for_a_kernel_is_one_that_the_model_has(name):
    model = build_stock(name)
    model.set_attn_implementation("flex_attention")
    with observe(model, Maps()) as seen, torch.no_grad():
        model(**stock_inputs(model))
    assert model.config._attn_implementation == "flex_attention"
    model.set_attn_implementation("eager")
    with observe(model, Maps()) as expected, torch.no_grad():
        model(**stock_inputs(model))
    torch.testing.assert_close(seen.maps, expected.maps, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"pruned": True}, {"gated": True}], ids=["plain", "pruned", "gated"])
def test_headwise_models_are_observed_as_stock_ones(kind, changes):
    settings = {"pruned_heads": UNEVEN[kind]} if "pruned" in changes else {}
    settings |= {"gates": ALL_GATES[kind]} if "gated" in changes else {}
    model = vivid(tiny_model(kind, **settings))
    with torch.no_grad():
        before = model(**batch_for(kind)).to_tuple()[0]
        with observe(model, Maps()):
            torch.testing.assert_close(model(**batch_for(kind)).to_tuple()[0], before, rtol=0, atol=0)
    assert_maps_as_eager(model, batch_for(kind))


def test_heads_of_pruned_models_keep_their_numbers():
    model = vivid(tiny_model("bert"))
    batch = batch_for("bert")
    with torch.no_grad(), observe(model, MeanMaximum()) as seen:
        model(**batch)
    whole = seen.maximum["encoder"]
    # Heads of the last layer, whose removal changes no attention.
    prune_heads(model, {1: [0, 2]})
    with torch.no_grad(), observe(model, MeanMaximum()) as seen:
        model(**batch)
    whole[1, [0, 2]] = torch.nan
    torch.testing.assert_close(seen.maximum["encoder"], whole, equal_nan=True)
    # A layer that loses all heads computes no attention, but keeps its place.
    prune_heads(model, {1: [1, 3]})
    with torch.no_grad(), observe(model, MeanMaximum()) as seen:
        model(**batch)
    whole[1] = torch.nan
    torch.testing.assert_close(seen.maximum["encoder"], whole, equal_nan=True)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_batches_change_no_statistic(kind, kernel):
    model = vivid(tiny_model(kind, head="Model")).double()
    model.set_attn_implementation(kernel)

    def seen(*batches):
        with torch.no_grad(), observe(model, MeanMaximum()) as observed:
            for batch in batches:
                if kind == "marian":
                    batch = {**batch, **{f"decoder_{name}": value for name, value in batch.items()}}
                model(**batch)
        return observed.maximum

    sentences = ragged_sentences()
    together = seen(padded_batch(sentences, pad=model.config.pad_token_id, length=30))
    alone = seen(*(padded_batch([sentence]) for sentence in sentences[::-1]))
    for site, table in alone.items():
        torch.testing.assert_close(together[site], table, rtol=0, atol=1e-12)


def test_left_padding_changes_nothing():
    model = build_stock("llama").double()
    (sentence,) = ragged_sentences(1)
    ids = torch.tensor([sentence])
    padded = torch.cat([ids.new_full((1, 4), 1), ids], 1)
    results = []
    for batch in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": (padded != 1).long()}):
        with torch.no_grad(), observe(model, MeanMaximum()) as seen:
            model(**batch)
        results.append(seen.maximum["decoder"])
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["marian", "gpt2", "t5"])
def test_generation_is_observed_step_by_step(name):
    model = build_stock(name)
    inputs = {key: value[:1, :5] for key, value in stock_inputs(model).items() if "decoder" not in key}
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    maps = Maps()
    with observe(model, maps):
        assert torch.equal(model.generate(**inputs, **settings), expected)
    # The last step attends to all before, from one position.
    shapes = {site.kind: found[0].shape[2:] for site, found in maps.compute().items()}
    assert shapes["decoder"] == ((1, 4) if model.config.is_encoder_decoder else (1, 8))
    assert maps.passes == (5 if model.config.is_encoder_decoder else 4)


def llava():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=LlamaConfig(**sizes, vocab_size=30),
        image_token_id=29,
        vision_feature_layer=-1,
    )
    ids = torch.tensor([[29, 29, 29, 29, 5, 6, 7], [29, 29, 29, 29, 5, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": ids.ne(1).long(), "pixel_values": torch.randn(2, 3, 8, 8)}
    return LlavaForConditionalGeneration(config), inputs, {"encoder": [5, 5], "decoder": [7, 5]}


def wav2vec2():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "feat_extract_norm": "layer"}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 200:] = 0
    model = Wav2Vec2Model(Wav2Vec2Config(vocab_size=30, **sizes))
    return model, {"input_values": torch.randn(2, 400) * mask, "attention_mask": mask}, {"encoder": [39, 19]}


def whisper():
    model = build_stock("whisper")
    inputs = stock_inputs(model)
    mask = torch.ones(inputs["input_features"].shape[::2], dtype=torch.long)
    mask[1, -4:] = 0
    # Its encoder pays no heed to the mask.
    return model, {**inputs, "attention_mask": mask}, {"encoder": [6, 6], "decoder": [5, 5], "cross": [6, 6]}


def row_by_row(name):
    model = build_stock(name)
    inputs = stock_inputs(model)
    real = inputs["attention_mask"].bool()
    mask = real[:, None, None] & torch.ones(11, 11, dtype=torch.bool)
    mask = mask.tril() if name == "llama" else mask
    return model, {**inputs, "attention_mask": mask}, {"decoder" if name == "llama" else "encoder": [11, 8]}


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "build",
    [llava, wav2vec2, whisper, lambda: row_by_row("llama"), lambda: row_by_row("bert")],
    ids=["llava", "wav2vec2", "whisper", "llama", "bert"],
)
def test_layers_tell_what_is_padding_where_the_mask_of_the_model_is_not_of_their_length(build, kernel):
    model, inputs, tokens = build()
    model.eval().set_attn_implementation(kernel)
    with torch.no_grad(), observe(model, Maps()) as seen:
        model(**inputs)
    for site, (_, queries, keys) in seen.maps.items():
        assert keys.sum(1).tolist() == tokens[site.kind]
        assert queries.sum(1).tolist() == tokens["decoder" if site.kind == "cross" else site.kind]


def test_recordings_of_several_lengths_change_no_statistic():
    model, inputs, _ = wav2vec2()
    with torch.no_grad(), observe(model, MeanMaximum()) as together:
        model(**inputs)
    with torch.no_grad(), observe(model, MeanMaximum()) as alone:
        for values, mask in zip(inputs["input_values"], inputs["attention_mask"].bool()):
            model(input_values=values[mask][None])
    torch.testing.assert_close(together.maximum["encoder"], alone.maximum["encoder"])


def test_labels_tell_the_tokens_of_a_decoder():
    model = tiny_model("marian")
    labels = torch.tensor([[5, 6, 2], [7, 2, -100]])
    with torch.no_grad(), observe(model, Maps()) as seen:
        model(
            input_ids=torch.tensor([[5, 6, 7, 2], [8, 9, 2, 1]]),
            attention_mask=torch.tensor([[1] * 4, [1, 1, 1, 0]]),
            labels=labels,
        )
    for site, (_, queries, keys) in seen.maps.items():
        assert queries.sum() == (7 if site.kind == "encoder" else 5)
        assert keys.sum() == (5 if site.kind == "decoder" else 7)


def state_of(model):
    modes = [module.training for module in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    names = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    attributes = [sorted(vars(m)) for m in model.modules()]
    return modes, hooks, names, attributes, list(ALL_ATTENTION_FUNCTIONS), list(ALL_MASK_ATTENTION_FUNCTIONS)


@pytest.mark.parametrize(
    "build", [lambda: tiny_model("marian"), lambda: build_stock("bert")], ids=["headwise", "stock"]
)
def test_a_model_stays_as_it_is_within_and_after_a_context_also_after_an_exception(build):
    model = build().train()
    model.base_model.encoder.eval()  # a mode of its own
    batch = batch_for("marian" if model.config.is_encoder_decoder else "bert")
    expected = copy.deepcopy(model).eval()(**batch)[0]
    with observe(model, MeanMaximum()):
        model(**batch)  # names of attention functions are registered once
    before = state_of(model)
    with observe(model, MeanMaximum()):
        assert state_of(model) == before
        torch.testing.assert_close(model(**batch)[0], expected, rtol=0, atol=0)  # in evaluation mode
    assert state_of(model) == before

    class Failing(MeanMaximum):
        def update(self, call):
            raise RuntimeError("failing observer")

    with pytest.raises(RuntimeError, match="failing observer"), observe(model, Failing()):
        model(**batch)
    assert state_of(model) == before
    with observe(model, MeanMaximum()) as seen:
        with pytest.raises((IndexError, ValueError)):  # of a stock model, or one that checks its inputs
            model(
                input_ids=torch.tensor([[10**6]]),
                **({"decoder_input_ids": torch.tensor([[1]])} if model.config.is_encoder_decoder else {}),
            )
        model(**batch)  # the failed pass has left nothing behind
    assert seen.maximum["encoder"].isfinite().all()


def test_two_hundred_passes_leave_no_tensor():
    model = tiny_model("bert")
    batch = batch_for("bert")

    def tensors():
        gc.collect()
        return sum(torch.is_tensor(one) for one in gc.get_objects())

    def passes(number):
        for _ in range(number):
            with torch.no_grad(), observe(model, MeanMaximum()):
                model(**batch)

    passes(2)
    before = tensors()
    passes(200)
    assert tensors() <= before


def test_contexts_may_be_nested_and_observers_go_on():
    model, batch = tiny_model("bert"), batch_for("bert")
    inner, outer = MeanMaximum(), MeanMaximum()
    with torch.no_grad(), observe(model, outer):
        with observe(model, inner):
            model(**batch)
        model(**batch)
    for site, table in outer.compute().items():
        torch.testing.assert_close(table, inner.compute()[site])
    assert outer.means.counts == {site: 2 * count for site, count in inner.means.counts.items()}
    with torch.no_grad(), observe(model, inner):
        model(**batch)
    assert inner.means.counts == outer.means.counts


def test_gradients_flow_as_without_observers():
    model, batch = tiny_model("roberta"), batch_for("roberta")
    gradients = []
    for observers in ((), (MeanMaximum(),)):
        model.zero_grad()
        if observers:
            with observe(model, *observers):
                model(**batch).logits.square().mean().backward()
        else:
            model(**batch).logits.square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_half_precision_is_observed_in_single():
    model = tiny_model("bert").to(torch.bfloat16)
    with torch.no_grad(), observe(model, Maps()) as seen:
        model(**batch_for("bert"))
    for weights, *_ in seen.maps.values():
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_hard_coded_heads_are_passed_over():
    model = tiny_model("marian", guidance=None, hard_coded={"encoder": {}})
    with torch.no_grad(), observe(model, Maps()) as seen:
        model(**batch_for("marian"))
    assert {site.kind for site in seen.maps} == {"decoder", "cross"}


def test_models_that_attend_by_themselves_are_refused():
    model = XLNetModel(XLNetConfig(vocab_size=20, d_model=16, n_layer=1, n_head=2, d_inner=16))
    with pytest.raises(ValueError, match="XLNetModel computes attention by itself"), observe(model, MeanMaximum()):
        pass
    for name in WITHOUT_INTERFACE:
        with (
            pytest.raises(ValueError, match="computes attention by itself"),
            observe(build_stock(name), MeanMaximum()),
        ):
            pass


def test_unknown_architectures_are_read_by_their_names():
    config = AutoConfig.for_model(
        "starcoder2",
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    assert_maps_as_eager(AutoModel.from_config(config), {"input_ids": torch.tensor([[3, 4, 5, 6]])})


def test_accelerators_are_given_larger_blocks():
    blocks = {
        name: list(observation._blocks(1, 32, 2048, 2048, torch.device(name))) for name in ("cpu", "cuda", "mps")
    }
    assert {name: len(some) for name, some in blocks.items()} == {"cpu": 512, "cuda": 16, "mps": 16}


def test_bad_calls_say_what_to_do():
    model = tiny_model("bert")
    for given, name in ((MeanMaximum, "the class MeanMaximum"), ([MeanMaximum()], r"\[<.*MeanMaximum object at")):
        with (
            pytest.raises(ValueError, match=rf"objects, one argument each, as in observe\(.*; got {name}"),
            observe(model, given),
        ):
            pass
    with (
        pytest.raises(ValueError, match="DataParallel only holds the model that attends; pass model.module"),
        observe(torch.nn.DataParallel(model), MeanMaximum()),
    ):
        pass
    with pytest.raises(ValueError, match="there is no observer"), observe(model):
        pass
    with pytest.raises(ValueError, match="two observers are called 'maximum'"), observe(model, *[MeanMaximum()] * 2):
        pass
    with observe(model, MeanMaximum()) as seen, pytest.raises(ValueError, match="MeanMaximum has seen no attention"):
        _ = seen.maximum
    with pytest.raises(AttributeError, match="nothing called 'entropy' was observed, but maximum"):
        _ = seen.entropy

    class Ids(MeanMaximum):
        def update(self, call):
            return call.key_ids

    with (
        pytest.raises(ValueError, match="needs token ids, and those at the encoder"),
        observe(model, Ids()),
    ):
        model(inputs_embeds=torch.zeros(1, 3, 16))


def test_under_autocast_weights_are_in_single_precision():
    model = tiny_model("bert")
    with torch.no_grad(), observe(model, Maps()) as seen, torch.autocast("cpu", torch.bfloat16):
        model(**batch_for("bert"))
    assert all(weights.dtype == torch.float32 for weights, *_ in seen.maps.values())


class Number(Observer):
    """Counts tokens, in one of its means alone and in another by name."""

    name = "number"

    def __init__(self):
        self.alone, self.named = HeadMeans("Number"), {"one": HeadMeans("Number")}

    def update(self, call):
        for means in (self.alone, self.named["one"]):
            means.add(call, torch.ones(call.weights.shape[:3], dtype=torch.float64))

    def compute(self):
        return [{site: int(count) for site, count in m.counts.items()} for m in (self.alone, self.named["one"])]


def test_a_pass_that_fails_in_a_later_layer_counts_in_none():
    model = build_stock("bert")
    sentences = torch.randint(4, 60, (1, 5)), torch.randint(4, 60, (1, 9))
    with torch.no_grad(), observe(model, observer := Number()):
        handle = model.bert.encoder.layer[1].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(sentences[0])
        handle.remove()
        model(sentences[1])
        model.bert.encoder.layer[2].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(sentences[0])
    for counts in observer.compute():
        assert list(counts.values()) == [9, 9, 9]
