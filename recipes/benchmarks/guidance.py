# Licensed under the Apache License, Version 2.0.
"""What guidance costs: time and peak memory of one optimizer step, beside no guidance and the naive way.

    python recipes/benchmarks/guidance.py
    python recipes/benchmarks/guidance.py --lengths 512 --rounds 21 --output_dir runs/benchmark
    python recipes/benchmarks/guidance.py --architecture mistral

Three systems take the same batches with the same weights:
    plain     the stock loss, `sdpa` attention
    guided    the stock loss and the guidance loss of this package on half of the heads
    naive     the stock loss and the same guidance loss from the maps of `eager` attention and dense patterns
              (encoders only)

Times are wall-clock seconds of forward, backward and AdamW, the systems taking turns in one process; ratios are
medians over rounds of the ratio within a round. Peak memory is the largest resident size of a process of its own for
each system, less the size before the model was built (on a GPU: the largest size of allocated memory); it holds
weights, gradients, optimizer and activations (Linux only). There is no dropout: attention dropout would keep `sdpa`
from its fast kernels. The vocabulary is small, so that the cost of the layers is not hidden behind the output layer.

Keys of `summary.json`, for each length n: `seconds_plain_n`, `seconds_guided_n`, `seconds_naive_n`,
`time_guided_to_plain_n`, `time_naive_to_guided_n`, `memory_mb_plain_n`, …, `memory_guided_to_plain_n`; and the
settings.
"""

import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from hf_attn_dynamics import (
    HeadwiseMistralConfig,
    HeadwiseMistralForCausalLM,
    HeadwiseRobertaConfig,
    HeadwiseRobertaForMaskedLM,
)
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.run import SUMMARY, check_output_dir, provenance, run_recipe, write_json


SYSTEMS = {"roberta": ("plain", "guided", "naive"), "mistral": ("plain", "guided")}  # by architecture


