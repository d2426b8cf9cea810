# Licensed under the Apache License, Version 2.0.
"""How much faster a model runs without some of its heads, beside the speed-up that the removed FLOPs allow.

    python recipes/benchmarks/pruned_latency.py --cpu_threads 2 --output_dir runs/pruned_latency
    python recipes/benchmarks/pruned_latency.py --model runs/sst2-seed1/model-36

Without `--model`, the model is an encoder of 6 layers × 384 with 12 heads and random weights, of which `--keep` heads
are left, chosen at random. Dense and pruned model take turns; results are medians.

Keys of `summary.json`: `rows`, one for each model, batch size and length; and the settings.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarking import BenchmarkArguments, parse_shapes, write_summary

from hf_attn_dynamics import HeadwiseBertConfig, head_report, headwise_model, random_importance, retain_heads
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.checkpoints import refused
from hf_attn_dynamics.recipes.run import run_recipe


LAYERS, HEADS = 6, 12
KEYS = ("flops_ratio", "latency_dense", "latency_pruned", "latency_ratio", "latency_of_ideal")


@dataclass
class LatencyArguments(BenchmarkArguments):
    """The models and the batches."""

    model: str | None = flag(
        None, "Pruned checkpoint (folder, or name on the Hub), instead of random ones.", earlier="model_name"
    )
    keep: list[int] = flag([54, 36, 18, 9], f"Numbers of heads to keep, of {LAYERS * HEADS}.")
    shapes: list[str] = flag(["1x32", "8x128", "32x128"], "Batches, as SENTENCESxTOKENS.")
    rounds: int = flag(20, "Number of measured turns of each model.")
    cpu_threads: int | None = flag(None, "Number of CPU threads; all cores by default.", earlier="threads")

    def __post_init__(self):
        super().__post_init__()
        check_names("keep", self.keep)
        parse_shapes(self.shapes)
        for keep in self.keep:
            if not 1 <= keep <= LAYERS * HEADS:
                raise ValueError(f"keep must be a number of heads from 1 to {LAYERS * HEADS}, got {keep}.")


def build_models(args: LatencyArguments) -> dict:
    """Pruned models, by name."""
    if args.model:
        with refused("model", args.model):
            return {Path(args.model).name: headwise_model(args.model)}
    models = {}
    for keep in args.keep:
        config = HeadwiseBertConfig(
            hidden_size=384, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=1536
        )
        torch.manual_seed(args.seed)
        model = headwise_model(config)
        retain_heads(model, keep, random_importance(model, seed=args.seed))
        models[f"{keep / (LAYERS * HEADS):.0%} of {LAYERS * HEADS} heads"] = model
    return models


def main(args: LatencyArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    with refuse_bad_input():
        models = build_models(args)
    rows = []
    for name, model in models.items():
        for batch, length in parse_shapes(args.shapes):
            report = head_report(model, batch=batch, length=length, rounds=args.rounds).to_dict()
            rows.append({"model": name, "batch": batch, "length": length, **{key: report[key] for key in KEYS}})
    header = ["model", "batch", "length", "FLOPs", "dense (ms)", "pruned (ms)", "time", "speed-up / ideal"]
    scale = {key: 1000 if key in ("latency_dense", "latency_pruned") else 1 for key in KEYS}
    cells = [[row["model"], row["batch"], row["length"], *(scale[key] * row[key] for key in KEYS)] for row in rows]
    print(format_table(header, cells))
    return write_summary(args, {"rows": rows})


if __name__ == "__main__":
    run_recipe(main)
