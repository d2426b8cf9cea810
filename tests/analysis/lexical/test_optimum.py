import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_attn_dynamics import agreement, optimal_attention


def problem(scale=2.0, sources=6, targets=4, classes=9):
    """Logits of a padded batch, one target without label, one sentence of one word."""
    generator = torch.Generator().manual_seed(0)
    source_logits = scale * torch.randn(3, sources, classes, generator=generator)
    target_logits = scale * torch.randn(3, targets, classes, generator=generator)
    labels = torch.randint(0, classes, (3, targets), generator=generator)
    labels[1, 2] = -100
    return source_logits, labels, target_logits, torch.arange(sources) < torch.tensor([[6], [4], [1]])


def losses_of(attention, source_logits, labels, target_logits):
    logits = attention @ source_logits.double() + target_logits
    return cross_entropy(logits.transpose(1, 2), labels, reduction="none")


@pytest.mark.parametrize("scale", [0.1, 2.0, 20.0])
def test_no_attention_has_a_smaller_loss(scale):
    source_logits, labels, target_logits, mask = problem(scale)
    found = optimal_attention(source_logits, labels, target_logits, mask, tolerance=1e-8)
    has_label = labels != -100
    assert (found.gap[has_label] <= 1e-8).all()
    assert (found.attention[has_label] >= 0).all()
    assert not found.attention.transpose(1, 2)[~mask].nan_to_num().any()
    torch.testing.assert_close(found.attention[has_label].sum(-1), torch.ones(11, dtype=torch.float64))
    torch.testing.assert_close(
        found.loss[has_label], losses_of(found.attention, source_logits, labels, target_logits)[has_label]
    )
    # Vertices, the center and random points of the simplex.
    others = [torch.eye(6, dtype=torch.float64)[[position] * 4].expand(3, -1, -1) for position in range(6)]
    others += list(torch.distributions.Dirichlet(torch.full((200, 3, 4, 6), 0.5)).sample().double())
    for other in others:
        other = other * mask[:, None]
        other = other / other.sum(-1, keepdim=True)
        valid = has_label & other.isfinite().all(-1)
        worse = losses_of(other, source_logits, labels, target_logits)
        assert (worse[valid] >= (found.loss - found.gap)[valid] - 1e-12).all()


def test_the_position_with_the_highest_probability_can_be_left_out():
    # Equations 30 and 31.
    logits = torch.tensor([[[0.0, 0.0, 0.0], [0.0, -10.0, 5.0], [0.0, 5.0, -10.0]]])
    found = optimal_attention(logits, torch.tensor([[0]]))
    assert found.attention.squeeze().tolist() == pytest.approx([0, 0.5, 0.5], abs=1e-5)
    assert logits.softmax(-1)[0, :, 0].argmax() == 0


def test_of_two_classes_the_highest_logit_gets_all():
    logits = torch.tensor([[[0.0, 1.0], [0.0, 3.0], [0.0, -2.0]]])
    found = optimal_attention(logits, torch.tensor([[1, 0]]), tolerance=1e-9)
    expected = torch.tensor([[[0, 1, 0], [0, 0, 1]]], dtype=torch.float64)
    torch.testing.assert_close(found.attention, expected, atol=1e-8, rtol=0)


def test_batches_chunks_and_padding_change_nothing():
    source_logits, labels, target_logits, mask = problem()
    together = optimal_attention(source_logits, labels, target_logits, mask, tolerance=1e-9)
    in_chunks = optimal_attention(source_logits, labels, target_logits, mask, tolerance=1e-9, chunk_size=5)
    for one, other in zip(together, in_chunks):
        torch.testing.assert_close(one, other, equal_nan=True)
    spoilt = source_logits.masked_fill(~mask[..., None], torch.nan)
    for one, other in zip(together, optimal_attention(spoilt, labels, target_logits, mask, tolerance=1e-9)):
        assert one.equal(other) or one.isnan().equal(other.isnan())
    for sentence, length in enumerate((6, 4, 1)):
        alone = optimal_attention(
            source_logits[sentence, None, :length], labels[sentence, None], target_logits[sentence, None], None, 1e-9
        )
        torch.testing.assert_close(
            together.attention[sentence, None, :, :length], alone.attention, equal_nan=True, atol=1e-6, rtol=0
        )


def test_targets_without_label_are_left_out_of_agreement():
    source_logits, labels, target_logits, mask = problem()
    attention = optimal_attention(source_logits, labels, target_logits, mask).attention
    assert attention.isnan().any(-1).equal(labels == -100)
    rows = agreement(attention, attention, mask, reduction="none")
    assert rows.isnan().equal(labels == -100)
    assert agreement(attention, attention, mask) == 1


def test_what_is_not_solved_says_so(caplog):
    found = optimal_attention(*problem(), tolerance=1e-12, max_iterations=1)
    assert "have a gap of more than 1e-12 after 1 iterations" in caplog.text
    assert found.gap.nan_to_num().max() > 1e-12


S, L = torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source_logits": S[0]}, r"source_logits must have shape \(…, …, …\), got \(3, 5\)"),
        ({"labels": L[:1]}, r"labels must have shape \(2, …\), got \(1, 4\)"),
        ({"target_logits": S}, r"target_logits must have shape \(2, 4, 5\), got \(2, 3, 5\)"),
        ({"mask": L}, r"mask must have shape \(2, 3\), got \(2, 4\)"),
        ({"labels": L + 5}, "labels must be classes from 0 to 4, or -100 for none"),
        ({"mask": torch.tensor([[1, 0, 0], [0, 0, 0]])}, "mask leaves no position to attend to"),
        ({"source_logits": S - torch.inf}, "must be finite at all non-padding positions"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
    ],
    ids=["dimensions", "labels", "targets", "mask", "class", "empty", "infinite", "tolerance"],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        optimal_attention(**{"source_logits": S, "labels": L, **arguments})
