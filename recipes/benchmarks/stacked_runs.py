# Licensed under the Apache License, Version 2.0.
"""What it saves to train the runs of the synthetic task (five seeds of three classifiers) at once.

    python recipes/benchmarks/stacked_runs.py --output_dir runs/stacked_runs

Time for an epoch of all runs, as seconds of the CPU, so that other programs do not count. The three ways take turns;
results are medians. A stack is to be compared with two things:

    usual loop      forward pass, backward pass and `torch.optim.SGD` on each model, one run after the other: what one
                    would write without a stack. The saving is that of stacking and of what a stack sums up front
    stacks of one   the stack's own training, with one run in each: the saving is that of stacking alone, of the calls
                    that 15 runs share. What is left is arithmetic, which they do not share

Keys of `summary.json`: `seconds`, by the names of these; and the settings.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from benchmarking import BenchmarkArguments, medians, take_turns, write_summary

from hf_attn_dynamics import BowAttentionConfig, BowAttentionForSequenceClassification
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.data import topic_sentences
from hf_attn_dynamics.recipes.arguments.base import flag
from hf_attn_dynamics.recipes.run import run_recipe
from hf_attn_dynamics.training import BowAttentionStack, LabelledSentences, stacked_gradient_descent


VOCAB_SIZE = 5009


@dataclass
class StackArguments(BenchmarkArguments):
    """How many runs are trained, and how long."""

    num_seeds: int = flag(5, "Number of runs of each classifier, with consecutive seeds.", earlier="seeds")
    epochs: int = flag(50, "Number of epochs of a turn.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "num_seeds", "epochs")


def build(seeds: Iterable[int]) -> list[BowAttentionForSequenceClassification]:
    models = []
    for seed in seeds:
        for classifier in ("fixed", "linear", "mlp"):
            torch.manual_seed(seed)
            config = BowAttentionConfig(vocab_size=VOCAB_SIZE, num_labels=4, classifier=classifier)
            models.append(BowAttentionForSequenceClassification(config))
    return models


def descend(models: list[BowAttentionForSequenceClassification], data: LabelledSentences, epochs: int) -> None:
    stack = BowAttentionStack(models)
    rates = stack.learning_rates(0.1)
    stacked_gradient_descent(lambda: stack.losses(data), stack.parameters, rates, epochs)


def loop(model: BowAttentionForSequenceClassification, ids: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(epochs):
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()


def main(args: StackArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    train, _ = topic_sentences()
    data = LabelledSentences(train["input_ids"], train["label"], VOCAB_SIZE)
    ids = torch.tensor(train["input_ids"][:])
    seeds = range(args.seed, args.seed + args.num_seeds)
    ways: dict[str, Callable[[], object]] = {
        "stacked": lambda: descend(build(seeds), data, args.epochs),
        "usual loop": lambda: [loop(model, ids, data.labels, args.epochs) for model in build(seeds)],
        "stacks of one": lambda: [descend([model], data, args.epochs) for model in build(seeds)],
    }
    turns = medians(take_turns(ways, args.rounds, warm_up=0).cpu)
    seconds = {name: value / args.epochs for name, value in turns.items()}
    rows = [[name, 1000 * value, seconds["stacked"] / value] for name, value in seconds.items()]
    print(format_table(["training", "ms for an epoch of all runs", "stacked / this"], rows))
    return write_summary(args, {"seconds": seconds})


if __name__ == "__main__":
    run_recipe(main)
