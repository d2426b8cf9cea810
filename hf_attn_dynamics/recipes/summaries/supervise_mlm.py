# Licensed under the Apache License, Version 2.0.
"""Summary of `supervise_mlm`."""

from dataclasses import dataclass

from .base import Record, Summary, result


@dataclass(kw_only=True)
class SupervisedRow(Record):
    """One model on one group of cases; a line of `table.csv`. Accuracies are fractions of the cases."""

    model: str = result("The model: initial (before training), unguided or guided.")
    data: str = result('Name of the data: training (a part), validation, or the test data ("test" for parsing).')
    group: str = result(
        'Group of cases: "all", a relation, or a group of the coreference data; with "among mentions", only the head '
        "words of antecedents and of other mentions compete."
    )
    cases: int = result("Number of cases.")
    guided_head: float = result("Accuracy of the head that is guided in the guided model.")
    chosen_head: float = result("Accuracy of the head that is best on the validation data of all cases.")
    chosen: str = result("This head, as layer.head from 0.")
    best_head: float = result("Accuracy of the head that is best on these cases themselves.")
    best: str = result("This head, as layer.head from 0.")
    baselines: dict[str, float] = result(
        "Accuracies of baselines: offset (the word at the most frequent distance in the training data) and, for "
        "antecedents, those of `probe_coreference`.",
        key="{per}",
        per="BASELINE",
    )


@dataclass(kw_only=True)
class SuperviseSummary(Summary):
    """Accuracies of the guided head and of the best unguided heads, and masked-language-model losses."""

    task: str = result("Value of --task.")
    accuracy: dict[str, float] = result(
        "Accuracy over all cases of training (a part), validation and test data: SYSTEM is guided (the guided head), "
        "unguided or initial (the head that is best on the validation data), or the name of a baseline.",
        key="accuracy_{per}",
        per="DATA_SYSTEM",
    )
    accuracy_among_mentions: dict[str, float] = result(
        "For antecedents: the same, where only the head words of antecedents and of other mentions compete.",
        key="accuracy_among_mentions_{per}",
        per="DATA_SYSTEM",
    )
    mlm_loss: dict[str, float] = result(
        "Masked-language-model loss of each model on all data, in nats (mean over masked tokens).",
        key="mlm_loss_{per}",
        per="DATA_MODEL",
    )
    layer: int = result("Layer of the guided head, from 0.")
    head: int = result("Index of the guided head in its layer, from 0.")
    guidance_loss: str = result("Value of --guidance_loss.")
    offset: int = result("Distance of the baseline offset, in words.")
    accuracy_curve: list[list[float]] = result(
        "[step, fraction of the rows of the validation text in which the strongest key of the guided head is the "
        "target] of all evaluations of the guided model; tokens instead of words, with masked tokens."
    )
    rows: list[SupervisedRow] = result("All models, data and groups, as in table.csv.")
    steps: int = result("Optimizer steps of each run.")
    seconds_per_step: dict[str, float | None] = result(
        "Wall time of an optimizer step in seconds, without evaluation.", per=("guided", "unguided")
    )
    new_weights: list[str] = result(
        "Weights that the checkpoint lacks and that are random before training, such as those of a "
        "masked-language-model head; empty for the small model, all of whose weights are."
    )
    model: str = result("Checkpoint, or the name of the small model.")
    train_text: str = result("Name of the training data.")
    train_examples: int = result("Number of training sentences.")
    eval_examples: int = result("Number of validation sentences.")
    test_examples: dict[str, int] = result("Number of sentences of each test data.", per="DATA")
    train_targets: int = result("Number of words of the training sentences with a target.")


SUMMARY = SuperviseSummary
