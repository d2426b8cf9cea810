# Licensed under the Apache License, Version 2.0.
"""The divergence of the attention of a student from its teacher's, against its dense definition."""

import json

import pytest
import torch
from dense_distillation import dense_distillation_loss, dense_scores, relation
from tiny_models import no_dropout, padded_batch, ragged_sentences, sizes, tiny_model, vivid
from transformers import BertConfig, BertModel

import hf_attn_dynamics as had
from hf_attn_dynamics.models import attention_distillation
from hf_attn_dynamics.models.attention_distillation import (
    AttentionInputs,
    ScoreFactors,
    distillation_loss,
    factors_of_relation,
)
from hf_attn_dynamics.training import Teacher


LENGTHS = [9, 4, 1]


def factors(seed, dim, dtype=torch.float64, softcap=0.0, size=1.0, band=(-1, -1)):
    generator = torch.Generator().manual_seed(seed)
    left, right = (size * torch.randn(3, 4, 9, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    return ScoreFactors(*(one.to(dtype).requires_grad_() for one in (left, right)), dim**-0.5, softcap, band)


def masked_rows():
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    weights = torch.rand(3, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return mask, weights * mask


def dense(student, teacher, weights, loss, mask):
    maps = [dense_scores(*one[:4], mask, one.band) for one in (student, teacher)]
    total = 0
    for sentence, length in enumerate(LENGTHS):
        for row in range(length):
            one = [(own[sentence, :, :, :length], other[sentence, :, :, :length], [row]) for own, other in [maps]]
            total = total + weights[sentence, row] * dense_distillation_loss(one, loss, "paper")
    return total


@pytest.mark.parametrize("elements", [2**20, 4 * 9 * 3, 4 * 9 * 9 * 2], ids=["whole", "rows of 3", "2 sentences"])
@pytest.mark.parametrize("teacher_band", [None, (-1, -1), (1, 0)], ids=["the same", "all", "narrow"])
@pytest.mark.parametrize("band", [(-1, -1), (-1, 0), (3, 0), (2, 2)], ids=["all", "causal", "window", "both sides"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("loss", ["kl", "squared"])
def test_loss_and_gradients_equal_the_dense_definition(loss, softcap, band, teacher_band, elements, monkeypatch):
    monkeypatch.setitem(attention_distillation.BLOCK_ELEMENTS, "cpu", elements)
    student = factors(0, 8, softcap=softcap, size=3.0, band=band)
    teacher = factors(1, 5, softcap=softcap, size=3.0, band=teacher_band or band)
    mask, weights = masked_rows()
    found = distillation_loss(student, teacher, weights, loss, mask)
    expected = dense(student, teacher, weights, loss, mask)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    own = torch.autograd.grad(found, student[:2])
    other = torch.autograd.grad(expected, student[:2])
    torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-13)


def test_the_teacher_gets_no_gradient():
    student, teacher = factors(0, 8), factors(1, 5)
    distillation_loss(student, teacher, *masked_rows()[::-1][:1]).backward()
    assert student.left.grad.abs().sum() > 0
    assert teacher.left.grad is None
    assert teacher.right.grad is None


@pytest.mark.parametrize("loss", ["kl", "squared"])
def test_a_student_with_the_attention_of_its_teacher_has_no_loss(loss):
    # Scores far from 0, as in trained models, whose logarithms of sums would cancel.
    student = factors(0, 8, torch.float32, size=12.0)
    _, weights = masked_rows()
    found = distillation_loss(student, student, weights, loss)
    assert float(found) == 0.0
    near = student._replace(left=student.left + 1e-4)
    exact = [ScoreFactors(one.left.double(), one.right.double(), one.scaling) for one in (near, student)]
    found, expected = (distillation_loss(*pair, weights, loss) for pair in ((near, student), exact))
    # The scores themselves are rounded to float32.
    assert abs(float(found) - float(expected)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_nothing_but_the_rounding_of_its_inputs(dtype):
    student, teacher = factors(0, 8, dtype), factors(1, 5, dtype)
    mask, weights = masked_rows()
    found = distillation_loss(student, teacher, weights * 1e-6, "kl", mask)
    assert found.dtype == torch.float32
    exact = [
        ScoreFactors(*(t.detach().double().requires_grad_() for t in one[:2]), one.scaling)
        for one in (student, teacher)
    ]
    expected = distillation_loss(*exact, weights * 1e-6, "kl", mask)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    # Scaled up, since the weights of the rows are below what half precision resolves.
    own = torch.autograd.grad(found, student[:2], torch.tensor(1e6))
    other = torch.autograd.grad(expected, exact[0][:2], torch.tensor(1e6, dtype=torch.float64))
    for one, two in zip(own, other):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), two, rtol=2e-2, atol=2e-3)


def test_rows_without_a_visible_key_contribute_nothing():
    student, teacher = factors(0, 8), factors(1, 5)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    loss = distillation_loss(student, teacher, torch.zeros(3, 9), "kl", mask)
    loss.backward()
    assert float(loss) == 0.0
    assert not student.left.grad.any()


def test_other_rows_or_keys_are_named():
    student, teacher = factors(0, 8), factors(1, 5)
    shorter = teacher._replace(right=teacher.right[:, :, :8])
    with pytest.raises(ValueError, match=r"got \(3, 4, 9, 9\) and \(3, 4, 9, 8\); pass the same tokens to both"):
        distillation_loss(student, shorter, torch.ones(3, 9))


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("name", ["query", "key", "value", "query_key"])
def test_relations_split_the_vectors_of_a_token_anew(name, heads):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64)
    # Two query heads share a key head.
    key, value = (torch.randn(2, 2, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    inputs = AttentionInputs(query, key, value, 0.3)
    if heads == 8 and name in ("key", "value"):
        heads = 6
    found = factors_of_relation(inputs, name, heads)
    left, right, scaling = relation(inputs, name, heads)
    assert torch.equal(found.left, left)
    assert torch.equal(found.right, right)
    assert found.scaling == scaling


def test_relation_heads_that_do_not_fit_are_named():
    inputs = AttentionInputs(*torch.zeros(3, 2, 4, 5, 6), 1.0)
    with pytest.raises(ValueError, match="relation_heads=5 does not divide 24, the size of the value vectors"):
        factors_of_relation(inputs, "value", 5)


# ---- In a model ----


def student_of(teacher, kind="bert", pruned=None, **changes):
    """A headwise student with 4 heads of 4, and gradients of every row."""
    guidance = {"teacher": teacher, **changes.pop("guidance", {})}
    model = tiny_model(kind, "Model", guidance=guidance, pruned_heads=pruned, **no_dropout(kind), **changes)
    return vivid(model).double()


def teacher_model(**changes):
    torch.manual_seed(1)
    config = BertConfig(
        **{**sizes("bert"), "hidden_size": 30, "num_attention_heads": 6, "num_hidden_layers": 3, **changes}
    )
    return vivid(BertModel(config), seed=1).double().eval()


def maps(model, batch):
    model.set_attn_implementation("eager")
    found = model(**batch, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return found


def dense_model_loss(student, teacher, batch, layers, heads, loss="kl", reduction="row_mean"):
    own, others = maps(student, batch), maps(teacher, batch)
    total = 0
    for layer, of_teacher in layers.items():
        sentences = []
        for sentence, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            one, other = own[layer][sentence, :, :length, :length], others[of_teacher][sentence, :, :length, :length]
            kept = student.config.kept_heads()[("encoder", layer)]
            pairs = [(one[kept.index(head)], other[learned]) for head, learned in heads.items() if head in kept]
            sentences.append((*(torch.stack(side) for side in zip(*pairs)), range(length)))
        total = total + dense_distillation_loss(sentences, loss, reduction)
    return total


def gradients(loss, model):
    found = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for grad, p in zip(found, model.parameters())]


@pytest.mark.parametrize("pruned", [None, {"1": [2]}], ids=["whole", "pruned"])
@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
@pytest.mark.parametrize("loss", ["kl", "squared"])
def test_a_student_of_another_size_learns_the_attention_of_single_heads(loss, reduction, pruned):
    heads = {0: 5, 2: 1, 3: 1}
    layers = {0: 2, 1: 1}
    student = student_of(
        {"layers": layers, "heads": heads, "loss": loss}, pruned=pruned, guidance={"reduction": reduction}
    )
    teacher, batch = teacher_model(), padded_batch(ragged_sentences(), pad=0)
    attention = Teacher(teacher, student)(batch).attention
    found = student(**batch, teacher_attention=attention, output_guidance_loss=True)
    expected = dense_model_loss(student, teacher, batch, layers, heads, loss, reduction)
    # Eager attention takes its softmax in single precision.
    torch.testing.assert_close(found.guidance_loss, expected, rtol=1e-5, atol=0)
    assert list(found.guidance_losses) == ["teacher"]
    for one, two in zip(gradients(found.guidance_loss, student), gradients(expected, student)):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": {0: 1}, "heads": {0: 0, 1: 5}},
        {"layers": {1: 2}, "relations": ["value", "query_key"], "relation_heads": 2},
        {"layers": {1: 2}, "relations": ["query"], "relation_heads": 1, "heads": {1: 1}},
    ],
    ids=["heads", "relations", "both"],
)
def test_gradients_are_those_of_finite_differences(settings):
    student, teacher = student_of(settings), teacher_model()
    batch = padded_batch([[5, 6, 7, 8], [9, 4]], pad=0)
    attention = Teacher(teacher, student)(batch).attention

    def loss():
        return student(**batch, teacher_attention=attention, output_guidance_loss=True).guidance_loss

    found = dict(zip([name for name, _ in student.named_parameters()], gradients(loss(), student)))
    moved = 0
    for name, weight in student.named_parameters():
        if not found[name].any():
            continue
        moved += 1
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        with torch.no_grad():
            weight.add_(direction, alpha=1e-6)
            up = loss()
            weight.sub_(direction, alpha=2e-6)
            slope = (up - loss()) / 2e-6
            weight.add_(direction, alpha=1e-6)
        torch.testing.assert_close((found[name] * direction).sum(), slope, rtol=1e-5, atol=1e-8)
    assert moved > 5


def test_padding_and_other_sentences_change_nothing():
    student, teacher = student_of({"layers": {0: 0, 1: 2}, "heads": {0: 3, 1: 4}}), teacher_model()
    read = Teacher(teacher, student)
    sentences = ragged_sentences()

    def loss(batch, **counts):
        attention = read(batch).attention
        return student(**batch, teacher_attention=attention, output_guidance_loss=True, **counts).guidance_loss

    alone = [loss(padded_batch([sentence], pad=0)) for sentence in sentences]
    whole = loss(padded_batch(sentences, pad=0, length=30))
    torch.testing.assert_close(whole, torch.stack(alone).mean(), rtol=1e-10, atol=0)
    halves = [padded_batch(sentences[:3], pad=0), padded_batch(sentences[3:], pad=0)]
    parts = [loss(batch, num_items_in_batch={"sentences": len(sentences)}) for batch in halves]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-10, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("relations", [None, ["value"]])
def test_gradient_checkpointing_changes_no_gradient(reentrant, relations):
    settings = {"layers": {0: 0, 1: 2}, "heads": {0: 3}, "relations": relations}
    settings |= {"relation_heads": 2} if relations else {}
    student, teacher = student_of(settings, guidance={"heads": {"prev": [1]}}).train(), teacher_model()
    batch = padded_batch(ragged_sentences(), pad=0)
    attention = Teacher(teacher, student)(batch).attention
    found = []
    for is_on in (False, True):
        if is_on:
            student.activation_checkpointing_enable({"use_reentrant": reentrant})
        student.zero_grad()
        outputs = student(**batch, teacher_attention=attention, output_guidance_loss=True)
        # A weight of its own for each name.
        losses = outputs.guidance_losses
        (losses["teacher"] * 0.3 + losses["prev"] * 2 + outputs.last_hidden_state.square().mean()).backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in student.parameters()])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-13)


