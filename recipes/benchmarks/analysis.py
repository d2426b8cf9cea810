# Licensed under the Apache License, Version 2.0.
"""What statistics of attention cost: time and peak memory of a pass over a corpus, beside a pass without them.

    python recipes/benchmarks/analysis.py
    python recipes/benchmarks/analysis.py --model models/minilm --files ud-en-ewt/en_ewt-ud-dev.conllu.gz

Systems, all with the same model and batches of sentences sorted by length:
    plain       a forward pass, `sdpa` attention
    observed    the same, with confidence, entropy, distance and relative positions of all heads observed
    eager       `eager` attention that returns all maps, and the same statistics from the maps of each batch
    kept        `eager` attention, all maps kept until the end

Without a model: one of 6 layers × 384 with random weights; without files: the embedded corpus. A second table is of
sentences that are `long` tokens each. Times are CPU and wall-clock seconds, the systems taking turns in one process;
ratios are medians over rounds of the ratio of CPU seconds within a round. Peak memory is the largest resident size of
a process of its own for each system and number of sentences, less the size before the model was loaded (Linux only).

Keys of `summary.json`, for the corpus (no suffix) and long sentences (`_long`): `cpu_seconds_SYSTEM`,
`wall_seconds_SYSTEM`, `time_observed_to_plain`, `time_eager_to_plain`; for the corpus and the longest tenth of it
(`_tenth`): `memory_mb_SYSTEM`, `memory_observed_to_plain`; and the settings.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from guidance import peak_resident_mb
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedModel

from hf_attn_dynamics import HeadConfidence, HeadDistance, HeadEntropy, RelativePositions, observe
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.analysis.observers.base import ObservedTokens
from hf_attn_dynamics.analysis.observers.distances import sample_tokens
from hf_attn_dynamics.analysis.sentences import batches_by_length, padded
from hf_attn_dynamics.data import embedded_corpus, load_conllu, train_byte_level_bpe
from hf_attn_dynamics.recipes.run import SUMMARY, check_output_dir, provenance, run_recipe, write_json


SYSTEMS = ("plain", "observed", "eager")
OF_ONE_PROCESS = ("output_dir", "memory_of", "longest")

Batch = dict[str, torch.Tensor]


@dataclass
class BenchmarkArguments:
    """The model, the corpus and how it is cut into batches."""

    model: str | None = field(default=None, metadata={"help": "A model with its tokenizer; a random one by default."})
    files: list[str] = field(
        default_factory=list, metadata={"help": "CoNLL-U files; the embedded corpus if there are none."}
    )
    sentences: int = field(default=2000, metadata={"help": "Sentences of the corpus."})
    batch_size: int = field(default=32, metadata={"help": "Sentences of a batch."})
    longest: int | None = field(default=None, metadata={"help": "Take only so many of them, the longest."})
    max_length: int = field(default=128, metadata={"help": "Tokens of a sentence at most; the rest is cut off."})
    long: int = field(default=512, metadata={"help": "Tokens of a long sentence."})
    long_sentences: int = field(default=8, metadata={"help": "Long sentences, four a batch."})
    rounds: int = field(default=5, metadata={"help": "Runs of each system."})
    threads: int = field(default=1, metadata={"help": "Threads on the CPU."})
    output_dir: str | None = field(default=None, metadata={"help": "Where to write summary.json, if anywhere."})
    memory_of: str | None = field(default=None, metadata={"help": "Print the peak memory of one system, in MB."})


# ---------------------------------------------------------------------------------------------------------------------
# Model and data
# ---------------------------------------------------------------------------------------------------------------------


def load_data(args: BenchmarkArguments) -> tuple[list[Batch], list[Batch], list[int]]:
    """Batches of the corpus, the shortest sentences first, and of long sentences; the ids of the end of a sentence."""
    if args.files:
        texts = [tree.text for tree in load_conllu(args.files)]
    else:
        documents = embedded_corpus(max_characters=400 * args.sentences)
        texts = [paragraph for document in documents for paragraph in document.split("\n")]
    texts = texts[: args.sentences]
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else train_byte_level_bpe(texts, 2000)
    sentences = [tokenizer(text, truncation=True, max_length=args.max_length)["input_ids"] for text in texts]
    if len(sentences) < args.sentences:
        raise ValueError(f"sentences is {args.sentences}, but there are {len(sentences)}; name more files.")
    stream = [token for sentence in sentences for token in sentence]
    stream *= math.ceil(args.long * args.long_sentences / len(stream))
    long = [stream[start : start + args.long] for start in range(0, args.long * args.long_sentences, args.long)]
    sentences = sorted(sentences, key=len)[-(args.longest or len(sentences)) :]
    ends = [one for one in (tokenizer.sep_token_id, tokenizer.eos_token_id) if one is not None]
    return _batches(sentences, args.batch_size), _batches(long, 4), ends


def _batches(sentences: list[list[int]], size: int) -> list[Batch]:
    return [padded(some, 0) for some in batches_by_length(sentences, size)]


def load_model(args: BenchmarkArguments) -> PreTrainedModel:
    if args.model:
        return AutoModel.from_pretrained(args.model).eval()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=2000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=max(args.long, args.max_length),
    )
    return BertModel(config).eval()


# ---------------------------------------------------------------------------------------------------------------------
# Systems
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def run(name: str, model: PreTrainedModel, batches: list[Batch], ends: list[int], limit: int = 63) -> dict:
    """One pass of one system over some batches; returns the statistics of those that compute any, by name."""
    model.set_attn_implementation("eager" if name in ("eager", "kept") else "sdpa")
    if name == "observed":
        observers = HeadConfidence(ends), HeadEntropy(), HeadDistance(), RelativePositions(limit, ends)
        with observe(model, *observers) as seen:
            for batch in batches:
                model(**batch)
        return seen.results()
    kept, sums = [], {}
    for batch in batches:
        outputs = model(**batch, output_attentions=name != "plain")
        if name == "eager":
            found = sums_of_maps(torch.stack(outputs.attentions, 1), batch, ends, limit)
            sums = {key: [a + b for a, b in zip(sums.get(key, (0, 0)), pair)] for key, pair in found.items()}
        elif name == "kept":
            kept.append(outputs.attentions)
    return {key: total / count for key, (total, count) in sums.items()}


def sums_of_maps(
    maps: torch.Tensor, batch: Batch, ends: list[int], limit: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The same statistics of one batch, as one would write them with all maps at hand.

    Args:
        maps (`torch.Tensor` of shape `(batch, layers, heads, queries, keys)`): Attention weights.
        batch (`dict`): What was read, padded on the right.
        ends (`list[int]`): Tokens that do not count as targets.
        limit (`int`): The largest offset.

    Returns:
        `dict[str, tuple]`: sums, and what they are to be divided by: confidence and entropy of shape `(layers,
        heads)`; distances of pairs of heads, in the order of `triu_indices`; attention and largest weights by offset,
        `(layers, heads, 2 * limit + 1)`.
    """
    real = batch["attention_mask"].bool()
    rows, tokens, length = real[:, None, None], real.sum(), real.shape[1]
    excluded = torch.isin(batch["input_ids"], torch.tensor(ends))
    weights, keys = maps.masked_fill(excluded[:, None, None, None], 0).max(-1)
    entropies = entropy(maps)
    # The row of each sentence that is observed, which stands for all of its tokens.
    chosen, share = sample_tokens(ObservedTokens(batch["input_ids"], real), 1, seed=0)
    sentences = torch.arange(len(maps))
    some, alone = (table.flatten(1, 2)[sentences, :, chosen[:, 0]] for table in (maps, entropies))
    one, other = torch.triu_indices(some.shape[1], some.shape[1], 1)
    distance = sum(
        count * (entropy((row[one] + row[other]) / 2) - (h[one] + h[other]) / 2)
        for row, h, count in zip(some, alone, share[:, 0])
    )
    span = min(limit, length - 1)

    def by_offset(table: torch.Tensor) -> torch.Tensor:
        sums = [table.diagonal(offset, -2, -1).sum(-1) for offset in range(-span, span + 1)]
        return torch.nn.functional.pad(torch.stack(sums, -1), [limit - span] * 2)

    # Offsets beyond the limit are counted at two places more, and left out.
    offsets = (keys - torch.arange(length)).clamp(-limit - 1, limit + 1) + limit + 1
    counted = (rows & (weights > 0)).to(maps.dtype)
    largest = maps.new_zeros(*maps.shape[1:3], 2 * limit + 3)
    largest.scatter_add_(-1, *(table.permute(1, 2, 0, 3).flatten(2) for table in (offsets, counted)))
    return {
        "confidence": (weights.where(rows, 0).sum((0, 3)), tokens),
        "entropy": (entropies.where(rows, 0).sum((0, 3)), tokens),
        "distance": (distance, share.sum()),
        "attention": (by_offset((maps * rows[..., None]).sum(0)), by_offset((real[:, None] & real[..., None]).sum(0))),
        "largest": (largest[..., 1:-1], counted.sum((0, 3))[..., None]),
    }


