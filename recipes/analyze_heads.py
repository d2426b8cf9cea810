# Licensed under the Apache License, Version 2.0.
"""Read the attention heads of a model: how sure they are, where they look, what they do, which ones matter.

    accelerate launch recipes/analyze_heads.py                    # a demonstration on a model that is trained first
    accelerate launch recipes/analyze_heads.py --model bert-base-uncased --data en_ewt-ud-dev.conllu
    accelerate launch recipes/analyze_heads.py --model runs/pruned/model --data reviews/ --max_sentences 2000

One pass over the sentences measures confidence, entropy, distances of heads, relative positions, and roles: syntactic
(for sentences with trees), rare words, duplicate tokens (Voita et al. 2019, sections 4 and 5; Clark et al. 2019).
Gradient importance (Michel et al. 2019) is measured of masked language models, relevance by LRP of models that give
logits. Models may be of any architecture whose attention passes the interface of Transformers; of encoder–decoder
models, the encoder is read. Of several processes, the first one measures.

Data: `.conllu` files have trees; other files (txt, jsonl, csv, tsv, parquet) have a sentence a line or row. Sentences
with more tokens than the model takes are counted and left out, never cut.

Writes to `--output_dir`: `report.html`, a page to read from top to bottom, with everything in the file; `heads.csv`, a
row for each head; `summary.json`; pictures (PNG and SVG); `config.yaml` (the values of the run); `results/NAME.json`,
what each observer returned, which its class loads.

Keys of `summary.json`:
    sentences, tokens                   what was read
    too_long                            sentences that were left out
    sentences_with_trees
    layers, heads                       of each kind of site
    mean_confidence, mean_entropy       over heads
    positional_heads, syntactic_heads, rare_word_heads, duplicate_token_heads      their numbers
    roles           for each role: site, layer, head and accuracy of the best head, baseline, count of cases
    not_measured    what, and why
    seconds         of the pass
    model, num_processes, and seed, device, command and versions
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from datasets import Dataset
from heads_page import (
    FUNCTION_KEYS,
    Example,
    draw,
    examples_of,
    functions_of,
    role_figures,
    role_table,
    rows_of,
    tables_of,
    worth_knowing,
    write_report,
)
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_attn_dynamics
from hf_attn_dynamics import (
    DuplicateTokens,
    HeadConfidence,
    HeadDistance,
    HeadEntropy,
    MaskedLanguageModelCollator,
    RareWords,
    RelativePositions,
    SyntacticRoles,
    head_importance,
    head_relevance,
    load_pruned,
    observe,
)
from hf_attn_dynamics.analysis.running import longest_input
from hf_attn_dynamics.data import Tree, embedded_corpus, embedded_trees, load_conllu, load_texts, token_counts
from hf_attn_dynamics.data.words import encode_words
from hf_attn_dynamics.runs import (
    CONFIG,
    NOT_OF_THE_RUN,
    SUMMARY,
    RunArguments,
    check_output_dir,
    cpu_only,
    device_name,
    format_table,
    parse_yaml_or_flags,
    provenance,
    refuse_bad_input,
    run_recipe,
    write_csv,
    write_json,
    write_yaml,
)


REPORT = "report.html"


@dataclass
class AnalyzeArguments(RunArguments):
    """Model, sentences, and how much of the slower measures."""

    output_dir: str = field(default="runs/analyze_heads", metadata={"help": "Where to write."})
    model: str | None = field(
        default=None,
        metadata={"help": "Checkpoint; without, that of runs/pretrain_ag, or else a small one is trained first."},
    )
    data: list[str] | None = field(
        default=None, metadata={"help": "Files, folders or patterns, .conllu or text; without, embedded sentences."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the sentences in tables."})
    max_sentences: int | None = field(default=2000, metadata={"help": "Sentences that are read, from the first."})
    relations: list[str] | None = field(
        default=None, metadata={"help": "Dependencies that are looked at; nsubj, obj, amod, advmod, det and case."}
    )
    frequent: int = field(default=500, metadata={"help": "Tokens that are called frequent, for rare words."})
    importance_sentences: int = field(default=256, metadata={"help": "Sentences for importance; 0: not measured."})
    relevance_sentences: int = field(default=32, metadata={"help": "Sentences for relevance; 0: not measured."})
    batch_size: int = field(default=32, metadata={"help": "Sentences of a batch."})
    seed: int = field(default=42, metadata={"help": "Of masks, and of the model that is trained first."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bars."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("batch_size", "max_sentences", "frequent"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in ("importance_sentences", "relevance_sentences"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")


# ---------------------------------------------------------------------------------------------------------------------
# Model and sentences
# ---------------------------------------------------------------------------------------------------------------------


def load_model(args: AnalyzeArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint with the head it was saved with, if this can be told."""
    checkpoint = args.model or demonstration_model(args)
    try:
        tokenizer, config = (auto.from_pretrained(checkpoint) for auto in (AutoTokenizer, AutoConfig))
    except (OSError, ValueError) as error:
        raise ValueError(f"model {checkpoint!r} can not be loaded: {' '.join(str(error).split())}") from error
    if getattr(config, "pruned_heads", None) and not config.model_type.startswith("headwise-"):
        model = load_pruned(checkpoint)
    else:
        name = (getattr(config, "architectures", None) or [""])[0]
        model_class = getattr(transformers, name, None) or getattr(hf_attn_dynamics, name, None) or AutoModel
        model = model_class.from_pretrained(checkpoint)
    return model.get_encoder() if getattr(config, "is_encoder_decoder", False) else model, tokenizer