def test_a_compiled_student_learns_the_same():
    student, teacher = student_of({"layers": {0: 1}, "heads": {0: 3}}), teacher_model()
    batch = padded_batch([[5, 6, 7, 8], [9, 4]], pad=0)
    attention = Teacher(teacher, student)(batch).attention
    compiled = torch.compile(student, fullgraph=True, backend="aot_eager")
    found, expected = (
        one(**batch, teacher_attention=attention, output_guidance_loss=True).guidance_loss
        for one in (compiled, student)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, two in zip(gradients(found, student), gradients(expected, student)):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-13)


def test_a_head_may_be_guided_and_others_taught():
    student = student_of({"layers": {0: 1}, "heads": {0: 3}}, guidance={"heads": {"prev": [1]}})
    batch = padded_batch(ragged_sentences(), pad=0)
    attention = Teacher(teacher_model(), student)(batch).attention
    outputs = student(**batch, teacher_attention=attention, output_guidance_loss=True)
    losses = outputs.guidance_losses
    assert set(losses) == {"prev", "teacher"}
    torch.testing.assert_close(outputs.guidance_loss, losses["prev"] + losses["teacher"], rtol=1e-12, atol=0)
    only = student_of({"layers": {0: 1}, "heads": {0: 3}})
    assert torch.equal(
        only(**batch, teacher_attention=attention, output_guidance_loss=True).guidance_loss, losses["teacher"]
    )


