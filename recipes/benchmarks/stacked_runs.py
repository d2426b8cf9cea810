# Licensed under the Apache License, Version 2.0.
"""What it saves to train the runs of the synthetic task (five seeds of three classifiers) at once.

    python recipes/benchmarks/stacked_runs.py --threads 1 --output runs/stacked_runs.json

Time for an epoch of all runs, as seconds of the CPU, so that other programs do not count. The three ways take turns;
figures are medians. A stack is to be compared with two things:

    usual loop      forward pass, backward pass and `torch.optim.SGD` on each model, one run after the other: what one
                    would write without a stack. The saving is that of stacking and of what a stack sums up front
    stacks of one   the stack's own training, with one run in each: the saving is that of stacking alone, of the calls
                    that 15 runs share. What is left is arithmetic, which they do not share
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hf_attn_dynamics import BowAttentionConfig, BowAttentionForSequenceClassification
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.data import topic_sentences
from hf_attn_dynamics.recipes.run import provenance, write_json
from hf_attn_dynamics.training import BowAttentionStack, LabelledSentences, stacked_gradient_descent


VOCAB_SIZE = 5009


def build(seeds: int) -> list[BowAttentionForSequenceClassification]:
    models = []
    for seed in range(seeds):
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


def benchmark(seeds: int, epochs: int, rounds: int) -> dict[str, float]:
    """Seconds for an epoch of all runs, by how they are trained."""
    train, _ = topic_sentences()
    data = LabelledSentences(train["input_ids"], train["label"], VOCAB_SIZE)
    ids = torch.tensor(train["input_ids"][:])
    ways: dict[str, Callable[[], object]] = {
        "stacked": lambda: descend(build(seeds), data, epochs),
        "usual loop": lambda: [loop(model, ids, data.labels, epochs) for model in build(seeds)],
        "stacks of one": lambda: [descend([model], data, epochs) for model in build(seeds)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            started = time.process_time()
            run()
            seconds[name].append((time.process_time() - started) / epochs)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each of the three classifiers")
    parser.add_argument("--epochs", type=int, default=50, help="of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the three take turns")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", type=Path, help="also write JSON here")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    seconds = benchmark(args.seeds, args.epochs, args.rounds)
    rows = [[name, 1000 * value, seconds["stacked"] / value] for name, value in seconds.items()]
    print(format_table(["training", "ms for an epoch of all runs", "stacked / this"], rows))
    if args.output:
        values = {"seconds": seconds, "threads": args.threads, "seeds": args.seeds, "epochs": args.epochs}
        write_json(args.output, {**values, "rounds": args.rounds, **provenance(0, "cpu")})
    return seconds


if __name__ == "__main__":
    main()
