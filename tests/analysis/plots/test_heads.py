import re

import pytest
import torch
from matplotlib.figure import Figure

from hf_attn_dynamics import (
    CoreferenceScores,
    HeadDistances,
    HeadScores,
    HeadTimeline,
    MapCorrelation,
    RelativeAttention,
)
from hf_attn_dynamics.analysis.observers.roles import RoleScores
from hf_attn_dynamics.analysis.plots.heads import (
    plot_functions_kept,
    plot_head_distances,
    plot_head_functions,
    plot_relative_attention,
    plot_roles,
)


def texts(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.with_suffix(".svg").read_text(encoding="utf-8"))


SCORES = HeadScores({"encoder": [[0.1, 0.9], [0.4, float("nan")]]})


def test_functions_are_named_and_share_cells(tmp_path):
    functions = {"positional": [("encoder", 0, 1, -1, 0.95)], "syntactic": [("encoder", 0, 1), ("encoder", 1, 0)]}
    plot_head_functions(functions, SCORES, path := tmp_path / "functions.png")
    assert {"positional", "syntactic", "none of these", "layer", "head"} <= set(texts(path))
    fills = re.findall(r"fill: (#\w+)", path.with_suffix(".svg").read_text())
    # One cell each of the first; the second has two, and its patch in the legend.
    assert (fills.count("#0072b2"), fills.count("#d55e00")) == (2, 3)
    with pytest.raises(ValueError, match="there are 7 functions, but only 6 colours"):
        plot_head_functions({str(number): [] for number in range(7)}, SCORES, tmp_path / "x.png")


def test_functions_that_are_kept_are_counted(tmp_path):
    kept = {"all": {"heads": 4, "positional": 2, "none": 2}, "pruned": {"heads": 2, "positional": 2, "none": 0}}
    plot_functions_kept(kept, path := tmp_path / "kept.png")
    assert {"positional (2)", "none (2)", "2 heads", "4 heads"} <= set(texts(path))


def test_roles_name_their_best_head(tmp_path):
    roles = RoleScores({"obj to head": SCORES}, {"obj to head": {"encoder": 0.3}}, {"obj to head": {"encoder": 9}})
    plot_roles(roles, path := tmp_path / "roles.png", title="trees")
    assert {"obj to head", "0.1", "trees", "baseline"} <= set(texts(path))


def test_relative_attention_is_drawn_for_the_heads_that_are_named(tmp_path):
    attention = {"encoder": torch.rand(2, 2, 7)}
    plot_relative_attention(
        RelativeAttention(attention, attention), [("encoder", 1, 0)], path := tmp_path / "positions.png", window=3
    )
    assert "1.0" in texts(path)
    with pytest.raises(ValueError, match="heads are empty"):
        plot_relative_attention(RelativeAttention(attention, attention), [], tmp_path / "x.png")
    with pytest.raises(ValueError, match="window must be from 1 to 3"):
        plot_relative_attention(RelativeAttention(attention, attention), [("encoder", 1, 0)], tmp_path / "x.png")


def test_distances_name_every_head(tmp_path):
    distances = HeadDistances({"encoder": [(0, 0), (0, 1), (1, 0)]}, {"encoder": torch.ones(3, 3).fill_diagonal_(0.0)})
    plot_head_distances(distances, path := tmp_path / "distances.png")
    assert {"0.0", "0.1", "1.0"} <= set(texts(path))


def test_results_draw_themselves(tmp_path, monkeypatch):
    roles = RoleScores({"obj to head": SCORES}, {"obj to head": {"encoder": 0.3}}, {"obj to head": {"encoder": 9}})
    attention = {"encoder": torch.rand(2, 2, 7)}
    timeline = HeadTimeline()
    timeline.record(0, "confidence", SCORES)
    results = {
        "scores": SCORES,
        "roles": roles,
        "positions": RelativeAttention(attention, attention),
        "distances": HeadDistances({"encoder": [(0, 0), (1, 0)]}, {"encoder": torch.ones(2, 2).fill_diagonal_(0.0)}),
        "correlation": MapCorrelation(SCORES, SCORES, SCORES, SCORES),
        "coreference": CoreferenceScores({"all": SCORES}, {"all": 9}, {"chance": {"all": 0.1}}, {}, True, False),
        "timeline": timeline,
    }
    monkeypatch.chdir(tmp_path)
    for name, result in results.items():
        assert isinstance(result.plot(), Figure)
        assert not (tmp_path / f"{name}.png").exists()
        assert isinstance(result.plot(f"{name}.png"), Figure)
        assert (tmp_path / f"{name}.svg").is_file()
        if name != "timeline":
            assert "<table" in result._repr_html_()
