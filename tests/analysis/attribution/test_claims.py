# Licensed under the Apache License, Version 2.0.
import pytest
import torch
from matplotlib.figure import Figure

from hf_attn_dynamics import HeadScores, MapCorrelation, RelativeAttention
from hf_attn_dynamics.analysis.attribution.claims import AttributionFindings
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
