# Licensed under the Apache License, Version 2.0.
"""Summary of `pretrain_ag`."""

from dataclasses import dataclass
from typing import Any

from .base import Summary, hidden, result


RUNS = ("guided", "unguided")
SUPPRESSED = "suppressed"
OF_RTD = "With --objective rtd: "
OF_NSP = "With --objective mlm+nsp: "
WATCHED = "With --head_dynamics: "


def of_runs(description: str, **settings: Any) -> Any:
    """A result of each run; optional ones are None by default."""
    default = {"default": None} if settings.get("optional") else {}
    return result(description, per=RUNS, more=[SUPPRESSED], **settings, **default)


@dataclass(kw_only=True)
class PretrainSummary(Summary):
    """Results of each run; those of the unguided one are null without --compare.

    Keys of the suppressed run are left out without --suppress_steps.
    """

    loss: str = hidden()
    loss_eval: dict[str, float] = of_runs(
        "Loss on the evaluation text after the last step, in nats. LOSS is mlm (mean over masked tokens; also with "
        "--objective mlm+nsp), clm (mean over all tokens but the first of each example) or rtd (of the discriminator "
        "alone, mean over tokens); guidance is not part of it.",
        key="{loss}_loss_eval_{per}",
        column="eval loss",
    )
    loss_train: dict[str, float] = of_runs(
        "Training loss over the last logging window, in nats.", key="{loss}_loss_train_{per}"
    )
    loss_train_mean: dict[str, float] = of_runs(
        "Mean training loss over all steps, in nats.", key="{loss}_loss_train_mean_{per}", column="mean train loss"
    )
    nsp_loss_eval: dict[str, float] | None = of_runs(
        f"{OF_NSP}loss of next-sentence prediction on the evaluation text, in nats.", optional=True
    )
    nsp_loss_train_mean: dict[str, float] | None = of_runs(
        f"{OF_NSP}mean training loss of next-sentence prediction over all steps, in nats.", optional=True
    )
    generator_loss_eval: dict[str, float] | None = of_runs(
        f"{OF_RTD}loss of a trained generator on the evaluation text (mean over masked tokens), in nats.",
        optional=True,
    )
    replaced_precision: dict[str, float] | None = of_runs(
        f"{OF_RTD}precision of the replaced tokens that are found.", column="precision", optional=True
    )
    replaced_recall: dict[str, float] | None = of_runs(
        f"{OF_RTD}recall of the replaced tokens.", column="recall", optional=True
    )
    replaced_f1: dict[str, float] | None = of_runs(f"{OF_RTD}F1 of the replaced tokens.", optional=True)
    replaced_share: dict[str, float] | None = of_runs(
        f"{OF_RTD}fraction of the tokens that are replaced.", optional=True
    )
    positional_heads: dict[str, int] | None = of_runs(
        f"{WATCHED}heads with their largest weight at the same offset for 90 % of the queries, after the last step.",
        column="positional heads",
        optional=True,
    )
    positional_step: dict[str, float | None] | None = of_runs(
        f"{WATCHED}step after which a head is measured as positional for the first time, median over the heads that "
        "ever are; null if none is.",
        column="positional at step",
        optional=True,
    )
    seconds_per_step: dict[str, float | None] = of_runs(
        "Wall time of an optimizer step in seconds, without evaluation and data loading.", column="seconds a step"
    )
    tokens_per_second: dict[str, float | None] = of_runs(
        "Non-padding tokens that are trained on per second of these steps.", column="tokens a second"
    )
    eval_curve: dict[str, list[list[float]]] = of_runs("[step, loss on the evaluation text] of all evaluations.")
    steps: int = result("Optimizer steps of each run.")
    steps_to_unguided_final: int | None = result(
        "First step at which the guided run is evaluated at or below the final loss of the unguided run; null if "
        "there is none."
    )
    step_ratio: float | None = result("steps_to_unguided_final over steps.")
    guidance_weight_initial: float | None = result("Guidance weight α at the first step.")
    suppressed_steps_to_unguided_final: int | None = result(
        "First step at which the suppressed run is evaluated at or below the final loss of the unguided run; left out "
        "if there is none.",
        optional=True,
        default=None,
    )
    suppress_steps: int | None = result("Value of --suppress_steps.", optional=True, default=None)
    suppress_weight: float | None = result(
        "Weight of the loss that pushes heads away from their patterns, in the first --suppress_steps steps.",
        optional=True,
        default=None,
    )
    suppressed_attention: list[list[float]] | None = result(
        "[step, attention of the suppressed heads on their patterns] of all logged steps, in training; with the "
        "reduction row_mean, the mean over heads and tokens, summed over patterns and layers.",
        optional=True,
        default=None,
    )
    num_parameters: int = result("Number of parameters.")
    plateau: float | None = result(
        "Loss of a model that knows frequencies alone, in nats: the entropy of the tokens (mlm, clm) or of the "
        "replaced fraction (rtd with the unigram generator); null with a trained generator."
    )
    vocab_size: int = result("Vocabulary size.")
    train_examples: int | None = result("Number of training examples; null with --streaming.")
    eval_examples: int = result("Number of evaluation examples.")
    train_text: str = result("Name of the training text.")
    objective: str = result("Value of --objective.")
    architecture: str = result("Architecture (model_type).")


SUMMARY = PretrainSummary
