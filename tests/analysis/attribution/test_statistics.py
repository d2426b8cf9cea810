"""Statistics of maps against SciPy, observers and maps drawn by hand."""

import math

import pytest
import torch
from attribution import text_of, tiny
from tiny_models import padded_batch

from hf_attn_dynamics import (
    HeadDistance,
    HeadEntropy,
    MapCorrelation,
    RelativePositions,
    SyntacticRoles,
    attention_maps,
    correlate,
    local_contribution,
    map_types,
    observe,
    retain_heads,
    show_maps,
)
from hf_attn_dynamics.analysis.attribution.statistics import MAP_TYPES
from hf_attn_dynamics.data import Tree
from hf_attn_dynamics.models.head_roles import locate_heads


def random_maps(lengths=(6, 4, 1), layers=2, heads=3, seed=0, causal=False):
    """Maps of sentences of these lengths, padded on the right; some values are tied."""
    generator = torch.Generator().manual_seed(seed)
    length = max(lengths)
    maps = torch.rand(layers, len(lengths), heads, length, length, generator=generator, dtype=torch.float64)
    maps = (8 * maps).ceil() / 8
    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    maps = maps * (real[:, None, :, None] & real[:, None, None])
    maps = maps.tril() if causal else maps
    return maps / maps.sum(-1, keepdim=True).clamp(min=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_correlations_are_those_of_scipy(causal):
    stats = pytest.importorskip("scipy.stats")
    lengths = (6, 4, 1)
    one, two = random_maps(causal=causal), random_maps(seed=1, causal=causal)
    found = correlate(one, two)
    kind = "decoder" if causal else "encoder"
    for layer in range(2):
        for head in range(3):
            values, constant = [], 0
            for sentence, length in enumerate(lengths):
                for query in range(length):
                    keys = slice(0, query + 1 if causal else length)
                    left, right = one[layer, sentence, head, query, keys], two[layer, sentence, head, query, keys]
                    if len(set(left.tolist())) == 1 or len(set(right.tolist())) == 1:
                        constant += 1
                    else:
                        values.append([test(left, right).statistic for test in (stats.pearsonr, stats.spearmanr)])
            pearson, spearman = torch.tensor(values).double().mean(0).tolist()
            assert math.isclose(found.pearson[kind][layer, head], pearson, rel_tol=1e-9)
            assert math.isclose(found.spearman[kind][layer, head], spearman, rel_tol=1e-9)
            assert found.rows[kind][layer, head] == len(values)
            assert found.constant[kind][layer, head] == constant


def test_batches_can_be_added():
    one, two = random_maps((6, 4, 1, 5)), random_maps((6, 4, 1, 5), seed=1)
    whole = correlate(one, two)
    parts = correlate(one[:, :1], two[:, :1]) + correlate(one[:, 1:], two[:, 1:])
    for name, scores in vars(whole).items():
        torch.testing.assert_close(vars(parts)[name]["encoder"], scores["encoder"])


def test_correlations_of_different_kinds_cannot_be_added():
    one, two = random_maps((1,)), random_maps((1,), causal=True)
    with pytest.raises(ValueError, match="correlations are of decoder and encoder; name the `kind` in correlate"):
        correlate(one, one) + correlate(random_maps(causal=True), random_maps(causal=True))
    assert list((correlate(one, two, kind="decoder") + correlate(one, two, kind="decoder")).pearson) == ["decoder"]


def test_heads_of_a_decoder_are_ranked_by_their_correlation():
    model = tiny("gpt2")
    batch = padded_batch([[5, 6, 7, 8, 9, 4], [4, 5, 8]])
    attention, local = attention_maps(model, batch)["decoder"], local_contribution(model, batch)
    found = correlate(attention, local)
    assert found == correlate(attention, local, causal=True, kind="decoder")
    retain_heads(model, 4, found.pearson)
    assert sum(len(layer.heads) for layer in locate_heads(model)) == 4


def test_constant_rows_are_counted_not_nan():
    one = random_maps((5, 3))
    uniform = one.gt(0) / one.gt(0).sum(-1, keepdim=True).clamp(min=1)
    found = correlate(one[:, :, :1], uniform.float()[:, :, :1])
    assert found.rows["encoder"].eq(0).all()
    assert found.constant["encoder"].eq(8).all()
    assert found.pearson["encoder"].isnan().all()
    mixed = found + correlate(one[:, :, :1], one[:, :, :1])
    torch.testing.assert_close(mixed.pearson["encoder"], torch.ones(2, 1).double())


def test_removed_heads_stay_nan():
    one = random_maps()
    removed = one.clone()
    removed[1, :, 2] = torch.nan
    found = correlate(one, removed)
    assert found.pearson["encoder"].isnan().nonzero().tolist() == [[1, 2]]
    assert found.rows["encoder"][1, 2] == found.constant["encoder"][1, 2] == 0


def test_correlations_come_back_from_their_file(tmp_path):
    maps = random_maps()
    maps[1, :, 2] = torch.nan
    found = correlate(maps, random_maps(seed=1), kind="decoder")
    found.save(tmp_path / "correlation.json")
    assert MapCorrelation.load(tmp_path / "correlation.json") == found
    (tmp_path / "other.json").write_text('{"pearson": 3}')
    with pytest.raises(ValueError, match="other.json does not hold MapCorrelation"):
        MapCorrelation.load(tmp_path / "other.json")


def test_attention_and_local_contributions_agree():
    model = tiny("bert")
    batch = text_of(model, 9)
    found = correlate(attention_maps(model, batch)["encoder"], local_contribution(model, batch))
    assert found.pearson["encoder"].shape == (2, 4)
    assert found.pearson["encoder"].min() > 0.5


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (random_maps((6, 4)), "must have one shape"),
        (random_maps((6, 4, 2)), "have different tokens"),
    ],
)
def test_maps_of_different_tokens_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        correlate(random_maps(), other)


