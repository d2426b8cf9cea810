# Licensed under the Apache License, Version 2.0.
import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from hf_attn_dynamics import HeadScores, MapCorrelation, RelativeAttention
from hf_attn_dynamics.analysis.attribution.claims import CLAIM_SUMS, AttributionFindings
from hf_attn_dynamics.analysis.attribution.resampling import TextGroups
from hf_attn_dynamics.analysis.attribution.statistics import MAP_TYPES
from hf_attn_dynamics.recipes.attribution_page import attribution_page, claim_table


# Figures of which all five claims hold.
LIKE_BERT = {"local": 0.97, "far": 0.1, "early": -1, "late": 1, "even": 0.9, "lines": 0.1, "blocks": 0.9}


def findings(local, far, early, late, even, lines, blocks):
    """Six layers of two heads; two layers are early, four deep, two late.

    Args:
        local: Correlation with local contributions.
        far: Correlation with global contributions above the first layer.
        early, late: Offset of all attention in the lower and the upper three layers.
        even: Share of global contributions that is even over the five offsets; the others are where attention is.
        lines, blocks: Share of deep diagonal maps, and of early blocks, that are the same as contributions; None where
            there are no such maps.
    """
    whole = torch.tensor([0.9, far, far, far, far, far])[:, None].expand(6, 2)
    correlations = {
        name: MapCorrelation(*(HeadScores({"encoder": one}) for one in (table, table, torch.ones(6, 2), 0 * table)))
        for name, table in (("local", torch.full((6, 2), local)), ("global", whole))
    }
    attention = torch.zeros(6, 2, 5)
    attention[:3, :, 2 + early] = 1
    attention[3:, :, 2 + late] = 1
    maps = {"attention": attention, "global": even / 5 + (1 - even) * attention}
    positions = {name: RelativeAttention({"encoder": table}, {"encoder": table}) for name, table in maps.items()}
    types = torch.zeros(6, 2, 5, 5)
    other = MAP_TYPES.index("heterogeneous")
    types[:, :, other, other] = 100
    for layers, kind, kept in ((slice(2), "block", blocks), (slice(2, 6), "diagonal", lines)):
        if kept is not None:
            types[layers, :, MAP_TYPES.index(kind), MAP_TYPES.index(kind)] = 100 * kept
            types[layers, :, MAP_TYPES.index(kind), other] = 100 * (1 - kept)
    return AttributionFindings("encoder", correlations, positions, types)


def test_claims_hold_of_what_the_paper_found():
    claims = findings(**LIKE_BERT).claims()
    assert all(claim["holds"] is True for claim in claims.values())
    # One of five offsets has all attention: 4/5 away from even, and a tenth of that if nine tenths are even.
    assert claims["global_is_uniform"] == {
        "holds": True,
        "attention": pytest.approx(0.8),
        "global": pytest.approx(0.08),
    }
    assert claims["past_before_future"] == {"holds": True, "early_center": -1, "late_center": 1}
    assert claims["lines_fade_blocks_stay"]["early_blocks_that_stay"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("change", "claim", "answer"),
    [
        ({"local": 0.8}, "local_is_attention", False),
        ({"late": -1}, "past_before_future", False),
        ({"even": 0.4}, "global_is_uniform", False),
        ({"far": 0.4}, "global_parts_from_attention", False),
        ({"lines": 0.7}, "lines_fade_blocks_stay", False),
        ({"blocks": 0.3}, "lines_fade_blocks_stay", False),
        ({"blocks": None}, "lines_fade_blocks_stay", None),
        ({"lines": None}, "lines_fade_blocks_stay", None),
    ],
)
def test_each_claim_is_about_its_own_figures(change, claim, answer):
    claims = findings(**LIKE_BERT | change).claims()
    assert {name: found["holds"] for name, found in claims.items()} == dict.fromkeys(claims, True) | {claim: answer}


