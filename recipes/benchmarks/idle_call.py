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
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertForMaskedLM
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.run import SUMMARY, check_output_dir, provenance, run_recipe, write_json


CLASSES = {"stock": (BertForMaskedLM, BertConfig), "headwise": (HeadwiseBertForMaskedLM, HeadwiseBertConfig)}


@dataclass
class BenchmarkArguments:
    """Sizes of the model and the batch."""

    num_hidden_layers: int = field(default=2, metadata={"help": "Layers."})
    hidden_size: int = field(default=32, metadata={"help": "Width."})
    num_attention_heads: int = field(default=4, metadata={"help": "Heads."})
    sentences: int = field(default=8, metadata={"help": "Sentences of the batch."})
    length: int = field(default=32, metadata={"help": "Tokens of a sentence."})
    rounds: int = field(default=2000, metadata={"help": "Forward passes of each pair of models."})
    pairs: int = field(default=10, metadata={"help": "Pairs of models that are built."})
    output_dir: str | None = field(default=None, metadata={"help": "Where to write summary.json, if anywhere."})


def build(name: str, args: BenchmarkArguments) -> PreTrainedModel:
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


def make_batch(args: BenchmarkArguments) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (args.sentences, args.length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, args.length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def time_pair(args: BenchmarkArguments, batch: dict, names: list[str]) -> dict[str, list[int]]:
    """Nanoseconds of each pass of both models, which are built in the order of their names."""
    models = {name: build(name, args) for name in names}
    taken: dict[str, list[int]] = {name: [] for name in names}
    order = random.Random(0)
    for turn in range(args.rounds + 20):
        for name in order.sample(names, 2):
            start = time.process_time_ns()
            models[name](**batch)
            if turn >= 20:  # the first ones warm up
                taken[name].append(time.process_time_ns() - start)
    return taken


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
def main(args: BenchmarkArguments) -> dict:
    """Run the benchmark; returns the summary."""
    with refuse_bad_input():
        for name in ("rounds", "pairs", "sentences", "length"):
            if getattr(args, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}.")
        if args.output_dir:
            check_output_dir(args.output_dir, {}, resume=False)
    torch.set_num_threads(1)
    batch = make_batch(args)
    ratios, microseconds = [], {name: [] for name in CLASSES}
    for pair in range(args.pairs):
        names = list(CLASSES) if pair % 2 else list(CLASSES)[::-1]
        taken = time_pair(args, batch, names)
        ratios.append(statistics.median(b / a for a, b in zip(taken["stock"], taken["headwise"])))
        for name in CLASSES:
            microseconds[name].append(statistics.median(taken[name]) / 1000)
    summary = {
        **{f"microseconds_{name}": statistics.median(values) for name, values in microseconds.items()},
        "time_headwise_to_stock": statistics.median(ratios),
        "time_headwise_to_stock_least": min(ratios),
        "time_headwise_to_stock_largest": max(ratios),
        **{f"python_calls_{name}": python_calls(build(name, args), batch) for name in CLASSES},
    }
    header = ["stock (µs)", "headwise (µs)", "headwise / stock", "least", "largest", "calls, stock", "calls, headwise"]
    print(format_table(header, [list(summary.values())]))
    summary |= {key: value for key, value in asdict(args).items() if key != "output_dir"} | provenance(0, "cpu")
    if args.output_dir:
        write_json(Path(args.output_dir) / SUMMARY, summary)
    return summary


if __name__ == "__main__":
    run_recipe(main, BenchmarkArguments)
