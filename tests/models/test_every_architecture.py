# Licensed under the Apache License, Version 2.0.
"""Every architecture of the catalogue: guidance, gates, and checkpoints, held against the stock model."""

import copy
import pickle

import pytest
import torch
import transformers
from dense_distillation import dense_distillation_loss
from dense_guidance import dense_guidance_loss, dense_target_loss
from stock_models import STOCK_MODELS, build_stock, stock_inputs
from tiny_models import vivid
from torch.nn.functional import pad

import hf_attn_dynamics as had
from hf_attn_dynamics.models.architectures import ARCHITECTURES
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.head_sites import HeadSite, kinds_of
from hf_attn_dynamics.models.teacher_settings import TeacherSettings
from hf_attn_dynamics.training import Teacher


NAMES = [
    name
    for name, (_, config_class, _) in STOCK_MODELS.items()
    if getattr(transformers, config_class).model_type in ARCHITECTURES
]
BIASED = ("deberta", "deberta-v2", "deberta-v3", "mpnet", "mt5", "t5")
GUIDED = [name for name in NAMES if name not in (*BIASED, "gpt2-cross")]
PATTERNS = {"encoder": ["next", "prev", "first"], "decoder": ["prev", "first"], "cross": ["self", "prev", "first"]}


def headwise(name, **heads):
    """The headwise model of a stock one with random weights, in double precision."""
    stock = build_stock(name).double()
    cls = getattr(had, f"Headwise{type(stock).__name__}")
    settings = {**STOCK_MODELS[name][2], **heads}
    model = cls(cls.config_class(**settings, attn_implementation="eager")).double().eval()
    model.load_state_dict(stock.state_dict(), strict=False)
    return stock, model


def by_kind(name, value):
    """A value for each kind of site of a model, as its configuration has it."""
    kinds = kinds_of({layer.site: 1 for layer in locate_heads(build_stock(name))})
    return {kind: value(kind) for kind in kinds} if len(kinds) > 1 else value(kinds[0])


def inputs_of(name, model):
    return {key: v.double() if v.is_floating_point() else v for key, v in stock_inputs(model).items()}


def maps_of(outputs, site, sites):
    """Attention of one site, of shape (passes, batch, heads, rows, keys): layers may share their weights."""
    names = {"encoder": ("encoder_attentions", "attentions"), "decoder": ("decoder_attentions", "attentions")}
    for field in names.get(site.kind, ("cross_attentions",)):
        if outputs.get(field) is not None:
            return outputs[field][site.layer :: sites]
    raise AssertionError(site)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_weights_are_those_of_the_stock_model(name):
    stock, model = headwise(name)
    inputs = inputs_of(name, stock)
    with torch.no_grad():
        stock.set_attn_implementation("eager")
        expected, found = stock(**inputs), model(**inputs)
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert torch.equal(found[key], value), key
    assert model.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize("name", GUIDED)
def test_the_guidance_loss_is_the_dense_one(name):
    acts_as = {"encoder": "decoder"} if name == "clip-text" else {}
    guidance = by_kind(name, lambda kind: {"fraction": 0.75, "patterns": PATTERNS[acts_as.get(kind, kind)]})
    _, model = headwise(name, guidance=guidance)
    inputs = inputs_of(name, model)
    whole = model(**inputs, output_guidance_loss=True).guidance_loss
    expected, sentences = 0.0, len(next(iter(inputs.values())))
    for row in range(sentences):
        length = {"input_ids": inputs["attention_mask"][row].sum()} if "attention_mask" in inputs else {}
        alone = {
            key: value[row : row + 1, : length.get("input_ids", value.shape[1])]
            if key in ("input_ids", "attention_mask")
            else value[row : row + 1]
            for key, value in inputs.items()
        }
        with torch.no_grad():
            outputs = model(**alone, output_attentions=True)
        layers = locate_heads(model)
        for layer in layers:
            layout = model.config.guided_heads(layer.site.kind)[layer.site.layer]
            maps = maps_of(outputs, layer.site, sum(one.site.kind == layer.site.kind for one in layers))
            kwargs = {"causal": layer.site.kind == "decoder" or name == "clip-text"}
            kwargs["window"] = getattr(layer.module, "sliding_window", None)
            if name in ("mistral", "mixtral", "starcoder2"):
                kwargs["window"] = model.config.sliding_window
            for attention in maps:
                ids = [0] * attention.shape[-1]
                expected += float(dense_guidance_loss([(ids, attention)], {0: layout}, **kwargs)) / sentences
    # Eager attention takes its softmax in single precision.
    torch.testing.assert_close(whole, torch.tensor(expected, dtype=whole.dtype), rtol=1e-6, atol=0)


