# Licensed under the Apache License, Version 2.0.
"""Pictures of runs are drawn from the files that keep what they show."""

import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from figure_texts import overlaps, smallest_text

from hf_attn_dynamics.analysis.attribution.statistics import MAP_TYPES, MapCorrelation
from hf_attn_dynamics.analysis.attribution.token_removal import Faithfulness
from hf_attn_dynamics.analysis.head_scores import HeadScores
from hf_attn_dynamics.analysis.head_timeline import HeadTimeline
from hf_attn_dynamics.analysis.observers.distances import HeadDistances
from hf_attn_dynamics.analysis.observers.positions import RelativeAttention
from hf_attn_dynamics.analysis.observers.roles import RoleScores
from hf_attn_dynamics.analysis.observers.sinks import SinkAttention
from hf_attn_dynamics.analysis.plots.attribution import MapExample
from hf_attn_dynamics.analysis.plots.lexical import SourceMap
from hf_attn_dynamics.analysis.plots.score_norm import Curves
from hf_attn_dynamics.recipes import pictures, redraw
from hf_attn_dynamics.recipes.arguments.redraw import RedrawArguments
from hf_attn_dynamics.recipes.score_norm_plots import Series, histograms


RESULTS = Path(__file__).parents[3] / "docs" / "results"
KEPT = sorted(RESULTS.rglob("*.plot.json"))
RANDOM = torch.Generator().manual_seed(0)


def values(*shape):
    """Numbers with so few digits that none is lost."""
    return torch.randint(1, 100, shape, generator=RANDOM).double() / 100


def timeline():
    history = HeadTimeline()
    for step in (0, 10):
        history.record(step, "confidence", HeadScores({"encoder": values(2, 4)}))
        history.record(step, "drift", 0.25)
    return history


LOG = [
    {"step": step, "task_loss": 4 / step, "eval_loss": 5 / step, "guidance_loss": 1.0, "guidance_weight": 1 / step}
    for step in (1, 2, 4)
]
GATES = torch.tensor([[3.0, -3.0], [float("nan"), 0.1]])
ROWS = [{"method": "gates", "heads": heads, "accuracy": 0.5 + heads / 100} for heads in (9, 18)]
SCORES = HeadScores({"encoder": values(3, 4)})
OFFSETS = RelativeAttention({"encoder": values(3, 4, 13)}, {"encoder": values(3, 4, 13)})
HEADS = [(layer, head) for layer in range(3) for head in range(4)]
DISTANCES = values(12, 12)
DISTANCES = DISTANCES + DISTANCES.T - 2 * DISTANCES.diag().diag()
ARGUMENTS = {
    "plot_agreement": [{"one": ([0, 50], [0.1, 0.2])}, "data", 0.05, {"level": 0.3}],
    "plot_attended": [{"": {"FC": ([0, 10], (0.2, 0.5), (8, 3))}}, "data"],
    "plot_centers_of_mass": [{"attention": OFFSETS, "contribution": SCORES}, "data"],
    "plot_copying_curves": [{"task": {"control": [[0.1, 0.5, 1.0]]}}, 0.99, "data"],
    "plot_faithfulness": [{"attention": Faithfulness(values(3), values(3), values(3), 9)}, "data"],
    "plot_functions_kept": [{"all": {"heads": 4, "none": 2, "rare words": None}, "pruned": {"heads": 2, "none": 0}}],
    "plot_gate_history": [
        [0, 5],
        {"encoder": [3.5, 2.5]},
        "data",
        {"encoder": 4},
        2,
        {"encoder": [4, 2]},
        {"encoder": [60.0, 40.5]},
        {"encoder": [64, 41]},
    ],
    "plot_gates": [{"encoder": GATES.numpy()}, "data"],
    "plot_head_distances": [HeadDistances({"encoder": HEADS}, {"encoder": DISTANCES}), "data"],
    "plot_head_dynamics": [{"guided": timeline()}, "model"],
    "plot_head_functions": [{"positional": [("encoder", 0, 1, -1, 0.95)], "syntactic": None}, SCORES, "data"],
    "plot_head_maps": [{"model": dict(SCORES)}, "accuracy", (0, 1), "data"],
    "plot_heads_per_layer": [{"keep 3": {"encoder": [2, 1]}}, 4, "data"],
    "plot_heat_maps": [{"loss": {("1", "2"): 0.5}}, ["1"], ["2"], "loss", ("rows", "columns")],
    "plot_histograms": [histograms({"score of words": {"FC": values(3, 50), "TC": values(3, 50)}}), "data", 3],
    "plot_keyword_drift": [[0, 1, 10], {"the last word": [0.0, -1.0, 20.0]}, {"mark": 1, "never": None}, "data"],
    "plot_map_correlation": [MapCorrelation(SCORES, SCORES, SCORES, SCORES), "data", ("attention", "contributions")],
    "plot_map_examples": [[MapExample("diagonal", values(2, 2), values(2, 2), ["a", "b"])], "data"],
    "plot_map_types": [{"attention": torch.arange(3 * len(MAP_TYPES)).reshape(3, -1)}, "data"],
    "plot_parts_per_layer": [
        {"2 ×": {"heads": {"encoder": [2, 0]}, "units": {"encoder": [5, 9]}}},
        {"encoder": [4, 4]},
        {"encoder": [9, 9]},
        "data",
    ],
    "plot_pretraining": [{"guided": LOG}, "data", ("plateau", 3.5), (2, 2.0)],
    "plot_pruning_curve": [ROWS, "data", "accuracy", [0.8, 0.9], 72],
    "plot_relative_attention": [OFFSETS, [("encoder", 1, 0)], 3, "data"],
    "plot_relative_maps": [{"attention": OFFSETS}, [0, 2], "data"],
    "plot_roles": [RoleScores({"obj": SCORES}, {"obj": {"encoder": 0.3}}, {"obj": {"encoder": 9}}), "data"],
    "plot_score_norm_curves": [[[Curves("FC", values(5, 2), values(5, 2), 20)]], "data"],
    "plot_series": [[[Series("score", "score", [0, 1], {"best": values(2)}, True)]], "data"],
    "plot_sinks": [SinkAttention(SCORES, SCORES, {"encoder": 0.25}, {"encoder": values(3, 4, 5)}), "data", 3],
    "plot_source_maps": [[[SourceMap("α", ["out"], ["in", "here"], values(1, 2), "word")]], "data", "weight"],
    "plot_speedup_curve": [
        [{"method": "gates", "speedup": seed, "target": 1.5, "accuracy": seed / 2} for seed in (1.5, 1.75)],
        "data",
        "accuracy",
        [0.8, 0.9],
    ],
    "plot_students": [{"labels": [[1, 0.5], [2, 0.7]]}, 0.9, "data"],
}


