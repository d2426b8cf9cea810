import gzip
import json
import math
import sys

import pytest
import torch
import transformers
from attention_statistics import slow_statistics
from stock_models import build_stock
from tiny_models import padded_batch, ragged_sentences, tiny_model, vivid
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMultipleChoice, RobertaConfig

from hf_attn_dynamics import (
    HeadConfidence,
    HeadDistance,
    HeadDistances,
    HeadEntropy,
    HeadScores,
    Observer,
    RelativeAttention,
    RelativePositions,
    observe,
    prune_heads,
)
from hf_attn_dynamics.analysis.observers import observation
from hf_attn_dynamics.analysis.observers.base import AttentionCall, ObservedBatch, ObservedTokens
from hf_attn_dynamics.analysis.observers.distances import sample_tokens
from hf_attn_dynamics.analysis.observers.excluded_tokens import end_of_sentence_ids
from hf_attn_dynamics.models.head_roles import HeadLayer
from hf_attn_dynamics.models.head_sites import HeadSite


EXCLUDED = [5, 6, 7, 8, 9]


def observers(excluded_ids=EXCLUDED, **settings):
    return [
        HeadConfidence(excluded_ids),
        HeadEntropy(),
        HeadDistance(**settings),
        RelativePositions(limit=3, excluded_ids=excluded_ids),
    ]


def statistics_of(model, batches, *looking):
    """Every table of every result, by the names of result and site."""
    with torch.no_grad(), observe(model, *(looking or observers())) as seen:
        for batch in batches:
            model(**batch)
    tables = {}
    for name, result in seen.results().items():
        if isinstance(result, HeadScores):
            tables |= {(name, kind): table for kind, table in result.items()}
        elif isinstance(result, HeadDistances):
            tables |= {(name, kind): table for kind, table in result.distances.items()}
        else:
            tables |= {("attention", kind): table for kind, table in result.attention.items()}
            tables |= {("largest", kind): table for kind, table in result.largest.items()}
    return tables


def assert_same_tables(found, expected, atol=1e-10):
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        torch.testing.assert_close(
            found[name], table, rtol=0, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def model_for(name):
    """A model in double precision that prefers some keys to others."""
    return vivid(tiny_model(name, head="Model") if name in ("bert", "marian") else build_stock(name)).double()


def batches_for(model, sentences, targets=None, padding=3, side="right"):
    """One padded batch."""
    batch = padded_batch(sentences, pad=model.config.pad_token_id or 0, length=max(map(len, sentences)) + padding)
    if side == "left":
        shift = [int(n) for n in batch["attention_mask"].sum(1)]
        batch = {name: torch.stack([row.roll(-n) for row, n in zip(value, shift)]) for name, value in batch.items()}
    if model.config.is_encoder_decoder:
        targets = padded_batch(targets or sentences)
        batch |= {f"decoder_{name}": value for name, value in targets.items()}
    return [batch]


def one_by_one(model, sentences, targets=None):
    targets = targets or sentences
    pairs = zip(sentences, targets)
    return [batch for one, other in pairs for batch in batches_for(model, [one], [other], padding=0)]


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, 2], ids=["all rows", "some rows"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "marian"])
def test_statistics_are_those_of_eager_maps(name, rows):
    model = model_for(name)
    sentences, targets = ragged_sentences(5, seed=1), ragged_sentences(5, seed=2)
    found = statistics_of(model, batches_for(model, sentences, targets), *observers(rows_per_sentence=rows))
    model.set_attn_implementation("eager")
    maps = {}
    for batch in one_by_one(model, sentences, targets):
        with torch.no_grad():
            outputs = model(**batch, output_attentions=True, return_dict=True)
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
        if name != "marian":
            names = {"encoder" if name == "bert" else "decoder": "attentions"}
        for kind, attribute in names.items():
            maps.setdefault(kind, []).append(torch.stack(outputs[attribute])[:, 0])
    for kind, of_kind in maps.items():
        queries = sentences if kind == "encoder" or name != "marian" else targets
        chosen = None
        if rows:
            tokens = [
                ObservedTokens(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)) for ids in queries
            ]
            chosen = [sample_tokens(one, rows, 0)[0][0].tolist() for one in tokens]
        expected = slow_statistics(
            of_kind, queries, targets if kind == "decoder" and name == "marian" else sentences, EXCLUDED, 3, chosen
        )
        # The eager functions take the softmax in single precision.
        assert_same_tables({statistic: found[statistic, kind] for statistic in expected}, expected, atol=2e-6)


