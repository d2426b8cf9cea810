# Licensed under the Apache License, Version 2.0.
"""Scores and norms of words against the equations, by hand and one word at a time."""

import math

import pytest
import torch
from figure_texts import overlaps, smallest_text
from slow_score_norm import ragged_words, slow_purity, slow_terms

from hf_attn_dynamics import BowAttentionConfig, BowAttentionForSequenceClassification, score_norm_curve
from hf_attn_dynamics.analysis.score_norm import (
    ScoreNormHistory,
    attended_profile,
    attended_words,
    curve_error,
    harmonic_others,
    recording_epochs,
    run_interval,
    score_norm_terms,
    share_by_bin,
    topic_purity,
)
from hf_attn_dynamics.data import topic_sentences, topic_words
from hf_attn_dynamics.data.word_counts import WordCounts
from hf_attn_dynamics.training import BowAttentionStack, LabelledSentences, stacked_gradient_descent


SENTENCES = [[3], *ragged_words(25, 9)]
COUNTS = WordCounts.from_sentences(SENTENCES, 9)
LABELS = torch.arange(26) % 2


@pytest.mark.parametrize(("score", "others"), [(0.0, 20), (1e-6, 20), (3.35, 20), (2.0, 7.5)])
def test_the_curve_is_corollary_1(score, others):
    expected = math.sqrt(2 * (score + math.exp(score) / others - 1 / others))
    found = score_norm_curve(torch.tensor(score, dtype=torch.float64), others)
    assert found.item() == pytest.approx(expected, rel=1e-9)


def test_a_score_below_zero_has_no_norm_and_a_sentence_has_others():
    assert score_norm_curve(-0.1, 20).item() == 0
    with pytest.raises(ValueError, match="others must be greater than 0, got 0"):
        score_norm_curve(1.0, 0)


def test_terms_are_those_of_theorem_1_for_any_words_and_runs():
    torch.manual_seed(0)
    scores, vectors = torch.randn(2, 9).double(), torch.randn(2, 9, 4).double()
    words = [3, 8, 1]
    terms = score_norm_terms(scores, vectors, COUNTS, words)
    for run in range(2):
        expected = [slow_terms(scores[run].tolist(), vectors[run], SENTENCES, word) for word in words]
        torch.testing.assert_close(torch.stack(terms, -1)[:, :, :][run], torch.tensor(expected).double())


def test_terms_grow_alike_in_training_whatever_the_classifier():
    """Theorem 1, whose residual falls with the learning rate."""
    train, _ = topic_sentences(train_size=200, test_size=1, topics=2, words_per_topic=1, others=5, other_words=4000)
    telling = [word for words in topic_words(2, 1) for word in words]
    data = LabelledSentences(train["input_ids"], train["label"], 4003)
    models = []
    for classifier in ("fixed", "linear", "mlp"):
        torch.manual_seed(1)
        config = BowAttentionConfig(vocab_size=4003, hidden_size=4, num_labels=2, classifier=classifier)
        models.append(BowAttentionForSequenceClassification(config))
    stack = BowAttentionStack(models)
    before = score_norm_terms(*stack.score_norms(data), data.counts, telling)
    history = ScoreNormHistory(telling)
    stacked_gradient_descent(
        lambda: stack.losses(data),
        stack.parameters,
        stack.learning_rates(0.5),
        epochs=400,
        record=lambda epoch, _: history.add(epoch, *stack.score_norms(data)),
        record_at=range(0, 400, 20),
    )
    after = score_norm_terms(*stack.score_norms(data), data.counts, telling)
    assert after.score.sub(before.score).min() > 0.5
    assert after.residual(before).abs().max() < 0.06
    assert curve_error(history.scores, history.norms, others=5).max() < 0.06
    assert (history.scores[-1] > history.scores[0] + 0.5).all()


def test_an_error_is_looked_for_up_to_a_score():
    scores = torch.tensor([0.0, 1.0, 2.0])
    norms = score_norm_curve(scores, 20) + torch.tensor([0.25, -0.5, 3.0])
    assert curve_error(scores, norms, 20).item() == pytest.approx(3)
    assert curve_error(scores, norms, 20, up_to=1.0).item() == pytest.approx(0.5)


@pytest.mark.parametrize("score", [5.0, 15.0, 20.0])
def test_terms_of_a_word_with_nearly_all_attention_are_exact(score):
    counts, scores = WordCounts.from_sentences([range(21)], 21), torch.zeros(21)
    scores[4] = score
    vectors = torch.zeros(21, 2)
    vectors[5] = torch.tensor([20.0, 40.0])
    terms = score_norm_terms(scores, vectors, counts, [4])
    assert terms.score.item() == pytest.approx(score + math.exp(score) / 20, rel=1e-6)
    assert terms.norm.item() == pytest.approx(2.5, rel=1e-6)  # half of the square of the mean, (1, 2)