def targets_of(kind, shape, counts, generator):
    """Columns of a batch with the targets of one kind of site, and their matrices for each sentence.

    Args:
        shape: Batch, rows and keys.
        counts: Number of rows and of keys of each sentence.
    """
    keys, weights = torch.full(shape[:2], -100), torch.zeros(shape[0], shape[2])
    matrices = []
    for sentence, (rows, of_keys) in enumerate(counts):
        chosen = torch.randint(of_keys, (rows,), generator=generator)
        chosen[1::3] = -100
        keys[sentence, :rows] = chosen
        weights[sentence, :of_keys:2] = 1.0
        dense = torch.zeros(rows, of_keys, dtype=torch.float64)
        dense[torch.arange(rows)[chosen >= 0], chosen[chosen >= 0]] = 1
        whole = weights[sentence, :of_keys].double()
        matrices.append({f"{kind}_key": dense, f"{kind}_all": (whole / whole.sum()).expand(rows, of_keys)})
    return {f"guidance_{kind}_key": keys, f"guidance_{kind}_all": weights}, matrices


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("name", GUIDED)
def test_guidance_to_targets_of_the_batch_is_the_dense_one(name, kernel):
    losses = {"key": "squared", "all": "mass"} if kernel == "eager" else {"key": "cross_entropy", "all": "avoid"}

    def guidance_of(kind):
        return {
            "heads": {f"{kind}_key": [1], f"{kind}_all": [0]},
            "targets": {f"{kind}_key": "keys", f"{kind}_all": "weights"},
            "loss": {f"{kind}_{end}": loss for end, loss in losses.items()},
        }

    _, model = headwise(name, guidance=by_kind(name, guidance_of))
    inputs, generator = inputs_of(name, model), torch.Generator().manual_seed(0)
    layers = locate_heads(model)
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    columns, matrices, expected = {}, {}, 0.0
    real = inputs["attention_mask"].sum(1).tolist() if "attention_mask" in inputs else None
    for layer in layers:
        kind = layer.site.kind
        maps = maps_of(outputs, layer.site, sum(one.site.kind == kind for one in layers))
        batch, _, num_rows, num_keys = maps[0].shape
        # The encoder, whose keys are padded, is attended to by a decoder without padding.
        own = kind == "encoder" or "decoder_input_ids" not in inputs
        rows = real if own and real else [num_rows] * batch
        padded_keys = real and not (kind == "decoder" and not own) and not (kind == "cross" and own)
        keys = real if padded_keys else [num_keys] * batch
        if kind not in matrices:
            shape = batch, num_rows, num_keys
            found, matrices[kind] = targets_of(kind, shape, list(zip(rows, keys)), generator)
            columns |= found
        kwargs = {"causal": kind == "decoder" or name == "clip-text"}
        kwargs["window"] = getattr(layer.module, "sliding_window", None)
        if name in ("mistral", "mixtral", "starcoder2"):
            kwargs["window"] = model.config.sliding_window
        for attention in maps:
            sentences = [
                (attention[None, row, :, : rows[row], : keys[row]], list(range(rows[row])), matrices[kind][row])
                for row in range(batch)
            ]
            layout = {0: model.config.guided_heads(kind)[layer.site.layer]}
            of_kind = {f"{kind}_{end}": loss for end, loss in losses.items()}
            weights = {f"{kind}_all": 0.5}
            expected += float(dense_target_loss(sentences, layout, of_kind, **kwargs, weights=weights))
    # Neither capped scores nor sinks are supported by the kernel `sdpa`.
    model.set_attn_implementation("eager" if name in ("gemma2", "gpt-oss") else kernel)
    with torch.no_grad():
        outputs = model(**inputs, **columns, output_guidance_loss=True)
        assert "guidance_loss" not in model(**inputs, **columns)
    by_name = outputs.guidance_losses
    torch.testing.assert_close(sum(by_name.values()), outputs.guidance_loss)
    found = sum(loss * (0.5 if name.endswith("_all") else 1) for name, loss in by_name.items())
    # Eager attention takes its softmax in single precision.
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=2e-6, atol=0)
    counts = model.count_guided_rows({**inputs, **columns})
    assert counts.keys() == columns.keys()
    for column, count in counts.items():
        kind, _, end = column.removeprefix("guidance_").rpartition("_")
        assert count == sum((one[f"{kind}_{end}"].sum(-1) > 0).sum() for one in matrices[kind])


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("name", GUIDED)
def test_what_is_learned_from_a_teacher_is_the_dense_divergence(name, kernel):
    loss = "kl" if kernel == "eager" else "squared"
    sites = [layer.site for layer in locate_heads(build_stock(name))]

    def guidance_of(kind):
        # Heads of the first layer of a teacher with other weights, in another order.
        layers = {site.layer: 0 for site in sites if site.kind == kind}
        return {"teacher": {"layers": layers, "heads": {0: 1, 1: 0}, "loss": loss}}

    _, model = headwise(name, guidance=by_kind(name, guidance_of))
    torch.manual_seed(1)
    teacher = vivid(build_stock(name), seed=1).double().eval()
    inputs = inputs_of(name, model)
    if name == "gpt-oss":
        with pytest.raises(ValueError, match="distillation of attention does not support the attention sinks"):
            Teacher(teacher, model)(inputs)
        return
    with torch.no_grad():
        attention = Teacher(teacher, model)(inputs).attention
        model.set_attn_implementation("eager")
        teacher.set_attn_implementation("eager")
        own, others = (one(**inputs, output_attentions=True) for one in (model, teacher))
    layers, expected = locate_heads(model), 0.0
    real = inputs["attention_mask"].sum(1).tolist() if "attention_mask" in inputs else None
    for layer in layers:
        kind = layer.site.kind
        number = sum(one.site.kind == kind for one in layers)
        maps, of_teacher = maps_of(own, layer.site, number), maps_of(others, HeadSite(kind, 0), number)[0]
        batch, _, num_rows, num_keys = of_teacher.shape
        is_own = kind == "encoder" or "decoder_input_ids" not in inputs
        rows = real if is_own and real else [num_rows] * batch
        padded_keys = real and not (kind == "decoder" and not is_own) and not (kind == "cross" and is_own)
        keys = real if padded_keys else [num_keys] * batch
        for one in maps:
            sentences = [
                (one[i, :2, :, : keys[i]].double(), of_teacher[i, [1, 0], :, : keys[i]].double(), range(rows[i]))
                for i in range(batch)
            ]
            expected += float(dense_distillation_loss(sentences, loss))
    model.set_attn_implementation("eager" if name == "gemma2" else kernel)
    with torch.no_grad():
        found = model(**inputs, teacher_attention=attention, output_guidance_loss=True).guidance_loss
    # Eager attention takes its softmax in single precision.
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", BIASED)
def test_teachers_whose_attention_does_not_follow_from_queries_and_keys_are_refused(name):
    teacher = build_stock(name)
    message = "adds relative positions to the scores|computes attention by itself"
    with pytest.raises(ValueError, match=message):
        Teacher(teacher, teacher, {"encoder": TeacherSettings.from_dict({"layers": {0: 0}}, "encoder", [4])})