def test_maps_need_five_dimensions():
    with pytest.raises(ValueError, match=r"\(layers, batch, heads, query, key\), got \(6, 6\)"):
        map_types(torch.ones(6, 6))


class Numbers:
    """A tokenizer of words that are their token ids, without special tokens."""

    is_fast, pad_token_id = False, 0

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(word) for word in text.split()]}

    def build_inputs_with_special_tokens(self, ids):
        return ids


def observers():
    trees = [Tree(("5", "6", "7", "8", "9"), (1, None, 1, 4, 2), ("nsubj", "root", "obj", "amod", "det"))]
    return RelativePositions(limit=3), HeadEntropy(), HeadDistance(), SyntacticRoles(trees, Numbers())


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_observers_see_maps_as_they_see_attention(name):
    model = tiny(name)
    batch = padded_batch([[5, 6, 7, 8, 9], [4, 5]])
    with torch.no_grad(), observe(model, *observers()) as seen:
        model.base_model(**batch)
    expected, shown = seen.results(), observers()
    kind = "decoder" if name == "gpt2" else "encoder"
    show_maps(model, batch, attention_maps(model, batch)[kind], *shown)
    positions, entropy, distance, roles = (observer.compute() for observer in shown)
    assert roles == expected["syntactic_roles"]
    torch.testing.assert_close(distance.distances[kind], expected["distance"].distances[kind])
    torch.testing.assert_close(entropy[kind], expected["entropy"][kind])
    attention = expected["relative_positions"].attention[kind]
    torch.testing.assert_close(positions.attention[kind], attention, equal_nan=True)


def test_there_must_be_an_observer():
    model = tiny("bert")
    with pytest.raises(ValueError, match="there is no observer"):
        show_maps(model, text_of(model), random_maps())


def type_of(rows, **arguments):
    rows = torch.as_tensor(rows).double()
    return MAP_TYPES[map_types(rows[None, None, None], **arguments).item()]


N = 12
FIRST = torch.eye(1, N).expand(N, N)
LAST = torch.eye(N)[-1:].expand(N, N)
PREVIOUS = torch.eye(N).roll(-1, 1)
SELF = torch.eye(N)
UNIFORM = torch.full((N, N), 1 / N)
SEGMENTS = torch.tensor([[0] * 5 + [1] * 7])
BLOCKS = (SEGMENTS.T == SEGMENTS) / (SEGMENTS.T == SEGMENTS).sum(-1, keepdim=True)
HALF_BLOCKS = 0.4 * BLOCKS + 0.6 * UNIFORM


