import random

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import BatchEncoding

from hf_attn_dynamics.data import (
    align_sparse_targets,
    align_targets,
    align_weights,
    embedded_trees,
    encode_words,
    numeral_pairs,
    pair_targets,
    pharaoh_targets,
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
# Several targets of a word
# ---------------------------------------------------------------------------------------------------------------------


def slow_sparse(tokenizer, words, targets, weights, subword, max_length=None):
    """The weight of each key in each row, of shape `(tokens, tokens)`, and the number of lost targets."""
    tokens, length = layout(tokenizer, words, max_length)
    dense, lost = np.zeros((length, length)), 0
    part = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}[subword]
    for word, own in enumerate(targets):
        for target, weight in zip(own, weights[word]):
            lost += weight > 0 and not (tokens[word] and tokens[target])
            for row in tokens[word][part]:
                for key in tokens[target][part]:
                    dense[row, key] += weight / len(tokens[target][part])
    return dense, lost


def dense_rows(keys, weights, num_keys):
    """Sparse targets of a text of shape `(tokens, keys)`; unused entries must be empty and last."""
    dense = np.zeros((len(keys), num_keys))
    for row, own in enumerate(zip(keys, weights, strict=True)):
        is_used = [key != N for key in own[0]]
        assert is_used == sorted(is_used, reverse=True)
        for key, weight in zip(*own, strict=True):
            assert (type(key), type(weight)) == (int, float)
            assert (weight > 0) == (key != N)
            if key != N:
                dense[row, key] += weight
    return dense


def several(seed):
    """Sentences with any number of targets for each word, and their weights, which may be 0."""
    draw = random.Random(seed)
    for words, _ in sentences(seed):
        targets = [draw.sample(range(len(words)), draw.randint(0, min(3, len(words)))) for _ in words]
        yield words, targets, [[draw.choice([0, 1, 2.5]) for _ in own] for own in targets]


def test_several_targets_by_hand(tokenizer):
    encoding = tokenizer([["the", "kings", "x", "olds"]], is_split_into_words=True)
    assert encoding.tokens(0) == ["<s>", "the", "king", "s", "x", "old", "s", "</s>"]
    # "the" attends to "kings" and "x", and "kings" to "the"; nothing else has a target.
    targets = [[[1, 2], [0], [], None]]
    keys, weights = align_sparse_targets(encoding, targets)
    none = [[N, N]]
    assert keys == [[[N, N], [2, 4], [1, N], *none * 5]]
    assert weights == [[[0, 0], [1, 1], [1, 0], *[[0, 0]] * 5]]
    assert align_sparse_targets(encoding, targets, "last")[0] == [[[N, N], [3, 4], [N, N], [1, N], *none * 4]]
    keys, weights = align_sparse_targets(encoding, targets, "all", weights=[[[3, 1], None, [], []]])
    none = [[N, N, N]]
    assert keys == [[*none, [2, 3, 4], [1, N, N], [1, N, N], *none * 4]]
    assert weights == [[[0, 0, 0], [1.5, 1.5, 1], [1, 0, 0], [1, 0, 0], *[[0, 0, 0]] * 4]]


@pytest.mark.parametrize("max_length", [None, 6])
@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("subword", ["first", "last", "all"])
def test_several_keys_are_those_of_tokens_of_single_words(subword, padding, max_length, tokenizer, caplog):
    words, targets, weights = zip(*several(6))
    encoding = tokenizer(
        list(words),
        is_split_into_words=True,
        padding=padding is not None,
        padding_side=padding,
        truncation=max_length is not None,
        max_length=max_length,
    )
    found = align_sparse_targets(encoding, targets, subword, weights=weights)
    lost, texts = 0, 0
    for number, (keys, own) in enumerate(zip(*found, strict=True)):
        expected, count = slow_sparse(tokenizer, words[number], targets[number], weights[number], subword, max_length)
        lost, texts = lost + count, texts + (count > 0)
        gap = len(keys) - len(expected)
        before = gap if padding == "left" else 0
        expected = np.pad(expected, (before, gap - before))
        np.testing.assert_allclose(dense_rows(keys, own, len(keys)), expected, rtol=1e-12)
        slots = {len(row) for row in keys}
        assert slots == {max([1, *(expected > 0).sum(1)])}
    given = sum(weight > 0 for text in weights for word in text for weight in word)
    assert 0 < lost < given
    assert f"{lost} of {given} targets in {texts} of {len(words)} texts are lost" in caplog.text
    with pytest.raises(ValueError, match=f"{lost} of {given} targets in {texts} of {len(words)} texts are lost: .*"):
        align_sparse_targets(encoding, targets, subword, weights=weights, lost="error")
    caplog.clear()
    assert align_sparse_targets(encoding, targets, subword, weights=weights, lost="ignore") == found
    assert not caplog.text


