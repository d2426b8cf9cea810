"""Tables of costs: arithmetic, gradients, and what they do not fit."""

import json
import math
from dataclasses import replace

import pytest
import torch
from stock_models import STOCK_MODELS, build_stock
from transformers import BertConfig, BertForMaskedLM, BertModel

from hf_attn_dynamics.models.architecture_sizes import architecture_sizes
from hf_attn_dynamics.models.cost_table import CostTable
from hf_attn_dynamics.models.head_pruning import prune_heads
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.head_sites import HeadSite
from hf_attn_dynamics.models.headwise_classes import headwise_class
from hf_attn_dynamics.models.unit_pruning import prune_units


SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
# Attention costs 0, 3, 7, 8 and 10; a feed-forward block 1 for each 4 units.
TABLE = {
    "quantity": "seconds",
    "rest": 5.0,
    "attention": {"encoder": [[0, 0.0], [1, 3.0], [2, 7.0], [4, 10.0]]},
    "feed_forward": {"encoder": [[0, 0.0], [24, 6.0]]},
    "layers": {"encoder": 3},
}
SEQ2SEQ = {
    "quantity": "flops",
    "rest": 100,
    "attention": {"encoder": [[0, 0], [4, 40]], "decoder": [[0, 0], [4, 80]], "cross": [[0, 0], [4, 20]]},
    "feed_forward": {"encoder": [[0, 0], [8, 64]], "decoder": [[0, 0], [8, 32]]},
    "layers": {"encoder": 2, "decoder": 1, "cross": 1},
}


def table(**changes):
    return CostTable(**{**TABLE, **changes})


def encoder(*counts):
    return {HeadSite("encoder", layer): count for layer, count in enumerate(counts)}


def bert(cls=BertModel, **changes):
    return cls(BertConfig(**{**SIZES, **changes}))


@pytest.mark.parametrize(("heads", "cost"), [(0, 0), (1, 3), (2, 7), (3, 8.5), (4, 10), (0.5, 1.5)])
def test_costs_between_points_are_interpolated(heads, cost):
    assert table().attention_cost("encoder", heads) == cost
    assert table().attention_cost("encoder", torch.tensor(float(heads))).item() == pytest.approx(cost)


def test_the_cost_of_a_model_is_the_sum_of_its_blocks():
    assert table().dense == 5 + 3 * 10 + 3 * 6
    assert table().cost(encoder(0, 2, 3), encoder(0, 12, 24)) == 5 + (0 + 7 + 8.5) + (0 + 3 + 6)
    assert table().cost({HeadSite("encoder", 2): 1}, {}) == 5 + (10 + 10 + 3) + 18


def test_the_kinds_of_sites_have_their_own_costs():
    of_all = CostTable(**SEQ2SEQ)
    assert of_all.dense == 100 + 80 + 80 + 20 + 128 + 32
    assert of_all.cost({HeadSite("cross", 0): 1}, {HeadSite("decoder", 0): 4}) == of_all.dense - 15 - 16


def test_flops_are_integers_without_rounding():
    large = 7 * 10**14
    one = CostTable("flops", 3, {"decoder": [[0, 0], [7, large]]}, {}, {"decoder": 2})
    assert one.cost({HeadSite("decoder", 0): 3}, {}) == 3 + 3 * 10**14 + large


@pytest.mark.parametrize(
    ("heads", "units", "message"),
    [
        ({HeadSite("encoder", 3): 1}, {}, "the table has 3 layers of encoder, but no layer 3"),
        ({HeadSite("decoder", 0): 1}, {}, "the table has no attention blocks of decoder, but of encoder"),
        ({}, {HeadSite("decoder", 0): 1}, "the table has no feed_forward blocks of decoder, but of encoder"),
        ({HeadSite("encoder", 0): 5}, {}, "the table has costs of 0 to 4 heads or units, not of 5"),
        ({HeadSite("encoder", 0): -1}, {}, "the table has costs of 0 to 4 heads or units, not of -1"),
    ],
)
def test_unknown_sites_and_counts_are_refused(heads, units, message):
    with pytest.raises(ValueError, match=message):
        table().cost(heads, units)


