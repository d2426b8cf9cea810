"""Scores of heads and units: against masks and autograd for each sentence alone, and what they must not depend on."""

import copy

import pytest
import torch
from slow_unit_scores import MODELS, lone_sentences, output_projections, padded, scored_model, slow_scores
from stock_models import build_stock
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertModel,
    ElectraConfig,
    ElectraForPreTraining,
)

from hf_attn_dynamics import HeadScores, UnitScores, head_importance, prune_heads, prune_units, unit_importance
from hf_attn_dynamics.models.cost_table import CostTable


METHODS = ("fisher", "michel", "magnitude")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}


def tables(scores):
    parts = {"heads": scores.heads, "units": scores.units}
    return {(part, kind): table for part, own in parts.items() for kind, table in own.items()}


def assert_same(scores, expected, rtol=1e-9):
    scores, expected = (one if isinstance(one, dict) else tables(one) for one in (scores, expected))
    assert scores.keys() == expected.keys()
    for key in scores:
        atol = 1e-14 * expected[key].nan_to_num().abs().max().item()
        torch.testing.assert_close(scores[key], expected[key], rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_masks_and_sentences_one_by_one(name, method):
    model = scored_model(name)
    alone = lone_sentences(model)
    expected = slow_scores(name, model, alone, method)
    assert all(table.max() > 0 for table in expected.values())
    assert_same(unit_importance(model, alone, method), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["bert", "llama", "marian", "opt", "albert"])
def test_padding_and_the_split_into_batches_change_nothing(name, method):
    model = scored_model(name)
    alone = lone_sentences(model)
    expected = unit_importance(model, alone, method)
    assert_same(unit_importance(model, [padded(alone, length=12)], method), expected)
    assert_same(unit_importance(model, (padded(part) for part in (alone[:2], alone[2:])), method), expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_heads_of_michel_are_those_of_head_importance(name):
    model = scored_model(name)
    batch = padded(lone_sentences(model))
    assert unit_importance(model, batch, "michel").heads == head_importance(model, batch)


@pytest.mark.parametrize("method", METHODS)
def test_frozen_models_have_the_same_scores_and_are_left_as_they_were(method):
    model = scored_model("bert")
    batch = padded(lone_sentences(model))
    expected = unit_importance(model, batch, method)
    model.train().requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        assert_same(unit_importance(model, batch, method), expected)
    assert model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(before[key].equal(value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("method", [*METHODS, "random"])
def test_removed_heads_and_units_have_no_score_and_the_others_keep_their_numbers(method):
    model = scored_model("bert")
    batch = padded(lone_sentences(model))
    projections = output_projections("bert", model)
    with torch.no_grad():
        # Without a projection they have no effect, so that removing them changes no other score.
        projections["heads", "encoder"][0].weight[:, :8] = 0
        projections["units", "encoder"][1].weight[:, [0, 5, 6]] = 0
        projections["units", "encoder"][2].weight.zero_()
    before = unit_importance(model, batch, method)
    prune_units(prune_heads(model, {0: [0]}), {1: [0, 5, 6], 2: "0-23"})
    after = unit_importance(model, batch, method)
    missing = {(0, 0)}
    assert {tuple(place) for place in after.heads["encoder"].isnan().nonzero().tolist()} == missing
    assert after.units["encoder"].isnan().sum(1).tolist() == [0, 3, 24]
    assert after.units["encoder"][1].isnan().nonzero().flatten().tolist() == [0, 5, 6]
    for part in ("heads", "units"):
        left = ~after.of(part)["encoder"].isnan()
        torch.testing.assert_close(
            after.of(part)["encoder"][left], before.of(part)["encoder"][left], rtol=1e-9, atol=0
        )


def test_gradients_of_sentences_are_kept_in_their_order():
    model = scored_model("marian")
    alone = lone_sentences(model)
    scores = unit_importance(model, [padded(alone[:2]), padded(alone[2:])], keep_gradients=True)
    for part in ("heads", "units"):
        for kind, gradients in scores.gradients[part].items():
            assert len(gradients) == len(alone)
            torch.testing.assert_close(gradients.square().mean(0), scores.of(part)[kind], rtol=1e-12, atol=0)
    last = unit_importance(model, alone[-1], keep_gradients=True)
    torch.testing.assert_close(scores.gradients["units"]["decoder"][-1], last.gradients["units"]["decoder"][0])
    assert unit_importance(model, alone).gradients is None


def test_rows_without_tokens_are_no_sentences():
    model = scored_model("bert")
    batch = padded(lone_sentences(model))
    filler = {name: torch.cat([value, value[:1]]) for name, value in batch.items()}
    filler["attention_mask"][-1], filler["labels"][-1] = 0, -100
    assert_same(unit_importance(model, filler), unit_importance(model, batch))


def test_the_choices_of_a_question_are_one_sentence():
    torch.manual_seed(0)
    model = BertForMultipleChoice(BertConfig(**SIZES)).double().eval()
    ids = torch.randint(4, 40, (3, 2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1])}
    alone = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(3)]
    scores = unit_importance(model, batch, keep_gradients=True)
    assert len(scores.gradients["units"]["encoder"]) == 3
    assert_same(unit_importance(model, alone), scores)


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_margins_are_those_of_masks_and_sentences_one_by_one(classes):
    torch.manual_seed(1)
    config = BertConfig(**SIZES | {"vocab_size": 60}, num_labels=classes)
    model = BertForSequenceClassification(config).double().eval()
    alone = [{name: value for name, value in one.items() if name != "labels"} for one in lone_sentences(model)]
    expected = slow_margins(model, alone)
    assert all(table.max() > 0 for table in expected.values())
    # Of one batch with padding, and of batches of one sentence.
    assert_same(unit_importance(model, [padded(alone, length=12)], "margin"), expected, rtol=1e-6)
    scores = unit_importance(model, alone, "margin", keep_gradients=True)
    assert_same(scores, expected, rtol=1e-6)
    assert len(scores.gradients["heads"]["encoder"]) == len(alone)


def slow_margins(model, alone):
    """Squared gradients of a mask for each head and unit, by finite differences of the margin of each sentence."""
    step, outputs = 1e-4, output_projections("bert", model)
    values = {}
    for (part, kind), modules in outputs.items():
        rows = []
        for module in modules:
            count = 4 if part == "heads" else module.weight.shape[1]
            row = []
            for index in range(count):
                columns = slice(index * module.weight.shape[1] // count, (index + 1) * module.weight.shape[1] // count)
                changed = [scaled_margins(model, alone, module, columns, 1 + sign * step) for sign in (1, -1)]
                row.append(((changed[0] - changed[1]) / (2 * step)).square().mean())
            rows.append(torch.stack(row))
        values[part, kind] = torch.stack(rows)
    return values


@torch.no_grad()
def scaled_margins(model, alone, module, columns, scale):
    """Margins of all sentences with some inputs of an output projection scaled."""
    kept = module.weight[:, columns].clone()
    module.weight[:, columns] = kept * scale
    logits = [sorted(model(**sentence).logits[0].tolist(), reverse=True) for sentence in alone]
    module.weight[:, columns] = kept
    return torch.tensor([own[0] - (own[1] if len(own) > 1 else 0) for own in logits], dtype=torch.float64)


def test_margins_are_of_classifiers():
    model = build_stock("bert").double()
    batch = padded(lone_sentences(model))
    with pytest.raises(ValueError, match="is for classifiers, but .* has no single logit for each class; use fisher"):
        unit_importance(model, batch, "margin")
    several = BertForSequenceClassification(
        BertConfig(**SIZES | {"vocab_size": 60}, problem_type="multi_label_classification")
    )
    without = {name: value for name, value in batch.items() if name != "labels"}
    with pytest.raises(ValueError, match="has several labels for a sentence; use fisher"):
        unit_importance(several, without, "margin")
    discriminator = ElectraForPreTraining(ElectraConfig(**SIZES | {"vocab_size": 60}, embedding_size=16))
    with pytest.raises(ValueError, match="ElectraForPreTraining has no single logit for each class"):
        unit_importance(discriminator, without, "margin")
    with pytest.raises(ValueError, match="loss has no effect with method='margin'; use fisher or michel"):
        unit_importance(several, without, "margin", loss=lambda outputs, batch: outputs.logits.sum())


def test_a_loss_can_be_given():
    model = build_stock("bert").double()
    batch = padded(lone_sentences(model))
    doubled = unit_importance(model, batch, loss=lambda outputs, batch: 2 * outputs.loss)
    single = unit_importance(model, batch, loss=lambda outputs, batch: outputs.loss)
    torch.testing.assert_close(doubled.units["encoder"], 4 * single.units["encoder"])


def test_values_of_a_block_worked_by_hand():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES)).double().eval()
    block = model.bert.encoder.layer[1]
    with torch.no_grad():
        block.output.dense.weight.copy_(torch.arange(24.0).expand(16, 24))
        block.intermediate.dense.weight.zero_()
        block.intermediate.dense.bias.fill_(50.0)  # GELU changes nothing here
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
    scores = unit_importance(model, {"input_ids": ids, "attention_mask": (ids > 0).long()}, "magnitude")
    # 16 outputs, 5 tokens
    expected = 16 * torch.arange(24.0, dtype=torch.float64) * 50 * 5**0.5
    torch.testing.assert_close(scores.units["encoder"][1], expected)


def test_random_scores_treat_heads_and_units_alike_per_weight_and_depend_on_the_seed_alone():
    model = BertModel(BertConfig(**{**SIZES, "intermediate_size": 2000, "num_attention_heads": 8}))
    scores = unit_importance(model, method="random", seed=3)
    # A head has four projections of 2 × 16 weights, a unit two of 16.
    for table, weights in ((scores.heads["encoder"], 128), (scores.units["encoder"], 32)):
        assert table.min() >= 0
        assert table.max() < weights
    assert abs(scores.units["encoder"].mean() / 32 - 0.5) < 0.03
    assert unit_importance(model, method="random", seed=3) == scores
    assert unit_importance(model, method="random", seed=4) != scores


def test_blocks_that_read_a_sentence_in_chunks_are_refused():
    model = BertForSequenceClassification(BertConfig(**SIZES, chunk_size_feed_forward=2)).eval()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([0])}
    with pytest.raises(ValueError, match="in chunks; set config.chunk_size_feed_forward to 0"):
        unit_importance(model, batch)


