# Licensed under the Apache License, Version 2.0.
"""What moved between two readings, worked out by hand, and the parts of the page that need no script."""

import json
import re
from dataclasses import replace

import pytest
import torch
from browsing import ATTACK
from tiny_models import vivid_bert
from transformers import BertConfig, BertModel

from hf_attn_dynamics import HeadReading, HeadScores, RoleScores, prune_heads, read_heads
from hf_attn_dynamics.analysis.pages.compared_explorer import functions_of_models, moved_sentences, shortened
from hf_attn_dynamics.analysis.pages.comparison import COMPARED, Comparison, MovedFunction, MovedHead
from hf_attn_dynamics.analysis.sentence_maps import MAX_CHARACTERS, SentenceMaps, Side
from hf_attn_dynamics.data import embedded_trees


NAN = float("nan")


def reading(name, confidence, **results):
    """A reading of a model of two layers of two heads."""
    results = {"confidence": HeadScores({"encoder": confidence}), **results}
    return HeadReading(name, results, {}, 10, 100, 0, 0, 1.0, "cpu")


def delimiters(table):
    return HeadScores({"encoder": table})


def rare_words(table):
    return RoleScores(
        {"rarest": HeadScores({"encoder": table})}, {"rarest": {"encoder": 0.2}}, {"rarest": {"encoder": 9}}
    )


@pytest.fixture
def by_hand():
    """Head 0.0 gains rare words and loses delimiters, 0.1 has no function, 1.0 is removed, 1.1 keeps delimiters."""
    dense = reading(
        "dense",
        [[0.5, 0.4], [0.3, 0.2]],
        delimiter_attention=delimiters([[0.6, 0.1], [0.7, 0.5]]),
        rare_words=rare_words([[0.1, 0.1], [0.1, 0.1]]),
    )
    pruned = reading(
        "pruned",
        [[0.6, 0.4], [NAN, 0.05]],
        delimiter_attention=delimiters([[0.4, 0.1], [NAN, 0.55]]),
        rare_words=rare_words([[0.4, 0.1], [NAN, 0.1]]),
    )
    return Comparison(dense, pruned)


def test_heads_that_moved_are_marked_and_removed_ones_are_never_hidden(by_hand):
    assert by_hand.moved_heads() == {
        ("encoder", 0, 0): MovedHead(("delimiters",), ("rare words",)),
        ("encoder", 1, 0): MovedHead(("delimiters",), None),
    }
    first, removed = by_hand.moved_heads().values()
    assert (first.mark, first.words) == ("±", "gained rare words; lost delimiters")
    assert (removed.mark, removed.words) == ("×", "removed in B")
    assert by_hand.heads["encoder", 0, 1] == MovedHead((), ())
    assert by_hand.heads["encoder", 1, 1].mark == by_hand.heads["encoder", 1, 1].words == ""


@pytest.mark.parametrize(
    ("before", "after", "mark"),
    [
        (("x",), ("x",), ""),
        (("x",), (), "−"),
        ((), ("x",), "+"),
        (("x",), ("y",), "±"),
        (None, (), "×"),
        ((), None, "×"),
    ],
)
def test_a_mark_tells_what_moved(before, after, mark):
    assert MovedHead(before, after).mark == mark


def test_functions_are_kept_gained_and_lost(by_hand):
    functions = by_hand.functions()
    assert functions["delimiters"] == MovedFunction(first=3, second=1, kept=1, gained=0, lost=2, removed=1)
    assert functions["rare words"] == MovedFunction(first=0, second=1, kept=0, gained=1, lost=0, removed=0)
    assert functions["positional"] == MovedFunction(None, None)


def test_counts_of_heads_leave_out_none(by_hand):
    counts = by_hand.counts()
    assert counts == {
        "heads": 3,
        "removed_in_first": 0,
        "removed_in_second": 1,
        "removed_with_functions": 1,
        "gained": 1,
        "lost": 1,
        "gained_and_lost": 1,
        "kept": 1,
        "none": 1,
    }
    assert moved_sentences(by_hand) == (
        "3 heads are in both models. 1 of A is removed in B; 1 of these had functions where they remain. Of the heads "
        "in both, 1 gained functions, 1 lost functions (1 did both), 1 kept theirs, and 1 are without any in either "
        "model. Not compared, since not measured in both: positional, syntactic, duplicate tokens."
    )


def test_the_page_says_if_the_models_read_other_tokens(by_hand):
    other = Comparison(by_hand.first, replace(by_hand.second, tokens=2000))
    text = "did not read the same tokens: A 10 sentences with 100 tokens, B 10 sentences with 2,000 tokens."
    assert text in moved_sentences(other)
    assert "did not read" not in moved_sentences(by_hand)


