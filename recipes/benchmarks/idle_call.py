# Licensed under the Apache License, Version 2.0.
"""What a headwise model costs when nothing is requested of its heads: one forward pass, beside the stock model.

    python recipes/benchmarks/idle_call.py
    python recipes/benchmarks/idle_call.py --rounds 500 --output_dir runs/benchmark

The model is so small that Python takes most of the time, since the cost does not depend on the sizes: a few checks of
each batch, and one more function call in each layer. Times are processor time of one thread, the two models taking
turns in random order; a ratio is the median over rounds of the ratio within a round. Where in memory a model happens
to lie changes its time by a percent or two. So both are built anew several times, in either order, and the median of
these ratios is the result, with the least and the largest.

Keys of `summary.json`: `microseconds_stock`, `microseconds_headwise`, `time_headwise_to_stock`,
`time_headwise_to_stock_least`, `time_headwise_to_stock_largest`; `python_calls_stock` and `python_calls_headwise`, the
Python functions that are called in one pass; and the settings.
"""

import random
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarking import BenchmarkArguments, median_ratio, medians, take_turns, write_summary
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertForMaskedLM
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.arguments.base import flag
from hf_attn_dynamics.recipes.run import run_recipe


CLASSES = {"stock": (BertForMaskedLM, BertConfig), "headwise": (HeadwiseBertForMaskedLM, HeadwiseBertConfig)}


@dataclass
class IdleCallArguments(BenchmarkArguments):
    """Sizes of the models and the batch."""

    num_hidden_layers: int = flag(2, "Number of layers.")
    hidden_size: int = flag(32, "Hidden size; feed-forward layers are twice as wide.")
    num_attention_heads: int = flag(4, "Number of heads per layer.")
    sentences: int = flag(8, "Batch size, in sentences.")
    length: int = flag(32, "Length of the sentences, in tokens.")
    rounds: int = flag(2000, "Number of measured forward passes of each model.")
    pairs: int = flag(10, "Number of pairs of models.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "pairs", "sentences", "length")


def build(name: str, args: IdleCallArguments) -> PreTrainedModel:
    model_class, config_class = CLASSES[name]
    config = config_class(
        vocab_size=100,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        intermediate_size=2 * args.hidden_size,
        max_position_embeddings=args.length,
    )
    return model_class(config).eval()


def make_batch(args: IdleCallArguments) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (args.sentences, args.length), generator=torch.Generator().manual_seed(args.seed))
    mask = torch.ones_like(ids)
    mask[0, args.length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def time_pair(args: IdleCallArguments, batch: dict, names: list[str]) -> dict[str, list[float]]:
    """CPU seconds of each pass of both models, which are built in the order of their names."""
    models = {name: build(name, args) for name in names}
    passes = {name: partial(model, **batch) for name, model in models.items()}
    return take_turns(passes, args.rounds, warm_up=20, order=random.Random(args.seed)).cpu


def python_calls(model: PreTrainedModel, batch: dict) -> int:
    """Number of Python functions that are called in one forward pass."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    model(**batch)
    sys.setprofile(count)
    try:
        model(**batch)
    finally:
        sys.setprofile(None)
    return calls


@torch.no_grad()
def main(args: IdleCallArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    batch = make_batch(args)
    ratios, microseconds = [], {name: [] for name in CLASSES}
    for pair in range(args.pairs):
        names = list(CLASSES) if pair % 2 else list(CLASSES)[::-1]
        taken = time_pair(args, batch, names)
        ratios.append(median_ratio(taken, "headwise", "stock"))
        for name, median in medians(taken).items():
            microseconds[name].append(1e6 * median)
    results = {
        **{f"microseconds_{name}": median for name, median in medians(microseconds).items()},
        "time_headwise_to_stock": statistics.median(ratios),
        "time_headwise_to_stock_least": min(ratios),
        "time_headwise_to_stock_largest": max(ratios),
        **{f"python_calls_{name}": python_calls(build(name, args), batch) for name in CLASSES},
    }
    header = ["stock (µs)", "headwise (µs)", "headwise / stock", "least", "largest", "calls, stock", "calls, headwise"]
    print(format_table(header, [list(results.values())]))
    return write_summary(args, results)


if __name__ == "__main__":
    run_recipe(main)
