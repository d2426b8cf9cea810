# Licensed under the Apache License, Version 2.0.
"""Summary of `learn_to_copy`."""

from dataclasses import dataclass

from .base import Record, Summary, included, result


@dataclass(kw_only=True)
class CopyingResults(Record):
    """Results of one setting."""

    learnt: float = result("Fraction of models that learn to copy.")
    steps: list[int | None] = result("Step at which each model reaches an accuracy of 0.99; null if it does not.")
    accuracy: list[float] = result("Last accuracy of each model.")
    seconds: float = result("Time of training in seconds.")


@dataclass(kw_only=True)
class CopyingSummary(Summary):
    """Results per setting.

    SETTING is an experiment; for the experiment heads, it is alone (one head at a time), all_bad, one_good or
    random_heads.
    """

    settings: dict[str, CopyingResults] = included(per="SETTING")


SUMMARY = CopyingSummary
