"""Results with a value for each source word draw the values themselves, and show the highest ones in notebooks."""

import math

import pytest
import torch
from figure_texts import overlaps, shown_texts, smallest_text
from slow_score_norm import padded
from tiny_lstms import SOURCES, TARGETS, labelled, tiny_lexical

from hf_attn_dynamics import LexicalProbe, OptimalAttention, lexical_probe, optimal_attention


INF, NAN = math.inf, math.nan
# Padding on the left; the second output word of the first sentence has no label, nor has the third sentence.
LOG_ODDS = torch.tensor(
    [
        [[-INF, 0.0, 2.0, -1.0], [NAN] * 4, [-INF, -200.0, 1.0, 3.0]],
        [[0.5, 0.1, 0.2, 0.3], [0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]],
        [[NAN] * 4] * 3,
    ]
)
TRANSLATION = LexicalProbe(LOG_ODDS.sigmoid(), LOG_ODDS)
CLASSES = LexicalProbe(TRANSLATION.beta[:, 0], LOG_ODDS[:, 0])


def optimum():
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([[3, 1, -100], [2, 4, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    return optimal_attention(torch.randn(2, 4, 5, generator=generator), labels, mask=mask)


def drawn(figure):
    return torch.from_numpy(figure.axes[0].images[0].get_array().data)


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_sentence_is_drawn_without_padding_and_without_words_that_have_no_label():
    figure = TRANSLATION.plot(title="a model")
    assert torch.equal(drawn(figure), TRANSLATION.beta[0, [0, 2], 1:])
    assert (ticks(figure.axes[0].xaxis), ticks(figure.axes[0].yaxis)) == (["1", "2", "3"], ["0", "2"])
    # The probability of a word that is rounded to 0 is not padding.
    assert drawn(figure)[1, 0] == 0
    assert figure.axes[0].images[0].get_clim() == (0, TRANSLATION.beta[0, [0, 2], 1:].max())
    assert figure.get_suptitle().endswith("\na model")
    assert torch.equal(drawn(TRANSLATION.plot(sentence=1)), TRANSLATION.beta[1])


@pytest.mark.parametrize("name", ["LstmSeq2SeqForConditionalGeneration", "LstmForSequenceClassification"])
def test_the_words_of_each_sentence_of_a_padded_batch_are_drawn(name):
    batch = {"input_ids": padded(SOURCES, "left", 1), "labels": labelled(name)}
    found = lexical_probe(tiny_lexical(name), batch)
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS)):
        picture = drawn(found.plot(sentence=row, source=source))
        expected = found.beta[row].reshape(-1, found.beta.shape[-1])[: len(target), -len(source) :]
        assert torch.equal(picture, expected)


def test_the_probe_of_a_classifier_is_a_single_row():
    figure = CLASSES.plot(source=["a", "b", "c"])
    assert torch.equal(drawn(figure), CLASSES.beta[:1, 1:])
    assert ticks(figure.axes[0].yaxis) == ["correct class"]
    assert ticks(CLASSES.plot(target=["positive"]).axes[0].yaxis) == ["positive"]


def test_optimal_attention_is_drawn():
    found = optimum()
    assert torch.equal(drawn(found.plot()), found.attention[0, :2, :3])
    assert torch.equal(drawn(found.plot(sentence=1)), found.attention[1])


@pytest.mark.parametrize(
    ("source", "target"), [(["▁a", "dog", "."], ["x", "z"]), (["<pad>", "▁a", "dog", "."], ["x", "y", "z"])]
)
def test_tokens_are_those_of_the_drawn_words_or_of_all_positions(source, target, tmp_path):
    figure = TRANSLATION.plot(tmp_path / "probe.png", source=source, target=target)
    assert (ticks(figure.axes[0].xaxis), ticks(figure.axes[0].yaxis)) == (["a", "dog", "."], ["x", "z"])
    assert "dog" in (tmp_path / "probe.svg").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sentence": 3}, "sentence must be from 0 to 2, the last one of the batch, got 3"),
        ({"sentence": -1}, "sentence must be from 0 to 2"),
        ({"sentence": 2}, "sentence 2 has no label"),
        ({"source": ["a"]}, "source has 1 token; give one for each of the 3 words .* sentence 0, or 4 with padding"),
        ({"target": ["a"] * 4}, "target has 4 tokens; give one for each of the 2 words"),
        (
            {"sentence": 1, "source": ["a"] * 5},
            "source has 5 tokens; give one for each of the 4 words .* 1\\.",
        ),
    ],
)
def test_sentences_and_tokens_that_there_are_not_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TRANSLATION.plot(**settings)


@pytest.mark.parametrize("length", [1, 2, 30])
def test_texts_are_apart_and_large_enough(length):
    log_odds = torch.randn(1, length, length)
    words = [f"▁word{number}" for number in range(length)]
    for probe in (LexicalProbe(log_odds.sigmoid(), log_odds), LexicalProbe(log_odds.sigmoid()[0], log_odds[0])):
        figure = probe.plot(title="texts\na model with a name", source=words)
        assert not overlaps(figure)
        assert smallest_text(figure) >= 8
        width, height = figure.get_size_inches() * figure.dpi
        boxes = [text.get_window_extent() for text in shown_texts(figure)]
        assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes)


def test_notebooks_show_the_highest_value_of_each_output_word():
    html = TRANSLATION._repr_html_()
    assert html.count("<tr>") == 1 + 5
    assert "LexicalProbe of 3 sentences" in html
    cells = html.split("<tr>")[3].split("</td>")[:5]
    highest = f"{TRANSLATION.beta[0, 2].max():.4f}"
    assert [cell.rpartition(">")[2] for cell in cells] == ["0", "2", "3", highest, "3"]
    assert "output word" not in CLASSES._repr_html_()
    many = LexicalProbe(torch.rand(9, 5, 4), torch.rand(9, 5, 4))._repr_html_()
    assert many.count("<tr>") == 1 + 20
    assert "the first 20 of 45 rows" in many


def test_notebooks_show_the_loss_of_optimal_attention():
    found = optimum()
    html = found._repr_html_()
    assert html.count("<tr>") == 1 + 5
    assert f"{found.loss[1, 2]:.4f}" in html
    nothing = OptimalAttention(torch.full((1, 2, 3), NAN), *torch.full((2, 1, 2), NAN))
    assert nothing._repr_html_().count("<tr>") == 1