@dataclass
class BenchmarkArguments:
    """Sizes of the model and the batches."""

    architecture: str = field(
        default="roberta",
        metadata={"help": "roberta; or mistral, three query heads to a key, and a window of half a sentence."},
    )
    lengths: list[int] = field(default_factory=lambda: [128, 512, 2048], metadata={"help": "Tokens of a sentence."})
    tokens: int = field(default=2048, metadata={"help": "Tokens of a batch."})
    num_hidden_layers: int = field(default=3, metadata={"help": "Layers."})
    hidden_size: int = field(default=768, metadata={"help": "Width."})
    num_attention_heads: int = field(default=12, metadata={"help": "Heads; half of them are guided."})
    vocab_size: int = field(default=1000, metadata={"help": "Size of the vocabulary."})
    rounds: int = field(default=9, metadata={"help": "Steps of each system."})
    threads: int = field(default=2, metadata={"help": "Threads on the CPU."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda."})
    output_dir: str | None = field(default=None, metadata={"help": "Where to write summary.json, if anywhere."})
    memory_of: str | None = field(default=None, metadata={"help": "Print the peak memory of one system, in MB."})


class System:
    """A model with its optimizer, and the way it takes a step."""

    def __init__(self, name: str, args: BenchmarkArguments, length: int):
        torch.manual_seed(0)
        sizes = {
            "vocab_size": args.vocab_size,
            "hidden_size": args.hidden_size,
            "num_hidden_layers": args.num_hidden_layers,
            "num_attention_heads": args.num_attention_heads,
            "intermediate_size": 4 * args.hidden_size,
            "guidance": {"fraction": 0.5},
            "attn_implementation": "eager" if name == "naive" else "sdpa",
        }
        if args.architecture == "mistral":
            groups, window = args.num_attention_heads // 3, max(length // 2, 1)
            config = HeadwiseMistralConfig(**sizes, num_key_value_heads=groups, sliding_window=window)
            self.model = HeadwiseMistralForCausalLM(config)
        else:
            positions = max(args.lengths) + 2
            no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            config = HeadwiseRobertaConfig(**sizes, **no_dropout, max_position_embeddings=positions)
            self.model = HeadwiseRobertaForMaskedLM(config)
        self.model = self.model.to(args.device).train()
        self.name = name
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)  # the Trainer's default

    def step(self, ids: torch.Tensor) -> float:
        """Seconds of one optimizer step."""
        _wait(ids)
        start = time.perf_counter()
        if self.name == "plain":
            loss = self.model(ids, labels=ids).loss
        elif self.name == "guided":
            loss = self.model(ids, labels=ids, guidance_weight=1.0).loss
        else:
            outputs = self.model(ids, labels=ids, output_attentions=True)
            loss = outputs.loss + self._naive_guidance_loss(outputs.attentions)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        _wait(ids)
        return time.perf_counter() - start

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


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def make_batch(args: BenchmarkArguments, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, args.vocab_size, (max(args.tokens // length, 1), length), generator=generator)
    return ids.to(args.device)


def time_systems(args: BenchmarkArguments, length: int) -> dict[str, list[float]]:
    """Seconds of each step of each system, taking turns."""
    ids = make_batch(args, length)
    systems = [System(name, args, length) for name in SYSTEMS[args.architecture]]
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    for turn in range(args.rounds + 2):
        for system in systems:
            taken = system.step(ids)
            if turn >= 2:  # the first ones warm up
                seconds[system.name].append(taken)
    return seconds


def peak_memory(args: BenchmarkArguments, name: str) -> float:
    """Peak memory of two steps of one system in MB, to be called in a process of its own."""
    before = peak_resident_mb()
    ids = make_batch(args, args.lengths[0])
    system = System(name, args, args.lengths[0])
    for _ in range(2):
        system.step(ids)
    if ids.is_cuda:
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_resident_mb() - before


def peak_resident_mb() -> float:
    """Largest resident size of this process so far."""
    # Not `resource.getrusage`: a new process starts there with the peak of the one that started it.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**10


def peak_memory_elsewhere(args: BenchmarkArguments, length: int, name: str) -> float:
    """[`peak_memory`] in a new process."""
    values = {key: value for key, value in asdict(args).items() if key not in ("lengths", "output_dir", "memory_of")}
    flags = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, __file__, "--lengths", str(length), "--memory_of", name, *flags]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main(args: BenchmarkArguments) -> dict:
    """Run the benchmark; returns the summary."""
    with refuse_bad_input():
        if args.architecture not in SYSTEMS:
            raise ValueError(f"architecture must be {' or '.join(SYSTEMS)}, got {args.architecture!r}.")
        if args.architecture == "mistral" and args.num_attention_heads % 3:
            raise ValueError(f"num_attention_heads must be a multiple of 3, got {args.num_attention_heads}.")
        if args.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {args.device!r}.")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but PyTorch finds no GPU here; use --device cpu.")
        if args.output_dir:
            check_output_dir(args.output_dir, {}, resume=False)
    torch.set_num_threads(args.threads)
    if args.memory_of:
        print(peak_memory(args, args.memory_of))
        return {}
    summary: dict = {}
    rows = []
    for length in args.lengths:
        seconds = time_systems(args, length)
        names = SYSTEMS[args.architecture]
        memory = {name: peak_memory_elsewhere(args, length, name) for name in names}

        def ratio(one, other, seconds=seconds):
            return statistics.median(a / b for a, b in zip(seconds[one], seconds[other]))

        figures = {
            **{f"seconds_{name}": statistics.median(seconds[name]) for name in names},
            "time_guided_to_plain": ratio("guided", "plain"),
            **({"time_naive_to_guided": ratio("naive", "guided")} if "naive" in names else {}),
            **{f"memory_mb_{name}": memory[name] for name in names},
            "memory_guided_to_plain": memory["guided"] / memory["plain"],
        }
        summary |= {f"{key}_{length}": value for key, value in figures.items()}
        rows.append([f"{length}", *figures.values()])
    header = ["length", *(f"{name} (s)" for name in names), "guided / plain"]
    header += ["naive / guided"] if "naive" in names else []
    header += [*(f"{name} (MB)" for name in names), "guided / plain"]
    print(format_table(header, rows))
    summary |= {key: value for key, value in asdict(args).items() if key not in ("lengths", "output_dir", "memory_of")}
    summary |= provenance(0, torch.cuda.get_device_name() if args.device == "cuda" else "cpu")
    if args.output_dir:
        write_json(Path(args.output_dir) / SUMMARY, summary)
    return summary


if __name__ == "__main__":
    run_recipe(main, BenchmarkArguments)
