"""Selections of heads and units: against all selections of tiny problems, and applied to models."""

import copy
import itertools

import numpy as np
import pytest
import torch
from slow_unit_scores import lone_sentences, padded, scored_model
from stock_models import build_stock

from hf_attn_dynamics import (
    HeadScores,
    Selection,
    UnitScores,
    count_flops_table,
    head_importance,
    prune_heads,
    prune_units,
    select_parts,
    unit_importance,
)
from hf_attn_dynamics.analysis.heads import selection as selection_module
from hf_attn_dynamics.analysis.heads.selection import _Site, best_counts, exchanged
from hf_attn_dynamics.models.cost_table import CostTable
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.unit_roles import locate_units


def problem(seed, convex):
    """Three or four sites with up to five elements, whose values come in descending order."""
    random = np.random.default_rng(seed)
    sites = []
    for size in random.integers(1, 6, random.integers(3, 5)):
        values = np.concatenate([[0], np.cumsum(np.sort(random.exponential(size=size))[::-1])])
        if convex:
            costs = np.concatenate([[0], np.cumsum(np.sort(random.uniform(0.1, 1, size)))])
        else:
            costs = random.uniform(0, size, size + 1)
        sites.append(_Site(values, costs))
    cheapest, dearest = (sum(reduce(site.costs) for site in sites) for reduce in (np.min, np.max))
    return sites, cheapest + random.uniform(0.05, 0.95) * (dearest - cheapest)


def value_of(sites, counts):
    return sum(site.values[count] for site, count in zip(sites, counts))


def cost_of(sites, counts):
    return sum(site.costs[count] for site, count in zip(sites, counts))


def optimum(sites, budget):
    every = itertools.product(*(range(len(site.values)) for site in sites))
    return max(value_of(sites, counts) for counts in every if cost_of(sites, counts) <= budget)


@pytest.mark.parametrize("seed", range(40))
def test_where_costs_are_convex_the_optimum_is_missed_by_less_than_one_element(seed):
    sites, budget = problem(seed, convex=True)
    counts, bound = best_counts(sites, budget)
    assert cost_of(sites, counts) <= budget
    best, value = optimum(sites, budget), value_of(sites, counts)
    assert value <= best + 1e-12
    assert best <= bound + 1e-9
    assert bound - value <= max(np.diff(site.values).max() for site in sites) + 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_for_any_costs_nothing_else_fits_and_the_bound_holds(seed):
    sites, budget = problem(seed, convex=False)
    counts, bound = best_counts(sites, budget)
    cost = cost_of(sites, counts)
    assert cost <= budget
    assert value_of(sites, counts) <= optimum(sites, budget) + 1e-12 <= bound + 1e-9
    for site, count in zip(sites, counts):
        for larger in range(count + 1, len(site.values)):
            assert cost + site.costs[larger] - site.costs[count] > budget


def test_selections_are_mostly_optimal_even_for_any_costs():
    problems = [problem(seed, convex=False) for seed in range(200)]
    ratios = [value_of(sites, best_counts(sites, budget)[0]) / optimum(sites, budget) for sites, budget in problems]
    assert np.mean(ratios) > 0.95


def test_a_budget_for_everything_keeps_everything():
    sites, _ = problem(0, convex=True)
    counts, bound = best_counts(sites, sum(site.costs[-1] for site in sites) + 1e-9)
    assert counts == [len(site.values) - 1 for site in sites]
    assert bound == pytest.approx(value_of(sites, counts))


def test_elements_without_value_stay_if_they_fit():
    site = _Site(np.zeros(4), np.arange(4.0))
    assert best_counts([site], 2.0)[0] == [2]


@pytest.fixture(scope="module")
def bert():
    model = build_stock("bert").double()
    return model, count_flops_table(model, length=8), unit_importance(model, method="random")


def counts(model):
    heads = {layer.site: len(layer.heads) for layer in locate_heads(model)}
    return heads, {layer.site: len(layer.units) for layer in locate_units(model)}