# ---- Settings ----


def test_settings_come_back_from_a_checkpoint(tmp_path):
    teacher = {"layers": {0: 2, 1: 1}, "heads": {0: {1: 3}, 1: {0: 5}}, "relations": ["value"], "relation_heads": 2}
    student = student_of(teacher)
    student.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["guidance"]
    assert stored["teacher"]["layers"] == {"0": 2, "1": 1}
    assert stored["patterns"] is None
    loaded = had.HeadwiseBertModel.from_pretrained(tmp_path)
    assert loaded.config.guidance == student.config.guidance
    assert loaded.head_settings.taught_indices == {("encoder", 0): {1: 3}, ("encoder", 1): {0: 5}}
    assert loaded.head_settings.guided_names == ("teacher",)
    assert not loaded.config.guided_heads()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([0, 1], r"guidance teacher must be a dictionary with layers, such as \{0: 1\}, got \[0, 1\]"),
        ({"layer": {0: 1}}, "guidance teacher has no key 'layer'; its keys are layers, heads, loss, relations"),
        ({}, r"guidance teacher layers must be \{layer of the student: layer of the teacher\}, got None"),
        ({"layers": {2: 0}}, "layers name layer 2, but the model has 2 layers"),
        ({"layers": {0: -1}}, r"layers must be integers of at least 0, got \{0: -1\}"),
        ({"layers": {0: 1}, "heads": "all"}, r"heads must be 'same' or \{head of the student: head of the teacher\}"),
        ({"layers": {0: 1}, "heads": {4: 0}}, r"heads name head 4 \(layer 0\), but a layer has 4 heads"),
        ({"layers": {0: 1}, "heads": {0: True}}, r"heads must be integers of at least 0, got \{0: True\} \(layer 0\)"),
        ({"layers": {0: 1, 1: 1}, "heads": {0: {0: 0}}}, "heads name no head of layer 1; name some, or leave it out"),
        ({"layers": {0: 1}, "heads": {0: {0: 0}, 1: {0: 0}}}, "heads name layer 1, which layers does not name"),
        ({"layers": {0: 1}, "loss": "mse"}, "loss must be one of kl, squared, got 'mse'"),
        ({"layers": {0: 1}, "relations": ["values"]}, "relations must be a list of query, key, value, query_key"),
        ({"layers": {0: 1}, "relations": ["key", "key"]}, "twice; name each once"),
        ({"layers": {0: 1}, "relation_heads": 2}, "relation_heads=2 needs relations, such as"),
        (
            {"layers": {0: 1}, "relations": ["key"], "relation_heads": 0},
            "relation_heads must be an integer of at least 1",
        ),
    ],
)
def test_invalid_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        had.HeadwiseBertConfig(**sizes("bert"), guidance={"teacher": settings})