def test_layers_without_heads_are_no_layers():
    whole = findings(**LIKE_BERT)
    nothing = torch.full((1, 2), torch.nan)

    def with_empty(scores):
        return HeadScores({"encoder": torch.cat([scores["encoder"], nothing])})

    correlations = {
        name: MapCorrelation(*map(with_empty, vars(found).values())) for name, found in whole.correlations.items()
    }
    positions = {}
    for name, found in whole.positions.items():
        table = torch.cat([found.attention["encoder"], torch.full((1, 2, 5), torch.nan)])
        positions[name] = RelativeAttention({"encoder": table}, {"encoder": table})
    types = torch.cat([whole.types, torch.zeros(1, 2, 5, 5)])
    more = AttributionFindings("encoder", correlations, positions, types)
    assert more.claims() == whole.claims()


def test_few_texts_judge_nothing():
    few = findings(**LIKE_BERT)
    few = AttributionFindings(few.kind, few.correlations, few.positions, few.types / 20)
    assert few.texts == 10
    assert {claim["holds"] for claim in few.claims().values()} == {None}
    # The metrics are there all the same.
    assert few.claims()["past_before_future"]["late_center"] == 1
    reason = "10 texts are too few; at least 20 are needed."
    assert few.not_judged() == dict.fromkeys(few.claims(), reason)
    _, rows = claim_table(few.claims(), few.not_judged())
    assert [row[1] for row in rows] == [f"not judged: {reason}"] * 5


def test_a_claim_about_maps_that_there_are_none_of_is_not_judged():
    found = findings(**LIKE_BERT | {"blocks": None})
    reason = "there are no maps of the types that it is about."
    assert found.not_judged() == {"lines_fade_blocks_stay": reason}
    _, rows = claim_table(found.claims(), found.not_judged())
    assert [row[1] for row in rows] == ["yes"] * 4 + [f"not judged: {reason}"]


def test_findings_are_saved_drawn_and_put_on_a_page(tmp_path):
    found = findings(**LIKE_BERT)
    found.correlations["value_weighted"] = found.correlations["local"]
    found.positions["local"] = found.positions["attention"]
    found.save(tmp_path / "findings.json")
    assert AttributionFindings.load(tmp_path / "findings.json") == found
    assert isinstance(found.plot(), Figure)
    with pytest.raises(ValueError, match="what must be one of global, local, positions, centers, types, got 'claims'"):
        found.plot(what="claims")
    table = found.to_pandas()
    assert len(table) == 12
    assert table.pearson_local.tolist() == pytest.approx([0.97] * 12)
    numbers = dict.fromkeys(("sentences", "tokens", "too_short", "too_long", "identifiable", "seconds"), 1)
    html = attribution_page(found, {"model": "a model", "method": "exact", "device": "cpu", **numbers}).render()
    assert html.count("data:image/png;base64,") == 5


# ---------------------------------------------------------------------------------------------------------------------
# Resampled texts
# ---------------------------------------------------------------------------------------------------------------------


OTHER, BLOCK, DIAGONAL = (MAP_TYPES.index(name) for name in ("heterogeneous", "block", "diagonal"))


