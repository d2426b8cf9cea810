# Licensed under the Apache License, Version 2.0.
"""Summary of `prune_heads`."""

from dataclasses import dataclass

from .base import Record, Summary, hidden, result


@dataclass(kw_only=True)
class PrunedRow(Record):
    """One model: a line of `curve.csv`, and of the printed table."""

    metric: str = hidden()
    method: str = result(
        "dense, the way to choose what is removed (gates, michel, fisher, margin, random), or from scratch."
    )
    target: float | None = result("The speed-up that was asked for.", default=None, optional=True)
    speedup: float | None = result(
        "Time of the dense model over the time of this one, in the same rounds.", default=None, optional=True
    )
    more_speedups: dict[str, float] | None = result(
        "The same for other batch sizes and lengths.", key="speedup_{per}", per="SHAPE", default=None
    )
    predicted_speedup: float | None = result(
        "The speed-up that the table of measured times predicts.", default=None, optional=True
    )
    speedup_of_ideal: float | None = result(
        "The measured speed-up over the one that FLOPs allow.", default=None, optional=True
    )
    heads: int = result("Number of heads.")
    units: int | None = result("Number of feed-forward units.", default=None, optional=True)
    blocks: int | None = result(
        "Number of attention and feed-forward blocks with heads or units.", default=None, optional=True
    )
    value: float = result("The metric on the validation examples.", key="{metric}")
    untrained: float | None = result(
        "The metric before training: after the parts were removed and, with --refit, projections refitted.",
        key="{metric}_untrained",
        default=None,
        optional=True,
    )
    loss: float = result("Mean loss on the validation examples, in nats.")
    parameters: int = result("Number of parameters.")
    bytes: int | None = result("Size of the parameters in bytes.", default=None, optional=True)
    decoding_speedup: float | None = result(
        "Speed-up of decoding one token with a filled cache.", default=None, optional=True
    )
    cache_bytes: float | None = result(
        "Bytes of keys and values that the cache holds for each token.", default=None, optional=True
    )


@dataclass(kw_only=True)
class PruneSummary(Summary):
    """Results of the first way to choose what is removed and of the first goal, unless a description says more."""

    metric: str = result(
        "Metric on the validation examples: accuracy, or for language models perplexity, e to the mean loss. "
        "With causal-lm, the mean is over all tokens but the first of each block; with masked-lm, over masked tokens, "
        "the same ones at each evaluation of a seed."
    )
    heads_total: int = result("Number of heads before pruning.")
    heads_kept: int = result("Number of heads after pruning.")
    units_total: int | None = result("Feed-forward units before pruning.", default=None, optional=True)
    units_kept: int | None = result("Feed-forward units after pruning.", default=None, optional=True)
    target_speedup: list[float] | None = result("Speed-ups that were asked for.", default=None, optional=True)
    largest_speedups: dict[str, float] | None = result(
        "Speed-up without any heads, without any units, and without both, by the table of measured times.",
        key="largest_speedup_{per}",
        per=("heads", "units", "blocks"),
        default=None,
        optional=True,
    )
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
    importance: str = result("First way to choose what is removed.")
    train_examples: int = result("Number of training examples.")
    eval_examples: int = result("Number of validation examples.")
    text: str = result("Name of the data.")


SUMMARY = PruneSummary
