# Licensed under the Apache License, Version 2.0.
"""Guide a head of cross-attention to word alignments while a Transformer learns to translate.

    accelerate launch recipes/align_translation.py                                          # embedded number words
    accelerate launch recipes/align_translation.py recipes/configs/align_translation.yaml   # the same, explained
    accelerate launch recipes/align_translation.py --preset small --source_file train.de --target_file train.en \\
        --validation_source_file val.de --validation_target_file val.en --reference_alignments val.fwd val.rev

IBM Model 1 aligns the training text in both directions. One head of cross-attention is guided to the intersection with
the loss `cross_entropy`, as Garg et al. (2019, "Jointly Learning to Align and Translate with Transformer Models")
supervise one head. An unguided model with the same initial weights sees the same batches.

Alignments of the validation text are read from each head: a target word is linked to the source word with the largest
attention. The guided head is compared with the best head of the unguided model, which is chosen on the first half of
the validation text, and with IBM Model 1; everything is measured on the second half. The decoder has two rows for a
target token: the one that predicts it (`output`) and the next one, which reads it (`input`); `--guided_rows` selects
the rows that are guided. The reference is `--reference_alignments`, such as the alignments of eflomal, or else IBM
Model 1 itself.

Writes to `--output_dir`: `summary.json`, `table.csv`, `curves.png`, `alignment.png` (a sentence) and `.svg`,
`alignments/NAME.txt` (links of the validation text in the Pharaoh format), `config.yaml` (the values of the run), and
a folder per model with model, tokenizer, code and card.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from .. import HeadwiseMarianConfig, HeadwiseMarianMTModel, HeadwiseSeq2SeqTrainer
from .._tables import format_table
from ..analysis import attention_alignment, write_pharaoh
from ..analysis.plots.base import plot_pretraining
from ..analysis.plots.lexical import SourceMap, plot_source_maps
from .aligned_corpus import (
    TARGET,
    AlignedCorpus,
    align,
    head_word_maps,
    measured_quality,
    score_heads,
    word_tokenizer,
)
from .arguments.align_translation import MODELS, PRESETS, AlignmentArguments
from .arguments.base import flag
from .compared_translators import (
    ComparedTrainingArguments,
    evaluation_losses,
    train_compared,
    write_compared_card,
)
from .curves import drawn_log
from .pictures import draw
from .run import SUMMARY, Run, named_files, run_recipe, write_csv
from .summaries.align_translation import ALIGNERS, AlignmentSummary, HeadAlignment
from .summaries.translation import CorpusFacts
from .translation import (
    prepare_translation_corpus,
    print_examples,
    side_by_side,
    translation_config,
)


@dataclass
class AlignmentTrainingArguments(ComparedTrainingArguments):
    """[`ComparedTrainingArguments`] with another output folder."""

    output_dir: str = flag("runs/align_translation", "Output folder; it must not hold another run.")


def prepare(
    args: AlignmentArguments, training_args: AlignmentTrainingArguments
) -> tuple[dict[str, HeadwiseMarianConfig], AlignedCorpus, CorpusFacts]:
    """Configurations by model, and the aligned corpus; raises ValueError for settings that cannot be compared."""
    if training_args.guidance_weight == 0:
        raise ValueError("guidance_weight=0 guides no head, so there would be nothing to compare; set it above 0.")
    corpus, facts = prepare_translation_corpus(args, training_args, word_tokenizer(args.aligned_units))
    guidance = {
        "heads": {args.guided_layer: {TARGET: [args.guided_head]}},
        "targets": {TARGET: "keys"},
        "loss": {TARGET: "cross_entropy"},
    }
    configs = {
        "unguided": translation_config(args, corpus),
        "guided": translation_config(args, corpus, guidance={"cross": guidance}),
    }
    return configs, align(corpus, args), facts


def train_model(
    name: str,
    config: HeadwiseMarianConfig,
    args: AlignmentArguments,
    training_args: AlignmentTrainingArguments,
    aligned: AlignedCorpus,
) -> tuple[dict[str, Any], HeadwiseSeq2SeqTrainer, str]:
    """Results and log of one model, its trainer, and the folder of its model."""
    is_guided = config.guidance is not None
    set_seed(training_args.seed)
    model = HeadwiseMarianMTModel(config)
    corpus = aligned.guided if is_guided else aligned.plain
    results, trainer = train_compared(name, model, args, training_args, corpus, aligned.plain)
    model = trainer.accelerator.unwrap_model(trainer.model)
    maps = head_word_maps(model, aligned.plain, training_args.per_device_eval_batch_size)
    heads = score_heads(maps, aligned)
    chosen = chosen_head(heads, args if is_guided else None)
    of_head = [one[chosen["rows"]][chosen["layer"], chosen["head"]] for one in maps]
    results |= {
        "heads": heads,
        "chosen": chosen,
        "links": [attention_alignment(one[None])[0] for one in of_head],
        "shown": of_head[aligned.shown].tolist(),
    }
    return results, trainer, name


def chosen_head(heads: list[dict[str, Any]], guided: AlignmentArguments | None) -> dict[str, Any]:
    """The guided head, or the best one of an unguided model."""
    if guided is None:
        return min(heads, key=lambda one: one["aer_chosen_on"])
    wanted = {"layer": guided.guided_layer, "head": guided.guided_head, "rows": guided.guided_rows}
    return next(one for one in heads if wanted.items() <= one.items())


def main(args: AlignmentArguments, training_args: AlignmentTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args, PRESETS, pushes=False)
    with run.preparing():
        configs, aligned, facts = prepare(args, training_args)
    models = {
        name: run.once(name, partial(train_model, name, config, args, training_args, aligned))
        for name, config in configs.items()
    }
    summary = summarise(models, args, training_args, aligned, facts)
    return run.finish(
        summary,
        lambda: publish(models, summary, configs, args, aligned, run.folder),
        lambda: print_report(models, summary, run.folder),
    )


def summarise(
    models: dict[str, dict],
    args: AlignmentArguments,
    training_args: AlignmentTrainingArguments,
    aligned: AlignedCorpus,
    facts: CorpusFacts,
) -> AlignmentSummary:
    scores = {name: one["chosen"] for name, one in models.items()}
    if args.reference_alignments:  # otherwise, IBM Model 1 is the reference
        scores |= {name: measured_quality(links, aligned) for name, links in aligned.ibm.items()}
    per_model = ("validation_nll", "bleu", "exact_match", "seconds_per_step")
    guided = models["guided"]
    return AlignmentSummary(
        **{key: {name: one[key] for name, one in scores.items()} for key in ("aer", "precision", "recall")},
        **{key: {name: one[key] for name, one in models.items()} for key in per_model},
        chosen_head={
            name: {key: one["chosen"][key] for key in ("layer", "head", "rows")} for name, one in models.items()
        },
        heads={name: [HeadAlignment(**head) for head in one["heads"]] for name, one in models.items()},
        guided_accuracy=next(
            entry[f"eval_guided_accuracy_{TARGET}"]
            for entry in reversed(guided["history"])
            if f"eval_guided_accuracy_{TARGET}" in entry
        ),
        eval_curve={name: evaluation_losses(one) for name, one in models.items()},
        steps=training_args.max_steps,
        guidance_weight_initial=guided["guidance_weight_initial"],
        parameters=guided["parameters"],
        reference=named_files(args.reference_alignments) if args.reference_alignments else "IBM Model 1",
        units=args.aligned_units,
        alignment_method=args.alignment_method,
        guided_words=aligned.guided_words,
        chosen_on_pairs=aligned.measured.count(False),
        measured_pairs=aligned.measured.count(True),
        num_beams=args.num_beams,
        examples=side_by_side(models),
        corpus=facts,
    )


def named_head(head: dict[str, Any]) -> str:
    return f"layer {head['layer']}, head {head['head']}, {head['rows']} rows"


def publish(
    models: dict[str, dict],
    summary: AlignmentSummary,
    configs: dict[str, HeadwiseMarianConfig],
    args: AlignmentArguments,
    aligned: AlignedCorpus,
    folder: Path,
) -> None:
    """Writes the table, the pictures, the alignments, and a card for each model."""
    header, lines = summary.table("aligner", ALIGNERS)
    write_csv(folder / "table.csv", [dict(zip(header, line)) for line in lines])
    order = sorted(range(len(aligned.measured)), key=aligned.plain.validation["pair"].__getitem__)
    predicted = {**{name: one["links"] for name, one in models.items()}, **aligned.ibm}
    for name, links in predicted.items():
        write_pharaoh(folder / "alignments" / f"{name}.txt", [map(tuple, links[index]) for index in order])
    corpus = summary.corpus
    draw(
        plot_pretraining,
        folder / "curves.png",
        {name: drawn_log(one["history"]) for name, one in models.items()},
        title=f"Translation: {corpus.text}",
        loss="negative log-likelihood (nats per token)",
    )
    shown = aligned.plain.validation[aligned.shown]
    sides = shown["target_words"], shown["source_words"]
    reference = torch.zeros(len(sides[0]), len(sides[1]))
    for weight, links in ((0.5, aligned.possible), (1.0, aligned.sure)):
        for source, target in links[aligned.shown]:
            reference[target, source] = weight
    titles = {"guided": "guided head", "unguided": "best unguided head"}
    panels = [
        SourceMap(f"{title}\n{named_head(models[name]['chosen'])}", *sides, torch.tensor(models[name]["shown"]))
        for name, title in titles.items()
    ]
    panels.append(SourceMap("reference\nsure 1, possible 0.5", *sides, reference))
    draw(
        plot_source_maps,
        folder / "alignment.png",
        [panels],
        title=f"Translation: {corpus.text}",
        quantity="attention",
        heading="Attention of target words to source words, and the reference alignment",
    )
    for name, of_model in models.items():
        reached = {key: of_model[key] for key in ("validation_nll", "bleu", "exact_match")}
        figures = {"aer": summary.aer[name], **reached}
        attention = f"{name} cross-attention"
        write_compared_card(folder / name, attention, MODELS[name], configs[name], args, summary, figures)


def print_report(models: dict[str, dict], summary: AlignmentSummary, folder: Path) -> None:
    print("\n" + format_table(*summary.table("aligner", ALIGNERS)))
    print(f"\nAlignments are measured on {summary.measured_pairs:,} pairs; the reference is {summary.reference}.")
    for name, one in models.items():
        print(f"{name:<9}{named_head(one['chosen'])}")
    print_examples(summary.examples)
    folders = ", ".join(f"{name}/" for name in models)
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv, curves.png, alignment.png, alignments/, {folders}.")


if __name__ == "__main__":
    run_recipe(main, PRESETS, AlignmentSummary)
