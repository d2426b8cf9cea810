import random

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import BatchEncoding

from hf_attn_dynamics.data import (
    CoreferenceItem,
    Mention,
    Tree,
    align_targets,
    align_weights,
    cluster_targets,
    coreference_targets,
    embedded_coreference,
    embedded_trees,
    encode_words,
    find_words,
    load_conllu,
    numeral_pairs,
    pair_targets,
    pharaoh_targets,
    span_targets,
    train_byte_level_bpe,
    train_marian_tokenizer,
    tree_targets,
)


N = -100
TEXTS = ["the", "king", "old"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(TEXTS, vocab_size=268)


@pytest.fixture(scope="module")
def bert():
    return train_byte_level_bpe(TEXTS, vocab_size=268, kind="bert")


def split(tokenizer, word):
    return tokenizer(word, add_special_tokens=False)["input_ids"]


def layout(tokenizer, words, max_length=None):
    """First and last token, and all tokens of each word in `<s> words </s>`, from the tokens of single words."""
    kept = [word for number, word in enumerate(words) for _ in split(tokenizer, word) for word in [number]]
    if max_length is not None:
        kept = kept[: max_length - 2]
    tokens = {number: [1 + at for at, word in enumerate(kept) if word == number] for number in range(len(words))}
    return tokens, len(kept) + 2


def slow_targets(tokenizer, words, targets, subword, max_length=None):
    tokens, length = layout(tokenizer, words, max_length)
    row, lost = [N] * length, 0
    for word, target in enumerate(targets):
        if target is None:
            continue
        if not tokens[word] or not tokens[target]:
            lost += 1
            continue
        rows = {"first": tokens[word][:1], "last": tokens[word][-1:], "all": tokens[word]}[subword]
        for token in rows:
            row[token] = tokens[target][-1 if subword == "last" else 0]
    return row, lost


def sentences(seed, count=60):
    draw = random.Random(seed)
    for _ in range(count):
        words = [
            draw.choice(["the", "king", "kings", "queens", "x", "sees", "old", "ß", ""])
            for _ in range(draw.randint(0, 9))
        ]
        targets = [draw.choice([None, *range(len(words))]) for _ in words]
        yield words, targets


# ---------------------------------------------------------------------------------------------------------------------
# From words to tokens
# ---------------------------------------------------------------------------------------------------------------------


def test_subwords_by_hand(tokenizer):
    encoding = tokenizer([["the", "kings", "x", "olds"]], is_split_into_words=True)
    assert encoding.tokens(0) == ["<s>", "the", "king", "s", "x", "old", "s", "</s>"]
    # "the" and "kings" attend to "olds", and "olds" to "kings".
    targets = [[3, 3, None, 1]]
    assert align_targets(encoding, targets) == [[N, 5, 5, N, N, 2, N, N]]
    assert align_targets(encoding, targets, "last") == [[N, 6, N, 6, N, N, 3, N]]
    assert align_targets(encoding, targets, "all") == [[N, 5, 5, 5, N, 2, 2, N]]


@pytest.mark.parametrize("max_length", [None, 6])
@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("subword", ["first", "last", "all"])
def test_keys_are_those_of_tokens_of_single_words(subword, padding, max_length, tokenizer, caplog):
    words, targets = zip(*sentences(1))
    encoding = tokenizer(
        list(words),
        is_split_into_words=True,
        padding=padding is not None,
        padding_side=padding,
        truncation=max_length is not None,
        max_length=max_length,
    )
    found = align_targets(encoding, targets, subword)
    slow = [slow_targets(tokenizer, *one, subword, max_length) for one in zip(words, targets)]
    length = max(len(row) for row, _ in slow)
    for row, (expected, _) in zip(found, slow, strict=True):
        if padding == "left":
            gap = length - len(expected)
            expected = [N] * gap + [key if key == N else key + gap for key in expected]
        elif padding:
            expected = expected + [N] * (length - len(expected))
        assert row == expected
    lost, given = sum(count for _, count in slow), sum(one is not None for row in targets for one in row)
    texts = sum(count > 0 for _, count in slow)
    assert 0 < lost < given
    assert f"{lost} of {given} targets in {texts} of {len(words)} texts are lost" in caplog.text


def test_batches_are_their_texts_and_a_single_text_gives_a_single_row(tokenizer):
    words, targets = zip(*sentences(2))
    together = align_targets(tokenizer(list(words), is_split_into_words=True), targets, lost="ignore")
    for one, row, expected in zip(words, targets, together):
        alone = tokenizer(one, is_split_into_words=True)
        assert align_targets(alone, row, lost="ignore") == expected
        tensors = tokenizer([one], is_split_into_words=True, return_tensors="pt")
        assert align_targets(tensors, [row], lost="ignore") == [expected]
        assert align_targets(alone.word_ids(), row, lost="ignore") == expected
        assert align_targets([alone.word_ids()], [row], lost="ignore") == [expected]


def test_minus_100_is_none_and_arrays_are_lists(tokenizer):
    encoding = tokenizer([["the", "king"]], is_split_into_words=True)
    expected = align_targets(encoding, [[1, None]])
    for targets in ([[1, N]], np.array([[1, N]]), torch.tensor([[1, N]]), [(np.int64(1), None)]):
        assert align_targets(encoding, targets) == expected
    assert all(type(key) is int for key in expected[0])


def test_texts_without_words_have_no_targets(tokenizer, caplog):
    assert align_targets(tokenizer([[], ["the"]], is_split_into_words=True, padding=True), [[], [0]]) == [
        [N, N, N],
        [N, 1, N],
    ]
    assert align_targets(tokenizer([[]], is_split_into_words=True, add_special_tokens=False), [[]]) == [[]]
    assert align_targets([], []) == []
    assert not caplog.text


@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_pairs_count_the_words_of_both_texts(kind, tokenizer, bert):
    tokenizer = tokenizer if kind == "roberta" else bert
    first, second = ["the", "king"], ["x", "queens", "the"]
    encoding = tokenizer([first, []], [second, ["x"]], is_split_into_words=True, padding=True)
    found = align_targets(encoding, [([3, 0], [4, None, 1]), pair_targets([], [0])])
    tokens, at = {}, 1
    for number, word in enumerate([*first, None, *second]):
        if word is None:
            at += 2 if kind == "roberta" else 1
            continue
        tokens[number - (number > 2)] = at
        at += len(split(tokenizer, word))
    expected = {tokens[0]: tokens[3], tokens[1]: tokens[0], tokens[2]: tokens[4], tokens[4]: tokens[1]}
    assert found[0] == [expected.get(token, N) for token in range(at + 1)]
    x = 3 if kind == "roberta" else 2
    assert found[1] == [x if token == x else N for token in range(at + 1)]
    single = tokenizer(first, second, is_split_into_words=True)
    assert align_targets(single, ([3, 0], [4, None, 1])) == found[0]


def test_pair_targets_shift_the_second_text():
    assert pair_targets([1, None], [None, N, 0, 2]) == ([1, None], [None, None, 2, 4])


def test_windows_lose_only_targets_that_no_window_has(tokenizer, caplog):
    words = ["the", "king", "sees", "the", "queens"]
    encoding = tokenizer(
        [["x"], words],
        is_split_into_words=True,
        truncation=True,
        max_length=6,
        stride=2,
        return_overflowing_tokens=True,
    )
    samples = encoding["overflow_to_sample_mapping"]
    assert samples[0] == 0
    assert len(samples) > 3
    found = align_targets(encoding, [[0], [1, 0, 2, None, 0]])
    for row, (keys, sample) in enumerate(zip(found, samples)):
        ids = encoding.word_ids(row)
        targets = [[0], [1, 0, 2, None, 0]][sample]
        for token, word in enumerate(ids):
            is_first = word is not None and ids.index(word) == token
            target = targets[word] if is_first else None
            assert keys[token] == (ids.index(target) if target in ids and target is not None else N)
    assert "1 of 5 targets in 1 of 2 texts are lost" in caplog.text


def test_cross_attention_has_target_rows_and_source_keys(tokenizer):
    source, target = [["the", "queens"], ["x"]], [["king", "the", "x"], ["queens"]]
    keys = tokenizer(source, is_split_into_words=True, padding=True, padding_side="left")
    rows = tokenizer(text_target=target, is_split_into_words=True)
    links = [[(0, 1), (1, 0), (1, 2)], []]
    targets = [pharaoh_targets(one, len(words)) for one, words in zip(links, target)]
    found = align_targets(rows, targets, keys=keys)
    queens, the = keys.word_ids(0).index(1), keys.word_ids(0).index(0)
    expected = [N] * len(rows["input_ids"][0])
    for word, key in ((0, queens), (1, the), (2, queens)):
        expected[rows.word_ids(0).index(word)] = key
    assert found == [expected, [N] * len(rows["input_ids"][1])]
    one = tokenizer(target[0], is_split_into_words=True), tokenizer(source[0], is_split_into_words=True)
    alone = align_targets(one[0], targets[0], keys=one[1])
    assert alone == [key if key == N else key - keys.word_ids(0).index(0) + 1 for key in expected]


def test_a_truncated_source_loses_targets(tokenizer):
    rows = tokenizer([["x", "x"]], is_split_into_words=True)
    keys = tokenizer([["x", "x", "x"]], is_split_into_words=True, truncation=True, max_length=4)
    assert align_targets(rows, [[1, 2]], keys=keys, lost="ignore") == [[N, 2, N, N]]
    with pytest.raises(ValueError, match="1 of 2 targets in 1 of 1 texts are lost: .*the first is word 1 of text 0"):
        align_targets(rows, [[1, 2]], keys=keys, lost="error")


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


def test_weights_by_hand(tokenizer):
    encoding = tokenizer([["the", "kings", "x", "olds"]], is_split_into_words=True)
    assert encoding.tokens(0) == ["<s>", "the", "king", "s", "x", "old", "s", "</s>"]
    weights = [[1, 0.5, None, 2]]
    assert align_weights(encoding, weights) == [[0, 1, 0.25, 0.25, 0, 1, 1, 0]]
    assert align_weights(encoding, weights, "first") == [[0, 1, 0.5, 0, 0, 2, 0, 0]]
    assert align_weights(encoding, weights, "last") == [[0, 1, 0, 0.5, 0, 0, 2, 0]]
    assert all(type(weight) is float for weight in align_weights(encoding, weights)[0])


@pytest.mark.parametrize("subword", ["first", "last", "all"])
def test_tokens_have_the_weight_of_their_words(subword, tokenizer, caplog):
    words = [one for one, _ in sentences(4)]
    draw = random.Random(4)
    weights = [[draw.choice([0, 0, 1, 2.5]) for _ in one] for one in words]
    encoding = tokenizer(words, is_split_into_words=True, truncation=True, max_length=7, padding=True)
    lost = 0
    for row, own, one in zip(align_weights(encoding, weights, subword), weights, words, strict=True):
        tokens, length = layout(tokenizer, one, 7)
        assert row[0] == 0
        assert not any(row[length - 1 :])
        for word, at in tokens.items():
            assert sum(row[token] for token in at) == pytest.approx(own[word] if at else 0)
            lost += own[word] > 0 and not at
    assert lost > 0
    assert f"{lost} of {sum(weight > 0 for row in weights for weight in row)} targets" in caplog.text


def test_weights_of_pairs_spans_and_single_texts(tokenizer):
    tree = embedded_trees()[0]
    weights = [float(number) for number in range(len(tree.words))]
    single = align_weights(tokenizer(tree.text), weights, spans=tree.spans, lost="error")
    assert sum(single) == pytest.approx(sum(weights))
    pair = tokenizer([tree.text], [tree.text])
    (row,) = align_weights(pair, [(weights, weights)], spans=[(tree.spans, tree.spans)])
    assert row == single + [0] + single[1:]
    words = encode_words(tree, tokenizer)[1]
    assert align_weights(words, np.array(weights)) == single


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[1, -1]], "text 0: the weight of word 1 must be finite and at least 0, got -1.0"),
        ([[1, float("nan")]], "text 0: the weight of word 1 must be finite and at least 0, got nan"),
        ([[1, "x"]], "text 0: the weight of word 1 must be a number, got 'x'"),
        ([[1]], "text 0 has a token of word 1, but targets of 1 words"),
        ([[1, 1], [1]], "encoding has 1 texts, but 2 lists of targets"),
    ],
)
def test_bad_weights_are_refused(weights, message, tokenizer):
    encoding = tokenizer([["the", "king"]], is_split_into_words=True)
    with pytest.raises(ValueError, match=message):
        align_weights(encoding, weights)
    with pytest.raises(ValueError, match="subword must be one of"):
        align_weights(encoding, [[1, 1]], "middle")
    cut = tokenizer([["the", "king"]], is_split_into_words=True, truncation=True, max_length=3)
    with pytest.raises(ValueError, match="1 of 2 targets in 1 of 1 texts are lost: .* the first is word 1 of text 0"):
        align_weights(cut, [[1, 1]], lost="error")


