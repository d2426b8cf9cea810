import re

import pytest
import torch
from figure_texts import overlaps, smallest_text
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
    assert {"positional (1)", "syntactic (2)", "none of these", "layer", "head"} <= set(texts(path))
    fills = re.findall(r"fill: (#\w+)", path.with_suffix(".svg").read_text())
    # One cell each of the first; the second has two, and its patch in the legend.
    assert (fills.count("#0072b2"), fills.count("#d55e00")) == (2, 3)
    with pytest.raises(ValueError, match="there are 9 functions, but only 8 colours"):
        plot_head_functions({str(number): [] for number in range(9)}, SCORES, tmp_path / "x.png")


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
    assert "layer 1, head 0" in texts(path)
    with pytest.raises(ValueError, match="heads are empty"):
        plot_relative_attention(RelativeAttention(attention, attention), [], tmp_path / "x.png")
    with pytest.raises(ValueError, match="window must be from 1 to 3"):
        plot_relative_attention(RelativeAttention(attention, attention), [("encoder", 1, 0)], tmp_path / "x.png")


def test_a_best_head_that_only_equals_the_baseline_is_marked():
    accuracy = {"obj to head": SCORES, "amod to head": HeadScores({"encoder": [[0.3, 0.2], [0.1, 0.1]]})}
    baselines = dict.fromkeys(accuracy, {"encoder": 0.3})
    axes, *_ = plot_roles(RoleScores(accuracy, baselines, baselines)).axes
    assert [text.get_text() for text in axes.texts] == ["0.1", "0.0 = baseline"]


def distances_of(layers, heads):
    """Distances between random points, as divergences."""
    points = torch.randn(layers * heads, 5, generator=torch.Generator().manual_seed(0)).double() / 10
    names = [(layer, head) for layer in range(layers) for head in range(heads)]
    return HeadDistances({"encoder": names}, {"encoder": torch.cdist(points, points).square()})


@pytest.mark.parametrize(("layers", "heads"), [(2, 4), (6, 12), (12, 12)])
def test_names_of_heads_are_apart_whatever_their_distances(layers, heads):
    figure = plot_head_distances(distances_of(layers, heads), title="a model")
    assert len(figure.axes[0].texts) == layers * heads
    assert not overlaps(figure)
    assert smallest_text(figure) >= 7
    styles = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines if line.get_marker() != "None"}
    assert len(styles) == layers
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [str(layer) for layer in range(layers)]


ATTENTION = {"encoder": torch.rand(6, 12, 7)}
PICTURES = {
    "functions": lambda title: plot_head_functions({"positional": [], "syntactic": None}, SCORES, title=title),
    "kept": lambda title: plot_functions_kept(
        {"all": {"heads": 4, "positional": 2, "none": 2}, "pruned": {"heads": 2, "positional": 2, "none": 0}},
        title=title,
    ),
    "roles": lambda title: plot_roles(
        RoleScores({"obj to head": SCORES}, {"obj to head": {"encoder": 0.3}}, {}), title=title
    ),
    "positions": lambda title: plot_relative_attention(
        RelativeAttention(ATTENTION, ATTENTION), [("encoder", 5, head) for head in range(8)], window=3, title=title
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_texts_are_apart_and_large_enough_in_a_picture_800_pixels_wide(name):
    figure = PICTURES[name]("MiniLM on 2,001 sentences")
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8
    assert figure.get_suptitle().endswith("\nMiniLM on 2,001 sentences")


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


def test_kinds_with_a_single_head_are_left_out():
    distances = distances_of(2, 3)
    names, table = distances.heads["encoder"], distances.distances["encoder"]
    both = HeadDistances({"encoder": names, "cross": [(0, 1)]}, {"encoder": table, "cross": torch.zeros(1, 1)})
    assert len([axes for axes in plot_head_distances(both).axes if axes.lines]) == 1
    alone = HeadDistances({"cross": [(0, 1)]}, {"cross": torch.zeros(1, 1)})
    with pytest.raises(ValueError, match="no two heads of one kind of site"):
        plot_head_distances(alone)
