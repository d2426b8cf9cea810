# Licensed under the Apache License, Version 2.0.
"""Train three translation Transformers side by side: an ordinary one, one with guided, one with hard-coded attention.

    accelerate launch recipes/compare_translation.py                                            # embedded number words
    accelerate launch recipes/compare_translation.py recipes/configs/compare_translation.yaml   # the same, explained
    accelerate launch recipes/compare_translation.py --preset small --source_file train.de --target_file train.en \\
        --validation_source_file val.de --validation_target_file val.en --systems base guided
    accelerate launch recipes/compare_translation.py --preset base --bf16 true …                # on a GPU

After Deshpande & Narasimhan (2020), section 5.5. The systems start from the same weights, except for layers that only
some of them have, and see the same batches for `--max_steps`:
    base          the Transformer of Vaswani et al. (2017)
    guided        guides one head per encoder layer to the next token, and one to the previous token; or the heads of
                  `--guidance`
    hard_coded    fixes self-attention to Gaussians beside each token (You et al. 2020) and learns cross-attention; or
                  as in `--hard_coded`
This recipe prunes no heads; `train_translation.py` does, and takes `--guidance`, too.

Writes to `--output_dir`: `summary.json`, `table.csv` (as table 7 of the paper), `curves.png` and `.svg`, `config.yaml`
(the values of the run), and a folder per system with model, tokenizer, code and card.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import set_seed

from .. import HeadwiseMarianConfig, HeadwiseMarianMTModel, HeadwiseSeq2SeqTrainer
from .._tables import format_table
from ..analysis.plots.base import plot_pretraining
from ..training import GuidanceSchedules, first_at_or_below, mean_over_steps
from .arguments.base import flag
from .arguments.compare_translation import PRESETS, SYSTEMS, ComparisonArguments
from .compared_translators import (
    ComparedTrainingArguments,
    evaluation_losses,
    train_compared,
    write_compared_card,
)
from .curves import crossing_line, drawn_log, early_crossing
from .pictures import draw
from .run import SUMMARY, Run, run_recipe, write_csv
from .summaries.compare_translation import ComparisonSummary
from .summaries.translation import CorpusFacts
from .translation import (
    TranslationCorpus,
    parse_sites,
    prepare_translation_corpus,
    print_examples,
    side_by_side,
    translation_config,
)


GUIDANCE = {"encoder": {"heads": {"next": [0], "prev": [1]}}}
HARD_CODED = {"encoder": {"offsets": [-1, 1], "std": 1.0}, "decoder": {"offsets": [-1, 0], "std": 1.0}}


@dataclass
class ComparisonTrainingArguments(ComparedTrainingArguments):
    """[`ComparedTrainingArguments`] with another output folder."""

    output_dir: str = flag("runs/compare_translation", "Output folder; it must not hold another run.")


def prepare(
    args: ComparisonArguments, training_args: ComparisonTrainingArguments
) -> tuple[dict[str, HeadwiseMarianConfig], TranslationCorpus, CorpusFacts]:
    """Configurations by system, and the corpus; raises ValueError for settings that cannot be compared."""
    for name, without_guidance in (("guidance_weight", (None, 0)), ("guidance_schedule", ("linear",))):
        value = getattr(training_args, name)
        if "guided" not in args.systems and value not in without_guidance:
            raise ValueError(
                f"{name}={value} needs the system guided, but systems are {', '.join(args.systems)}; add it, or leave "
                f"{name} out."
            )
    heads = {
        "base": {},
        "guided": {"guidance": parse_sites("guidance", args.guidance, GUIDANCE)},
        "hard_coded": {"hard_coded": parse_sites("hard_coded", args.hard_coded, HARD_CODED)},
    }
    corpus, facts = prepare_translation_corpus(args, training_args)
    configs = {name: translation_config(args, corpus, **heads[name]) for name in args.systems}
    if "guided" in configs:
        # Before the other systems are trained.
        schedules = GuidanceSchedules(training_args.guidance_schedule, training_args.guidance_hold_steps)
        schedules.check_names(configs["guided"].head_settings().guided_names)
    return configs, corpus, facts


def initial_translator(
    config: HeadwiseMarianConfig, args: ComparisonArguments, seed: int, corpus: TranslationCorpus
) -> HeadwiseMarianMTModel:
    """A model with the initial weights of the system base, as far as it has the same layers."""
    set_seed(seed)
    start = HeadwiseMarianMTModel(translation_config(args, corpus)).state_dict()
    model = HeadwiseMarianMTModel(config)
    model.load_state_dict({name: value for name, value in start.items() if name in model.state_dict()})
    return model


def train_system(
    name: str,
    config: HeadwiseMarianConfig,
    args: ComparisonArguments,
    training_args: ComparisonTrainingArguments,
    corpus: TranslationCorpus,
) -> tuple[dict[str, Any], HeadwiseSeq2SeqTrainer, str]:
    """Results and log of one system, its trainer, and the folder of its model."""
    model = initial_translator(config, args, training_args.seed, corpus)
    results, trainer = train_compared(name, model, args, training_args, corpus)
    history = results["history"]
    results["train_nll"] = next(entry["task_loss"] for entry in reversed(history) if "task_loss" in entry)
    results["average_train_nll"] = mean_over_steps(history, "task_loss")
    return results, trainer, name


def main(args: ComparisonArguments, training_args: ComparisonTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args, PRESETS, pushes=False)
    with run.preparing():
        configs, corpus, facts = prepare(args, training_args)
    systems = {
        name: run.once(name, partial(train_system, name, config, args, training_args, corpus))
        for name, config in configs.items()
    }
    summary = summarise(systems, args, training_args, facts)
    return run.finish(
        summary,
        lambda: publish(systems, summary, configs, args, run.folder),
        lambda: print_report(systems, summary, run.folder),
    )


def guided_reaches_base(systems: dict[str, dict]) -> tuple[int, float] | None:
    """Step and loss of the first evaluation of guided at or below the last loss of base."""
    if not {"base", "guided"} <= systems.keys():
        return None
    _, final = evaluation_losses(systems["base"])[-1]
    return first_at_or_below(systems["guided"]["history"], final)


def summarise(
    systems: dict[str, dict],
    args: ComparisonArguments,
    training_args: ComparisonTrainingArguments,
    facts: CorpusFacts,
) -> ComparisonSummary:
    crossing = guided_reaches_base(systems)
    per_system = ("train_nll", "average_train_nll", "validation_nll", "bleu", "exact_match", "seconds_per_step")
    return ComparisonSummary(
        **{key: {name: one[key] for name, one in systems.items()} for key in (*per_system, "parameters")},
        eval_curve={name: evaluation_losses(one) for name, one in systems.items()},
        steps=training_args.max_steps,
        steps_to_base_final=crossing[0] if crossing else None,
        step_ratio=crossing[0] / training_args.max_steps if crossing else None,
        guidance_weight_initial=systems.get("guided", {}).get("guidance_weight_initial"),
        label_smoothing_factor=training_args.label_smoothing_factor,
        num_beams=args.num_beams,
        examples=side_by_side(systems),
        corpus=facts,
    )


def publish(
    systems: dict[str, dict],
    summary: ComparisonSummary,
    configs: dict[str, HeadwiseMarianConfig],
    args: ComparisonArguments,
    folder: Path,
) -> None:
    """Writes the table and the picture, and a card for each model."""
    header, lines = summary.table("metric", systems)
    columns, *rows = zip(header, *lines)
    write_csv(folder / "table.csv", [dict(zip(columns, row)) for row in rows])
    smoothing, corpus = summary.label_smoothing_factor, summary.corpus
    draw(
        plot_pretraining,
        folder / "curves.png",
        {name.replace("_", "-"): drawn_log(one["history"]) for name, one in systems.items()},
        title=f"Translation: {corpus.text}",
        crossing=early_crossing(guided_reaches_base(systems), summary.steps),
        loss=f"loss smoothed by {smoothing:g} (nats)" if smoothing else "negative log-likelihood (nats per token)",
    )
    for name, *values in lines:
        results = dict(zip(header[1:], values))
        figures = {key: value for key, value in results.items() if key != "seconds_per_step"}
        attention = f"{name.replace('_', '-')} attention"
        write_compared_card(folder / name, attention, SYSTEMS[name], configs[name], args, summary, figures)


def print_report(systems: dict[str, dict], summary: ComparisonSummary, folder: Path) -> None:
    print("\n" + format_table(*summary.table("system", systems)))
    if {"base", "guided"} <= systems.keys():
        print("\n" + crossing_line("guided", "base", summary.steps_to_base_final, summary.steps))
    print_examples(summary.examples)
    folders = ", ".join(f"{name}/" for name in systems)
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv, curves.png, {folders}.")


if __name__ == "__main__":
    run_recipe(main, PRESETS, ComparisonSummary)
