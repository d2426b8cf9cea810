# Licensed under the Apache License, Version 2.0.
"""Summaries: keys, nulls and tables from the fields of a dataclass, and the page that documents all of them."""

from dataclasses import dataclass

import pytest
from summary_tables import FILE, page, summaries

from hf_attn_dynamics.recipes.summaries.base import PROVENANCE, Record, Summary, explained, hidden, result, rows_table


@dataclass(kw_only=True)
class Row(Record):
    metric: str = hidden()
    heads: int = result("Number of heads.")
    value: float = result("The metric.", key="{metric}")


@dataclass(kw_only=True)
class Example(Summary):
    loss: str = hidden()
    steps: int = result("Number of steps.")
    losses: dict[str, float] = result("Loss.", key="{loss}_loss_{per}", per=("guided", "unguided"), column="loss")
    seconds: dict[str, float] = result("Time.", per=("guided", "unguided"), column="s")
    scores: dict[str, float] = result("Scores.", key="{per}_score", per="TASK")
    precision: float | None = result("Precision.", optional=True, default=None)
    rows: list[Row] = result("Models.")


EXAMPLE = Example(
    loss="mlm",
    steps=3,
    losses={"guided": 1.0},
    seconds={"guided": 0.5, "unguided": 0.25},
    scores={"cola": 0.1},
    rows=[Row(metric="accuracy", heads=4, value=0.5)],
)


def test_a_summary_has_a_key_for_each_name_and_null_where_a_name_has_no_value():
    assert EXAMPLE.to_dict() == {
        "steps": 3,
        "mlm_loss_guided": 1.0,
        "mlm_loss_unguided": None,
        "seconds_guided": 0.5,
        "seconds_unguided": 0.25,
        "cola_score": 0.1,
        "rows": [{"heads": 4, "accuracy": 0.5}],
    }


def test_documentation_has_the_same_keys_with_unknown_words_in_capitals():
    assert list(Example.documentation()) == [
        "steps",
        "LOSS_loss_guided, LOSS_loss_unguided",
        "seconds_guided, seconds_unguided",
        "TASK_score",
        "precision",
        "rows",
        "rows[].heads",
        "rows[].METRIC",
        *PROVENANCE,
    ]
    assert "  LOSS_loss_guided, LOSS_loss_unguided\n      Loss." in explained(Example)


def test_tables_have_a_line_for_each_name_or_row():
    header, lines = EXAMPLE.table("run", ["guided", "unguided"])
    assert (header, lines) == (["run", "loss", "s"], [["guided", 1.0, 0.5], ["unguided", None, 0.25]])
    assert rows_table(EXAMPLE.rows) == (["heads", "accuracy"], [[4, 0.5]])


@pytest.mark.parametrize("name", summaries())
def test_every_key_is_described(name):
    documentation = summaries()[name].documentation()
    assert all(text.endswith(".") for text in documentation.values())


def test_the_page_has_all_summaries():
    assert FILE.read_text(encoding="utf-8") == page(), "run python tests/reference/summary_tables.py"
