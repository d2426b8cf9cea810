"""What notebooks show of results: tables with inline styles, with all text escaped."""

import math
from html.parser import HTMLParser

import pytest
import torch
from fresh_processes import python
from matplotlib.figure import Figure
from transformers import BertConfig, BertModel

from hf_attn_dynamics import (
    GateHistory,
    HeadConfidence,
    HeadScores,
    HeadTimeline,
    IbmModel1,
    Observer,
    RelevanceConservation,
    RoleScores,
    analysis,
    contextualized_agreement,
    head_report,
    observe,
    prune_heads,
)
from hf_attn_dynamics.analysis.notebook import MOST_ROWS, Html, heat_grid, html_table
from hf_attn_dynamics.analysis.results import Result


SCORES = HeadScores({"encoder": [[0.0, 1.0], [0.25, math.nan]], "cross": [[0.5]]})


class Tables(HTMLParser):
    """Texts and styles of the cells of tables, row by row; fails where tags are not closed in order."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.styles, self._open = [], [], []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self._open.append(tag)
        assert tag not in ("script", "style", "link", "img")
        if tag == "tr":
            self.rows.append([])
            self.styles.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.styles[-1].append(dict(attributes)["style"])

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data


def rows_of(result):
    return Tables(result._repr_html_()).rows


def model():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    return BertModel(config).eval()


def test_every_public_result_shows_itself():
    public = {name: getattr(analysis, name) for name in analysis.__all__}
    classes = {name: value for name, value in public.items() if isinstance(value, type)}
    without = {name for name, value in classes.items() if not hasattr(value, "_repr_html_")}
    # Observers and what observes, the panels that plots are given, and settings.
    measuring = {name for name, value in classes.items() if issubclass(value, Observer)} | {"AgreementTracker"}
    assert without == measuring | {"Curves", "DiagonalPrior", "MapExample", "SourceMap"}


def test_scores_are_a_grid_for_each_kind_of_site_that_is_darker_where_scores_are_higher():
    shown = Tables(SCORES._repr_html_())
    assert shown.rows == [
        ["layer", "head 0", "head 1"],
        ["0", "0.00", "1.00"],
        ["1", "0.25", "×"],
        ["layer", "head 0"],
        ["0", "0.50"],
    ]
    lowest, highest = shown.styles[1][1:]
    assert "background:rgb(255,255,255);color:#111" in lowest
    assert "background:rgb(0,114,178);color:#fff" in highest
    assert "background:rgb(128,184,216)" in shown.styles[4][1]
    assert "background" not in shown.styles[2][2]


@pytest.mark.parametrize("value", [0.0, -2.0, math.nan, math.inf])
def test_a_grid_of_equal_or_missing_scores_is_drawn(value):
    assert Tables(heat_grid({"encoder": torch.full((1, 2), value)})).rows[0] == ["layer", "head 0", "head 1"]


def test_roles_show_the_best_head_beside_the_baseline():
    accuracy = {
        "obj to head": HeadScores({"encoder": [[0.2, 0.7]]}),
        "det to head": HeadScores({"encoder": [[0.5, 0.1]]}),
        "none": HeadScores({"encoder": [[math.nan, math.nan]]}),
    }
    baselines = dict.fromkeys(accuracy, {"encoder": 0.5})
    roles = RoleScores(accuracy, baselines, dict.fromkeys(accuracy, {"encoder": 1234}))
    assert rows_of(roles)[1:] == [
        ["obj to head", "encoder 0.1", "0.700", "0.500", "1,234", ""],
        ["det to head", "encoder 0.0", "0.500", "0.500", "1,234", "no better than the baseline"],
        ["none", "–", "–", "–", "–", "no head has a score"],
    ]


def test_a_report_is_its_table_and_draws_its_layers():
    report = head_report(prune_heads(model(), {0: [1, 2], 1: [0]}), batch=2, length=8, latency=False)
    rows = rows_of(report)
    assert rows[0] == ["", "dense", "pruned", "ratio"]
    assert rows[1] == ["heads", "8", "5", "0.625"]
    assert rows[-2:] == [["encoder", "0", "2", "4"], ["encoder", "1", "3", "4"]]
    (axes,) = report.plot(title="a model").axes
    assert [bar.get_height() for bar in axes.patches] == [2, 3]


def test_an_observation_shows_what_it_holds_and_what_has_no_result():
    one = model()
    with observe(one, HeadConfidence(excluded_ids=[3]), HeadConfidence(name="<none>", excluded_ids=[3])) as seen:
        one(input_ids=torch.tensor([[5, 7, 8, 3]]))
    rows = Tables(seen._repr_html_()).rows
    assert rows[0] == ["name", "observer", "result"]
    assert rows[1][:2] == ["confidence", "HeadConfidence"]
    assert rows[1][2].startswith("HeadScores")
    assert ["<none>"] in [row[:1] for row in rows]
    with observe(one, HeadConfidence(excluded_ids=[3])) as nothing:
        pass
    assert Tables(nothing._repr_html_()).rows[1][2].startswith("no result: ")


def test_a_timeline_shows_the_means_at_both_ends():
    timeline = HeadTimeline()
    for step, mean in ((0, 0.25), (50, 0.75)):
        timeline.record(step, "confidence", HeadScores({"encoder": [[mean, mean]]}))
        timeline.record(step, "guidance_weight", 1 - step / 50)
    assert rows_of(timeline)[1:] == [
        ["confidence", "2", "0", "50", "0.250", "0.750"],
        ["guidance_weight", "2", "0", "50", "1.000", "0.000"],
    ]


def test_conservation_is_a_table():
    assert rows_of(RelevanceConservation(0.75, 0.25, 1e-9))[1:] == [
        ["inputs", "0.750"],
        ["biases and constants", "0.250"],
        ["largest error", "1.0e-09"],
    ]


def gate_history():
    history = GateHistory()
    history.steps = [0, 10]
    history.log_alpha = {"encoder": [[[2.0, 2.0], [2.0, 2.0]], [[2.0, -2.0], [2.0, -2.0]]]}
    history.open_heads, history.settled_heads = {"encoder": [3.9, 2.4]}, {"encoder": [4, 2]}
    return history


def test_a_history_of_gates_is_a_table_of_both_ends():
    assert rows_of(gate_history())[1:] == [["encoder", "4", "3.900", "2.400", "4", "2"]]
    assert "2 records, steps 0 to 10" in gate_history()._repr_html_()
    assert len(rows_of(GateHistory())) == 1


def test_contextualized_agreement_is_a_table():
    found = contextualized_agreement(0.3, [0.1, 0.5], [20.0, 60.5])
    assert rows_of(found)[1:] == [["performance ξ", "60.500"], ["checkpoint", "1"]]
    assert rows_of(contextualized_agreement(0.6, [0.1, 0.5], [20, 60]))[2] == ["checkpoint", "none agrees better"]


def test_an_alignment_model_shows_its_most_probable_translations():
    pairs = [(["<i>das</i>", "Haus"], ["the", "</script>"])] * 3 + [(["ein", "Haus"], ["a", "</script>"])]
    model = IbmModel1(null_word=False).fit(pairs, 30)
    rows = rows_of(model)
    assert rows[0] == ["source word", "aligned target words (expected)", "most probable translations"]
    totals = {word: total for word, total, _ in rows[1:]}
    assert list(totals) == ["Haus", "<i>das</i>", "ein"]
    assert sum(map(float, totals.values())) == pytest.approx(8, abs=0.1)
    for word, _, translations in rows[1:]:
        best, _, value = translations.split(", ")[0].partition(" ")
        found = model.translation_probability(word, best)
        assert value == f"({found:.2f})"
        assert found == max(model.translation_probability(word, one) for one in ("the", "a", "</script>"))
    assert "</script>" not in model._repr_html_()
    numbers = IbmModel1().fit([(range(50), range(90))], 1)
    assert len(rows_of(numbers)) == 1 + MOST_ROWS
    assert rows_of(numbers)[1][0] == "NULL word"
    assert "the 20 with the most aligned words are shown" in numbers._repr_html_()
    assert rows_of(IbmModel1())[1] == ["not fitted; call fit() or load()"]


def test_a_history_of_gates_draws_itself():
    figure = gate_history().plot(title="a model", target=2)
    assert isinstance(figure, Figure)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels[0] == "encoder self-attention: 2 of 4"
    assert "last record: 4 → 2 open" in labels


def test_long_tables_show_their_first_rows_and_count_the_others():
    class Long(Result):
        columns = ["number"]

        def records(self):
            return ((number,) for number in range(1000))

    html = Long()._repr_html_()
    assert len(Tables(html).rows) == 1 + MOST_ROWS
    assert "1,000 rows" in html


def test_text_is_escaped_and_html_is_not_escaped_twice():
    html = html_table(["<b>"], [["</script>"], [Html("<b>bold</b>")]], "a < b")
    assert [row[0] for row in Tables(html).rows] == ["<b>", "</script>", "bold"]
    assert "a &lt; b" in html
    assert "</script>" not in html


def test_tables_need_neither_pandas_nor_matplotlib_and_drawing_says_what_it_needs():
    code = """
import sys
sys.modules["pandas"] = sys.modules["matplotlib"] = None
from hf_attn_dynamics import HeadScores, plot_head_maps
scores = HeadScores({"encoder": [[0.5, 1.0]]})
assert "<table" in scores._repr_html_()
for draw in (scores.plot, lambda: plot_head_maps({"": dict(scores)}, "score")):
    try:
        draw()
    except ImportError as error:
        print(error)
"""
    (result,) = python(["-c", code])
    assert result.stdout.splitlines() == ["pictures need matplotlib: pip install matplotlib."] * 2, result.stderr
