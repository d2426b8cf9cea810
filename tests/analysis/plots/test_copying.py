# Licensed under the Apache License, Version 2.0.
import pytest
from figure_texts import overlaps, smallest_text

from hf_attn_dynamics.recipes.copying_plots import plot_copying_curves, plot_keyword_drift


PANELS = {
    "permutation": {"3 of 3": [[0.3, 0.4, 0.4], [0.3, 0.9, 0.995]], "3 of 5": [[0.2, 1.0]]},
    "mixture": {"either": [[0.1, 0.2, 0.3]], "3 of 5": [[0.2, 1.0]]},
}


def test_the_legend_counts_the_runs_that_learn(tmp_path):
    plot_copying_curves(PANELS, path := tmp_path / "curves.png")
    assert path.stat().st_size > 1000
    text = path.with_suffix(".svg").read_text()
    for label in ("3 of 3: 1 of 2 learn", "either: 0 of 1 learn", "3 of 5: 1 of 1 learn", "permutation", "mixture"):
        assert f">{label}<" in text


def test_places_and_marks_are_named(tmp_path):
    marks = {"last above keyword": 10, "never": None}
    plot_keyword_drift([0, 10], {"keyword": [0.0, 1.0], "last": [0.1, 2.0]}, path := tmp_path / "drift", marks)
    text = path.with_suffix(".svg").read_text()
    assert all(f">{label}<" in text for label in ("keyword", "last", "last above keyword: step 10"))
    assert "never" not in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: plot_copying_curves({}, path), "panels are empty"),
        (lambda path: plot_keyword_drift([], {}, path, {}), "steps or log_odds are empty"),
    ],
    ids=["curves", "drift"],
)
def test_nothing_to_draw_is_refused(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path / "picture")


def test_texts_are_apart_and_large_enough_in_a_picture_800_pixels_wide():
    drift = plot_keyword_drift([0, 10], {"keyword": [0.0, 1.0], "last": [0.1, 2.0]}, title="an LSTM")
    curves = plot_copying_curves(PANELS, title="an LSTM")
    for figure in (drift, curves):
        assert not overlaps(figure)
        assert smallest_text(figure) >= 8
        assert figure.get_suptitle().endswith("\nan LSTM")
