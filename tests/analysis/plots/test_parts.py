"""Pictures of models pruned to a speed-up."""

import pytest

from hf_attn_dynamics.analysis.plots.parts import plot_parts_per_layer, plot_speedup_curve


DENSE_HEADS = {"encoder": [4, 4], "decoder": [4], "cross": [4]}
DENSE_UNITS = {"encoder": [10, 10], "decoder": [20]}
LEFT = {
    "heads": {"encoder": [4, 1], "decoder": [2], "cross": [0]},
    "units": {"encoder": [10, 0], "decoder": [5]},
}


@pytest.mark.parametrize(("name", "titles"), [("", ["encoder", "decoder"]), ("2 ×", ["2 ×, encoder", "2 ×, decoder"])])
def test_bars_are_the_fractions_left_with_their_numbers(name, titles):
    figure = plot_parts_per_layer({name: LEFT}, heads=DENSE_HEADS, units=DENSE_UNITS)
    assert [axes.get_title() for axes in figure.axes] == titles
    encoder, decoder = figure.axes
    assert [[bar.get_height() for bar in bars] for bars in encoder.containers] == [[100, 25], [100, 0]]
    assert [[bar.get_height() for bar in bars] for bars in decoder.containers] == [[50], [0], [25]]
    assert [text.get_text() for text in decoder.texts] == ["2", "0", "5"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["heads", "heads of cross-attention", "feed-forward units"]


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ({}, "left is empty: nothing to draw"),
        ({"a": {"heads": {"encoder": [1]}, "units": {}}}, "left has not the 2 layers of the encoder"),
    ],
)
def test_what_cannot_be_drawn_is_refused(left, message):
    with pytest.raises(ValueError, match=message):
        plot_parts_per_layer(left, heads={"encoder": [4, 4]}, units={"encoder": [10, 10]})


def test_a_curve_goes_through_the_means_of_seeds_and_shows_them():
    rows = [
        {"method": "gates", "speedup": 2.1, "target": 2.0, "accuracy": 0.8},
        {"method": "gates", "speedup": 1.5, "target": 1.5, "accuracy": 0.9},
        {"method": "gates", "speedup": 2.3, "target": 2.0, "accuracy": 0.7},
        {"method": "random", "speedup": 2.0, "target": 2.0, "accuracy": 0.6},
    ]
    (axes,) = plot_speedup_curve(rows, dense=[0.9, 1.0]).axes
    means, seeds, random, dense = (line.get_xydata().tolist() for line in axes.lines[1:] + axes.lines[:1])
    assert means == [[1.5, 0.9], pytest.approx([2.2, 0.75])]
    assert seeds == [[2.1, 0.8], [2.3, 0.7]]
    assert random == [[2.0, 0.6]]
    assert [value for _, value in dense] == pytest.approx([0.95, 0.95])


@pytest.mark.parametrize(
    ("rows", "message"), [([], "rows are empty"), ([{"method": "gates", "accuracy": 1.0}], "has no 'speedup'")]
)
def test_rows_without_values_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        plot_speedup_curve(rows)
