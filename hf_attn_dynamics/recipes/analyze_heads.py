# Licensed under the Apache License, Version 2.0.
"""Report on the attention heads of a model: confidence, positions, functions, importance.

    accelerate launch recipes/analyze_heads.py                    # a demonstration on a model that is trained first
    accelerate launch recipes/analyze_heads.py --model bert-base-uncased --data en_ewt-ud-dev.conllu
    accelerate launch recipes/analyze_heads.py --model runs/pruned/model --data reviews/ --max_examples 2000
    accelerate launch recipes/analyze_heads.py --model runs/dense/model --compare runs/pruned/model --data reviews/

One pass over the sentences measures confidence, entropy, distances between heads, relative positions, and roles:
syntactic (for sentences with trees), rare words, duplicate tokens, delimiters (Voita et al. 2019, sections 4 and 5;
Clark et al. 2019). Gradient importance (Michel et al. 2019) is computed for masked and causal language models,
relevance (LRP) for models that return logits. Any architecture on the attention interface of Transformers is
supported; of an encoder–decoder model, the encoder is read. With several processes, the first one measures.

`.conllu` files have trees; other files (txt, jsonl, csv, tsv, parquet) have a sentence per line or row. Sentences with
more tokens than the model takes are counted and left out, never truncated.

With `--compare`, another version of the model (pruned, guided, or another step of training) reads the same sentences,
and the report shows both side by side, and what moved.

Writes to `--output_dir`: `report.html`, one interactive page without network access; `heads.csv`, a row per head;
`summary.json`; pictures (PNG and SVG); `config.yaml`, the values of the run; `reading.json`, all results, which
`HeadReading.load` reads; `results/NAME.json`, each result by itself, which its class loads; with `--compare`,
`compared.json`, all results of the other model.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import HeadReading, MaskedLanguageModelCollator, SyntacticRoles, read_heads
from .._tables import format_table
from ..analysis.head_scores import Head
from ..analysis.pages.compared_explorer import moved_table
from ..analysis.pages.comparison import Comparison
from ..analysis.pages.reading_page import kept_table, reading_drawings, role_table
from ..analysis.reading import check_readable
from ..analysis.sentences import Sentences
from ..models.head_roles import locate_heads
from ..models.head_sites import heads_by_site
from .arguments.analyze_heads import AnalyzeArguments
from .checkpoints import load_config
from .pictures import keep_all
from .reading import load_model, load_reader, load_sentences, page_facts
from .run import SUMMARY, Run, run_recipe, write_csv
from .summaries.analyze_heads import AnalyzeSummary


REPORT, READING, COMPARED = "report.html", "reading.json", "compared.json"


def short_names(checkpoints: list[str]) -> dict[str, str]:
    """Checkpoints by the last part of their paths, or by their whole paths if the last parts are not unique."""
    short = {Path(checkpoint).name: checkpoint for checkpoint in checkpoints}
    return short if len(short) == len(checkpoints) else {checkpoint: checkpoint for checkpoint in checkpoints}


def kept_heads(checkpoint: str, model: PreTrainedModel) -> list[Head]:
    """Heads of the model that a pruned checkpoint still has."""
    config = load_config("pruned:", checkpoint)
    layers = locate_heads(model)
    name = f"pruned_heads of {checkpoint}"
    removed = heads_by_site(
        getattr(config, "pruned_heads", None) or {}, {one.site: one.num_heads for one in layers}, name, from_json=True
    )
    return [(*one.site, head) for one in layers for head in one.heads if head not in removed.get(one.site, ())]


def collator_for(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> MaskedLanguageModelCollator | None:
    """Masks tokens for a masked language model; None for other models, whose labels are the tokens."""
    is_masked = type(model).__name__.endswith("ForMaskedLM")
    return MaskedLanguageModelCollator(tokenizer, seed=seed) if is_masked else None


def main(args: AnalyzeArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args)
    with run.preparing():
        trees, texts = load_sentences(args)
        if args.model is None:
            run.claim()  # the model of the demonstration is trained in the folder
        model, tokenizer = load_model(args)
        sentences = Sentences([*trees, *texts], model, tokenizer, name="data")
        kept = {name: kept_heads(checkpoint, model) for name, checkpoint in short_names(args.pruned or []).items()}
        check_readable(model)
        if args.relations:
            SyntacticRoles(sentences.trees, tokenizer, args.relations)  # raises if no tree has a relation
        readers = [(model, sentences, args.model_name)]
        if args.compare is not None:
            readers.append(load_other(args, model, [*trees, *texts]))
    readings = [read(args, one.to(run.state.device), *rest) for one, *rest in readers] if run.is_main else None
    [readings] = broadcast_object_list([readings])
    reading, *compared = readings
    comparison = Comparison(*readings).to_dict() if compared else None
    summary = AnalyzeSummary(**reading.summary(), functions_kept=reading.functions_kept(kept), comparison=comparison)
    return run.finish(
        summary,
        lambda: publish(reading, kept, summary, run.folder, *compared),
        lambda: print_report(summary, run.folder),
    )


def load_other(
    args: AnalyzeArguments, model: PreTrainedModel, texts: list[Any]
) -> tuple[PreTrainedModel, Sentences, str]:
    """The model of `--compare`, the same sentences for it, and its name."""
    other, tokenizer = load_reader("compare", args.compare)
    sentences = Sentences(texts, other, tokenizer, name="data")
    check_readable(other)
    shapes = [{one.site: one.num_heads for one in locate_heads(each)} for each in (model, other)]
    if shapes[0] != shapes[1]:
        own, its = (f"{len(shape)} attention layers with {max(shape.values())} heads" for shape in shapes)
        raise ValueError(
            f"compare {args.compare!r} has {its}, the model {own}: name another version of the same model."
        )
    return other, sentences, args.compare_name or args.compare


def read(args: AnalyzeArguments, model: PreTrainedModel, sentences: Sentences, name: str) -> HeadReading:
    """Measures all heads of a model on its device."""
    reading = read_heads(
        model,
        sentences,
        relations=args.relations,
        frequent=args.frequent,
        importance_sentences=args.importance_sentences,
        relevance_sentences=args.relevance_sentences,
        contributions=args.contributions or (),
        collator=collator_for(model, sentences.tokenizer, args.seed),
        batch_size=args.batch_size,
        progress=not args.disable_tqdm,
    )
    return replace(reading, model=name)


def publish(
    reading: HeadReading,
    kept: dict[str, list[Head]],
    summary: AnalyzeSummary,
    folder: Path,
    compared: HeadReading | None = None,
) -> None:
    """Writes the report, the pictures, and the tables."""
    reading.save(folder / READING)
    if compared is not None:
        compared.save(folder / COMPARED)
    for name, result in reading.results.items():
        result.save(folder / "results" / f"{name}.json")
    write_csv(folder / "heads.csv", reading.rows())
    reading.save_page(folder / REPORT, kept, page_facts(summary.provenance), pictures=folder, compare=compared)
    keep_all(reading_drawings(reading, kept), folder)


def print_report(summary: AnalyzeSummary, folder: Path) -> None:
    if summary.roles:
        print("\n" + format_table(*role_table(summary.roles)))
    if len(summary.functions_kept) > 1:
        print("\n" + format_table(*kept_table(summary.functions_kept)))
    if summary.comparison is not None:
        a, b = summary.comparison["names"]
        print(f"\nWhat moved from A, {a}, to B, {b}:\n" + format_table(*moved_table(summary.comparison["functions"])))
    print(
        f"\n{summary.sentences:,} sentences read, {summary.too_long:,} too long; mean confidence "
        f"{summary.mean_confidence:.2f}."
    )
    for name, reason in summary.not_measured.items():
        print(f"Not measured: {name.replace('_', ' ')}, {reason}")
    readings = READING if summary.comparison is None else f"{READING}, {COMPARED}"
    print(f"Everything is in {folder}: {REPORT}, heads.csv, {SUMMARY}, {readings}, pictures, results/.")


if __name__ == "__main__":
    run_recipe(main, summary=AnalyzeSummary)
