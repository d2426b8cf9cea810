# Licensed under the Apache License, Version 2.0.
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from roles import duplicate_targets, rare_targets, syntactic_accuracy, token_role
from stock_models import build_stock
from tiny_models import batch_for, padded_batch, ragged_sentences, tiny_model, vivid

from hf_attn_dynamics import (
    DuplicateTokens,
    HeadScores,
    RareWords,
    RoleScores,
    SyntacticRoles,
    observe,
    prune_heads,
    role_overlap,
    top_heads,
)
from hf_attn_dynamics.analysis.observers import observation
from hf_attn_dynamics.analysis.observers.base import AttentionCall, ObservedBatch, ObservedTokens
from hf_attn_dynamics.data import Tree, embedded_trees, load_conllu
from hf_attn_dynamics.models.head_roles import HeadLayer
from hf_attn_dynamics.models.head_sites import HeadSite


class TinyTokenizer:
    """Words of the tiny vocabulary: `w17` is the token 17, `w17w18` two, `w` none; text is put between 2 and 3."""

    is_fast = False
    pad_token_id = 1

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(number) for number in text.split("w")[1:] if number]}

    def build_inputs_with_special_tokens(self, ids):
        return [2, *ids, 3]


TOKENIZER = TinyTokenizer()
RELATIONS = ("nsubj", "obj")


