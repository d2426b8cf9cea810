# Licensed under the Apache License, Version 2.0.
"""What relevance costs: time of one backward pass of relevance, beside one forward and backward pass of the model.

    python recipes/benchmarks/relevance.py
    python recipes/benchmarks/relevance.py --lengths 32 128 --hidden_size 256 --output_dir runs/relevance

Each takes the same batch of a sentence classifier with random weights and `sdpa` attention, the three in turns: a
forward and backward pass, with gradients of all parameters; and `head_relevance` by either rule, which reads the model
and propagates the relevance of each sentence's top-1 logit back to all heads. Ratios are medians over rounds of the
ratio within a round; errors are those of `relevance_conservation`.

Keys of `summary.json`: `rows`, one for each length: `length`, `seconds_gradients`, and for each rule `seconds_RULE`,
`time_RULE_to_gradients` and `error_RULE`; and the settings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from benchmarking import BenchmarkArguments, median_ratio, medians, take_turns, write_summary
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from hf_attn_dynamics import head_relevance, relevance_conservation
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.run import run_recipe


RULES = ("ratio", "alpha_beta")


@dataclass
class RelevanceArguments(BenchmarkArguments):
    """Sizes of the model and the batches."""

    lengths: list[int] = flag([16, 32, 64, 128], "Lengths of the sentences, in tokens.")
    batch_size: int = flag(8, "Batch size, in sentences.", earlier="batch")
    num_hidden_layers: int = flag(3, "Number of layers.")
    hidden_size: int = flag(768, "Hidden size; heads have 64 dimensions.")
    device: str = flag("cpu", "Device: auto, cpu or cuda.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size", "num_hidden_layers")
        check_names("lengths", self.lengths)


def build_model(args: RelevanceArguments) -> PreTrainedModel:
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=max(1, args.hidden_size // 64),
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=max(args.lengths),
    )
    return BertForSequenceClassification(config).to(args.torch_device).eval()


def gradients(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    """One forward and backward pass."""
    model.zero_grad()
    model(**batch).logits.amax(-1).sum().backward()


def main(args: RelevanceArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    model = build_model(args)
    rows = []
    for length in args.lengths:
        batch = {"input_ids": torch.randint(5, 1000, (args.batch_size, length), device=args.torch_device)}
        systems: dict[str, Callable[[], object]] = {"gradients": partial(gradients, model, batch)}
        systems |= {rule: partial(head_relevance, model, batch, rule=rule) for rule in RULES}
        seconds = take_turns(systems, args.rounds).wall
        times = medians(seconds)
        row = {"length": length, "seconds_gradients": times["gradients"]}
        for rule in RULES:
            row |= {
                f"seconds_{rule}": times[rule],
                f"time_{rule}_to_gradients": median_ratio(seconds, rule, "gradients"),
                f"error_{rule}": relevance_conservation(model, batch, rule).error,
            }
        rows.append(row)
    header = ["length", "gradients (s)"]
    header += [column for rule in RULES for column in (f"{rule} (s)", "/ gradients", "error")]
    print(format_table(header, [list(row.values()) for row in rows]))
    return write_summary(args, {"rows": rows})


if __name__ == "__main__":
    run_recipe(main)