def test_the_cost_of_a_model_is_that_of_its_heads_and_units():
    model = prune_units(prune_heads(bert(), {0: [1, 2], 2: [0, 1, 2, 3]}), {0: range(8), 1: range(24)})
    own = table(fingerprint=architecture_sizes(model))
    expected = 5 + (7 + 10 + 0) + (4 + 0 + 6)
    assert own.cost_of(model) == expected
    assert own.speedup_of(model) == 53 / expected
    assert own.speedup_of(bert()) == 1


def tensors(counts, probabilities=None):
    probabilities = probabilities or [None] * len(counts)
    return {
        HeadSite("encoder", layer): (
            torch.as_tensor(count).double(),
            None if p is None else torch.as_tensor(p).double(),
        )
        for layer, (count, p) in enumerate(zip(counts, probabilities))
    }


def test_expected_cost_of_deterministic_gates_is_the_cost():
    expected = table().expected_from(tensors([0, 2, 3]), tensors([0, 12, 24], [1.0, 1.0, 0.0]))
    assert expected.dtype == torch.float64
    assert expected.item() == pytest.approx(table().cost(encoder(0, 2, 3), encoder(0, 12, 0)) / table().dense)


def test_expected_cost_of_a_block_is_weighted_by_its_probability():
    heads, units = [0.5, 1.5, 3.5], [6.0, 12.0, 23.0]
    open_heads, open_units = [0.25, 0.5, 1.0], [0.1, 0.2, 0.3]
    terms = [p * table().attention_cost("encoder", count) for count, p in zip(heads, open_heads)]
    terms += [p * table().feed_forward_cost("encoder", count) for count, p in zip(units, open_units)]
    expected = table().expected_from(tensors(heads, open_heads), tensors(units, open_units))
    assert expected.item() == pytest.approx((5 + sum(terms)) / 53)


def test_sites_without_gates_keep_everything():
    one = {HeadSite("encoder", 1): (torch.tensor(2.0), None)}
    assert table().expected_from(one, {}).item() == pytest.approx(table().cost({HeadSite("encoder", 1): 2}, {}) / 53)
    with pytest.raises(ValueError, match="needs the expected number of heads or units of a site"):
        table().expected_from({}, {})


def test_gradients_are_those_of_the_expected_cost():
    inputs = [
        torch.tensor([value, 0.3 + value / 10], dtype=torch.float64, requires_grad=True) for value in (0.4, 1.7, 3.1)
    ]

    def cost(*pairs):
        return table().expected_from(
            {HeadSite("encoder", layer): (pair[0], pair[1]) for layer, pair in enumerate(pairs)},
            {HeadSite("encoder", layer): (5 * pair[0], pair[1] ** 2) for layer, pair in enumerate(pairs)},
        )

    assert torch.autograd.gradcheck(cost, inputs)


def test_half_precision_counts_give_a_cost_in_single_precision():
    expected = table().expected_from({HeadSite("encoder", 0): (torch.tensor(2.0, dtype=torch.bfloat16), None)}, {})
    assert expected.dtype == torch.float32
    assert table().attention_cost("encoder", torch.ones(3, dtype=torch.float16)).dtype == torch.float32


def test_gates_give_their_expected_counts():
    class Gate:
        def __init__(self, *pair):
            self.pair = pair

        def expected_counts(self):
            return self.pair

    gate, other = Gate(torch.tensor(2.0), None), Gate(torch.tensor(12.0), torch.tensor(0.5))
    site = HeadSite("encoder", 0)
    expected = table().expected({site: gate}, {site: other})
    assert expected.item() == pytest.approx((5 + 7 + 20 + 0.5 * 3 + 12) / 53)


def test_largest_speedups_are_those_of_models_without_these_parts():
    assert table().largest_speedup() == {"heads": 53 / 23, "units": 53 / 35, "blocks": 53 / 5}
    assert table(rest=0.0, feed_forward={}).largest_speedup(["heads"]) == {"heads": math.inf}
    assert table().largest_speedup("units") == {"units": 53 / 35}


def test_targets_that_can_be_reached_pass():
    table().check_target(2.0)
    table().check_target(53 / 23, ["heads"])
    table().check_target(10, ["heads", "units"])
    table().check_target(10, ["blocks"])