def demonstration_model(args: AnalyzeArguments) -> Path:
    """The model of the pretraining demonstration, or a small one, guided and trained for a minute."""
    import pretrain_ag

    folder = Path("runs/pretrain_ag/model")
    if not (folder / "config.json").is_file():
        folder = Path(args.output_dir) / "pretraining"
        if not (folder / "model" / "config.json").is_file():
            flags = {"compare": False, "max_steps": 200, "output_dir": folder}
            flags |= {
                name: getattr(args, name) for name in ("seed", "resume", "disable_tqdm", "device", "cpu_threads")
            }
            argv = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
            kinds = pretrain_ag.PretrainArguments, pretrain_ag.PretrainTrainingArguments
            pretrain_ag.main(*parse_yaml_or_flags(*kinds, presets=pretrain_ag.PRESETS, argv=argv))
        folder /= "model"
    return folder


def load_sentences(args: AnalyzeArguments) -> tuple[list[Tree], list[str]]:
    """Sentences with and without trees, together at most `max_sentences`."""
    if not args.data:
        paragraphs = (text for document in embedded_corpus() for text in document.split("\n"))
        trees, texts = embedded_trees(), itertools.islice(paragraphs, 300)
    else:
        parsed = [name for name in args.data if name.removesuffix(".gz").endswith(".conllu")]
        plain = [name for name in args.data if name not in parsed]
        trees = load_conllu(parsed) if parsed else []
        texts = load_texts(plain, None, text_column=args.text_column)["text"] if plain else []
    trees = trees[: args.max_sentences]
    left = None if args.max_sentences is None else args.max_sentences - len(trees)
    return trees, list(itertools.islice(texts, left))