def call_of(weights, queries, keys, kind="encoder"):
    """Rows of one layer as an observer is shown them."""
    weights = torch.tensor(weights, dtype=torch.float64)
    heads = list(range(weights.shape[1]))
    layer = HeadLayer(HeadSite(kind, 0), "layer", None, None, len(heads), heads, 0, 1)
    whole = slice(0, None)
    batch = ObservedBatch(tiny_model("bert"), {})
    return AttentionCall(batch, layer, [layer], weights, queries, keys, slice(0, len(weights)), whole)


def seen_by(observer, call):
    observer.begin(call.batch)
    observer.update(AttentionCall(**{**vars(call), "rows": slice(0, call.weights.shape[2])}))
    observer.end(call.batch)
    return observer.compute()


THREE = ObservedTokens(torch.tensor([[8, 9, 2]]), torch.ones(1, 3, dtype=torch.bool))
# Two heads: to the token before, and evenly to all.
ROWS = [[[[0.5, 0.25, 0.25], [0.75, 0.0, 0.25], [0.0, 1.0, 0.0]], [[1 / 3] * 3] * 3]]


def test_statistics_of_three_tokens_by_hand():
    call = call_of(ROWS, THREE, THREE)
    confidence = seen_by(HeadConfidence([]), call)["encoder"]
    torch.testing.assert_close(confidence, torch.tensor([[0.75, 1 / 3]], dtype=torch.float64))
    entropy = seen_by(HeadEntropy(), call)["encoder"]
    one = 1.5 * math.log(2), 2 * math.log(2) - 0.75 * math.log(3), 0.0
    torch.testing.assert_close(entropy, torch.tensor([[sum(one) / 3, math.log(3)]], dtype=torch.float64))
    positions = seen_by(RelativePositions(limit=2, excluded_ids=[]), call)
    assert positions.offsets.tolist() == [-2, -1, 0, 1, 2]
    expected = [0.0, (0.75 + 1.0) / 2, (0.5 + 0.0 + 0.0) / 3, (0.25 + 0.25) / 2, 0.25]
    torch.testing.assert_close(positions.attention["encoder"][0, 0], torch.tensor(expected, dtype=torch.float64))
    # Of equal weights, the first is the largest.
    shares = torch.tensor([[0, 2, 1, 0, 0], [1, 1, 1, 0, 0]], dtype=torch.float64) / 3
    torch.testing.assert_close(positions.largest["encoder"][0], shares)
    assert [head[:4] for head in positions.positional(0.6)] == [("encoder", 0, 0, -1)]
    assert positions.positional() == []
    assert positions.best_offset_share()["encoder"][0].tolist() == pytest.approx([2 / 3, 1 / 3])
    center = (-0.875 + 0.25 + 2 * 0.25) / sum(expected)
    assert positions.center_of_mass()["encoder"][0].tolist() == pytest.approx([center, 0])


def test_distance_of_heads_that_share_no_key_is_ln_2():
    weights = [[[[1.0, 0.0]] * 2, [[0.0, 1.0]] * 2, [[1.0, 0.0]] * 2]]
    two = ObservedTokens(torch.tensor([[8, 9]]), torch.ones(1, 2, dtype=torch.bool))
    distances = seen_by(HeadDistance(), call_of(weights, two, two)).distances["encoder"] / math.log(2)
    torch.testing.assert_close(distances, torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.float64))