@pytest.mark.parametrize("name", BIASED)
def test_guidance_of_scores_with_position_biases_is_refused(name):
    with pytest.raises(ValueError, match="Attention adds relative positions to its scores"):
        headwise(name, guidance=by_kind(name, lambda kind: {}))


@pytest.mark.parametrize("name", NAMES)
def test_closed_gates_are_removed_heads(name):
    _, model = headwise(name, gates=by_kind(name, lambda kind: {}))
    inputs = inputs_of(name, model)
    for number, gate in enumerate(model.head_gates().values()):
        gate.log_alpha.data[number % len(gate.log_alpha)] = -3.0
    with torch.no_grad():
        gated = model(**inputs)
        pruned = had.prune_closed_gates(model)(**inputs)
    for key, value in gated.items():
        if torch.is_tensor(value) and value.is_floating_point():
            torch.testing.assert_close(pruned[key], value, rtol=1e-9, atol=1e-10)
    sizes = {layer.site: layer.group_size for layer in locate_heads(model)}
    assert all(len(layer.heads) == layer.num_heads - sizes[layer.site] for layer in locate_heads(model))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_gate(name):
    _, model = headwise(name, gates=by_kind(name, lambda kind: {}))
    model.train()
    outputs = model(**inputs_of(name, model), output_gate_penalty=True)
    tensor = next(value for value in outputs.values() if torch.is_tensor(value) and value.is_floating_point())
    (tensor.square().mean() + 0.1 * outputs.gate_penalty).backward()
    for site, gate in model.head_gates().items():
        assert gate.log_alpha.grad.abs().min() > 0, site


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_comes_back_through_auto_classes(name, tmp_path):
    _, model = headwise(name, gates=by_kind(name, lambda kind: {}))
    inputs = inputs_of(name, model)
    layer = locate_heads(model)[0]
    kind, group = layer.site.kind, layer.groups()[1]
    heads = {layer.site.layer: group}
    had.prune_heads(model, heads if len({one.site.kind for one in locate_heads(model)}) == 1 else {kind: heads})
    model.save_pretrained(tmp_path)
    auto = next(auto for auto, cls in model.config.code_map().items() if cls.endswith(f".{type(model).__name__}"))
    # Weights are those of single precision, in which some models hold constants.
    # As here, experts of mixtures are computed one by one: a configuration does not write that down.
    experts = {"experts_implementation": "eager"} if "experts_implementation" in STOCK_MODELS[name][2] else {}
    back = getattr(transformers, auto).from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, **experts
    )
    assert type(back) is type(model)
    with torch.no_grad():
        expected, found = model(**inputs), back.double()(**inputs)
    for key, value in expected.items():
        if torch.is_tensor(value) and value.is_floating_point():
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_a_stock_checkpoint_loads_and_goes_back(name, tmp_path):
    stock = build_stock(name)
    cls = getattr(had, f"Headwise{type(stock).__name__}")
    stock.save_pretrained(tmp_path / "stock")
    model, info = cls.from_pretrained(tmp_path / "stock", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    model.save_pretrained(tmp_path / "ours")
    back, info = type(stock).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    for found in (model, back):
        assert all(torch.equal(found.state_dict()[key], value) for key, value in stock.state_dict().items())


@pytest.mark.parametrize("name", ["clip-vision", "gpt2", "t5", "whisper"])
def test_weights_that_a_checkpoint_lacks_are_drawn_as_those_of_the_stock_model(name):
    stock = type(build_stock(name))
    spreads = []
    for cls in (stock, getattr(had, f"Headwise{stock.__name__}")):
        torch.manual_seed(0)
        config = cls.config_class(**STOCK_MODELS[name][2])
        drawn = cls.from_pretrained(None, config=config, state_dict={}).state_dict()
        spreads.append(torch.stack([value.std() for value in drawn.values() if value.dim() > 1]))
    torch.testing.assert_close(*spreads, rtol=0.3, atol=0)


@pytest.mark.parametrize("name", ["BartForSequenceClassification", "T5ForSequenceClassification"])
def test_an_encoder_decoder_that_classifies_takes_classes(name):
    settings = STOCK_MODELS[name.partition("For")[0].lower()][2]
    stock = getattr(transformers, name)
    model = getattr(had, f"Headwise{name}")
    model = model(model.config_class(**settings, gates={"encoder": {}})).eval()
    stock = stock(stock.config_class(**settings)).eval()
    stock.load_state_dict(model.state_dict(), strict=False)
    ids = torch.tensor([[5, 6, 7, model.config.eos_token_id], [8, 9, 5, model.config.eos_token_id]])
    labels = torch.tensor([0, 1])
    with torch.no_grad():
        expected = stock(input_ids=ids, labels=labels)
        found = [model(input_ids=ids, labels=labels, num_items_in_batch=count) for count in (None, 2)]
        assert torch.equal(model(input_ids=ids).logits, expected.logits)
    for outputs in found:
        torch.testing.assert_close(outputs.loss, expected.loss)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_gates_of_single_query_heads_close_without_their_group(name, caplog):
    _, model = headwise(name, gates={"unit": "head"})
    layer = locate_heads(model)[0]
    assert layer.group_size == 2
    assert len(model.head_gates()[layer.site].log_alpha) == layer.num_heads
    model.head_gates()[layer.site].log_alpha.data[[0, 2, 3]] = -3.0
    inputs = inputs_of(name, model)
    with torch.no_grad():
        gated = model(**inputs).logits
        pruned = had.prune_closed_gates(model)(**inputs).logits
    torch.testing.assert_close(pruned, gated, rtol=1e-9, atol=1e-10)
    assert model.config.pruned_heads == {0: [2, 3]}
    assert model.config.gates is None


def test_padding_on_the_left_changes_no_guidance():
    for name in ("llama", "mistral", "gpt2"):
        _, model = headwise(name, guidance={"patterns": ["prev", "first"], "fraction": 0.5})
        model.set_attn_implementation("sdpa")
        ids = inputs_of(name, model)["input_ids"][:1]
        alone = model(input_ids=ids, output_guidance_loss=True).guidance_loss
        padded, mask = pad(ids, (3, 0), value=1), pad(torch.ones_like(ids), (3, 0))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = model(
            input_ids=padded, attention_mask=mask, position_ids=positions, output_guidance_loss=True
        ).guidance_loss
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=0)


