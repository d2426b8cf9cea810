# Licensed under the Apache License, Version 2.0.
import re

import pytest
import torch
from figure_texts import overlaps, smallest_text

from hf_attn_dynamics import HeadScores, MapCorrelation, RelativeAttention
from hf_attn_dynamics.analysis.attribution.statistics import MAP_TYPES
from hf_attn_dynamics.analysis.plots.attribution import (
    MapExample,
    plot_centers_of_mass,
    plot_map_correlation,
    plot_map_examples,
    plot_map_types,
    plot_relative_maps,
)


def svg(path):
    return path.with_suffix(".svg").read_text(encoding="utf-8")


def texts(path):
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", svg(path)))


def scores(*layers):
    return HeadScores({"encoder": torch.tensor(layers)})


def positions(layers, heads=2, limit=3):
    """Histograms without a value at the largest offset, and of a last head that is removed."""
    table = torch.rand(layers, heads, 2 * limit + 1, generator=torch.Generator().manual_seed(0))
    table[..., -1] = float("nan")
    table[-1, -1] = float("nan")
    return RelativeAttention({"encoder": table}, {"encoder": table})


def test_correlations_have_a_dot_for_each_head_that_is_there(tmp_path):
    table = scores([0.9, 0.8], [-0.2, float("nan")])
    plot_map_correlation(MapCorrelation(table, table, table, table), path := tmp_path / "local.png", "local")
    assert {"Pearson correlation", "Spearman correlation", "layer", "local"} <= texts(path)
    groups = re.findall(r"<g clip-path[^>]*>((?:\s*<use[^>]*fill-opacity: 0.55[^>]*/>)+)", svg(path))
    dots = sum(group.count("<use") for group in groups)
    assert dots == 6  # three heads, twice
    assert path.is_file()


def test_a_layer_without_heads_is_an_empty_place(tmp_path):
    table = scores([0.9, 0.8], [float("nan"), float("nan")])
    plot_map_correlation(MapCorrelation(table, table, table, table), path := tmp_path / "local.png")
    assert {"0", "1"} <= texts(path)


@pytest.mark.parametrize(("depth", "expected"), [(12, (2, 4, 10)), (6, (1, 2, 5)), (1, (0,))])
def test_layers_of_the_histograms_are_those_of_the_paper(tmp_path, depth, expected):
    maps = {"attention": positions(depth), "contribution": positions(depth)}
    plot_relative_maps(maps, path := tmp_path / "positions.png")
    assert {text for text in texts(path) if text.startswith("layer ")} == {f"layer {layer}" for layer in expected}


def test_histograms_draw_the_layers_that_are_asked_for(tmp_path):
    plot_relative_maps({"attention": positions(3)}, path := tmp_path / "positions.png", layers=[0, 2])
    assert {"layer 0", "layer 2", "a head"} <= texts(path)
    with pytest.raises(ValueError, match=r"layers must be some of 0 to 2, got \[3\]"):
        plot_relative_maps({"attention": positions(3)}, tmp_path / "x.png", layers=[3])
    with pytest.raises(ValueError, match="maps are empty"):
        plot_relative_maps({}, tmp_path / "x.png")


def test_centers_of_mass_name_their_maps(tmp_path):
    maps = dict.fromkeys(("attention", "local", "global"), positions(2))
    plot_centers_of_mass(maps, path := tmp_path / "centers.png", title="English")
    assert {"attention", "local", "global", "English", "center of mass (tokens)"} <= texts(path)
    with pytest.raises(ValueError, match="there are 7 maps, but only 6 colours"):
        plot_centers_of_mass({str(number): positions(1) for number in range(7)}, tmp_path / "x.png")
    with pytest.raises(ValueError, match="maps are empty"):
        plot_centers_of_mass({}, tmp_path / "x.png")


def test_types_are_all_in_the_legend(tmp_path):
    counts = {"attention": torch.eye(5)[:2], "contribution": torch.zeros(2, 5)}
    plot_map_types(counts, path := tmp_path / "types.png")
    assert {*MAP_TYPES, "attention", "contribution", "fraction of maps"} <= texts(path)
    with pytest.raises(ValueError, match=r"counts of attention must have shape \(layers, 5\), got \(2, 4\)"):
        plot_map_types({"attention": torch.zeros(2, 4)}, tmp_path / "x.png")


def test_examples_have_a_row_each_with_tokens_and_colour_bars(tmp_path):
    tokens = ["[CLS]", "the", "##se", "[SEP]"]
    example = MapExample("block\nlayer 0, head 3", torch.eye(4), torch.rand(4, 4), tokens)
    figure = plot_map_examples([example, example._replace(tokens=())], path := tmp_path / "examples.png", "a model")
    assert {"attention weight", "contribution of the input", "block: layer 0, head 3", "a model"} <= texts(path)
    attention, contribution, *_ = figure.axes
    assert [tick.get_text() for tick in attention.get_xticklabels()] == tokens
    assert [tick.get_text() for tick in attention.get_yticklabels()] == tokens
    assert [tick.get_text() for tick in contribution.get_xticklabels()] == tokens
    assert len(figure.axes) == 8  # four maps, each with its colour bar
    with pytest.raises(ValueError, match="examples are empty"):
        plot_map_examples([], tmp_path / "x.png")


def test_tokens_of_long_sentences_are_apart_and_can_be_read():
    tokens = [f"token{number}" for number in range(30)]
    figure = plot_map_examples([MapExample("diagonal", torch.eye(30), torch.eye(30), tokens)] * 2)
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8


def test_a_correlation_says_of_what_and_names_the_heads_outside_of_the_whiskers():
    layer = [0.9, 0.91, 0.92, 0.93, 0.94, 0.2]
    table = scores([float("nan"), *layer[1:]], layer)
    maps = ("attention", "contributions of the input")
    figure = plot_map_correlation(MapCorrelation(table, table, table, table), title="a model", names=maps)
    assert figure.get_suptitle() == "Correlation of attention with contributions of the input\na model"
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts] == ["0.5", "1.5"]


def test_names_of_several_heads_outside_of_the_whiskers_are_apart():
    table = scores([*torch.linspace(0.9, 0.97, 17), 0.7, 0.7, 0.71], [0.9] * 20)
    figure = plot_map_correlation(MapCorrelation(table, table, table, table))
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.17", "0.18", "0.19"]
    assert not overlaps(figure)


@pytest.mark.parametrize(
    "draw",
    [
        lambda title: plot_map_correlation(MapCorrelation(*[scores([0.9, 0.2], [0.7, 0.1])] * 4), title=title),
        lambda title: plot_relative_maps(
            dict.fromkeys(("attention", "contribution of the input"), positions(12)), title=title
        ),
        lambda title: plot_centers_of_mass({"attention": positions(2)}, title=title),
        lambda title: plot_map_types({"attention": torch.eye(5)[:2]}, title=title),
        lambda title: plot_map_types(dict.fromkeys(("attention", "contribution"), torch.eye(5)), title=title),
    ],
    ids=["correlation", "positions", "centers", "types", "two types"],
)
def test_texts_are_apart_and_large_enough_in_a_picture_800_pixels_wide(draw):
    figure = draw("A model on 50 pairs of sentences")
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8
    assert figure.get_suptitle().endswith("\nA model on 50 pairs of sentences")
