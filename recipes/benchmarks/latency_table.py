# Licensed under the Apache License, Version 2.0.
"""How well a latency table predicts the speed-up of pruned models.

    python recipes/benchmarks/latency_table.py --cpu_threads 2 --output_dir runs/latency_table
    python recipes/benchmarks/latency_table.py --model sentence-transformers/all-MiniLM-L6-v2

Without `--model`, the model is an encoder of the size of MiniLM with random weights: 6 layers × 384 with 12 heads and
1,536 units each. Each pruned model keeps random numbers of heads and units in each layer, between none and all, and
takes turns with the dense model.

Keys of `summary.json`: `rows`, one for each batch and pruned model, with the predicted speed-up, the measured one, the
one that FLOPs allow, and measured over predicted; `tables`, the tables by batch; and the settings.
"""

import copy
import random
import re
import statistics
from dataclasses import dataclass

import torch
from benchmarking import BenchmarkArguments, write_summary
from transformers import AutoModel, BertConfig, BertModel, PreTrainedModel

from hf_attn_dynamics import count_flops_table, measure_latency_table, prune_heads
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.analysis.heads.pruning_report import head_report
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.unit_pruning import prune_units
from hf_attn_dynamics.models.unit_roles import locate_units
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.checkpoints import refused
from hf_attn_dynamics.recipes.run import run_recipe


KEYS = ("heads_kept", "units_kept", "predicted", "measured", "by_flops", "measured_over_predicted")


@dataclass
class TableArguments(BenchmarkArguments):
    """The model, the batches and the pruned models."""

    model: str | None = flag(None, "Dense encoder (folder, or name on the Hub), instead of random weights.")
    models: int = flag(6, "Number of pruned models for each batch.")
    shapes: list[str] = flag(["1x32", "8x128"], "Batches, as SENTENCESxTOKENS.")
    points: int = flag(5, "Grid points of the table.")
    rounds: int = flag(20, "Number of measured turns of each model.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "models")
        self.check_at_least(2, "points")
        check_names("shapes", self.shapes)
        for shape in self.shapes:
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
                raise ValueError(f"shapes must be like 8x128, sentences and tokens, got {shape!r}.")


def build_dense(args: TableArguments) -> PreTrainedModel:
    """The dense model."""
    if args.model:
        with refused("model", args.model):
            return AutoModel.from_pretrained(args.model).eval()
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return BertModel(BertConfig(**sizes)).eval()


def randomly_pruned(dense: PreTrainedModel, draw: random.Random) -> PreTrainedModel:
    """A copy with random heads and units; the mean fraction that it keeps is random as well."""
    model, mean = copy.deepcopy(dense), draw.uniform(0.1, 0.8)

    def removed(groups: list) -> list:
        kept = round(len(groups) * min(max(draw.gauss(mean, 0.25), 0), 1))
        return draw.sample(groups, len(groups) - kept)

    heads = [
        (*layer.site, head) for layer in locate_heads(model) for group in removed(layer.groups()) for head in group
    ]
    prune_heads(model, heads)
    units = [(*layer.site, unit) for layer in locate_units(model) for unit in removed(layer.units)]
    return prune_units(model, units)


def main(args: TableArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    with refuse_bad_input():
        dense = build_dense(args)
    rows, tables = [], {}
    for shape in args.shapes:
        batch, length = map(int, shape.split("x"))
        table = measure_latency_table(
            dense, batch, length, points=args.points, rounds=args.rounds, cache_dir=False, progress=False
        )
        flops = count_flops_table(dense, batch, length)
        tables[shape] = table.to_dict()
        print(table, "\n")
        draw = random.Random(args.seed)
        for _ in range(args.models):
            model = randomly_pruned(dense, draw)
            report = head_report(model, batch, length, dense=dense, rounds=args.rounds)
            predicted, measured = table.speedup_of(model), 1 / report.latency_ratio
            values = (report.heads_kept, report.units_kept, predicted, measured, flops.speedup_of(model))
            rows.append({"batch": batch, "length": length, **dict(zip(KEYS, (*values, measured / predicted)))})
    header = ["batch", "length", "heads", "units", "predicted", "measured", "by FLOPs", "measured / predicted"]
    print(format_table(header, [list(row.values()) for row in rows]))
    errors = [abs(row["measured_over_predicted"] - 1) for row in rows]
    print(
        f"\nMedian error of the prediction {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %."
    )
    return write_summary(args, {"rows": rows, "median_error": statistics.median(errors), "tables": tables})


if __name__ == "__main__":
    run_recipe(main)
