# Licensed under the Apache License, Version 2.0.
"""Summary of `distil_heads`."""

from dataclasses import dataclass
from functools import partial

from .base import Summary, result


SYSTEMS = ("labels", "logits", "attention", "relations")

of_systems = partial(result, per=SYSTEMS)


@dataclass(kw_only=True)
class DistilSummary(Summary):
    """Results of the students, which start from the same weights and see the same batches; null for systems left out.

    `labels` learns from labels alone, `logits` from labels and logits of the teacher, `attention` from these and its
    attention, `relations` from these and the relations of its last layer.
    """

    accuracy: dict[str, float] = of_systems("Accuracy on the validation text after the last step.", column="accuracy")
    best_accuracy: dict[str, float] = of_systems(
        "Highest accuracy of all evaluations on the validation text.", column="best"
    )
    steps_to_best: dict[str, int] = of_systems("First step with this accuracy.", column="at step")
    steps_to_labels: dict[str, int | None] = of_systems(
        "First step with at least the best accuracy of labels; null if it is never reached, or without labels.",
        column="best of labels at step",
    )
    mean_accuracy: dict[str, float] = of_systems(
        "Mean accuracy of all evaluations on the validation text.", column="mean"
    )
    test_accuracy: dict[str, float] | None = of_systems(
        "Accuracy on the test text after the last step; null without one.", column="test accuracy"
    )
    loss: dict[str, float] = of_systems("Mean loss of the task on the validation text after the last step, in nats.")
    agreement: dict[str, float] = of_systems(
        "Fraction of the validation text that student and teacher give the same class, after the last step.",
        column="same as teacher",
    )
    curve: dict[str, list[list[float]]] = of_systems("[step, accuracy on the validation text] of all evaluations.")
    guidance_weight_initial: dict[str, float] = of_systems(
        "Weight of the attention or relations at the first step; null without them."
    )
    teacher_accuracy: float = result("Accuracy of the teacher on the validation text.")
    teacher_test_accuracy: float | None = result("Accuracy of the teacher on the test text; null without one.")
    teacher_layers: int = result("Number of layers of the teacher.")
    student_layers: list[int] = result("Layers of the teacher that the students start from, from 0.")
    distillation_weight: float = result("Weight of the logits.")
    distillation_temperature: float = result("Temperature of the logits.")
    labels: list[str] = result("Names of the classes.")
    model: str = result("Checkpoint, or the name of the small model.")
    text: str = result("Name of the data.")
    steps: int = result("Optimizer steps of each student.")
    train_examples: int = result("Number of training examples.")
    eval_examples: int = result("Number of validation examples.")
    test_examples: int | None = result("Number of test examples; null without a test text.")


SUMMARY = DistilSummary