EVERY_CLASS = [
    (one.model_type, auto, name)
    for one in had.headwise_architectures().values()
    for auto, name in one.classes.items()
    # The stock discriminator of ELECTRA has no labels that are ignored: see test_task_losses.py.
    if auto != "AutoModel" and name != "HeadwiseElectraForPreTraining"
]


@pytest.mark.parametrize(("model_type", "auto", "class_name"), EVERY_CLASS)
def test_every_class_computes_the_loss_of_its_stock_class_whole_and_in_parts(model_type, auto, class_name):
    cls = getattr(had, class_name)
    stock = next(base for base in cls.__mro__ if base.__module__.startswith("transformers.models."))
    settings = next(s for _, c, s in STOCK_MODELS.values() if getattr(transformers, c).model_type == model_type)
    torch.manual_seed(0)
    count = 2 if "QuestionAnswering" in auto else 3
    model = cls(cls.config_class(**{**settings, "num_labels": count})).double().eval()
    inputs = inputs_of(model_type, model)
    if "Classification" in auto or "Question" in auto:
        inputs.pop("decoder_input_ids", None)
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    labels = {}
    for term in model.loss_terms:
        if term.kind == "position":
            labels[term.labels] = torch.tensor([1, 4])
        elif term.kind == "problem" or term.name == "nsp":
            labels[term.labels] = torch.tensor([0, 1])
        else:
            labels[term.labels] = ids % 2 if term.kind == "binary" or term.classes == "num_labels" else ids.clone()
            if term.kind != "binary":
                labels[term.labels][0, 2] = -100
    if "SequenceClassification" in auto and model.config.is_encoder_decoder:
        inputs["input_ids"][:, -1] = model.config.eos_token_id
    inputs |= labels
    with torch.no_grad():
        expected = stock.forward(model, **inputs).loss
        found = model(**inputs).loss
        counted = model(**inputs, num_items_in_batch=model.count_labels(inputs)).loss
    assert torch.equal(found, expected)
    # Stock losses of language models are computed in single precision.
    torch.testing.assert_close(counted.to(expected), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [(kind, name) for kind, auto, name in EVERY_CLASS if getattr(had, name).loss_terms[0].kind == "next"],
)
def test_labels_that_are_shifted_already_take_the_place_of_others(model_type, class_name):
    cls = getattr(had, class_name)
    stock = next(base for base in cls.__mro__ if base.__module__.startswith("transformers.models."))
    settings = next(s for _, c, s in STOCK_MODELS.values() if getattr(transformers, c).model_type == model_type)
    torch.manual_seed(0)
    model = cls(cls.config_class(**settings, gates={})).eval()
    batch = stock_inputs(model)
    batch["labels"], shifted = batch["input_ids"], batch["input_ids"].flip(1).clone()
    shifted[0, 2:5] = -100
    with torch.no_grad():
        plain = model(**batch).loss
        expected = stock.forward(model, **batch, shift_labels=shifted).loss
        assert not torch.isclose(expected, plain)
        assert torch.equal(model(**batch, shift_labels=shifted).loss, expected)
        assert torch.equal(model(**batch, shift_labels=shifted, gate_penalty_weight=0.0).loss, expected)
        assert torch.equal(model(**batch, shift_labels=None).loss, plain)
        # Divided by the number of labels that count, whole and in parts.
        counts = model.count_labels({**batch, "shift_labels": shifted})
        assert counts == {"labels": shifted.numel() - 3}
        whole = stock.forward(model, **batch, shift_labels=shifted, num_items_in_batch=counts["labels"]).loss
        batch |= {"shift_labels": shifted}
        halves = [{name: value[row : row + 1] for name, value in batch.items()} for row in (0, 1)]
        parts = [model(**half, num_items_in_batch=counts, output_gate_penalty=True).loss for half in halves]
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(model(**batch, num_items_in_batch=counts).loss, whole)
    torch.testing.assert_close(sum(parts), whole)