# ---------------------------------------------------------------------------------------------------------------------
# Texts with spans
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subword", ["first", "last", "all"])
def test_spans_give_the_words_of_encode_words(subword, tokenizer, bert):
    trees = embedded_trees()
    targets = [tree_targets(tree) for tree in trees]
    for one in (tokenizer, bert):
        encoding = one([tree.text for tree in trees])
        expected = align_targets([encode_words(tree, one)[1] for tree in trees], targets, subword, lost="error")
        assert align_targets(encoding, targets, subword, spans=[tree.spans for tree in trees]) == expected
        single = one(trees[0].text)
        assert align_targets(single, targets[0], subword, spans=trees[0].spans) == expected[0]


def test_spans_of_padded_and_paired_texts(tokenizer):
    trees = embedded_trees()[:4]
    targets, spans = [tree_targets(tree) for tree in trees], [tree.spans for tree in trees]
    alone = align_targets(tokenizer([tree.text for tree in trees]), targets, spans=spans)
    padded = tokenizer([tree.text for tree in trees], padding=True, padding_side="left", return_tensors="pt")
    length = padded["input_ids"].shape[1]
    for row, expected in zip(align_targets(padded, targets, spans=spans), alone):
        gap = length - len(expected)
        assert row == [N] * gap + [key if key == N else key + gap for key in expected]
    pair = tokenizer([trees[0].text], [trees[1].text])
    (row,) = align_targets(pair, [pair_targets(*targets[:2])], spans=[(spans[0], spans[1])])
    gap = len(alone[0])
    assert row == alone[0] + [N] + [key if key == N else key + gap for key in alone[1][1:]]