def entropy(weights: torch.Tensor) -> torch.Tensor:
    """Entropy along the last dimension. The logarithm is vectorised, and `torch.special.entr` is not."""
    weights = weights.clamp(min=torch.finfo(weights.dtype).tiny)
    return -weights.log().mul_(weights).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Measures
# ---------------------------------------------------------------------------------------------------------------------


def time_systems(args: BenchmarkArguments, model: PreTrainedModel, batches: list[Batch], ends: list[int]) -> dict:
    """Seconds of each run of each system, taking turns: `{"cpu_seconds": {system: [...]}, "wall_seconds": …}`."""
    clocks = {"cpu_seconds": time.process_time, "wall_seconds": time.perf_counter}
    seconds: dict = {clock: {name: [] for name in SYSTEMS} for clock in clocks}
    for name in SYSTEMS:  # warm up
        run(name, model, batches[-1:], ends)
    for _ in range(args.rounds):
        for name in SYSTEMS:
            starts = {clock: read() for clock, read in clocks.items()}
            run(name, model, batches, ends)
            for clock, read in clocks.items():
                seconds[clock][name].append(read() - starts[clock])
    return seconds


def figures_of_times(seconds: dict, suffix: str) -> dict[str, float]:
    """Medians, and medians of ratios within a round."""
    cpu = seconds["cpu_seconds"]
    ratios = {
        f"time_{name}_to_plain": statistics.median(a / b for a, b in zip(cpu[name], cpu["plain"]))
        for name in SYSTEMS[1:]
    }
    medians = {
        f"{clock}_{name}": statistics.median(values) for clock, of in seconds.items() for name, values in of.items()
    }
    return {f"{key}{suffix}": value for key, value in {**medians, **ratios}.items()}


