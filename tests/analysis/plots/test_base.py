import math

import pytest
import torch
from matplotlib.figure import Figure

from hf_attn_dynamics.analysis import plots
from hf_attn_dynamics.analysis.plots import base
from hf_attn_dynamics.analysis.plots.base import (
    SITE_COLOURS,
    plot_gate_history,
    plot_gates,
    plot_head_maps,
    plot_heads_per_layer,
    plot_pretraining,
    plot_pruning_curve,
)
from hf_attn_dynamics.recipes.sweep_plots import plot_heat_maps


def history(guided):
    entries = []
    for step in (10, 20, 30):
        guidance = {"guidance_loss": 4 / step, "guidance_weight": 1 - step / 30} if guided else {}
        entries += [{"step": step, "task_loss": 7 - step / 10, **guidance}, {"step": step, "eval_loss": 7 - step / 12}]
    return entries


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("crossing", [(20, 5.3), None])
def test_a_picture_is_a_png_with_an_svg_that_names_what_it_shows(tmp_path, guided, crossing):
    runs = {"one run": history(guided), "another": history(False)}
    plot_pretraining(
        runs, path := tmp_path / "curves.png", "title", plateau=("unigram entropy", 6.5), crossing=crossing
    )
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "curves.svg").read_text()
    assert "one run" in svg
    assert ("guidance loss" in svg) == guided
    assert ("step 20" in svg) == (crossing is not None)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_guidance_is_drawn_in_the_colour_of_the_run_that_is_guided(tmp_path, position):
    runs = {str(index): history(index == position) for index in range(3)}
    plot_pretraining(runs, tmp_path / "curves")
    label = next(line for line in (tmp_path / "curves.svg").read_text().splitlines() if "guidance loss (" in line)
    assert base.COLOURS[position].lower() in label


def test_the_same_history_gives_the_same_picture(tmp_path):
    paths = [tmp_path / name / "c.png" for name in "ab"]
    for path in paths:
        plot_pretraining({"run": history(True)}, path)
    assert paths[0].with_suffix(".svg").read_bytes() == paths[1].with_suffix(".svg").read_bytes()


PRUNED = [
    {"method": method, "heads": heads, "seed": seed, "accuracy": base + heads / 100 + seed / 50}
    for method, base in (("gates", 0.7), ("random", 0.5))
    for heads in (2, 16, 8)
    for seed in (0, 1, 2)
]
KEPT = {"encoder": [2, 0, 1], "cross": [4, 3, 4]}
LOG_ALPHA = {"cross": torch.tensor([[-9.0, 9.0], [0.0, math.nan]]), "encoder": torch.full((2, 2), 9.0)}
PICTURES = {
    "curve": lambda path: plot_pruning_curve(PRUNED, path, "a title", dense=0.9, total=24),
    "layers": lambda path: plot_heads_per_layer(KEPT, path, 4, "a title"),
    "sparsities": lambda path: plot_heads_per_layer({"λ = 1": KEPT, "λ = 2": KEPT}, path, {"cross": 4}, "a title"),
    "history": lambda path: plot_gate_history([1, 2], {"encoder": [4, 3.5]}, path, "a title", target=2),
    "gates": lambda path: plot_gates(LOG_ALPHA, path, "a title"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_each_picture_is_two_files_that_are_the_same_each_time(tmp_path, name):
    path, again = (tmp_path / folder / f"{name}.png" for folder in "ab")
    for one in (path, again):
        assert isinstance(PICTURES[name](one.with_suffix(".svg")), Figure)
    assert path.read_bytes().startswith(b"\x89PNG")
    svg = path.with_suffix(".svg").read_text()
    assert "a title" in svg
    assert svg == again.with_suffix(".svg").read_text()


@pytest.mark.parametrize("name", PICTURES)
def test_without_a_path_nothing_is_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert isinstance(PICTURES[name](None), Figure)
    assert not list(tmp_path.iterdir())


def test_curves_are_means_over_seeds_with_their_range():
    (axes,) = plot_pruning_curve(PRUNED, dense=[0.9, 1.0], total=24).axes
    dense, gates, random = axes.lines
    assert list(gates.get_xdata()) == [2, 8, 16]
    assert gates.get_ydata() == pytest.approx([0.74, 0.80, 0.88])
    assert random.get_ydata() == pytest.approx([0.54, 0.60, 0.68])
    assert dense.get_ydata() == pytest.approx([0.95, 0.95])
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == pytest.approx((0.72, 0.90))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["all 24 heads", "gates", "random"]
    assert list(axes.get_xticks()) == [2, 8, 16]
    assert axes.get_xscale() == "log"


def test_single_runs_have_no_band_and_close_counts_no_doubling():
    rows = [{"method": "gates", "heads": heads, "BLEU": heads} for heads in (4, 6, 8)]
    (axes,) = plot_pruning_curve(rows, metric="BLEU").axes
    assert not axes.collections
    assert axes.get_xscale() == "linear"
    assert axes.get_ylabel() == "BLEU"


def test_labels_of_counts_do_not_run_into_each_other():
    rows = [{"method": "gates", "heads": heads, "accuracy": 0.5} for heads in (0, 1, 99, 100)]
    (axes,) = plot_pruning_curve(rows).axes
    assert list(axes.get_xticks()) == [1, 100]


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "rows are empty"), ([{"method": "gates", "heads": 3, "f1": 1}], "a row of rows has no 'accuracy'")],
)
def test_rows_that_cannot_be_drawn_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        plot_pruning_curve(rows, tmp_path / "curve")
    assert not list(tmp_path.iterdir())


