# Licensed under the Apache License, Version 2.0.
"""What guidance costs: time and peak memory of one optimizer step, beside no guidance and the naive way.

    python recipes/benchmarks/guidance.py
    python recipes/benchmarks/guidance.py --lengths 512 --rounds 21 --output_dir runs/benchmark
    python recipes/benchmarks/guidance.py --architecture mistral
    python recipes/benchmarks/guidance.py --device cuda --dtype bfloat16 --systems plain triton blocks

Systems take the same batches with the same weights:
    plain     the stock loss, `sdpa` attention
    guided    the stock loss and the guidance loss of this package on half of the heads
    triton    the same, with the kernels in Triton
    blocks    the same, with blocks of rows in PyTorch
    naive     the stock loss and the same guidance loss from the maps of `eager` attention and dense patterns
              (encoders only)

Times are wall-clock seconds of forward, backward and AdamW, the systems taking turns in one process; ratios are
medians over rounds of the ratio within a round. Peak memory is the largest resident size of a process of its own for
each system, less the size before the model was built (on a GPU: the largest size of allocated memory); it holds
weights, gradients, optimizer and activations (Linux only). There is no dropout: attention dropout would keep `sdpa`
from its fast kernels. The vocabulary is small, so that the cost of the layers is not hidden behind the output layer.

Keys of `summary.json`, for each length n: `seconds_plain_n`, … of each system, `time_guided_to_plain_n`, … of guided
systems, `time_naive_to_guided_n`, `memory_mb_plain_n`, …, `memory_guided_to_plain_n`, …; and the settings.
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

from hf_attn_dynamics import (
    HeadwiseMistralConfig,
    HeadwiseMistralForCausalLM,
    HeadwiseRobertaConfig,
    HeadwiseRobertaForMaskedLM,
)
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.run import run_recipe


SYSTEMS = {"roberta": ("plain", "guided", "naive"), "mistral": ("plain", "guided")}  # by architecture
KERNELS = {"guided": None, "triton": "triton", "blocks": "blocks"}  # `guidance_kernel` of guided systems


@dataclass
class GuidanceArguments(PrecisionArguments):
    """Sizes of the model and the batches."""

    architecture: str = flag(
        "roberta", "roberta; or mistral, with three query heads per key and a window of half a sentence."
    )
    lengths: list[int] = flag([128, 512, 2048], "Lengths of the sentences, in tokens.")
    num_attention_heads: int = flag(12, "Number of heads per layer, of which half are guided.")
    systems: list[str] | None = flag(None, "Systems; by default plain, guided and, for RoBERTa, naive.")

    def __post_init__(self):
        super().__post_init__()
        if self.architecture not in SYSTEMS:
            raise ValueError(f"architecture must be {' or '.join(SYSTEMS)}, got {self.architecture!r}.")
        if self.architecture == "mistral" and self.num_attention_heads % 3:
            raise ValueError(f"num_attention_heads must be a multiple of 3, got {self.num_attention_heads}.")
        if self.systems is not None:
            check_names("systems", self.systems, dict.fromkeys([*SYSTEMS[self.architecture], *KERNELS]))
            if "plain" not in self.systems:
                raise ValueError(
                    f"systems must contain plain, which the others are compared with, got {self.systems}."
                )


class System:
    """A model with its optimizer, and the way it takes a step."""

    def __init__(self, name: str, args: GuidanceArguments, length: int):
        torch.manual_seed(args.seed)
        settings = {
            "num_hidden_layers": args.num_hidden_layers,
            "guidance": {"fraction": 0.5},
            "attn_implementation": "eager" if name == "naive" else "sdpa",
        }
        if args.architecture == "mistral":
            groups, window = args.num_attention_heads // 3, max(length // 2, 1)
            settings |= {"num_key_value_heads": groups, "sliding_window": window}
            config = HeadwiseMistralConfig(**args.sizes, **settings)
            self.model = HeadwiseMistralForCausalLM(config)
        else:
            config = HeadwiseRobertaConfig(**args.roberta_sizes, **settings)
            self.model = HeadwiseRobertaForMaskedLM(config)
        self.model = args.placed(self.model).train()
        self.name = name
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)  # the Trainer's default

    def step(self, ids: torch.Tensor) -> None:
        """Takes one optimizer step."""
        if self.name == "plain":
            loss = self.model(ids, labels=ids).loss
        elif self.name in KERNELS:
            loss = self.model(ids, labels=ids, guidance_weight=1.0, guidance_kernel=KERNELS[self.name]).loss
        else:
            outputs = self.model(ids, labels=ids, output_attentions=True)
            loss = outputs.loss + self._naive_guidance_loss(outputs.attentions)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _naive_guidance_loss(self, attentions: tuple[torch.Tensor, ...]) -> torch.Tensor:
        n = attentions[0].shape[-1]
        following = torch.eye(n, device=attentions[0].device).roll(1, dims=1)
        following[-1] = 1 / n
        preceding = torch.eye(n, device=attentions[0].device).roll(-1, dims=1)
        preceding[0] = 1 / n
        first = torch.zeros(n, n, device=attentions[0].device)
        first[:, 0] = 1
        patterns = {"next": following, "prev": preceding, "first": first}
        total = 0.0
        for layer, layout in self.model.config.guided_heads().items():
            for name, heads in layout.items():
                total = total + (attentions[layer][:, heads] - patterns[name]).square().sum(-1).mean()
        return total


def main(args: GuidanceArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    names = args.systems or SYSTEMS[args.architecture]
    guided = [name for name in names if name in KERNELS]
    is_compared = "naive" in names and bool(guided)
    results: dict = {}
    rows = []
    for length in args.lengths:
        seconds = seconds_of_steps(System, names, args, length)
        memory = peaks_of_steps(System, names, args, length)
        figures = {
            **{f"seconds_{name}": median for name, median in medians(seconds).items()},
            **{f"time_{name}_to_plain": median_ratio(seconds, name, "plain") for name in guided},
            **({"time_naive_to_guided": median_ratio(seconds, "naive", guided[0])} if is_compared else {}),
            **{f"memory_mb_{name}": memory[name] for name in names},
            **{f"memory_{name}_to_plain": memory[name] / memory["plain"] for name in guided},
        }
        results |= {f"{key}_{length}": value for key, value in figures.items()}
        rows.append([f"{length}", *figures.values()])
    ratios = [f"{name} / plain" for name in guided]
    header = ["length", *(f"{name} (s)" for name in names), *ratios]
    header += ["naive / guided"] if is_compared else []
    header += [*(f"{name} (MB)" for name in names), *ratios]
    print(format_table(header, rows))
    return write_summary(args, results)


if __name__ == "__main__":
    run_recipe(main)
