import math

import pytest
import torch
from figure_texts import drawn_panels, overlaps, smallest_text
from matplotlib.figure import Figure

from hf_attn_dynamics.analysis import plots
from hf_attn_dynamics.analysis.plots import figures
from hf_attn_dynamics.analysis.plots.base import (
    plot_gate_history,
    plot_gates,
    plot_head_maps,
    plot_heads_per_layer,
    plot_pretraining,
    plot_pruning_curve,
)
from hf_attn_dynamics.analysis.plots.figures import SITE_COLOURS, finish_figure, literal, new_figure
from hf_attn_dynamics.models.hard_concrete import HardConcreteGate
from hf_attn_dynamics.models.head_settings import GateSettings
from hf_attn_dynamics.recipes.curves import drawn_log
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
def test_guidance_is_drawn_in_the_colour_of_the_run_that_is_guided(position):
    runs = {str(index): history(index == position) for index in range(3)}
    _, guidance, weight = plot_pretraining(runs).axes
    assert {line.get_color() for line in (*guidance.lines, *weight.lines)} == {figures.COLOURS[position]}


def test_weights_by_name_are_lines_with_their_names():
    names = ("prev", "syntax")
    log = [
        {"step": step, "guidance_loss": 1.0, **{f"guidance_weight_{name}": step * len(name) for name in names}}
        for step in (10, 20, 30)
    ]
    log = [{"step": 1, "guidance_weight_initial": 2.0}, *log, {"step": 30, "task_loss": 7.0, "eval_loss": 6.0}]
    found = drawn_log(log)
    assert found == [log[1], log[2], log[3], log[4]]
    _, _, weight = plot_pretraining({"guided": found}).axes
    assert [line.get_label() for line in weight.lines] == list(names)
    assert [list(line.get_ydata()) for line in weight.lines] == [[40, 80, 120], [60, 120, 180]]
    assert [text.get_text() for text in weight.get_legend().get_texts()] == list(names)


def test_a_single_value_of_guidance_is_a_dot_on_the_steps_of_the_losses():
    log = [{"step": step, "task_loss": 7 - step / 10} for step in (10, 20, 30)]
    log[0] |= {"guidance_loss": 4.0, "guidance_weight": 1.0}
    losses, guidance, weight = plot_pretraining({"guided": [*log, {"step": 30, "eval_loss": 6}]}).axes
    for axes, value in ((guidance, 4), (weight, 1)):
        (line,) = axes.lines
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([10], [value])
        assert line.get_marker() == "o"
        assert axes.get_ylim()[0] == 0
        assert axes.get_xlim() == losses.get_xlim()
    assert [axes.get_ylabel() for axes in (guidance, weight)] == ["guidance loss", "its weight α"]


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
    # The last record has a dot, which shows a move of gates after the last step.
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    encoder, cross, sums, target = (line for line in axes.lines if line not in dots)
    assert [dot.get_xydata().tolist() for dot in dots] == [[[10, 2.25]], [[10, 7.5]], [[10, 9.75]]]
    assert encoder.get_color() == SITE_COLOURS["encoder"]
    assert (encoder.get_ydata()[1], cross.get_ydata()[1], sums.get_ydata()[1]) == (2.25, 7.5, 9.75)
    assert target.get_ydata() == [9, 9]
    legend = axes.get_legend()
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[0] == "encoder self-attention: 2.2 of 8"
    assert labels[2:] == ["all sites: 9.8", "target: 9"]


def test_histories_of_units_have_a_panel_of_their_own():
    heads = {"open_heads": {"encoder": [8.0, 2.25]}, "settled_heads": {"encoder": [8, 2]}}
    units = {"open_units": {"encoder": [1100.0, 512.5]}, "settled_units": {"encoder": [1100, 500]}}
    of_heads, of_units = plot_gate_history([0, 10], **heads, **units).axes
    assert (of_heads.get_ylabel(), of_units.get_ylabel()) == ("heads with open gates", "units with open gates")
    assert [list(line.get_ydata()) for line in of_units.lines[:3]] == [[1100, 500], [500], [1100, 512.5]]
    labels = [text.get_text() for text in of_units.get_legend().get_texts()]
    expected = ["encoder: 500", "expected in training: 512.5", "last record: 1,100 → 500 open"]
    assert labels == expected
    # Heads may have no gates.
    (alone,) = plot_gate_history([0, 10], {}, **units).axes
    assert [text.get_text() for text in alone.get_legend().get_texts()] == expected
    with pytest.raises(ValueError, match=r"settled_units\['encoder'\] has 1 values for 2 steps"):
        plot_gate_history([0, 10], **heads, open_units=units["open_units"], settled_units={"encoder": [3]})


def test_gates_are_probabilities_that_all_cells_print():
    encoder, cross, _ = drawn_panels(plot_gates(LOG_ALPHA))
    probabilities = cross.images[0].get_array()
    # P(gate ≠ 0) = σ(φ + 0.33 · ln 11)
    assert probabilities[0].tolist() == pytest.approx([1 / (1 + math.exp(9 - 0.33 * math.log(11))), 1], abs=1e-4)
    assert probabilities[1, 0] == pytest.approx(1 / (1 + math.exp(-0.33 * math.log(11))))
    assert [text.get_text() for text in cross.texts] == ["0", "1", ".69"]
    assert [text.get_text() for text in encoder.texts] == ["1"] * 4
    assert "1.7 expected in training" in cross.get_title()
    # The removed head is crossed out.
    assert [line.get_xydata().tolist() for line in cross.lines] == [[[1, 1]]]


