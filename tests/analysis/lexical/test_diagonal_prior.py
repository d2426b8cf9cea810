"""IBM Model 1 with a prior of positions, against its equations word by word."""

import random

import numpy as np
import pytest
from alignment import dense_diagonal_model, diagonal_priors
from safetensors.numpy import load_file, save_file

from hf_attn_dynamics import IbmModel1, align_both_directions
from hf_attn_dynamics.analysis.lexical import DiagonalPrior


def corpus(seed=0, size=25, words=8):
    """Translations word by word in nearly the same order, some with another word."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(size):
        source = [f"s{draw.randrange(words)}" for _ in range(draw.randint(1, 6))]
        target = ["t" + word[1:] for word in source]
        if draw.random() < 0.5:
            target.insert(draw.randrange(len(target) + 1), f"t{draw.randrange(words)}")
        pairs.append((source, target))
    return pairs


@pytest.mark.parametrize("null_word", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_tables_tensions_and_likelihoods_are_those_of_the_equations(null_word, fits):
    pairs, prior = corpus(), DiagonalPrior(tension=2.0, null_probability=0.1, fit_tension=fits)
    trans, tensions, log_likelihoods = dense_diagonal_model(pairs, 3, null_word, 2.0, 0.1, fits)
    model = IbmModel1(null_word, prior).fit(pairs, 3)
    assert model.tension == pytest.approx(tensions[-1], rel=1e-6)
    assert (tensions[-1] > 3) == fits
    # The best tension is found by search, to half of the digits.
    assert model.log_likelihoods == pytest.approx(log_likelihoods, rel=1e-7 if fits else 1e-12)
    for source in model.source_words:
        for target in model.target_words:
            found = model.translation_probability(source, target)
            assert found == pytest.approx(trans[source][target], rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("null_word", [True, False])
def test_alignments_are_the_best_ones_under_the_prior(null_word):
    pairs = corpus(seed=1)
    model = IbmModel1(null_word, DiagonalPrior()).fit(pairs, 3)
    for (source, target), links, alpha in zip(pairs, model.align(pairs), model.alignment_probabilities(pairs)):
        words = [None] * null_word + source
        for place, o in enumerate(target):
            priors = diagonal_priors(place, words, len(target), model.tension, 0.08)
            values = [own * model.translation_probability(i, o) for own, i in zip(priors, words)]
            np.testing.assert_allclose(alpha[place], np.array(values[null_word:]) / sum(values), rtol=1e-9)
            best = max(range(len(values)), key=values.__getitem__) - null_word
            assert [at for at, t in links if t == place] == [best] * (best >= 0)


def test_a_tension_of_zero_without_null_word_is_model_1():
    pairs = corpus(seed=2)
    flat = IbmModel1(False, DiagonalPrior(tension=0.0, fit_tension=False)).fit(pairs, 4)
    plain = IbmModel1(False).fit(pairs, 4)
    np.testing.assert_allclose(flat.counts.data, plain.counts.data, rtol=1e-9)
    assert flat.log_likelihoods == pytest.approx(plain.log_likelihoods, rel=1e-12)
    assert (flat.tension, plain.tension) == (0.0, None)


def test_the_likelihood_never_falls():
    values = IbmModel1(prior=DiagonalPrior()).fit(corpus(seed=3), 30).log_likelihoods
    assert all(later >= earlier - 1e-9 for earlier, later in zip(values, values[1:]))


def test_positions_tell_words_apart_that_always_occur_together():
    pairs = [(["the", "dog"], ["le", "chien"])] * 5
    assert IbmModel1().fit(pairs).align(pairs[:1]) == [[(1, 0), (1, 1)]]
    assert IbmModel1(prior=DiagonalPrior()).fit(pairs).align(pairs[:1]) == [[(0, 0), (1, 1)]]


def test_a_saved_model_aligns_new_pairs_as_before(tmp_path):
    pairs = corpus(seed=4)
    model = IbmModel1(prior=DiagonalPrior(null_probability=0.2)).fit(pairs)
    model.save(tmp_path / "model")
    loaded = IbmModel1.load(tmp_path / "model")
    assert (loaded.prior, loaded.tension) == (model.prior, model.tension)
    assert loaded.align(corpus(seed=5)) == model.align(corpus(seed=5))
    # A file of before there were priors.
    plain = IbmModel1().fit(pairs)
    plain.save(tmp_path / "plain")
    words = f'{{"source_words": {plain.source_words}, "target_words": {plain.target_words}, "skipped_pairs": 0}}'
    words = words.replace("None", "null").replace("'", '"')
    save_file(load_file(tmp_path / "plain"), tmp_path / "earlier", metadata={"ibm_model_1": words})
    assert IbmModel1.load(tmp_path / "earlier").align(pairs) == plain.align(pairs)


def test_both_directions_have_the_prior():
    pairs = [(["the", "dog"], ["le", "chien"])] * 5
    assert align_both_directions(pairs, "intersection", prior=DiagonalPrior()) == [[(0, 0), (1, 1)]] * 5


def test_pairs_with_an_empty_side_have_no_links():
    model = IbmModel1(prior=DiagonalPrior()).fit(corpus())
    assert model.align([([], ["t1"]), (["s1"], [])]) == [[], []]
    assert model.align([]) == []


def test_unusable_priors_are_refused():
    for arguments, message in (
        ({"tension": -1}, "tension must be a number from 0 to 50, got -1"),
        ({"tension": float("nan")}, "tension must be a number from 0 to 50, got nan"),
        ({"null_probability": 1}, "null_probability must be at least 0 and below 1, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            DiagonalPrior(**arguments)
    with pytest.raises(ValueError, match="count_repeats=False leaves words out, but a prior needs their positions"):
        IbmModel1(prior=DiagonalPrior()).fit(corpus(), count_repeats=False)
