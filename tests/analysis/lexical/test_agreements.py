import itertools
import math

import pytest
import torch
from agreement import row_agreement, row_chance, row_kendall_tau

from hf_attn_dynamics import agreement, chance_agreement, contextualized_agreement, kendall_tau


MEASURES = {
    "agreement": agreement,
    "chance": lambda u, v, mask=None, **options: chance_agreement(v, mask, **options),
    "kendall": kendall_tau,
}
TWINS = {"agreement": row_agreement, "kendall": row_kendall_tau}


def rows(lengths, ties, seed=0):
    """Values of rows of these lengths, as lists; a few different numbers if there are to be ties."""
    generator = torch.Generator().manual_seed(seed)
    for length in lengths:
        u, v = torch.randn(2, length, generator=generator, dtype=torch.float64)
        yield ((2 * u).round(), (2 * v).round()) if ties else (u, v)


def padded(pairs, padding=math.nan):
    """Rows of different lengths as two tensors, padding on either side by turns, and their mask."""
    longest = max(len(u) for u, _ in pairs)
    u, v = torch.full((2, len(pairs), longest), padding, dtype=torch.float64)
    mask = torch.zeros(len(pairs), longest, dtype=torch.long)
    for row, values in enumerate(pairs):
        length = len(values[0])
        real = slice(longest - length, longest) if row % 2 else slice(length)
        u[row, real], v[row, real], mask[row, real] = *values, 1
    return u, v, mask


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", ["agreement", "kendall"])
def test_rows_are_those_of_the_equations(name, ties):
    # Multiples of 20 are where 5 % is a whole number; 140 is where a product in floating point is too large.
    pairs = list(rows([1, 2, 3, 19, 20, 21, 39, 40, 41, 100, 140] * 4, ties))
    expected = [TWINS[name](u.tolist(), v.tolist()) for u, v in pairs]
    found = MEASURES[name](*padded(pairs), reduction="none")
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), equal_nan=True)


def test_five_percent_of_140_positions_are_seven():
    u, v = torch.zeros(2, 140, dtype=torch.float64)
    u[0] = 1
    v[1:7] = 1  # six positions are higher than the first
    assert agreement(u[None], v[None]) == 1
    v[7] = 1  # seven are not fewer than seven
    assert agreement(u[None], v[None]) == 0