@pytest.mark.parametrize("speedup", [1.01, 1.2, 1.5, 2, 3])
@pytest.mark.parametrize("name", ["bert", "llama", "marian", "t5", "gpt2", "modernbert", "albert", "opt"])
def test_applied_selections_reach_the_target_and_no_group_or_unit_is_left_that_fits(name, speedup):
    model = build_stock(name)
    table, scores = count_flops_table(model, length=8), unit_importance(model, method="random")
    if speedup > table.largest_speedup()["blocks"]:
        with pytest.raises(ValueError, match="cannot be reached by heads and units: at most"):
            select_parts(model, scores, table, speedup)
        return
    selection = select_parts(model, scores, table, speedup)
    groups = {layer.site: layer.group_size for layer in locate_heads(model)}
    selection.apply(model)
    assert table.speedup_of(model) == selection.speedup >= speedup
    assert 0 <= selection.retained <= selection.bound <= 1
    left = dict(zip(("heads", "units"), counts(model)))
    for part, own in left.items():
        for site, count in own.items():
            more = {**own, site: count + (groups[site] if part == "heads" else 1)}
            dense = selection.num_heads if part == "heads" else selection.num_units
            if more[site] <= dense[site.kind]:
                changed = {**left, part: more}
                assert table.dense / table.cost(changed["heads"], changed["units"]) < speedup


def test_what_stays_are_the_best_of_each_block(bert):
    model, table, scores = bert
    selection = select_parts(model, scores, table, 1.6)
    for part, kept in (("heads", selection.heads), ("units", selection.units)):
        for layer, own in enumerate(kept["encoder"]):
            ranked = scores.of(part)["encoder"][layer].argsort(descending=True).tolist()
            assert own == sorted(ranked[: len(own)])


def test_the_best_of_all_selections_of_a_tiny_model_is_within_the_bound():
    model = build_stock("bert", num_hidden_layers=2, intermediate_size=4)
    table, scores = count_flops_table(model, length=4), unit_importance(model, method="random", seed=2)
    selection = select_parts(model, scores, table, 1.3)
    ranked = {part: scores.of(part)["encoder"].sort(1, descending=True).values.tolist() for part in ("heads", "units")}
    sites = [layer.site for layer in locate_heads(model)]
    whole = sum(sum(map(sum, rows)) for rows in ranked.values())
    best = 0.0
    for numbers in itertools.product(range(5), repeat=4):
        cost = table.cost(dict(zip(sites, numbers[:2])), dict(zip(sites, numbers[2:])))
        if table.dense / cost >= 1.3:
            rows = [*zip(ranked["heads"], numbers[:2]), *zip(ranked["units"], numbers[2:])]
            best = max(best, sum(sum(row[:number]) for row, number in rows) / whole)
    assert selection.retained <= best + 1e-12 <= selection.bound + 1e-9
    assert selection.retained > 0.9 * best


