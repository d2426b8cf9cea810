# Licensed under the Apache License, Version 2.0.
"""What observing all heads of a decoder costs while it reads a long text: time and peak memory beside a plain pass.

    python recipes/benchmarks/prefill.py --device cuda --dtype bfloat16 --lengths 8192 32768
    python recipes/benchmarks/prefill.py --num_hidden_layers 2 --hidden_size 128 --lengths 512

The model is a Llama with random weights, by default of one billion parameters, and reads one text without filling a
cache. `observed` measures confidence, entropy and attention by offset of all heads (`observe`). Times are wall-clock
seconds, both systems taking turns; the ratio is the median over rounds of the ratio within a round. Peak memory is
measured as in `guidance.py`.

Keys of `summary.json`, for each length n: `seconds_plain_n`, `seconds_observed_n`, `time_observed_to_plain_n`,
`memory_mb_plain_n`, `memory_mb_observed_n`, `memory_observed_to_plain_n`; `parameters`; and the settings.
"""

from dataclasses import dataclass

import torch
from benchmarking import (
    PrecisionArguments,
    median_ratio,
    medians,
    peaks_of_steps,
    seconds_of_steps,
    write_summary,
)
from transformers import LlamaConfig, LlamaModel

from hf_attn_dynamics import HeadConfidence, HeadEntropy, RelativePositions, observe
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.arguments.base import flag
from hf_attn_dynamics.recipes.run import run_recipe


SYSTEMS = ("plain", "observed")


@dataclass
class PrefillArguments(PrecisionArguments):
    """Sizes of the model and of the texts."""

    lengths: list[int] = flag([8192], "Lengths of the texts, in tokens.")
    tokens: int = flag(1, "Batch size, in tokens; one text if it is longer.")
    num_hidden_layers: int = flag(16, "Number of layers.")
    hidden_size: int = flag(2048, "Hidden size; feed-forward layers are four times as wide.")
    num_attention_heads: int = flag(32, "Number of heads per layer.")
    num_key_value_heads: int = flag(8, "Number of key and value heads per layer.")

    def config(self, length: int) -> LlamaConfig:
        """The configuration of a model that reads texts of a length."""
        return LlamaConfig(
            **self.sizes,
            num_hidden_layers=self.num_hidden_layers,
            num_key_value_heads=self.num_key_value_heads,
            max_position_embeddings=length,
            attn_implementation="sdpa",
        )


class System:
    """A model, and the way it reads a text."""

    def __init__(self, name: str, args: PrefillArguments, length: int):
        torch.manual_seed(args.seed)
        self.model = args.placed(LlamaModel(args.config(length))).eval()
        self.name = name

    @torch.no_grad()
    def step(self, ids: torch.Tensor) -> None:
        """Reads a text."""
        if self.name == "plain":
            self.model(ids, use_cache=False)
            return
        observers = HeadConfidence(excluded_ids=[]), HeadEntropy(), RelativePositions(64, excluded_ids=[])
        with observe(self.model, *observers) as seen:
            self.model(ids, use_cache=False)
        seen.results()


def main(args: PrefillArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    results: dict = {}
    rows = []
    for length in args.lengths:
        seconds = seconds_of_steps(System, SYSTEMS, args, length)
        memory = peaks_of_steps(System, SYSTEMS, args, length)
        figures = {
            **{f"seconds_{name}": median for name, median in medians(seconds).items()},
            "time_observed_to_plain": median_ratio(seconds, "observed", "plain"),
            **{f"memory_mb_{name}": memory[name] for name in SYSTEMS},
            "memory_observed_to_plain": memory["observed"] / memory["plain"],
        }
        results |= {f"{key}_{length}": value for key, value in figures.items()}
        rows.append([f"{length}", *figures.values()])
    names = [f"{name} ({unit})" for unit in ("s", "MB") for name in SYSTEMS]
    print(format_table(["length", *names[:2], "observed / plain", *names[2:], "observed / plain"], rows))
    with torch.device("meta"):
        parameters = LlamaModel(args.config(args.lengths[0])).num_parameters()
    return write_summary(args, {**results, "parameters": parameters})


if __name__ == "__main__":
    run_recipe(main)