def test_excluded_tokens_are_no_targets_and_weights_stay_as_they_are():
    call = call_of(ROWS, THREE, THREE)
    assert seen_by(HeadConfidence([9]), call)["encoder"][0, 0].item() == pytest.approx((0.5 + 0.75 + 0.0) / 3)
    # The last row of the first head attends to nothing else: it does not count.
    shares = seen_by(RelativePositions(limit=2, excluded_ids=[9]), call).largest["encoder"][0, 0]
    assert shares.tolist() == pytest.approx([0, 0.5, 0.5, 0, 0])
    assert seen_by(HeadConfidence([2, 8, 9]), call)["encoder"].tolist() == [[0.0, 0.0]]
    assert seen_by(RelativePositions(excluded_ids=[2, 8, 9]), call).largest["encoder"].isnan().all()


def test_offsets_beyond_the_limit_count_as_tokens_only():
    positions = seen_by(RelativePositions(limit=1, excluded_ids=[]), call_of(ROWS, THREE, THREE))
    assert positions.largest["encoder"][0, 1].tolist() == pytest.approx([1 / 3, 1 / 3, 0])


def test_cross_attention_counts_tokens_not_places():
    weights = [[[[0.25, 0.75], [1.0, 0.0]]]]
    two = ObservedTokens(None, torch.ones(1, 2, dtype=torch.bool))
    plain = seen_by(RelativePositions(2, []), call_of(weights, two, two, "cross"))
    wide = [[[[0.0, 0.25, 0.0, 0.75], [0.0, 1.0, 0.0, 0.0]]]]
    keys = ObservedTokens(None, torch.tensor([[False, True, False, True]]))
    padded = seen_by(RelativePositions(2, []), call_of(wide, two, keys, "cross"))
    for name in ("attention", "largest"):
        one, other = getattr(plain, name)["cross"], getattr(padded, name)["cross"]
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# --- invariances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [100, 10**6], ids=["rows", "whole"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "marian"])
def test_a_padded_batch_is_the_mean_of_its_sentences(name, limit, monkeypatch):
    model = model_for(name)
    sentences, targets = ragged_sentences(6), ragged_sentences(6, seed=3)
    expected = statistics_of(model, one_by_one(model, sentences[::-1], targets[::-1]))
    monkeypatch.setitem(observation.MAX_WEIGHTS, "cpu", limit)
    assert_same_tables(statistics_of(model, batches_for(model, sentences, targets)), expected)


def test_padding_on_the_left_changes_nothing():
    model = build_stock("llama").double()
    sentences = ragged_sentences(4)
    expected = statistics_of(model, one_by_one(model, sentences))
    # Rotary angles are in single precision.
    assert_same_tables(statistics_of(model, batches_for(model, sentences, side="left")), expected, atol=1e-6)


def causal_tables(results):
    """Every table. Keys after the query exist in a whole sentence and get nothing, but not yet in a step."""
    relative = results["relative_positions"]
    tables = {**results["confidence"], **{f"{kind} entropy": one for kind, one in results["entropy"].items()}}
    tables |= {f"{kind} distance": table for kind, table in results["distance"].distances.items()}
    for part in ("attention", "largest"):
        tables |= {f"{kind} {part}": table.nan_to_num() for kind, table in getattr(relative, part).items()}
    return tables