@pytest.mark.parametrize("subword", ["first", "last"])
def test_one_of_several_targets_is_the_target_of_align_targets(subword, tokenizer):
    words, targets = zip(*sentences(7))
    encoding = tokenizer(list(words), is_split_into_words=True, truncation=True, max_length=7)
    keys = align_targets(encoding, targets, subword, lost="ignore")
    nested = [[None if one is None else [one] for one in row] for row in targets]
    found, weights = align_sparse_targets(encoding, nested, subword, lost="ignore")
    assert found == [[[key] for key in row] for row in keys]
    assert weights == [[[float(key != N)] for key in row] for row in keys]


def test_several_targets_of_single_texts_pairs_and_spans(tokenizer):
    trees = embedded_trees()[:2]
    own = [tree_targets(tree, direction="dependent", several="all") for tree in trees]
    alone = []
    for tree, targets in zip(trees, own):
        alone.append(align_sparse_targets(tokenizer(tree.text), targets, spans=tree.spans, lost="error"))
        words = encode_words(tree, tokenizer)[1]
        assert align_sparse_targets(words, targets) == alone[-1]
        assert align_sparse_targets([words], [targets]) == ([alone[-1][0]], [alone[-1][1]])
    pair = tokenizer([trees[0].text], [trees[1].text])
    ((keys,), (weights,)) = align_sparse_targets(
        pair, [pair_targets(*own)], spans=[tuple(tree.spans for tree in trees)], lost="error"
    )
    (first, _), (second, _) = alone
    expected = np.zeros((len(keys), len(keys)))
    expected[: len(first), : len(first)] = dense_rows(*alone[0], len(first))
    # RoBERTa separates texts by two tokens; the second text has its first one in place of <s>.
    expected[len(first) :, len(first) :] = dense_rows(*alone[1], len(second))
    assert (dense_rows(keys, weights, len(keys)) == expected).all()


@pytest.mark.parametrize(("first", "second"), [([[1], [0]], [[0], []]), ([[0]], [None]), ([], [[0]]), ([[1], []], [])])
def test_lists_of_two_words_are_not_pairs(first, second, tokenizer):
    words = [["x"] * len(one) for one in (first, second)]
    pair = tokenizer([words[0]], [words[1]], is_split_into_words=True)
    ((keys,), _) = align_sparse_targets(pair, [pair_targets(first, second)], lost="error")
    for start, own in ((1, first), (1 + len(first) + 2, second)):
        for word, targets in enumerate(own):
            assert [key for key in keys[start + word] if key != N] == [start + target for target in targets or []]
    if len(first) == 2:
        single = tokenizer([words[0]], is_split_into_words=True)
        ((keys,), _) = align_sparse_targets(single, [first], lost="error")
        assert [row[0] for row in keys[1:3]] == [1 + own[0] if own else N for own in first]