def test_labels_that_are_shifted_are_refused_where_they_would_be_ignored():
    ids = torch.tensor([[5, 6, 7, 8]])
    _, decoder = headwise("llama")
    with pytest.raises(TypeError, match="only together with labels: pass labels, too"):
        decoder(input_ids=ids, shift_labels=ids)
    with pytest.raises(ValueError, match="shift_labels"):
        decoder(input_ids=ids, labels=ids, shift_labels=ids + 60)
    with pytest.raises(ValueError, match="shift_labels have shape"):
        decoder(input_ids=ids, labels=ids, shift_labels=ids[:, 1:])
    _, encoder = headwise("roberta")
    with pytest.raises(TypeError, match="has no argument 'shift_labels'"):
        encoder(input_ids=ids, labels=ids, shift_labels=ids)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "modernbert"])
def test_attention_with_one_projection_cannot_be_hard_coded(name):
    with pytest.raises(ValueError, match="hard_coded"):
        headwise(name, hard_coded={})


def test_layers_that_keywords_do_not_reach_are_named():
    _, model = headwise("gpt2-cross", guidance={"cross": {"fraction": 0.5}})
    with pytest.raises(ValueError, match="attention of the cross layer 0 cannot be guided"):
        model(**inputs_of("gpt2-cross", model), output_guidance_loss=True)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2", "mpnet", "siglip-vision", "llama"])