WINDOW = {"sliding_window": 4}
STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("name", "changes", "settings"),
    [
        ("gpt2", {}, {}),
        ("marian", {}, {}),
        ("marian", {}, {"num_beams": 2, "max_new_tokens": 1}),
        ("llama", {}, {}),
        ("llama", {}, STATIC),
        ("mistral", WINDOW, {}),
        ("gemma2", WINDOW, {}),
        ("gemma2", WINDOW, STATIC),
        ("gemma3", WINDOW, STATIC),
    ],
    ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one)),
)
def test_steps_of_a_generation_are_seen_as_the_whole_sentence(name, changes, settings, padding):
    model = build_stock(name, eos_token_id=9, **changes)
    ids = torch.tensor([[1] * padding + [5, 9, 4, 7, 8, 6]])
    # Encoders count positions from the left.
    ids = ids.roll(-padding, 1) if name == "marian" else ids
    batch = {"input_ids": ids, "attention_mask": ids.ne(1).long()}

    def looking():
        return HeadConfidence(), HeadEntropy(), HeadDistance(None), RelativePositions(12)

    with observe(model, *looking()) as seen:
        settings = {"max_new_tokens": 5, "min_new_tokens": settings.get("max_new_tokens", 5), **settings}
        found = model.generate(**batch, do_sample=False, **settings)
    steps = causal_tables(seen.results())
    whole = {"input_ids": found[:, padding:-1]}
    if name == "marian":
        whole = {"input_ids": ids[ids != 1][None], "decoder_input_ids": found[:, :-1]}
    with torch.no_grad(), observe(model, *looking()) as seen:
        model(**whole)
    for statistic, table in causal_tables(seen.results()).items():
        torch.testing.assert_close(steps[statistic], table, rtol=0, atol=1e-5, msg=lambda m, s=statistic: f"{s}: {m}")


def test_beams_are_seen_as_the_sentences_that_they_are():
    """Beams change places in the cache from step to step: all that is kept of them moves, too."""
    model = build_stock("gpt2", eos_token_id=None)
    ids = torch.tensor([[5, 9, 4, 7], [1, 1, 8, 6]])
    seen_ids = []

    class Ids(HeadEntropy):
        def update(self, call):
            if call.site.layer == 0:
                seen_ids.append((call.key_ids, call.key_positions))

    with observe(model, Ids()):
        found = model.generate(
            ids,
            attention_mask=ids.ne(1).long(),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=5,
            min_new_tokens=5,
            do_sample=False,
        )
    last, positions = seen_ids[-1]
    assert last.shape == (6, 8)
    assert {tuple(row) for row in found[:, :7].tolist()} <= {tuple(row) for row in last[:, :7].tolist()}
    assert positions[:, -1].tolist() == [7] * 3 + [5] * 3


def test_what_a_cache_holds_is_not_known_outside_of_generation():
    model = build_stock("gpt2", eos_token_id=2)
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([[5, 9, 4]])).cache
        with (
            observe(model, HeadConfidence()),
            pytest.raises(ValueError, match=r"not known; .* generate\(\) .* excluded_ids=\[\] need none"),
        ):
            model(input_ids=torch.tensor([[7]]), cache=cache)


def test_pruned_heads_are_missing():
    model = model_for("bert")
    batch = batches_for(model, ragged_sentences(3))
    whole = statistics_of(model, batch, *observers(rows_per_sentence=None))
    # Heads of the last layer, whose removal changes no attention.
    prune_heads(model, {1: [0, 2]})
    pruned = statistics_of(model, batch, *observers(rows_per_sentence=None))
    left = [0, 1, 2, 3, 5, 7]
    distance = whole.pop(("distance", "encoder"))[left][:, left]
    torch.testing.assert_close(pruned.pop(("distance", "encoder")), distance, rtol=0, atol=1e-12)
    for table in whole.values():
        table[1, [0, 2]] = torch.nan
    assert_same_tables(pruned, whole)
    with torch.no_grad(), observe(model, HeadDistance()) as seen:
        model(**batch[0])
    assert seen.distance.heads["encoder"] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 3)]
    scores = seen.distance.head_scores()["mean"]["encoder"]
    assert scores.isnan().tolist() == [[False] * 4, [True, False, True, False]]
    assert scores[0, 1].item() == pytest.approx(seen.distance.distances["encoder"][1].sum().item() / 5)


def test_half_precision_is_close():
    model = vivid(tiny_model("bert", head="Model"))
    batch = batches_for(model, ragged_sentences(4))
    expected = statistics_of(model, batch)
    found = statistics_of(model.to(torch.bfloat16), batch)
    for name in (("confidence", "encoder"), ("distance", "encoder")):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0.1)
    assert found["attention", "encoder"].dtype == torch.float64