def peak_memory(args: BenchmarkArguments) -> float:
    """Peak memory of a pass of one system in MB, to be called in a process of its own."""
    batches, _, ends = load_data(args)
    before = peak_resident_mb()
    run(args.memory_of, load_model(args), batches, ends)
    return peak_resident_mb() - before


def peak_memory_elsewhere(args: BenchmarkArguments, name: str, longest: int) -> float:
    """[`peak_memory`] of the longest sentences in a new process."""
    values = {**asdict(args), "memory_of": name, "longest": longest, "output_dir": None}
    command = [sys.executable, __file__]
    for key, value in values.items():
        if value:
            command += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main(args: BenchmarkArguments) -> dict:
    """Run the benchmark; returns the summary."""
    torch.set_num_threads(args.threads)
    if args.memory_of:
        print(peak_memory(args))
        return {}
    with refuse_bad_input():
        if args.output_dir:
            check_output_dir(args.output_dir, {}, resume=False)
        corpus, long, ends = load_data(args)
        model = load_model(args)
    summary: dict = {}
    for batches, suffix in ((corpus, ""), (long, "_long")):
        summary |= figures_of_times(time_systems(args, model, batches, ends), suffix)
    for longest, suffix in ((args.sentences, ""), (args.sentences // 10, "_tenth")):
        memory = {name: peak_memory_elsewhere(args, name, longest) for name in (*SYSTEMS, "kept")}
        summary |= {f"memory_mb_{name}{suffix}": value for name, value in memory.items()}
        summary[f"memory_observed_to_plain{suffix}"] = memory["observed"] / memory["plain"]
    print(format_table(["", ""], [[key.replace("_", " "), value] for key, value in summary.items()]))
    summary |= {key: value for key, value in asdict(args).items() if key not in OF_ONE_PROCESS}
    summary |= provenance(0, "cpu")
    if args.output_dir:
        write_json(Path(args.output_dir) / SUMMARY, summary)
    return summary


if __name__ == "__main__":
    run_recipe(main, BenchmarkArguments)