def test_query_heads_of_one_key_value_head_stay_together():
    model = build_stock("llama")
    table, scores = count_flops_table(model, length=8), unit_importance(model, method="random")
    selection = select_parts(model, scores, table, 1.4, parts="heads")
    assert {len(own) for own in selection.heads["decoder"]} <= {0, 2, 4, 6}
    pairs = [scores.heads["decoder"][layer].view(3, 2).sum(1) for layer in range(3)]
    for own, pair in zip(selection.heads["decoder"], pairs):
        ranked = pair.argsort(descending=True).tolist()[: len(own) // 2]
        assert own == sorted(2 * group + i for group in ranked for i in range(2))


def test_equal_scores_are_chosen_in_order(bert):
    model, table, _ = bert
    equal = UnitScores(HeadScores({"encoder": torch.ones(3, 4)}), {"encoder": torch.ones(3, 24)})
    selection = select_parts(model, equal, table, 1.5)
    assert selection == select_parts(model, equal, table, 1.5)
    for kept in (selection.heads, selection.units):
        assert all(own == list(range(len(own))) for own in kept["encoder"])


@pytest.mark.parametrize("parts", ["heads", "units"])
def test_only_requested_parts_are_removed(bert, parts):
    model, table, scores = bert
    selection = select_parts(model, scores, table, 1.2, parts=parts)
    kept, dense = (selection.units, 24) if parts == "heads" else (selection.heads, 4)
    assert [len(own) for own in kept["encoder"]] == [dense] * 3
    assert selection.speedup >= 1.2


def test_what_has_been_removed_counts(bert):
    model, table, _ = bert
    model = prune_units(prune_heads(copy.deepcopy(model), {0: [1, 2]}), {1: "0-9"})
    before = table.speedup_of(model)
    scores = unit_importance(model, method="random")
    selection = select_parts(model, scores, table, 1.5)
    assert not {1, 2} & {*selection.heads["encoder"][0]}
    assert before < 1.5 <= selection.speedup
    selection.apply(model)
    assert table.speedup_of(model) == selection.speedup
    slower = select_parts(model, unit_importance(model, method="random"), table, 1.1)
    assert slower.retained == 1
    assert slower.apply(copy.deepcopy(model)).config.to_dict() == model.config.to_dict()


def test_measured_tables_may_have_steps_and_noise(bert):
    model, table, scores = bert
    measured = CostTable(
        "seconds",
        0.002,
        {"encoder": [[0, 0.0], [2, 0.003], [3, 0.0029], [4, 0.004]]},
        {"encoder": [[0, 0.0], [8, 0.004], [16, 0.0038], [23, 0.006], [24, 0.0059]]},
        {"encoder": 3},
        fingerprint=table.fingerprint,
    )
    for speedup in (1.1, 1.5, 2.5, 5, 10):
        selection = select_parts(model, scores, measured, speedup)
        assert selection.speedup >= speedup
        assert selection.quantity == "seconds"


def test_models_whose_units_are_unknown_lose_heads():
    model = build_stock("mixtral")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])}
    scores = UnitScores(head_importance(model, inputs), {})
    table = count_flops_table(model, length=8)
    selection = select_parts(model, scores, table, 1.1, parts="heads")
    selection.apply(model)
    assert table.speedup_of(model) == selection.speedup >= 1.1


