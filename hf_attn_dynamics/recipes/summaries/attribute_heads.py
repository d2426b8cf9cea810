# Licensed under the Apache License, Version 2.0.
"""Summary of `attribute_heads`."""

from dataclasses import dataclass

from .base import Record, Summary, result


@dataclass(kw_only=True)
class ClaimResult(Record):
    """A claim of the paper; `AttributionFindings.claims` has the metrics and the criteria."""

    holds: bool | None = result("Whether the claim holds; null if it is not judged.")
    holds_in: float | None = result(
        "Fraction of the bootstrap resamples of the texts in which the claim holds; left out, like the intervals, if "
        "the texts were not resampled, and if there are no maps of the types that the claim is about.",
        optional=True,
    )
    metrics: dict[str, float | None] = result(
        "Metric of the claim; null if there are no maps of the types that it is about.", key="{per}", per="METRIC"
    )
    intervals: dict[str, list[float] | None] | None = result(
        "95 % interval of each metric, by its name: the 2.5 % and 97.5 % quantiles over the resamples.", optional=True
    )


@dataclass(kw_only=True)
class AttributeSummary(Summary):
    """Correlations of attention with contributions, and the claims of the paper."""

    model: str = result("Checkpoint, or the demonstration.")
    sentences: int = result("Number of texts that were read; a pair is one text.")
    tokens: int = result("Number of their tokens.")
    too_short: int = result("Number of texts with fewer than min_length tokens, which were left out.")
    too_long: int = result("Number of texts with more than max_length tokens, which were left out.")
    identifiable: int = result("Number of texts with at most as many tokens as a head has dimensions.")
    layers: int = result("Number of layers.")
    heads: int = result("Number of heads.")
    method: str = result("How global contributions were computed: exact or probes.")
    norm: str = result("Norm of the contributions: frobenius or spectral.")
    pearson: dict[str, float] = result(
        "Pearson correlation of attention with local and global contributions, and of value-weighted attention "
        "‖a·v‖ with local contributions (value_weighted); mean over heads."
    )
    spearman: dict[str, float] = result("Spearman correlation of the same quantities; mean over heads.")
    claims: dict[str, ClaimResult] = result(
        "Claims that the paper makes about BERT, by name. `AttributionFindings.claims` has the criteria."
    )
    claims_not_judged: dict[str, str] = result(
        "Reason for each claim that is not judged: fewer than 20 texts, no maps of the types that it is about, or "
        "fewer than 95 % of the resamples agree with all texts."
    )
    seconds: float = result("Time of the measurements.")


SUMMARY = AttributeSummary