def test_observing_waits_for_no_result_of_the_device():
    """Operations whose result decides what the host does next are those of the model alone."""

    class Waits(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            self.count += name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "unique")
            return func(*args, **(kwargs or {}))

    model = tiny_model("marian", head="Model")
    (batch,) = batches_for(model, ragged_sentences(3))
    counts = []
    for looking in ((), observers()):
        with torch.no_grad(), Waits() as waits:
            if looking:
                with observe(model, *looking):
                    model(**batch)
            else:
                model(**batch)
        counts.append(waits.count)
    assert counts[1] == counts[0]


# --- tokens that stand for a sentence --------------------------------------------------------------------------------


def test_the_same_tokens_are_chosen_wherever_a_sentence_stands():
    sentence = ragged_sentences(3)[0]
    alone = padded_batch([sentence], length=len(sentence))
    tokens = ObservedTokens(alone["input_ids"], alone["attention_mask"].bool())
    chosen, share = sample_tokens(tokens, 3, 0)
    batch = padded_batch([[7, 8], sentence, [9]], length=30)
    real = batch["attention_mask"].bool()
    for turn in (0, 30 - len(sentence)):
        ids, mask = batch["input_ids"].roll(turn, 1), real.roll(turn, 1)
        found, shares = sample_tokens(ObservedTokens(ids, mask), 3, 0)
        assert found[1].tolist() == [place + turn for place in chosen[0].tolist()]
        # All tokens of short ones, each for itself, and nothing beyond.
        assert shares.tolist() == [[1, 1, 0], [len(sentence) / 3] * 3, [1, 0, 0]]
        assert mask.gather(1, found).sum().item() == 2 + 3 + 1
    assert share.sum().item() == pytest.approx(len(sentence))
    others = {tuple(sample_tokens(tokens, 3, seed)[0][0].tolist()) for seed in range(20)}
    assert len(others) > 10


def test_tokens_are_chosen_evenly():
    ids = torch.randint(5, 1000, (4000, 10), generator=torch.Generator().manual_seed(0))
    chosen, _ = sample_tokens(ObservedTokens(ids, torch.ones_like(ids, dtype=torch.bool)), 2, 0)
    assert (chosen[:, 0] != chosen[:, 1]).all()
    counts = torch.bincount(chosen.flatten(), minlength=10)
    # 800 ± 5 standard deviations.
    assert counts.sub(800).abs().max() < 5 * math.sqrt(8000 * 0.1 * 0.9)


def test_sentences_without_token_ids_have_distances():
    model = tiny_model("bert", head="Model")
    with torch.no_grad(), observe(model, HeadDistance()) as seen:
        model(inputs_embeds=torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0)))
    assert seen.distance.distances["encoder"].isfinite().all()


def test_shared_layers_have_rows_of_their_own():
    model = build_stock("albert").eval()
    with torch.no_grad(), observe(model, HeadDistance()) as seen:
        model(torch.tensor([[5, 6, 7, 8]]))
    layers = model.config.num_hidden_layers * model.config.inner_group_num
    assert seen.distance.shapes == {"encoder": (layers, model.config.num_attention_heads)}
    assert seen.distance.head_scores()["mean"]["encoder"].shape[0] == layers > 1


def test_distances_forget_a_pass_that_failed():
    model = model_for("bert")
    (batch,) = batches_for(model, ragged_sentences(3))
    distance = HeadDistance()

    class Failing(Observer):
        name = "failing"
        layers = 0

        def update(self, call):
            self.layers += 1
            if self.layers == 2:
                raise RuntimeError("failing observer")

    with torch.no_grad(), observe(model, distance, Failing()) as seen:
        with pytest.raises(RuntimeError, match="failing observer"):
            model(**batch)
        model(**batch)
    assert_same_tables(
        {"distance": seen.distance.distances["encoder"]},
        {"distance": statistics_of(model, [batch])["distance", "encoder"]},
    )


