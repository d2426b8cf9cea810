# Licensed under the Apache License, Version 2.0.
import dataclasses
from dataclasses import dataclass

from hf_attn_dynamics.recipes.summaries.base import Record, Summary, explained, included, result, rows_table


@dataclass(kw_only=True)
class Bounds(Record):
    low: float = result("Lower bound.")
    high: float | None = result("Upper bound; null if there is none.")


@dataclass(kw_only=True)
class Results(Record):
    loss: float = result("Loss.")
    errors: dict[str, float | Bounds] | None = result("Errors by name.", key="errors_0.1", default=None, optional=True)
    rows: list[Bounds] = result("Rows.")


@dataclass(kw_only=True)
class TwoRuns(Summary):
    """Results per run."""

    shared: Bounds = included()
    runs: dict[str, Results] = included(per="RUN")
    steps: dict[str, int] = result("Steps.", per=("first", "second"), more=("third",), column="steps")
    text: str = result("Name of the data.")


BOUNDS = Bounds(low=0.0, high=None)
SUMMARY = TwoRuns(
    shared=Bounds(low=1.0, high=2.0),
    runs={"a": Results(loss=0.5, errors={"x": BOUNDS, "y": 3.0}, rows=[BOUNDS]), "b": Results(loss=0.7, rows=[])},
    steps={"first": 7},
    text="words",
)


def test_keys_of_included_records_stand_among_those_of_the_file():
    assert SUMMARY.to_dict() == {
        "low": 1.0,
        "high": 2.0,
        "a_loss": 0.5,
        "a_errors_0.1": {"x": {"low": 0.0, "high": None}, "y": 3.0},
        "a_rows": [{"low": 0.0, "high": None}],
        "b_loss": 0.7,
        "b_rows": [],
        "steps_first": 7,
        "steps_second": None,
        "text": "words",
    }


def test_keys_of_further_names_are_written_if_there_is_a_value():
    assert "steps_third" not in SUMMARY.to_dict()
    assert dataclasses.replace(SUMMARY, steps={"third": 3}).to_dict()["steps_third"] == 3


def test_a_record_is_read_back_with_the_records_in_it():
    for results in SUMMARY.runs.values():
        assert Results.from_dict(results.to_dict()) == results


def test_every_key_has_a_description_also_in_nested_records():
    documentation = TwoRuns.documentation()
    assert {"low", "RUN_loss", "RUN_errors_0.1", "RUN_errors_0.1.*.low", "RUN_rows[].high"} <= set(documentation)
    assert documentation["steps_first, steps_second, steps_third"] == "Steps."
    assert {key.replace("RUN", "a") for keys in documentation for key in keys.split(", ")} >= set(
        SUMMARY.to_dict()
    ) - {key for key in SUMMARY.to_dict() if key.startswith("b_")}


def test_keys_with_the_same_description_are_explained_together():
    lines = explained(TwoRuns).splitlines()
    assert lines[:3] == ["keys of summary.json:", "  Results per run.", ""]
    assert "  low, RUN_errors_0.1.*.low, RUN_rows[].low" in lines
    assert lines.count("      Lower bound.") == 1


def test_tables_leave_out_columns_without_values():
    assert rows_table([BOUNDS, BOUNDS]) == (["low"], [[0.0], [0.0]])
    assert SUMMARY.table("run", ["first", "second"]) == (["run", "steps"], [["first", 7], ["second", None]])
