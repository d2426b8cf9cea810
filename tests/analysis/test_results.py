# Licensed under the Apache License, Version 2.0.
"""What results answer: by key, as arrays, compared with one another, and read back from files that are not there."""

import math

import numpy as np
import pytest
import torch

import hf_attn_dynamics as had
from hf_attn_dynamics.analysis.attribution.claims import AttributionFindings
from hf_attn_dynamics.analysis.results import Result


NAN = float("nan")
SCORES = had.HeadScores({"encoder": [[0.25, 0.5], [1.0, NAN]]})
SITES = had.HeadScores({"encoder": [[0.25, 0.5]], "cross": [[1.0, NAN]]})

SELECTION = had.Selection(
    {"encoder": [[0], []]}, {"encoder": [[], [0, 1, 5]]}, {"encoder": 2}, {"encoder": 8}, 2.0, 2.5, "flops", 0.5, 0.75
)
ERRORS = [["heads", "encoder", 0, 0.5, 0.25]]


def results():
    """One of each kind, with a number that is missing."""
    table = torch.tensor([[0.0, 0.5], [0.5, 0.0]], dtype=torch.float64)
    offsets = torch.tensor([[[0.25, 0.5, NAN]]], dtype=torch.float64)
    vector = torch.tensor([0.5, NAN], dtype=torch.float64)
    return [
        SITES,
        had.RoleScores({"subject": SITES}, {"subject": {"encoder": NAN, "cross": 0.5}}, {"subject": {"encoder": 0}}),
        had.CoreferenceScores({"all": SCORES}, {"all": 2}, {"all": {"chance": NAN}}, {}, True, False),
        had.MapCorrelation(SCORES, SCORES, SCORES, SCORES),
        had.HeadDistances({"encoder": [(0, 0), (0, 1)]}, {"encoder": table}),
        had.RelativeAttention({"encoder": offsets}, {"encoder": offsets}),
        had.IntegratedGradientsAgreement(vector, vector, vector, table, table),
        had.HeadReading("a model", {"confidence": SCORES}, {"relevance": "not requested."}, 2, 9, 0, 0, 0.5, "cpu"),
        had.UnitScores(SITES, {"encoder": torch.tensor([[0.25, NAN]])}, "fisher"),
        SELECTION,
        had.RefitErrors(ERRORS),
        had.FisherPruning(SELECTION, had.RefitErrors(ERRORS), "refit", 2.5),
        had.TargetAttention(SCORES, {"encoder": NAN}, {"encoder": 0}),
        had.SinkAttention(SCORES, SCORES, {"encoder": 0.5}, {"encoder": offsets}),
        had.HeadNames({"sink": SITES}, {"sink": {"encoder": NAN, "cross": 0.5}}, {"sink": 0.5}, {"copying": "why"}),
        had.HeadMatching(
            {"encoder": [(0, 0)]}, {"encoder": [(0, 1), (1, 0)]}, {"encoder": table}, {"encoder": [(0, 1)]}
        ),
        had.Faithfulness(vector, vector, vector, 3),
        had.TokenDecomposition(offsets[None], offsets, table),
        had.EncoderDecoderContribution(offsets[None], offsets[None]),
        AttributionFindings(
            "encoder",
            {"local": had.MapCorrelation(SCORES, SCORES, SCORES, SCORES)},
            {"local": had.RelativeAttention({"encoder": offsets}, {"encoder": offsets})},
            torch.ones(1, 1, 5, 5),
            {"global_is_uniform": {"holds": vector, "global": vector}},
        ),
    ]


RESULTS = pytest.mark.parametrize("result", results(), ids=lambda result: type(result).__name__)


def test_every_kind_of_result_is_looked_at_here():
    own = {cls for cls in Result.__subclasses__() if cls.__module__.startswith("hf_attn_dynamics")}
    assert {type(result) for result in results()} == own


@RESULTS
def test_a_result_equals_what_was_saved_of_it_and_no_other(result, tmp_path):
    result.save(tmp_path / "result.json")
    back = type(result).load(tmp_path / "result.json")
    assert back == result
    assert all(result != other for other in results() if type(other) is not type(result))
    assert result != result.to_dict()
    with pytest.raises(TypeError, match="unhashable"):
        hash(result)