def test_passes_begin_and_end_in_turn():
    class Turns(Observer):
        name = "turns"

        def __init__(self):
            self.turns = []

        def begin(self, batch):
            self.turns.append(("begin", batch))

        def update(self, call):
            assert self.turns[-1] == ("begin", call.batch)

        def end(self, batch):
            self.turns.append(("end", batch))

    model, turns = tiny_model("marian"), Turns()
    (batch,) = batches_for(model, ragged_sentences(2))
    with torch.no_grad(), observe(model, turns):
        model(**batch)
        with pytest.raises(ValueError, match="got 1000000"):
            model(input_ids=torch.tensor([[10**6]]), decoder_input_ids=torch.tensor([[1]]))
        model(**batch)
    assert [name for name, _ in turns.turns] == ["begin", "end", "begin", "begin", "end"]
    assert turns.turns[0][1] is turns.turns[1][1]
    assert turns.turns[3][1] is turns.turns[4][1]


# --- which tokens do not count ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [7, 3]}, (3, 7)),
        ({"eos_token_id": 2, "sep_token_id": 5}, (2, 5)),
        ({"eos_token_id": None, "sep_token_id": 5}, (5,)),
        ({"eos_token_id": None}, ()),
    ],
)
def test_configurations_name_the_end_of_a_sentence(settings, expected):
    assert end_of_sentence_ids(RobertaConfig(**settings)) == expected


def test_the_end_of_a_sentence_is_excluded_unless_told_otherwise():
    model = vivid(tiny_model("roberta", head="Model")).double()
    assert model.config.eos_token_id == 2
    (batch,) = batches_for(model, [[0, 5, 6, 2], [0, 9, 2]])

    def confidence(excluded_ids):
        return statistics_of(model, [batch], HeadConfidence(excluded_ids))["confidence", "encoder"]

    assert torch.equal(confidence(None), confidence([2]))
    assert not torch.equal(confidence(None), confidence([]))


def test_a_configuration_that_names_no_end_is_warned_of_once(caplog):
    transformers.utils.logging.warning_once.cache_clear()
    model = tiny_model("bert", head="Model")
    batches = batches_for(model, ragged_sentences(2)) * 2
    with caplog.at_level("WARNING"):
        found = statistics_of(model, batches, HeadConfidence(), RelativePositions())
        message = "names no end of sentence, so that all tokens count as targets"
        assert caplog.text.count(message) == 2  # one for each observer
        assert "HeadConfidence(excluded_ids=[tokenizer.sep_token_id])" in caplog.text
        caplog.clear()
        explicit = statistics_of(model, batches, HeadConfidence([]), RelativePositions(excluded_ids=[]))
        assert not caplog.text
    assert_same_tables(found, explicit)


# --- results ---------------------------------------------------------------------------------------------------------


def results_of(name="marian"):
    model = model_for(name)
    with torch.no_grad(), observe(model, *observers()) as seen:
        for batch in batches_for(model, ragged_sentences(3)):
            model(**batch)
    return seen


def test_results_come_back_from_files(tmp_path):
    seen = results_of()
    seen.distance.save(tmp_path / "distance.json")
    again = HeadDistances.load(tmp_path / "distance.json")
    assert again.heads == seen.distance.heads
    assert_same_tables(again.distances, seen.distance.distances, atol=0)
    seen.relative_positions.save(tmp_path / "positions.json")
    positions = RelativeAttention.load(tmp_path / "positions.json")
    assert_same_tables(positions.attention, seen.relative_positions.attention, atol=0)
    assert_same_tables(positions.largest, seen.relative_positions.largest, atol=0)
    assert json.loads((tmp_path / "positions.json").read_text()) == positions.to_dict()


def test_missing_heads_and_offsets_come_back_from_files(tmp_path):
    table = torch.tensor([[[math.nan, 0.5, 0.25]]], dtype=torch.float64)
    RelativeAttention({"encoder": table}, {"encoder": table}).save(tmp_path / "positions.json")
    assert "NaN" not in (tmp_path / "positions.json").read_text()
    assert_same_tables(RelativeAttention.load(tmp_path / "positions.json").attention, {"encoder": table}, atol=0)


