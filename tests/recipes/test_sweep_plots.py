# Licensed under the Apache License, Version 2.0.
import pytest

from hf_attn_dynamics.recipes.sweep_plots import plot_heat_maps


def test_heat_maps_share_their_colours_and_leave_white_what_is_missing():
    panels = {"one": {("a", "x"): 1.0, ("b", "y"): 3.0}, "other": {("a", "y"): 2.0}}
    figure = plot_heat_maps(panels, ["a", "b"], ["x", "y"], "loss", axes_names=("rows", "columns"), digits=1)
    one, other, colours = figure.axes
    assert [axes.images[0].get_clim() for axes in (one, other)] == [(1, 3)] * 2
    assert [(text.get_position(), text.get_text()) for text in one.texts] == [((0, 0), "1.0"), ((1, 1), "3.0")]
    assert other.images[0].get_array().tolist() == [[None, 2.0], [None, None]]
    assert (one.get_ylabel(), one.get_xlabel(), colours.get_ylabel()) == ("rows", "columns", "loss")


def test_a_heat_map_without_values_is_refused(tmp_path):
    with pytest.raises(ValueError, match="panels are empty"):
        plot_heat_maps({"one": {}}, ["a"], ["x"], "loss", path=tmp_path / "picture")
    assert not list(tmp_path.iterdir())
