# Licensed under the Apache License, Version 2.0.
"""Pictures have a line for each run and a panel for each map."""

import pytest
import torch
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


@pytest.mark.parametrize(("plot", "nothing"), [(plot_agreement, {}), (plot_source_maps, []), (plot_source_maps, [[]])])
def test_nothing_to_draw_is_refused(plot, nothing, tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot(nothing, tmp_path / "picture")