def test_results_are_tables():
    pytest.importorskip("pandas")
    seen = results_of("bert")
    table = seen.distance.to_pandas()
    assert list(table) == ["site", "layer", "head", "other_layer", "other_head", "distance"]
    row = table[(table.layer == 0) & (table["head"] == 2) & (table.other_layer == 1) & (table.other_head == 3)]
    assert len(table) == 64
    assert row.distance.item() == seen.distance.distances["encoder"][2, 7].item()
    table = seen.relative_positions.to_pandas()
    assert list(table) == ["site", "layer", "head", "offset", "attention", "largest"]
    row = table[(table.layer == 1) & (table["head"] == 2) & (table.offset == -1)]
    assert len(table) == 2 * 4 * 7
    assert row.attention.item() == seen.relative_positions.attention["encoder"][1, 2, 2].item()
    assert row.largest.item() == seen.relative_positions.largest["encoder"][1, 2, 2].item()


def test_tables_need_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    table = torch.zeros(1, 1, 3)
    with pytest.raises(ImportError, match="pip install pandas"):
        RelativeAttention({"encoder": table}, {"encoder": table}).to_pandas()


def test_each_head_has_numbers_for_a_timeline():
    seen = results_of()
    scores = {**seen.distance.head_scores(), **seen.relative_positions.head_scores()}
    assert list(scores) == ["mean", "best_offset_share", "center_of_mass"]
    for one in scores.values():
        assert {kind: table.shape for kind, table in one.items()} == {
            "encoder": (2, 4),
            "decoder": (2, 2),
            "cross": (2, 2),
        }


def test_an_embedding_keeps_the_distances():
    distances = results_of("bert").distance
    points = distances.embedding("encoder", 8)
    torch.testing.assert_close(torch.cdist(points, points).square(), distances.distances["encoder"], rtol=0, atol=1e-9)
    flat = distances.embedding("encoder")
    torch.testing.assert_close(flat, points[:, :2])
    torch.testing.assert_close(flat.mean(0), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (flat.gather(0, flat.abs().argmax(0, keepdim=True)) > 0).all()


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: HeadConfidence("</s>"), r"excluded_ids must be a list of token ids, or None, got '</s>'"),
        (lambda: HeadConfidence(2), r"excluded_ids must be a list of token ids, or None, got 2"),
        (lambda: RelativePositions(excluded_ids=[-1]), r"excluded_ids must be a list of token ids"),
        (lambda: RelativePositions(limit=0), r"limit must be an integer of at least 1, got 0"),
        (lambda: HeadDistance(rows_per_sentence=0), "rows_per_sentence must be an integer .* got 0"),
        (lambda: RelativePositions(limit=2.5), r"limit must be an integer of at least 1, got 2.5"),
        (lambda: HeadDistance(rows_per_sentence=1.5), "rows_per_sentence must be an integer .* got 1.5"),
        (lambda: HeadConfidence().compute(), "HeadConfidence has seen no attention"),
        (lambda: HeadEntropy().compute(), "HeadEntropy has seen no attention"),
        (lambda: HeadDistance().compute(), "HeadDistance has seen no attention"),
        (lambda: RelativePositions().compute(), "RelativePositions has seen no attention"),
        (lambda: RelativeAttention.from_dict({"attention": {}, "largest": {}}), "not the output of Relat"),
        (lambda: RelativeAttention.from_dict({"x": 1}), "not the output of RelativeAttention.to_dict"),
        (
            lambda: HeadDistances.from_dict({"heads": {"encoder": [[0, 0]]}, "distances": {"encoder": []}}),
            "not the output of HeadDistances.to_dict",
        ),
    ],
    ids=range(14),
)
def test_bad_values_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_bad_questions_are_refused():
    seen = results_of("bert")
    with pytest.raises(ValueError, match="threshold must be above 0 and at most 1, got 90"):
        seen.relative_positions.positional(90)
    with pytest.raises(ValueError, match="kind must be one of 'encoder', got 'cross'"):
        seen.distance.embedding("cross")
    with pytest.raises(ValueError, match="dimensions must be from 1 to 8, the number of heads, got 9"):
        seen.distance.embedding("encoder", 9)


