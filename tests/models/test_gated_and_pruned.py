"""Gates, guidance and removed heads in one model: they agree with each other, and survive saving and training."""

import json

import pytest
import torch
import transformers
from tiny_models import (
    ALL_GATES,
    GUIDANCE,
    KINDS,
    PAD,
    PRETRAINED,
    UNEVEN,
    assert_same_in_a_fresh_process,
    batch_for,
    first_output,
    headwise_class,
    no_dropout,
    padded_batch,
    ragged_sentences,
    sizes,
    stock_class,
    stock_config,
    tiny_model,
    vivid,
)
from tiny_training import collate, examples

import hf_attn_dynamics as had
from hf_attn_dynamics.models.head_sites import config_value, heads_by_site, kinds_of


AUTO = {
    "roberta": "AutoModelForMaskedLM",
    "bert": "AutoModelForPreTraining",
    "electra": "AutoModelForPreTraining",
    "marian": "AutoModelForSeq2SeqLM",
}
TASKS = {"roberta": "MaskedLM", "bert": "PreTraining", "electra": "ReplacedTokens", "marian": "Translation"}


def build(kind, **changes):
    return vivid(tiny_model(kind, **{"guidance": None, **changes}))


def removed_heads(model, chosen):
    return heads_by_site(chosen, model.config.attention_sites(), "chosen")


@torch.no_grad()
def close(model, chosen, opened=3.0):
    """Closes the gates of these heads, opens all others."""
    removed = removed_heads(model, chosen)
    for site, gate in model.head_gates().items():
        gate.log_alpha.fill_(opened)
        gate.log_alpha[removed.get(site, [])] = -3.0
    return model


def silenced(kind, chosen=None, **changes):
    """The reference: a model with all heads, of which gates keep some from saying anything."""
    model = build(kind, gates=ALL_GATES[kind], **changes)
    return close(model, UNEVEN[kind] if chosen is None else chosen)


def without_gates(model):
    return {name: value for name, value in model.state_dict().items() if "log_alpha" not in name}


def pruned(kind, chosen=None, **changes):
    """The same weights, with the heads removed."""
    model = build(kind, **changes)
    return had.prune_heads(model, UNEVEN[kind] if chosen is None else chosen)


