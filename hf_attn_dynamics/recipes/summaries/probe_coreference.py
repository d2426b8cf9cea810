# Licensed under the Apache License, Version 2.0.
"""Summary of `probe_coreference`."""

from dataclasses import dataclass

from .base import Record, Summary, result


BASELINES = ("previous_word", "first_word", "nearest_mention", "chance")


@dataclass(kw_only=True)
class CoreferenceRow(Record):
    """One model on one group of items of a dataset. Accuracies are fractions of the items."""

    model: str = result("Name of the model.")
    data: str = result("Name of the data.")
    group: str = result('Group of items, or "all".')
    items: int = result("Number of items.")
    best: float = result("Accuracy of the best head.")
    site: str = result("Kind of attention of the best head, such as encoder.")
    layer: int = result("Layer of the best head, from 0.")
    head: int = result("Index of the best head in its layer, from 0.")
    mean: float = result("Mean accuracy of all heads.")
    skipped: int = result("Number of items of the data that were left out.")
    baselines: dict[str, float] = result("Accuracies of the baselines.", key="{per}", per=BASELINES)


@dataclass(kw_only=True)
class CoreferenceSummary(Summary):
    """Results of all models on all data."""

    rows: list[CoreferenceRow] = result("All models, data and groups of items.")
    models: list[str] = result("Names of the models.")
    data: list[str] = result("Names of the data.")
    special_tokens: dict[str, bool] = result("Whether special tokens competed for attention, by data.")
    mentions_only: dict[str, bool] = result("Whether only the heads of mentions competed, by data.")


SUMMARY = CoreferenceSummary
