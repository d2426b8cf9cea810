# Licensed under the Apache License, Version 2.0.
"""Summary of `compare_translation`."""

from dataclasses import dataclass

from ..arguments.compare_translation import SYSTEMS
from .base import Summary, included, result
from .translation import BLEU, EXACT_MATCH, EXAMPLES, CorpusFacts


NAMES = tuple(SYSTEMS)


@dataclass(kw_only=True)
class ComparisonSummary(Summary):
    """Results per system; null for systems that are not trained. No loss contains the guidance loss."""

    train_nll: dict[str, float] = result(
        "Negative log-likelihood of the training text in nats, mean over the target tokens of the last logging "
        "window, which checkpoints end, too. With a label_smoothing_factor above 0, the smoothed loss.",
        per=NAMES,
        column="train_nll",
    )
    average_train_nll: dict[str, float] = result(
        "The same, mean over all steps: smaller if the system learns faster.", per=NAMES, column="average_train_nll"
    )
    validation_nll: dict[str, float] = result(
        "Negative log-likelihood of the validation text in nats, mean over target tokens, after the last step; "
        "without label smoothing.",
        per=NAMES,
        column="validation_nll",
    )
    bleu: dict[str, float] = result(BLEU, per=NAMES, column="bleu")
    exact_match: dict[str, float] = result(EXACT_MATCH, per=NAMES, column="exact_match")
    seconds_per_step: dict[str, float] = result(
        "Wall-clock time of a step in seconds, without evaluation and data loading.",
        per=NAMES,
        column="seconds_per_step",
    )
    parameters: dict[str, int] = result(
        "Number of parameters, including fixed position embeddings.", per=NAMES, column="parameters"
    )
    eval_curve: dict[str, list] = result(
        "[step, loss] of every evaluation on the validation text; with a label_smoothing_factor above 0, the smoothed "
        "loss.",
        per=NAMES,
    )
    steps: int = result("Number of optimizer steps of each system.")
    steps_to_base_final: int | None = result(
        "Step of the first evaluation at which the loss of guided is at or below the last loss of base; null if there "
        "is none."
    )
    step_ratio: float | None = result("steps_to_base_final over steps; null if that is null.")
    guidance_weight_initial: float | None = result(
        "Guidance weight α_0 at the first step of guided; null if guided is not trained."
    )
    label_smoothing_factor: float = result("Value of --label_smoothing_factor.")
    num_beams: int = result("Number of beams.")
    examples: list[dict[str, str]] = result(f"{EXAMPLES}: source, target, and the translation of each system.")
    corpus: CorpusFacts = included()


SUMMARY = ComparisonSummary
