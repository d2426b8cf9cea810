"""Guidance of decoders and of cross-attention."""

from dataclasses import replace

import pytest
import torch
from dense_guidance import dense_guidance_loss
from gradients import (
    assert_checkpointing_keeps_gradients,
    assert_compilation_keeps_loss_and_gradients,
    assert_same,
    gradients,
)
from stock_models import SEQ2SEQ
from tiny_models import (
    GUIDANCE,
    PAD,
    no_dropout,
    padded_batch,
    ragged_sentences,
    tiny_config,
    tiny_model,
    vivid,
)

import hf_attn_dynamics as had
from hf_attn_dynamics.models import guidance_loss
from hf_attn_dynamics.models.guidance_loss import guide_heads
from hf_attn_dynamics.models.guidance_settings import GuidanceSettings
from hf_attn_dynamics.models.guidance_targets import GuidanceTargets, Tokens
from hf_attn_dynamics.models.patterns import PatternRows, register_pattern


PERIOD = 7
SETTINGS = GuidanceSettings(
    reduction="row_mean",
    edge_rows="uniform",
    delimiter_token_ids=[2, 3],
    period_token_ids=[PERIOD],
)
SOURCES = [[2, 9, 8, PERIOD, 3], [2, 3], [9], [PERIOD, 8, 8, PERIOD, 9, 9, PERIOD, 4, 3]]
TARGETS = [[2, 9, PERIOD], [2, 5, 6, PERIOD, 8, PERIOD, 3], [4, 4], [PERIOD]]
LAYOUTS = {
    "decoder": {"prev": [1], "first": [2, 3], "delim": [5], "period": [0], "self": [4]},
    "cross": {"next": [0], "prev": [1], "first": [2, 3], "delim": [6], "period": [5], "self": [4]},
}


def padded(sentences, left=False, extra=0):
    batch = padded_batch(sentences, length=max(map(len, sentences)) + extra)
    if left:
        shifts = [batch["input_ids"].shape[1] - len(sentence) for sentence in sentences]
        batch = {
            name: torch.stack([row.roll(shift) for row, shift in zip(value, shifts)]) for name, value in batch.items()
        }
    return Tokens(batch["input_ids"], batch["attention_mask"], batch["input_ids"].shape, torch.device("cpu"))