@pytest.mark.parametrize(
    ("target", "parts", "message"),
    [
        (
            4,
            ["heads"],
            r"4 × cannot be reached by heads alone: at most 2\.30 ×; by heads and units: 10\.60 × \(BertModel",
        ),
        (2.0, "units", r"2 × cannot be reached by units alone: at most 1\.51 ×; by heads and units: 10\.60 ×"),
        (11, ["heads", "units"], r"11 × cannot be reached by heads and units: at most 10\.60 × \(BertModel"),
        (11, ["blocks"], r"11 × cannot be reached by blocks alone: at most 10\.60 × \(BertModel"),
        (1, ["heads"], "a target speed-up must be a number greater than 1, got 1"),
        ("2", ["heads"], "a target speed-up must be a number greater than 1, got '2'"),
        (math.inf, ["heads"], "must be a number greater than 1, got inf"),
        (2, [], r"parts must be some of heads, units, blocks, got \[\]"),
        (2, ["layers"], r"parts must be some of heads, units, blocks, got \['layers'\]"),
    ],
)
def test_targets_that_cannot_be_reached_are_refused(target, parts, message):
    own = table(fingerprint={"class": "BertModel"}, batch=8, length=128)
    with pytest.raises(ValueError, match=message):
        own.check_target(target, parts)


def test_a_table_without_units_says_so():
    with pytest.raises(
        ValueError,
        match="parts has units, but the units of this model cannot be pruned, for a reason .*; its heads can",
    ):
        table(feed_forward={}).check_target(2, ["units"])
    with pytest.raises(ValueError, match=r"3 × cannot be reached by heads alone: at most \d\.\d\d × \("):
        table(feed_forward={}, rest=30.0).check_target(3)


def test_a_table_fits_its_own_setting():
    sizes = architecture_sizes(bert())
    own = table(fingerprint=sizes, batch=8, length=128, threads=2)
    own = replace(own, device="cpu (some processor)")
    own.check_fits()
    own.check_fits(bert(), batch=8, length=128, phase="forward", dtype=torch.float32, threads=2)
    counted = table(quantity="flops", fingerprint=sizes)
    counted.check_fits(bert(), device="cpu", dtype=torch.bfloat16, threads=7)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"device": "cpu"}, r"device cpu \(some processor\), not cpu \("),
        ({"device": torch.device("meta")}, r"device cpu \(some processor\), not meta"),
        ({"batch": 4}, "batch 8, not 4"),
        ({"length": 64}, "length 128, not 64"),
        ({"phase": "decode"}, "phase forward, not decode"),
        ({"dtype": torch.bfloat16}, "dtype float32, not bfloat16"),
        ({"threads": 1}, "threads 2, not 1"),
        ({"batch": 4, "length": 64}, "batch 8, not 4; length 128, not 64"),
        ({"model": bert(BertForMaskedLM)}, "class BertModel, not BertForMaskedLM"),
        ({"model": bert(hidden_size=32)}, "hidden_size 16, not 32"),
        ({"model": bert(num_hidden_layers=2)}, r"num_hidden_layers 3, not 2\. Measure a new table"),
    ],
)
def test_tables_of_another_setting_are_refused(setting, message):
    own = table(fingerprint=architecture_sizes(bert()), batch=8, length=128, threads=2, device="cpu (some processor)")
    with pytest.raises(ValueError, match=f"the cost table does not fit: it was made for {message}"):
        own.check_fits(**setting)


def test_a_model_of_another_architecture_has_no_cost():
    with pytest.raises(ValueError, match="intermediate_size 24, not 12"):
        table(fingerprint=architecture_sizes(bert())).cost_of(bert(intermediate_size=12))


@pytest.mark.parametrize("name", STOCK_MODELS)
def test_pruned_and_headwise_models_have_the_sizes_of_the_dense_one(name):
    model = build_stock(name)
    sizes = architecture_sizes(model)
    assert sizes["class"] == type(model).__name__
    twin = headwise_class(type(model))
    assert architecture_sizes(twin(twin.config_class(**STOCK_MODELS[name][2]))) == sizes
    first = locate_heads(model)[0]
    prune_heads(model, {first.site.kind: {first.site.layer: first.heads[: first.group_size]}})
    assert architecture_sizes(model) == sizes


