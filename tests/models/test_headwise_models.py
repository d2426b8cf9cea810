import copy
import pickle

import pytest
import torch
import transformers
from dense_guidance import dense_guidance_loss
from gradients import assert_same, gradients
from tiny_models import (
    CLASSES,
    GUIDANCE,
    KINDS,
    SIZES,
    UNEVEN,
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
)
from tiny_training import build as build_for_task
from tiny_training import collate, examples
from transformers.integrations.flex_attention import WrappedFlexAttention

import hf_attn_dynamics as had
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.headwise_attention import AttentionConfigView


def build(kind="roberta", head=None, dtype=None, **changes):
    model = tiny_model(kind, head, **changes)
    return model.to(dtype) if dtype else model


def batch(kind="roberta"):
    return batch_for(kind)


def labelled(kind="roberta"):
    """A batch with labels for the head the kind was pretrained with."""
    task = {"roberta": "MaskedLM", "bert": "PreTraining", "electra": "ReplacedTokens", "marian": "Translation"}[kind]
    return collate(list(examples(task)))


def guidance_for(kind, guidance):
    return {"encoder": guidance} if kind == "marian" else guidance


def encoder_maps(outputs):
    return outputs.get("encoder_attentions", outputs.get("attentions"))


@pytest.mark.parametrize(("kind", "head"), CLASSES)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_outputs_are_those_of_the_stock_class_bit_for_bit(kind, head, kernel):
    model = build(kind, head, attn_implementation=kernel)
    stock = stock_class(kind, head)(stock_config(kind)).eval()
    stock.set_attn_implementation(kernel)
    stock.load_state_dict(model.state_dict())
    expected = first_output(stock, kind)
    assert torch.equal(first_output(model, kind), expected)
    assert torch.equal(first_output(model, kind, output_guidance_loss=True), expected)