def test_windows_lose_only_those_of_several_targets_that_no_window_has(tokenizer, caplog):
    words = ["the", "king", "sees", "the", "x"]
    targets = [[1, 4], [0, 2], [], [], [3]]
    options = {"is_split_into_words": True, "truncation": True, "max_length": 6, "stride": 2}
    encoding = tokenizer([words], return_overflowing_tokens=True, **options)
    keys, weights = align_sparse_targets(encoding, [targets])
    assert len(keys) == len(encoding["input_ids"]) > 1
    for number, row in enumerate(keys):
        ids = encoding.word_ids(number)
        expected = np.zeros((len(ids), len(ids)))
        for word, own in enumerate(targets):
            for target in own:
                if word in ids and target in ids:
                    expected[ids.index(word), ids.index(target)] = 1
        assert (dense_rows(row, weights[number], len(ids)) == expected).all()
    assert "1 of 5 targets in 1 of 1 texts are lost" in caplog.text


@pytest.mark.parametrize("subword", ["first", "last", "all"])
def test_all_links_of_an_alignment_are_keys(subword, tokenizer):
    source, target = ["the", "queens", "x"], ["kings", "the"]
    links = [(0, 0), (1, 0), (2, 1)]
    keys, rows = (tokenizer(words, is_split_into_words=True) for words in (source, target))
    found, weights = align_sparse_targets(
        rows, pharaoh_targets(links, len(target), several="all"), subword, keys=keys, lost="error"
    )
    expected = np.zeros((len(rows.word_ids()), len(keys.word_ids())))
    part = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}[subword]
    for one, other in links:
        at = [key for key, word in enumerate(keys.word_ids()) if word == one][part]
        for row in [row for row, word in enumerate(rows.word_ids()) if word == other][part]:
            expected[row, at] += 1 / len(at)
    np.testing.assert_allclose(dense_rows(found, weights, expected.shape[1]), expected)


def test_unused_and_repeated_entries_and_arrays(tokenizer):
    encoding = tokenizer([["the", "king", "x"]], is_split_into_words=True)
    expected = align_sparse_targets(encoding, [[[1, 2], [2], []]])
    assert align_sparse_targets(encoding, [[[1, N, 2], [2, N, N], [N] * 3]]) == expected
    assert align_sparse_targets(encoding, [np.array([[1, 2], [2, N], [N, N]])]) == expected
    assert align_sparse_targets(encoding, [torch.tensor([[1, 2], [2, N], [N, N]])]) == expected
    # Models sum the weights of a key that occurs twice.
    assert align_sparse_targets(encoding, [[[1, 1], None, None]])[0][0][1] == [2, 2]
    assert align_sparse_targets([], []) == ([], [])
    assert align_sparse_targets([[None]], [[]]) == ([[[N]]], [[[0.0]]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"subword": "middle"}, "subword must be one of first, last, all, got 'middle'"),
        ({"word_targets": [[[0]]]}, "encoding has 2 texts, but 1 lists of targets"),
        ({"word_targets": [[[0], [2]], [[0]]]}, "text 0: the target of word 1 is word 2, but there are 2 words"),
        ({"word_targets": [[[0], [0.5]], [[0]]]}, "text 0: the target of word 1 must be an index or None, got 0.5"),
        (
            {"word_targets": [[0, 1], [[0]]]},
            r"text 0: the targets of word 0 must be a list of .* got 0; align_targets",
        ),
        (
            {"weights": [[[1], [1]]]},
            r"weights of texts with \[2\] words were given, but targets of texts with \[2, 1\]",
        ),
        ({"weights": [[[1], [1]], [[1], [1]]]}, r"weights of texts with \[2, 2\] words were given, but targets of"),
        ({"weights": [[[1], [1, 2]], [[1]]]}, r"text 0: word 1 has 1 targets, but the weights \[1, 2\]; each target"),
        ({"weights": [[[1], 1], [[1]]]}, "text 0: word 1 has 1 targets, but the weights 1; each target needs one"),
        ({"weights": [[[1], [-1]], [[1]]]}, "text 0: the weight of word 1 must be finite and at least 0, got -1.0"),
    ],
)
def test_bad_lists_of_targets_are_refused(arguments, message, tokenizer):
    encoding = tokenizer([["the", "king"], ["x"]], is_split_into_words=True)
    given = {"encoding": encoding, "word_targets": [[[0], [1]], [[0]]]}
    with pytest.raises(ValueError, match=message):
        align_sparse_targets(**{**given, **arguments})


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
