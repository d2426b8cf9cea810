import pytest

from hf_attn_dynamics.data import (
    CoreferenceItem,
    Mention,
    Tree,
    align_targets,
    cluster_targets,
    coreference_targets,
    embedded_coreference,
    find_words,
    load_conllu,
    pair_targets,
    pharaoh_targets,
    span_targets,
    train_byte_level_bpe,
    tree_targets,
)


N = -100


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(["the", "king", "old"], vocab_size=268)


def test_pair_targets_shift_the_second_text():
    assert pair_targets([1, None], [None, N, 0, 2]) == ([1, None], [None, None, 2, 4])
    assert pair_targets([[1], None], [[], None, [0, 2], [N]]) == ([[1], None], [[], None, [2, 4], [None]])


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


def test_heads_attend_to_all_dependents():
    assert tree_targets(READER, direction="dependent", several="all") == [
        [], [0, 3, 7], [], [2], [], [], [], [4, 5, 6]
    ]  # fmt: skip
    assert tree_targets(READER, ["amod"], "dependent", several="all") == [[], [], [], [2], [], [], [], [6]]
    assert tree_targets(READER, several="all") == [[] if head is None else [head] for head in HEADS]


@pytest.mark.parametrize("direction", ["head", "dependent"])
def test_one_target_is_among_all_and_directions_mirror_each_other(direction, real_data):
    for tree in load_conllu(real_data / "ud-fr-gsd/fr_gsd-ud-dev.conllu.gz")[:100]:
        one, every = tree_targets(tree, direction=direction), tree_targets(tree, direction=direction, several="all")
        assert all(own in every[word] if every[word] else own is None for word, own in enumerate(one))
        mirrored = tree_targets(tree, direction={"head": "dependent"}.get(direction, "head"), several="all")
        pairs = {(word, target) for word, own in enumerate(every) for target in own}
        assert pairs == {(target, word) for word, own in enumerate(mirrored) for target in own}


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
    assert tree_targets(inside, several="all") == [[], [3], [], [0]]
    outside = Tree(words, (None, 3, 0, 0), ("root", "case", "det", "obj"), text=tree.text, spans=tree.spans)
    assert tree_targets(outside, several="all") == [[], [0, 3], [], [0]]
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
    assert pharaoh_targets(links, 4, several="all") == [[1, 3], [], [0], []]
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
    every = cluster_targets(clusters, 9, several="all")
    assert every == [[], [4, 8], [], [], [1, 8], [], [], [], [1, 4]]
    assert cluster_targets(clusters, 9, words="all", several="all")[:2] == [[4, 8]] * 2
    assert cluster_targets([], 2, several="all") == [[], []]
    # A mention within another has its own antecedent; its words have the antecedent of the shorter one.
    inner, outer, boy, mother = Mention(4, 5, 4), Mention(4, 7, 6), Mention(0, 1, 0), Mention(1, 3, 2)
    nested = [[boy, inner], [mother, outer]]
    assert cluster_targets(nested, 7) == [None, None, None, None, 0, None, 2]
    assert cluster_targets(nested, 7, words="all") == [None, None, None, None, 0, 2, 2]
    assert cluster_targets(nested, 7, words="all", several="all") == [[4], [6], [6], [], [0], [2], [2]]
    # The head of the outer mention follows the first word of the inner one.
    assert cluster_targets([[outer, inner]], 7) == [None] * 7
    # A mention within another does not count as another one of it.
    assert cluster_targets([[outer, inner]], 7, several="all") == [[], [], [], [], [6], [], []]


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tree_targets(READER, several="some"), "several must be 'nearest' or 'all', got 'some'"),
        (lambda: cluster_targets([], 2, several="some"), "several must be 'nearest' or 'all', got 'some'"),
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


def test_relations_have_several_names():
    tree = Tree(("eat", "it"), (None, 0), ("root", "dobj"))
    assert tree_targets(tree, ["obj"]) == tree_targets(tree, ["dobj"]) == [None, 0]