def test_one_model_has_a_bar_for_each_layer():
    encoder, cross = plot_heads_per_layer(KEPT, total=4).axes
    assert [bar.get_height() for bar in encoder.patches] == [2, 0, 1]
    assert [bar.get_height() for bar in cross.patches] == [4, 3, 4]
    assert encoder.get_title() == "encoder self-attention: 3 heads"
    assert encoder.lines[0].get_ydata() == [4, 4]


def test_several_models_have_a_line_each_darker_for_fewer_heads():
    models = {"few": {"encoder": [1, 0]}, "many": {"encoder": [3, 4]}}
    (axes,) = plot_heads_per_layer(models).axes
    few, many = axes.lines
    assert (list(few.get_ydata()), list(many.get_ydata())) == ([1, 0], [3, 4])
    assert sum(few.get_color()) < sum(many.get_color())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["few (1)", "many (7)"]


def test_histories_of_gates_are_drawn_site_by_site_and_summed_beside_a_target():
    open_heads = {"cross": [8.0, 7.5], "encoder": [8.0, 2.25]}
    (axes,) = plot_gate_history([0, 10], open_heads, total={"encoder": 8}, target=9).axes
    encoder, cross, sums, target = axes.lines
    assert encoder.get_color() == SITE_COLOURS["encoder"]
    assert (encoder.get_ydata()[1], cross.get_ydata()[1], sums.get_ydata()[1]) == (2.25, 7.5, 9.75)
    assert target.get_ydata() == [9, 9]
    legend = axes.get_legend()
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[0] == "encoder self-attention: 2.2 of 8"
    assert labels[2:] == ["all sites: 9.8", "target: 9"]


def test_gates_are_probabilities_and_undecided_ones_are_written_out():
    encoder, cross, _ = plot_gates(LOG_ALPHA).axes
    probabilities = cross.images[0].get_array()
    # P(gate ≠ 0) = σ(φ + 0.33 · ln 11)
    assert probabilities[0].tolist() == pytest.approx([1 / (1 + math.exp(9 - 0.33 * math.log(11))), 1], abs=1e-4)
    assert probabilities[1, 0] == pytest.approx(1 / (1 + math.exp(-0.33 * math.log(11))))
    assert [text.get_text() for text in cross.texts] == [".69"]
    assert not encoder.texts
    assert cross.get_title().endswith("expected open: 1.7 of 3")
    # The removed head is crossed out.
    assert [line.get_xydata().tolist() for line in cross.lines] == [[[1, 1]]]


def test_head_maps_ring_the_highest_and_cross_out_what_is_removed():
    rows = {"one": {"a": [[0.2, 0.9], [math.nan, 0.4]], "b": [[0.1, 0.2]]}, "other": {"b": [[0.5, 0.3]]}}
    figure = plot_head_maps(rows, "accuracy")
    one_a, one_b, other_a, other_b = figure.axes[:4]
    assert one_a.get_title() == "one; a\nhighest: 0.90"
    assert [line.get_xydata().tolist() for line in one_a.lines] == [[[0, 1]], [[1, 0]]]
    assert [axes.images[0].get_clim() for axes in (one_a, one_b, other_b)] == [(0, 1)] * 3
    assert not other_a.axison
    assert figure.axes[4].get_ylabel() == "accuracy"


def test_nothing_has_a_ring_where_all_scores_are_the_lowest():
    axes, _ = plot_head_maps({"one": {"a": [[0.0, 0.0], [0.0, math.nan]]}}, "accuracy").axes
    assert axes.get_title() == "one; a\nhighest: 0.00"
    assert [line.get_marker() for line in axes.lines] == ["x"]


@pytest.mark.parametrize(("losses", "scale"), [((4.0, 3.9, 3.8), "linear"), ((4.0, 0.9, 0.1), "log")])
def test_the_scale_of_guidance_is_that_of_its_range(losses, scale):
    log = [{"step": n, "task_loss": 7, "guidance_loss": x, "guidance_weight": 1} for n, x in enumerate(losses)]
    _, guidance, _ = plot_pretraining({"guided": [*log, {"step": 2, "eval_loss": 7}]}).axes
    assert guidance.get_yscale() == scale


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (plot_heads_per_layer, [{}], "kept is empty"),
        (plot_heads_per_layer, [{"model": {"head": [1]}}], "kept names the site 'head', which is not one of encoder"),
        (plot_gate_history, [[1], {}], "open_heads is empty"),
        (plot_gate_history, [[], {"encoder": []}], "steps are empty"),
        (plot_gate_history, [[1], {"encoder": [1, 2]}], r"open_heads\['encoder'\] has 2 values for 1 steps"),
        (plot_gates, [{"decoders": [[0.0]]}], "log_alpha names the site 'decoders'"),
        (plot_head_maps, [{"model": {}}, "accuracy"], "rows are empty"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments, path=tmp_path / "picture")
    assert not list(tmp_path.iterdir())


def test_all_drawings_are_found_in_the_room():
    for name in ("plot_gates", "plot_roles", "plot_map_types", "plot_head_dynamics"):
        assert getattr(plots, name).__name__ == name
    # It stands beside the recipe that draws it.
    assert plots.plot_heat_maps is plot_heat_maps
    with pytest.raises(AttributeError, match="has no attribute 'plot_nothing'"):
        plots.plot_nothing()