def vectors(sentences, tokens, seed):
    """The same vector for a token wherever its sentence stands; noise at padding."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(7, *tokens.shape, 5, generator=generator, dtype=torch.float64).transpose(0, 1) * 9
    own = torch.Generator().manual_seed(seed + 1)
    for row, sentence in enumerate(sentences):
        found[row][:, tokens.real()[row]] = torch.randn(7, len(sentence), 5, generator=own, dtype=torch.float64)
    return found.requires_grad_()


def fast_loss(kind, settings=SETTINGS, layout=None, left=False, extra=0, **changes):
    """Loss of one layer, and its queries and keys with the masks of the real ones."""
    target = padded(TARGETS, left, extra)
    source = padded(SOURCES, left, extra) if kind == "cross" else target
    query = vectors(TARGETS, target, seed=0)
    key = vectors(SOURCES if kind == "cross" else TARGETS, source, seed=2)
    sides = {"keys": source, "queries": target} if kind == "cross" else {"keys": target, "causal": True}
    targets = GuidanceTargets(settings, {0: layout or LAYOUTS[kind]}, **{**sides, **changes})
    loss = guide_heads(query, key, 0.7, targets.layer(0, query.dtype, query.device))[2].sum()
    return loss, (query, target.real()), (key, source.real())


def dense_maps(kind):
    """Attention of one layer to each sentence, and the queries and keys it is made of."""
    keys = SOURCES if kind == "cross" else TARGETS
    query = vectors(TARGETS, padded(TARGETS), seed=0)
    key = vectors(keys, padded(keys), seed=2)
    maps = []
    for row, (sentence, attended) in enumerate(zip(TARGETS, keys)):
        scores = 0.7 * query[row, :, : len(sentence)] @ key[row, :, : len(attended)].transpose(1, 2)
        if kind == "decoder":
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        maps.append(scores.softmax(-1)[None])
    return maps, query, key


def slow_loss(kind, settings=SETTINGS, layout=None):
    maps, query, key = dense_maps(kind)
    loss = dense_guidance_loss(
        list(zip(SOURCES if kind == "cross" else TARGETS, maps)),
        {0: layout or LAYOUTS[kind]},
        settings.reduction,
        settings.edge_rows,
        causal=kind == "decoder",
        delimiters=settings.delimiter_token_ids,
        periods=settings.period_token_ids,
    )
    return loss, query, key


@pytest.mark.parametrize("elements", [2**20, 7 * 9 * 3, 7 * 9 * 9 * 2], ids=["whole", "rows of 3", "2 sentences"])
@pytest.mark.parametrize("edge_rows", ["uniform", "zero"])
@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
@pytest.mark.parametrize("kind", ["decoder", "cross"])
def test_loss_and_gradients_equal_the_dense_definition(kind, reduction, edge_rows, elements, monkeypatch):
    monkeypatch.setitem(guidance_loss.BLOCK_ELEMENTS, "cpu", elements)
    settings = replace(SETTINGS, reduction=reduction, edge_rows=edge_rows)
    fast, (fast_query, _), (fast_key, _) = fast_loss(kind, settings)
    slow, slow_query, slow_key = slow_loss(kind, settings)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=0)
    fast.backward()
    slow.backward()
    torch.testing.assert_close(fast_query.grad, slow_query.grad, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(fast_key.grad, slow_key.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
@pytest.mark.parametrize(("left", "extra"), [(False, 5), (True, 0), (True, 3)])
@pytest.mark.parametrize("kind", ["decoder", "cross"])
def test_padding_changes_neither_loss_nor_gradient(kind, left, extra, reduction):
    settings = replace(SETTINGS, reduction=reduction)
    plain, *sides = fast_loss(kind, settings)
    more, *more_sides = fast_loss(kind, settings, left=left, extra=extra)
    torch.testing.assert_close(more, plain, rtol=1e-12, atol=0)
    plain.backward()
    more.backward()
    for (vector, real), (more_vector, more_real) in zip(sides, more_sides):
        of_tokens, more_of_tokens = vector.grad.transpose(1, 2)[real], more_vector.grad.transpose(1, 2)[more_real]
        torch.testing.assert_close(more_of_tokens, of_tokens, rtol=1e-9, atol=1e-14)
        assert (more_vector.grad.transpose(1, 2)[~more_real] == 0).all()


@pytest.mark.parametrize("kind", ["decoder", "cross"])
def test_rows_that_do_not_count_leave_the_mean_over_the_others(kind):
    counted = padded(TARGETS).real()
    counted[1, [0, 3]] = False
    rows = [row.nonzero().flatten().tolist() for row in counted]
    found = fast_loss(kind, counted=counted)[0]
    maps = dense_maps(kind)[0]
    expected = dense_guidance_loss(
        list(zip(SOURCES if kind == "cross" else TARGETS, maps, rows)),
        {0: LAYOUTS[kind]},
        causal=kind == "decoder",
        delimiters=[2, 3],
        periods=[PERIOD],
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_a_row_of_a_decoder_is_compared_with_the_periods_so_far():
    # Equal scores: row p attends 1/(p + 1) to each key. Worked by hand for [., x, .]: rows cost 0, 1/2 and 1/6.
    query = torch.zeros(1, 1, 3, 4)
    tokens = Tokens(torch.tensor([[PERIOD, 5, PERIOD]]), None, (1, 3), query.device)
    targets = GuidanceTargets(replace(SETTINGS, reduction="paper"), {0: {"period": [0]}}, tokens, causal=True)
    loss = guide_heads(query, query, 1.0, targets.layer(0, query.dtype, query.device))[2].sum()
    assert loss.item() == pytest.approx(0 + 1 / 2 + 1 / 6)


def test_memory_of_a_decoders_loss_does_not_grow_with_the_square_of_the_length():
    # Half of the tokens are periods.
    length = 2048
    tokens = Tokens(torch.tensor([PERIOD, 5]).repeat(1, length // 2), None, (1, length), torch.device("cpu"))
    targets = GuidanceTargets(SETTINGS, {0: {"period": [0], "delim": [2], "prev": [1]}}, tokens, causal=True)
    tensors = targets.layer(0, torch.float32, tokens.device).groups
    assert max(tensor.numel() for tensor in tensors) <= length


@pytest.fixture
def registered():
    def to_all(input_ids, attention_mask):
        """Twice as much to the first token as to each of the others, in one row for all."""
        batch, n = attention_mask.shape
        weights = attention_mask.float()
        weights[:, 0] *= 2
        return PatternRows(torch.arange(n).expand(batch, 1, n), (weights / weights.sum(1, keepdim=True))[:, None])

    def beside(input_ids, attention_mask):
        """Two thirds to the token itself, one third to the following one."""
        batch, n = attention_mask.shape
        keys = (torch.arange(n)[:, None] + torch.arange(2)).expand(batch, n, 2)
        weights = torch.tensor([2 / 3, 1 / 3]) * torch.ones(batch, n, 1)
        weights[:, -1] = torch.tensor([1.0, 0.0])
        return PatternRows(keys.clamp(max=n - 1), weights)

    def ahead(input_ids, attention_mask):
        """To the second token."""
        return PatternRows(
            torch.ones(len(attention_mask), 1, 1, dtype=torch.long), torch.ones(len(attention_mask), 1, 1)
        )

    for name, pattern in (("to_all", to_all), ("beside", beside), ("ahead", ahead)):
        register_pattern(name, pattern)


@pytest.mark.parametrize("name", ["to_all", "beside", "ahead"])
def test_targets_of_registered_patterns_are_cut_down_to_what_a_decoder_sees(name, registered):
    found = fast_loss("decoder", layout={name: [2]})[0]
    expected = 0
    for (attention,) in dense_maps("decoder")[0]:
        n = attention.shape[1]
        for row in range(n):
            target = {
                "to_all": torch.tensor([2.0] + [1.0] * (n - 1)),
                "beside": torch.eye(n)[row],
                "ahead": torch.eye(max(n, 2))[1][:n],
            }[name][: row + 1]
            if target.sum() > 0:
                target = target.double() / target.sum()
                expected = expected + ((attention[2, row, : row + 1] - target) ** 2).sum() / n / len(TARGETS)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_registered_patterns_describe_one_row_for_all_in_cross_attention(registered):
    assert fast_loss("cross", layout={"to_all": [0]})[0] > 0
    with pytest.raises(ValueError, match="'beside' returned 9 rows; at the cross site it must return a single row"):
        fast_loss("cross", layout={"beside": [0]})


# ---- Models ----

SITES = {
    "encoder": GUIDANCE,
    "decoder": {"heads": {0: {"prev": [0], "period": [1]}, 1: {"self": [0], "first": [1]}}, "period_token_ids": [7]},
    "cross": {"heads": {0: {"self": [0], "period": [1]}, 1: {"prev": [1], "next": [0]}}, "period_token_ids": [7]},
}
MAPS = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}


def translator(dtype=torch.float64, guidance=SITES, **changes):
    return vivid(tiny_model("marian", guidance=guidance, **changes)).to(dtype)


def pairs():
    """Sentences and their translations, of other lengths."""
    return list(zip(ragged_sentences(4, seed=1), ragged_sentences(4, seed=2)[::-1]))


def translation_batch(sentences=None, mask=False, labels=True):
    """A batch as a collator makes it: targets padded with -100, and no mask of theirs unless asked for."""
    sources, targets = zip(*(sentences or pairs()))
    padded_targets = padded_batch(targets, pad=PAD["marian"])
    batch = padded_batch(sources, pad=PAD["marian"])
    real = padded_targets["attention_mask"].bool()
    as_labels = padded_targets["input_ids"].where(real, -100)
    start = torch.full((len(targets), 1), PAD["marian"])
    batch["decoder_input_ids"] = torch.cat([start, padded_targets["input_ids"][:, :-1]], 1)
    if labels:
        batch["labels"] = as_labels
    if mask:
        batch["decoder_attention_mask"] = padded_targets["attention_mask"]
    return batch


def dense_loss_of_sites(model, reduction="row_mean"):
    total, config = 0, model.config
    model.set_attn_implementation("eager")
    maps = {kind: [] for kind in MAPS}
    for pair in pairs():
        batch = translation_batch([pair])
        outputs = model(**batch, output_attentions=True)
        for kind, name in MAPS.items():
            keys = batch["decoder_input_ids" if kind == "decoder" else "input_ids"][0].tolist()
            maps[kind].append((keys, torch.stack(outputs[name])[:, 0]))
    for kind in config.guidance:
        layouts = config.guided_heads(kind)
        total = total + dense_guidance_loss(maps[kind], layouts, reduction, causal=kind == "decoder", periods=[7])
    model.set_attn_implementation("sdpa")
    return total


@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
@pytest.mark.parametrize("rows", ["mask", "labels"])
def test_the_loss_sums_over_the_attention_maps_of_all_sites(rows, reduction):
    guidance = {kind: {**settings, "reduction": reduction} for kind, settings in SITES.items()}
    model = translator(guidance=guidance)
    batch = translation_batch(mask=rows == "mask", labels=rows == "labels")
    found = model(**batch, output_guidance_loss=True).guidance_loss
    torch.testing.assert_close(found, dense_loss_of_sites(model, reduction), rtol=1e-8, atol=0)


def test_gradients_of_all_parameters_are_those_of_the_dense_loss():
    model = translator()
    expected = gradients(model, dense_loss_of_sites(model))
    found = gradients(model, model(**translation_batch(), output_guidance_loss=True).guidance_loss)
    assert_same({name: found[name] for name in expected}, expected, rtol=1e-7, atol=1e-11)


def test_without_mask_and_labels_every_row_of_a_decoder_counts():
    model = translator()
    batch = translation_batch([pairs()[1]])
    expected = model(**batch, output_guidance_loss=True).guidance_loss
    del batch["labels"]
    torch.testing.assert_close(model(**batch, output_guidance_loss=True).guidance_loss, expected, rtol=0, atol=0)


def test_a_decoder_fed_by_labels_is_guided_as_one_fed_by_its_input():
    model, batch = translator(), translation_batch()
    expected = model(**batch, output_guidance_loss=True).guidance_loss
    del batch["decoder_input_ids"]
    assert torch.equal(model(**batch, output_guidance_loss=True).guidance_loss, expected)


def test_sites_add_up():
    model, batch = translator(), translation_batch()
    whole = model(**batch, output_guidance_loss=True).guidance_loss
    parts = [
        translator(guidance={kind: SITES[kind]})(**batch, output_guidance_loss=True).guidance_loss for kind in SITES
    ]
    torch.testing.assert_close(whole, sum(parts), rtol=1e-12, atol=0)


def test_losses_of_micro_batches_add_up_by_their_sentences():
    model = translator()
    counts = model.count_labels(translation_batch())

    def loss(sentences):
        outputs = model(**translation_batch(sentences), num_items_in_batch=counts, output_guidance_loss=True)
        return outputs.loss, outputs.guidance_loss

    whole, parts = loss(pairs()), [loss(pairs()[:1]), loss(pairs()[1:])]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(parts[0][1] / 4 + parts[1][1] * 3 / 4, whole[1], rtol=1e-9, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    assert_checkpointing_keeps_gradients(translator(**no_dropout("marian")).train(), translation_batch(), reentrant)


def test_a_compiled_model_has_the_same_loss_and_gradients():
    sides = {"encoder": ["next", "prev"], "decoder": ["prev"], "cross": ["self"]}
    guidance = {kind: {"patterns": patterns} for kind, patterns in sides.items()}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    model = translator(torch.float32, guidance=guidance, use_cache=False, **layers)
    assert_compilation_keeps_loss_and_gradients(model, translation_batch())


def test_gates_and_removed_heads_leave_the_loss_of_the_others():
    model = translator(gates={"decoder": {}, "cross": {}}, pruned_heads={"decoder": {0: [0]}, "cross": {1: [0, 1]}})
    assert model.config.guided_heads("decoder") == {0: {"period": [1]}, 1: {"self": [0], "first": [1]}}
    assert model.config.guided_heads("cross") == {0: {"self": [0], "period": [1]}}
    found = model(**translation_batch(), output_guidance_loss=True).guidance_loss
    torch.testing.assert_close(found, _dense_with_places(model), rtol=1e-8, atol=0)


def _dense_with_places(model):
    """As `dense_loss_of_sites`, for a model whose maps lack the heads that are removed."""
    kept, total = model.config.kept_heads(), 0
    model.set_attn_implementation("eager")
    for pair in pairs():
        batch = translation_batch([pair])
        outputs = model(**batch, output_attentions=True)
        for kind, name in MAPS.items():
            keys = batch["decoder_input_ids" if kind == "decoder" else "input_ids"][0].tolist()
            for layer, layout in model.config.guided_heads(kind).items():
                places = {pattern: [kept[kind, layer].index(h) for h in heads] for pattern, heads in layout.items()}
                maps = [(keys, outputs[name][layer])]
                total = total + dense_guidance_loss(maps, {0: places}, causal=kind == "decoder", periods=[7]) / 4
    return total


def test_a_guided_translator_generates_as_an_unguided_one():
    model, plain = translator(torch.float32), translator(torch.float32, guidance=None)
    inputs = padded_batch([source for source, _ in pairs()], pad=PAD["marian"])
    for settings in ({}, {"num_beams": 3}, {"use_cache": False}):
        translations = model.generate(**inputs, max_new_tokens=6, do_sample=False, **settings)
        assert torch.equal(translations, plain.generate(**inputs, max_new_tokens=6, do_sample=False, **settings))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_guidance_of_a_decoder_with_a_cache_is_refused(name):
    model, batch = translator(), translation_batch(labels=False)
    cache = model(**batch, use_cache=True).cache
    with pytest.raises(ValueError, match="with a cache it reads only a part of it"):
        model(**batch, **{name: cache}, output_guidance_loss=True)


def test_a_source_that_was_encoded_before_serves_a_guided_decoder():
    model, batch = translator(guidance={"decoder": {}, "cross": {}}), translation_batch()
    expected = model(**batch, output_guidance_loss=True).guidance_loss
    batch["encoder_outputs"] = model.get_encoder()(batch.pop("input_ids"), batch["attention_mask"])
    torch.testing.assert_close(model(**batch, output_guidance_loss=True).guidance_loss, expected)


def test_a_decoder_without_input_is_named():
    with pytest.raises(ValueError, match="guidance loss of a decoder is requested: pass decoder_input_ids or labels"):
        translator()(torch.tensor([[4, 5]]), output_guidance_loss=True)


def test_a_mask_of_the_target_with_another_shape_is_refused():
    batch = translation_batch()
    batch["decoder_attention_mask"] = torch.ones(1, 1, 5, 5)
    with pytest.raises(ValueError, match=r"guidance needs decoder_attention_mask of shape \(batch, length\)"):
        translator()(**batch, output_guidance_loss=True)


def test_guidance_of_all_sites_is_saved_with_the_model(tmp_path):
    model, batch = translator(torch.float32), translation_batch()
    model.save_pretrained(tmp_path)
    back = had.HeadwiseMarianMTModel.from_pretrained(tmp_path).eval()
    assert back.config.guidance == model.config.guidance
    expected = model(**batch, output_guidance_loss=True).guidance_loss
    assert torch.equal(back(**batch, output_guidance_loss=True).guidance_loss, expected)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_decoder_of_one_stack_is_guided_with_the_encoder_it_attends_to(kind):
    guidance = {
        "decoder": {"heads": {"prev": [0], "self": [1], "period": [2], "first": [3]}, "period_token_ids": [7]},
        "cross": {"heads": {"self": [0], "next": [1], "prev": [2], "first": [3]}},
    }
    model = vivid(tiny_model(kind, "Model", guidance=guidance, is_decoder=True, add_cross_attention=True)).double()
    assert model.config.guided_heads() == model.config.guided_heads("decoder")
    states = torch.randn(4, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = [6, 2, 1, 5]
    encoded = {
        "encoder_hidden_states": states,
        "encoder_attention_mask": (torch.arange(6) < torch.tensor(lengths)[:, None]).long(),
    }
    sentences = [target for _, target in pairs()]
    found = model(**padded_batch(sentences, PAD[kind]), **encoded, output_guidance_loss=True).guidance_loss
    model.set_attn_implementation("eager")
    expected = 0
    for row, (sentence, length) in enumerate(zip(sentences, lengths)):
        outputs = model(
            torch.tensor([sentence]), encoder_hidden_states=states[row : row + 1, :length], output_attentions=True
        )
        for site, maps, keys in (("decoder", "attentions", sentence), ("cross", "cross_attentions", [0] * length)):
            attention, layouts = torch.stack(outputs[maps])[:, 0], model.config.guided_heads(site)
            loss = dense_guidance_loss([(keys, attention)], layouts, causal=site == "decoder", periods=[7])
            expected = expected + loss / len(sentences)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)
    with pytest.raises(ValueError, match="cross site is requested: pass the encoder_hidden_states"):
        model(torch.tensor([sentences[0]]), output_guidance_loss=True)


# ---- Configurations ----


def test_patterns_of_a_site_are_by_default_those_it_can_have():
    config = tiny_config("marian", decoder_attention_heads=8, guidance={"encoder": {}, "decoder": {}, "cross": {}})
    assert config.guided_heads() == config.guided_heads("encoder")
    assert config.guided_heads("encoder")[0] == {"next": [0], "prev": [1]}
    assert config.guided_heads("decoder")[1] == {"prev": [0], "first": [1, 2, 3]}
    assert config.guided_heads("cross")[1] == {"self": [0], "prev": [1], "next": [2], "first": [3]}


def test_a_site_that_is_not_named_has_no_guided_heads():
    config = tiny_config("marian", guidance={"cross": {}})
    assert config.guided_heads() == config.guided_heads("decoder") == {}
    assert list(config.guidance_settings()) == list(config.guidance) == ["cross"]


@pytest.mark.parametrize(
    ("guidance", "message"),
    [
        (
            {"decoder": {"patterns": ["next"]}},
            r"\['decoder'\] pattern 'next' \(layer 0, head 0\) attends to the next",
        ),
        ({"decoder": {"heads": {1: {"next": [1]}}}}, r"'next' \(layer 1, head 1\) .* causal attention masks"),
        ({"decoder": {"heads": {"prev": [2]}}}, r"guidance\['decoder'\] names head 2 .* a layer has 2 heads"),
        ({"cross": {"heads": {2: {"prev": [0]}}}}, r"guidance\['cross'\] names layer 2, but the model has 2 layers"),
        ({"cross": {"fraction": 0}}, r"guidance\['cross'\] fraction must be greater than 0"),
        ({"cross": {"heads": {"period": [0]}}}, r"set guidance\['cross'\]\['period_token_ids'\]"),
        ({"cross": {"reduction": "sum"}}, r"guidance\['cross'\] reduction must be one of"),
        ({"encoder": {}, "decoder": {"share": 1}}, r"guidance\['decoder'\] has no key 'share'"),
        ({"middle": {}}, "guidance of a model with heads at several sites must name them"),
    ],
)
def test_impossible_guidance_of_a_site_is_named_at_construction(guidance, message):
    with pytest.raises(ValueError, match=message):
        tiny_config("marian", guidance=guidance)


def test_guided_heads_of_a_site_that_a_model_lacks_are_refused():
    with pytest.raises(ValueError, match="kind must be one of encoder, the sites of this model, got 'cross'"):
        tiny_config().guided_heads("cross")


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_layers_that_are_dropped_in_training_have_no_guidance(fraction):
    guided = {"heads": {"prev": [0], "first": [1]}}
    drops = {"encoder_layerdrop": fraction, "decoder_layerdrop": fraction}
    config = {**SEQ2SEQ, **drops, "guidance": {"encoder": guided, "cross": guided}, "gates": {"encoder": {}}}
    model = had.HeadwiseM2M100ForConditionalGeneration(had.HeadwiseM2M100Config(**config))
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[9, 10, 11]])}
    whole = model.eval()(**batch, output_guidance_loss=True).guidance_loss.item()
    model.train()
    torch.manual_seed(0)
    found = []
    for _ in range(12):
        noise = torch.full((sum(gate.num_gates for gate in model.head_gates().values()),), 0.5)
        outputs = model(**batch, output_guidance_loss=True, gate_noise=noise)
        assert outputs.guidance_losses.keys() == {"prev", "first"}
        found.append(outputs.guidance_loss.item())
    if fraction == 1:
        assert set(found) == {0.0}
    else:
        assert len(set(found)) > 2
        assert max(found) <= whole * 1.5


def test_bidirectional_decoders_are_not_guided_as_causal_ones():
    with pytest.raises(ValueError, match="guidance of a decoder is that of causal attention, but is_causal=False"):
        had.HeadwiseLlamaConfig(is_causal=False, guidance={"fraction": 0.5})
    assert had.HeadwiseLlamaConfig(is_causal=False).guidance is None


def test_rows_for_guidance_have_the_shape_of_the_target():
    model = tiny_model("marian", guidance={"decoder": {"fraction": 0.5}})
    ids = torch.tensor([[5, 6, 7, 8]])
    for rows in (torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 4)):
        with pytest.raises(ValueError, match=r"guidance_rows must be a boolean tensor of shape \(1, 4\)"):
            model(input_ids=ids, decoder_input_ids=ids, guidance_rows=rows, output_guidance_loss=True)


def test_weights_and_counts_that_are_incomplete_are_refused_before_the_model_runs(monkeypatch):
    guidance = {"heads": {"prev": [0], "why": [1]}, "targets": {"why": "keys"}}
    model = tiny_model("roberta", guidance=guidance)
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])}
    batch["guidance_why"] = torch.tensor([[0, 1, 2]])
    monkeypatch.setattr(type(model), "run_stock", None)
    with pytest.raises(
        ValueError, match="guidance_weight needs a weight for each name: .* lacks 'why'; a weight of 0 leaves"
    ):
        model(**batch, guidance_weight={"prev": 1.0})
    with pytest.raises(ValueError, match="the rows of guidance_why are counted, but not the sentences of the accumul"):
        model(**batch, output_guidance_loss=True, num_items_in_batch={"labels": 3, "guidance_why": 3})