def test_scores_are_compared_over_heads_of_both(by_hand):
    scores = by_hand.scores()
    assert list(scores) == ["confidence", "attention to delimiters"]
    assert scores["confidence"].heads == 3
    assert scores["confidence"].first == pytest.approx(1.1 / 3)
    assert scores["confidence"].second == pytest.approx(1.05 / 3)
    assert scores["confidence"].largest == {
        ("encoder", 1, 1): (0.2, 0.05),
        ("encoder", 0, 0): (0.5, 0.6),
        ("encoder", 0, 1): (0.4, 0.4),
    }


def test_only_ten_heads_are_listed_for_a_measure():
    before, after = torch.zeros(4, 4), torch.arange(16.0).view(4, 4) / 16
    comparison = Comparison(reading("a", before), reading("b", after))
    assert [head[1:] for head in comparison.scores()["confidence"].largest] == [
        (number // 4, number % 4) for number in range(15, 5, -1)
    ]


def test_the_reverse_comparison_mirrors_it(by_hand):
    reverse = Comparison(by_hand.second, by_hand.first)
    assert reverse.functions()["delimiters"] == MovedFunction(first=1, second=3, kept=1, gained=2, lost=0, removed=1)
    assert reverse.moved_heads()["encoder", 1, 0].words == "removed in A"
    assert (reverse.counts()["removed_in_first"], reverse.counts()["removed_with_functions"]) == (1, 1)
    assert functions_of_models(reverse)["functions A"]["encoder", 1, 0] == "removed"


def test_functions_measured_in_one_model_only_do_not_count_as_lost(by_hand):
    results = {name: one for name, one in by_hand.second.results.items() if name != "delimiter_attention"}
    comparison = Comparison(by_hand.first, replace(by_hand.second, results=results))
    assert comparison.functions()["delimiters"] == MovedFunction(3, None)
    assert comparison.heads["encoder", 0, 0] == MovedHead((), ("rare words",))
    assert list(comparison.scores()) == ["confidence"]


def test_heads_removed_in_both_models_are_in_neither():
    comparison = Comparison(reading("a", [[0.1, NAN]]), reading("b", [[NAN, NAN]]))
    assert comparison.heads == {("encoder", 0, 0): MovedHead((), None)}
    assert comparison.scores() == {}


def test_models_of_other_shapes_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"'a' has 1 layers × 2 heads \(encoder\), 'b' has 2 layers × 1 heads.*pruned ones"
    ):
        Comparison(reading("a", [[0.1, 0.2]]), reading("b", [[0.1], [0.2]]))


def test_equal_names_are_told_apart():
    one = reading("same", [[0.1]])
    assert Comparison(one, one).names == ("same (first)", "same (second)")
    assert len(shortened("x" * 90)) < 41


def maps(tokens, seed, kind="encoder"):
    weights = torch.rand(1, 2, len(tokens), len(tokens), generator=torch.Generator().manual_seed(seed))
    return SentenceMaps.of(" ".join(tokens), [Side(tokens, [], [])], {"attention": {kind: weights}})


def test_sentences_have_both_attentions_where_tokens_are_equal():
    first = replace(reading("a", [[0.1, 0.2]]), sentence_maps=[maps(["a", "b"], 0), maps(["c", "d"], 1)])
    second = replace(reading("b", [[0.1, 0.2]]), sentence_maps=[maps(["c", "d"], 2), maps(["a", "b", "c"], 3)])
    alone, both = Comparison(first, second).sentences()
    assert alone == first.sentence_maps[0]
    assert torch.equal(both.unpacked(COMPARED)["encoder"], second.sentence_maps[0].unpacked()["encoder"])
    assert both.weights["attention"] == first.sentence_maps[1].weights["attention"]
    limit = alone.characters + both.characters
    assert len(Comparison(first, second).sentences(limit)) == 2
    assert len(Comparison(first, second).sentences(limit - 1)) == 1


def test_sentences_whose_tokens_are_written_alike_are_not_mixed_up():
    def readings(name, scores):
        some = [maps(["?", "?"], number)._replace(text=text) for number, text in enumerate(["one", "two"], scores)]
        return replace(reading(name, [[0.1, 0.2]]), sentence_maps=some)

    first, second = readings("a", 0), readings("b", 2)
    found = Comparison(first, second).sentences()
    assert len(found) == 2
    for number, one in enumerate(found):
        of_second = second.sentence_maps[number].unpacked()["encoder"]
        assert torch.equal(one.unpacked(COMPARED)["encoder"], of_second)


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24}