BATCH = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, -100, 7]])}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "taylor"}, "method must be one of fisher, margin, michel, magnitude, random, got 'taylor'"),
        (
            {"method": "michel", "keep_gradients": True},
            "keep_gradients needs method='fisher' or 'margin', got method='michel'",
        ),
        ({"data": None}, "method='fisher' needs data"),
        ({"data": []}, "data is empty: importance needs at least one batch"),
        ({"data": {"input_ids": torch.tensor([[5]])}}, "each batch needs 'labels'"),
        ({"data": {**BATCH, "labels": torch.full((1, 3), -100)}}, "data has no labels"),
        ({"data": {**BATCH, "attention_mask": torch.zeros(1, 3)}}, "data has no token for the encoder layer 0"),
        ({"loss": lambda outputs, batch: outputs.loss / 0}, "the loss of batch 0 is inf"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        unit_importance(build_stock("bert"), **{"data": BATCH, **arguments})


def test_units_of_experts_are_refused_by_name():
    with pytest.raises(ValueError, match="mixture of experts, MixtralSparseMoeBlock"):
        unit_importance(build_stock("mixtral"), BATCH)


def test_heads_are_scored_alone_as_beside_units():
    model = scored_model("bert")
    batch = padded(lone_sentences(model))
    for method in METHODS:
        alone = unit_importance(model, batch, method, parts="heads")
        assert alone.heads == unit_importance(model, batch, method).heads
        assert alone.units == {}
    with pytest.raises(ValueError, match=r"parts must have heads, got \['units'\]"):
        unit_importance(model, batch, parts=["units"])


TABLE = CostTable(
    "seconds",
    0.010,
    {"encoder": [[0, 0.0], [2, 0.004], [4, 0.006]]},
    {"encoder": [[0, 0.0], [2, 0.001], [3, 0.004]]},
    {"encoder": 2},
)
SCORES = UnitScores(
    HeadScores({"encoder": [[1.0, 2, 3, float("nan")]] * 2}), {"encoder": [[1.0, 2, 3]] * 2}, method="fisher"
)


def test_scores_per_cost_are_divided_by_the_cost_of_the_last_head_or_unit():
    scores = SCORES.per_cost(TABLE)
    assert scores.per == "ms"
    # One head costs 1 ms of the last segment, one unit 3 ms.
    torch.testing.assert_close(
        scores.heads["encoder"][0], torch.tensor([1.0, 2, 3, float("nan")]).double(), equal_nan=True
    )
    torch.testing.assert_close(scores.units["encoder"][0], torch.tensor([1.0, 2, 3]).double() / 3)
    with pytest.raises(ValueError, match="divided by cost already, per ms"):
        scores.per_cost(TABLE)


def test_noise_in_measurements_gives_no_negative_cost():
    noisy = CostTable(
        "flops", 1.0, {"encoder": [[0, 0.0], [4, 8.0]]}, {"encoder": [[0, 0.0], [2, 9.0], [3, 6.0]]}, {"encoder": 2}
    )
    scores = SCORES.per_cost(noisy)
    assert scores.per == "FLOP"
    torch.testing.assert_close(scores.units["encoder"][0], torch.tensor([1.0, 2, 3]).double() / 2)
    free = CostTable("flops", 1.0, {"encoder": [[0, 0], [4, 8]]}, {"encoder": [[0, 6], [3, 6]]}, {"encoder": 2})
    with pytest.raises(ValueError, match="assigns units of the encoder no positive cost"):
        SCORES.per_cost(free)
    missing = CostTable("flops", 1.0, {"decoder": [[0, 0], [4, 8]]}, {}, {"decoder": 2})
    with pytest.raises(ValueError, match="no cost of heads of the encoder"):
        SCORES.per_cost(missing)


def test_scores_are_saved_without_gradients_and_shown(tmp_path):
    model = scored_model("bert")
    scores = unit_importance(model, padded(lone_sentences(model)), keep_gradients=True)
    scores.save(tmp_path / "scores.json")
    back = UnitScores.load(tmp_path / "scores.json")
    assert back == scores
    assert back.gradients is None
    rows = list(scores.records())
    assert len(rows) == 3 * 4 + 3 * 24
    assert rows[0][:4] == ("heads", "encoder", 0, 0)
    assert rows[-1] == ("units", "encoder", 2, 23, scores.units["encoder"][2, 23].item())
    page = scores._repr_html_()
    assert "3 layers × 4 heads" in page
    assert "Scores of units: fisher" in page


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({"cross": [[1.0]]}, "units name the site 'cross', which is not one of encoder, decoder"),
        ({"encoder": [1.0]}, r"units of the encoder must have shape \(layers, units\), got \(1,\)"),
    ],
)
def test_tables_of_another_form_are_refused(units, message):
    with pytest.raises(ValueError, match=message):
        UnitScores(SCORES.heads, units)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
def test_magnitudes_of_adapted_projections_are_refused():
    peft = pytest.importorskip("peft")
    model = scored_model("llama")
    alone = lone_sentences(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["down_proj"]))
    with pytest.raises(ValueError, match=r"output projection of .*mlp.*(adapt|merge)"):
        unit_importance(adapted.base_model.model, alone, "magnitude")
    unit_importance(adapted.base_model.model, alone, "fisher")
