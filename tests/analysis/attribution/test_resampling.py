# Licensed under the Apache License, Version 2.0.
import itertools

import numpy as np
import pytest
import torch

from hf_attn_dynamics.analysis.attribution.claims import interval
from hf_attn_dynamics.analysis.attribution.resampling import MOST_GROUPS, TextGroups


def grouped(*texts):
    """Groups of texts, given a number of each."""
    groups = TextGroups(len(texts), ["sum"])
    for text, number in enumerate(texts):
        groups.add(text, {"sum": torch.as_tensor(number)})
    return groups


def test_all_draws_of_texts_are_equally_likely():
    texts = (1.0, 10.0, 100.0)
    found = torch.stack([one["sum"] for one in grouped(*texts).resamples(20_000)])
    draws = [sum(draw) for draw in itertools.product(texts, repeat=3)]
    assert set(found.tolist()) == set(draws)
    for value in set(draws):
        assert (found == value).double().mean().item() == pytest.approx(draws.count(value) / 27, abs=0.01)


def test_draws_are_those_of_a_seed_and_leave_the_random_state_alone():
    groups = grouped(*range(10))
    state = torch.get_rng_state()
    first, again, other = (torch.stack([one["sum"] for one in groups.resamples(40, seed)]) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("texts", [1, 7, MOST_GROUPS, MOST_GROUPS + 1, 450, 1000])
def test_groups_are_of_consecutive_texts_and_of_equal_size_but_for_one(texts):
    groups = TextGroups(texts, ["first", "number"])
    for text in range(texts):
        groups.add(text, {"first": torch.tensor(float(text)), "number": torch.tensor(1)})
    sizes = groups.sums["number"].int().tolist()
    assert len(sizes) == len(groups) == min(texts, MOST_GROUPS)
    assert sum(sizes) == texts
    assert max(sizes) - min(sizes) <= (texts > MOST_GROUPS)
    starts = [0, *itertools.accumulate(sizes)]
    means = [(start + end - 1) / 2 for start, end in itertools.pairwise(starts)]
    assert (groups.sums["first"] / groups.sums["number"]).tolist() == pytest.approx(means)


def test_texts_may_come_in_any_order_and_go_on_from_saved_sums():
    numbers = torch.arange(500.0).square()
    whole, other = grouped(*numbers), TextGroups(500, ["sum"])
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1)).tolist()
    for text in order[:200]:
        other.add(text, {"sum": numbers[text]})
    other = TextGroups(500, ["sum"], other.sums)
    for text in order[200:]:
        other.add(text, {"sum": numbers[text]})
    assert torch.equal(whole.sums["sum"], other.sums["sum"])


@pytest.mark.parametrize("texts", [30, 400])
def test_intervals_of_a_ratio_cover_it(texts):
    """Of 95 % intervals of 300 samples, 92 to 98 % hold the ratio of the population."""
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        tokens = generator.integers(6, 30, texts)
        hits = generator.binomial(tokens, generator.beta(3, 7, texts))  # texts differ: tokens are no sample
        groups = grouped(*np.stack([hits, tokens], 1).astype(float))
        hits, tokens = torch.stack([one["sum"] for one in groups.resamples(400)]).T
        low, high = interval(hits / tokens)
        covered += low <= 0.3 <= high
    assert 0.91 <= covered / 300 <= 0.98


def test_intervals_are_of_the_values_that_are_there():
    values = torch.arange(101, dtype=torch.float64)
    assert interval(values) == pytest.approx(np.quantile(values, [0.025, 0.975]).tolist())
    missing = torch.full((50,), torch.nan, dtype=torch.float64)
    assert interval(torch.cat([missing, values])) == interval(values)
    assert interval(missing) is None