@pytest.mark.parametrize("share", [0.05, 0.5])
@pytest.mark.parametrize("ties", [False, True])
def test_chance_is_the_mean_over_all_orders(ties, share):
    pairs = list(rows([1, 2, 3, 5, 6], ties))
    expected = [row_chance(v.tolist(), percent=round(100 * share)) for _, v in pairs]
    u, v, mask = padded(pairs)
    found = chance_agreement(v, mask, share=share, reduction="none")
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_chance_without_ties_depends_on_the_length_alone():
    lengths = [1, 7, 20, 21, 40, 41]
    _, v, mask = padded(list(rows(lengths, ties=False)))
    expected = [math.ceil(length / 20) / length for length in lengths]
    torch.testing.assert_close(
        chance_agreement(v, mask, reduction="none"), torch.tensor(expected, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", MEASURES)
def test_padding_and_batches_change_nothing(name):
    pairs = list(rows([3, 30, 12, 1, 25], ties=True))
    together = MEASURES[name](*padded(pairs, padding=9.0), reduction="none")
    alone = torch.stack([MEASURES[name](u[None], v[None]) for u, v in pairs])
    torch.testing.assert_close(together, alone, equal_nan=True)
    torch.testing.assert_close(MEASURES[name](*padded(pairs)), alone.nanmean())


@pytest.mark.parametrize("name", MEASURES)
def test_output_words_are_rows_and_can_be_left_out(name):
    u, v = torch.randn(2, 3, 4, 9, generator=torch.Generator().manual_seed(0))
    source = torch.arange(9) < torch.tensor([[9], [5], [2]])
    target = torch.arange(4) < torch.tensor([[2], [4], [1]])
    found = MEASURES[name](u, v, source, reduction="none")
    assert found.shape == (3, 4)
    expected = [[MEASURES[name](u[b, t, s][None], v[b, t, s][None]) for t in range(4)] for b, s in enumerate(source)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    both = source[:, None] & target[..., None]
    torch.testing.assert_close(MEASURES[name](u, v, both), found[target].mean())
    assert MEASURES[name](u, v, both, reduction="none").isnan().equal(~target)


@pytest.mark.parametrize("name", MEASURES)
def test_rows_with_nan_are_left_out(name):
    u, v = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    expected = MEASURES[name](u[1:], v[1:])
    v[0, 3] = math.nan
    assert MEASURES[name](u, v, reduction="none").isnan().tolist() == [True, False, False]
    torch.testing.assert_close(MEASURES[name](u, v), expected)
    assert MEASURES[name](u[:1], v[:1]).isnan()


def test_a_constant_agrees_with_anything_and_correlates_with_nothing():
    u, v = torch.rand(1, 30), torch.ones(1, 30)
    assert agreement(u, v) == chance_agreement(v) == 1
    assert kendall_tau(u, v).isnan()


def test_correlation_has_a_mean_of_0_over_all_orders():
    u, v = torch.tensor([0.1, 0.9, 0.3, 0.3]), torch.tensor([1.0, 2.0, 2.0, 5.0])
    orders = torch.stack([v[list(order)] for order in itertools.permutations(range(4))])
    assert abs(kendall_tau(u.expand_as(orders), orders).item()) < 1e-12


def test_padding_is_not_the_highest_where_all_words_have_minus_infinity():
    u, v = torch.full((1, 3), -torch.inf), torch.tensor([[9.0, 1.0, 2.0]])
    assert agreement(u, v, torch.tensor([[0, 1, 1]])).item() == 0


def test_correlation_takes_infinite_values():
    u = torch.tensor([[-math.inf, 0.0, math.inf, math.inf]])
    expected = kendall_tau(torch.tensor([[0.0, 1.0, 2.0, 2.0]]), torch.tensor([[3.0, 1.0, 2.0, 4.0]]))
    assert kendall_tau(u, torch.tensor([[3.0, 1.0, 2.0, 4.0]])) == expected


def test_agreement_is_the_performance_of_the_first_checkpoint_that_agrees_better():
    agreements, performances = [0.07, 0.3, 0.3, 0.2, 0.5], [0.1, 0.2, 0.4, 0.5, 0.6]
    assert contextualized_agreement(0.06, agreements, performances) == (0.1, 0)
    assert contextualized_agreement(0.07, agreements, performances) == (0.2, 1)
    assert contextualized_agreement(0.3, agreements, performances) == (0.6, 4)
    assert contextualized_agreement(0.5, agreements, performances) == (0.6, None)


U = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: agreement(U, U[:1]), r"u and v must have one shape .* got \(2, 3, 4\) and \(1, 3, 4\)"),
        (lambda: kendall_tau(U[..., :0], U[..., :0]), "length at least 1, got"),
        (lambda: agreement(U.long(), U), "u and v must be of a floating type, got torch.int64 and torch.float32"),
        (lambda: agreement(U, U, torch.ones(2, 3)), r"mask has shape \(2, 1, 3\), which does not match"),
        (lambda: agreement(U, U, torch.ones(4)), r"mask has shape \(4,\), which does not match u and v"),
        (lambda: chance_agreement(U, torch.ones(1, 2, 4)), r"which does not match v of shape \(2, 3, 4\)"),
        (lambda: agreement(U, U, share=0), r"share must be in \(0, 1\], got 0"),
        (lambda: kendall_tau(U, U, reduction="sum"), "reduction must be one of mean, none, got 'sum'"),
        (lambda: contextualized_agreement(0.1, [], []), "there are 0 agreements and 0 performances"),
        (lambda: contextualized_agreement(0.1, [0.1, 0.2], [1.0]), "there are 2 agreements and 1 performances"),
        (lambda: contextualized_agreement(math.nan, [0.1], [1.0]), "must be numbers, got nan and"),
    ],
    ids=["shapes", "length", "type", "keys", "dimensions", "expand", "share", "reduction", "none", "numbers", "nan"],
)
def test_bad_input_is_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask()