def test_padding_of_a_tokenizer_without_special_tokens_has_no_words(tokenizer):
    encoding = tokenizer(["x", "x x"], padding=True, padding_side="left", add_special_tokens=False)
    spans = [((0, 1),), ((0, 1), (2, 3))]
    length = len(encoding["input_ids"][1])
    assert align_targets(encoding, [[0], [1, 0]], spans=spans) == [
        [N] * (length - 1) + [length - 1],
        [1, 0, *[N] * (length - 2)],
    ]


def test_word_indices_serve_tokenizers_without_them(tokenizer):
    """Of a slow tokenizer only the method and the specials differ."""

    class Slow:
        is_fast = False

        def __call__(self, word, add_special_tokens):
            return {"input_ids": split(tokenizer, word)}

        def build_inputs_with_special_tokens(self, ids):
            return [0, *ids, 2]

    tree = embedded_trees()[0]
    words = encode_words(tree, Slow())[1]
    fast = tokenizer(tree.words, is_split_into_words=True)
    assert align_targets(words, tree_targets(tree)) == align_targets(fast, tree_targets(tree))


@pytest.mark.parametrize("as_target", [True, False])
def test_lists_of_words_are_words_between_spaces(as_target, tokenizer):
    words = ["the", "old", "kings"]
    ids, indices = encode_words(words, tokenizer, as_target)
    assert ids == tokenizer(" ".join(words))["input_ids"]
    assert encode_words(tuple(words), tokenizer, as_target) == (ids, indices)
    assert [word for word in dict.fromkeys(indices) if word is not None] == [0, 1, 2]
    assert encode_words([], tokenizer) == ([0, 2], [None, None])
    with pytest.raises(ValueError, match="a list of words: '' does not follow"):
        encode_words(["the", ""], tokenizer)