def random_trees(count=10, seed=0):
    """Sentences of 2 to 12 words of one to three tokens, with random trees and relations."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    trees = []
    for _ in range(count):
        length = draw(2, 13)
        words = tuple("".join(f"w{draw(10, 60)}" for _ in range(draw(1, 4))) for _ in range(length))
        order = torch.randperm(length, generator=generator).tolist()
        heads = {order[0]: None, **{order[place]: order[draw(0, place)] for place in range(1, length)}}
        relations = tuple((*RELATIONS, "obl")[draw(0, 3)] for _ in range(length))
        trees.append(Tree(words, tuple(heads[word] for word in range(length)), relations))
    return trees


@torch.no_grad()
def syntax_of(model, trees, batches=None, relations=RELATIONS, **settings):
    observer = SyntacticRoles(trees, TOKENIZER, relations, **settings)
    with observe(model, observer) as seen:
        for batch in observer.batches(model) if batches is None else batches:
            if model.config.is_encoder_decoder:
                batch = {**batch, "decoder_input_ids": batch["input_ids"]}
            model(**batch)
    return seen.syntactic_roles


def assert_as_reference(scores, model, trees, **settings):
    for role, table in scores.accuracy.items():
        accuracy, count, baseline = syntactic_accuracy(model, TOKENIZER, trees, *role.split(" ", 1), **settings)
        ((kind, found),) = table.items()
        torch.testing.assert_close(found, accuracy, rtol=0, atol=1e-12)
        assert scores.counts[role] == {kind: count}
        assert scores.baselines[role] == {kind: pytest.approx(baseline)}


# ---- Syntactic relations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"special_tokens": True}, {"own_word": True}], ids=["words", "special", "own"]
)
def test_accuracy_is_that_of_one_word_after_the_other(settings):
    model, trees = vivid(tiny_model("roberta").double()), random_trees()
    scores = syntax_of(model, trees, **settings)
    assert list(scores.accuracy) == [f"{name} {way}" for name in RELATIONS for way in ("to head", "to dependent")]
    assert_as_reference(scores, model, trees, **settings)


@pytest.mark.parametrize("name", ["albert", "distilbert", "gpt2", "marian", "t5", "modernbert"])
def test_stock_architectures_are_read_on_the_side_of_their_input(name):
    model, trees = build_stock(name).double(), random_trees(4)
    assert_as_reference(syntax_of(model, trees), model, trees)


def test_rows_of_long_sentences_may_come_in_pieces(monkeypatch):
    model, trees = vivid(tiny_model("bert").double()), random_trees(4)
    whole = syntax_of(model, trees)
    monkeypatch.setitem(observation.MAX_WEIGHTS, "cpu", 150)
    in_pieces = syntax_of(model, trees)
    assert in_pieces == whole


def test_batches_order_and_padding_change_nothing():
    model, trees = vivid(tiny_model("bert").double()), random_trees()
    scores = syntax_of(model, trees)
    ids = [list(text.ids) for text in SyntacticRoles(trees, TOKENIZER, RELATIONS)._texts]
    alone = [padded_batch([sentence]) for sentence in ids[::-1]]
    assert syntax_of(model, trees, alone) == scores
    # On the left, too, where attention has no positions to tell.
    model.bert.embeddings.position_embeddings.weight.data.zero_()
    padded = padded_batch(ids, length=39)
    turned = {name: values.flip(1) for name, values in padded.items()}
    turned["input_ids"] = padded["input_ids"].new_full(padded["input_ids"].shape, 1)
    for row, sentence in enumerate(ids):
        turned["input_ids"][row, -len(sentence) :] = torch.tensor(sentence)
    assert syntax_of(model, trees, [turned]) == syntax_of(model, trees)


def test_an_observer_goes_on_over_contexts_and_counts_sentences_as_often_as_they_are_read():
    model, trees = vivid(tiny_model("bert").double()), random_trees()
    once = syntax_of(model, trees)
    observer = SyntacticRoles([*trees, trees[0]], TOKENIZER, RELATIONS)
    for _ in range(2):
        with torch.no_grad(), observe(model, observer) as seen:
            for batch in observer.batches(model, batch_size=3):
                model(**batch)
    twice = seen.syntactic_roles
    first = sum(relation == "obj" and head is not None for head, relation in zip(trees[0].heads, trees[0].relations))
    assert twice.counts["obj to head"]["encoder"] == 2 * (once.counts["obj to head"]["encoder"] + first)


def test_a_pass_that_fails_leaves_nothing_behind():
    model, trees = vivid(tiny_model("bert").double()), random_trees()
    expected = syntax_of(model, trees)
    observer = SyntacticRoles(trees, TOKENIZER, RELATIONS)
    hook = model.bert.encoder.layer[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), observe(model, observer) as seen:
        with pytest.raises(ZeroDivisionError):
            model(**next(observer.batches(model)))
        hook.remove()
        for batch in observer.batches(model):
            model(**batch)
    assert seen.syntactic_roles == expected


def test_heads_of_pruned_models_keep_their_numbers():
    model, trees = vivid(tiny_model("bert").double()), random_trees()
    expected = syntax_of(model, trees).accuracy["obj to head"]["encoder"].clone()
    # Heads of the last layer, whose removal changes no attention.
    pruned = syntax_of(prune_heads(model, {1: [0, 2]}), trees)
    expected[1, [0, 2]] = math.nan
    torch.testing.assert_close(pruned.accuracy["obj to head"]["encoder"], expected, equal_nan=True)


SITE = HeadSite("encoder", 0)


def show(observer, ids, weights, causal=False):
    """Has an observer see one sentence with given weights, `(heads, rows, keys)`."""
    ids, weights = torch.tensor([ids]), torch.tensor([weights])
    heads = weights.shape[1]
    batch = ObservedBatch(SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False)), {"input_ids": ids})
    tokens = ObservedTokens(ids, torch.ones_like(ids, dtype=torch.bool))
    layer = HeadLayer(SITE, "", None, None, heads, list(range(heads)), 1, 1)
    observer.begin(batch)
    observer.update(
        AttentionCall(
            batch=batch,
            layer=layer,
            layers=[layer],
            weights=weights,
            queries=tokens,
            keys=tokens,
            sentences=slice(0, 1),
            rows=slice(0, ids.shape[1]),
            causal=causal,
        )
    )
    observer.end(batch)
    return observer.compute()


def test_a_hand_worked_case_of_subwords():
    # "w20" is the subject of "w21w22", whose object is "w23".
    tree = Tree(("w20", "w21w22", "w23"), (1, None, 1), ("nsubj", "root", "obj"))
    nothing = [0.2] * 6
    weights = [
        nothing,
        [0.5, 0.0, 0.1, 0.1, 0.15, 0.15],  # of the subject: 0.2 for the verb by two pieces, 0.15 for the object
        [0.0, 0.2, 0.0, 0.0, 0.8, 0.0],  # of the verb: (0.2 + 0.7) / 2 for the subject, (0.8 + 0.0) / 2 for the object
        [0.0, 0.7, 0.3, 0.0, 0.0, 0.0],
        [0.9, 0.05, 0.0, 0.0, 0.05, 0.0],  # of the object: the subject, but for the special token
        nothing,
    ]
    scores = show(SyntacticRoles([tree], TOKENIZER, RELATIONS), [2, 20, 21, 22, 23, 3], [weights])
    found = {role: table["encoder"].item() for role, table in scores.accuracy.items()}
    assert found == {"nsubj to head": 1, "nsubj to dependent": 1, "obj to head": 0, "obj to dependent": 0}
    assert scores.offsets == {"nsubj to head": 1, "nsubj to dependent": -1, "obj to head": -1, "obj to dependent": 1}
    special = show(
        SyntacticRoles([tree], TOKENIZER, RELATIONS, special_tokens=True), [2, 20, 21, 22, 23, 3], [weights]
    )
    assert special.accuracy["nsubj to head"]["encoder"].item() == 0


def test_subtypes_count_where_they_are_asked_for():
    tree = Tree(("w20", "w21", "w22"), (1, None, 1), ("nsubj:pass", "root", "nsubj"))
    model = tiny_model("bert")
    counts = [
        syntax_of(model, [tree], None, ["nsubj"], subtypes=some).counts["nsubj to head"] for some in (False, True)
    ]
    assert counts == [{"encoder": 1}, {"encoder": 2}]
    both = syntax_of(model, [tree], None, ["nsubj", "nsubj:pass"], subtypes=True).counts
    assert both["nsubj to head"] == {"encoder": 2}
    assert both["nsubj:pass to head"] == {"encoder": 1}


def test_names_that_spacy_uses_mean_the_same():
    # As the English models of spaCy have it; the name is the one that is asked for.
    tree = Tree(("w20", "w21", "w22"), (1, None, 1), ("nsubjpass", "root", "dobj"))
    model = tiny_model("bert")
    assert syntax_of(model, [tree], None, None, subtypes=True).counts == {
        f"{relation} {direction}": {"encoder": 1}
        for relation in ("nsubj", "obj")
        for direction in ("to head", "to dependent")
    }
    assert list(syntax_of(model, [tree], None, ["dobj"]).counts) == ["dobj to head", "dobj to dependent"]


def test_relations_of_the_default_that_no_tree_has_are_counted():
    tree = Tree(("w20", "w21", "w22"), (1, None, 1), ("nsubj", "root", "obj"))
    scores = syntax_of(tiny_model("bert"), [tree], None, None)
    assert scores.skipped["relation in no tree"] == 4
    assert list(scores.counts) == ["nsubj to head", "nsubj to dependent", "obj to head", "obj to dependent"]


def test_the_baseline_is_the_best_offset_and_the_nearest_of_several():
    far = Tree(("w20", "w21", "w22", "w23"), (2, 0, None, 2), ("obj", "x", "root", "obj"))
    near = Tree(("w30", "w31"), (1, None), ("obj", "root"))
    scores = syntax_of(tiny_model("bert"), [far, near], relations=["obj"])
    assert scores.offsets == {"obj to head": 1, "obj to dependent": -1}
    assert scores.baselines["obj to head"] == {"encoder": pytest.approx(1 / 3)}


def test_words_that_are_written_as_one_are_one():
    # Like French "du": both words depend on the noun, or one of them on the other.
    written = {"text": "w25 w22", "spans": ((0, 3), (0, 3), (4, 7))}
    words, relations = ("w20", "w21", "w22"), ("obj", "nsubj", "root")
    trees = [Tree(words, heads, relations, **written) for heads in ((2, 2, None), (1, 2, None))]

    class Fast(TinyTokenizer):
        is_fast = True

        def __call__(self, text, **settings):
            return {
                "input_ids": [2, 25, 22, 3],
                "offset_mapping": [(0, 0), (0, 3), (4, 7), (0, 0)],
                "special_tokens_mask": [1, 0, 0, 1],
            }

    for tree, counts in zip(trees, ({"obj": 1, "nsubj": 1}, {"nsubj": 1})):
        observer = SyntacticRoles([tree], Fast(), RELATIONS)
        scores = show(observer, [2, 25, 22, 3], [[[0.25] * 4] * 4])
        assert {role.split()[0]: count["encoder"] for role, count in scores.counts.items()} == counts
        assert scores.skipped["word without tokens"] == 2 - len(counts)
        assert all(table["encoder"].item() == 1 for table in scores.accuracy.values())


def test_what_is_skipped_is_counted():
    model = tiny_model("roberta")  # with positions for 38 tokens
    long = Tree(tuple(f"w{n % 50 + 10}" for n in range(37)), (None, *[0] * 36), ("root", *["obj"] * 36))
    fits = Tree(long.words[:36], long.heads[:36], long.relations[:36])
    silent = Tree(("w20", "w", "w22"), (2, 0, None), ("nsubj", "nsubj", "root"))
    observer = SyntacticRoles([long, fits, silent], TOKENIZER, RELATIONS)
    with torch.no_grad(), observe(model, observer) as seen:
        for batch in observer.batches(model):
            model(**batch)
        model(input_ids=torch.tensor([[2, 40, 3], [2, 41, 3]]))
    scores = seen.syntactic_roles
    assert scores.skipped == {"too long": 1, "unknown sentence": 2, "word without tokens": 1, "relation in no tree": 0}
    assert scores.counts["obj to head"] == {"encoder": 35}
    assert scores.counts["nsubj to head"] == {"encoder": 1}
    with pytest.raises(ValueError, match="all 1 sentences have more tokens than the model reads, 38"):
        SyntacticRoles([long], TOKENIZER, ["obj"]).batches(model)


def test_sentences_that_a_decoder_writes_are_unknown():
    model, trees = build_stock("gpt2"), random_trees(2)
    observer = SyntacticRoles(trees, TOKENIZER, RELATIONS)
    batch = next(observer.batches(model, batch_size=1))
    with observe(model, observer) as seen:
        model.generate(**batch, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert seen.syntactic_roles.skipped["unknown sentence"] == 2


def test_a_decoder_that_goes_on_without_its_encoder_counts_nothing():
    model, trees = build_stock("marian").double(), random_trees(3)
    expected = syntax_of(model, trees)
    observer = SyntacticRoles(trees, TOKENIZER, RELATIONS)
    with torch.no_grad(), observe(model, observer) as seen:
        for batch in observer.batches(model):
            outputs = model(**batch, decoder_input_ids=batch["input_ids"])
            states = (outputs.encoder_last_hidden_state,)
            model(**batch, decoder_input_ids=batch["input_ids"], encoder_outputs=states)
    assert seen.syntactic_roles == expected


def test_weights_that_are_not_a_number_are_no_accuracy():
    model = tiny_model("bert")
    model.bert.encoder.layer[1].attention.self.key.weight.data[0, 0] = math.nan
    scores = syntax_of(model, random_trees(2))
    assert scores.accuracy["obj to head"]["encoder"][1, 0].isnan()
    assert not scores.accuracy["obj to head"]["encoder"][0].isnan().any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trees": []}, "none of the 0 trees has nsubj or obj; they have none"),
        ({"relations": ["obj", "iobj", "root"]}, "none of the 3 trees has iobj or root; they have nsubj, obj, obl"),
        ({"relations": ["obl:agent"], "subtypes": True}, "none of the 3 trees has obl:agent"),
        ({"relations": ["det", "case"]}, "none of the 3 trees has det or case"),
        ({"trees": [Tree(("w20", "w"), (None, 0), ("root", "obj"))], "relations": ["obj"]}, "has tokens of its own"),
        ({"relations": "obj"}, "relations must be a non-empty list, such as .*, got 'obj'"),
        ({"relations": []}, "relations must be a non-empty list"),
    ],
)
def test_bad_trees_and_relations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SyntacticRoles(**{"trees": random_trees(3), "tokenizer": TOKENIZER, "relations": RELATIONS, **settings})


def test_bad_use_says_what_to_do():
    model, observer = tiny_model("bert"), SyntacticRoles(random_trees(3), TOKENIZER, RELATIONS)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        observer.batches(model, batch_size=0)
    with observe(model, observer) as seen:
        model(**batch_for("bert"))
        with pytest.raises(ValueError, match=r"seen none of its trees, but 8 unknown .* observer\.batches\(model"):
            _ = seen.syntactic_roles
        with pytest.raises(ValueError, match="knows sentences by their tokens; pass input_ids"):
            model(inputs_embeds=torch.zeros(1, 3, 16))


# ---- Rare words and duplicates --------------------------------------------------------------------------------------

EXCLUDED = (2, 3)
COUNTS = torch.randint(1, 30, (50,), generator=torch.Generator().manual_seed(1)).tolist()  # with ties; 50 to 59 never


def sentences():
    return [[2, *sentence, 3] for sentence in ragged_sentences(6)] + [[2, 8, 8, 3], [2, 7, 9, 7, 7, 3]]


@torch.no_grad()
def token_roles_of(model, observer, texts, pad=1):
    with observe(model, observer) as seen:
        for start in range(0, len(texts), 5):
            batch = padded_batch(texts[start : start + 5], pad=pad)
            if model.config.is_encoder_decoder:
                batch |= {f"decoder_{name}": values for name, values in batch.items()}
            model(**batch)
    return seen.results()[observer.name]


@pytest.mark.parametrize(("name", "kinds"), [("bert", ["encoder"]), ("marian", ["encoder", "decoder", "cross"])])
def test_rare_words_are_those_of_one_row_after_the_other(name, kinds):
    model = build_stock(name).double()
    scores = token_roles_of(model, RareWords(COUNTS, EXCLUDED, frequent=40), sentences())
    padded = [*COUNTS, *[0] * 10]
    assert list(scores.accuracy["rarest"]) == kinds
    for rank, role in enumerate(("rarest", "two rarest"), 1):
        for kind in kinds:
            targets = rare_targets(padded, EXCLUDED, 40, rank)
            accuracy, count, chance = token_role(model, sentences(), kind, targets, EXCLUDED)
            torch.testing.assert_close(scores.accuracy[role][kind], accuracy, rtol=0, atol=1e-12)
            assert scores.counts[role][kind] == count
            assert scores.baselines[role][kind] == pytest.approx(chance)


@pytest.mark.parametrize(("name", "kinds"), [("roberta", ["encoder"]), ("marian", ["encoder", "decoder", "cross"])])
def test_duplicates_are_those_of_one_row_after_the_other(name, kinds):
    model = build_stock(name).double()
    scores = token_roles_of(model, DuplicateTokens(EXCLUDED), sentences())
    for kind in kinds:
        targets = duplicate_targets(EXCLUDED, kind)
        accuracy, count, chance = token_role(model, sentences(), kind, targets, EXCLUDED)
        torch.testing.assert_close(scores.accuracy["duplicate"][kind], accuracy, rtol=0, atol=1e-12)
        assert scores.counts["duplicate"][kind] == count
        assert scores.baselines["duplicate"][kind] == pytest.approx(chance)


def test_a_hand_worked_case_of_rare_words():
    ids = [10, 11, 12, 13, 3]
    counts = [0] * 14
    counts[3], counts[10], counts[11], counts[12], counts[13] = 99, 50, 5, 5, 7
    weights = [[0.1, 0.0, 0.0, 0.2, 0.7], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0.4, 0.2, 0.3, 0.1, 0.0], [0.2] * 5]
    # 11 and 12 are as rare. Of four rows, two look at them, one at 13, and one at 10.
    scores = show(RareWords(counts, [3], frequent=2), ids, [weights])
    assert [scores.best(role).score for role in ("rarest", "two rarest")] == [0.5, 0.5]
    assert scores.baselines == {"rarest": {"encoder": 0.5}, "two rarest": {"encoder": 0.5}}
    counts[12] = 6
    scores = show(RareWords(counts, [3], frequent=2), ids, [weights])
    assert [scores.best(role).score for role in ("rarest", "two rarest")] == [0.25, 0.5]
    assert scores.baselines == {"rarest": {"encoder": 0.25}, "two rarest": {"encoder": 0.5}}


def test_what_comes_later_is_no_duplicate_where_attention_is_causal():
    model = build_stock("gpt2")
    scores = token_roles_of(model, DuplicateTokens(EXCLUDED), [[20, 21, 22, 23, 20, 21, 22, 23]])
    assert scores.counts == {"duplicate": {"decoder": 4}}
    # The second occurrences see 4, 5, 6 and 7 others.
    chance = (1 / 4 + 1 / 5 + 1 / 6 + 1 / 7) / 4
    assert scores.baselines["duplicate"]["decoder"] == pytest.approx(chance)
    ids = [10, 11, 10, 10]
    weights = [[1.0, 0, 0, 0], [1, 0, 0, 0], [0.4, 0.1, 0.5, 0], [0.1, 0.6, 0.2, 0.1]]
    scores = show(DuplicateTokens([3]), ids, [weights], causal=True)
    assert scores.counts == {"duplicate": {"encoder": 2}}
    assert scores.best("duplicate").score == 0.5
    assert scores.baselines["duplicate"]["encoder"] == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_what_a_window_hides_is_no_duplicate():
    model = build_stock("mistral", sliding_window=3)
    scores = token_roles_of(model, DuplicateTokens(EXCLUDED), [[20, 21, 20, 22, 23, 21]])
    # The second 21 sees 22 and 23 only.
    assert scores.counts == {"duplicate": {"decoder": 1}}
    assert scores.baselines["duplicate"]["decoder"] == pytest.approx(1 / 2)


def test_sentences_of_frequent_words_do_not_count():
    observer = RareWords([1] * 60, EXCLUDED, frequent=10)
    scores = token_roles_of(tiny_model("bert"), observer, sentences())
    assert scores.counts["rarest"] == {"encoder": 0}
    assert scores.accuracy["rarest"]["encoder"].isnan().all()


@pytest.mark.parametrize(
    "build",
    [lambda: RareWords(COUNTS, EXCLUDED, frequent=40), lambda: DuplicateTokens(EXCLUDED)],
    ids=["rare", "duplicate"],
)
def test_batches_and_padding_change_no_role_of_tokens(build):
    model = vivid(tiny_model("bert").double())
    together = token_roles_of(model, build(), sentences(), pad=0)
    observer = build()
    for sentence in sentences()[::-1]:
        alone = token_roles_of(model, observer, [sentence])
    for role, tables in together.accuracy.items():
        torch.testing.assert_close(tables["encoder"], alone.accuracy[role]["encoder"], rtol=0, atol=1e-12)
        assert together.baselines[role]["encoder"] == pytest.approx(alone.baselines[role]["encoder"])
    assert together.counts == alone.counts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": [[1, 2]]}, r"counts must be a number ≥ 0 for each token, got the shape \(1, 2\)"),
        ({"counts": [1, -1]}, "counts must be a number ≥ 0"),
        ({"counts": [5] * 40 + [0] * 900}, "less than 40, the number of tokens that occur, got 500"),
        ({"frequent": 0}, "frequent must be at least 1 and less than 50"),
        ({"excluded_ids": [-1]}, r"excluded_ids must be a list of token ids, or None, got \[-1\]"),
        ({"excluded_ids": "</s>"}, "excluded_ids must be a list of token ids"),
    ],
)
def test_bad_counts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RareWords(**{"counts": COUNTS, "excluded_ids": EXCLUDED, **arguments})


# ---- Results --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scores():
    return syntax_of(prune_heads(tiny_model("bert"), {0: [1]}), random_trees())


def test_scores_survive_saving(scores, tmp_path):
    scores.save(tmp_path / "roles.json")
    assert RoleScores.load(tmp_path / "roles.json") == scores
    assert json.loads((tmp_path / "roles.json").read_text()) == scores.to_dict()
    for text in ("{}", "[]", "no JSON", '{"accuracy": {}}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other\.json does not hold RoleScores"):
            RoleScores.load(tmp_path / "other.json")


def test_roles_without_a_case_are_strict_json():
    model = tiny_model("bert")
    with torch.no_grad(), observe(model, DuplicateTokens([])) as seen:
        model(input_ids=torch.tensor([[5, 6, 7]]))
    values = seen.duplicate_tokens.to_dict()
    assert values["baselines"] == {"duplicate": {"encoder": None}}
    json.dumps(values, allow_nan=False)
    assert math.isnan(RoleScores.from_dict(values).baselines["duplicate"]["encoder"])


def test_tables_have_a_row_for_each_role_and_head(scores, monkeypatch):
    pytest.importorskip("pandas")
    table = scores.to_pandas()
    assert list(table.columns) == ["role", "site", "layer", "head", "accuracy", "baseline"]
    assert len(table) == 4 * 8
    row = table[(table.role == "obj to head") & (table.layer == 1) & (table["head"] == 2)]
    assert row.accuracy.item() == scores.accuracy["obj to head"]["encoder"][1, 2].item()
    assert row.baseline.item() == scores.baselines["obj to head"]["encoder"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        scores.to_pandas()


def test_heads_have_the_roles_in_which_they_beat_the_baseline():
    tables = {"a": [[0.5, 0.39], [math.nan, 0.4]], "b": [[0.1, 0.2], [0.3, 0.9]]}
    accuracy = {role: HeadScores({"encoder": table}) for role, table in tables.items()}
    scores = RoleScores(accuracy, {"a": {"encoder": 0.3}, "b": {"encoder": 0.5}}, {})
    found = {role: [head[1:] for head in heads] for role, heads in scores.roles().items()}
    assert found == {"a": [(0, 0, 0.5), (1, 1, 0.4)], "b": [(1, 1, 0.9)]}
    assert scores.roles(margin=0.3)["a"] == []
    assert scores.best("b")[1:3] == (1, 1)
    assert scores.head_scores() == accuracy
    with pytest.raises(ValueError, match="role must be one of 'a', 'b', got 'c'"):
        scores.best("c")
    with pytest.raises(ValueError, match="margin must be between 0 and 1, as a difference of fractions, got 10"):
        scores.roles(margin=10)


def test_roles_overlap_with_what_pruning_keeps():
    importance = HeadScores({"encoder": [[0.1, 0.9], [0.8, math.nan]], "cross": [[0.5, 0.2]]})
    roles = {"obj to head": [("encoder", 0, 1), ("cross", 0, 1)], "rarest": [("encoder", 0, 1, 0.7)], "previous": []}
    stages = {count: role_overlap(roles, top_heads(importance, count)) for count in (5, 2, 0)}
    assert stages == {
        5: {"obj to head": 2, "rarest": 1, "previous": 0, "none": 3},
        2: {"obj to head": 1, "rarest": 1, "previous": 0, "none": 1},
        0: {"obj to head": 0, "rarest": 0, "previous": 0, "none": 0},
    }
    assert len(top_heads(importance)) == 5
    with pytest.raises(ValueError, match="count must be from 0 to 5, the number of heads with a score, got 6"):
        top_heads(importance, 6)


# ---- Trained models -------------------------------------------------------------------------------------------------


def test_a_trained_model_has_syntactic_heads(real_data, real_models):
    from transformers import AutoModel, AutoTokenizer

    folder = real_models / "minilm"
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def scores_of(part, count):
        trees = load_conllu(real_data / "ud-en-ewt" / f"en_ewt-ud-{part}.conllu.gz")
        chosen = [tree.spaced() for tree in trees if 5 <= len(tree.words) <= 40][:count]
        observer = SyntacticRoles(chosen, tokenizer)
        with torch.no_grad(), observe(model, observer) as seen:
            for batch in observer.batches(model):
                model(**batch)
        return seen.syntactic_roles

    dev, test = scores_of("dev", 400), scores_of("test", 150)
    expected = {"det": (0.79, 0.60), "obj": (0.68, 0.34), "case": (0.69, 0.41), "nsubj": (0.54, 0.36)}
    for relation, (accuracy, baseline) in expected.items():
        role = f"{relation} to head"
        best = dev.best(role)
        assert best.score == pytest.approx(accuracy, abs=0.01)
        assert dev.baselines[role]["encoder"] == pytest.approx(baseline, abs=0.01)
        # Heads that were chosen on one part are syntactic on the other.
        assert test.accuracy[role]["encoder"][best.layer, best.head] >= test.baselines[role]["encoder"] + 0.1


# Textbook reactions, and for each atom a letter: those of the product are those of the reactants that they come from,
# and equivalent atoms have the same.
REACTIONS = {
    "CC(=O)O.OCC>>CC(=O)OCC": "abcd.efg>>abcefg",
    "CC(=O)Cl.Nc1ccccc1>>CC(=O)Nc1ccccc1": "abcd.efghihg>>abcefghihg",
    "OB(O)c1ccccc1.Brc1ccc(C)cc1>>Cc1ccc(-c2ccccc2)cc1": "abacdefed.ghijklji>>lkjihcdefedij",
    "CC(=O)c1ccccc1.[BH4-].[Na+]>>CC(O)c1ccccc1": "abcdefgfe.h.i>>abcdefgfe",
    "CI.[O-]c1ccccc1.[Na+]>>COc1ccccc1": "ab.cdefgfe.h>>acdefgfe",
    "O=Cc1ccccc1.NCCC>>CCCN=Cc1ccccc1": "abcdefed.ghij>>jihgbcdefed",
    "C=CC=C.C=CC(=O)OC>>COC(=O)C1CC=CCC1": "abba.cdefgh>>hgefdabbac",
    "CC(=O)OC(C)=O.Oc1ccccc1C(=O)O>>CC(=O)Oc1ccccc1C(=O)O": "abcdbac.efghijklmn>>abcefghijklmn",
    "O=C=Nc1ccccc1.CNC>>CN(C)C(=O)Nc1ccccc1": "abcdefgfe.hih>>hihbacdefgfe",
    "CS(=O)(=O)Cl.OCc1ccccc1>>CS(=O)(=O)OCc1ccccc1": "abccd.efghijih>>abccefghijih",
    "BrCCBr.N#C[Na]>>N#CCCBr": "abba.cde>>cdbba",
    "O=[N+]([O-])c1ccc(F)cc1.C1COCCN1>>O=[N+]([O-])c1ccc(N2CCOCC2)cc1": "abcdefghfe.jklkjm>>abcdefgmjklkjfe",
}
SYMBOL = re.compile(r"\[[^]]+]|Br|Cl|>>|[A-Za-z]|[^A-Za-z]")


def reaction_tree(reaction, letters):
    """Atoms of the product depend on the atom that they come from, where it has no equivalent."""
    words = SYMBOL.findall(reaction)
    atoms = iter(letters.replace(".", "").replace(">>", ""))
    labels = [next(atoms) if re.match(r"[A-Za-z[]", word) else None for word in words]
    arrow = words.index(">>")
    heads, relations = [None], ["root"]
    for position, label in enumerate(labels[1:], 1):
        known = label is not None and position > arrow and labels[:arrow].count(label) == 1
        heads.append(labels.index(label) if known else 0)
        relations.append("atom" if known else "none")
    return Tree(tuple(words), tuple(heads), tuple(relations), text=reaction)


def reaction_tokenizer(folder):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = (folder / "vocab.txt").read_text().split("\n")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words) if word}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SYMBOL.pattern), "isolated")
    ends = [(word, words.index(word)) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_the_head_that_aligns_atoms_is_found(real_models):
    """Schwaller et al. (2021) map atoms by layer 10, head 5 of this model, whose layers share their weights."""
    from transformers import AutoModelForMaskedLM

    folder = real_models / "rxnmapper"
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), reaction_tokenizer(folder)
    trees = [reaction_tree(*reaction) for reaction in REACTIONS.items()]
    observer, duplicates = SyntacticRoles(trees, tokenizer, ["atom"]), DuplicateTokens(tokenizer.all_special_ids)
    with torch.no_grad(), observe(model, observer, duplicates) as seen:
        for batch in observer.batches(model):
            model(**batch)
    scores = seen.syntactic_roles
    assert scores.counts["atom to head"] == {"encoder": 70}
    for role, tables in scores.accuracy.items():
        assert tables["encoder"][10, 5] > 0.9
        assert {head for _, _, head, _ in scores.roles(margin=0.5)[role]} == {5}
        assert tables["encoder"][10, 5] > scores.best(role).score - 0.05
        assert scores.baselines[role]["encoder"] < 0.2
    # Without any annotation: it looks for the same symbol elsewhere.
    duplicate = seen.duplicate_tokens.accuracy["duplicate"]["encoder"][10]
    assert duplicate.argmax() == 5
    best, second = duplicate.topk(2).values
    assert best > 0.8
    assert second < 0.5


def test_embedded_trees_are_read_by_a_real_tokenizer():
    from hf_attn_dynamics.data import train_byte_level_bpe

    trees = embedded_trees()
    tokenizer = train_byte_level_bpe([tree.text for tree in trees], 300, kind="roberta")
    model = vivid(tiny_model("roberta", vocab_size=300, max_position_embeddings=200).double())
    observer = SyntacticRoles(trees, tokenizer, ["nsubj"])
    with torch.no_grad(), observe(model, observer) as seen:
        for batch in observer.batches(model):
            model(**batch)
    scores = seen.syntactic_roles
    accuracy, count, baseline = syntactic_accuracy(model, tokenizer, trees, "nsubj", "to head")
    torch.testing.assert_close(scores.accuracy["nsubj to head"]["encoder"], accuracy, rtol=0, atol=1e-12)
    assert scores.counts["nsubj to head"] == {"encoder": count}
    assert scores.baselines["nsubj to head"]["encoder"] == pytest.approx(baseline)
