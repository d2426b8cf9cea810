# Licensed under the Apache License, Version 2.0.
"""What each attribution of `attribution_faithfulness` costs, beside a forward pass, for short and long sentences.

    python recipes/benchmarks/attribution_cost.py
    python recipes/benchmarks/attribution_cost.py --methods alti globenc attn_lrp --lengths 64 256 1024

One sentence of random tokens is read by a BERT with random weights and a classifier of two classes. Methods take turns
in one process; their times are CPU seconds, and ratios are medians over rounds of the ratio within a round. Peak
memory is the largest resident size of a process of its own for each method, less the size before its work began (Linux
only). A method that takes longer than `--limit` seconds at one length is left out at longer ones.

Keys of `summary.json`: `rows`, by length, the cheapest first: `method`, `length`, `seconds`, `to_forward` (seconds by
those of a forward pass), and `memory_mb`; and the settings.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from attribution_faithfulness import METHODS, Batch
from benchmarking import (
    BenchmarkArguments,
    in_new_process,
    median_ratio,
    medians,
    peak_resident_mb,
    take_turns,
    write_summary,
)
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.run import run_recipe


FORWARD, RANDOM = "forward", "random"
NAMES = [name for name in METHODS if name != RANDOM]


@dataclass
class CostArguments(BenchmarkArguments):
    """Methods, sizes of the model, and lengths of the sentence."""

    methods: list[str] | None = flag(None, f"Methods: {', '.join(NAMES)}; all by default.")
    lengths: list[int] = flag([24, 128, 512], "Lengths of the sentence, in tokens, in ascending order.")
    num_hidden_layers: int = flag(6, "Number of layers.")
    hidden_size: int = flag(384, "Hidden size; heads have 32 dimensions, feed-forward layers are four times as wide.")
    rounds: int = flag(3, "Number of measured turns of each method.")
    limit: float = flag(30.0, "A method that takes longer, in CPU seconds, is left out at longer sentences.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "num_hidden_layers", "hidden_size")
        check_names("lengths", self.lengths)
        if self.methods is not None:
            check_names("methods", self.methods, NAMES)
        if min(self.lengths) < 2 or self.lengths != sorted(self.lengths):
            raise ValueError(f"lengths must be at least 2 and ascend, got {self.lengths}.")


def build(args: CostArguments, length: int) -> tuple[PreTrainedModel, Batch]:
    """The model and a sentence."""
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=max(args.hidden_size // 32, 1),
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=max(args.lengths),
    )
    model = BertForSequenceClassification(config).eval().requires_grad_(False)
    ids = torch.randint(3, config.vocab_size, (1, length))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def systems(args: CostArguments, names: Iterable[str], length: int) -> dict[str, Callable[[], object]]:
    """What runs a forward pass and each method once."""
    model, batch = build(args, length)

    @torch.no_grad()
    def forward() -> None:
        model(**batch)

    return {FORWARD: forward, **{name: partial(METHODS[name], model, batch) for name in names}}


def peak_memory(args: CostArguments, name: str, length: int) -> float:
    """Peak memory of one method in MB, to be called in a process of its own."""
    own = systems(args, [name] if name != FORWARD else [], length)
    before = peak_resident_mb()
    own[name]()
    return peak_resident_mb() - before


def main(args: CostArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    names, rows = list(args.methods or NAMES), []
    for length in args.lengths:
        own = systems(args, names, length)
        own[FORWARD]()  # warm up
        cpu = take_turns(own, args.rounds, warm_up=0).cpu
        seconds = medians(cpu)
        for name in sorted(own, key=seconds.get):
            rows.append(
                {
                    "method": name,
                    "length": length,
                    "seconds": seconds[name],
                    "to_forward": median_ratio(cpu, name, FORWARD),
                    "memory_mb": in_new_process(peak_memory, args, name, length),
                }
            )
        names = [name for name in names if seconds[name] <= args.limit]
        print(format_table(list(rows[0]), [list(row.values()) for row in rows if row["length"] == length]), flush=True)
    return write_summary(args, {"rows": rows})


if __name__ == "__main__":
    run_recipe(main)