def test_slow_tokenizers_of_translations(tmp_path):
    pairs = numeral_pairs(60)
    tokenizer = train_marian_tokenizer(*map(list, zip(*pairs)), 90, tmp_path)
    assert not tokenizer.is_fast
    for source, target in pairs:
        source_words, target_words = source.split(), target.split()
        ids, sources = encode_words(source_words, tokenizer)
        labels, targets = encode_words(target_words, tokenizer, as_target=True)
        assert ids == tokenizer(source)["input_ids"]
        assert labels == tokenizer(text_target=target)["input_ids"]
        links = [(word % len(source_words), word) for word in range(len(target_words))]
        row = align_targets(targets, pharaoh_targets(links, len(target_words)), keys=sources, lost="error")
        assert row == [
            N if word is None or targets.index(word) != token else sources.index(word % len(source_words))
            for token, word in enumerate(targets)
        ]
    assert encode_words([], tokenizer) == ([0], [None])


# ---------------------------------------------------------------------------------------------------------------------
# Columns of datasets
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_targets_are_columns_of_datasets(batched, streaming, tokenizer):
    words, targets = map(list, zip(*[one for one in sentences(3) if one[0]]))

    def encode(rows):
        encoding = tokenizer(rows["words"], is_split_into_words=True, truncation=True, max_length=8)
        return {**encoding, "guidance_syntax": align_targets(encoding, rows["targets"], lost="ignore")}

    rows = Dataset.from_dict({"words": words, "targets": targets})
    if streaming:
        rows = rows.to_iterable_dataset(num_shards=2)
        assert isinstance(rows, IterableDataset)
    encoded = list(rows.map(encode, batched=batched, remove_columns=["words", "targets"]))
    expected = [slow_targets(tokenizer, *one, "first", 8)[0] for one in zip(words, targets)]
    assert [row["guidance_syntax"] for row in encoded] == expected
    assert all(len(row["guidance_syntax"]) == len(row["input_ids"]) for row in encoded)


