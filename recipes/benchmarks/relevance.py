# Licensed under the Apache License, Version 2.0.
"""What relevance costs: time of one backward pass of relevance, beside one forward and backward pass of the model.

    python recipes/benchmarks/relevance.py
    python recipes/benchmarks/relevance.py --lengths 32 128 --hidden_size 256 --output runs/relevance.json

Each takes the same batch of a sentence classifier with random weights and `sdpa` attention, the three in turns: a
forward and backward pass, with gradients of all parameters; and `head_relevance` by either rule, which reads the model
and hands the relevance of each sentence's top-1 logit back to all heads. Ratios are medians over rounds of the ratio
within a round; errors are those of `relevance_conservation`.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

from hf_attn_dynamics import head_relevance, relevance_conservation
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.run import provenance, write_json


RULES = ("ratio", "alpha_beta")


def benchmark(args: argparse.Namespace) -> list[dict]:
    """A row for each length."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=max(1, args.hidden_size // 64),
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=max(args.lengths),
    )
    model = BertForSequenceClassification(config).to(args.device).eval()
    rows = []
    for length in args.lengths:
        batch = {"input_ids": torch.randint(5, 1000, (args.batch, length), device=args.device)}

        def gradients(batch=batch):
            model.zero_grad()
            model(**batch).logits.amax(-1).sum().backward()

        def relevance(rule, batch=batch):
            head_relevance(model, batch, rule=rule)

        seconds: dict[str, list[float]] = {name: [] for name in ("gradients", *RULES)}
        for turn in range(args.rounds + 1):
            for name, taken in seconds.items():
                start = time.perf_counter()
                gradients() if name == "gradients" else relevance(name)
                if args.device == "cuda":
                    torch.cuda.synchronize()
                if turn:  # the first one warms up
                    taken.append(time.perf_counter() - start)
        row = {"length": length, "seconds_gradients": statistics.median(seconds["gradients"])}
        for rule in RULES:
            ratios = [taken / base for taken, base in zip(seconds[rule], seconds["gradients"])]
            row |= {
                f"seconds_{rule}": statistics.median(seconds[rule]),
                f"time_{rule}_to_gradients": statistics.median(ratios),
                f"error_{rule}": relevance_conservation(model, batch, rule).error,
            }
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 32, 64, 128], help="tokens of a sentence")
    parser.add_argument("--batch", type=int, default=8, help="sentences of a batch")
    parser.add_argument("--num_hidden_layers", type=int, default=3, help="layers")
    parser.add_argument("--hidden_size", type=int, default=768, help="width; heads have 64 features")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the three take turns")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="also write JSON here")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    rows = benchmark(args)
    header = ["length", "gradients (s)"]
    header += [column for rule in RULES for column in (f"{rule} (s)", "/ gradients", "error")]
    print(format_table(header, [list(row.values()) for row in rows]))
    if args.output:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        settings = {"threads": args.threads, "rounds": args.rounds, "batch": args.batch}
        write_json(args.output, {"rows": rows, **settings, **provenance(0, device)})
    return rows


if __name__ == "__main__":
    main()
