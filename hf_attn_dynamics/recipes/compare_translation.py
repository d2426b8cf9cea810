# Licensed under the Apache License, Version 2.0.
"""Train a Transformer to translate in three ways, side by side: as it is, with guided, and with hard-coded attention.

    accelerate launch recipes/compare_translation.py                                            # embedded number words
    accelerate launch recipes/compare_translation.py recipes/configs/compare_translation.yaml   # the same, explained
    accelerate launch recipes/compare_translation.py --preset small --source_file train.de --target_file train.en \\
        --validation_source_file val.de --validation_target_file val.en --systems base guided
    accelerate launch recipes/compare_translation.py --preset base --bf16 true …                # on a GPU

After Deshpande & Narasimhan (2020), section 5.5. The systems start from the same weights, as far as they have them,
and see the same batches for `--max_steps`:
    base          the Transformer of Vaswani et al. (2017)
    guided        one head is guided to the next token and one to the last, in each layer of the encoder; or as
                  `--guidance` says
    hard_coded    self-attention is fixed to Gaussians beside each token (You et al. 2020), attention of the decoder
                  to the encoder is learnt; or as `--hard_coded` says
No heads are removed: that is what `train_translation.py` does, which takes `--guidance`, too.

Writes to `--output_dir`: `summary.json`, `table.csv` (as table 7 of the paper), `curves.png` and `.svg`, `config.yaml`
(the values of the run), and a folder for each system, with model, tokenizer, code and card.

Keys of `summary.json`, where SYSTEM is base, guided or hard_coded; null for a system that was not asked for:
    train_nll_SYSTEM            nats for a target token of the training text, mean over the last logging window (a
                                checkpoint ends one, too)
    average_train_nll_SYSTEM    the same, mean over all steps: smaller where learning was faster
    validation_nll_SYSTEM       nats for a target token of the validation text, after the last step
    bleu_SYSTEM                 corpus BLEU, on the test text if there is one, else on the validation text
    exact_match_SYSTEM          share of its sentences that are exactly right
    seconds_per_step_SYSTEM     wall time of a step; evaluation and fetching apart
    parameters_SYSTEM           all that a model consists of, its fixed positions included
    eval_curve_SYSTEM           [step, loss on the validation text] of all evaluations
    steps                       optimizer steps of each
    steps_to_base_final         first evaluation of guided at or below the last of base; null if there is none
    step_ratio                  that over `steps`
    guidance_weight_initial     α_0 of guided
    label_smoothing_factor      above 0, the training losses and eval_curve_SYSTEM are not likelihoods but the smoothed
                                loss that was trained; validation_nll_SYSTEM is never smoothed
    bleu_text, bleu_signature, num_beams    what BLEU is of, how sacreBLEU counts it, width of the search
    examples                    some of the sentences: source, target, and the translation of each system
    vocab_size, train_examples, eval_examples, bleu_examples, text,
    num_processes, and seed, device, command and versions
Guidance is no part of any loss here.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from transformers import set_seed

from .. import HeadwiseMarianConfig, HeadwiseMarianMTModel, HeadwiseSeq2SeqTrainer
from .._tables import format_table
from ..analysis.plots.base import plot_pretraining
from ..hub.card import Metric, write_model_card
from ..training import LogWhenSaved, StepTimer, first_at_or_below, mean_over_steps
from .arguments.compare_translation import PRESETS, SYSTEMS, ComparisonArguments
from .curves import crossing_line, early_crossing
from .run import SUMMARY, Run, run_recipe, write_csv
from .translation import (
    Corpus,
    TranslationTrainingArguments,
    build_config,
    evaluated,
    parse_sites,
    prepare_corpus,
    print_examples,
    side_by_side,
    train,
)


GUIDANCE = {"encoder": {"heads": {"next": [0], "prev": [1]}}}
HARD_CODED = {"encoder": {"offsets": [-1, 1], "std": 1.0}, "decoder": {"offsets": [-1, 0], "std": 1.0}}
FIGURES = (
    "train_nll",
    "average_train_nll",
    "validation_nll",
    "bleu",
    "exact_match",
    "seconds_per_step",
    "parameters",
)


@dataclass
class ComparisonTrainingArguments(TranslationTrainingArguments):
    """[`TranslationTrainingArguments`] with defaults for a comparison, beside those of the preset.

    These defaults differ: `output_dir` runs/compare_translation, `eval_strategy` steps. There is no label smoothing
    by default, so that losses are likelihoods.
    """

    output_dir: str = field(
        default="runs/compare_translation", metadata={"help": "Where to write; may not hold another run."}
    )
    eval_strategy: str = field(default="steps", metadata={"help": "When to evaluate on the validation text."})

    without_effect: ClassVar[dict[str, str]] = {
        **TranslationTrainingArguments.without_effect,
        **dict.fromkeys(
            ("gate_penalty", "target_heads", "target_warmup", "target_learning_rate", "gate_learning_rate"),
            "no heads are removed here, see train_translation.py",
        ),
    }


def prepare(
    args: ComparisonArguments, training_args: ComparisonTrainingArguments
) -> tuple[dict[str, HeadwiseMarianConfig], Corpus, dict]:
    """Configuration of each system, text, and what the summary says of it; refuses what cannot be compared."""
    for name, without_guidance in (("guidance_weight", (None, 0)), ("guidance_schedule", ("linear",))):
        value = getattr(training_args, name)
        if "guided" not in args.systems and value not in without_guidance:
            raise ValueError(
                f"{name}={value} weighs no guidance: guided is not among systems {', '.join(args.systems)}."
            )
    heads = {
        "base": {},
        "guided": {"guidance": parse_sites("guidance", args.guidance, GUIDANCE)},
        "hard_coded": {"hard_coded": parse_sites("hard_coded", args.hard_coded, HARD_CODED)},
    }
    corpus, facts = prepare_corpus(args, training_args)
    return {name: build_config(args, corpus, **heads[name]) for name in args.systems}, corpus, facts


def new_model(config: HeadwiseMarianConfig, args: ComparisonArguments, seed: int, corpus: Corpus):
    """A model with the weights that the base starts from, as far as it has these."""
    set_seed(seed)
    start = HeadwiseMarianMTModel(build_config(args, corpus)).state_dict()
    model = HeadwiseMarianMTModel(config)
    model.load_state_dict({name: value for name, value in start.items() if name in model.state_dict()})
    return model


def train_system(
    name: str, config: HeadwiseMarianConfig, args: ComparisonArguments, training_args, corpus: Corpus
) -> tuple[dict[str, Any], HeadwiseSeq2SeqTrainer, str]:
    """Figures and log of one system, its trainer, and the folder of its model."""
    timer = StepTimer()
    model = new_model(config, args, training_args.seed, corpus)
    settings = {} if config.guidance is not None else {"guidance_weight": 0.0}
    trainer = train(name, model, training_args.max_steps, training_args, corpus, [timer, LogWhenSaved()], **settings)
    history = trainer.state.log_history
    if not any(entry["step"] == training_args.max_steps and "eval_loss" in entry for entry in history):
        trainer.evaluate()
    row = evaluated(trainer.accelerator.unwrap_model(trainer.model), args, training_args, corpus)
    figures = {
        "train_nll": next(entry["task_loss"] for entry in reversed(history) if "task_loss" in entry),
        "average_train_nll": mean_over_steps(history, "task_loss"),
        "validation_nll": row["nll"],
        **{key: row[key] for key in ("bleu", "exact_match", "parameters", "examples")},
        "seconds_per_step": timer.figures()["seconds_per_step"],
        "guidance_weight_initial": trainer.initial_guidance_weight,
        "history": history,
    }
    return figures, trainer, name


# ---------------------------------------------------------------------------------------------------------------------


def main(args: ComparisonArguments, training_args: ComparisonTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args, PRESETS, pushes=False)
    with run.preparing():
        configs, corpus, facts = prepare(args, training_args)
    runs = {
        name: run.once(name, partial(train_system, name, config, args, training_args, corpus))
        for name, config in configs.items()
    }
    return run.finish(
        summarise(runs, args, training_args, facts),
        lambda summary: publish(runs, summary, configs, args, run.folder),
        lambda summary: print_report(runs, summary, run.folder),
    )


def crossing_of(runs: dict[str, dict]) -> tuple[int, float] | None:
    """Step and loss of the first evaluation of guided at or below the last one of base."""
    if not {"base", "guided"} <= runs.keys():
        return None
    _, final = curve(runs["base"])[-1]
    return first_at_or_below(runs["guided"]["history"], final)


def curve(run: dict) -> list[tuple[int, float]]:
    return [(entry["step"], entry["eval_loss"]) for entry in run["history"] if "eval_loss" in entry]


def summarise(runs: dict[str, dict], args: ComparisonArguments, training_args, facts: dict) -> dict:
    """All figures, flat."""
    crossing = crossing_of(runs)
    return {
        **{f"{key}_{name}": runs.get(name, {}).get(key) for key in FIGURES for name in SYSTEMS},
        **{f"eval_curve_{name}": curve(runs[name]) if name in runs else None for name in SYSTEMS},
        "steps": training_args.max_steps,
        "steps_to_base_final": crossing[0] if crossing else None,
        "step_ratio": crossing[0] / training_args.max_steps if crossing else None,
        "guidance_weight_initial": runs.get("guided", {}).get("guidance_weight_initial"),
        "label_smoothing_factor": training_args.label_smoothing_factor,
        "num_beams": args.num_beams,
        "examples": side_by_side(runs),
        **facts,
    }


def publish(
    runs: dict[str, dict], summary: dict, configs: dict[str, HeadwiseMarianConfig], args, folder: Path
) -> None:
    """Table, picture, and a card for each model."""
    write_csv(folder / "table.csv", [{"figure": key, **{name: runs[name][key] for name in runs}} for key in FIGURES])
    smoothing = summary["label_smoothing_factor"]
    plot_pretraining(
        {name.replace("_", "-"): run["history"] for name, run in runs.items()},
        folder / "curves.png",
        title=f"Translation: {summary['text']}",
        crossing=early_crossing(crossing_of(runs), summary["steps"]),
        loss=f"loss smoothed by {smoothing:g} (nats)" if smoothing else "negative log-likelihood (nats for a token)",
    )
    size = f"{args.encoder_layers} + {args.decoder_layers} layers × {args.hidden_size}"
    for name, run in runs.items():
        write_model_card(
            folder / name,
            name=f"translation Transformer, {name.replace('_', '-')} attention, {size}",
            description=f"An encoder–decoder of {size}, {args.num_attention_heads} heads, trained to translate for "
            f"{summary['steps']:,} steps. {SYSTEMS[name]}",
            config=configs[name],
            task="translation",
            figures={key: run[key] for key in FIGURES if key != "seconds_per_step"},
            metric=Metric("bleu", f"sacreBLEU ({summary['bleu_signature']})", run["bleu"], summary["bleu_text"]),
            dataset=summary["text"],
            provenance=summary,
            language=args.languages,
            license=args.license,
            hub_dataset=args.dataset_name,
        )


def print_report(runs: dict[str, dict], summary: dict, folder: Path) -> None:
    rows = [[name, *(run[key] for key in FIGURES)] for name, run in runs.items()]
    print("\n" + format_table(["system", *FIGURES], rows))
    if {"base", "guided"} <= runs.keys():
        print("\n" + crossing_line("guided", "base", summary["steps_to_base_final"], summary["steps"]))
    print_examples(summary["examples"])
    folders = ", ".join(f"{name}/" for name in runs)
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv, curves.png, {folders}.")


if __name__ == "__main__":
    run_recipe(main, PRESETS)