# ---------------------------------------------------------------------------------------------------------------------
# Word targets
# ---------------------------------------------------------------------------------------------------------------------


#  She reads old books in the old garden
HEADS = (1, None, 3, 1, 7, 7, 7, 1)
RELATIONS = ("nsubj", "root", "amod", "obj", "case", "det", "amod", "obl:loc")
READER = Tree(("She", "reads", "old", "books", "in", "the", "old", "garden"), HEADS, RELATIONS)


def test_words_attend_to_their_heads():
    assert tree_targets(READER) == list(HEADS)
    assert tree_targets(READER, ["amod", "obj"]) == [None, None, 3, 1, None, None, 7, None]
    assert tree_targets(READER, {"obl"}) == [None] * 8
    assert tree_targets(READER, {"obl"}, subtypes=True) == [*[None] * 7, 1]


def test_heads_attend_to_their_nearest_dependents():
    # "reads" has 0 and 3 and 7; "garden" has 4, 5 and 6.
    assert tree_targets(READER, direction="dependent") == [None, 0, None, 2, None, None, None, 6]
    assert tree_targets(READER, ["obj", "obl:loc"], "dependent") == [None, 3, *[None] * 6]
    between = Tree(("a", "b", "c"), (1, None, 1), ("x", "root", "x"))
    assert tree_targets(between, direction="dependent") == [None, 0, None]


def test_words_that_share_a_span_share_a_target(tokenizer):
    # "du" is "de" and "le": the first word with a head outside of it is "de", whose head is "pain".
    words, heads = ("mange", "de", "le", "pain"), (None, 3, 3, 0)
    tree = Tree(
        words, heads, ("root", "case", "det", "obj"), text="mange du pain", spans=((0, 5), (6, 8), (6, 8), (9, 13))
    )
    assert tree_targets(tree) == [None, 3, None, 0]
    assert tree_targets(tree, ["det"]) == [None, 3, None, None]
    assert tree_targets(tree.spaced()) == [None, 3, 3, 0]
    inside = Tree(words, (None, 2, 3, 0), ("root", "x", "det", "obj"), text=tree.text, spans=tree.spans)
    assert tree_targets(inside) == [None, 3, None, 0]
    to_le = Tree(("vin", "de", "le"), (2, 0, None), ("x", "y", "root"), text="vin du", spans=((0, 3), (4, 6), (4, 6)))
    assert tree_targets(to_le) == [1, 0, None]
    assert tree_targets(to_le, direction="dependent") == [1, 0, None]
    encoding = tokenizer([tree.text])
    (row,) = align_targets(encoding, [tree_targets(tree)], spans=[tree.spans], lost="error")
    assert sum(key != N for key in row) == 2


