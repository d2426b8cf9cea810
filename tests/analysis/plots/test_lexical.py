# Licensed under the Apache License, Version 2.0.
"""Pictures have a line for each run and a panel for each map."""

import pytest
import torch
from figure_texts import overlaps, smallest_text
from matplotlib.figure import Figure

from hf_attn_dynamics.recipes.lexical_plots import SourceMap, plot_agreement, plot_source_maps


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
    # Without the mark of SentencePiece.
    assert figure.axes[0].get_xticklabels()[0].get_text() == "word0"


def test_texts_of_agreement_are_apart():
    figure = plot_agreement(CURVES, None, "texts\nclassification, 6,920 texts to train on", 0.05, {"level": 0.4})
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8


@pytest.mark.parametrize(("plot", "nothing"), [(plot_agreement, {}), (plot_source_maps, []), (plot_source_maps, [[]])])
def test_nothing_to_draw_is_refused(plot, nothing, tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot(nothing, tmp_path / "picture")
