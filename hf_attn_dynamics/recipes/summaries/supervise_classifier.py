# Licensed under the Apache License, Version 2.0.
"""Summary of `supervise_classifier`."""

from dataclasses import dataclass
from functools import partial

from .base import Record, Summary, result


SYSTEMS = ("guided", "unguided")
MEASURED = (
    "Fraction of the sentences with a rationale in which the strongest key of the first token is a token of the "
    "rationale, {where}: of the best guided head, and of the best head of the unguided model. Heads are chosen by "
    "found on the validation text."
)

of_systems = partial(result, per=SYSTEMS)


@dataclass(kw_only=True)
class RationaleRow(Record):
    """One head of one model: a line of `table.csv`."""

    system: str = result("guided or unguided.")
    layer: int = result("Layer of the head, from 0.")
    head: int = result("Index of the head in its layer, from 0.")
    is_guided: bool = result("Whether the head is guided.")
    found: float = result(
        "Fraction of the validation sentences with a rationale in which the strongest key of the first token is a "
        "token of the rationale."
    )
    found_by_rows: float = result("The same as a fraction of all tokens of these sentences, each a row of attention.")
    test_found: float | None = result("found on the test text; null without one.")
    test_found_by_rows: float | None = result("found_by_rows on the test text; null without one.")


@dataclass(kw_only=True)
class RationaleSummary(Summary):
    """Results of a guided and an unguided model from the same weights, on the same batches."""

    accuracy: dict[str, float] = of_systems("Accuracy on the validation text.", column="accuracy")
    test_accuracy: dict[str, float] | None = of_systems(
        "Accuracy on the test text; null without one.", column="test accuracy"
    )
    loss: dict[str, float] = of_systems("Mean loss of the task on the validation text, in nats.")
    test_loss: dict[str, float] | None = of_systems("The same on the test text; null without one.")
    found: dict[str, float] = of_systems(MEASURED.format(where="on the validation text"), column="found")
    test_found: dict[str, float] | None = of_systems(
        MEASURED.format(where="on the test text") + " Null without one.", column="found (test)"
    )
    found_by_rows: dict[str, float] = of_systems(
        "found of the same heads as a fraction of all tokens of these sentences, each a row of attention."
    )
    test_found_by_rows: dict[str, float] | None = of_systems("The same on the test text; null without one.")
    best_head: dict[str, list[int]] = of_systems("[layer, head] of these heads.", column="head")
    same_head: float = result("found of the same head as best_head_guided, in the unguided model.")
    chance: float = result(
        "Mean fraction of the tokens of a validation sentence that belong to its rationale, over sentences with one."
    )
    rows: list[RationaleRow] = result("All heads of both models, as in table.csv.")
    guidance_loss: str = result("Value of --guidance_loss.")
    guidance_weight_initial: float = result("Guidance weight α at the first step.")
    lexicon: str = result("Files of the lexicon, or the training text.")
    lexicon_words: int = result("Number of words of the lexicon.")
    with_rationale: dict[str, float] = result(
        "Fraction of the sentences with a rationale, by part of the text.", key="{per}_with_rationale", per="PART"
    )
    labels: list[str] = result("Names of the classes.")
    model: str = result("Checkpoint, or the name of the small model.")
    text: str = result("Name of the data.")
    steps: int = result("Optimizer steps of each model.")
    train_examples: int = result("Number of training examples.")
    eval_examples: int = result("Number of validation examples.")
    test_examples: int | None = result("Number of test examples; null without a test text.")


SUMMARY = RationaleSummary