def test_exchanges_among_candidates_lower_the_quadratic_form(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(30, 40, generator=generator)
    fisher, removed = gradients.T @ gradients / 30, torch.arange(40) % 2 == 0
    values = []
    for candidates in (1, 5, 20):
        monkeypatch.setattr(selection_module, "CANDIDATES", candidates)
        after = exchanged(fisher, removed).float()
        assert after.sum() == removed.sum()
        values.append((after @ fisher @ after).item())
    before = removed.float()
    assert values[-1] <= values[1] < (before @ fisher @ before).item()
    assert values[0] <= (before @ fisher @ before).item()


def test_exchanges_never_raise_the_quadratic_form_and_end_at_the_best_of_pairs():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        gradients = torch.randn(6, 9, generator=generator, dtype=torch.float64)
        fisher = gradients.T @ gradients / 6
        removed = torch.arange(9) < 4
        after = exchanged(fisher, removed)

        def form(mask, fisher=fisher):
            return float(mask.double() @ fisher @ mask.double())

        assert after.sum() == 4
        assert form(after) <= form(removed) + 1e-12
        for back, out in itertools.product(after.nonzero().flatten(), (~after).nonzero().flatten()):
            other = after.clone()
            other[back], other[out] = False, True
            assert form(other) >= form(after) - 1e-9


@pytest.mark.parametrize("name", ["bert", "llama", "marian"])
def test_rearranged_selections_lower_the_quadratic_form_of_each_block(name):
    model = scored_model(name)
    scores = unit_importance(model, padded(lone_sentences(model)), keep_gradients=True)
    table = count_flops_table(model, length=8)
    plain, rearranged = (select_parts(model, scores, table, 1.8, rearrange=choice) for choice in (False, True))
    assert rearranged.speedup == plain.speedup
    lower = []
    for part, elements in (("heads", locate_heads(model)), ("units", locate_units(model))):
        for layer in elements:
            kind, number = layer.site
            gradients = scores.gradients[part][kind][:, number]
            before, after = (
                gradients[:, [one for one in range(gradients.shape[1]) if one not in kept[kind][number]]].sum(1)
                for kept in ((one.heads if part == "heads" else one.units) for one in (plain, rearranged))
            )
            # mᵀFm is the mean of the squared sums of gradients.
            lower.append(float(before.square().mean() - after.square().mean()))
    assert min(lower) >= -1e-12
    assert max(lower) > 0


def test_a_selection_is_saved_with_ranges_and_shown(bert, tmp_path):
    model, table, scores = bert
    selection = select_parts(model, scores, table, 3)
    selection.save(tmp_path / "selection.json")
    assert Selection.load(tmp_path / "selection.json") == selection
    assert all(isinstance(own, str) for own in selection.to_dict()["units"]["encoder"])
    rows = list(selection.records())
    assert len(rows) == 6
    assert rows[0] == ("heads", "encoder", 0, len(selection.heads["encoder"][0]), 4)
    assert f"{sum(selection.left('units')['encoder'])} of 72" in str(selection)
    figure = selection.plot(tmp_path / "left.png", title="BERT")
    (axes,) = figure.axes
    heads, units = axes.containers
    assert [bar.get_height() for bar in heads] == pytest.approx(
        [100 * left / 4 for left in selection.left("heads")["encoder"]]
    )
    assert [bar.get_height() for bar in units] == pytest.approx(
        [100 * left / 24 for left in selection.left("units")["encoder"]]
    )
    assert (tmp_path / "left.svg").is_file()


def test_a_selection_is_not_applied_to_another_model(bert):
    model, table, scores = bert
    selection = select_parts(model, scores, table, 1.5)
    with pytest.raises(ValueError, match="selection is for another model: GPT2LMHeadModel has 4 heads in decoder"):
        selection.apply(build_stock("gpt2"))
    head = selection.heads["encoder"][1][0]
    pruned = prune_heads(copy.deepcopy(model), {1: [head]})
    before = copy.deepcopy(pruned.config.to_dict())
    with pytest.raises(ValueError, match=f"keeps head {head} of encoder layer 1, which has been removed"):
        selection.apply(pruned)
    assert pruned.config.to_dict() == before


def test_impossible_requests_are_refused(bert):
    model, table, scores = bert
    other = build_stock("bert", intermediate_size=28)
    nan = UnitScores(scores.heads, {"encoder": scores.units["encoder"].clone()})
    nan.units["encoder"][1, 3] = float("nan")
    negative = UnitScores(HeadScores({"encoder": -scores.heads["encoder"]}), scores.units)
    for arguments, message in (
        ((scores, table, 1), "speedup must be a number greater than 1, got 1"),
        ((scores, table, float("nan")), "speedup must be a number greater than 1, got nan"),
        ((scores, table, 100), "100 × cannot be reached by heads and units: at most"),
        ((scores, table, 10, "heads"), "10 × cannot be reached by heads alone: at most"),
        ((scores, table, 2, ["layers"]), r"parts must be one or both of heads, units, got \['layers'\]"),
        ((scores, table, 2, []), r"parts must be one or both of heads, units, got \[\]"),
        ((scores.heads, table, 2), "scores must be the UnitScores of unit_importance\\(\\), got HeadScores"),
        ((scores.per_cost(table), table, 2), "scores are divided by cost, per FLOP"),
        ((nan, table, 2), "score of encoder layer 1, unit 3 is nan"),
        ((negative, table, 2), "scores must be numbers of at least 0, but the score of encoder layer 0, head 0"),
        ((UnitScores(scores.heads, {}), table, 2), "scores of the units of encoder are missing"),
        ((unit_importance(other, method="random"), table, 2), r"scores of encoder must have shape \(layers, units\)"),
        ((scores, count_flops_table(other, length=8), 2), "cost table does not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            select_parts(model, *arguments)
    with pytest.raises(ValueError, match="rearrange=True needs scores of unit_importance"):
        select_parts(model, scores, table, 1.5, rearrange=True)
