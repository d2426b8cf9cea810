# Licensed under the Apache License, Version 2.0.
"""What contributions cost: time, peak memory and accuracy, beside reverse-mode differentiation.

    python recipes/benchmarks/attribution.py
    python recipes/benchmarks/attribution.py --layers 12 --growth false
    python recipes/benchmarks/attribution.py --model sentence-transformers/all-MiniLM-L6-v2 --growth false

Systems, for a model of BERT's kind (by default of MiniLM's size) and one sentence:
    forward      a forward pass that returns its attention weights
    local        local_contribution
    exact        global_contribution
    probes       global_contribution with random directions
    batch        the same of a batch of sentences, padded: of the length, three quarters, half and a quarter of it
    singly       the same of these sentences one by one, without padding
    local loop   `autograd.grad` of each dimension of each head's output at each position, to the inputs of its layer
    loop         the same to the embeddings
    jacrev       `torch.func.jacrev` of all heads' outputs to the embeddings, 256 outputs at a time; of its memory, the
                 Jacobian itself is left out

The last three would take minutes: they are run on every `sample`-th output, and their times multiplied. Times are CPU
seconds, which other processes hardly disturb; systems take turns in one process, on one thread unless `threads` says
otherwise, and ratios are medians over rounds of the ratio within a round. Peak memory is the largest resident
size of a process of its own for each system, less the size before its work began (Linux only). A last table shows how
the times of this package grow when length, layers or width double, each run once.

Keys of `summary.json`: `seconds_SYSTEM`, `memory_mb_SYSTEM`, `local_to_forward`, `local_loop_to_local`,
`loop_to_exact`, `jacrev_to_exact`, `exact_to_probes`, `batch_to_singly`; `pearson_probes` (mean correlation of the
rows of estimated and exact contributions) and `pearson_probes_lowest_layer`; `growth_SYSTEM_SIZE` (time at the double
of a size to time at one); and the settings.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from guidance import peak_resident_mb
from transformers import AutoModel, BertConfig, BertModel, PreTrainedModel

from hf_attn_dynamics import correlate, global_contribution, local_contribution
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.run import SUMMARY, check_output_dir, provenance, run_recipe, write_json


SYSTEMS = ("forward", "local", "exact", "probes")
BATCHES = ("batch", "singly")
PEERS = ("local_loop", "loop", "jacrev")
RATIOS = {
    "local_to_forward": ("local", "forward"),
    "local_loop_to_local": ("local_loop", "local"),
    "loop_to_exact": ("loop", "exact"),
    "jacrev_to_exact": ("jacrev", "exact"),
    "exact_to_probes": ("exact", "probes"),
    "batch_to_singly": ("batch", "singly"),
}
JACREV_CHUNK = 256


@dataclass
class BenchmarkArguments:
    """Sizes of the model and the sentence."""

    model: str | None = field(default=None, metadata={"help": "A BERT; a random one of the sizes below if not given."})
    length: int = field(default=24, metadata={"help": "Tokens of the sentence."})
    layers: int = field(default=6, metadata={"help": "Layers."})
    width: int = field(
        default=384, metadata={"help": "Width; heads have 32 dimensions, feed-forward layers 4 × width."}
    )
    probes: int = field(default=32, metadata={"help": "Directions of each token."})
    chunk_size: int = field(default=768, metadata={"help": "Tangents at a time."})
    sample: int = field(default=64, metadata={"help": "Peers are run on one of so many outputs."})
    rounds: int = field(default=3, metadata={"help": "Runs of each system."})
    growth: bool = field(default=True, metadata={"help": "Whether to double the sizes, too."})
    threads: int = field(default=1, metadata={"help": "Threads on the CPU."})
    output_dir: str | None = field(default=None, metadata={"help": "Where to write summary.json, if anywhere."})
    memory_of: str | None = field(default=None, metadata={"help": "Print the peak memory of one system, in MB."})


# ---------------------------------------------------------------------------------------------------------------------
# Systems
# ---------------------------------------------------------------------------------------------------------------------


def build_model(args: BenchmarkArguments) -> PreTrainedModel:
    if args.model:
        return AutoModel.from_pretrained(args.model, attn_implementation="eager").eval()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=max(args.width // 32, 1),
        intermediate_size=4 * args.width,
        max_position_embeddings=max(512, 2 * args.length),
        attn_implementation="eager",
    )
    return BertModel(config).eval()


def build_systems(model: PreTrainedModel, args: BenchmarkArguments) -> dict[str, Callable[[], None]]:
    """What runs each system once; the peers on a sample of the outputs."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(999, model.config.vocab_size - 1), (1, args.length), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    lengths = torch.tensor([args.length * quarters // 4 for quarters in (4, 3, 2, 1)])
    masks = (torch.arange(args.length) < lengths[:, None]).long()
    padded = {"input_ids": ids * masks, "attention_mask": masks}
    settings = {"chunk_size": args.chunk_size, "probes": args.probes}

    def forward() -> None:
        with torch.no_grad():
            model(**batch, output_attentions=True)

    return {
        "forward": forward,
        "local": lambda: local_contribution(model, batch),
        "exact": lambda: global_contribution(model, batch, **settings),
        "probes": lambda: global_contribution(model, batch, "probes", **settings),
        "batch": lambda: global_contribution(model, padded, "probes", **settings),
        "singly": lambda: [
            global_contribution(model, {"input_ids": ids[:, :length]}, "probes", **settings) for length in lengths
        ],
        "local_loop": lambda: local_loop(model, ids, args.sample),
        "loop": lambda: loop(model, ids, args.sample),
        "jacrev": lambda: jacrev(model, ids, args.sample),
    }


