# Licensed under the Apache License, Version 2.0.
"""Summary of `prune_heads`."""

from dataclasses import dataclass

from .base import Record, Summary, hidden, result


@dataclass(kw_only=True)
class PrunedRow(Record):
    """One model: a line of `curve.csv`, and of the printed table."""

    metric: str = hidden()
    method: str = result("dense, how the heads were chosen (gates, michel, random), or from scratch.")
    heads: int = result("Number of heads.")
    value: float = result("The metric on the validation examples.", key="{metric}")
    loss: float = result("Mean loss on the validation examples, in nats.")
    parameters: int = result("Number of parameters.")


@dataclass(kw_only=True)
class PruneSummary(Summary):
    """Results of the first way to choose heads and the first number of heads, unless a description says otherwise."""

    metric: str = result(
        "Metric on the validation examples: accuracy, or for language models perplexity, e to the mean loss. "
        "With causal-lm, the mean is over all tokens but the first of each block; with masked-lm, over masked tokens, "
        "the same ones at each evaluation of a seed."
    )
    heads_total: int = result("Number of heads before pruning.")
    heads_kept: int = result("Number of heads after pruning.")
    metric_dense: float = result("The metric before pruning.")
    metric_pruned: float = result("The metric after pruning.")
    metric_from_scratch: float | None = result(
        "The metric of a model with the same heads, trained from random weights for as many epochs; null without "
        "--from_scratch."
    )
    parameters: dict[str, int] = result("Number of parameters.", per=("dense", "pruned"))
    bytes: dict[str, int] = result("Size of the parameters in bytes.", per=("dense", "pruned"))
    flops_ratio: float = result("FLOPs of a forward pass, pruned over dense.")
    latency_ratio: float = result("Time of a forward pass, pruned over dense.")
    latency_of_ideal: float | None = result("Measured speed-up over the speed-up that the FLOPs allow.")
    latency: dict[str, str | int | None] = result(
        "Device, threads, batch size and tokens per text of the timed passes; the length is null for images.",
        per=("device", "threads", "batch", "length"),
    )
    rows: list[PrunedRow] = result("All models but the dense one.")
    task: str = result("Value of --task.")
    model: str = result("Checkpoint, or the name of the small model.")
    importance: str = result("First way to choose heads.")
    train_examples: int = result("Number of training examples.")
    eval_examples: int = result("Number of validation examples.")
    text: str = result("Name of the data.")


SUMMARY = PruneSummary