@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        (FIRST, "vertical"),
        ((FIRST + LAST) / 2, "vertical"),
        (0.6 * FIRST + 0.4 * UNIFORM, "vertical"),
        (PREVIOUS, "diagonal"),
        ((PREVIOUS + SELF) / 2, "diagonal"),
        ((FIRST + PREVIOUS) / 2, "vertical+diagonal"),
        (0.7 * LAST + 0.3 * SELF, "vertical+diagonal"),
        (0.9 * LAST + 0.1 * SELF, "vertical"),
        (BLOCKS, "block"),
        (HALF_BLOCKS, "heterogeneous"),
        (UNIFORM, "heterogeneous"),
        (0.3 * FIRST + 0.7 * UNIFORM, "heterogeneous"),
        (torch.eye(N).roll(5, 1), "heterogeneous"),
    ],
    ids=lambda value: value if isinstance(value, str) else "map",
)
def test_types_of_maps_drawn_by_hand(maps, expected):
    assert type_of(maps, segments=SEGMENTS) == expected
    without = "heterogeneous" if expected == "block" else expected
    assert type_of(maps) == without


# What is uniform in a decoder is the more on the first tokens, and near the query, the shorter the sentence.
PAST = torch.ones(N, N).tril() / torch.ones(N, N).tril().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        (PAST, "heterogeneous"),
        (0.3 * SELF + 0.7 * PAST, "heterogeneous"),
        (FIRST, "vertical"),
        (0.7 * FIRST + 0.3 * PAST, "vertical"),
        (SELF, "diagonal"),
        (0.7 * SELF + 0.3 * PAST, "diagonal"),
    ],
    ids=["uniform", "nearly uniform", "first", "mostly first", "self", "mostly self"],
)
def test_types_of_maps_of_decoders_drawn_by_hand(maps, expected):
    assert type_of(maps) == expected
    padded = torch.nn.functional.pad(maps, (2, 3, 2, 3))
    assert type_of(padded) == expected


def test_types_do_not_depend_on_padding():
    maps = torch.stack([FIRST, PREVIOUS, BLOCKS, UNIFORM])[None, None]
    padded = torch.nn.functional.pad(maps, (2, 3, 2, 3))
    segments = torch.nn.functional.pad(SEGMENTS, (2, 3), value=4)
    assert torch.equal(map_types(padded, segments), map_types(maps, SEGMENTS))


def test_removed_heads_have_no_type():
    maps = torch.stack([FIRST, torch.full_like(FIRST, torch.nan)])[None, None]
    assert map_types(maps).tolist() == [[[0, -1]]]


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_sentences_tell_nothing(length):
    assert type_of(torch.eye(length)) == "heterogeneous"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0.0}, "threshold must lie between 0 and 1, got 0.0"),
        ({"segments": torch.zeros(1, 3)}, r"segments must have the shape \(1, 12\), got \(1, 3\)"),
    ],
)
def test_bad_arguments_of_types_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        map_types(UNIFORM[None, None, None], **arguments)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("lengths", [(4, 6), (5, 5)])
def test_maps_of_either_side_of_a_translator_are_shown_with_its_padding(kind, lengths):
    model = tiny("bart")
    source, target = (
        torch.randint(4, 60, (2, length), generator=torch.Generator().manual_seed(0)) for length in lengths
    )
    batch = {"input_ids": source, "decoder_input_ids": target}
    for name, ids, padding in (("attention_mask", source, 1), ("decoder_attention_mask", target, 2)):
        batch[name] = torch.ones_like(ids)
        batch[name][1, -padding:] = 0
    with torch.no_grad(), observe(model, RelativePositions(limit=3), HeadEntropy()) as seen:
        model(**batch)
    shown = RelativePositions(limit=3), HeadEntropy()
    show_maps(model, batch, attention_maps(model, batch)[kind], *shown, kind=kind)
    positions, entropy = (observer.compute() for observer in shown)
    assert list(positions.attention) == [kind]
    torch.testing.assert_close(positions.attention[kind], seen.results()["relative_positions"].attention[kind])
    torch.testing.assert_close(entropy[kind], seen.results()["entropy"][kind])


@pytest.mark.parametrize(
    ("name", "kind"), [("bart", None), ("bart", "cross"), ("bert", "decoder"), ("gpt2", "encoder")]
)
def test_the_site_of_maps_is_asked_for_where_there_are_several(name, kind):
    model = tiny(name)
    with pytest.raises(ValueError, match=f"kind must be .*, the site of the maps, got {kind!r}"):
        show_maps(model, text_of(model), random_maps(), RelativePositions(), kind=kind)