def test_names_of_classes_and_tokens_are_no_sizes():
    sizes = architecture_sizes(bert(num_labels=7, pad_token_id=3))
    assert sizes == architecture_sizes(bert())
    assert sizes != architecture_sizes(bert(vocab_size=41))


def test_a_table_is_saved_as_json(tmp_path):
    own = table(fingerprint=architecture_sizes(bert()), device="cpu (a)", batch=8, length=128, kernel="sdpa")
    own.save(tmp_path / "folder" / "table.json")
    assert CostTable.load(tmp_path / "folder" / "table.json") == own
    assert json.loads((tmp_path / "folder" / "table.json").read_text())["attention"] == TABLE["attention"]


@pytest.mark.parametrize("text", ["{", "[]", '{"rest": 1}', "null"])
def test_files_that_hold_no_table_are_refused(text, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json does not hold a cost table"):
        CostTable.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantity": "joules"}, "quantity must be one of seconds, flops, got 'joules'"),
        ({"phase": "train"}, "phase must be one of forward, decode, got 'train'"),
        ({"rest": -1.0}, "rest must be a number of at least 0, got -1.0"),
        ({"rest": math.nan}, "rest must be a number of at least 0, got nan"),
        ({"layers": {"decoder": 3}}, "attention and layers must have the same kinds"),
        ({"layers": {"encoder": 0}}, "layers of encoder must be an integer greater than 0, got 0"),
        ({"feed_forward": {"decoder": [[0, 0], [1, 1]]}}, "feed_forward no other ones"),
        ({"attention": {}, "layers": {}}, "must have the same kinds of sites"),
        ({"attention": {"encoder": [[0, 0]]}}, "attention of encoder must be pairs"),
        ({"attention": {"encoder": [[1, 0], [2, 1]]}}, "from 0 in ascending order"),
        ({"attention": {"encoder": [[0, 0], [2, 1], [1, 2]]}}, "from 0 in ascending order"),
        ({"feed_forward": {"encoder": [[0, 0], [2, -1]]}}, "feed_forward of encoder must be pairs"),
        ({"rest": 0, "attention": {"encoder": [[0, 0], [2, 0]]}, "feed_forward": {}}, "the dense model has no cost"),
    ],
)
def test_values_that_are_no_table_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        table(**changes)


def test_the_text_says_what_each_part_can_give():
    own = table(
        fingerprint={"class": "BertModel"}, device="cpu (a)", threads=2, batch=8, length=128, kernel="sdpa", rest=0.005
    )
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in str(own).splitlines()]
    assert lines[0] == ["", "ms", "% of dense", "largest speed-up"]
    assert lines[2] == ["all heads", "30,000.000", "62.5", "2.67 ×"]
    assert lines[3] == ["all units", "18,000.000", "37.5", "1.60 ×"]
    assert lines[4] == ["all blocks", "48,000.000", "100.0", "9601.00 ×"]
    assert lines[5] == ["the rest", "5.000", "0.0", ""]
    assert lines[6] == ["dense model", "48,005.000", "100.0", ""]
    assert str(own).endswith("\n\nBertModel, batch of 8 × 128 tokens, float32, sdpa, cpu (a), 2 threads.")
    html = own._repr_html_()
    assert html.count("<tr>") == 6
    assert "2.67 ×" in html


def test_the_text_of_an_encoder_decoder_has_a_row_for_each_kind_of_site():
    lines = str(CostTable(**SEQ2SEQ, phase="decode", length=7)).splitlines()
    rows = [line.split("|")[1].strip() for line in lines[2:-2]]
    heads = ["all heads", "encoder", "decoder", "cross"]
    assert rows == [*heads, "all units", "encoder", "decoder", "all blocks", "the rest", "dense model"]
    assert lines[-1] == "decoding a token, batch of 1, 7 tokens in the cache."


def test_the_points_are_a_table():
    frame = table().to_pandas()
    assert list(frame.columns) == ["block", "site", "left", "seconds", "fraction_of_dense"]
    assert len(frame) == 6
    assert frame.seconds[3] == 10
    assert frame.fraction_of_dense[3] == 10 / 53
