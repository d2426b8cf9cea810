import math

import pytest
import torch
from figure_texts import overlaps, smallest_text

from hf_attn_dynamics import HeadScores, HeadTimeline
from hf_attn_dynamics.analysis.plots.dynamics import plot_head_dynamics


def timeline(layers=2, heads=3, top=1.0, weight=True):
    """Confidence that rises evenly from 0 over 100 steps, for each head to another height; one head is removed."""
    ends = torch.linspace(0, top, layers * heads, dtype=torch.float64).reshape(layers, heads)
    ends[0, 1] = math.nan
    made = HeadTimeline()
    for step in range(0, 101, 25):
        made.record(step, "confidence", HeadScores({"encoder": ends * step / 100, "cross": ends}))
        made.record(step, "entropy", HeadScores({"encoder": 4 - 2 * ends}))
        if weight:
            made.record(step, "guidance_weight", 0.1 * (1 - step / 100))
    return made


def runs():
    return {"guided": timeline(), "unguided": timeline(top=0.5, weight=False)}


@pytest.fixture
def draw():
    """Gives the panels that are drawn in, row by row."""

    def panels(*args, **kwargs):
        figure = plot_head_dynamics(*args, **kwargs)
        figure.draw_without_rendering()
        return [axes for axes in figure.axes if axes.axison]

    return panels


def titled(panels, title):
    (found,) = (axes for axes in panels if axes.get_title() == title)
    return found


def test_the_picture_is_two_files_that_are_the_same_each_time(tmp_path):
    path, again = (tmp_path / folder / "heads.png" for folder in "ab")
    for one in (path, again):
        plot_head_dynamics(runs(), one.with_suffix(".svg"), "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    svg = path.with_suffix(".svg").read_text()
    for words in ("a title", "unguided; encoder self-attention", "guidance weight", "entropy (nats)"):
        assert words in svg
    assert svg == again.with_suffix(".svg").read_text()


def test_each_head_is_a_line_in_the_colour_of_its_layer_at_the_same_scale_in_all_runs(draw):
    panels = draw(runs(), statistics=["entropy"])
    guided, unguided = (titled(panels, f"{run}; encoder self-attention") for run in runs())
    assert len(guided.lines) == 6
    assert list(guided.lines[5].get_xdata()) == [0, 25, 50, 75, 100]
    assert guided.lines[5].get_ydata() == pytest.approx([2] * 5)
    colours = [line.get_color() for line in guided.lines]
    assert colours[:3] == colours[:1] * 3
    assert colours[3:] == colours[3:4] * 3
    assert colours[0] != colours[3]
    assert guided.get_ylim() == unguided.get_ylim()
    assert guided.get_ylim()[0] <= 0
    assert guided.get_ylim()[1] >= 4


def test_many_heads_are_rows_of_a_heat_map_of_the_same_colours_in_all_runs(draw):
    many = {"a": timeline(12, 12), "b": timeline(12, 12, top=0.3)}
    panels = draw(many, statistics=["confidence"], thresholds={})
    meshes = [titled(panels, f"{run}; encoder self-attention").collections[0] for run in many]
    assert meshes[0].get_array().shape == (144, 5)
    assert meshes[0].get_array()[143].tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert [mesh.get_clim() for mesh in meshes] == [(0, 1)] * 2


def test_the_line_of_each_head_is_named_at_its_end_and_names_are_apart():
    many = timeline(4, 4)
    for step in range(0, 101, 25):
        # Half of the heads end at nearly the same height.
        ends = torch.cat([torch.linspace(0.93, 0.94, 8), torch.linspace(0, 0.5, 8)]).reshape(4, 4).double()
        many.record(step, "confidence", HeadScores({"encoder": ends * step / 100}))
    figure = plot_head_dynamics({"guided": many, "unguided": many}, title="a model", statistics=["confidence"])
    for axes in figure.axes[:2]:
        names = " ".join(text.get_text() for text in axes.texts).split()
        assert sorted(names) == [f"{layer}.{head}" for layer in range(4) for head in range(4)]
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8
    assert len({line.get_linestyle() for line in figure.axes[0].lines[:3]} | {None}) > 1


def test_rows_of_a_heat_map_have_the_names_of_their_heads(draw):
    (axes, _) = draw(timeline(6, 12), statistics=["entropy"])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"{n // 12}.{n % 12}" for n in range(72)]
    figure = plot_head_dynamics(timeline(12, 12), title="a model", statistics=["entropy"])
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert names[:7] == ["0.0", "0.2", "0.4", "0.6", "0.8", "0.10", "1.0"]
    assert not overlaps(figure)