def test_multiword_tokens_of_a_file(tokenizer, tmp_path):
    rows = [
        "1-2 don't _ _ _ _ _ _ _ _",
        "1 do _ X _ _ 3 aux _ _",
        "2 n't _ X _ _ 3 advmod _ _",
        "3 bark _ X _ _ 0 root _ _",
    ]
    (tmp_path / "a.conllu").write_text("\n".join(rows).replace(" ", "\t"))
    (tree,) = load_conllu(tmp_path / "a.conllu")
    encoding = tokenizer(tree.text)
    row = align_targets(encoding, tree_targets(tree), "all", spans=tree.spans, lost="error")
    length = len(encoding["input_ids"])
    # Every letter of "don't" is a token; the space belongs to the next word.
    assert encoding.tokens()[1:6] == list("don't")
    assert row == [N, *[6] * 5, *[N] * (length - 6)]


def test_trees_of_real_text_lose_no_target(real_data, tokenizer):
    for name in ("ud-en-ewt/en_ewt", "ud-fr-gsd/fr_gsd", "ud-de-gsd/de_gsd"):
        trees = load_conllu(real_data / f"{name}-ud-dev.conllu.gz")[:200]
        encoding = tokenizer([tree.text for tree in trees])
        targets = [tree_targets(tree) for tree in trees]
        found = align_targets(encoding, targets, spans=[tree.spans for tree in trees], lost="error")
        assert sum(key != N for row in found for key in row) == sum(one is not None for row in targets for one in row)


def test_linked_words_attend_to_their_sources():
    links = [(3, 0), (1, 0), (1, 0), (0, 2)]
    assert pharaoh_targets(links, 4) == [1, None, 0, None]
    assert pharaoh_targets(links, 4, several="last") == [3, None, 0, None]
    assert pharaoh_targets(links, 4, several="none") == [None, None, 0, None]
    assert pharaoh_targets([], 0) == []


def test_spans_attend_to_words_of_spans():
    text = "the old king's dog barks"
    spans = find_words(["the", "old", "king", "'s", "dog", "barks"], text, "a test")
    #        0-3 the, 4-7 old, 8-12 king, 12-14 's, 15-18 dog, 19-24 barks
    assert span_targets(spans, [((19, 24), (0, 18))]) == [None, None, None, None, None, 4]
    assert span_targets(spans, [((19, 24), (4, 14))], head="first") == [None, None, None, None, None, 1]
    assert span_targets(spans, [((13, 16), (9, 10)), ((15, 24), (0, 3))]) == [None, None, None, 2, 2, 0]


def test_mentions_attend_to_the_nearest_earlier_mention():
    king, he, himself, queen = Mention(0, 2, 1), Mention(4, 5, 4), Mention(8, 9, 8), Mention(5, 8, 6)
    clusters = [[himself, king, he], [queen]]
    assert cluster_targets(clusters, 9) == [None, None, None, None, 1, None, None, None, 4]
    assert cluster_targets([], 2) == [None, None]
    # A mention within another has its own antecedent; its words have the antecedent of the shorter one.
    inner, outer, boy, mother = Mention(4, 5, 4), Mention(4, 7, 6), Mention(0, 1, 0), Mention(1, 3, 2)
    nested = [[boy, inner], [mother, outer]]
    assert cluster_targets(nested, 7) == [None, None, None, None, 0, None, 2]
    assert cluster_targets(nested, 7, words="all") == [None, None, None, None, 0, 2, 2]
    # The head of the outer mention follows the first word of the inner one.
    assert cluster_targets([[outer, inner]], 7) == [None] * 7


