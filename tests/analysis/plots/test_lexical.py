# Licensed under the Apache License, Version 2.0.
"""Pictures have a line for each run and a panel for each map."""

import pytest
import torch
from figure_texts import overlaps, smallest_text
from matplotlib.figure import Figure

from hf_attn_dynamics.analysis.plots.lexical import SourceMap, plot_source_maps
from hf_attn_dynamics.recipes.lexical_plots import plot_agreement


CURVES = {"second seed": ([0, 10, 500], [0.1, 0.2, 0.6]), "uniform": ([0, 500], [0.1, 0.3])}
MAPS = [
    [SourceMap("of one row", ("row",), ("some", "words"), torch.tensor([[0.0, 0.0]]))],
    [SourceMap("here", "ab", "uvw", torch.rand(2, 3)), SourceMap("there", "c", "uvwxyz", torch.rand(1, 6))],
]


@pytest.mark.parametrize(
    ("plot", "content", "names"),
    [
        (
            lambda *arguments: plot_agreement(*arguments, "title", 0.05, {"level": 0.4}),
            CURVES,
            [*CURVES, "level", "chance", "title"],
        ),
        (plot_source_maps, MAPS, ["of one row", "here", "there", "words"]),
    ],
    ids=["agreement", "maps"],
)
def test_a_picture_names_what_it_shows_and_is_the_same_again(plot, content, names, tmp_path):
    figure = plot(content, tmp_path / "one" / "picture.pdf")
    assert isinstance(figure, Figure)
    path = tmp_path / "one" / "picture.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    svg = path.with_suffix(".svg").read_text()
    assert all(name in svg for name in names)
    plot(content, tmp_path / "other" / "picture")
    assert (tmp_path / "other" / "picture.svg").read_text() == svg


def test_the_last_step_has_a_label():
    (axes,) = plot_agreement({"one": ([0, 50, 1000, 2000], [0, 0.1, 0.2, 0.3])}).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "10", "50", "100", "500", "1,000", "2,000"]


@pytest.mark.parametrize("length", [5, 16, 30])
def test_words_of_maps_are_apart_and_large_enough_in_a_picture_800_pixels_wide(length):
    words = [f"▁word{number}" for number in range(length)]
    panel = SourceMap("attention α", words, words, torch.rand(length, length))
    figure = plot_source_maps([[panel, panel], [panel, panel]], title="Multi30k")
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8
    assert figure.get_suptitle().startswith("Attention and lexical knowledge, word by word")
    assert plot_source_maps([[panel]], heading="Alignments").get_suptitle() == "Alignments"
    # Without the mark of SentencePiece.
    assert figure.axes[0].get_xticklabels()[0].get_text() == "word0"


def test_rows_are_relative_to_their_largest_value_unless_the_quantity_is_named():
    values = torch.tensor([[0.1, 0.2], [0.5, float("nan")]])
    panel = SourceMap("a sentence", "ab", "uv", values, "output word")
    (axes, bar), (absolute, named) = plot_source_maps([[panel]]).axes, plot_source_maps([[panel]], quantity="β").axes
    assert axes.images[0].get_array()[0].tolist() == [0.5, 1]
    # A missing value is an empty cell, and leaves the others of its row as they are.
    assert axes.images[0].get_array()[1].tolist() == [1, None]
    assert bar.get_ylabel() == "fraction of the largest\nvalue of the row"
    assert absolute.images[0].get_array().data[0].tolist() == values[0].tolist()
    assert absolute.images[0].get_clim() == (0, 0.5)
    assert (named.get_ylabel(), absolute.get_ylabel()) == ("β", "output word")


def test_texts_of_agreement_are_apart():
    figure = plot_agreement(CURVES, None, "texts\nclassification, 6,920 texts to train on", 0.05, {"level": 0.4})
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8


@pytest.mark.parametrize(("plot", "nothing"), [(plot_agreement, {}), (plot_source_maps, []), (plot_source_maps, [[]])])
def test_nothing_to_draw_is_refused(plot, nothing, tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot(nothing, tmp_path / "picture")
