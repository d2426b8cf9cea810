"""Pruning without training, in one call."""

import copy

import pytest
import torch
from slow_unit_scores import lone_sentences, output_projections, padded, scored_model
from stock_models import build_stock
from transformers import BertConfig, BertForSequenceClassification

from hf_attn_dynamics import (
    FisherPruning,
    compensate,
    count_flops_table,
    fisher_pruning,
    refit_outputs,
    select_parts,
    unit_importance,
)


@pytest.fixture(scope="module")
def bert():
    model = scored_model("bert")
    return model, count_flops_table(model, length=8), padded(lone_sentences(model, 20))


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("refit", "compensates"), [(True, True), (False, True), (False, False)])
def test_one_call_does_what_the_steps_do(bert, refit, compensates):
    dense, table, batch = bert
    model, by_hand = copy.deepcopy(dense), copy.deepcopy(dense)
    report = fisher_pruning(model, iter([batch]), table, 1.5, refit=refit, compensate=compensates)
    scores = unit_importance(by_hand, [batch], "fisher", keep_gradients=True)
    select_parts(by_hand, scores, table, 1.5, rearrange=True).apply(by_hand)
    if refit:
        assert report.errors == refit_outputs(by_hand, dense, batch)
    elif compensates:
        compensate(by_hand, dense, batch)
    assert report.compensation == ("refit" if refit else "bias" if compensates else "none")
    assert all(one.equal(other) for one, other in zip(weights(model), weights(by_hand), strict=True))
    assert table.speedup_of(model) == report.selection.speedup >= 1.5


@pytest.mark.parametrize("name", ["llama", "marian", "t5", "albert", "modernbert"])
def test_every_architecture_reaches_its_target(name):
    model = scored_model(name)
    table = count_flops_table(model, length=8)
    report = fisher_pruning(model, padded(lone_sentences(model)), table, 1.4)
    assert table.speedup_of(model) == report.selection.speedup >= 1.4
    assert all(after <= before for *_, before, after in report.errors.records())


@pytest.mark.parametrize("refit", [True, False])
def test_mixtures_of_experts_lose_heads(refit):
    model = build_stock("mixtral")
    dense, batch, table = copy.deepcopy(model), padded(lone_sentences(model)), count_flops_table(model, length=8)
    report = fisher_pruning(model, batch, table, 1.1, parts=["heads"], refit=refit)
    assert table.speedup_of(model) == report.selection.speedup >= 1.1
    assert all(part == "heads" for part, *_ in report.errors.records())
    assert model.config.added_biases
    for name, parameter in model.named_parameters():
        if "experts" in name:
            assert torch.equal(parameter, dense.get_parameter(name))


def test_margins_need_no_labels_and_select_by_what_they_say():
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    dense = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=32)).double().eval()
    batch = {"input_ids": torch.randint(4, 60, (12, 8))}
    table = count_flops_table(dense, length=8)
    model, by_hand = copy.deepcopy(dense), copy.deepcopy(dense)
    fisher_pruning(model, batch, table, 1.5, method="margin", refit=False, compensate=False)
    scores = unit_importance(by_hand, batch, "margin", keep_gradients=True)
    select_parts(by_hand, scores, table, 1.5, rearrange=True).apply(by_hand)
    assert all(one.equal(other) for one, other in zip(weights(model), weights(by_hand), strict=True))


def test_units_that_do_nothing_go_first_and_the_model_stays_as_it_was():
    model = scored_model("gpt2")
    batch = padded(lone_sentences(model))
    with torch.no_grad():
        for projection in output_projections("gpt2", model)["units", "decoder"]:
            projection.weight[::2] = 0
        expected = model(**batch).logits
    table = count_flops_table(model, length=8)
    report = fisher_pruning(model, batch, table, 1.3, parts="units", refit=False)
    assert all(set(range(1, 128, 2)) <= set(own) for own in report.selection.units["decoder"])
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-9, atol=1e-11)


def test_a_report_is_saved_and_shown(bert, tmp_path):
    dense, table, batch = bert
    report = fisher_pruning(copy.deepcopy(dense), batch, table, 1.5, parts=["heads", "units"])
    report.save(tmp_path / "report.json")
    assert FisherPruning.load(tmp_path / "report.json") == report
    rows = list(report.records())
    assert len(rows) == 6
    assert rows[0][:3] == ("heads", "encoder", 0)
    assert all(after <= before for *_, before, after in rows)
    assert "output projections fitted again" in str(report)
    (axes,) = report.plot(tmp_path / "left.png").axes
    # A bar for the heads and one for the units of each layer.
    assert len(axes.patches) == 6


def test_impossible_requests_leave_the_model_unchanged(bert):
    dense, table, batch = bert
    model = copy.deepcopy(dense)
    for arguments, message in (
        ({"speedup": 100}, "100 × cannot be reached by heads and units"),
        ({"speedup": 1}, "speedup must be a number greater than 1, got 1"),
        ({"method": "michel"}, "method must be one of fisher, margin, got 'michel'"),
        ({"ridge": -1}, "ridge must be a number of at least 0, got -1"),
        ({"parts": ["layers"]}, "parts must be one or both of heads, units"),
        ({"data": []}, "data is empty"),
        ({"data": {"input_ids": batch["input_ids"]}}, "each batch needs 'labels'"),
    ):
        with pytest.raises(ValueError, match=message):
            fisher_pruning(model, **{"data": batch, "table": table, "speedup": 1.5, **arguments})
    assert all(one.equal(other) for one, other in zip(weights(model), weights(dense), strict=True))
