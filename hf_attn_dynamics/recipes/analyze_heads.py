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
row for each head; `summary.json`; pictures (PNG and SVG); `config.yaml` (the values of the run); `reading.json`, all
that was measured, which `HeadReading.load` reads; `results/NAME.json`, its parts, which their classes load.

Keys of `summary.json`:
    sentences, tokens                   what was read
    too_long                            sentences that were left out
    sentences_with_trees
    layers, heads                       of each kind of site
    mean_confidence, mean_entropy       over heads
    positional_heads, syntactic_heads, rare_word_heads, duplicate_token_heads      their numbers; null if not measured
    functions_kept  number of heads with each function, of all heads, of the more important half, and of those that
                    each checkpoint of `--pruned` has left; `heads` is their number
    roles           for each role: site, layer, head and accuracy of the best head, baseline, count of cases
    not_measured    what, and why
    seconds         of the pass
    model, num_processes, and seed, device, command and versions
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import MaskedLanguageModelCollator, SyntacticRoles, read_heads
from .._refusals import refuse_bad_input
from .._tables import format_table
from ..analysis.reading import check_readable
from ..analysis.reading_page import Head, kept_table, role_table
from ..analysis.sentences import Sentences
from ..models.head_roles import locate_heads
from ..models.head_sites import heads_by_site
from .arguments.analyze_heads import AnalyzeArguments
from .checkpoints import load_config
from .reading import load_model, load_sentences, page_facts
from .run import (
    NOT_OF_THE_RUN,
    SUMMARY,
    begin_run,
    check_output_dir,
    device_name,
    provenance,
    run_recipe,
    start_processes,
    write_csv,
    write_json,
)


REPORT, READING = "report.html", "reading.json"


def short_names(checkpoints: list[str]) -> dict[str, str]:
    """Checkpoints by the last part of their paths, or by all of it where that does not tell them apart."""
    short = {Path(checkpoint).name: checkpoint for checkpoint in checkpoints}
    return short if len(short) == len(checkpoints) else {checkpoint: checkpoint for checkpoint in checkpoints}


def kept_heads(checkpoint: str, model: PreTrainedModel) -> list[Head]:
    """Heads that a checkpoint has left, of those of the model that it was before."""
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
    """Masks tokens for a masked language model; labels of causal ones are the tokens themselves."""
    is_masked = type(model).__name__.endswith("ForMaskedLM")
    return MaskedLanguageModelCollator(tokenizer, seed=seed) if is_masked else None


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
        model.to(state.device)
        sentences = Sentences([*trees, *texts], model, tokenizer, name="data")
        kept = {name: kept_heads(checkpoint, model) for name, checkpoint in short_names(args.pruned or []).items()}
        check_readable(model)
        if args.relations:
            SyntacticRoles(sentences.trees, tokenizer, args.relations)  # refuses what no tree has
    begin_run(folder, values)
    reading = read_heads(
        model,
        sentences,
        relations=args.relations,
        frequent=args.frequent,
        importance_sentences=args.importance_sentences,
        relevance_sentences=args.relevance_sentences,
        collator=collator_for(model, tokenizer, args.seed),
        batch_size=args.batch_size,
        progress=not args.disable_tqdm,
    )
    reading = replace(reading, model=args.model_name)
    summary = {
        **reading.summary(),
        "functions_kept": reading.functions_kept(kept),
        "num_processes": state.num_processes,
        **provenance(args.seed, device_name(state)),
    }
    reading.save(folder / READING)
    for name, result in reading.results.items():
        result.save(folder / "results" / f"{name}.json")
    write_csv(folder / "heads.csv", reading.rows())
    reading.save_page(folder / REPORT, kept, page_facts(summary), pictures=folder)
    write_json(folder / SUMMARY, summary)
    print_summary(summary, folder)


def print_summary(summary: dict, folder: Path) -> None:
    if summary["roles"]:
        print("\n" + format_table(*role_table(summary["roles"])))
    if len(summary["functions_kept"]) > 1:
        print("\n" + format_table(*kept_table(summary["functions_kept"])))
    print(
        f"\n{summary['sentences']:,} sentences read, {summary['too_long']:,} too long; mean confidence "
        f"{summary['mean_confidence']:.2f}."
    )
    for name, reason in summary["not_measured"].items():
        print(f"Not measured: {name.replace('_', ' ')}, {reason}")
    print(f"Everything is in {folder}: {REPORT}, heads.csv, {SUMMARY}, {READING}, pictures, results/.")


if __name__ == "__main__":
    run_recipe(main)