def test_noise_of_gates_reaches_attention_that_takes_no_keywords(name):
    stock, model = headwise(name, gates={})
    stock.set_attn_implementation("eager")
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for gate in model.head_gates().values():
        gate.log_alpha.data.zero_()
    sizes = [len(gate.log_alpha) for gate in model.head_gates().values()]
    noise = 0.3 + 0.4 * torch.rand(sum(sizes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layer, part in zip(locate_heads(stock), noise.split(sizes)):
        factors = model.head_gates()[layer.site](part).repeat_interleave(layer.head_dim)
        assert factors.unique().numel() > 2
        layer.output.weight.data.mul_(factors.detach())
    inputs = inputs_of(name, model)
    found, expected = model(**inputs, gate_noise=noise)[0], stock(**inputs)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model(**inputs)[0], expected)


@pytest.mark.parametrize("name", ["deberta-v2", "mpnet"])
def test_models_with_hooks_for_their_gates_are_copied_and_pickled(name):
    _, model = headwise(name, gates={})
    inputs = inputs_of(name, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for gate in other.head_gates().values():
            gate.log_alpha.data[0] = -3.0
        with torch.no_grad():
            closed = other(**inputs)[0]
            assert not torch.allclose(closed, model(**inputs)[0])
            torch.testing.assert_close(had.prune_closed_gates(other)(**inputs)[0], closed, rtol=1e-9, atol=1e-10)


def test_attention_that_takes_no_keywords_has_no_noise_under_gradient_checkpointing():
    _, model = headwise("deberta-v2", gates={})
    model.train()
    model.activation_checkpointing_enable()
    noise = torch.rand(sum(len(gate.log_alpha) for gate in model.head_gates().values()))
    with pytest.raises(ValueError, match=r"gate_noise does not reach.*activation_checkpointing_disable\(\)"):
        model(**inputs_of("deberta-v2", model), gate_noise=noise)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2", "mpnet"])
def test_attention_that_is_computed_elsewhere_cannot_be_hard_coded(name):
    with pytest.raises(ValueError, match="does not call an attention function: set hard_coded=None"):
        headwise(name, hard_coded={})


@pytest.mark.parametrize("name", ["deberta-v2", "mpnet", "siglip-vision"])
def test_noise_of_gates_reaches_compiled_models(name):
    _, model = headwise(name, gates={})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    noise = torch.linspace(0.1, 0.9, sum(len(gate.log_alpha) for gate in model.head_gates().values()))
    inputs = inputs_of(name, model)
    torch.compiler.reset()
    found = torch.compile(model, backend="eager")(**inputs, gate_noise=noise)[0]
    torch.testing.assert_close(found, model(**inputs, gate_noise=noise)[0])


def test_a_compiled_model_with_sinks_is_guided():
    # Compiled layer by layer, as experts are chosen outside the graph.
    guidance = {"heads": {"prev": [0], "first": [1]}}
    model = had.headwise_model(build_stock("gpt-oss", num_hidden_layers=2), guidance=guidance)
    inputs = stock_inputs(model)
    sinks = model.model.layers[0].self_attn.sinks
    torch.compiler.reset()
    found = []
    for one in (model, torch.compile(model, backend="eager")):
        losses = one(**inputs, output_guidance_loss=True).guidance_losses
        loss = losses["prev"] + 3 * losses["first"]
        found.append((loss, *torch.autograd.grad(loss, sinks)))
    torch.testing.assert_close(*found)


def test_positions_end_where_those_of_the_stock_model_do():
    _, mpnet = headwise("mpnet")
    longest = mpnet.config.max_positions()
    assert mpnet(input_ids=torch.full((1, longest), 5)).logits.shape[1] == longest == 62
    with pytest.raises(ValueError, match="62"):
        mpnet(input_ids=torch.full((1, longest + 1), 5))
    # Positions that are only relative have no end.
    stock = build_stock("deberta-v2", position_biased_input=False)
    ids = torch.arange(70)[None] % 55 + 5
    torch.testing.assert_close(had.headwise_model(stock)(input_ids=ids).logits, stock(input_ids=ids).logits)
