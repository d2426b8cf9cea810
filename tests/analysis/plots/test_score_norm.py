# Licensed under the Apache License, Version 2.0.
"""Pictures have a panel for each thing that they show."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from figure_texts import overlaps, smallest_text

from hf_attn_dynamics import score_norm_curve
from hf_attn_dynamics.analysis.plots.score_norm import Curves, plot_score_norm_curves
from hf_attn_dynamics.recipes.score_norm_plots import Series, plot_attended, plot_distributions, plot_series


SCORES = torch.linspace(0, 3, 5)[:, None].expand(5, 2)
EPOCHS = [0, 10, 20, 30, 40]
HERE, THERE = Curves("here", SCORES, SCORES, 20.0), Curves("there", -SCORES[:, :1], SCORES[:, :1], 5.0)
LINES = {"one": SCORES[:, 0] + 1, "two": SCORES[:, 1] + 2}
HISTOGRAMS = {"FC": torch.randn(3, 50), "TC": torch.randn(3, 50)}
PROFILE = (EPOCHS, SCORES[:, 0] / 3, EPOCHS)
PICTURES = {
    "curves": (plot_score_norm_curves, [[HERE, THERE]]),
    "ragged": (plot_score_norm_curves, [[HERE, HERE], [THERE]]),
    "series": (
        plot_series,
        [[Series("here", "score", EPOCHS, LINES)], [Series("there", "loss", EPOCHS, LINES, True)]],
    ),
    "distributions": (plot_distributions, {"here": HISTOGRAMS, "there": {"FC": torch.zeros(1, 5)}}),
    "attended": (plot_attended, {"here": {"": PROFILE}, "and": {"there": PROFILE}}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_all_panels_and_the_same_svg_again(name, tmp_path):
    plot, content = PICTURES[name]
    plot(content, tmp_path / name)
    path = tmp_path / f"{name}.png"
    assert path.stat().st_size > 2000
    svg = path.with_suffix(".svg").read_text()
    words = " ".join(ElementTree.fromstring(svg).itertext())
    assert "here" in words
    assert "there" in words
    plot(content, tmp_path / "again" / name)
    assert (tmp_path / "again" / f"{name}.svg").read_text() == svg


@pytest.mark.parametrize("name", PICTURES)
def test_texts_are_apart_and_large_enough_in_a_picture_800_pixels_wide(name):
    plot, content = PICTURES[name]
    figure = plot(content, title="SST-2, 6,920 sentences")
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8
    assert figure.get_suptitle().endswith("\nSST-2, 6,920 sentences")


def test_curves_are_the_values_with_the_theory_where_the_number_of_others_is_known():
    with_theory, without = plot_score_norm_curves([[HERE, HERE._replace(others=None)]]).axes
    assert (len(with_theory.lines), len(without.lines)) == (3, 2)
    for line in without.lines:
        assert line.get_xydata().tolist() == torch.stack([SCORES[:, 0]] * 2, 1).tolist()
    scores, norms = torch.from_numpy(with_theory.lines[2].get_xydata()).T
    torch.testing.assert_close(norms, score_norm_curve(scores, 20.0))
    assert (with_theory.get_ylabel(), without.get_ylabel()) == ("norm of its embedding", "")


def test_the_legend_is_where_the_theory_is():
    without, with_theory = plot_score_norm_curves([[HERE._replace(others=None), HERE]]).axes
    assert without.get_legend() is None
    assert [text.get_text() for text in with_theory.get_legend().get_texts()] == ["each run", "theory"]


def test_no_histogram_hides_another_and_classifiers_share_axes():
    panels = {"score of words": HISTOGRAMS, "norm of words": {"TC": torch.rand(1, 9)}}
    figure = plot_distributions(panels)
    (fixed, absent), (linear, norm) = figure.axes[:2], figure.axes[2:]
    assert not absent.axison
    assert [len(axes.patches) for axes in (fixed, linear, norm)] == [1, 1, 1]
    assert (fixed.get_ylabel(), linear.get_ylabel()) == ("FC", "TC")
    assert (linear.get_xlabel(), norm.get_xlabel()) == ("score", "norm")
    assert (fixed.get_xlim(), fixed.get_ylim()) == (linear.get_xlim(), linear.get_ylim())


def test_purity_and_occurrences_have_an_axis_each():
    purity, occurrences = plot_attended({"": {"FC": PROFILE}}).axes
    assert (purity.get_title(), purity.get_ylabel()) == ("FC", "topic purity")
    assert occurrences.get_ylabel() == "number of\nsentences with it"
    assert list(occurrences.lines[0].get_ydata()) == EPOCHS


@pytest.mark.parametrize(
    ("plot", "empty"),
    [(plot_score_norm_curves, []), (plot_series, [[]]), (plot_distributions, {}), (plot_attended, {"x": {}})],
)
def test_nothing_is_not_drawn(plot, empty, tmp_path):
    with pytest.raises(ValueError, match="are empty: nothing to draw"):
        plot(empty, tmp_path / "picture")