def test_words_in_no_sentence_have_no_curve_and_leave_others_theirs():
    others = harmonic_others(WordCounts.from_sentences([[0, 1, 2], [0, 1]], 4))
    found = score_norm_curve(torch.ones(4), others)
    assert found.isnan().tolist() == [False, False, False, True]
    torch.testing.assert_close(found[2], score_norm_curve(1.0, 2.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: score_norm_curve(1.0, torch.tensor([torch.nan, -2.0])), "others must be greater than 0, got -2"),
        (lambda: score_norm_terms(torch.zeros(9), torch.zeros(9, 2), COUNTS, [9]), "words have 9, but .* 0 to 8"),
        (lambda: score_norm_terms(torch.zeros(9), torch.zeros(9, 2), COUNTS, [-1]), "words have -1, but"),
        (lambda: score_norm_terms(torch.zeros(8), torch.zeros(9, 2), COUNTS, [3]), "scores are for 8 words"),
        (lambda: score_norm_terms(torch.zeros(9), torch.zeros(7, 2), COUNTS, [3]), "vectors are for 7 words"),
        (lambda: topic_purity(COUNTS, torch.zeros(27)), r"labels have shape \(27,\) for 26 sentences"),
        (lambda: run_interval(torch.zeros(3), confidence=95), "confidence must be between 0 and 1, .* got 95"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_word_without_others_has_no_terms():
    counts = WordCounts.from_sentences([[1], [0, 2]], 3)
    with pytest.raises(ValueError, match="words have 1, which is in no sentence with other words"):
        score_norm_terms(torch.zeros(3), torch.zeros(3, 2), counts, [1])
    assert harmonic_others(counts).isnan().tolist() == [False, True, False]


def test_others_enter_as_the_mean_of_their_inverse():
    for word in (3, 5):
        rest = [sum(other != word for other in words) for words in SENTENCES if word in words]
        inverse = [1 / number for number in rest if number]
        assert harmonic_others(COUNTS)[word].item() == pytest.approx(len(inverse) / sum(inverse))
    # At first, the terms of theorem 1 have the m of corollary 1.
    terms = score_norm_terms(torch.zeros(9), torch.zeros(9, 2), COUNTS, [3])
    torch.testing.assert_close(terms.score.float(), 1 / harmonic_others(COUNTS)[[3]])


def test_purity_is_the_difference_of_shares():
    found = topic_purity(COUNTS, LABELS)
    for word in range(1, 9):
        assert found[word].item() == pytest.approx(slow_purity(SENTENCES, LABELS.tolist(), word))
    assert found[0].isnan()
    with pytest.raises(ValueError, match="labels have 2; topic purity needs two classes"):
        topic_purity(COUNTS, LABELS + 1)


def test_the_attended_word_has_the_largest_score():
    scores = torch.randn(9, generator=torch.Generator().manual_seed(0))
    found = attended_words(scores, COUNTS)
    assert found.tolist() == [max(words, key=lambda word: scores[word]) for words in SENTENCES]


def test_ties_go_to_each_word_equally_often_and_to_the_same_with_the_same_seed():
    counts = WordCounts.from_sentences([[0, 1, 1, 2, 3]] * 6000, 4)
    scores = torch.tensor([1.0, 1.0, 1.0, 0.0])
    found = attended_words(scores, counts, seed=5)
    torch.testing.assert_close(found.bincount(minlength=4) / 6000, torch.tensor([1, 1, 1, 0]) / 3, rtol=0, atol=0.03)
    assert torch.equal(found, attended_words(scores, counts, seed=5))
    assert not torch.equal(found, attended_words(scores, counts, seed=6))


def test_a_profile_counts_each_sentence_once():
    counts = WordCounts.from_sentences([[0, 1], [0, 2], [1, 2], [1]], 3)
    attended, purity = torch.tensor([1, 2, 1, 1]), torch.tensor([0.0, 0.5, 1.0])
    assert attended_profile(attended, counts, purity) == pytest.approx(((0.5 * 3 + 1) / 4, (3 * 3 + 2) / 4))
    assert attended_profile(attended, counts, purity, word=0) == pytest.approx((0.75, 2.5))


def test_a_history_keeps_what_it_saw():
    history = ScoreNormHistory()
    with pytest.raises(ValueError, match="the history is empty"):
        _ = history.scores
    table = torch.zeros(1, 2)
    for epoch in range(40):
        table.fill_(epoch)
        history.add(epoch, table, torch.stack([table, table], -1))
    assert history.epochs == list(range(40))
    assert history.scores.tolist() == [[[epoch, epoch]] for epoch in range(40)]
    torch.testing.assert_close(history.norms, history.scores * 2**0.5)


def test_a_centred_history_counts_from_its_beginning():
    history = ScoreNormHistory(units=[1], centered=True)
    scores, vectors = torch.tensor([[9.0, 2.0]]), torch.tensor([[[9.0, 9.0], [3.0, 0.0]]])
    history.add(0, scores, vectors)
    vectors[0, 1] = torch.tensor([0.0, 4.0])
    history.add(1, scores + 1, vectors)
    assert history.scores.flatten().tolist() == [0, 1]
    assert history.norms.flatten().tolist() == [0, 5]


def recorded(words=8, runs=2, units=None, dtype=torch.float32):
    """A history in which the score of each word is proportional to its index."""
    history = ScoreNormHistory(units)
    for epoch in range(0, 40, 10):
        scores = torch.arange(words, dtype=dtype).expand(runs, words) * epoch / 100
        history.add(epoch, scores, torch.stack([scores, 2 * scores], -1))
    return history


def titles(figure):
    return [axes.get_title() for axes in figure.axes if axes.axison]


def test_a_history_draws_its_values_a_panel_for_each_word_and_a_line_for_each_run(tmp_path):
    history = recorded(3, units=[2, 0])
    figure = history.plot(tmp_path / "history", "a model", others=torch.tensor([torch.nan, 5.0, 20.0]))
    assert (tmp_path / "history.png").stat().st_size > 2000
    assert titles(figure) == ["word 2", "word 0"]
    for index, axes in enumerate(figure.axes):
        for run in range(2):
            drawn = torch.from_numpy(axes.lines[run].get_xydata())
            expected = torch.stack([history.scores[:, run, index], history.norms[:, run, index]], -1)
            torch.testing.assert_close(drawn, expected.double())
    theory, nothing = figure.axes
    scores, norms = torch.from_numpy(theory.lines[2].get_xydata()).T
    torch.testing.assert_close(norms, score_norm_curve(scores, 20.0))
    assert len(nothing.lines) == 2
    assert figure.get_suptitle().endswith("\na model")
    assert not overlaps(figure)
    assert smallest_text(figure) >= 8


def test_a_history_of_many_words_draws_those_with_the_highest_scores():
    assert titles(recorded().plot()) == [f"word {word}" for word in (7, 6, 5, 4, 3, 2)]
    assert titles(recorded(6).plot()) == [f"word {word}" for word in range(6)]
    four = recorded(dtype=torch.bfloat16).plot(units=range(4), others=3.0)
    assert titles(four) == [f"word {word}" for word in range(4)]
    assert len({axes.get_position().x0 for axes in four.axes}) == 2
    assert all(len(axes.lines) == 3 for axes in four.axes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"units": [9]}, "units have 9, which is not recorded; the recorded words are 1, 2"),
        ({"units": []}, "units are empty"),
        ({"others": torch.ones(2)}, "others has 2 numbers, none for the word 2"),
        ({"others": 0}, "others must be greater than 0"),
    ],
)
def test_words_that_cannot_be_drawn_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        recorded(3, units=[1, 2]).plot(**settings)
    with pytest.raises(ValueError, match="the history is empty"):
        ScoreNormHistory().plot()