@pytest.mark.parametrize(("kind", "head"), CLASSES)
def test_checkpoints_load_in_both_directions(kind, head, tmp_path):
    stock = stock_class(kind, head)(stock_config(kind)).eval()
    stock.save_pretrained(tmp_path / "stock")
    ours, info = headwise_class(kind, head).from_pretrained(
        tmp_path / "stock", guidance=guidance_for(kind, GUIDANCE), output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert ours.config.model_type == f"headwise-{kind}"
    expected = first_output(stock, kind)
    assert torch.equal(first_output(ours, kind), expected)
    assert ours(**batch(kind), output_guidance_loss=True).guidance_loss > 0
    ours.save_pretrained(tmp_path / "ours")
    back = stock_class(kind, head).from_pretrained(tmp_path / "ours")
    assert torch.equal(first_output(back, kind), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_the_guidance_loss_is_that_of_the_attention_maps(kernel, reduction, kind):
    model = build(kind, dtype=torch.float64, guidance=guidance_for(kind, {**GUIDANCE, "reduction": reduction}))
    sentences = ragged_sentences()
    maps = []
    model.set_attn_implementation("eager")
    for ids in sentences:
        attentions = encoder_maps(model(**batch_for(kind, [ids]), output_attentions=True))
        maps.append((ids, torch.stack(attentions)[:, 0]))
    expected = dense_guidance_loss(maps, model.config.guided_heads(), reduction, periods=[7])
    model.set_attn_implementation(kernel)
    found = model(**batch(kind), output_guidance_loss=True).guidance_loss
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)


def test_flex_attention_serves_as_kernel(monkeypatch):
    # The kernel as it is: compiling it takes half a minute.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)
    model = build(hidden_size=64, num_hidden_layers=1)
    expected = model(**batch(), output_guidance_loss=True)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():  # it has no backward on the CPU
        found = model(**batch(), output_guidance_loss=True)
    torch.testing.assert_close(found.guidance_loss, expected.guidance_loss, rtol=1e-4, atol=0)
    real = batch()["attention_mask"].bool()
    torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_all_parameters_are_those_of_the_dense_loss(kind):
    model = build(kind, dtype=torch.float64, attn_implementation="eager")
    ids = ragged_sentences()[1]
    maps = encoder_maps(model(**batch_for(kind, [ids]), output_attentions=True))
    dense = dense_guidance_loss([(ids, torch.stack(maps)[:, 0])], model.config.guided_heads(), periods=[7])
    expected = gradients(model, dense)
    found = gradients(model, model(**batch_for(kind, [ids]), output_guidance_loss=True).guidance_loss)
    assert_same({k: found[k] for k in expected}, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_padding_on_either_side_changes_neither_logits_nor_guidance_loss(kind):
    model = build(kind, "ForMaskedLM", dtype=torch.float64)
    plain = batch(kind)
    positions = torch.arange(plain["input_ids"].shape[1])
    expected = model(**plain, output_guidance_loss=True)
    left = {name: torch.nn.functional.pad(value, (7, 0)) for name, value in plain.items()}
    found = model(**left, position_ids=torch.nn.functional.pad(positions, (7, 0))[None], output_guidance_loss=True)
    real = plain["attention_mask"].bool()
    torch.testing.assert_close(found.logits[:, 7:][real], expected.logits[real], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.guidance_loss, expected.guidance_loss, rtol=1e-9, atol=0)


def test_one_weight_is_enough_to_have_the_loss_guided():
    model, data = build(), batch()
    labels = data["input_ids"]
    plain = model(**data, labels=labels).loss
    outputs = model(**data, labels=labels, guidance_weight=torch.tensor(3.0))
    torch.testing.assert_close(outputs.loss, plain + 3 * outputs.guidance_loss)
    assert outputs.guidance_loss.dtype == torch.float32
    assert model(**data).keys() == {"logits"}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("kind", "combine"), [("roberta", "loss"), ("roberta", "guidance_loss"), *((kind, "both") for kind in KINDS)]
)
def test_gradient_checkpointing_changes_no_gradient(reentrant, combine, kind):
    model = build(kind, **no_dropout(kind)).train()
    data = labelled(kind)

    def loss():
        outputs = model(**data, output_guidance_loss=True)
        terms = {"loss": outputs.loss, "guidance_loss": outputs.guidance_loss}
        return terms["loss"] + 2.5 * terms["guidance_loss"] if combine == "both" else terms[combine]

    plain_loss = loss()
    expected = gradients(model, plain_loss)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    # The reentrant mode needs an input that requires gradients.
    model.enable_input_require_grads()
    checkpointed_loss = loss()
    torch.testing.assert_close(checkpointed_loss, plain_loss)
    found = gradients(model, checkpointed_loss)
    # Zeros reach every parameter here, where nothing reached those of the head before.
    assert_same({name: found[name] for name in expected}, expected)
    assert all((value == 0).all() for name, value in found.items() if name not in expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_every_other_layer_changes_no_gradient(reentrant):
    model, data = build(num_hidden_layers=4, **no_dropout("roberta")).train(), batch()

    def loss():
        outputs = model(**data, labels=data["input_ids"], output_guidance_loss=True)
        return outputs.loss + 2 * outputs.guidance_loss

    expected = gradients(model, loss())
    model.activation_checkpointing_enable({"use_reentrant": reentrant}, every_n_layers=2)
    model.enable_input_require_grads()
    assert_same(gradients(model, loss()), expected)


def test_two_passes_before_one_backward_keep_their_guidance_apart_under_reentrant_checkpointing():
    model = build(**no_dropout("roberta")).train()
    data = batch()

    def loss():
        first = model(**data, output_guidance_loss=True).guidance_loss
        second = model(**padded_batch(ragged_sentences(seed=1)), output_guidance_loss=True).guidance_loss
        return 2 * first + 5 * second

    expected = gradients(model, loss())
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    found = gradients(model, loss())
    assert_same({name: found[name] for name in expected}, expected)


def test_a_second_backward_over_the_same_graph_leaves_the_guidance_of_the_first_out_under_reentrant_checkpointing():
    model = build(**no_dropout("roberta")).train()
    data = labelled()
    expected = gradients(model, model(**data).loss)
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    outputs = model(**data, output_guidance_loss=True)
    outputs.guidance_loss.backward(retain_graph=True)
    assert_same(gradients(model, outputs.loss), expected)


@pytest.mark.parametrize(
    ("kind", "patterns"),
    [("roberta", ["delim", "period"]), ("electra", ["next", "prev"])],
)
def test_a_compiled_model_has_the_same_loss_and_gradients(kind, patterns):
    guidance = {"fraction": 0.5, "patterns": patterns, "period_token_ids": [7], "delimiter_token_ids": [2]}
    model = build(kind, guidance=guidance, **no_dropout(kind), num_hidden_layers=1)
    data = labelled(kind)
    outputs = model(**data, output_guidance_loss=True)
    expected = gradients(model, outputs.loss + outputs.guidance_loss)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found_outputs = compiled(**data, output_guidance_loss=True)
    torch.testing.assert_close(found_outputs.guidance_loss, outputs.guidance_loss)
    assert_same(gradients(model, found_outputs.loss + found_outputs.guidance_loss), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_training_under_autocast_keeps_the_guidance_loss_in_single_precision(kind):
    model, data = build(kind), batch(kind)
    exact = model(**data, output_guidance_loss=True).guidance_loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(**data, output_guidance_loss=True).guidance_loss
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact, rtol=1e-2, atol=0)


def test_the_configuration_keeps_the_kernel_the_user_chose():
    model = build(attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert "headwise" not in model.config.to_json_string().replace("headwise-roberta", "")
    view = model.roberta.encoder.layer[0].attention.self.config
    assert isinstance(view, AttentionConfigView)
    assert view.hidden_size == SIZES["hidden_size"]


# Attributes of outputs with maps, the number of heads, and whose tokens are the keys.
MAPS = {
    **{kind: {"attentions": (4, "attention_mask")} for kind in ("roberta", "bert", "electra")},
    "marian": {
        "encoder_attentions": (4, "attention_mask"),
        "decoder_attentions": (2, "decoder_attention_mask"),
        "cross_attentions": (2, "attention_mask"),
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_attention_maps_come_with_every_kernel(kernel, kind):
    model, data = build(kind, attn_implementation=kernel), batch(kind)
    outputs = model(**data, output_attentions=True)
    for name, (heads, keys) in MAPS[kind].items():
        maps = torch.stack(outputs[name])
        assert maps.shape[:3] == (2, 8, heads)
        torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))
        assert (maps.permute(1, 4, 0, 2, 3)[data[keys] == 0] == 0).all()
    logits = outputs.to_tuple()[0]
    torch.testing.assert_close(logits, model(**data).to_tuple()[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_attention_maps_come_while_observers_look_on(kernel, kind):
    model = build(kind, attn_implementation=kernel, guidance=None, pruned_heads=UNEVEN[kind])
    expected = model(**batch(kind), output_attentions=True)
    with had.observe(model, had.HeadConfidence()):
        found = model(**batch(kind), output_attentions=True)
    for name in MAPS[kind]:
        assert [maps.shape for maps in found[name]] == [maps.shape for maps in expected[name]]
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize(("kind", "changes"), [("roberta", {"guidance": None, "is_decoder": True}), ("marian", {})])
def test_maps_of_a_decoder_are_causal_under_sdpa(kind, changes):
    model = build(kind, "ForMaskedLM" if changes else "Model", **changes)
    outputs = model(**batch_for(kind, [[4, 5, 6, 7]]), output_attentions=True)
    attention = outputs.get("decoder_attentions", outputs.get("attentions"))[0]
    assert (attention.triu(1) == 0).all()
    assert (attention.diagonal(dim1=-2, dim2=-1) > 0).all()


def test_kernels_of_other_libraries_see_the_real_configuration():
    seen = []

    def kernel(module, query, key, value, attention_mask, **kwargs):
        seen.append((module.config._attn_implementation, module.num_attention_heads, module.layer_idx))
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )

    transformers.AttentionInterface.register("other_kernel", kernel)
    transformers.AttentionMaskInterface.register("other_kernel", transformers.masking_utils.sdpa_mask)
    model = build()
    expected = model(**batch()).logits
    model.set_attn_implementation("other_kernel")
    assert torch.equal(model(**batch()).logits, expected)
    assert seen == [("other_kernel", 4, 0), ("other_kernel", 4, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_independent_headwise_models(copied, kind):
    model = build(kind)
    twin = copied(model)
    expected = model(**batch(kind), output_guidance_loss=True)
    twin.set_attn_implementation("eager")
    for one, kernel in ((model, "sdpa"), (twin, "eager")):
        assert {layer.module.config._config._attn_implementation for layer in locate_heads(one)} == {kernel}
    found = twin(**batch(kind), output_guidance_loss=True)
    torch.testing.assert_close(found.guidance_loss, expected.guidance_loss)


def test_a_pass_that_fails_leaves_nothing_behind():
    model = build()
    expected = model(**batch(), output_guidance_loss=True).guidance_loss
    broken = model.roberta.encoder.layer[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch(), output_guidance_loss=True)
    broken.remove()
    assert torch.equal(model(**batch(), output_guidance_loss=True).guidance_loss, expected)
    modules = vars(model.roberta.encoder.layer[0].attention.self)
    assert not [name for name, value in modules.items() if torch.is_tensor(value)]


@pytest.mark.parametrize(("kind", "head"), CLASSES)
def test_tuples_and_dictionaries_hold_the_same(kind, head):
    model = build(kind, head)
    outputs = model(**batch(kind), output_guidance_loss=True)
    values = model(**batch(kind), output_guidance_loss=True, return_dict=False)
    assert isinstance(values, tuple)
    assert torch.equal(values[-1], outputs.guidance_loss)
    assert len(values) == len(outputs.to_tuple())


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_comes_first_in_a_tuple_however_it_is_formed(kind):
    model, data = build(kind), labelled(kind)
    expected = model(**data).loss
    whole = model.count_labels(data)
    for arguments in (
        {},
        {"num_items_in_batch": whole},
        {"num_items_in_batch": whole["labels"]},
        {"guidance_weight": 0.0},
    ):
        values = model(**data, **arguments, return_dict=False)
        torch.testing.assert_close(values[0], expected)


LABELLED = [
    *(("roberta", task) for task in ("MaskedLM", "SequenceClassification", "TokenClassification")),
    ("bert", "PreTraining"),
    *(("electra", task) for task in ("ReplacedTokens", "MaskedLM", "TokenClassification")),
    ("marian", "Translation"),
]


@pytest.mark.parametrize(("kind", "task"), LABELLED)
def test_losses_of_micro_batches_add_up_to_the_stock_loss_of_the_whole(kind, task):
    model = build_for_task(task, kind).eval()
    rows = list(examples(task))
    whole, micro = collate(rows), [collate(rows[:3]), collate(rows[3:])]
    stock = stock_class(kind, type(model).__name__.removeprefix(f"Headwise{kind.capitalize()}"))(stock_config(kind))
    stock.load_state_dict(model.state_dict())
    expected = stock.eval()(**whole).loss
    counts = model.count_labels(whole)
    # Some of the sentences are padded, and their labels uneven.
    assert whole["attention_mask"].min() == 0
    torch.testing.assert_close(model(**whole, num_items_in_batch=counts).loss, expected)
    torch.testing.assert_close(sum(model(**part, num_items_in_batch=counts).loss for part in micro), expected)


def test_counted_losses_of_a_model_in_double_precision_are_in_double_precision():
    task = "SequenceClassification"  # other stock losses are formed in single precision
    model, data = build_for_task(task, "roberta").eval().double(), collate(list(examples(task)))
    found = model(**data, num_items_in_batch=model.count_labels(data)).loss
    torch.testing.assert_close(found, model(**data).loss, rtol=1e-14, atol=0)


@pytest.mark.parametrize("decoder_input", [True, False])
def test_a_translator_that_is_given_labels_builds_no_cache(decoder_input):
    model, data = build("marian"), labelled("marian")
    if decoder_input:
        data["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(data["labels"])
    expected = model(**data)
    assert model(**data, num_items_in_batch=model.count_labels(data)).keys() == expected.keys()
    assert "cache" not in expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_labels_costs_nothing_under_any_count(kind):
    model, data = build(kind), labelled(kind)
    for name in ("labels", "next_sentence_label"):
        if name in data:
            data[name] = torch.full_like(data[name], -100)
    assert model(**data, num_items_in_batch=0).loss == 0


def test_embeddings_in_place_of_ids_are_guided_alike():
    model = build(guidance={"heads": {"next": [0], "first": [1]}})
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    expected = model(ids, output_guidance_loss=True).guidance_loss
    found = model(inputs_embeds=model.get_input_embeddings()(ids), output_guidance_loss=True).guidance_loss
    torch.testing.assert_close(found, expected)


def test_guidance_and_masks_do_not_depend_on_labels():
    model = build()
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    losses = [model(ids, labels=labels, output_guidance_loss=True).guidance_loss for labels in (ids, ids.flip(1))]
    assert torch.equal(*losses)


def test_counts_without_those_of_the_labels_are_refused():
    model, ids = build(), torch.tensor([[4, 5, 6]])
    with pytest.raises(ValueError, match="num_items_in_batch needs the key 'labels', got sentences; .*count_labels"):
        model(ids, labels=ids, num_items_in_batch={"sentences": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_by_position_and_by_name_is_refused(kind):
    batch = batch_for(kind, [[4, 5, 6, 7, 8]])
    with pytest.raises(TypeError, match="got 'input_ids' by position and by name"):
        build(kind)(batch["input_ids"], **batch)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"head_mask": torch.ones(2, 4)}, TypeError, "has no argument 'head_mask'; it would be ignored"),
        ({"output_guidance_los": True}, TypeError, "has no argument 'output_guidance_los'"),
        ({"guidance_weight": 1.0}, ValueError, "pass labels"),
        ({"output_guidance_loss": True, "attention_mask": torch.ones(1, 1, 5, 5)}, ValueError, r"\(batch, length\)"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_make_no_sense_are_refused(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        build(kind)(**{**batch_for(kind, [[4, 5, 6, 7, 8]]), **arguments})


FLASH_ARGUMENTS = {
    "cu_seq_lens_q": torch.tensor([0, 2, 5]),
    "cu_seq_lens_k": torch.tensor([0, 2, 5]),
    "max_length_q": 3,
    "max_length_k": 3,
    "is_causal": True,
}
# What kernels of other libraries may read besides.
KERNEL_ARGUMENTS = {**FLASH_ARGUMENTS, "seq_idx": torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flex_attention"])
def test_what_a_kernel_would_ignore_is_refused(kernel, kind):
    model, data = build(kind, attn_implementation=kernel), batch_for(kind, [[4, 5, 6, 7, 8]])
    positions = {"position_ids": torch.arange(5)[None]} if kind == "marian" else {}
    for name, value in {**KERNEL_ARGUMENTS, **positions}.items():
        with pytest.raises(
            TypeError, match=f"takes '{name}' only for kernels that read it, .*; '{kernel}' would ignore"
        ):
            model(**data, **{name: value})


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_other_libraries_get_what_they_may_read(kind):
    seen = []

    def kernel(*inputs, **kwargs):
        seen.append({name: kwargs[name] for name in KERNEL_ARGUMENTS if name in kwargs})
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(*inputs, **kwargs)

    transformers.AttentionInterface.register("packed_kernel", kernel)
    transformers.AttentionMaskInterface.register("packed_kernel", transformers.masking_utils.sdpa_mask)
    model, data = build(kind, attn_implementation="packed_kernel"), batch_for(kind, [[4, 5, 6, 7, 8]])
    model(**data, **KERNEL_ARGUMENTS)
    assert seen
    assert all(each == KERNEL_ARGUMENTS for each in seen)
    for name, value in KERNEL_ARGUMENTS.items():
        if name == "cu_seq_lens_q" and kind != "marian":
            continue  # the boundaries of packed sentences, see test_packing.py
        with pytest.raises(ValueError, match=f"guidance loss does not support {name} here: pass padded"):
            model(**data, **{name: value}, output_guidance_loss=True)


@pytest.mark.parametrize(
    ("head", "labels", "message"),
    [("ForPreTraining", "labels", "pass next_sentence_label"), ("Model", None, "HeadwiseBertModel has none")],
)
def test_a_guidance_weight_needs_every_label_of_the_loss(head, labels, message):
    ids = torch.tensor([[4, 5, 6]])
    with pytest.raises(ValueError, match=f"guidance_weight needs a task loss: {message}"):
        build("bert", head)(ids, guidance_weight=1.0, **({labels: ids} if labels else {}))


def test_a_stock_configuration_is_refused_with_the_way_to_turn_it_into_ours():
    with pytest.raises(TypeError, match="needs a HeadwiseRobertaConfig, got RobertaConfig"):
        had.HeadwiseRobertaModel(transformers.RobertaConfig(**SIZES))


def test_asking_an_unguided_model_for_its_guidance_loss_says_how_to_guide_it():
    with pytest.raises(ValueError, match=r"config.guidance is None: .* guidance="):
        build(guidance=None)(torch.tensor([[4, 5]]), output_guidance_loss=True)


@pytest.mark.parametrize(("kind", "longest"), [("roberta", 38), ("bert", 40), ("electra", 40), ("marian", 40)])
def test_sentences_longer_than_the_positions_are_refused(kind, longest):
    model = build(kind, "Model")
    model(**batch_for(kind, [[5] * longest]))
    with pytest.raises(ValueError, match=rf"has {longest + 1} tokens, but .* has positions for {longest}"):
        model(**batch_for(kind, [[5] * (longest + 1)]))
    if kind == "roberta":
        # Its padding takes no position.
        model(**padded_batch([[5] * longest], length=longest + 9))


@pytest.mark.parametrize("target", ["decoder_input_ids", "labels"])
def test_targets_longer_than_the_positions_are_refused(target):
    with pytest.raises(ValueError, match=r"the target has 41 tokens, .* has positions for 40; cut the target"):
        build("marian")(torch.tensor([[4, 5]]), **{target: torch.full((1, 41), 5)})


def test_a_translation_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="the target has 41 tokens, .* has positions for 40; .* generate fewer"):
        translate(build("marian"), [[4, 5]], min_new_tokens=41, max_new_tokens=45)


@pytest.mark.parametrize(("kind", "longest"), [("roberta", 38), ("bert", 40)])
def test_what_a_cache_holds_takes_positions(kind, longest):
    model = build(kind, "Model", guidance=None, is_decoder=True)
    ids = torch.full((1, 30), 5)
    model(ids[:, : longest - 30], cache=model(ids, use_cache=True).cache)
    with pytest.raises(ValueError, match=rf"the input has {longest + 1} tokens, but .* has positions for {longest}"):
        model(ids[:, : longest - 29], cache=model(ids, use_cache=True).cache)


def test_a_configuration_changed_after_construction_is_checked_when_the_model_is_built():
    config = tiny_config()
    config.guidance = {"heads": {"next": [9]}}
    with pytest.raises(ValueError, match="names head 9"):
        had.HeadwiseRobertaModel(config)


# ---- Translation ----


def vivid_marian():
    """With weights large enough that sentences differ in their translations."""
    return build("marian", init_std=0.5)


def translate(model, sentences, **settings):
    data = padded_batch(sentences, pad=1)
    return model.generate(**data, **{"max_new_tokens": 8, "min_new_tokens": 4, "do_sample": False, **settings})


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 4}, {"cache_implementation": "static"}, {"num_beams": 4, "num_return_sequences": 2}]
)
def test_translations_are_those_of_the_stock_model(settings):
    model = vivid_marian()
    stock = transformers.MarianMTModel(stock_config("marian")).eval()
    stock.load_state_dict(model.state_dict())
    found = translate(model, ragged_sentences(), **settings)
    assert torch.equal(found, translate(stock, ragged_sentences(), **settings))
    assert len(found.unique(dim=0)) > 4


@pytest.mark.parametrize("beams", [1, 4])
def test_translations_depend_neither_on_the_cache_nor_on_the_batch(beams):
    model, sentences = vivid_marian(), ragged_sentences()
    expected = translate(model, sentences, num_beams=beams)
    assert torch.equal(translate(model, sentences, num_beams=beams, use_cache=False), expected)
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    assert torch.equal(translate(model, [sentences[i] for i in order], num_beams=beams), expected[order])
    for ids, row in zip(sentences, expected):
        alone = translate(model, [ids], num_beams=beams)[0]
        assert torch.equal(alone, row[: len(alone)])
        assert (row[len(alone) :] == model.config.pad_token_id).all()


@pytest.mark.parametrize("with_ids", [True, False])
def test_an_encoder_that_does_not_run_is_not_guided(with_ids):
    model, data = build("marian", gates={"cross": {}}), batch("marian")
    expected = model(**data, output_gate_penalty=True)
    data["encoder_outputs"] = model.get_encoder()(data["input_ids"], data["attention_mask"])
    if not with_ids:
        del data["input_ids"]
    found = model(**data, output_gate_penalty=True)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.gate_penalty, expected.gate_penalty)
    with pytest.raises(ValueError, match="with encoder_outputs the encoder does not run: pass input_ids"):
        model(**data, output_guidance_loss=True)