def assert_same_output(found, expected, kind, **tolerances):
    tolerances = tolerances or {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(first_output(found, kind), first_output(expected, kind), **tolerances)


# ---- Three ways to be without heads ----


@pytest.mark.parametrize("kind", KINDS)
def test_closed_gates_removed_heads_and_a_pruned_stock_model_agree(kind):
    reference = silenced(kind).double()
    model = build(kind)
    dense = first_output(model.double(), kind)
    stock = stock_class(kind, PRETRAINED[kind])(stock_config(kind)).double().eval()
    stock.load_state_dict(without_gates(reference))
    exactly = {"rtol": 1e-9, "atol": 1e-9}
    assert_same_output(had.prune_heads(model, UNEVEN[kind]), reference, kind, **exactly)
    assert_same_output(had.prune_heads(stock, UNEVEN[kind]), reference, kind, **exactly)
    built = tiny_model(kind, pruned_heads=UNEVEN[kind], guidance=None).double()
    built.load_state_dict(model.state_dict())
    assert torch.equal(first_output(built, kind), first_output(model, kind))
    # The heads mattered.
    assert (dense - first_output(reference, kind)).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("evaluation", ["binary", "fractional"])
def test_removing_closed_gates_changes_no_output(evaluation, kind, tmp_path):
    gates = {"evaluation": evaluation}
    gates = dict.fromkeys(ALL_GATES[kind], gates) or gates
    model = build(kind, gates=gates).double()
    close(model, UNEVEN[kind])
    generator = torch.Generator().manual_seed(1)
    for gate in model.head_gates().values():
        # Open gates in training's range, where fractional ones lie between 0 and 1.
        spread = torch.rand(len(gate.log_alpha), generator=generator, dtype=torch.float64)
        gate.log_alpha.data = torch.where(gate.log_alpha > 0, 0.1 + spread, gate.log_alpha)
    expected = first_output(model, kind)
    settled = torch.cat([gate.settled() for gate in model.head_gates().values()])
    assert bool(((settled > 0) & (settled < 1)).any()) == (evaluation == "fractional")
    assert had.prune_closed_gates(model) is model
    torch.testing.assert_close(first_output(model, kind), expected, rtol=1e-10, atol=1e-10)
    assert (model.head_gates(), model.config.gates, model.config.pruned_heads) == ({}, None, UNEVEN[kind])
    assert not [name for name in model.state_dict() if "gate" in name]
    model.save_pretrained(tmp_path)
    back = getattr(transformers, AUTO[kind]).from_pretrained(tmp_path, dtype="auto")
    torch.testing.assert_close(first_output(back, kind), expected, rtol=1e-10, atol=1e-10)


def test_gates_of_one_site_leave_the_other_sites_alone():
    model = build("marian", gates={"cross": {}})
    close(model, {"cross": {1: [0, 1]}})
    expected = first_output(model, "marian")
    had.prune_closed_gates(model)
    assert model.config.pruned_heads == {"cross": {1: [0, 1]}}
    torch.testing.assert_close(first_output(model, "marian"), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_removing_heads_in_steps_adds_up_and_gates_stay_with_their_heads(kind):
    at_once, in_steps = (build(kind, gates=ALL_GATES[kind]) for _ in range(2))
    for model in (at_once, in_steps):
        for gate in model.head_gates().values():
            gate.log_alpha.data = torch.arange(len(gate.log_alpha)).float() + 1
    removed = removed_heads(at_once, UNEVEN[kind])
    had.prune_heads(at_once, UNEVEN[kind])
    for part in (slice(-1, None), slice(0, -1)):
        step = {site: heads[part] for site, heads in removed.items()}
        had.prune_heads(in_steps, config_value(step, kinds_of(in_steps.config.attention_sites())))
    assert in_steps.config.pruned_heads == at_once.config.pruned_heads == UNEVEN[kind]
    for site, heads in at_once.config.kept_heads().items():
        for model in (at_once, in_steps):
            assert model.head_gates()[site].log_alpha.tolist() == [head + 1 for head in heads]
    assert torch.equal(first_output(in_steps, kind), first_output(at_once, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_built_with_both_has_a_gate_for_each_head_that_is_left(kind):
    model = build(kind, gates=ALL_GATES[kind], pruned_heads=UNEVEN[kind])
    kept = model.config.kept_heads()
    assert {site: len(gate.log_alpha) for site, gate in model.head_gates().items()} == {
        site: len(heads) for site, heads in kept.items()
    }
    left = sum(map(len, kept.values()))
    penalty = model(**batch_for(kind), output_gate_penalty=True).gate_penalty
    torch.testing.assert_close(penalty, left * had.expected_open_heads(torch.tensor([2.5])))
    with pytest.raises(ValueError, match=rf"gate_noise must have shape \({left},\), one for each gate, got \(99,\)"):
        model.train()(**batch_for(kind), gate_noise=torch.rand(99))
    # Distributed training waits for every parameter's gradient.
    assert all(parameter.numel() for parameter in model.parameters())
    # Open gates change nothing.
    plain = build(kind, pruned_heads=UNEVEN[kind])
    plain.load_state_dict(without_gates(model))
    assert torch.equal(first_output(plain, kind), first_output(model.eval(), kind))


# ---- Guidance ----


def in_encoder(kind, value):
    return {"encoder": value} if kind == "marian" else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
def test_guided_heads_keep_their_numbers_when_others_are_removed(reduction, kind):
    gone, left = {0: [0, 2]}, {0: {"next": [1], "first": [3]}, 1: {"next": [0, 1], "first": [2, 3]}}
    common = {"reduction": reduction}
    model = pruned(
        kind, in_encoder(kind, gone), guidance=in_encoder(kind, {**common, "heads": {"next": [0, 1], "first": [2, 3]}})
    )
    reference = silenced(kind, in_encoder(kind, gone), guidance=in_encoder(kind, {**common, "heads": left}))
    assert model.config.guided_heads() == left
    data = batch_for(kind)
    found, expected = (one(**data, output_guidance_loss=True).guidance_loss for one in (model, reference))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    found.backward()
    expected.backward()
    embeddings = [one.get_input_embeddings().weight.grad for one in (model, reference)]
    assert embeddings[1].abs().max() > 1e-3
    torch.testing.assert_close(*embeddings, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_guided_head_left_the_guidance_loss_is_zero(kind):
    guidance = in_encoder(kind, {"heads": {0: {"next": [0], "prev": [1]}}})
    model = pruned(kind, in_encoder(kind, {0: [0, 1], 1: [3]}), guidance=guidance)
    data = collate(list(examples(TASKS[kind])))
    outputs = model(**data, guidance_weight=3.0)
    assert outputs.guidance_loss == 0
    torch.testing.assert_close(outputs.loss, model(**data).loss)
    outputs.loss.backward()


# ---- Saved and loaded ----


def everything(kind, **changes):
    """A model with guided, gated and removed heads, some gates of which are closed."""
    guidance = in_encoder(kind, GUIDANCE)
    model = build(kind, gates=ALL_GATES[kind], guidance=guidance, pruned_heads=UNEVEN[kind], **changes)
    gate = next(gate for gate in model.head_gates().values() if len(gate.log_alpha) > 1)
    gate.log_alpha.data[0] = -1.0
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_is_said_of_heads_comes_back_by_class_and_by_auto_class(dtype, kind, tmp_path):
    everything(kind).save_pretrained(tmp_path / "exact")
    model = headwise_class(kind, PRETRAINED[kind]).from_pretrained(tmp_path / "exact", dtype=dtype)
    model.save_pretrained(tmp_path, max_shard_size="3kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for load in (type(model), getattr(transformers, AUTO[kind])):
        back, info = load.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert type(back) is type(model)
        assert back.dtype == dtype
        assert torch.equal(first_output(back, kind), first_output(model, kind))
        for name in ("guidance", "gates", "pruned_heads"):
            assert getattr(back.config, name) == getattr(model.config, name)
        state = back.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert {name for name, _ in back.named_parameters()} == {name for name, _ in model.named_parameters()}
        assert {gate.log_alpha.dtype for gate in back.head_gates().values()} == {torch.float32}
    body = transformers.AutoModel.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(first_output(body, kind), first_output(model.base_model, kind))


@pytest.mark.parametrize("package", [True, False])
def test_a_fresh_process_gives_the_same_with_the_package_and_with_the_saved_code_alone(package, tmp_path):
    asked = {"output_guidance_loss": True, "output_gate_penalty": True}
    checkpoints = []
    for kind in KINDS:
        model = everything(kind)
        model.save_pretrained(tmp_path / kind)
        checkpoints.append((model, tmp_path / kind, AUTO[kind], kind, asked))
    assert_same_in_a_fresh_process(checkpoints, package)


def write_config(folder, **changes):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize("empty_weights", [True, False])
def test_a_checkpoint_of_transformers_4_loads_by_the_headwise_class(empty_weights, tmp_path):
    model = pruned("bert")
    stock = transformers.BertForPreTraining(stock_config("bert"))
    stock.save_pretrained(tmp_path)
    state = model.state_dict()
    if empty_weights:
        # Version 4 kept projections of width zero.
        for name in ("query", "key", "value"):
            where = f"bert.encoder.layer.1.attention.self.{name}"
            state |= {f"{where}.weight": torch.empty(0, 16), f"{where}.bias": torch.empty(0)}
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    write_config(tmp_path, pruned_heads={"0": [1, 2], "1": [0, 1, 2, 3]}, transformers_version="4.30.0")
    back = had.HeadwiseBertForPreTraining.from_pretrained(tmp_path, guidance=GUIDANCE)
    assert (back.config.model_type, back.config.pruned_heads) == ("headwise-bert", UNEVEN["bert"])
    assert torch.equal(first_output(back, "bert"), first_output(model, "bert"))
    # Head 0 of the first layer is followed by head 3.
    assert back.config.guided_heads() == {0: {"next": [0], "period": [3]}}
    assert back(**batch_for("bert"), output_guidance_loss=True).guidance_loss > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pruned_heads": None}, r"pruned_heads None: .*dense.weight has shape \(16, 8\), but should have \(16, 16\)"),
        (
            {"pruned_heads": {"0": [1], "1": [0, 1, 2, 3]}},
            r"shape \(16, 8\), but should have \(16, 12\).* call prune_h",
        ),
        ({"pruned_heads": {"0": [1, 2], "1": [3]}}, r"has shape \(16, 0\), but should have \(16, 12\)"),
        ({"pruned_heads": {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}}, r"shape \(16, 8\), but should have \(16, 0\)"),
        ({"num_hidden_layers": 3}, r"pruned_heads \{0: \[1, 2\], .*: roberta.encoder.layer.2.attention.* is missing"),
        (
            {"pruned_heads": {"0": [4]}},
            r"pruned_heads \(layer 0\) names head 4, but the heads of this layer are 0 to 3",
        ),
    ],
)
@pytest.mark.parametrize("ignored", [True, False])
def test_weights_that_do_not_fit_the_removed_heads_are_never_made_up(changes, message, ignored, tmp_path):
    pruned("roberta").save_pretrained(tmp_path)
    write_config(tmp_path, **changes)
    for load in (had.HeadwiseRobertaForMaskedLM, transformers.AutoModelForMaskedLM):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path, ignore_mismatched_sizes=ignored)


def test_heads_are_not_removed_by_a_keyword_of_from_pretrained(tmp_path):
    build("roberta").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"To remove heads from a model, load it as it is and call prune_heads\(\)"):
        had.HeadwiseRobertaForMaskedLM.from_pretrained(tmp_path, pruned_heads={0: [1]})


def test_weights_outside_attention_may_be_begun_anew(tmp_path):
    model = vivid(tiny_model("roberta", "ForSequenceClassification", pruned_heads=UNEVEN["roberta"], num_labels=3))
    model.save_pretrained(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"classifier.out_proj.bias has shape \(3,\) .* ignore_mismatched_sizes=True"
    ):
        type(model).from_pretrained(tmp_path, num_labels=5)
    back, info = type(model).from_pretrained(
        tmp_path, num_labels=5, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {name for name, *_ in info["mismatched_keys"]} == {"classifier.out_proj.bias", "classifier.out_proj.weight"}
    assert torch.equal(first_output(back.roberta, "roberta"), first_output(model.roberta, "roberta"))
    # A new head on a pruned body.
    other = had.HeadwiseRobertaForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(first_output(other.roberta, "roberta"), first_output(model.roberta, "roberta"))


@pytest.mark.parametrize("size", [5, 200, -1])
def test_damaged_weights_are_named(size, tmp_path):
    pruned("roberta").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"the weights in {tmp_path} are damaged, copy or download them again"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_gates_are_never_left_out_of_a_loaded_body(kind, tmp_path):
    # The body of a gated model is of a stock class, and says so in its config.json.
    silenced(kind).base_model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"have gates \(encoder.layer.0.*log_alpha\), which .* would ignore: .*an Auto class"
    ):
        had.load_pruned(tmp_path)
    assert transformers.AutoModel.from_pretrained(tmp_path).head_gates()


def test_a_headwise_body_in_another_model_hands_its_configuration_on(tmp_path):
    decoder = transformers.BertLMHeadModel(stock_config("bert", is_decoder=True, add_cross_attention=True))
    encoder = vivid(tiny_model("bert", "Model", guidance=None, gates={"evaluation": "fractional"}))
    close(encoder, UNEVEN["bert"], opened=0.3)
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=vivid(decoder)).eval()
    batch = batch_for("bert")
    batch["decoder_input_ids"] = batch["input_ids"]
    with torch.no_grad():
        expected = model(**batch).logits
        model.config.encoder = had.prune_closed_gates(model.encoder).config
        model.save_pretrained(tmp_path)
        back = transformers.EncoderDecoderModel.from_pretrained(tmp_path)
        torch.testing.assert_close(back(**batch).logits, expected, rtol=1e-5, atol=1e-5)


# ---- Trained ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_gradient_of_gated_and_pruned_models(reentrant, kind):
    model = everything(kind, **no_dropout(kind)).train()
    data = collate(list(examples(TASKS[kind])))
    noise = torch.rand(sum(len(gate.log_alpha) for gate in model.head_gates().values()))

    def gradients():
        model.zero_grad()
        model(**data, guidance_weight=2.0, gate_penalty_weight=0.5, gate_noise=noise).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    # The pooler, for instance, has no part in the loss.
    used = {name for name, _ in model.named_parameters() if ".attention." in name or "_attn" in name}
    assert used <= expected.keys()
    assert all(expected[name].abs().max() > 0 for name in used if not name.endswith("k_proj.bias"))
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_a_pruned_model_is_that_of_the_model_whose_gates_are_closed(kind):
    model, reference = pruned(kind, **no_dropout(kind)), silenced(kind, **no_dropout(kind))
    data = collate(list(examples(TASKS[kind])))
    for one in (model, reference):
        optimizer = torch.optim.SGD([p for n, p in one.named_parameters() if "log_alpha" not in n], lr=0.1)
        one(**data).loss.backward()
        optimizer.step()
    before = build(kind)
    assert (first_output(before, kind) - first_output(reference, kind)).abs().max() > 1e-2
    assert_same_output(model, reference, kind, rtol=1e-4, atol=1e-4)


# ---- Used ----


@pytest.mark.parametrize(
    "chosen", [{"encoder": {0: [0, 1, 2, 3]}}, {"decoder": {0: [0, 1]}}, {"cross": {0: [0, 1]}}, UNEVEN["marian"]]
)
@pytest.mark.parametrize("beams", [1, 4])
def test_translations_without_heads_are_those_of_closed_gates_whatever_the_cache(chosen, beams):
    model, reference = pruned("marian", chosen), silenced("marian", chosen)
    data = padded_batch(ragged_sentences(), pad=PAD["marian"])
    settings = {"max_new_tokens": 8, "min_new_tokens": 4, "do_sample": False, "num_beams": beams}
    # So small a model repeats itself otherwise.
    settings["no_repeat_ngram_size"] = 1
    expected = reference.generate(**data, **settings)
    assert len(expected.unique(dim=0)) > 4
    for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(**data, **settings, **cache), expected)


def test_a_pipeline_runs_a_pruned_model(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "here"]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    model = had.prune_heads(vivid(tiny_model("bert", "ForMaskedLM", vocab_size=9, guidance=None)), UNEVEN["bert"])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    answer = transformers.pipeline("fill-mask", model=str(tmp_path))("the [MASK] sat", top_k=9)
    with torch.no_grad():
        expected = model(**tokenizer("the [MASK] sat", return_tensors="pt")).logits[0, 2].softmax(-1)
    assert {each["token"]: each["score"] for each in answer} == pytest.approx(dict(enumerate(expected.tolist())), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_of_a_pruned_model_can_be_resized(kind, tmp_path):
    model = everything(kind)
    before = first_output(model, kind)
    model.resize_token_embeddings(sizes(kind)["vocab_size"] + 3)
    after = first_output(model, kind)
    torch.testing.assert_close(after[..., : before.shape[-1]], before, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    back = headwise_class(kind, PRETRAINED[kind]).from_pretrained(tmp_path)
    assert back.config.vocab_size == sizes(kind)["vocab_size"] + 3
    assert torch.equal(first_output(back, kind), after)