@pytest.fixture(scope="module")
def readings(tokenizer, reading):
    """A model, and the same one without three heads, on parsed sentences."""
    pruned = prune_heads(vivid_bert(tokenizer), {0: [1], 1: [0, 3]})
    pruned = read_heads(pruned, embedded_trees(), tokenizer, frequent=20)
    return replace(reading, model="dense"), replace(pruned, model="pruned")


def written(readings, path):
    first, second = readings
    first.save_page(path, compare=second)
    return path.read_text(encoding="utf-8")


def test_everything_that_moved_is_in_the_page_without_script(readings, tmp_path):
    html = written(readings, tmp_path / "page.html")
    comparison = Comparison(*readings)
    assert moved_sentences(comparison) in html
    moved = html[html.index("What moved</h2>") : html.index("Table of heads</h2>")]
    for (kind, layer, head), one in comparison.moved_heads().items():
        row = re.search(rf'<tr data-site="{kind}" data-layer="{layer}" data-head="{head}">.*?</tr>', moved)[0]
        assert f"<td>{one.words}</td>" in row
        titles = re.findall(rf'data-layer="{layer}" data-head="{head}" title="([^"]*)"', html)
        assert titles
        assert all(title.endswith(f"({one.words})") for title in titles)
    for layer, head in ((0, 1), (1, 0), (1, 3)):
        assert re.search(rf"<td>{layer}\.{head}</td><td>[^<]*</td><td>removed</td><td>removed in B</td>", moved)
    assert html.count('<td class="removed"') == 3
    for name, one in comparison.scores().items():
        values = (one.heads, f"{one.first:.3f}", f"{one.second:.3f}")
        numbers = "".join(f'<td class="number">{value}</td>' for value in values)
        difference = f"{one.second - one.first:+.3f}".replace("-", "−")
        assert f"<td>{name}</td>{numbers}<td>{difference}</td>" in moved
    assert html.index("<summary>Definitions</summary>") < html.index("What was measured</h2>")


def test_the_table_of_heads_has_the_functions_of_both(readings, tmp_path):
    html = written(readings[::-1], tmp_path / "page.html")
    table = html[html.index('<table id="heads-table">') :]
    names = re.findall(r"<th[^>]*>([^<]*)</th>", table[: table.index("</thead>")])
    assert names[:4] == ["head", "functions A", "functions B", "change"]
    assert "<td>removed</td>" in re.search(r'<tr data-site="encoder" data-layer="1" data-head="3".*?</tr>', table)[0]
    assert table[: table.index("</tbody>")].count("<tr data-site") == 8


def test_names_of_models_are_text_and_never_html(readings, tmp_path):
    html = written([replace(one, model=f"{ATTACK}{one.model}") for one in readings], tmp_path / "page.html")
    assert html.count("<script") == html.count("</script>") == 4
    assert "<img src=x" not in html
    assert not re.search(r"https?://", html)


def test_a_page_without_comparison_has_none_of_it(readings, tmp_path):
    readings[0].save_page(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "What moved" not in html
    assert "compareModels(" not in html.replace("compareModels(data, other)", "")


def test_two_models_of_twelve_layers_of_twelve_heads_stay_below_three_megabytes(tmp_path):
    sizes = {"hidden_size": 48, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 24}
    model, generator = BertModel(BertConfig(vocab_size=50, **sizes)), torch.Generator().manual_seed(0)
    one = read_heads(model, torch.randint(5, 50, (20, 40), generator=generator).tolist())
    side = Side([f"token {number}" for number in range(40)], [], [])
    # Weights that compress worse than those of any model.
    weights = torch.randn(20, 12, 12, 40, 40, generator=generator).softmax(-1)
    some = [SentenceMaps.of("A sentence.", [side], {"attention": {"encoder": table}}) for table in weights]
    some = [sentence._replace(text=f"Sentence {number}") for number, sentence in enumerate(some)]
    fitting = some[: MAX_CHARACTERS // some[0].characters]
    html = written([replace(one, sentence_maps=fitting)] * 2, tmp_path / "page.html")
    assert len(html.encode()) < 3_000_000
    data = json.loads(re.search(r'id="sentences-data">(.*?)</script>', html)[1])
    assert 3 < len(data) < len(fitting)
    assert all(COMPARED in sentence["weights"] for sentence in data)
    assert f"The page holds the first {len(data)} of {len(fitting)} example sentences" in html
