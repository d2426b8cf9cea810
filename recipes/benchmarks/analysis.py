# Licensed under the Apache License, Version 2.0.
"""What statistics of attention cost: time and peak memory of a pass over a corpus, beside a pass without them.

    python recipes/benchmarks/analysis.py
    python recipes/benchmarks/analysis.py --model models/minilm --data ud-en-ewt/en_ewt-ud-dev.conllu.gz

Systems, all with the same model and batches of sentences sorted by length:
    plain       a forward pass, `sdpa` attention
    observed    the same, with confidence, entropy, distance and relative positions of all heads observed
    eager       `eager` attention that returns all maps, and the same statistics from the maps of each batch
    kept        `eager` attention, all maps kept until the end

Without a model: one of 6 layers × 384 with random weights; without files: the embedded corpus. A second table is of
sentences that are `--long` tokens each. Times are CPU and wall-clock seconds, the systems taking turns in one process;
ratios are medians over rounds of the ratio of CPU seconds within a round. Peak memory is the largest resident size of
a process of its own for each system and number of sentences, less the size before the model was loaded (Linux only).

Keys of `summary.json`, for the corpus (no suffix) and long sentences (`_long`): `cpu_seconds_SYSTEM`,
`wall_seconds_SYSTEM`, `time_observed_to_plain`, `time_eager_to_plain`; for the corpus and the longest tenth of it
(`_tenth`): `memory_mb_SYSTEM`, `memory_observed_to_plain`; and the settings.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from benchmarking import (
    BenchmarkArguments,
    Seconds,
    in_new_process,
    median_ratio,
    medians,
    peak_resident_mb,
    take_turns,
    write_summary,
)
from transformers import AutoModel, BertConfig, BertModel, PreTrainedModel

from hf_attn_dynamics import HeadConfidence, HeadDistance, HeadEntropy, RelativePositions, observe
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.analysis.observers.base import ObservedTokens
from hf_attn_dynamics.analysis.observers.distances import sample_tokens
from hf_attn_dynamics.analysis.sentences import batches_by_length, padded
from hf_attn_dynamics.data import embedded_corpus, load_conllu, train_byte_level_bpe
from hf_attn_dynamics.recipes.arguments.base import flag
from hf_attn_dynamics.recipes.checkpoints import load_tokenizer, refused
from hf_attn_dynamics.recipes.run import run_recipe


SYSTEMS = ("plain", "observed", "eager")

Batch = dict[str, torch.Tensor]


@dataclass
class AnalysisArguments(BenchmarkArguments):
    """The model, the corpus and its batches."""

    model: str | None = flag(None, "Checkpoint with a tokenizer; by default, a model with random weights.")
    data: list[str] = flag([], "CoNLL-U files; the embedded corpus by default.", earlier="files")
    sentences: int = flag(2000, "Number of sentences of the corpus.")
    batch_size: int = flag(32, "Batch size, in sentences.")
    max_length: int = flag(128, "Maximum number of tokens per sentence; longer sentences are truncated.")
    long: int = flag(512, "Length of the long sentences, in tokens.")
    long_sentences: int = flag(8, "Number of long sentences, of which four are a batch.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "sentences", "batch_size", "max_length", "long", "long_sentences")


def load_data(args: AnalysisArguments, longest: int | None = None) -> tuple[list[Batch], list[Batch], list[int]]:
    """Batches of the corpus and of long sentences, and the ids that end a sentence.

    Args:
        args (`AnalysisArguments`): Flags.
        longest (`int`, *optional*): How many sentences of the corpus to take, the longest; all by default.
    """
    if args.data:
        texts = [tree.text for tree in load_conllu(args.data)]
    else:
        documents = embedded_corpus(max_characters=400 * args.sentences)
        texts = [paragraph for document in documents for paragraph in document.split("\n")]
    texts = texts[: args.sentences]
    tokenizer = load_tokenizer("model", args.model) if args.model else train_byte_level_bpe(texts, 2000)
    sentences = [tokenizer(text, truncation=True, max_length=args.max_length)["input_ids"] for text in texts]
    if len(sentences) < args.sentences:
        raise ValueError(f"sentences is {args.sentences}, but there are {len(sentences)}; name more data.")
    stream = [token for sentence in sentences for token in sentence]
    stream *= math.ceil(args.long * args.long_sentences / len(stream))
    long = [stream[start : start + args.long] for start in range(0, args.long * args.long_sentences, args.long)]
    sentences = sorted(sentences, key=len)[-(longest or len(sentences)) :]
    ends = [one for one in (tokenizer.sep_token_id, tokenizer.eos_token_id) if one is not None]
    return _batches(sentences, args.batch_size), _batches(long, 4), ends


def _batches(sentences: list[list[int]], size: int) -> list[Batch]:
    return [padded(some, 0) for some in batches_by_length(sentences, size)]


def load_model(args: AnalysisArguments) -> PreTrainedModel:
    if args.model:
        with refused("model", args.model):
            return AutoModel.from_pretrained(args.model).eval()
    torch.manual_seed(args.seed)
    config = BertConfig(
        vocab_size=2000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=max(args.long, args.max_length),
    )
    return BertModel(config).eval()


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


def time_systems(args: AnalysisArguments, model: PreTrainedModel, batches: list[Batch], ends: list[int]) -> Seconds:
    """Seconds of a pass of each system over the batches."""
    for name in SYSTEMS:  # warm up
        run(name, model, batches[-1:], ends)
    return take_turns({name: partial(run, name, model, batches, ends) for name in SYSTEMS}, args.rounds, warm_up=0)


def results_of_times(seconds: Seconds, suffix: str) -> dict[str, float]:
    """Medians, and medians of ratios of CPU seconds within a round."""
    results = {
        **{f"cpu_seconds_{name}": median for name, median in medians(seconds.cpu).items()},
        **{f"wall_seconds_{name}": median for name, median in medians(seconds.wall).items()},
        **{f"time_{name}_to_plain": median_ratio(seconds.cpu, name, "plain") for name in SYSTEMS[1:]},
    }
    return {f"{key}{suffix}": value for key, value in results.items()}


def peak_memory(args: AnalysisArguments, name: str, longest: int) -> float:
    """Peak memory of a pass of one system over the longest sentences in MB, in a process of its own."""
    batches, _, ends = load_data(args, longest)
    before = peak_resident_mb()
    run(name, load_model(args), batches, ends)
    return peak_resident_mb() - before


def main(args: AnalysisArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    with refuse_bad_input():
        corpus, long, ends = load_data(args)
        model = load_model(args)
    results: dict = {}
    for batches, suffix in ((corpus, ""), (long, "_long")):
        results |= results_of_times(time_systems(args, model, batches, ends), suffix)
    for longest, suffix in ((args.sentences, ""), (args.sentences // 10, "_tenth")):
        memory = {name: in_new_process(peak_memory, args, name, longest) for name in (*SYSTEMS, "kept")}
        results |= {f"memory_mb_{name}{suffix}": value for name, value in memory.items()}
        results[f"memory_observed_to_plain{suffix}"] = memory["observed"] / memory["plain"]
    print(format_table(["", ""], [[key.replace("_", " "), value] for key, value in results.items()]))
    return write_summary(args, results)


if __name__ == "__main__":
    run_recipe(main)