def test_relations_of_cross_attention_are_between_its_two_texts():
    teacher = {"layers": {0: 1}, "relations": ["value"]}
    with pytest.raises(
        ValueError, match="relations name 'value', which is not between the two texts of cross-attention"
    ):
        had.HeadwiseMarianConfig(**sizes("marian"), guidance={"cross": {"teacher": teacher}})


def test_a_head_learns_from_one_side_only():
    with pytest.raises(ValueError, match="guides head 1 of layer 0 to 'prev' and to the teacher; assign it to one"):
        had.HeadwiseBertConfig(**sizes("bert"), guidance={"heads": {"prev": [1]}, "teacher": {"layers": {0: 1}}})
    with pytest.raises(ValueError, match="guidance targets name 'teacher'; choose a name"):
        had.HeadwiseBertConfig(**sizes("bert"), guidance={"heads": {"teacher": [1]}, "targets": {"teacher": "keys"}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_guidance_loss": True}, "reads the attention of a teacher: pass teacher_attention=Teacher"),
        (
            {"teacher_attention": {}},
            "teacher_attention is given to HeadwiseBertModel, which does not read it: request",
        ),
        ({"teacher_attention": {}, "output_guidance_loss": True}, "nothing for the encoder layer 0, which guidance"),
    ],
)
def test_attention_of_the_teacher_is_given_where_it_is_read(arguments, message):
    student = student_of({"layers": {0: 1}, "heads": {0: 3}})
    with pytest.raises(ValueError, match=message):
        student(**padded_batch([[5, 6]], pad=0), **arguments)


def test_a_model_without_a_teacher_takes_no_attention_of_one():
    with pytest.raises(ValueError, match="which does not read it: set guidance={'teacher'"):
        tiny_model("bert", "Model")(**padded_batch([[5, 6]], pad=0), teacher_attention={}, output_guidance_loss=True)