class Sentences:
    """Sentences as tokens, those that are too long for a model left out.

    Args:
        trees, texts: Sentences with and without trees.
        model, tokenizer: What is to read them.
    """

    def __init__(
        self, trees: list[Tree], texts: list[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ):
        longest = longest_input(model)
        encoded = tokenizer([*(tree.text for tree in trees), *texts], verbose=False)["input_ids"]
        fits = [longest is None or len(ids) <= longest for ids in encoded]
        self.ids = [ids for ids, fit in zip(encoded, fits) if fit]
        self.trees = [tree for tree, fit in zip(trees, fits) if fit]
        self.too_long = len(encoded) - len(self.ids)
        if not self.ids:
            raise ValueError(f"data: none of {len(encoded)} sentences fits into the {longest} tokens of the model.")
        self.tokenizer = tokenizer
        self.counts = token_counts(Dataset.from_dict({"input_ids": self.ids}), len(tokenizer))

    def examples(self) -> list[Example]:
        """Sentences to show."""
        trees = [*self.trees, *[None] * (len(self.ids) - len(self.trees))]
        encoded = [encode_words(tree, self.tokenizer) if tree else (ids, []) for ids, tree in zip(self.ids, trees)]
        return [Example(ids, words, tree) for (ids, words), tree in zip(encoded, trees)]

    def batches(self, batch_size: int, limit: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Padded batches of the first sentences, those of about the same length together."""
        for rows in self._rows(batch_size, limit):
            yield dict(self.tokenizer.pad({"input_ids": rows}, return_tensors="pt"))

    def masked_batches(self, batch_size: int, limit: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
        """The same with some tokens masked, and these as labels."""
        collator = MaskedLanguageModelCollator(self.tokenizer, seed=seed)
        for rows in self._rows(batch_size, limit):
            yield collator([{"input_ids": ids} for ids in rows])

    def _rows(self, batch_size: int, limit: int | None) -> Iterator[list[list[int]]]:
        ids = sorted(self.ids[:limit], key=len)
        return (ids[start : start + batch_size] for start in range(0, len(ids), batch_size))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def observers_for(args: AnalyzeArguments, sentences: Sentences, not_measured: dict[str, str]) -> dict[str, Any]:
    """All observers that have something to see, by name."""
    tokenizer = sentences.tokenizer
    ends = sorted({token for token in (tokenizer.eos_token_id, tokenizer.sep_token_id) if token is not None})
    makers: dict[str, Callable] = {
        "confidence": lambda: HeadConfidence(ends),
        "entropy": HeadEntropy,
        "distance": HeadDistance,
        "relative_positions": lambda: RelativePositions(excluded_ids=ends),
        "syntactic_roles": lambda: SyntacticRoles(
            sentences.trees, tokenizer, **({"relations": args.relations} if args.relations else {})
        ),
        "rare_words": lambda: RareWords(sentences.counts, tokenizer.all_special_ids, args.frequent),
        "duplicate_tokens": lambda: DuplicateTokens(tokenizer.all_special_ids),
    }
    observers = {}
    for name, make in makers.items():
        try:
            observers[name] = make()
        except ValueError as error:
            not_measured[name] = str(error)
    return observers


def measure(
    args: AnalyzeArguments, model: PreTrainedModel, sentences: Sentences, not_measured: dict[str, str]
) -> tuple[dict[str, Any], float]:
    """Results by name, and the seconds of the pass."""
    observers = observers_for(args, sentences, not_measured)
    batches = list(sentences.batches(args.batch_size))
    start = time.perf_counter()
    with torch.no_grad(), observe(model, *observers.values()) as seen:
        for batch in tqdm(batches, desc="heads", disable=args.disable_tqdm):
            model(**{name: value.to(model.device) for name, value in batch.items()})
    results = {}
    for name in observers:
        try:
            results[name] = getattr(seen, name)
        except ValueError as error:
            not_measured[name] = str(error)
    seconds = time.perf_counter() - start
    progress = not args.disable_tqdm
    slower = {
        "importance": (
            args.importance_sentences,
            lambda n: head_importance(model, masked(model, sentences, args, n), normalize="l2", progress=progress),
        ),
        "relevance": (
            args.relevance_sentences,
            lambda n: head_relevance(
                model, sentences.batches(args.batch_size, n), rule="alpha_beta", progress=progress
            ),
        ),
    }
    for name, (count, scores_of) in slower.items():
        try:
            if not count:
                raise ValueError("not asked for.")
            results[name] = scores_of(count)
        except ValueError as error:
            not_measured[name] = str(error)
    return results, seconds


def masked(
    model: PreTrainedModel, sentences: Sentences, args: AnalyzeArguments, count: int
) -> Iterable[dict[str, torch.Tensor]]:
    if not type(model).__name__.endswith("ForMaskedLM"):
        raise ValueError(f"needs a masked language model, not {type(model).__name__}.")
    return sentences.masked_batches(args.batch_size, count, args.seed)


# ---------------------------------------------------------------------------------------------------------------------


def main(args: AnalyzeArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    state = PartialState(cpu=cpu_only())
    if state.is_main_process:
        analyze(args, state)
    state.wait_for_everyone()
    return json.loads((Path(args.output_dir) / SUMMARY).read_text(encoding="utf-8"))


def analyze(args: AnalyzeArguments, state: PartialState) -> None:
    """Measures, and writes everything."""
    with refuse_bad_input():
        values = {key: value for key, value in asdict(args).items() if key not in NOT_OF_THE_RUN}
        folder = check_output_dir(args.output_dir, values, args.resume)
        trees, texts = load_sentences(args)
        args.use_threads()
        model, tokenizer = load_model(args)
        model.to(state.device).eval()
        sentences = Sentences(trees, texts, model, tokenizer)
        not_measured: dict[str, str] = {}
        results, seconds = measure(args, model, sentences, not_measured)
    write_yaml(folder / CONFIG, values)
    functions = functions_of(results)
    confidence = results["confidence"]
    summary = {
        "model": args.model or "the demonstration",
        "sentences": len(sentences.ids),
        "tokens": sum(map(len, sentences.ids)),
        "too_long": sentences.too_long,
        "sentences_with_trees": len(sentences.trees),
        "layers": {kind: table.shape[0] for kind, table in confidence.items()},
        "heads": {kind: int((~table.isnan()).sum()) for kind, table in confidence.items()},
        "mean_confidence": confidence.mean(),
        "mean_entropy": results["entropy"].mean(),
        **{
            key: {kind: sum(head[0] == kind for head in functions[name]) for kind in confidence}
            for name, key in FUNCTION_KEYS.items()
        },
        "roles": role_figures(results),
        "not_measured": not_measured,
        "seconds": seconds,
        "num_processes": state.num_processes,
        **provenance(args.seed, device_name(state)),
    }
    for name, result in results.items():
        result.save(folder / "results" / f"{name}.json")
    write_csv(folder / "heads.csv", rows_of(tables_of(results), functions))
    findings = worth_knowing(results, functions)
    examples = examples_of(findings, model, tokenizer, sentences.examples())
    write_report(summary, draw(results, functions, folder), findings, examples, folder / REPORT)
    write_json(folder / SUMMARY, summary)
    print_summary(summary, folder)


def print_summary(summary: dict, folder: Path) -> None:
    if summary["roles"]:
        print("\n" + format_table(*role_table(summary)))
    print(
        f"\n{summary['sentences']:,} sentences read, {summary['too_long']:,} too long; mean confidence "
        f"{summary['mean_confidence']:.2f}."
    )
    print(f"Everything is in {folder}: {REPORT}, heads.csv, {SUMMARY}, pictures, results/.")


if __name__ == "__main__":
    run_recipe(main, AnalyzeArguments)