def local_loop(model: PreTrainedModel, ids: torch.Tensor, sample: int) -> None:
    states = model(ids, output_hidden_states=True).hidden_states
    for layer, state in zip(model.encoder.layer, states):
        state = state.detach().requires_grad_()
        for value in layer.attention.self(state)[0].flatten()[::sample]:
            torch.autograd.grad(value, state, retain_graph=True)


def head_outputs(model: PreTrainedModel, embeddings: torch.Tensor) -> torch.Tensor:
    """Outputs of all heads of all layers, `(layers, 1, length, width)`."""
    outputs = []
    hooks = [
        layer.attention.self.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
        for layer in model.encoder.layer
    ]
    model.encoder(embeddings)
    for hook in hooks:
        hook.remove()
    return torch.stack(outputs)


def loop(model: PreTrainedModel, ids: torch.Tensor, sample: int) -> None:
    embeddings = model.embeddings(ids).detach().requires_grad_()
    for output in head_outputs(model, embeddings).flatten()[::sample]:
        torch.autograd.grad(output, embeddings, retain_graph=True)


def jacrev(model: PreTrainedModel, ids: torch.Tensor, sample: int) -> None:
    def outputs(embeddings: torch.Tensor) -> torch.Tensor:
        return head_outputs(model, embeddings).flatten()[::sample]

    # With gradients enabled, the graph of each gradient would be kept: ten times the memory.
    with torch.no_grad():
        torch.func.jacrev(outputs, chunk_size=JACREV_CHUNK)(model.embeddings(ids))


# ---------------------------------------------------------------------------------------------------------------------
# Measures
# ---------------------------------------------------------------------------------------------------------------------


def time_systems(args: BenchmarkArguments, names: tuple[str, ...]) -> dict[str, list[float]]:
    """CPU seconds of each run of each system, taking turns; those of peers multiplied by `sample`."""
    systems = build_systems(build_model(args), args)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in ("forward", "local"):  # warm up
        systems[name]()
    for _ in range(args.rounds):
        for name in names:
            start = time.process_time()
            systems[name]()
            seconds[name].append((time.process_time() - start) * (args.sample if name in PEERS else 1))
    return seconds


