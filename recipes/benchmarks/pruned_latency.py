# Licensed under the Apache License, Version 2.0.
"""How much faster a model runs without some of its heads, beside the speed-up that the removed FLOPs allow.

    python recipes/benchmarks/pruned_latency.py --threads 2 --output runs/pruned_latency.json
    python recipes/benchmarks/pruned_latency.py --model_name runs/sst2-seed1/model-36

Without `--model_name`, the model is an encoder of 6 layers × 384 with 12 heads and random weights, of which a share is
removed at random. Dense and pruned model take turns; figures are medians.
"""

import argparse
from pathlib import Path

import torch

from hf_attn_dynamics import HeadwiseBertConfig, head_report, headwise_model, random_importance, retain_heads
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.run import provenance, write_json


KEYS = ("flops_ratio", "latency_dense", "latency_pruned", "latency_ratio", "latency_of_ideal")


def benchmark(args: argparse.Namespace) -> list[dict]:
    """A row for each share of heads, batch size and length."""
    models = {}
    with refuse_bad_input():
        if args.model_name:
            models[Path(args.model_name).name] = headwise_model(args.model_name)
        for share in [] if args.model_name else args.keep:
            config = HeadwiseBertConfig(
                hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
            )
            torch.manual_seed(0)
            model = headwise_model(config)
            retain_heads(model, max(1, round(72 * share)), random_importance(model, seed=0))
            models[f"{share:.0%} of 72 heads"] = model
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    rows = []
    for name, model in models.items():
        for batch, length in shapes:
            report = head_report(model, batch=batch, length=length, rounds=args.rounds, threads=args.threads).to_dict()
            rows.append({"model": name, "batch": batch, "length": length, **{key: report[key] for key in KEYS}})
    return rows


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model_name", help="a pruned model, instead of random ones")
    parser.add_argument("--keep", nargs="+", type=float, default=[0.75, 0.5, 0.25, 0.125], help="shares of heads")
    parser.add_argument("--shapes", nargs="+", default=["1x32", "8x128", "32x128"], help="batch x length")
    parser.add_argument("--rounds", type=int, default=20, help="rounds in which dense and pruned model take turns")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--output", type=Path, help="also write JSON here")
    args = parser.parse_args(argv)
    rows = benchmark(args)
    header = ["model", "batch", "length", "FLOPs", "dense (ms)", "pruned (ms)", "time", "speed-up / ideal"]
    print(
        format_table(
            header,
            [
                [row["model"], row["batch"], row["length"], row["flops_ratio"], 1000 * row["latency_dense"],
                 1000 * row["latency_pruned"], row["latency_ratio"], row["latency_of_ideal"]]
                for row in rows
            ],
        )
    )  # fmt: skip
    if args.output:
        threads = args.threads or torch.get_num_threads()
        write_json(args.output, {"rows": rows, "threads": threads, "rounds": args.rounds, **provenance(0, "cpu")})
    return rows


if __name__ == "__main__":
    main()