def test_a_history_shows_both_ends_of_training():
    html = recorded(3, units=[2])._repr_html_()
    assert "4 records, epochs 0 to 30, means of 2 runs" in html
    assert [cell.rpartition(">")[2] for cell in html.split("</td>")[:5]] == ["2", "0.000", "0.600", "0.000", "1.342"]
    many = recorded(30)._repr_html_()
    assert many.count("<tr>") == 1 + 20
    assert "of 30 words, those with the highest scores" in many
    assert "empty" in ScoreNormHistory()._repr_html_()


def test_the_interval_is_that_of_student():
    values = torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0], [5.0, 0.0]])
    mean, low, high = run_interval(values)
    # t with three degrees of freedom: 3.1824.
    width = 3.18245 * values[:, 0].std().item() / 2
    torch.testing.assert_close(mean, torch.tensor([3.0, 0.0]))
    torch.testing.assert_close(high, torch.tensor([3 + width, 0.0]))
    torch.testing.assert_close(low, torch.tensor([3 - width, 0.0]))
    assert run_interval(values[:1]).low.isnan().all()


def test_the_interval_of_an_accuracy_ends_at_one():
    accuracies = torch.tensor([0.9, 1.0, 1.0])
    assert run_interval(accuracies).high > 1
    mean, low, high = run_interval(accuracies, limits=(0, 1))
    assert (high.item(), low) == (1, run_interval(accuracies).low)
    assert run_interval(accuracies[:1], limits=(0, 1)).high.isnan()


def test_shares_are_those_of_a_histogram():
    shares = share_by_bin(torch.tensor([[0.0, 0.4, 1.0, 2.0], [1.5, 1.5, 1.5, 1.5]]), torch.tensor([0.0, 1.0, 2.0]))
    assert shares.tolist() == [[0.5, 0.5], [0.0, 1.0]]


@pytest.mark.parametrize(("numbers", "message"), [((0, 1), "epochs must be at least 1"), ((10, 0), "records must be")])
def test_nothing_to_record_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        recording_epochs(*numbers)