def accuracy_of_probes(args: BenchmarkArguments) -> dict[str, float]:
    """Mean correlation of the rows of estimated contributions with the exact ones, and that of the worst layer."""
    model = build_model(args)
    ids = torch.randint(999, (1, args.length), generator=torch.Generator().manual_seed(0))
    exact = global_contribution(model, {"input_ids": ids}, chunk_size=args.chunk_size)
    probes = global_contribution(model, {"input_ids": ids}, "probes", probes=args.probes, chunk_size=args.chunk_size)
    pearson = correlate(exact, probes).pearson["encoder"].mean(-1)
    return {"pearson_probes": pearson.mean().item(), "pearson_probes_lowest_layer": pearson.min().item()}


def peak_memory(args: BenchmarkArguments) -> float:
    """Peak memory of one system in MB, to be called in a process of its own."""
    systems = build_systems(build_model(args), args)
    systems["forward"]()
    before = peak_resident_mb()
    systems[args.memory_of]()
    return peak_resident_mb() - before


def peak_memory_elsewhere(args: BenchmarkArguments, name: str) -> float:
    """[`peak_memory`] in a new process."""
    values = {key: value for key, value in asdict(args).items() if value is not None and key != "output_dir"}
    flags = [word for key, value in (values | {"memory_of": name}).items() for word in (f"--{key}", str(value))]
    command = [sys.executable, __file__, *flags]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure_growth(args: BenchmarkArguments, at_one: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Time at the double of each size to time at one, by system."""
    growth: dict[str, dict[str, float]] = {name: {} for name in SYSTEMS}
    for size in ("length", "layers", "width"):
        seconds = time_systems(replace(args, rounds=1, **{size: 2 * getattr(args, size)}), SYSTEMS)
        for name in SYSTEMS:
            growth[name][size] = seconds[name][0] / statistics.median(at_one[name])
    return growth


def main(args: BenchmarkArguments) -> dict:
    """Run the benchmark; returns the summary."""
    with refuse_bad_input():
        if args.model and args.growth:
            raise ValueError("growth doubles the sizes of a random model; pass --growth false with --model.")
        if args.length < 4:
            raise ValueError(f"length must be at least 4, for sentences of a quarter of it, got {args.length}.")
        if args.output_dir:
            check_output_dir(args.output_dir, {}, resume=False)
    torch.set_num_threads(args.threads)
    if args.memory_of:
        print(peak_memory(args))
        return {}
    names = SYSTEMS + BATCHES + PEERS
    seconds = time_systems(args, names)
    memory = {name: peak_memory_elsewhere(args, name) for name in names}
    ratios = {
        ratio: statistics.median(a / b for a, b in zip(seconds[one], seconds[other]))
        for ratio, (one, other) in RATIOS.items()
    }
    accuracy = accuracy_of_probes(args)
    rows = [[name.replace("_", " "), statistics.median(seconds[name]), memory[name]] for name in names]
    print(format_table(["system", "CPU seconds", "MB"], rows))
    print(format_table(["", ""], [[name.replace("_", " "), value] for name, value in {**ratios, **accuracy}.items()]))
    summary = {
        **{f"seconds_{name}": statistics.median(seconds[name]) for name in names},
        **{f"memory_mb_{name}": memory[name] for name in names},
        **ratios,
        **accuracy,
    }
    if args.growth:
        growth = measure_growth(args, seconds)
        print(format_table(["time at the double of", *SYSTEMS], _transposed(growth)))
        summary |= {f"growth_{name}_{size}": value for name, sizes in growth.items() for size, value in sizes.items()}
    summary |= {key: value for key, value in asdict(args).items() if key not in ("output_dir", "memory_of")}
    summary |= provenance(0, "cpu")
    if args.output_dir:
        write_json(Path(args.output_dir) / SUMMARY, summary)
    return summary


def _transposed(growth: dict[str, dict[str, float]]) -> list[list]:
    return [[size, *(growth[name][size] for name in SYSTEMS)] for size in growth["exact"]]


if __name__ == "__main__":
    run_recipe(main, BenchmarkArguments)
