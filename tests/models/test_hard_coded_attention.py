"""Attention fixed to Gaussians beside each token, against loops over heads, rows and keys."""

import copy
import math
import pickle

import pytest
import torch
import transformers
from tiny_models import (
    KINDS,
    PAD,
    PRETRAINED,
    batch_for,
    first_output,
    headwise_class,
    no_dropout,
    padded_batch,
    ragged_sentences,
    stock_class,
    stock_config,
    tiny_config,
    tiny_model,
    vivid,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_attn_dynamics as had
from hf_attn_dynamics.models.hard_coded_attention import GaussianAttention, Unprojected


ENCODERS = ("roberta", "bert", "electra")
HARD_CODED = {**dict.fromkeys(ENCODERS, {}), "marian": {"encoder": {}, "decoder": {}}}


def build(kind="marian", head=None, hard_coded=None, **changes):
    hard_coded = HARD_CODED[kind] if hard_coded is None else hard_coded
    return vivid(tiny_model(kind, head, **{"guidance": None, "hard_coded": hard_coded, **changes}))


def density(row, seen, offset, std):
    """Weights of one row, `{key: weight}`, over the keys that it sees."""
    scores = {key: math.exp(-(((key - row - offset) / std) ** 2) / 2) for key in seen}
    return {key: score / sum(scores.values()) for key, score in scores.items()}


def dense_weights(n, offsets, std=1.0, causal=False):
    """Weights (heads, rows, keys) of one unpadded sentence of n tokens."""
    weights = torch.zeros(len(offsets), n, n, dtype=torch.float64)
    for head, offset in enumerate(offsets):
        for row in range(n):
            for key, weight in density(row, range(row + 1 if causal else n), offset, std).items():
                weights[head, row, key] = weight
    return weights


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_densities_over_the_tokens_that_a_row_sees(kind, kernel):
    model = build(kind)
    model.set_attn_implementation(kernel)
    sentences = ragged_sentences()
    outputs = model(**batch_for(kind), output_attentions=True)
    names = {"encoder_attentions": False, "decoder_attentions": True} if kind == "marian" else {"attentions": False}
    for name, causal in names.items():
        offsets = [-1, 0] if causal else [-1, -1, 1, 1]
        for maps in outputs[name]:
            for row, sentence in enumerate(sentences):
                n = len(sentence)
                expected = dense_weights(n, offsets, causal=causal).float()
                torch.testing.assert_close(maps[row, :, :n, :n], expected, rtol=1e-5, atol=1e-7)
                assert (maps[row, :, :n, n:] == 0).all()


@pytest.mark.parametrize(("offsets", "std"), [([0], 1.0), ([-2, 1], 0.5), ([3, -1, 0, 1], 2), ([-40, 40], 0.1)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_output_is_the_sum_of_values_under_each_heads_density(causal, offsets, std):
    n, per_offset = 6, 4 // len(offsets)
    values = torch.randn(2, 4, n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    output, weights = GaussianAttention(offsets, std, 4)(values, None, n, causal)
    by_head = [offset for offset in offsets for _ in range(per_offset)]
    if std > 0.1:
        expected = dense_weights(n, by_head, std, causal).expand(2, -1, -1, -1)
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
    else:
        # So far from any key that a loop over exponentials gives zeros only: the nearest key takes all.
        last = torch.arange(n) if causal else torch.full((n,), n - 1)
        for head, offset in enumerate(by_head):
            nearest = last if offset > 0 else torch.zeros(n, dtype=torch.long)
            assert torch.equal(weights[0, head].argmax(-1), nearest)
            assert weights[0, head].amax(-1).min() > 0.99
    torch.testing.assert_close(output, (weights @ values).transpose(1, 2))


@pytest.mark.parametrize("site", ["encoder", "decoder"])
@pytest.mark.parametrize("additive", [False, True])
def test_padding_on_either_side_takes_no_position(site, additive):
    attention = GaussianAttention([-1, 1], 1.0, 2)
    causal, n = site == "decoder", 5
    values = torch.randn(1, 2, n, 3, generator=torch.Generator().manual_seed(0))
    expected, weights = attention(values, None, n, causal)
    for left, right in ((0, 3), (3, 0), (2, 2)):
        real = slice(left, left + n)
        length = left + n + right
        mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
        mask[..., real] = True
        mask = mask.tril() if causal else mask
        if additive:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        padded = torch.nn.functional.pad(values, (0, 0, left, right), value=99)
        found, found_weights = attention(padded, mask, length, causal)
        assert found.isfinite().all()
        torch.testing.assert_close(found[:, real], expected)
        torch.testing.assert_close(found_weights[..., real, real], weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_gives_the_logits_of_each_sentence_alone(kind):
    model = build(kind)
    whole = model(**batch_for(kind)).to_tuple()[0]
    for row, sentence in enumerate(ragged_sentences()):
        alone = model(**batch_for(kind, [sentence])).to_tuple()[0]
        torch.testing.assert_close(whole[row, : len(sentence)], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_no_queries_and_keys(kind):
    model, learned = build(kind), tiny_model(kind, guidance=None)
    fixed, all_names = set(model.state_dict()), set(learned.state_dict())
    assert fixed < all_names
    gone = {name.rsplit(".", 2)[1] for name in all_names - fixed}
    assert gone == ({"q_proj", "k_proj"} if kind == "marian" else {"query", "key"})
    # Those of cross-attention stay.
    assert sum("encoder_attn.q_proj.weight" in name for name in fixed) == (2 if kind == "marian" else 0)
    outputs = model(**batch_for(kind)).to_tuple()[0]
    outputs.square().sum().backward()
    values = [p for name, p in model.named_parameters() if "v_proj.weight" in name or "value.weight" in name]
    assert min(parameter.grad.abs().sum() for parameter in values) > 0


def translate(model, **settings):
    data = padded_batch(ragged_sentences(), pad=PAD["marian"])
    return model.generate(**data, **{"max_new_tokens": 8, "min_new_tokens": 4, "do_sample": False, **settings})


@pytest.mark.parametrize("settings", [{}, {"num_beams": 4}, {"cache_implementation": "static"}])
def test_translations_do_not_depend_on_the_cache(settings):
    # Weights so large that sentences differ in their translations.
    model = tiny_model("marian", guidance=None, hard_coded=HARD_CODED["marian"], init_std=0.5)
    expected = translate(model, **{**settings, "cache_implementation": None, "use_cache": False})
    assert torch.equal(translate(model, **settings), expected)
    assert len(expected.unique(dim=0)) > 4


@pytest.mark.parametrize("left", [0, 3])
def test_a_decoder_of_one_stack_goes_on_from_its_cache(left):
    model = build("bert", "Model", is_decoder=True)
    ids = torch.tensor([[5, 9, 8, 7, 6, 5]])
    batch = {"input_ids": torch.nn.functional.pad(ids, (left, 0)), "attention_mask": torch.ones(1, left + 6).long()}
    batch["attention_mask"][:, :left] = 0
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = model(ids).last_hidden_state
    start = left + 3
    cache, steps = None, []
    for step in (slice(0, start), slice(start, start + 1), slice(start + 1, start + 3)):
        outputs = model(
            batch["input_ids"][:, step],
            attention_mask=batch["attention_mask"][:, : step.stop],
            position_ids=positions[:, step],
            cache=cache,
            use_cache=True,
        )
        cache = outputs.cache
        steps.append(outputs.last_hidden_state)
    torch.testing.assert_close(torch.cat(steps, 1)[:, left:], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back(kind, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    back, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert back.config.hard_coded == model.config.hard_coded
    assert torch.equal(first_output(back.eval(), kind), first_output(model, kind))


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stock_checkpoint_is_hard_coded_without_its_queries_and_keys(kind, base, tmp_path, caplog):
    stock = vivid(stock_class(kind, PRETRAINED[kind])(stock_config(kind)))
    stock.save_pretrained(tmp_path)
    head = "Model" if base else PRETRAINED[kind]
    model, info = headwise_class(kind, head).from_pretrained(
        tmp_path, hard_coded=HARD_CODED[kind], output_loading_info=True
    )
    of_attention = ("attn.", "attention.")
    for names in info.values():
        assert not [name for name in names if any(part in str(name) for part in of_attention)]
    assert "attention." not in caplog.text
    assert "attn." not in caplog.text
    own, theirs = model.state_dict(), stock.state_dict()
    prefix = f"{stock.base_model_prefix}." if base else ""
    loaded = [name for name in own if any(part in name for part in of_attention)]
    assert loaded
    assert all(torch.equal(own[name], theirs[f"{prefix}{name}"]) for name in loaded)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_coded_weights_do_not_make_learned_attention(kind, tmp_path):
    build(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"are of hard-coded attention, without .*\.weight: load them with the hard_"):
        headwise_class(kind, PRETRAINED[kind]).from_pretrained(tmp_path, hard_coded=None)


@pytest.mark.parametrize("pruned", [False, True])
def test_removing_heads_is_setting_their_outputs_to_zero(pruned, tmp_path):
    heads = {"encoder": {0: [0, 3], 1: [0, 1, 2, 3]}, "decoder": {0: [1], 1: [0]}}
    model = build(gates={"encoder": {}, "decoder": {}}) if pruned else build()
    silent = copy.deepcopy(model)
    for layers, kind in ((silent.model.encoder.layers, "encoder"), (silent.model.decoder.layers, "decoder")):
        for number, gone in heads[kind].items():
            weight = layers[number].self_attn.out_proj.weight
            for head in gone:
                size = weight.shape[1] // len(silent.config.kept_heads()[kind, number])
                weight.data[:, head * size : (head + 1) * size] = 0
    had.prune_heads(model, heads)
    assert model.model.encoder.layers[0].self_attn.hard_coded.offsets == [-1, 1]
    assert model.model.decoder.layers[0].self_attn.hard_coded.offsets == [-1]
    torch.testing.assert_close(first_output(model, "marian"), first_output(silent, "marian"), rtol=1e-5, atol=1e-5)
    assert torch.equal(translate(model), translate(silent))
    assert torch.equal(translate(model, cache_implementation="static"), translate(silent))
    model.save_pretrained(tmp_path)
    back = had.HeadwiseMarianMTModel.from_pretrained(tmp_path).eval()
    assert torch.equal(first_output(back, "marian"), first_output(model, "marian"))


def test_gates_multiply_the_output_of_their_heads():
    model = build("bert", gates={"evaluation": "fractional"})
    gate = next(iter(model.head_gates().values()))
    with torch.no_grad():
        gate.log_alpha.copy_(torch.tensor([9.0, -9.0, 0.0, 9.0]))
    plain = build("bert")
    missing = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing.missing_keys
    attention, stock = (m.bert.encoder.layer[0].attention.self for m in (model, plain))
    hidden = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    factors = gate().repeat_interleave(4)
    torch.testing.assert_close(attention(hidden)[0], stock(hidden)[0] * factors)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    model = build(**no_dropout("marian"), guidance={"cross": {}}).train()
    batch = batch_for("marian")

    def gradients():
        model.zero_grad()
        model(**batch, labels=batch["input_ids"], guidance_weight=1.0).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_weights_are_dropped_in_training_sentence_by_sentence():
    attention = GaussianAttention([-1, 1], 1.0, 2)
    torch.manual_seed(0)
    _, weights = attention(torch.ones(2, 2, 40, 3), None, 40, False, dropout=0.5)
    kept = attention(torch.ones(1, 2, 40, 3), None, 40, False)[1].expand_as(weights)
    dropped = weights == 0
    torch.testing.assert_close(weights[~dropped], 2 * kept[~dropped])
    visible = kept > 0
    assert 0.4 < dropped[visible].float().mean() < 0.6
    assert not torch.equal(dropped[0] & visible[0], dropped[1] & visible[1])


def test_a_compiled_model_gives_the_same_logits():
    model, batch = build("bert", "Model", num_hidden_layers=1), batch_for("bert")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        found, expected = compiled(**batch).last_hidden_state, model(**batch).last_hidden_state
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_give_the_same_logits(copied):
    model = build()
    assert torch.equal(first_output(copied(model), "marian"), first_output(model, "marian"))


def test_kernels_with_masks_of_their_own_are_refused():
    transformers.AttentionInterface.register("blockwise", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register("blockwise", sdpa_mask)
    model = build("bert")
    model.set_attn_implementation("blockwise")
    with pytest.raises(ValueError, match=r"\(encoder layer 0\) reads the masks of sdpa and eager, not .*'blockwise'"):
        model(**batch_for("bert"))


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_half_precision_keeps_the_weights(kernel):
    model = build("bert", attn_implementation=kernel).to(torch.bfloat16)
    maps = model(**batch_for("bert"), output_attentions=True).attentions[0]
    assert maps.dtype == torch.bfloat16
    exact = build("bert")(**batch_for("bert"), output_attentions=True).attentions[0]
    torch.testing.assert_close(maps.float(), exact, rtol=1e-2, atol=1e-3)


# ---- Configurations ----


def test_settings_are_completed_for_each_site():
    assert tiny_config("bert", guidance=None, hard_coded={}).hard_coded == {"offsets": [-1, 1], "std": 1.0}
    assert tiny_config("bert", guidance=None, hard_coded={}, is_decoder=True).hard_coded["offsets"] == [-1, 0]
    marian = tiny_config("marian", guidance=None, hard_coded={"encoder": {"std": 2}, "decoder": {}})
    assert marian.hard_coded == {
        "encoder": {"offsets": [-1, 1], "std": 2},
        "decoder": {"offsets": [-1, 0], "std": 1.0},
    }
    assert list(marian.hard_coded_settings()) == ["encoder", "decoder"]
    assert tiny_config("marian").hard_coded_settings() == {}


def test_one_site_can_be_guided_and_the_other_hard_coded():
    model = build(hard_coded={"decoder": {}}, guidance={"encoder": {}, "cross": {}})
    assert model(**batch_for("marian"), output_guidance_loss=True).guidance_loss > 0


@pytest.mark.parametrize(
    ("kind", "hard_coded", "message"),
    [
        ("marian", {"encoder": 3}, r"hard_coded\['encoder'\] must be a dictionary or None, got 3"),
        ("bert", {"offset": [1]}, "hard_coded has no key 'offset'; its keys are offsets, std"),
        ("bert", {"offsets": []}, r"offsets must be a list of integers, got \[\]"),
        ("bert", {"offsets": [0.5]}, r"offsets must be a list of integers, got \[0.5\]"),
        ("bert", {"offsets": [True]}, "offsets must be a list of integers"),
        ("bert", {"offsets": [-1, 0, 1]}, "has 3 offsets; the number of heads, 4, must be divisible"),
        ("bert", {"std": 0}, "std must be a number greater than 0, got 0"),
        ("bert", {"std": float("inf")}, "std must be a number greater than 0, got inf"),
        ("bert", {"decoder": {}}, "hard_coded names the site 'decoder', but the heads of this model are at encoder"),
        ("marian", {"std": 1.0}, "hard_coded of a model with heads at several sites must name them"),
        ("marian", {}, r"hard_coded=\{\} has no sites; pass \{site: \{\}\} for some of encoder, decoder, cross"),
        ("marian", {"cross": {}}, r"hard_coded\['cross'\] is not possible: .* name encoder or decoder"),
        (
            "marian",
            {"decoder": {"offsets": [-2, -1, 0]}},
            r"hard_coded\['decoder'\] has 3 offsets; .* heads, 2, must be",
        ),
    ],
)
def test_impossible_settings_are_named_at_construction(kind, hard_coded, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(kind, guidance=None, hard_coded=hard_coded)


@pytest.mark.parametrize("kind", ["bert", "marian"])
def test_a_site_is_not_guided_and_hard_coded(kind):
    with pytest.raises(ValueError, match="guidance and hard_coded both name the encoder, .* remove it from one"):
        tiny_config(kind, hard_coded=HARD_CODED[kind])


def test_nothing_is_learnt_in_place_of_a_projection():
    hidden = torch.randn(2, 3, 8)
    assert torch.equal(Unprojected(6)(hidden), hidden[..., :6])
    assert not list(Unprojected(6).parameters())
