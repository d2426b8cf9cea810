# Licensed under the Apache License, Version 2.0.
"""The divergence from a teacher in Triton, whose kernels run in its interpreter where there is no GPU."""

import logging

import pytest
import torch
from dense_distillation import dense_distillation_loss, dense_scores
from tiny_models import padded_batch, ragged_sentences, tiny_model, vivid

from hf_attn_dynamics.models import attention_distillation
from hf_attn_dynamics.models.attention_distillation import ScoreFactors, distillation_loss
from hf_attn_dynamics.models.teacher_settings import TEACHER_LOSSES
from hf_attn_dynamics.training import Teacher


pytest.importorskip("triton")
# The interpreter computes with NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Pair:
    """Random factors of a student and a teacher of two sentences and three heads.

    Args:
        size (`float`): Standard deviation of the vectors.
        padding (`str`): "some" of the keys and rows, a "whole" sentence, or "none".
    """

    def __init__(
        self, rows=37, length=37, dim=16, other_dim=16, dtype=torch.float32, softcap=0.0, other_softcap=0.0,
        band=(-1, -1), other_band=(-1, -1), padding="some", size=1.0,
    ):  # fmt: skip
        torch.manual_seed(0)
        self.vectors = [
            (size * torch.randn(2, 3, count, own)).to(dtype) for own in (dim, other_dim) for count in (rows, length)
        ]
        self.settings = [(dim**-0.5, softcap, band), (other_dim**-0.5, other_softcap, other_band)]
        self.mask = torch.ones(2, length, dtype=torch.bool)
        self.weights = torch.rand(2, rows) + 0.1
        self.weights[0, rows // 2] = 0
        if padding == "some":
            self.mask[0, -3:], self.mask[1, length // 2 :] = False, False
            self.weights[0, -3:], self.weights[1, rows // 2 :] = 0, 0
        elif padding == "whole":
            self.mask[1], self.weights[1] = False, 0

    def sides(self, dtype=None):
        left, right, *other = (one.to(DEVICE, dtype).requires_grad_() for one in self.vectors)
        return ScoreFactors(left, right, *self.settings[0]), ScoreFactors(*other, *self.settings[1])

    def computed(self, loss, kernel, dtype=None):
        """Loss and gradients."""
        student, teacher = self.sides(dtype)
        mask = None if self.mask.all() else self.mask.to(DEVICE)
        value = distillation_loss(student, teacher, self.weights.to(DEVICE), loss, mask, kernel)
        return value, *torch.autograd.grad(value, student[:2])

    def check(self, loss, tolerance):
        """Compares with blocks in double precision, from the same rounded vectors."""
        found, expected = self.computed(loss, "triton"), self.computed(loss, "blocks", torch.float64)
        assert expected[0] > 0
        for name, one, other in zip(("loss", "by left", "by right"), found, expected, strict=True):
            assert one.shape == other.shape, name
            assert (one.double() - other).abs().max() <= tolerance * max(other.abs().max(), 0.1), name
        return found


MASKS = {
    "bidirectional": {},
    "causal": {"band": (-1, 0), "other_band": (-1, 0)},
    "a window, of a teacher without": {"band": (5, 0), "other_band": (-1, 0)},
    "a narrower window of the teacher": {"band": (6, 6), "other_band": (2, 1)},
    "no padding": {"padding": "none"},
    "a sentence of padding": {"padding": "whole"},
    "capped": {"softcap": 2.0, "other_softcap": 1.5},
    "a capped teacher": {"other_softcap": 1.5},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("loss", TEACHER_LOSSES)
def test_loss_and_gradients_are_those_of_blocks_in_double_precision(loss, mask):
    Pair(**MASKS[mask]).check(loss, 3e-6)


@pytest.mark.parametrize("loss", TEACHER_LOSSES)
@pytest.mark.parametrize(("dim", "other_dim"), [(3, 40), (64, 8), (100, 16), (16, 256)])
def test_heads_of_any_two_sizes(loss, dim, other_dim):
    Pair(rows=19, length=19, dim=dim, other_dim=other_dim).check(loss, 3e-6)


@pytest.mark.parametrize("loss", TEACHER_LOSSES)
@pytest.mark.parametrize(("rows", "length"), [(1, 70), (64, 64), (65, 63), (130, 33), (33, 200)])
def test_all_lengths(loss, rows, length):
    """The largest scores of student and teacher are in any of four tiles."""
    Pair(rows=rows, length=length, padding="none", size=1.5).check(loss, 1e-5)


def test_windows_that_leave_whole_tiles_out():
    """Of 200 tokens in tiles of 64."""
    for band in ((7, 0), (70, 3), (0, 90)):
        Pair(rows=200, length=200, dim=4, other_dim=4, padding="none", band=band).check("kl", 3e-6)


@pytest.mark.parametrize("loss", TEACHER_LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_is_within_its_rounding(loss, dtype, tolerance):
    value, *gradients = Pair(dtype=dtype).check(loss, tolerance)
    assert [one.dtype for one in (value, *gradients)] == [torch.float32, dtype, dtype]
    # Sums are in single precision.
    exact = Pair(dtype=dtype).computed(loss, "blocks", torch.float64)[0]
    assert (value.double() - exact).abs() < 1e-6 * exact


@pytest.mark.parametrize("loss", TEACHER_LOSSES)
def test_a_student_with_the_attention_of_its_teacher_has_no_loss(loss):
    # Scores far from 0, as in trained models, whose logarithms of sums would cancel.
    pair = Pair(length=150, size=12.0)
    student, _ = pair.sides()
    value = distillation_loss(student, student, pair.weights.to(DEVICE), loss, kernel="triton")
    assert value.item() == 0.0
    nearly = pair.sides()[0]._replace(left=student.left * (1 + 1e-4))
    found, exact = (
        distillation_loss(
            *(one._replace(left=one.left.to(dtype), right=one.right.to(dtype)) for one in (student, nearly)),
            pair.weights.to(DEVICE), loss, kernel=kernel,
        ).item()
        for kernel, dtype in (("triton", torch.float32), ("blocks", torch.float64))
    )  # fmt: skip
    assert found == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("loss", TEACHER_LOSSES)
def test_the_loss_is_that_of_its_definition(loss):
    """Against dense attention in double precision, one row at a time, differentiated by autograd."""
    pair = Pair(rows=9, length=9, dim=5, other_dim=3, band=(-1, 0), other_band=(-1, 0), padding="none")
    student, teacher = pair.sides(torch.float64)
    maps = [dense_scores(*one[:4], band=one.band) for one in (student, teacher)]
    expected = sum(
        pair.weights[sentence, row].double()
        * dense_distillation_loss([(maps[0][sentence], maps[1][sentence], [row])], loss, "paper")
        for sentence in range(2)
        for row in range(9)
    )
    value, *gradients = pair.computed(loss, "triton")
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for found, gradient in zip(gradients, torch.autograd.grad(expected, student[:2])):
        torch.testing.assert_close(found.double(), gradient, rtol=0, atol=1e-5)


def test_views_and_the_loss_alone():
    pair = Pair()
    expected = pair.computed("kl", "triton")
    pair.vectors = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in pair.vectors]
    for one, other in zip(pair.computed("kl", "triton"), expected):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        student, teacher = pair.sides()
        value = distillation_loss(
            student, teacher, pair.weights.to(DEVICE), "kl", pair.mask.to(DEVICE), kernel="triton"
        )
    torch.testing.assert_close(value, expected[0].detach())


TAUGHT = {
    "heads": {"layers": {0: 1, 1: 0}, "heads": {0: 2, 3: 1}},
    "squared": {"layers": {1: 0}, "loss": "squared"},
    "relations": {"layers": {1: 0}, "relations": ["value", "query_key"], "relation_heads": 2},
}


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["stored", "checkpointed", "reentrant"])
@pytest.mark.parametrize("settings", TAUGHT)
def test_models_learn_the_same_by_either_way(settings, checkpointing):
    model = vivid(tiny_model("bert", guidance={"teacher": TAUGHT[settings]})).to(DEVICE).train()
    teacher = vivid(tiny_model("bert"), seed=1).to(DEVICE)
    batch = {name: one.to(DEVICE) for name, one in padded_batch(ragged_sentences(3), pad=0).items()}
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    attention = Teacher(teacher, model)(batch).attention

    def learn(kernel):
        model.zero_grad()
        torch.manual_seed(0)
        outputs = model(**batch, teacher_attention=attention, output_guidance_loss=True, guidance_kernel=kernel)
        outputs.guidance_loss.backward()
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        return outputs.guidance_losses["teacher"].item(), gradients

    (loss, gradients), (expected_loss, expected) = learn("triton"), learn("blocks")
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    scale = max(one.abs().max() for one in expected.values())
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * scale, name


def test_compiled_graphs_have_the_same_loss():
    pair = Pair(rows=9, length=9)
    student, teacher = pair.sides()

    def compute(left):
        return distillation_loss(student._replace(left=left), teacher, pair.weights.to(DEVICE), "kl", kernel="triton")

    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    found, expected = (function(student.left) for function in (compiled, compute))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(one, student.left)[0] for one in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_vectors_that_the_kernels_do_not_take_are_named():
    student, teacher = Pair(dim=300, rows=3, length=3).sides()
    weights = torch.ones(2, 3, device=DEVICE)
    for sides in ((student, teacher), (teacher, student)):
        with pytest.raises(ValueError, match="heads have 300 dimensions, more than 256; set it to 'auto' or 'blocks'"):
            distillation_loss(*sides, weights, kernel="triton")
        assert distillation_loss(*sides, weights, kernel="auto") > 0


def test_kernels_that_are_wrong_are_left_out_with_one_warning(monkeypatch, caplog):
    device, agrees = torch.device(DEVICE), attention_distillation._agrees
    agrees.cache_clear()
    assert all(agrees(device, dtype, 8) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert not caplog.text
    agrees.cache_clear()
    kernel = attention_distillation.kernel_distillation
    monkeypatch.setattr(
        attention_distillation, "kernel_distillation", lambda *given: [2 * one for one in kernel(*given)]
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not agrees(device, torch.float32, 8)
    assert caplog.text.count("The Triton kernels of distillation do not work") == 1
    assert "they differ by 1e+00 from the exact loss" in caplog.text
    agrees.cache_clear()
