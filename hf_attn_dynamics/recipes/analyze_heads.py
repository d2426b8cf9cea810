# Licensed under the Apache License, Version 2.0.
"""Read the attention heads of a model: how sure they are, where they look, what they do, which ones matter.

    accelerate launch recipes/analyze_heads.py                    # a demonstration on a model that is trained first
    accelerate launch recipes/analyze_heads.py --model bert-base-uncased --data en_ewt-ud-dev.conllu
    accelerate launch recipes/analyze_heads.py --model runs/pruned/model --data reviews/ --max_sentences 2000

One pass over the sentences measures confidence, entropy, distances of heads, relative positions, and roles: syntactic
(for sentences with trees), rare words, duplicate tokens (Voita et al. 2019, sections 4 and 5; Clark et al. 2019).
Gradient importance (Michel et al. 2019) is measured of masked and of causal language models, relevance by LRP of
models that give logits. Models may be of any architecture whose attention passes the interface of Transformers; of
encoder–decoder models, the encoder is read. Of several processes, the first one measures.

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
    functions_kept  number of heads with each function, of all heads, of the more important half, and of those that
                    each checkpoint of `--pruned` has left; `heads` is their number
    roles           for each role: site, layer, head and accuracy of the best head, baseline, count of cases
    not_measured    what, and why
    seconds         of the pass
    model, num_processes, and seed, device, command and versions
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedModel

from .. import (
    DuplicateTokens,
    HeadConfidence,
    HeadDistance,
    HeadEntropy,
    MaskedLanguageModelCollator,
    RareWords,
    RelativePositions,
    RoleScores,
    SyntacticRoles,
    head_importance,
    head_relevance,
    observe,
)
from ..data.words import encode_words
from ..models.head_roles import locate_heads
from ..models.head_sites import heads_by_site
from ..models.token_mask import labels_of_tokens
from .heads_page import (
    FUNCTION_KEYS,
    Example,
    Head,
    draw,
    examples_of,
    functions_kept,
    functions_of,
    kept_table,
    role_figures,
    role_table,
    rows_of,
    tables_of,
    worth_knowing,
    write_report,
)
from .reading import ReadingArguments, Sentences, load_model, load_sentences
from .run import (
    NOT_OF_THE_RUN,
    SUMMARY,
    begin_run,
    check_output_dir,
    device_name,
    format_table,
    provenance,
    refuse_bad_input,
    run_recipe,
    start_processes,
    write_csv,
    write_json,
)


REPORT = "report.html"


@dataclass
class AnalyzeArguments(ReadingArguments):
    """Model, sentences, and how much of the slower measures."""

    output_dir: str = field(default="runs/analyze_heads", metadata={"help": "Where to write."})
    relations: list[str] | None = field(
        default=None, metadata={"help": "Dependencies that are looked at; nsubj, obj, amod, advmod, det and case."}
    )
    pruned: list[str] | None = field(
        default=None, metadata={"help": "Checkpoints of the same model without some heads: which functions are left."}
    )
    frequent: int = field(default=500, metadata={"help": "Tokens that are called frequent, for rare words."})
    importance_sentences: int = field(default=256, metadata={"help": "Sentences for importance; 0: not measured."})
    relevance_sentences: int = field(default=32, metadata={"help": "Sentences for relevance; 0: not measured."})

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "frequent")
        self.check_at_least(0, "importance_sentences", "relevance_sentences")


# ---------------------------------------------------------------------------------------------------------------------
# Sentences
# ---------------------------------------------------------------------------------------------------------------------


def labelled_batches(
    model: PreTrainedModel, sentences: Sentences, batch_size: int, limit: int, seed: int
) -> Iterable[dict[str, torch.Tensor]]:
    """Batches of the first sentences, and what a language model is to find: masked tokens, or each next one."""
    name = type(model).__name__
    if name.endswith("ForMaskedLM"):
        collator = MaskedLanguageModelCollator(sentences.tokenizer, seed=seed)
        return (collator([{"input_ids": ids} for ids in rows]) for rows in sentences.rows(batch_size, limit))
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        batches = sentences.batches(batch_size, limit)
        return ({**one, "labels": labels_of_tokens(one["input_ids"], one["attention_mask"])} for one in batches)
    raise ValueError(f"needs a masked or causal language model, not {name}.")


def examples(sentences: Sentences) -> list[Example]:
    """Sentences to show."""
    trees = [*sentences.trees, *[None] * (len(sentences.ids) - len(sentences.trees))]
    encoded = [
        encode_words(tree, sentences.tokenizer) if tree else (ids, []) for ids, tree in zip(sentences.ids, trees)
    ]
    return [Example(ids, words, tree) for (ids, words), tree in zip(encoded, trees)]


def short_names(checkpoints: list[str]) -> dict[str, str]:
    """Checkpoints by the last part of their paths, or by all of it where that does not tell them apart."""
    short = {Path(checkpoint).name: checkpoint for checkpoint in checkpoints}
    return short if len(short) == len(checkpoints) else {checkpoint: checkpoint for checkpoint in checkpoints}


def kept_heads(checkpoint: str, model: PreTrainedModel) -> list[Head]:
    """Heads that a checkpoint has left, of those of the model that it was before."""
    try:
        config = AutoConfig.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise ValueError(f"pruned: {checkpoint!r} can not be loaded: {' '.join(str(error).split())}") from error
    layers = locate_heads(model)
    name = f"pruned_heads of {checkpoint}"
    removed = heads_by_site(
        getattr(config, "pruned_heads", None) or {}, {one.site: one.num_heads for one in layers}, name, from_json=True
    )
    return [(*one.site, head) for one in layers for head in one.heads if head not in removed.get(one.site, ())]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def observers_for(args: AnalyzeArguments, sentences: Sentences, not_measured: dict[str, str]) -> dict[str, Any]:
    """All observers that have something to see, by name."""
    tokenizer = sentences.tokenizer
    ends = sorted({token for token in (tokenizer.eos_token_id, tokenizer.sep_token_id) if token is not None})

    def syntactic_roles() -> SyntacticRoles:
        if not sentences.trees:
            raise ValueError("these sentences have no trees; .conllu files do.")
        return SyntacticRoles(sentences.trees, tokenizer, **({"relations": args.relations} if args.relations else {}))

    makers: dict[str, Callable] = {
        "confidence": lambda: HeadConfidence(ends),
        "entropy": HeadEntropy,
        "distance": HeadDistance,
        "relative_positions": lambda: RelativePositions(excluded_ids=ends),
        "syntactic_roles": syntactic_roles,
        "rare_words": lambda: RareWords(sentences.counts, tokenizer.all_special_ids, args.frequent),
        "duplicate_tokens": lambda: DuplicateTokens(tokenizer.all_special_ids),
    }
    observers = {}
    for name, make in makers.items():
        try:
            observers[name] = make()
        except ValueError as error:
            if name == "syntactic_roles" and args.relations:
                raise  # they were asked for
            not_measured[name] = str(error)
    return observers


def check_heads(model: PreTrainedModel) -> None:
    """Refuses a model whose attention can not be observed, or that has none."""
    with observe(model, HeadEntropy()):
        pass
    if not any(layer.heads and getattr(layer.module, "hard_coded", None) is None for layer in locate_heads(model)):
        raise ValueError(f"the {type(model).__name__} has no head left that computes attention; name another model.")


def measure(
    args: AnalyzeArguments,
    model: PreTrainedModel,
    sentences: Sentences,
    observers: dict[str, Any],
    not_measured: dict[str, str],
) -> tuple[dict[str, Any], float]:
    """Results by name, and the seconds of the pass."""
    batches = list(sentences.batches(args.batch_size))
    start = time.perf_counter()
    with torch.no_grad(), observe(model, *observers.values()) as seen:
        for batch in tqdm(batches, desc="heads", disable=args.disable_tqdm):
            model(**{name: value.to(model.device) for name, value in batch.items()})
    results = {}
    for name in observers:
        try:
            results[name] = with_cases(getattr(seen, name))
        except ValueError as error:
            not_measured[name] = str(error)
    seconds = time.perf_counter() - start
    progress = not args.disable_tqdm
    slower = {
        "importance": (
            args.importance_sentences,
            lambda n: head_importance(
                model,
                labelled_batches(model, sentences, args.batch_size, n, args.seed),
                normalize="l2",
                progress=progress,
            ),
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
        except (ValueError, torch.OutOfMemoryError) as error:
            not_measured[name] = str(error)
    return results, seconds


def with_cases(result: Any) -> Any:
    """A result as it is, but for roles that never had a case."""
    if isinstance(result, RoleScores):
        roles = [role for role, counts in result.counts.items() if any(counts.values())]
        if not roles:
            raise ValueError("there is no case in these sentences.")
        by_role = ("accuracy", "baselines", "counts")
        result = replace(result, **{name: {role: getattr(result, name)[role] for role in roles} for name in by_role})
    return result


# ---------------------------------------------------------------------------------------------------------------------


def main(args: AnalyzeArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    state = start_processes()
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
        if args.model is None:
            begin_run(folder, values)  # a model that is trained here can be gone on with
        model, tokenizer = load_model(args)
        model.to(state.device).eval()
        sentences = Sentences(trees, texts, model, tokenizer)
        kept = {name: kept_heads(checkpoint, model) for name, checkpoint in short_names(args.pruned or []).items()}
        check_heads(model)
        not_measured: dict[str, str] = {}
        observers = observers_for(args, sentences, not_measured)
    begin_run(folder, values)
    results, seconds = measure(args, model, sentences, observers, not_measured)
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
        "functions_kept": functions_kept(functions, results, kept),
        "not_measured": not_measured,
        "seconds": seconds,
        "num_processes": state.num_processes,
        **provenance(args.seed, device_name(state)),
    }
    for name, result in results.items():
        result.save(folder / "results" / f"{name}.json")
    write_csv(folder / "heads.csv", rows_of(tables_of(results), functions))
    findings = worth_knowing(results, functions)
    drawn = examples_of(findings, model, tokenizer, examples(sentences))
    pictures = draw(results, functions, summary["functions_kept"], folder)
    write_report(summary, pictures, findings, drawn, folder / REPORT)
    write_json(folder / SUMMARY, summary)
    print_summary(summary, folder)


def print_summary(summary: dict, folder: Path) -> None:
    if summary["roles"]:
        print("\n" + format_table(*role_table(summary)))
    if len(summary["functions_kept"]) > 1:
        print("\n" + format_table(*kept_table(summary)))
    print(
        f"\n{summary['sentences']:,} sentences read, {summary['too_long']:,} too long; mean confidence "
        f"{summary['mean_confidence']:.2f}."
    )
    for name, reason in summary["not_measured"].items():
        print(f"Not measured: {name.replace('_', ' ')}, {reason}")
    print(f"Everything is in {folder}: {REPORT}, heads.csv, {SUMMARY}, pictures, results/.")


def cli() -> None:
    """Runs the recipe with the words of the command line."""
    run_recipe(main, AnalyzeArguments)


if __name__ == "__main__":
    cli()