@RESULTS
def test_a_single_picture_is_plot(result):
    if "plot" in vars(type(result)):
        assert result.pictures() == {"plot": result.plot}
    elif "pictures" not in vars(type(result)):
        for draw in (result.pictures, result.plot):
            with pytest.raises(NotImplementedError, match=f"{type(result).__name__} has no pictures; see to_pandas"):
                draw()


def test_results_of_other_numbers_are_not_equal():
    assert had.HeadScores({"encoder": [[0.25, 0.5], [1.0, 0.0]]}) != SCORES
    assert had.HeadScores({"decoder": SCORES["encoder"]}) != SCORES
    one, other = (
        had.RelativeAttention({"encoder": torch.full((1, 1, 3), value)}, {"encoder": torch.zeros(1, 1, 3)})
        for value in (0.25, 0.5)
    )
    assert one != other


def test_a_site_without_scores_is_named_with_those_that_have_some():
    with pytest.raises(KeyError, match="no scores of the site 'decoder', but of encoder, cross"):
        SITES["decoder"]
    assert SITES.get("decoder") is None
    assert "decoder" not in SITES
    assert list(SITES) == ["encoder", "cross"]


def test_scores_of_one_site_are_an_array():
    array = np.asarray(SCORES)
    assert array.dtype == np.float64
    assert array.tolist()[0] == [0.25, 0.5]
    assert math.isnan(array[1, 1])
    assert np.asarray(SCORES, dtype=np.float32).dtype == np.float32
    copied = np.array(SCORES)
    copied[:] = 7
    assert SCORES["encoder"][0, 0] == 0.25
    assert np.nansum(SCORES) == 1.75


def test_scores_of_several_sites_are_not_one_array():
    with pytest.raises(
        TypeError, match=r"of 2 kinds of sites are not one array; use scores\['encoder'\] or scores\['cross'"
    ):
        np.asarray(SITES)


@pytest.mark.parametrize("given", [torch.nn.Module(), torch.nn.Linear(2, 2), "bert", had.HeadwiseBertModel])
def test_what_is_no_model_is_refused_by_every_analysis(given):
    batch = {"input_ids": torch.tensor([[5, 7]]), "labels": torch.tensor([[5, 7]])}
    analyses = [
        lambda: had.observe(given, had.HeadConfidence()).__enter__(),
        lambda: had.head_importance(given, batch),
        *(
            lambda analysis=analysis: analysis(given, batch)
            for analysis in (
                had.attention_maps,
                had.global_contribution,
                had.head_outputs,
                had.head_relevance,
                had.integrated_gradients_agreement,
                had.lexical_probe,
                had.local_contribution,
                had.relevance_conservation,
                had.value_weighted_attention,
            )
        ),
    ]
    for analysis in analyses:
        with pytest.raises(ValueError, match="must be a PreTrainedModel|no attention modules|has no lexical probe"):
            analysis()


FOLDER = "/nowhere/at/all"


@pytest.mark.parametrize(
    "load",
    [
        had.load_pruned,
        had.headwise_model,
        had.HeadwiseBertModel.from_pretrained,
        had.HeadwiseMarianMTModel.from_pretrained,
        had.HeadwiseRobertaConfig.from_pretrained,
        had.BowAttentionForSequenceClassification.from_pretrained,
        had.LstmSeq2SeqForConditionalGeneration.from_pretrained,
        had.LstmConfig.from_pretrained,
        had.ProxyForSeq2Seq.from_pretrained,
    ],
)
@pytest.mark.parametrize("folder", [FOLDER, "./run/checkpoint-5", "runs/one/model"])
def test_a_folder_that_does_not_exist_is_said_not_to(load, folder):
    with pytest.raises(
        FileNotFoundError, match=f"there is no folder {folder}; pass the folder that save_pretrained wrote"
    ):
        load(folder)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_said_to_be_no_folder():
    with pytest.raises(OSError, match="there is no folder some-model-of-nobody, and no model of that name"):
        had.load_pruned("some-model-of-nobody")


@pytest.mark.parametrize(
    "load",
    [had.HeadScores.load, had.HeadTimeline.load, had.GateHistory.load, had.IbmModel1.load, had.read_pharaoh],
)
def test_a_file_that_does_not_exist_is_named(load):
    with pytest.raises(FileNotFoundError, match=FOLDER):
        load(FOLDER)
