# Licensed under the Apache License, Version 2.0.
"""What contributions cost: time, peak memory and accuracy, beside reverse-mode differentiation.

    python recipes/benchmarks/attribution.py
    python recipes/benchmarks/attribution.py --num_hidden_layers 12 --growth false
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

The last three would take minutes: they run on one of `--sample` outputs, and their times are multiplied by it. Times
are CPU seconds, which other processes hardly disturb; systems take turns in one process, on one thread unless
`--cpu_threads` says otherwise, and ratios are medians over rounds of the ratio within a round. Peak memory is the
largest resident size of a process of its own for each system, less the size before its work began (Linux only). A last
table shows how the times of this package grow when length, layers or width double, each run once.

Keys of `summary.json`: `seconds_SYSTEM`, `memory_mb_SYSTEM`, `local_to_forward`, `local_loop_to_local`,
`loop_to_exact`, `jacrev_to_exact`, `exact_to_probes`, `batch_to_singly`; `pearson_probes` (mean correlation of the
rows of estimated and exact contributions) and `pearson_probes_lowest_layer`; `growth_SYSTEM_SIZE` (time at the double
of a size to time at one); and the settings.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from benchmarking import (
    BenchmarkArguments,
    in_new_process,
    median_ratio,
    medians,
    peak_resident_mb,
    take_turns,
    write_summary,
)
from transformers import AutoModel, BertConfig, BertModel, PreTrainedModel

from hf_attn_dynamics import correlate, global_contribution, local_contribution
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.arguments.base import flag
from hf_attn_dynamics.recipes.checkpoints import refused
from hf_attn_dynamics.recipes.run import run_recipe


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
SIZES = {"length": "length", "layers": "num_hidden_layers", "width": "hidden_size"}  # flags, by the name in keys


@dataclass
class AttributionArguments(BenchmarkArguments):
    """Sizes of the model and the sentence."""

    model: str | None = flag(None, "Checkpoint of a BERT; by default, a model of the sizes below with random weights.")
    length: int = flag(24, "Length of the sentence, in tokens.")
    num_hidden_layers: int = flag(6, "Number of layers.", earlier="layers")
    hidden_size: int = flag(
        384, "Hidden size; heads have 32 dimensions, feed-forward layers are four times as wide.", earlier="width"
    )
    probes: int = flag(32, "Number of random directions per token.")
    chunk_size: int = flag(768, "Tangents per chunk; lower it to save memory.")
    sample: int = flag(64, "The peers run on one of so many outputs.")
    rounds: int = flag(3, "Number of measured turns of each system.")
    growth: bool = flag(True, "Also measure at the double of each size.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "num_hidden_layers", "probes", "chunk_size", "sample")
        if self.model and self.growth:
            raise ValueError("growth doubles the sizes of a random model; pass --growth false with --model.")
        if self.length < 4:
            raise ValueError(f"length must be at least 4, for sentences of a quarter of it, got {self.length}.")


def build_model(args: AttributionArguments) -> PreTrainedModel:
    if args.model:
        with refused("model", args.model):
            return AutoModel.from_pretrained(args.model, attn_implementation="eager").eval()
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=max(args.hidden_size // 32, 1),
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=max(512, 2 * args.length),
        attn_implementation="eager",
    )
    return BertModel(config).eval()


def build_systems(model: PreTrainedModel, args: AttributionArguments) -> dict[str, Callable[[], None]]:
    """What runs each system once; the peers on a sample of the outputs."""
    generator = torch.Generator().manual_seed(args.seed)
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


def time_systems(args: AttributionArguments, names: tuple[str, ...]) -> dict[str, list[float]]:
    """CPU seconds of each run of each system; those of peers are multiplied by `sample`."""
    systems = build_systems(build_model(args), args)
    for name in ("forward", "local"):  # warm up
        systems[name]()
    seconds = take_turns({name: systems[name] for name in names}, args.rounds, warm_up=0).cpu
    factor = {name: args.sample if name in PEERS else 1 for name in names}
    return {name: [factor[name] * one for one in taken] for name, taken in seconds.items()}


def accuracy_of_probes(args: AttributionArguments) -> dict[str, float]:
    """Mean correlation of the rows of estimated contributions with the exact ones, and that of the worst layer."""
    model = build_model(args)
    ids = torch.randint(999, (1, args.length), generator=torch.Generator().manual_seed(args.seed))
    exact = global_contribution(model, {"input_ids": ids}, chunk_size=args.chunk_size)
    probes = global_contribution(model, {"input_ids": ids}, "probes", probes=args.probes, chunk_size=args.chunk_size)
    pearson = correlate(exact, probes).pearson["encoder"].mean(-1)
    return {"pearson_probes": pearson.mean().item(), "pearson_probes_lowest_layer": pearson.min().item()}


def peak_memory(args: AttributionArguments, name: str) -> float:
    """Peak memory of one system in MB, to be called in a process of its own."""
    systems = build_systems(build_model(args), args)
    systems["forward"]()
    before = peak_resident_mb()
    systems[name]()
    return peak_resident_mb() - before


def measure_growth(args: AttributionArguments, at_one: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Time at the double of each size to time at one, by system."""
    growth: dict[str, dict[str, float]] = {name: {} for name in SYSTEMS}
    for size, name_of_flag in SIZES.items():
        double = replace(args, rounds=1, **{name_of_flag: 2 * getattr(args, name_of_flag)})
        seconds = time_systems(double, SYSTEMS)
        for name in SYSTEMS:
            growth[name][size] = seconds[name][0] / statistics.median(at_one[name])
    return growth


def main(args: AttributionArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    with refuse_bad_input():
        build_model(args)  # refuses a checkpoint that cannot be loaded
    names = SYSTEMS + BATCHES + PEERS
    seconds = time_systems(args, names)
    memory = {name: in_new_process(peak_memory, args, name) for name in names}
    ratios = {ratio: median_ratio(seconds, one, other) for ratio, (one, other) in RATIOS.items()}
    accuracy = accuracy_of_probes(args)
    times = medians(seconds)
    print(format_table(["system", "CPU seconds", "MB"], [[_words(name), times[name], memory[name]] for name in names]))
    print(format_table(["", ""], [[_words(name), value] for name, value in {**ratios, **accuracy}.items()]))
    results = {
        **{f"seconds_{name}": times[name] for name in names},
        **{f"memory_mb_{name}": memory[name] for name in names},
        **ratios,
        **accuracy,
    }
    if args.growth:
        growth = measure_growth(args, seconds)
        print(format_table(["time at the double of", *SYSTEMS], _transposed(growth)))
        results |= {f"growth_{name}_{size}": value for name, sizes in growth.items() for size, value in sizes.items()}
    return write_summary(args, results)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _transposed(growth: dict[str, dict[str, float]]) -> list[list]:
    return [[size, *(growth[name][size] for name in SYSTEMS)] for size in growth["exact"]]


if __name__ == "__main__":
    run_recipe(main)
