import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_attn_dynamics
from hf_attn_dynamics.models.ignored_labels import IGNORED, is_labelled
from hf_attn_dynamics.models.token_mask import (
    check_mask,
    check_mask_shape,
    labels_of_tokens,
    may_attend,
    non_padding,
    non_padding_ids,
    num_sentences,
)


ROOT = Path(hf_attn_dynamics.__file__).parent.parent
TOKENS = torch.tensor([[True, True, False], [False, True, True]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
def test_a_mask_of_any_type_is_0_at_padding_alone(dtype):
    assert non_padding(TOKENS.to(dtype), TOKENS.shape).equal(TOKENS)


def test_any_number_but_0_is_a_token():
    assert non_padding(torch.tensor([[2, 0, -1]]), (1, 3)).tolist() == [[True, False, True]]


def test_without_a_mask_every_position_is_a_token():
    found = non_padding(None, (2, 3), torch.device("meta"))
    assert (found.shape, found.dtype, found.device.type) == ((2, 3), torch.bool, "meta")
    assert non_padding(None, (2, 3)).all()


def test_ids_tell_what_is_padding_where_a_model_has_any():
    ids = torch.tensor([[0, 5, 0], [7, 1, 2]])
    assert non_padding_ids(ids, 0).tolist() == [[False, True, False], [True, True, True]]
    assert non_padding_ids(ids, None).all()


def test_labels_of_tensors_and_arrays_are_ignored_alike():
    labels = [[5, IGNORED, 0], [IGNORED, -1, IGNORED]]
    expected = [[True, False, True], [False, True, False]]
    assert is_labelled(torch.tensor(labels)).tolist() == expected
    assert is_labelled(np.array(labels)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.float16, torch.float64])
def test_labels_at_padding_are_ignored_whatever_their_type(dtype):
    found = labels_of_tokens(torch.ones(2, 3, dtype=dtype), TOKENS)
    assert is_labelled(found).equal(TOKENS)
    assert found[TOKENS].equal(torch.ones(4, dtype=torch.int64 if dtype in (torch.bool, torch.uint8) else dtype))


def test_labels_at_padding_are_ignored_whatever_they_are():
    labels = torch.tensor([[1, 0, 7], [7, 1, 0]])
    found = labels_of_tokens(labels, TOKENS.float())
    assert found.tolist() == [[1, 0, IGNORED], [IGNORED, 1, 0]]
    assert labels_of_tokens(labels, None) is labels
    assert labels.tolist() == [[1, 0, 7], [7, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_mask_of_scores_hides_keys_under_any_bias(dtype):
    scores = torch.zeros(2, 3, dtype=dtype).masked_fill(~TOKENS, torch.finfo(dtype).min)
    bias = torch.tensor([8.0, -8.0, 0.5], dtype=dtype)
    for mask in (TOKENS, scores, scores + bias, scores.masked_fill(~TOKENS, -torch.inf)):
        assert may_attend(mask).equal(TOKENS)


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        ({"attention_mask": torch.tensor([[1, 0], [0, 0], [0, 1]])}, 2),
        ({"attention_mask": torch.zeros(2, 2)}, 0),
        ({"input_ids": torch.zeros(3, 2), "labels": torch.zeros(4)}, 3),
        ({"inputs_embeds": torch.zeros(3, 2, 8)}, 3),
        ({"input_ids": None, "weight": torch.tensor(1.0), "words": torch.zeros(5, 2)}, 5),
    ],
)
def test_sentences_with_a_token_are_counted(batch, number):
    assert num_sentences(batch).equal(torch.tensor(number))


def test_masks_of_another_shape_are_refused_by_one_message():
    message = r"encoder_attention_mask must have shape \(2, 3\), one value for each token, got \(2, 4\)\."
    for check in (check_mask, check_mask_shape):
        with pytest.raises(ValueError, match=message):
            check("encoder_attention_mask", torch.ones(2, 4), (2, 3))
        check("encoder_attention_mask", torch.ones(2, 3), torch.Size([2, 3]))
        check("encoder_attention_mask", None, (2, 3))
    with pytest.raises(ValueError, match=r"guidance needs mask of shape \(batch, length\) = \(2, 3\), got \(2, 4\)\."):
        check_mask_shape("mask", torch.ones(2, 4), (2, 3), needed_by="guidance")


def test_masks_with_a_row_for_each_token_pass_where_the_model_takes_them():
    mask = torch.ones(2, 1, 3, 3)
    check_mask("attention_mask", mask, (2, 3))
    with pytest.raises(ValueError, match=r"must have shape \(2, 3\), .* got \(2, 1, 3, 3\)"):
        check_mask_shape("attention_mask", mask, (2, 3))


def test_the_ignored_label_is_written_once_in_package_and_recipes():
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (*(ROOT / "hf_attn_dynamics").rglob("*.py"), *(ROOT / "recipes").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
        and node.operand.value == 100
    }
    assert found == {"hf_attn_dynamics/models/ignored_labels.py"}