def test_files_of_something_else_are_refused(tmp_path):
    (tmp_path / "scores.json").write_text('{"encoder": [[1.0]]}')
    for result in (HeadDistances, RelativeAttention):
        with pytest.raises(ValueError, match=f"scores.json does not hold {result.__name__}"):
            result.load(tmp_path / "scores.json")


def test_token_ids_are_needed_only_to_exclude_them():
    model = tiny_model("bert", head="Model")
    inputs = {"inputs_embeds": torch.zeros(1, 3, 16)}
    with torch.no_grad(), observe(model, HeadConfidence([]), RelativePositions(excluded_ids=[])):
        model(**inputs)
    with observe(model, HeadConfidence([2])), pytest.raises(ValueError, match="needs token ids"):
        model(**inputs)


def test_choices_are_seen_as_sentences():
    config = BertConfig(vocab_size=40, hidden_size=16, num_attention_heads=4, num_hidden_layers=1)
    model = BertForMultipleChoice(config)
    ids = torch.randint(4, 12, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.tensor([1, 1, 1, 1, 1, 0, 0]).expand(2, 3, 7)}
    sentences = {name: value.flatten(0, 1) for name, value in batch.items()}
    found = []
    for part, inputs in ((model, batch), (model.bert, sentences)):
        with torch.no_grad(), observe(part, *observers()) as seen:
            part(**inputs)
        found.append({name: result.to_dict() for name, result in seen.results().items()})
    assert found[0] == found[1]


def test_distances_of_other_heads_are_not_added_up():
    model = tiny_model("bert", head="Model")
    (batch,) = batches_for(model, ragged_sentences(2))
    distance = HeadDistance()
    with torch.no_grad(), observe(model, distance):
        model(**batch)
    prune_heads(model, {0: [1]})
    message = "HeadDistance has seen other heads at the encoder before; create a new one"
    with torch.no_grad(), observe(model, distance), pytest.raises(ValueError, match=message):
        model(**batch)


def test_means_of_other_heads_are_not_added_up():
    model = tiny_model("bert", head="Model")
    (batch,) = batches_for(model, ragged_sentences(2))
    entropy = HeadEntropy()
    with torch.no_grad(), observe(model, entropy):
        model(**batch)
    prune_heads(model, {0: [1]})
    message = "has seen other heads at encoder layer 0 before; create a new observer after heads"
    with torch.no_grad(), observe(model, entropy), pytest.raises(ValueError, match=message):
        model(**batch)


# --- a trained model -------------------------------------------------------------------------------------------------


def test_a_trained_model_has_a_confident_head_for_the_token_before(real_data, real_models):
    model = AutoModel.from_pretrained(real_models / "minilm")
    tokenizer = AutoTokenizer.from_pretrained(real_models / "minilm")
    with gzip.open(real_data / "ud-en-ewt" / "en_ewt-ud-dev.conllu.gz", "rt", encoding="utf-8") as lines:
        texts = [line[9:].strip() for line in lines if line.startswith("# text = ")]
    batch = tokenizer(sorted(texts, key=len)[1000:1032], padding=True, return_tensors="pt")
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    looking = HeadConfidence(special), RelativePositions(excluded_ids=special), HeadEntropy()
    with torch.no_grad(), observe(model, *looking) as seen:
        model(**batch)
    head = seen.relative_positions.positional(0.8)[0]
    assert (head.layer, head.offset) == (0, -1)
    assert seen.confidence.best()[1:3] == (head.layer, head.head)
    assert seen.entropy["encoder"].argmin() == seen.confidence["encoder"].argmax()
