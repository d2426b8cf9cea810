# Licensed under the Apache License, Version 2.0.
"""Summary of `score_norm`."""

from dataclasses import dataclass

from .base import Record, Summary, included, result


@dataclass(kw_only=True)
class RunInterval(Record):
    """A mean over runs with its confidence interval."""

    mean: float = result("Mean over runs.")
    low: float | None = result("Lower bound of the 95 % confidence interval; null for one run.")
    high: float | None = result("Upper bound of this interval; null for one run.")


@dataclass(kw_only=True)
class CurveErrors(Record):
    """Curve errors of words of real sentences."""

    median: float = result("Median over top_words (sst2, sst5).")
    below_tenth: float = result("Fraction of top_words whose error is below 0.1 (sst2, sst5).", key="below_0.1")


@dataclass(kw_only=True)
class WordMoment(Record):
    """One topic word at one epoch, in the first run."""

    word: int = result("Index of the word.")
    epoch: int = result("Epoch.")
    score: dict[str, float] = result("Score of the word, by classifier.")
    norm: dict[str, float] = result("Norm of its embedding vector, by classifier.")


@dataclass(kw_only=True)
class AttendedWords(Record):
    """Means over the words with the highest attention in each sentence, in the first run."""

    purity_first: float = result("Mean topic purity at the first record.")
    purity_last: float = result("Mean topic purity at the last record.")
    occurrences_first: float = result("Mean number of sentences that contain the word, at the first record.")
    occurrences_last: float = result("Mean number of sentences that contain the word, at the last record.")


@dataclass(kw_only=True)
class ExperimentResults(Record):
    """Results of one experiment, by classifier; most keys depend on the experiment."""

    accuracy: dict[str, RunInterval] = result("Fraction of correct test sentences, by classifier.")
    loss: dict[str, float] = result("Training loss in nats, maximum over runs, by classifier.")
    epochs: dict[str, list[int]] = result("Number of updates of each run, by classifier.")
    seconds: float = result("Time of training in seconds.")
    other_score: dict[str, RunInterval] | None = result(
        "Mean score of all words or pairs but topic words, by classifier; in cnn, minus the initial score (synthetic, "
        "cnn).",
        default=None,
        optional=True,
    )
    other_norm: dict[str, RunInterval] | None = result(
        "Mean norm of their vectors; in cnn, of the vectors minus the initial ones (synthetic, cnn).",
        default=None,
        optional=True,
    )
    topic_score: dict[str, RunInterval] | None = result(
        "The same mean score for topic words or pairs (synthetic, cnn).", default=None, optional=True
    )
    topic_norm: dict[str, RunInterval] | None = result(
        "The same mean norm for topic words or pairs (synthetic, cnn).", default=None, optional=True
    )
    max_other_score: dict[str, float] | None = result(
        "Largest absolute score of these other words, over runs (synthetic, cnn).", default=None, optional=True
    )
    attended: dict[str, AttendedWords] | None = result(
        "Words with the highest attention, by classifier (sst2).", default=None, optional=True
    )
    max_curve_error: dict[str, float | CurveErrors] | None = result(
        "Largest |norm − theory| along the curves (corollary 1), by classifier: over topic words and runs "
        "(synthetic), over the scores that all variances reach (query), or per word (sst2, sst5).",
        default=None,
        optional=True,
    )
    max_residual: dict[str, float] | None = result(
        "Largest absolute residual of theorem 1 from the first to the last epoch, over topic words and runs, by "
        "classifier (synthetic).",
        default=None,
        optional=True,
    )
    epoch_of_loss: dict[str, int | None] | None = result(
        "First recorded epoch with a training loss of at most 0.1, by classifier; null if there is none (ablation).",
        default=None,
        optional=True,
    )
    enhancement: WordMoment | None = result(
        "The word with the largest score in TC, at the epoch at which TC reaches this loss (ablation).",
        default=None,
        optional=True,
    )
    diminution: WordMoment | None = result(
        "The word with the lowest score in TC until then, at the epoch of this score (ablation).",
        default=None,
        optional=True,
    )
    top_words: dict[str, list[str]] | None = result(
        "Words with the largest scores in descending order, by classifier (sst2, sst5).", default=None, optional=True
    )


@dataclass(kw_only=True)
class ScoreNormSummary(Summary):
    """Results per experiment."""

    experiments: dict[str, ExperimentResults] = included(per="EXPERIMENT")


SUMMARY = ScoreNormSummary