def sums_of_text(rows=10.0, local=0.97, early=-1, late=1, blocks=(4, 0), words=(-2, 2)):
    """Sums of a text as a model of six layers of two heads gives them, of which all claims hold by default.

    Args:
        rows: Number of rows, and of occurrences of each offset.
        local: Correlation with local contributions.
        early, late: Offset of all attention in the lower and the upper three layers.
        blocks: Number of the four early maps that are blocks and stay, and of those that are blocks and do not.
        words: Offset of all attention between words in the lower and the upper three layers.
    """
    table = torch.ones(6, 2, dtype=torch.float64)
    far = table.clone()
    far[1:] = 0.1
    sums = {"occurrences": torch.full((5,), rows, dtype=torch.float64)}
    for name, correlation in (("local", local * table), ("global", far)):
        sums |= {f"{name}.rows": rows * table, f"{name}.constant": 0 * table}
        sums |= {f"{name}.{measure}": rows * correlation for measure in ("pearson", "spearman")}
    attention = torch.zeros(6, 2, 5, dtype=torch.float64)
    attention[:3, :, 2 + early] = rows
    attention[3:, :, 2 + late] = rows
    sums |= {"attention.attention": attention, "global.attention": 0.9 * rows / 5 + 0.1 * attention}
    between = torch.zeros(6, 2, 5, dtype=torch.float64)
    for layers, offset in zip((slice(3), slice(3, 6)), words):
        between[layers, :, 2 + offset] = rows / 2
    sums |= {
        "attention_between_words.attention": between,
        "attention_between_words.occurrences": sums["occurrences"] / 2,
    }
    types = torch.zeros(6, 2, 5, 5, dtype=torch.float64)
    types[2:, :, DIAGONAL, OTHER] = 1
    stay, change = blocks
    early_maps = [(BLOCK, BLOCK)] * stay + [(BLOCK, OTHER)] * change + [(OTHER, OTHER)] * (4 - stay - change)
    for place, (one, two) in enumerate(early_maps):
        types[place // 2, place % 2, one, two] = 1
    return {**sums, "types": types}


def of_texts(texts):
    groups = TextGroups(len(texts), CLAIM_SUMS)
    for index, sums in enumerate(texts):
        groups.add(index, sums)
    whole = {name: sum(sums[name] for sums in texts) for name in CLAIM_SUMS}
    return AttributionFindings.of(whole, "encoder", groups)


def test_identical_texts_leave_no_doubt():
    found = of_texts([sums_of_text()] * 30)
    for claim in found.claims().values():
        assert (claim["holds"], claim["holds_in"]) == (True, 1)
        for metric, (low, high) in claim["intervals"].items():
            assert low == pytest.approx(high, abs=1e-12)
            assert low == pytest.approx(claim[metric], abs=1e-12)
    assert found.not_judged() == {}


def test_metrics_of_resamples_are_those_of_resampled_sums():
    """Against a bootstrap by numpy with formulas of its own."""
    generator = np.random.default_rng(5)
    texts = [
        {
            "rows": float(generator.integers(4, 40)),
            "early": int(generator.integers(-2, 3)),
            "late": int(generator.integers(0, 3)),
            "local": generator.uniform(0.4, 1),
            "blocks": tuple(generator.integers(0, 3, 2)),
        }
        for _ in range(25)
    ]
    rows, early, late, local = (
        np.array([text[name] for text in texts]) for name in ("rows", "early", "late", "local")
    )
    stay, change = np.array([text["blocks"] for text in texts]).T
    drawn = generator.integers(0, 25, (20_000, 25))

    def mean(values, weights):
        return (values * weights)[drawn].sum(1) / weights[drawn].sum(1)

    # The lower three of six layers attend to one offset, the upper three to another.
    expected = {
        ("past_before_future", "early_center"): mean(early, rows),
        ("past_before_future", "late_center"): mean(late, rows),
        ("lines_fade_blocks_stay", "early_blocks_that_stay"): mean(stay / (stay + change + 1e-9), stay + change),
        ("local_is_attention", "pearson_above_0.7"): (mean(local, rows) > 0.7).astype(float),
    }
    found = of_texts([sums_of_text(**text) for text in texts])
    claims = found.claims()
    for (claim, metric), values in expected.items():
        width = np.ptp(np.quantile(values, [0.025, 0.975]))
        assert claims[claim]["intervals"][metric] == pytest.approx(
            np.quantile(values, [0.025, 0.975]), abs=0.1 * width + 1e-9
        )
        # 1,000 resamples: standard error of a fraction of at most 0.016, of the mean of width / 4 / √1,000.
        assert found.resampled[claim][metric].mean().item() == pytest.approx(values.mean(), abs=0.05 * width + 1e-9)
    holds = (expected["past_before_future", "early_center"] < 0) & (expected["past_before_future", "late_center"] > 0)
    assert claims["past_before_future"]["holds_in"] == pytest.approx(holds.mean(), abs=0.05)


def test_attention_between_words_is_measured_and_decides_nothing():
    found = of_texts([sums_of_text(words=(2, -1))] * 30)
    claim = found.claims()["past_before_future"]
    assert (claim["holds"], claim["early_center"], claim["late_center"]) == (True, -1, 1)
    assert claim["early_center_between_words"] == pytest.approx(2)
    assert claim["late_center_between_words"] == pytest.approx(-1)
    assert claim["intervals"]["early_center_between_words"] == pytest.approx([2, 2])
    assert found.positions["attention_between_words"].attention["encoder"].nansum(-1) == pytest.approx(1)
    legend = [text.get_text() for text in found.plot(what="centers").axes[0].get_legend().get_texts()]
    assert legend == ["attention", "contribution of the input", "attention between words"]
    assert found.to_pandas().center_attention_between_words.tolist() == pytest.approx([2] * 6 + [-1] * 6)


def test_a_claim_about_which_resamples_disagree_is_undecided():
    found = of_texts([sums_of_text(early=early) for early in [-1] * 11 + [1] * 10])
    claim = found.claims()["past_before_future"]
    assert claim["early_center"] == pytest.approx(-1 / 21)
    assert claim["holds"] is None
    assert 0.4 < claim["holds_in"] < 0.7
    low, high = claim["intervals"]["early_center"]
    assert low < -1 / 21 < 0 < high
    reason = (
        f"undecided at 21 texts: it holds for them, but only {claim['holds_in']:.1%} of their resamples agree; "
        "95% are needed."
    )
    assert found.not_judged() == {"past_before_future": reason}
    _, rows = claim_table(found.claims(), found.not_judged())
    assert [row[1] for row in rows] == ["yes", f"not judged: {reason}", "yes", "yes", "yes"]
    assert rows[1][2] == f"{claim['holds_in']:.1%}"
    assert (
        f"early center: -0.05 [{low:.2f}, {high:.2f}]; late center: 1.00 [1.00, 1.00]; early center between"
        in rows[1][3]
    )
    shown = found._repr_html_()
    assert f"not judged: {reason}" in shown
    assert f"early center: -0.05 [{low:.2f}, {high:.2f}]" in shown


@pytest.mark.parametrize(("earlier", "answer"), [(0, True), (6, None), (27, False)])
def test_an_answer_stands_if_resamples_agree(earlier, answer):
    found = of_texts([sums_of_text(early=early) for early in [-1] * (30 - earlier) + [2] * earlier])
    claim = found.claims()["past_before_future"]
    assert claim["holds"] is answer
    assert {True: claim["holds_in"] >= 0.95, False: claim["holds_in"] <= 0.05}.get(answer, True)


def test_resamples_without_maps_of_a_type_do_not_agree():
    found = of_texts([sums_of_text(blocks=(3, 1) if text == 7 else (0, 0)) for text in range(30)])
    claim = found.claims()["lines_fade_blocks_stay"]
    assert claim["early_blocks_that_stay"] == 0.75
    assert claim["holds"] is None
    # (29/30)^30 of the resamples lack the only text with blocks.
    assert claim["holds_in"] == pytest.approx(1 - (29 / 30) ** 30, abs=0.05)
    assert claim["intervals"]["early_blocks_that_stay"] == [0.75, 0.75]
    assert found.resampled["lines_fade_blocks_stay"]["holds"].isnan().any()


def test_resamples_without_any_maps_of_a_type_give_no_fraction():
    found = of_texts([sums_of_text(blocks=(0, 0))] * 30)
    claim = found.claims()["lines_fade_blocks_stay"]
    assert (claim["holds"], claim["holds_in"]) == (None, None)
    assert claim["intervals"]["early_blocks_that_stay"] is None
    _, rows = claim_table(found.claims(), found.not_judged())
    assert rows[4][2] is None
    assert "early blocks that stay: –;" in rows[4][3]


def test_few_texts_are_not_resampled():
    found = of_texts([sums_of_text()] * 19)
    assert found.resampled == {}
    assert all(claim["holds"] is None and "intervals" not in claim for claim in found.claims().values())


def test_resamples_are_saved_and_earlier_files_have_none(tmp_path):
    found = of_texts([sums_of_text(early=early) for early in [-1] * 11 + [1] * 10])
    found.save(tmp_path / "findings.json")
    back = AttributionFindings.load(tmp_path / "findings.json")
    assert back == found
    assert back.claims() == found.claims()
    earlier = json.loads((tmp_path / "findings.json").read_text())
    del earlier["resampled"]
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    back = AttributionFindings.load(tmp_path / "earlier.json")
    claim = back.claims()["past_before_future"]
    assert claim == {
        "holds": True,
        "early_center": pytest.approx(-1 / 21),
        "late_center": 1,
        "early_center_between_words": pytest.approx(-2),
        "late_center_between_words": pytest.approx(2),
    }
    _, rows = claim_table(back.claims(), back.not_judged())
    assert {row[2] for row in rows} == {"not measured"}
