import random

import numpy as np
import pytest
import torch
from alignment import dense_ibm_model_1, grow_diag_final, responsibilities, viterbi

from hf_attn_dynamics import (
    IbmModel1,
    align_both_directions,
    alignment_error_rate,
    attention_alignment,
    read_pharaoh,
    symmetrize,
    write_pharaoh,
)


def corpus(seed=0, size=40, words=12):
    """Noisy word-by-word translations of 1 to 6 words, with repeated words."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(size):
        source = [f"s{draw.randrange(words)}" for _ in range(draw.randint(1, 6))]
        target = ["t" + word[1:] for word in source if draw.random() < 0.8] + [f"t{draw.randrange(words)}"]
        draw.shuffle(target)
        pairs.append((source, target))
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# IBM Model 1
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("null_word", [True, False])
@pytest.mark.parametrize("iterations", [1, 2, 6])
def test_tables_and_likelihoods_are_those_of_the_equations(iterations, null_word):
    pairs = corpus()
    counts, trans, log_likelihoods = dense_ibm_model_1(pairs, iterations, null_word)
    model = IbmModel1(null_word).fit(pairs, iterations)
    for row, source in enumerate(model.source_words):
        for column, target in enumerate(model.target_words):
            assert model.counts[row, column] == pytest.approx(counts[source].get(target, 0), rel=1e-9)
            assert model.translation_probability(source, target) == pytest.approx(trans[source][target], rel=1e-9)
    assert model.log_likelihoods == pytest.approx(log_likelihoods, rel=1e-12)


def test_the_first_counts_are_shares_of_co_occurrences():
    # Equation 16, by hand: each target word gives 1/L to each source word of its sentence.
    model = IbmModel1(null_word=False).fit([(["a", "b"], ["x", "y", "x"]), (["a"], ["x"])], iterations=1)
    assert (model.source_words, model.target_words) == (["a", "b"], ["x", "y"])
    np.testing.assert_allclose(model.counts.toarray(), [[2, 0.5], [1, 0.5]])
    np.testing.assert_allclose(model.probabilities.toarray(), [[0.8, 0.2], [2 / 3, 1 / 3]])


@pytest.mark.parametrize("null_word", [True, False])
def test_the_likelihood_never_falls(null_word):
    values = IbmModel1(null_word).fit(corpus(seed=1), iterations=40).log_likelihoods
    assert len(values) == 41
    assert all(later >= earlier - 1e-9 for earlier, later in zip(values, values[1:]))
    assert values[1] > values[0]


@pytest.mark.parametrize("null_word", [True, False])
def test_alignments_are_the_best_ones_of_the_equations(null_word):
    pairs = corpus(seed=2)
    model = IbmModel1(null_word).fit(pairs, 4)
    _, trans, _ = dense_ibm_model_1(pairs, 4, null_word)
    assert model.align(pairs) == [viterbi(source, target, trans, null_word) for source, target in pairs]
    null = [None] * null_word
    for (source, target), alpha in zip(pairs, model.alignment_probabilities(pairs)):
        expected = [responsibilities(null + source, o, trans)[null_word:] for o in target]
        np.testing.assert_allclose(alpha, expected, rtol=1e-9)


def test_of_equal_source_words_the_last_one_is_linked_also_before_null():
    model = IbmModel1().fit([(["a", "b"], ["x"])], iterations=3)
    assert model.align([(["a", "b"], ["x"]), (["b", "a", "b"], ["x"])]) == [[(1, 0)], [(2, 0)]]


def test_repeated_target_words_count_once_if_asked():
    pairs = corpus(seed=3)
    without = [(source, list(dict.fromkeys(target))) for source, target in pairs]
    assert any(len(one) < len(other) for (_, one), (_, other) in zip(without, pairs))
    model, expected = IbmModel1().fit(pairs, 3, count_repeats=False), IbmModel1().fit(without, 3)
    assert model.log_likelihoods == expected.log_likelihoods
    assert model.align(pairs) == expected.align(pairs)


def test_the_result_is_the_same_bit_by_bit_for_strings_ids_arrays_and_tensors():
    pairs = corpus(seed=4)
    ids = [tuple([int(word[1:]) for word in side] for side in pair) for pair in pairs]
    models = [
        IbmModel1().fit(iter(pairs), 5),
        IbmModel1().fit(ids, 5),
        IbmModel1().fit([tuple(map(np.array, pair)) for pair in ids], 5),
        IbmModel1().fit([tuple(map(torch.tensor, pair)) for pair in ids], 5),
    ]
    for model in models[1:]:
        assert np.array_equal(model.counts.data, models[0].counts.data)
        assert model.align(ids) == models[0].align(pairs)


def test_alignments_do_not_depend_on_the_other_pairs():
    pairs = corpus(seed=5)
    model = IbmModel1().fit(pairs)
    assert [model.align([pair])[0] for pair in pairs] == model.align(pairs)
    assert model.align([]) == model.alignment_probabilities([]) == []


def test_unknown_words_have_probability_0_and_no_link():
    model = IbmModel1().fit([(["a"], ["x"]), (["b"], ["y"])])
    assert model.translation_probability("new", "x") == model.translation_probability("a", "new") == 0
    assert model.translation_probability("a", "y") == 0
    assert model.translation_probability(None, "x") == pytest.approx(0.5)
    pairs = [(["new", "a"], ["x", "new"]), (["new"], ["new"]), (["b"], ["x"])]
    # The last x knows only NULL.
    assert model.align(pairs) == [[(1, 0)], [], []]
    first, second, third = model.alignment_probabilities(pairs)
    assert first[0, 0] == first[1, 0] == first[1, 1] == second[0, 0] == third[0, 0] == 0
    assert first[0, 1] == pytest.approx(2 / 3, abs=0.05)


def test_pairs_with_an_empty_side_are_left_out_and_keep_their_line(caplog):
    pairs = corpus(seed=6)
    model = IbmModel1().fit([pairs[0], ([], ["t1"]), (["s1"], []), *pairs[1:]])
    assert model.skipped_pairs == 2
    assert f"2 of {len(pairs) + 2} pairs with an empty side were left out" in caplog.text
    assert np.array_equal(model.counts.data, IbmModel1().fit(pairs).counts.data)
    assert model.align([([], ["t1"]), pairs[0], (["s1"], [])])[::2] == [[], []]
    assert [part.shape for part in model.alignment_probabilities([([], ["t1"]), (["s1"], [])])] == [(1, 0), (0, 1)]


def test_a_second_fit_forgets_the_first():
    model = IbmModel1().fit(corpus(seed=7))
    assert np.array_equal(model.fit(corpus()).counts.data, IbmModel1().fit(corpus()).counts.data)


@pytest.mark.parametrize("null_word", [True, False])
@pytest.mark.parametrize("word", [lambda word: word + "ß", lambda word: int(word[1:])], ids=["strings", "ids"])
def test_a_file_gives_back_every_bit(word, null_word, tmp_path):
    pairs = [tuple([word(token) for token in side] for side in pair) for pair in corpus(seed=8)]
    model = IbmModel1(null_word).fit([*pairs, ([], [])], 3)
    model.save(tmp_path / "models" / "ibm.safetensors")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["ibm.safetensors"]
    loaded = IbmModel1.load(tmp_path / "models" / "ibm.safetensors")
    assert np.array_equal(loaded.counts.toarray(), model.counts.toarray())
    for name in ("null_word", "source_words", "target_words", "log_likelihoods", "skipped_pairs"):
        assert getattr(loaded, name) == getattr(model, name)
    assert loaded.align(pairs) == model.align(pairs)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "none of 0 pairs does"),
        ([([], ["x"]), (["a"], [])], "none of 2 pairs does"),
        ([(["a"], ["x"]), ("a b", ["x"])], r"pair 1 of pairs has the string 'a b' .* split it"),
        ([{"source": "a"}], r"pair 0 of pairs must be \(source words, target words\)"),
        ([(["a"], ["x"], ["z"])], "pair 0 of pairs must be"),
        ([(["a", 1], ["x"])], "source side must be all strings or all whole numbers, got int, str"),
        ([(["a", None], ["x"])], "source side must be all strings or all whole numbers, got NoneType, str"),
        ([([["a"]], ["x"])], "source side must be strings or whole numbers: unhashable type: 'list'"),
        ([(["a"], [1.5])], "target side must be all strings or all whole numbers, got float"),
    ],
)
def test_bad_pairs_are_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        IbmModel1().fit(pairs)


def test_what_cannot_be_answered_is_refused(tmp_path):
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        IbmModel1().fit(corpus(), iterations=0)
    for ask in (
        lambda: IbmModel1().align(corpus()),
        lambda: IbmModel1().translation_probability("a", "x"),
        lambda: IbmModel1().save(tmp_path / "a"),
    ):
        with pytest.raises(ValueError, match=r"has not been fitted; call fit\(\)"):
            ask()
    with pytest.raises(ValueError, match="no NULL word; create it with null_word=True"):
        IbmModel1(null_word=False).fit(corpus()).translation_probability(None, "t1")
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ValueError, match=r"notes.txt does not hold an IbmModel1"):
        IbmModel1.load(tmp_path / "notes.txt")


@pytest.mark.parametrize("column", [-1, 3])
def test_a_file_with_counts_of_words_that_are_not_there_is_refused(column, tmp_path):
    model = IbmModel1().fit([(["a"], ["x", "y", "z"])], 1)
    model.counts.indices[0] = column
    model.save(tmp_path / "damaged")
    with pytest.raises(ValueError, match="damaged does not hold an IbmModel1: .*indices must be"):
        IbmModel1.load(tmp_path / "damaged")


def test_translations_of_real_words_are_found(real_data):
    from hf_attn_dynamics.data import load_parallel

    folder = real_data / "multi30k-de-en"
    data = load_parallel(folder / "val.en.gz", folder / "val.de.gz")
    pairs = [(row["source"].lower().split(), row["target"].lower().split()) for row in data]
    model = IbmModel1().fit(pairs, 8)
    for source, target in (("dog", "hund"), ("man", "mann"), ("woman", "frau"), ("two", "zwei")):
        best = model.probabilities[[model.source_words.index(source)]].toarray().argmax()
        assert model.target_words[best] == target


# ---------------------------------------------------------------------------------------------------------------------
# Both directions
# ---------------------------------------------------------------------------------------------------------------------

GROWING = ["grow-diag", "grow-diag-final", "grow-diag-final-and"]
METHODS = ["intersection", "union", *GROWING]


def two_alignments(seed, functions=True):
    """Links of sentence pairs of 1 to 8 words, as of models that link each word at most once, or any links."""
    draw = random.Random(seed)
    for _ in range(150):
        sources, targets = draw.randint(1, 8), draw.randint(1, 8)
        if functions:
            forward = {(draw.randrange(sources), t) for t in range(targets) if draw.random() < 0.9}
            backward = {(s, draw.randrange(targets)) for s in range(sources) if draw.random() < 0.9}
        else:
            cells = [(s, t) for s in range(sources) for t in range(targets)]
            forward, backward = ({cell for cell in cells if draw.random() < 0.4} for _ in range(2))
        # Half of the links of both are shared, so that there is something to grow from.
        forward |= {link for link in backward if draw.random() < 0.5}
        yield forward, backward, sources, targets


def test_growing_by_hand():
    # Targets down, sources across. X is in both, f and b in one direction.
    #   X f . .
    #   . b . .
    #   b . . f
    #   . . . b
    forward, backward = [{(0, 0), (1, 0), (3, 2)}], [{(0, 0), (1, 1), (0, 2), (3, 3)}]
    assert symmetrize(forward, backward, "intersection") == [[(0, 0)]]
    # 1-0 has the new source 1, 1-1 the new target 1. 0-2 neighbours 1-1, and target 2 is new. 3-2 neighbours nothing.
    assert symmetrize(forward, backward, "grow-diag") == [[(0, 0), (0, 2), (1, 0), (1, 1)]]
    # 3-2 has the new source 3, 3-3 the new target 3.
    assert symmetrize(forward, backward, "grow-diag-final") == symmetrize(forward, backward, "union")
    # 3-2 has the old target 2, 3-3 two new words.
    assert symmetrize(forward, backward, "grow-diag-final-and") == [[(0, 0), (0, 2), (1, 0), (1, 1), (3, 3)]]


def test_growing_leaves_out_links_between_words_that_are_linked():
    # 0-1 and 1-0 neighbour both links, whose words are not free.
    forward, backward = [{(0, 0), (1, 1), (0, 1)}], [{(0, 0), (1, 1), (1, 0)}]
    for method in ("intersection", *GROWING):
        assert symmetrize(forward, backward, method) == [[(0, 0), (1, 1)]]


def test_neighbours_are_tried_in_the_order_of_moses():
    # 0-1 and 2-1 are diagonal neighbours of 1-0, and only target 1 is free: 0-1 comes first and takes it.
    assert symmetrize([{(1, 0), (0, 1), (2, 1), (0, 3), (2, 4)}], [{(1, 0), (0, 3), (2, 4)}]) == [
        [(0, 1), (0, 3), (1, 0), (2, 4)]
    ]
    # The link above, 0-0, comes before the diagonal 1-0, whose target has a link then, and whose source had one.
    assert symmetrize([{(0, 1), (1, 2), (0, 0), (1, 0)}], [{(0, 1), (1, 2)}]) == [[(0, 0), (0, 1), (1, 2)]]


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("method", GROWING)
def test_growing_is_that_of_the_pseudocode(method, functions):
    for forward, backward, sources, targets in two_alignments(1, functions):
        expected = grow_diag_final(forward, backward, method, sources, targets)
        assert symmetrize([forward], [backward], method) == [expected]


def test_growing_lies_between_intersection_and_union():
    grown = 0
    for forward, backward, _, _ in two_alignments(2):
        by_method = {method: set(symmetrize([forward], [backward], method)[0]) for method in METHODS}
        assert by_method["intersection"] == forward & backward
        assert by_method["union"] == forward | backward
        assert by_method["intersection"] <= by_method["grow-diag"] <= by_method["grow-diag-final-and"]
        assert by_method["grow-diag"] <= by_method["grow-diag-final"] <= by_method["union"]
        grown += by_method["intersection"] < by_method["grow-diag"] < by_method["union"]
    assert grown > 10


@pytest.mark.parametrize("method", ["intersection", "union", "grow-diag"])
def test_the_alignments_can_be_exchanged(method):
    for forward, backward, _, _ in two_alignments(3):
        assert symmetrize([forward], [backward], method) == symmetrize([backward], [forward], method)


@pytest.mark.parametrize("method", ["intersection", "union"])
def test_source_and_target_can_be_exchanged(method):
    def reverse(links):
        return {(target, source) for source, target in links}

    for forward, backward, _, _ in two_alignments(4):
        (links,) = symmetrize([forward], [backward], method)
        assert symmetrize([reverse(backward)], [reverse(forward)], method) == [sorted(reverse(links))]


@pytest.mark.parametrize("method", METHODS)
def test_alignments_of_a_corpus_are_those_of_its_pairs(method):
    forward, backward, _, _ = zip(*two_alignments(5))
    together = symmetrize(forward, backward, method)
    alone = [symmetrize([one], [other], method)[0] for one, other in zip(forward, backward)]
    assert together == alone
    assert symmetrize([sorted(links) * 2 for links in forward], backward, method) == alone
    assert symmetrize(alone, alone, method) == alone
    assert symmetrize([], [], method) == []
    assert symmetrize([[]], [[]], method) == [[]]


def test_both_directions_are_fitted_and_reversed():
    pairs, training = corpus(seed=9), corpus(seed=10)
    exchanged = [(target, source) for source, target in training]
    forward = IbmModel1().fit(training, 4).align(pairs)
    backward = IbmModel1().fit(exchanged, 4).align([(target, source) for source, target in pairs])
    backward = [[(source, target) for target, source in links] for links in backward]
    for method in METHODS:
        links = align_both_directions(iter(pairs), method, iterations=4, training_pairs=iter(training))
        assert links == symmetrize(forward, backward, method)
    assert align_both_directions(training, "union") == align_both_directions(training, "union", 5, True, training)


def test_alignments_that_cannot_be_combined_are_refused():
    for call in (lambda: symmetrize([], [], "grow"), lambda: align_both_directions(corpus(), "grow")):
        with pytest.raises(ValueError, match="method must be one of intersection, union, grow-diag, .*, got 'grow'"):
            call()
    with pytest.raises(ValueError, match="forward has alignments of 2 sentence pairs, backward of 1"):
        symmetrize([[], []], [[]])


def test_both_directions_agree_on_real_words(real_data):
    from hf_attn_dynamics.data import load_parallel

    folder = real_data / "multi30k-de-en"
    data = load_parallel(folder / "val.en.gz", folder / "val.de.gz")
    pairs = [(row["source"].lower().split(), row["target"].lower().split()) for row in data]
    links = align_both_directions(pairs, "intersection")
    assert all(len(dict(one)) == len({target for _, target in one}) == len(one) for one in links)
    found = [(source[i], target[j]) for (source, target), one in zip(pairs, links) for i, j in one]
    assert found.count(("dog", "hund")) > 0.9 * sum("dog" in source and "hund" in target for source, target in pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Alignments
# ---------------------------------------------------------------------------------------------------------------------


def test_attention_links_each_real_token_to_its_highest_real_source():
    attention = torch.tensor([[[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.4, 0.4, 0.2]], [[0.0, 0.1, 0.9]] * 3])
    assert attention_alignment(attention)[0] == [(0, 1), (0, 2), (2, 0)]
    source_mask, target_mask = torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert attention_alignment(attention, source_mask, target_mask) == [[(0, 1), (1, 0)], []]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([torch.rand(2, 3)], r"attention must have shape \(batch, target, source\), got \(2, 3\)"),
        ([torch.rand(2, 3, 4), torch.ones(2, 3)], r"source_mask must have shape \(2, 4\), got \(2, 3\)"),
        ([torch.rand(2, 3, 4), None, torch.ones(2, 4)], r"target_mask must have shape \(2, 3\), got \(2, 4\)"),
    ],
    ids=["two dimensions", "source", "target"],
)
def test_attention_of_another_shape_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention_alignment(*arguments)


def test_attention_that_is_not_defined_suggests_no_link():
    attention = torch.tensor([[[torch.nan, torch.nan], [0.1, 0.9], [0.6, torch.nan]]])
    assert attention_alignment(attention) == [[(1, 1)]]
    assert attention_alignment(attention, source_mask=torch.tensor([[1, 0]])) == [[(0, 1), (0, 2)]]


def test_the_error_rate_is_that_of_och_and_ney():
    predicted = [[(0, 0), (1, 1), (2, 2), (2, 2)], [], [(0, 1)]]
    sure = [[(0, 0), (1, 2)], [(0, 0)], []]
    possible = [[(1, 1)], [], [(0, 0)]]
    # |A| = 4, |S| = 3, |A ∩ S| = 1, |A ∩ P| = 2.
    assert alignment_error_rate(predicted, sure, possible) == pytest.approx(1 - (1 + 2) / 7)
    assert alignment_error_rate(predicted, sure) == pytest.approx(1 - 2 / 7)
    assert alignment_error_rate(sure, sure, possible) == 0
    assert alignment_error_rate([[(5, 5)], [], []], sure) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[(0, 0)]], []), "predicted has alignments of 1 sentence pairs, sure of 0"),
        (([[(0, 0)]], [[(0, 0)]], [[], []]), "predicted has alignments of 1 sentence pairs, possible of 2"),
        (([[]], [[]]), "no link at all; the error rate is undefined"),
    ],
    ids=["sure", "possible", "no link"],
)
def test_undefined_error_rates_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        alignment_error_rate(*arguments)


def test_pharaoh_files_give_back_alignments_line_by_line(tmp_path):
    write_pharaoh(tmp_path / "a.txt", [{(1, 2), (0, 0)}, [], [(10, 3)]])
    assert (tmp_path / "a.txt").read_text() == "0-0 1-2\n\n10-3\n"
    assert read_pharaoh(tmp_path / "a.txt") == [[(0, 0), (1, 2)], [], [(10, 3)]]


def test_possible_links_are_read_if_asked(tmp_path):
    (tmp_path / "gold.txt").write_text("1?2 0-0 2p2\n")
    assert read_pharaoh(tmp_path / "gold.txt") == [[(0, 0)]]
    assert read_pharaoh(tmp_path / "gold.txt", possible=True) == [[(0, 0), (1, 2), (2, 2)]]


@pytest.mark.parametrize("word", ["0", "0:1", "a-1", "1-", "-1-0", "0-1-2"])
def test_words_that_are_no_link_are_refused(word, tmp_path):
    (tmp_path / "a.txt").write_text(f"0-0\n1-1 {word}\n")
    with pytest.raises(ValueError, match=f"line 2: '{word}' is not a link; write source-target"):
        read_pharaoh(tmp_path / "a.txt")
