# Licensed under the Apache License, Version 2.0.
"""Summary of `keyword_drift`."""

from dataclasses import dataclass

from .base import Record, Summary, result


@dataclass(kw_only=True)
class PositionLogOdds(Record):
    """Log-odds γ of the positive class, mean over sentences, if attention selects one position."""

    keyword: float = result("The keyword.")
    next: float = result("The word after the keyword.")
    mean: float = result("All words, with uniform attention.")
    last: float = result("The last word.")


@dataclass(kw_only=True)
class DriftSummary(Summary):
    """Results of one classifier."""

    log_odds: PositionLogOdds = result("Log-odds γ of the positive class after the last step, by attended position.")
    accuracy: float = result("Accuracy on new sentences, mean over the last 10 steps.")
    hypothesis_2: list[int] | None = result(
        "First and last step at which the order of hypothesis 2 holds; null if it never does."
    )
    overtaken: int | None = result("Step from which γ at the last word stays above γ at the keyword; null if none.")
    observation_3: int | None = result("Step from which the order of observation 3 holds to the end; null if none.")
    seconds: float = result("Time of training and measurements in seconds.")


SUMMARY = DriftSummary