def test_no_column_of_the_picture_is_empty(draw):
    panels = draw(runs(), statistics=["confidence", "entropy"])
    shown = {tuple(axes.get_position().intervalx.round(2)) for axes in panels}
    # Two runs and their colour bars; maps of first steps stand below the lines.
    assert len(shown) == 3


def test_maps_show_when_each_head_first_reached_the_threshold(draw):
    panels = draw(runs(), statistics=["confidence"], thresholds={"confidence": 0.4})
    # Heads end at 0, removed, 0.4, 0.6, 0.8 and 1 of the way; the other site is there from the start.
    guided = [
        axes.images[0].get_array() for axes in panels if axes.get_title() == "guided\nconfidence ≥ 0.4: 4 of 5 heads"
    ]
    assert len(guided) == 2
    assert guided[0].filled(-1).tolist() == [[-1, -1, 100], [75, 50, 50]]
    assert guided[1].filled(-1).tolist() == [[-1, -1, 0], [0, 0, 0]]
    unguided = [
        axes.images[0].get_array() for axes in panels if axes.get_title() == "unguided\nconfidence ≥ 0.4: 2 of 5 heads"
    ]
    assert unguided[0].filled(-1).tolist() == [[-1, -1, -1], [-1, 100, 100]]


def test_confident_heads_have_maps_by_default_and_other_statistics_have_none(draw):
    assert sum(bool(axes.images) for axes in draw(runs())) == 4
    assert not any(axes.images for axes in draw(runs(), statistics=["entropy"]))


def test_a_number_of_the_whole_model_is_a_line_where_there_is_one(draw):
    (panel,) = draw(runs(), statistics=["guidance_weight"])
    assert panel.get_title() == "guided"
    assert panel.lines[0].get_ydata() == pytest.approx([0.1, 0.075, 0.05, 0.025, 0])
    assert panel.get_ylim()[1] < 0.2


def test_one_run_needs_no_name_and_one_measurement_is_enough(draw):
    made = HeadTimeline()
    made.record(0, "confidence", HeadScores({"encoder": torch.rand(12, 12)}))
    titles = [axes.get_title() for axes in draw(made)]
    assert titles[0] == "encoder self-attention"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timelines": {}}, "timelines are empty"),
        ({"timelines": HeadTimeline()}, "timelines are empty"),
        (
            {"statistics": ["surprise"]},
            "no run has the statistic 'surprise', but confidence, entropy",
        ),
        ({"thresholds": {"surprise": 0.5}}, "no run has the statistic 'surprise'"),
    ],
    ids=["no run", "no measurement", "statistic", "threshold"],
)
def test_what_can_not_be_drawn_is_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_head_dynamics(**{"timelines": runs(), "path": tmp_path / "heads.png", **arguments})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("heads", [2, 12])
def test_a_single_step_is_seen(heads):
    timeline = HeadTimeline()
    timeline.record(100, "confidence", HeadScores({"encoder": torch.rand(heads, heads)}))
    axes = timeline.plot().axes[0]
    if heads == 12:
        corners = axes.collections[0].get_coordinates()
        assert (corners[:, 1, 0] - corners[:, 0, 0] == 1).all()
        assert axes.get_xticks().tolist() == [100]
    else:
        assert len(axes.lines) >= 4
        assert all(line.get_marker() == "o" for line in axes.lines if len(line.get_xdata()) == 1)