def test_every_plot_of_a_recipe_is_in_the_table():
    assert ARGUMENTS.keys() == pictures.PLOTS


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_picture_is_the_same_from_its_file(name, tmp_path):
    plot = pictures._imported(name)
    pictures.draw(plot, tmp_path / "picture.png", *ARGUMENTS[name])
    drawn = {ending: (tmp_path / f"picture.{ending}").read_bytes() for ending in ("png", "svg")}
    # A strict reader knows neither NaN nor infinity.
    json.loads((tmp_path / "picture.plot.json").read_text(), parse_constant=pytest.fail)
    for ending in drawn:
        (tmp_path / f"picture.{ending}").unlink()
    redraw.main(RedrawArguments(paths=[str(tmp_path)]))
    assert {ending: (tmp_path / f"picture.{ending}").read_bytes() for ending in drawn} == drawn
    # The file keeps what the plot was given.
    names = [name for name in inspect.signature(plot).parameters if name != "path"]
    plot(**dict(zip(names, ARGUMENTS[name])), path=tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes() == drawn["png"]


def test_numbers_are_kept_with_six_digits_and_missing_ones_as_null(tmp_path):
    tables = {"encoder": np.array([[1 / 3, np.nan]])}
    pictures.draw(pictures._imported("plot_gates"), tmp_path / "gates.png", tables)
    content = json.loads((tmp_path / "gates.plot.json").read_text())
    packed = {"$tensor": [[0.333333, None]], "dtype": "float64"}
    assert content == {"plot": "plot_gates", "arguments": {"log_alpha": {"encoder": packed}}}


PACKED = {"$tensor": [[0.25, 0.5]], "dtype": "float64"}
EARLIER = {
    "plot_score_norm_curves": (
        {"rows": [[{"$Curves": {"title": "FC", "scores": PACKED, "norms": PACKED, "others": 20.0}}]]},
        [[[Curves("FC", torch.tensor([[0.25, 0.5]]), torch.tensor([[0.25, 0.5]]), 20.0)]]],
    ),
    "plot_source_maps": (
        {"panels": [[{"$SourceMap": {"title": "α", "rows": ["out"], "columns": ["a", "b"], "values": PACKED}}]]},
        [[[SourceMap("α", ["out"], ["a", "b"], torch.tensor([[0.25, 0.5]]))]]],
    ),
}


@pytest.mark.parametrize("name", EARLIER)
def test_files_of_panels_with_fewer_fields_are_drawn(name, tmp_path):
    arguments, same = EARLIER[name]
    record = tmp_path / "picture.plot.json"
    record.write_text(json.dumps({"plot": name, "arguments": {**arguments, "title": "data"}}))
    picture = pictures.redraw(record).read_bytes()
    pictures._imported(name)(*same, path=tmp_path / "other" / "picture", title="data")
    assert (tmp_path / "other" / "picture.png").read_bytes() == picture


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"plot": "print", "arguments": {}}, "does not hold the plot and the arguments"),
        ([], "does not hold the plot and the arguments"),
        ({"plot": "plot_gates", "arguments": {"gates": {}}}, "'gates', which plot_gates does not take"),
    ],
)
def test_another_file_is_refused(content, message, tmp_path):
    (tmp_path / "a.plot.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        pictures.redraw(tmp_path / "a.plot.json")


@pytest.mark.parametrize(
    ("path", "message"), [("nowhere", "does not exist"), ("", "holds none"), ("b.json", "no file")]
)
def test_paths_without_pictures_are_refused(path, message, tmp_path, capsys):
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(SystemExit):
        redraw.main(RedrawArguments(paths=[str(tmp_path / path)]))
    assert message in capsys.readouterr().err


def test_a_file_is_drawn_beside_it(tmp_path, capsys):
    pictures.draw(pictures._imported("plot_gates"), tmp_path / "gates.png", {"encoder": GATES})
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "gates.plot.json", tmp_path / "other" / "a.b.plot.json")
    redraw.main(RedrawArguments(paths=[str(tmp_path / "other" / "a.b.plot.json")]))
    assert capsys.readouterr().out.strip() == str(tmp_path / "other" / "a.b.png")
    assert (tmp_path / "other" / "a.b.png").read_bytes() == (tmp_path / "gates.png").read_bytes()


@pytest.mark.parametrize("record", KEPT, ids=lambda record: str(record.relative_to(RESULTS)))
def test_a_picture_of_the_results_is_drawn_from_a_small_file_and_can_be_read(record):
    assert record.stat().st_size < 250_000
    assert record.with_name(record.name.replace(".plot.json", ".png")).is_file()
    plot, arguments = pictures.load_picture(record)
    figure = plot(**arguments)
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8