def test_gates_that_are_open_outside_training_have_a_frame_and_are_counted():
    gate = HardConcreteGate(3, GateSettings())
    gate.set_locations(locations := torch.tensor([-0.5, 0.5, 9.0]))
    axes, _ = drawn_panels(plot_gates({"encoder": locations[None]}))
    assert gate.settled().tolist() == [0, 1, 1]
    assert [frame.get_x() for frame in axes.patches] == pytest.approx([0.54, 1.54])
    assert "2 of 3 open (framed)" in axes.get_title()


def test_gates_of_many_kinds_of_sites_are_a_page_and_no_strip():
    figure = plot_gates({kind: torch.zeros(2, 8) for kind in ("encoder", "decoder", "cross")})
    assert figure.get_figheight() > 0.5 * figure.get_figwidth()


def test_head_maps_ring_and_name_the_highest_and_cross_out_what_is_removed():
    rows = {"one": {"a": [[0.2, 0.9], [math.nan, 0.4]], "b": [[0.1, 0.2]]}, "other": {"b": [[0.5, 0.3]]}}
    figure = plot_head_maps(rows, "accuracy", title="a model on some data")
    one_a, one_b, other_a, other_b = figure.axes[:4]
    assert one_a.get_title() == "one; a\nhighest: head 0.1, 0.90"
    assert [line.get_xydata().tolist() for line in one_a.lines] == [[[0, 1]], [[1, 0]]]
    # One scale for all maps.
    assert [axes.images[0].get_clim() for axes in (one_a, one_b, other_b)] == [pytest.approx((0, 0.9))] * 3
    assert not other_a.axison
    assert figure.axes[4].get_ylabel() == "accuracy"
    assert figure.get_suptitle() == "Accuracy by head (layer.head)\na model on some data"


def test_cells_of_head_maps_print_the_scores_where_there_is_room():
    (axes, _) = plot_head_maps({"one": {"encoder": [[0.2, 1.0], [math.nan, 0.04]]}}, "accuracy").axes
    assert [text.get_text() for text in axes.texts] == [".20", "1", ".04"]
    many = {model: {data: torch.rand(12, 12) for data in "abc"} for model in ("one", "other")}
    assert not any(axes.texts for axes in plot_head_maps(many, "accuracy").axes)


def test_nothing_has_a_ring_where_all_scores_are_the_lowest():
    axes, _ = plot_head_maps({"one": {"a": [[0.0, 0.0], [0.0, math.nan]]}}, "accuracy").axes
    assert axes.get_title() == "one; a\nno head above 0"
    assert [line.get_marker() for line in axes.lines] == ["x"]


def test_an_outlier_is_above_the_scale_and_many_high_scores_are_not():
    scores = torch.linspace(0.2, 0.6, 72)
    scores[5] = 1.0
    low, high, clipped = figures.scale_limits([scores], (0, 1))
    assert (low, high, clipped) == (0, pytest.approx(0.6), True)
    scores[:10] = 1.0
    assert figures.scale_limits([scores], (0, 1)) == (0, 1, False)
    assert figures.scale_limits([torch.zeros(4)], (0, 1)) == (0, 1, False)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.004, "0"), (0.07, ".07"), (0.999, "1"), (-0.5, "-.50"), (3.14, "3.1"), (42, "42")]
)
def test_numbers_in_cells_are_short(value, text):
    assert figures.short_number(value) == text


def test_names_of_points_cover_neither_each_other_nor_points():
    figure, [[axes]] = figures.new_figure(6, 5)
    points = torch.randn(72, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 0.4])
    axes.plot(*points.T, "o", markersize=5)
    figure.draw_without_rendering()
    figures.label_points(axes, points.tolist(), [f"{index // 12}.{index % 12}" for index in range(72)])
    assert len(axes.texts) == 72
    assert not overlaps(figure)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(box.contains(*point) for box in boxes for point in axes.transData.transform(points))


@pytest.mark.parametrize("name", PICTURES)
def test_texts_are_apart_and_large_enough_in_a_picture_800_pixels_wide(name):
    figure = PICTURES[name](None)
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8
    assert figure.get_suptitle().endswith("\na title")


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


def test_dollar_signs_enclose_no_formulas(tmp_path):
    figure, panels = new_figure(4, 3)
    axes = panels.flatten()[0]
    axes.plot([1, 2], label="$$ run")
    axes.set_title("$a^b$ $$")
    axes.annotate("x_$1$$", (0, 1))
    axes.set_xticks([0, 1], [literal("$$"), literal("a$b$c")])
    figure.legend()
    finish_figure(figure, tmp_path / "figure.png", "$$ title", "what")
    drawn = (tmp_path / "figure.svg").read_text()
    for text in ("$$ run", "$a^b$ $$", "x_$1$$", ">$$<", "a$b$c", "$$ title"):
        assert text in drawn, text