def test_items_attend_to_the_nearest_earlier_antecedent(tokenizer):
    item = CoreferenceItem(tuple("abcdef"), Mention(3, 5, 4), (Mention(0, 1, 0), Mention(1, 3, 2), Mention(5, 6, 5)))
    assert coreference_targets(item) == [None, None, None, None, 2, None]
    assert coreference_targets(item, words="all") == [None, None, None, 2, 2, None]
    late = CoreferenceItem(tuple("abc"), Mention(0, 1, 0), (Mention(1, 2, 1),))
    assert coreference_targets(late) == [None] * 3
    items = embedded_coreference()
    targets = [coreference_targets(item) for item in items]
    found = align_targets(tokenizer([i.text for i in items]), targets, spans=[i.spans for i in items], lost="error")
    assert [sum(key != N for key in row) for row in found] == [1] * len(items)


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"subword": "middle"}, "subword must be one of first, last, all, got 'middle'"),
        ({"lost": "raise"}, "lost must be one of warn, error, ignore, got 'raise'"),
        ({"word_targets": [[0, 1]]}, "encoding has 2 texts, but 1 lists of targets"),
        ({"word_targets": [[0, 2], [0]]}, "text 0: the target of word 1 is word 2, but there are 2 words"),
        ({"word_targets": [[0, -1], [0]]}, "text 0: the target of word 1 is word -1, but there are 2 words"),
        ({"word_targets": [[0, 0.5], [0]]}, "text 0: the target of word 1 must be an index or None, got 0.5"),
        ({"word_targets": [[0, "the"], [0]]}, "text 0: the target of word 1 must be an index or None, got 'the'"),
        ({"word_targets": [[0], [0]]}, "text 0 has a token of word 1, but targets of 1 words; tokenize words with"),
        ({"spans": [((0, 3), (4, 8))]}, "encoding has 2 texts, but 1 lists of spans were given"),
        ({"spans": [((0, 3),), ((0, 1),)]}, "text 0 has spans of 1 words, but targets of 2; each word needs one"),
        ({"keys": [[None, 0]]}, "encoding has 2 texts, keys 1 rows; keys needs one for each text"),
        ({"keys": [[0], [0]], "word_targets": [[0, -1], [0]]}, "target of word 1 is word -1, but words count from 0"),
        ({"keys": [[0], [0]], "key_spans": []}, "spans need the output of a fast tokenizer as keys"),
        ({"encoding": "the king"}, "encoding must be the output of a tokenizer or word indices, got str"),
        ({"encoding": {"input_ids": [[1]]}}, "encoding must be the output of a tokenizer or word indices, got dict"),
        ({"encoding": BatchEncoding({"input_ids": [[1]]})}, "encoding is not the output of a fast tokenizer"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, tokenizer):
    given = {"encoding": tokenizer([["the", "king"], ["x"]], is_split_into_words=True), "word_targets": [[0, 1], [0]]}
    with pytest.raises(ValueError, match=message):
        align_targets(**{**given, **arguments})


def test_pairs_that_are_not_given_as_pairs_are_refused(tokenizer):
    pair = tokenizer([["the"]], [["x"]], is_split_into_words=True)
    with pytest.raises(ValueError, match="text 0 is a pair; its targets must be two lists"):
        align_targets(pair, [[0, 1]])
    with pytest.raises(ValueError, match="text 0 of keys is a pair"):
        align_targets(tokenizer([["x"]], is_split_into_words=True), [[0]], keys=pair)


def test_texts_that_were_not_split_into_words_are_refused(tokenizer):
    with pytest.raises(ValueError, match="text 0 has a token of word 2, but targets of 2 words; tokenize words with"):
        align_targets(tokenizer(["don't bark!"]), [[1, None]])


def test_encodings_that_were_changed_are_refused(tokenizer):
    encoding = tokenizer([["the", "king"]], is_split_into_words=True)
    encoding["input_ids"] = [encoding["input_ids"][0][:2]]
    with pytest.raises(ValueError, match="encoding was padded or truncated after tokenization"):
        align_targets(encoding, [[0, 1]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tree_targets(READER, direction="tail"), "direction must be 'head' or 'dependent', got 'tail'"),
        (lambda: tree_targets(READER, "nsubj"), r"relations must be a non-empty list, .* got 'nsubj'"),
        (lambda: tree_targets(READER, []), r"relations must be a non-empty list, .* got \[\]"),
        (lambda: pharaoh_targets([], 1, "every"), "several must be one of first, last, none, all, got 'every'"),
        (
            lambda: pharaoh_targets([(0, 2)], 2),
            r"the link 0-2 does not fit 2 target words; links are \(source, target\)",
        ),
        (lambda: pharaoh_targets([(-1, 0)], 2), "the link -1-0 does not fit"),
        (lambda: span_targets(((0, 1),), [], "all"), "head must be 'first' or 'last', got 'all'"),
        (lambda: span_targets(((0, 1), (2, 3)), [((1, 2), (0, 1))]), r"the span \(1, 2\) has no word"),
        (
            lambda: cluster_targets([[Mention(0, 3, 1)]], 2),
            r"Mention\(start=0, stop=3, head=1\) does not fit a text of 2",
        ),
        (lambda: cluster_targets([], 2, "first"), "words must be 'head' or 'all', got 'first'"),
    ],
)
def test_bad_words_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
