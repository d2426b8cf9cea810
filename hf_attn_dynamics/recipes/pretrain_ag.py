# Licensed under the Apache License, Version 2.0.
"""Pretrain a model with guided attention heads and, to compare, its unguided twin.

    accelerate launch recipes/pretrain_ag.py                                     # a demonstration on embedded text
    accelerate launch recipes/pretrain_ag.py recipes/configs/pretrain_ag.yaml    # the same, with every key explained
    accelerate launch recipes/pretrain_ag.py --preset roberta-12 --train_file corpus/ --validation_file held_out.txt
    accelerate launch recipes/pretrain_ag.py --objective clm --architecture gpt2
    accelerate launch recipes/pretrain_ag.py --objective rtd                     # ELECTRA
    accelerate launch recipes/pretrain_ag.py --objective mlm+nsp                 # BERT

After Deshpande & Narasimhan (2020). The objectives are masked tokens (`mlm`, RoBERTa), the next token (`clm`, Llama),
replaced tokens (`rtd`, ELECTRA), and masked tokens with next sentences (`mlm+nsp`, BERT); with `mlm` and `clm`,
`--architecture` names another model of the catalogue. The demonstration times a few steps and trains for about four
minutes, at least 400 and at most 800 steps; `--preset tiny` is the same without a time limit.

With `--suppress_steps N`, a third model is kept from the patterns for N steps: the loss `avoid` pushes the same heads
away from them, and then releases them. Chen et al. (2024, "Sudden Drops in the Loss") find that a short suppression of
syntactic attention helps BERT.

Writes to `--output_dir`: `summary.json`, `curves.png` and `.svg`, `config.yaml` (the values of the run), `model/` (the
guided model with tokenizer, code and card) and, with `--compare`, `model_unguided/`; with `--suppress_steps`,
`model_suppressed/`. With `--head_dynamics N`, confidence, entropy and relative positions of all heads are measured
every N steps on a part of the evaluation text:
`head_dynamics.png` and `.svg` show the runs side by side, `checkpoints/RUN/head_dynamics.csv` has the values, and
`checkpoints/RUN/head_dynamics.html` is a page in which a slider over the steps moves the grid of heads.
`--push_to_hub true --hub_model_id USER/NAME` pushes `model/` to the Hub after everything is written.
"""

import copy
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, set_seed

from .. import (
    HeadConfidence,
    HeadDynamicsCallback,
    HeadEntropy,
    HeadTimeline,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
    RelativePositions,
)
from .._files import read_json
from .._tables import format_table
from ..analysis.observers.positions import POSITIONAL_THRESHOLD
from ..analysis.plots.base import plot_pretraining
from ..analysis.plots.dynamics import plot_head_dynamics
from ..data import delimiter_token_ids, period_token_ids, train_byte_level_bpe, warn_of_unknown
from ..hub.card import Metric, language_of, write_model_card
from ..training import (
    TIMELINE,
    LogWhenSaved,
    StepTimer,
    first_at_or_below,
    show_progress,
    train_from_newest,
)
from .arguments.base import OF_A_TEACHER, flag, refuse_flags
from .arguments.pretrain_ag import PRESETS, PretrainArguments
from .checkpoints import load_tokenizer
from .curves import crossing_line, drawn_log, early_crossing
from .objectives import PRETRAINING_OBJECTIVES, Objective, Texts
from .pictures import draw
from .run import SUMMARY, Run, cpu_only, named_files, run_recipe, write_json
from .summaries.pretrain_ag import SUPPRESSED, PretrainSummary


MODEL_FOLDERS = {"guided": "model", "unguided": "model_unguided", SUPPRESSED: "model_suppressed"}
TOKENIZER_TEXTS = 500_000  # with --streaming; a tokenizer learns little from more texts
PROBE_EXAMPLES, PROBE_BATCH = 64, 16  # examples for --head_dynamics, and their batch size
OFFSET_SHARE = "relative_positions/best_offset_share"  # a statistic of these
TRIAL_STEPS = 12
# Values of a run that its model card leaves out.
NOT_ON_CARDS = ("history", "num_parameters", "seconds_per_step", "tokens_per_second")


@dataclass
class PretrainTrainingArguments(HeadwiseTrainingArguments):
    """[`HeadwiseTrainingArguments`] with defaults for pretraining; the preset has more."""

    output_dir: str = flag("runs/pretrain_ag", "Output folder; it must not hold another run.")
    per_device_eval_batch_size: int = flag(64, "Examples per evaluation batch.")
    eval_strategy: str = flag("steps", "When to evaluate.")
    save_total_limit: int | None = flag(1, "Maximum number of checkpoints to keep.")
    report_to: str | None = flag("none", "Trackers to report to.")
    include_num_input_tokens_seen: str = flag("non_padding", "Tokens to count.")

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        refuse_flags(self, OF_A_TEACHER)
        super().__post_init__()


def load_corpus_texts(args: PretrainArguments, objective: Objective) -> tuple[Texts, Texts, str]:
    """Training and evaluation texts, and their name."""
    if not args.train_file and not args.dataset_name:
        return *objective.embedded(), "documentation of Python and of installed libraries"
    hub = {"dataset_name": args.dataset_name, "dataset_config": args.dataset_config}
    train = objective.load(args.train_file, **hub, split=args.dataset_split)
    name = args.dataset_name or named_files(args.train_file)
    if args.validation_file:
        return train, objective.load(args.validation_file), name
    if args.validation_split:
        return train, objective.load(None, **hub, split=args.validation_split), name
    raise ValueError("there is no text to evaluate on; give --validation_file or, for a dataset, --validation_split.")


def guidance_of(args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The guidance of the configuration."""
    guidance = {
        "reduction": args.guidance_reduction,
        "delimiter_token_ids": delimiter_token_ids(tokenizer),
        "period_token_ids": period_token_ids(tokenizer) or None,
    }
    if not args.guidance_heads:
        return {**guidance, "fraction": args.guidance_fraction, "patterns": args.guidance_patterns}
    try:
        return {**guidance, "heads": json.loads(args.guidance_heads)}
    except json.JSONDecodeError as error:
        raise ValueError(f"guidance_heads {args.guidance_heads!r} is not valid JSON: {error}.") from error


def pretraining_trainer(
    name: str, objective: Objective, config: PreTrainedConfig, training_args: PretrainTrainingArguments, **data: Any
) -> HeadwiseTrainer:
    """Trainer of one run; runs with the same seed start from the same weights and see the same batches."""
    set_seed(training_args.seed)
    model = objective.model_class(config)
    run_args = copy.copy(training_args)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    if config.guidance is None:
        run_args.guidance_weight = 0.0
    elif name == SUPPRESSED:
        args = objective.args
        run_args.guidance_schedule, run_args.guidance_hold_steps = "hold", args.suppress_steps
        if args.suppress_weight is not None:
            run_args.guidance_weight = args.suppress_weight
    trainer = HeadwiseTrainer(model, run_args, **data, **objective.trainer_settings)
    show_progress(trainer, name)
    return trainer


def seconds_of_step(
    objective: Objective, config: PreTrainedConfig, training_args: PretrainTrainingArguments, **data: Any
) -> float:
    """Wall time of a training step in seconds, with its share of the evaluations; measured in a short trial."""
    trial_args = copy.copy(training_args)
    trial_args.max_steps, trial_args.eval_strategy, trial_args.save_strategy = TRIAL_STEPS, "no", "no"
    trial_args.load_best_model_at_end, trial_args.report_to, trial_args.disable_tqdm = False, [], True
    timer = StepTimer()
    with tempfile.TemporaryDirectory() as folder:
        trial_args.output_dir = folder
        trainer = pretraining_trainer("trial", objective, config, trial_args, **data)
        trainer.add_callback(timer)
        trainer.train()
    seconds = timer.seconds / timer.steps
    if training_args.eval_strategy == "steps":
        started = time.perf_counter()
        trainer.evaluate()
        # Below 1, eval_steps is a fraction of the run.
        every = training_args.eval_steps
        seconds += (time.perf_counter() - started) / (every if every >= 1 else every * training_args.max_steps)
    return seconds


def steps_within(
    args: PretrainArguments,
    folder: Path,
    objective: Objective,
    configs: Iterable[PreTrainedConfig],
    training_args: PretrainTrainingArguments,
    **data: Any,
) -> int:
    """Number of steps per run that fit into `max_minutes` for all runs together, from `min_steps` to `max_steps`.

    The number is saved in the folder of the run: the schedules of a resumed run depend on it.
    """
    record = folder / "checkpoints" / "steps.json"
    if record.is_file():
        return read_json(record)["max_steps"]
    seconds = sum(seconds_of_step(objective, config, training_args, **data) for config in configs)
    # All processes use the number of the first one.
    fitting = torch.tensor(int(60 * args.max_minutes / seconds), device=PartialState().device)
    if PartialState().num_processes > 1:
        torch.distributed.broadcast(fitting, 0)
    steps = min(max(int(fitting), args.min_steps), training_args.max_steps)
    if PartialState().is_main_process:
        write_json(record, {"max_steps": steps})
        print(
            f"Training each run for {steps:,} steps: all runs take about {steps * seconds / 60:.1f} minutes "
            f"(max_minutes {args.max_minutes:g}, min_steps {args.min_steps:,}, max_steps {training_args.max_steps:,})."
        )
    return steps


def watch_heads(every: int, eval_dataset: Dataset, data_collator: Any) -> HeadDynamicsCallback:
    """A callback that measures heads on the first examples of the evaluation text."""
    examples = eval_dataset.select(range(min(PROBE_EXAMPLES, len(eval_dataset)))).to_list()
    probe = [data_collator(examples[i : i + PROBE_BATCH]) for i in range(0, len(examples), PROBE_BATCH)]
    return HeadDynamicsCallback([HeadConfidence(), HeadEntropy(), RelativePositions()], probe, every)


def positional_heads(timeline: HeadTimeline) -> dict[str, float | None]:
    """Number of positional heads at the end, and the median of the steps at which heads become positional."""
    measured = timeline.of(OFFSET_SHARE)
    at_end = sum(int((table >= POSITIONAL_THRESHOLD).sum()) for table in measured[max(measured)].values())
    first = torch.cat([table.flatten() for table in timeline.first_step(OFFSET_SHARE, POSITIONAL_THRESHOLD).values()])
    reached = first[~first.isnan()].tolist()
    return {"positional_heads": at_end, "positional_step": statistics.median(reached) if reached else None}


def train_run(
    name: str,
    objective: Objective,
    config: PreTrainedConfig,
    training_args: PretrainTrainingArguments,
    **data: Any,
) -> tuple[dict[str, Any], HeadwiseTrainer, str]:
    """Trains a model; returns results and log, the trainer, and the folder to save the model in, see [`Run.once`]."""
    trainer = pretraining_trainer(name, objective, config, training_args, **data)
    watch = None
    if objective.args.head_dynamics:
        # Callbacks run in order; the timer must not count this one.
        watch = watch_heads(objective.args.head_dynamics, data["eval_dataset"], data["data_collator"])
        trainer.add_callback(watch)
    timer = StepTimer()
    trainer.add_callback(timer)
    trainer.add_callback(LogWhenSaved())
    train_from_newest(trainer)
    history = trainer.state.log_history
    is_evaluated = any(entry["step"] == training_args.max_steps and objective.evaluated in entry for entry in history)
    if training_args.load_best_model_at_end or not is_evaluated:
        trainer.evaluate()
    results = {
        **objective.results(history),
        **({} if watch is None else positional_heads(watch.history)),
        "guidance_weight_initial": trainer.initial_guidance_weight,
        "num_parameters": sum(p.numel() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()),
        **timer.figures(),
        "history": history,
    }
    trainer.model = objective.model_to_save(trainer.accelerator.unwrap_model(trainer.model))
    return results, trainer, MODEL_FOLDERS[name]


def prepare(
    args: PretrainArguments, training_args: PretrainTrainingArguments, objective: Objective
) -> tuple[PreTrainedConfig, dict[str, Any], dict[str, Any]]:
    """Configuration of the guided model, arguments of the trainer, and values of the summary."""
    if training_args.max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {training_args.max_steps}.")
    train_texts, validation_texts, corpus_name = load_corpus_texts(args, objective)
    # One process prepares the data; the others read the cache.
    with PartialState().main_process_first():
        if args.tokenizer_name:
            tokenizer = load_tokenizer("tokenizer_name", args.tokenizer_name)
        else:
            sample = train_texts.take(TOKENIZER_TEXTS) if args.streaming else train_texts
            tokenizer = train_byte_level_bpe(objective.strings(sample), args.vocab_size, objective.tokenizer_kind)
        objective.check(training_args, tokenizer)
        config = objective.config(tokenizer, guidance_of(args, tokenizer))
        train = objective.examples(train_texts, tokenizer, training_args.seed)
        evaluation = objective.examples(validation_texts, tokenizer, training_args.seed)
        evaluation = Dataset.from_list(list(itertools.islice(evaluation, args.max_eval_examples)))
        if not len(evaluation):
            raise ValueError("the evaluation text has no example; add text.")
        warn_of_unknown(evaluation["input_ids"], tokenizer, corpus_name)
        collator = objective.collator(tokenizer, objective.frequencies(train, tokenizer), training_args.seed)
    batch = training_args.train_batch_size * training_args.world_size
    if not args.streaming and len(train) < batch:
        raise ValueError(f"the text gives {len(train)} examples, fewer than one batch of {batch}; add text.")
    data = {
        "train_dataset": train,
        "eval_dataset": evaluation,
        "data_collator": collator,
        "processing_class": tokenizer,
    }
    facts = {
        "plateau": objective.plateau[1] if objective.plateau else None,
        "vocab_size": config.vocab_size,
        "train_examples": None if args.streaming else len(train),
        "eval_examples": len(evaluation),
        "train_text": corpus_name,
        "objective": args.objective,
        "architecture": objective.row.stock_type,
    }
    return config, data, facts


def configs_of_runs(args: PretrainArguments, config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Configurations by run, made from the configuration of the guided run."""
    configs = {"guided": config}
    if args.compare:
        configs["unguided"] = copy.deepcopy(config)
        configs["unguided"].guidance = None
    if args.suppress_steps is not None:
        configs[SUPPRESSED] = copy.deepcopy(config)
        configs[SUPPRESSED].guidance = {**config.guidance, "loss": "avoid"}
    return configs


def check_suppression(args: PretrainArguments, max_steps: int) -> None:
    """Raises ValueError if heads would not be released before the last step."""
    steps = args.min_steps if is_limited(args, max_steps) else max_steps
    if args.suppress_steps is not None and args.suppress_steps >= steps:
        which = "min_steps" if is_limited(args, max_steps) else "max_steps"
        raise ValueError(f"suppress_steps={args.suppress_steps} must be below {which}={steps}.")


def is_limited(args: PretrainArguments, max_steps: int) -> bool:
    """Whether `max_minutes` limits the steps; another `max_steps` replaces the limit of a preset."""
    preset = PRESETS[args.preset]
    is_of_preset = args.max_minutes == preset.get("max_minutes")
    return (
        args.max_minutes is not None
        and max_steps > args.min_steps
        and (not is_of_preset or max_steps == preset["max_steps"])
    )


def main(args: PretrainArguments, training_args: PretrainTrainingArguments) -> dict:
    """Run the recipe; returns the content of `summary.json`."""
    run = Run(args, training_args, PRESETS)
    with run.preparing():
        objective = PRETRAINING_OBJECTIVES[args.objective](args)
        check_suppression(args, training_args.max_steps)
        config, data, facts = prepare(args, training_args, objective)
    configs = configs_of_runs(args, config)
    if is_limited(args, training_args.max_steps):
        training_args.max_steps = steps_within(args, run.folder, objective, configs.values(), training_args, **data)
    runs = {
        name: run.once(name, partial(train_run, name, objective, config, training_args, **data))
        for name, config in configs.items()
    }
    summary = summarise(runs, objective, training_args.max_steps, facts)
    return run.finish(
        summary,
        lambda: publish(runs, objective, summary, configs, run.folder),
        lambda: print_report(runs, summary, run.folder),
        pushed=MODEL_FOLDERS["guided"],
    )


def summarise(
    runs: dict[str, dict[str, Any]], objective: Objective, steps: int, facts: dict[str, Any]
) -> PretrainSummary:
    guided, crossing = runs["guided"], crossing_with_unguided(runs, objective)
    suppressed = runs.get(SUPPRESSED)
    other_keys = {"history", "guidance_weight_initial", "num_parameters"}
    of_runs = {
        key.removeprefix(f"{objective.loss}_"): {name: run[key] for name, run in runs.items()}
        for key in guided
        if key not in other_keys
    }
    return PretrainSummary(
        loss=objective.loss,
        **of_runs,
        eval_curve={name: eval_curve(run, objective) for name, run in runs.items()},
        steps=steps,
        steps_to_unguided_final=crossing[0] if crossing else None,
        step_ratio=crossing[0] / steps if crossing else None,
        guidance_weight_initial=guided["guidance_weight_initial"],
        num_parameters=guided["num_parameters"],
        **({} if suppressed is None else of_suppression(runs, objective)),
        **facts,
    )


def of_suppression(runs: dict[str, dict[str, Any]], objective: Objective) -> dict[str, Any]:
    """Values of the summary that only the suppressed run has."""
    suppressed, crossing = runs[SUPPRESSED], crossing_with_unguided(runs, objective, SUPPRESSED)
    return {
        "suppressed_steps_to_unguided_final": crossing[0] if crossing else None,
        "suppress_steps": objective.args.suppress_steps,
        "suppress_weight": suppressed["guidance_weight_initial"],
        "suppressed_attention": [
            [entry["step"], entry["guidance_loss"]] for entry in suppressed["history"] if "guidance_loss" in entry
        ],
    }


def eval_curve(run: dict[str, Any], objective: Objective) -> list[list]:
    """[step, loss] of all evaluations of a run."""
    return [[e["step"], e[objective.evaluated]] for e in run["history"] if objective.evaluated in e]


def crossing_with_unguided(
    runs: dict[str, dict[str, Any]], objective: Objective, name: str = "guided"
) -> tuple[int, float] | None:
    """Step and loss of the first evaluation of a run at or below the final loss of the unguided run."""
    if "unguided" not in runs:
        return None
    final = runs["unguided"][f"{objective.loss}_loss_eval"]
    return first_at_or_below(runs[name]["history"], final, objective.evaluated)


def publish(
    runs: dict[str, dict[str, Any]],
    objective: Objective,
    summary: PretrainSummary,
    configs: dict[str, PreTrainedConfig],
    folder: Path,
) -> None:
    """Writes the pictures and the card of each model."""
    config = configs["guided"]
    size = f"{config.num_hidden_layers} layers × {config.hidden_size}, {config.num_attention_heads} heads"
    keys = objective.trained, objective.evaluated
    draw(
        plot_pretraining,
        folder / "curves.png",
        {name: drawn_log(run["history"], keys) for name, run in runs.items()},
        title=f"{objective.architecture} of {size}; {summary.train_text}",
        plateau=objective.plateau,
        crossing=early_crossing(crossing_with_unguided(runs, objective), summary.steps),
        loss=f"{objective.loss_in_words} (nats)",
        keys=keys,
    )
    if objective.args.head_dynamics:
        timelines = {name: HeadTimeline.load(folder / "checkpoints" / name / TIMELINE) for name in runs}
        title = f"{objective.architecture} of {size}; {summary.train_text}"
        draw(plot_head_dynamics, folder / "head_dynamics.png", timelines, title)
        for name, timeline in timelines.items():
            page = (folder / "checkpoints" / name / TIMELINE).with_suffix(".html")
            timeline.save_page(page, f"{name} {title}")
    loss = f"{objective.loss_in_words} (nats, mean over {objective.mean_over})"
    losses = {
        "guided": "guided attention heads",
        "unguided": "the stock loss, beside its guided twin",
        SUPPRESSED: f"heads that were kept from their patterns for {objective.args.suppress_steps} steps",
    }
    for name, run in runs.items():
        write_model_card(
            folder / MODEL_FOLDERS[name],
            name=f"{name} {objective.architecture}, {size}",
            description=f"{objective.architecture} of {size}, pretrained for {summary.steps:,} steps with "
            f"{losses[name]}. Losses are the {loss}.",
            config=configs[name],
            task=objective.task,
            figures={key: value for key, value in run.items() if key not in NOT_ON_CARDS},
            metric=Metric("loss", loss, run[f"{objective.loss}_loss_eval"]),
            dataset=summary.train_text,
            provenance=summary.provenance,
            language=language_of(objective.args),
            license=objective.args.license,
            hub_dataset=objective.args.dataset_name,
        )


def print_report(runs: Iterable[str], summary: PretrainSummary, folder: Path) -> None:
    print("\n" + format_table(*summary.table("run", runs)) + "\n")
    if "unguided" in runs:
        print(crossing_line("The guided run", "the unguided one", summary.steps_to_unguided_final, summary.steps))
        if SUPPRESSED in runs:
            step = summary.suppressed_steps_to_unguided_final
            print(crossing_line("The suppressed run", "the unguided one", step, summary.steps))
    print(f"Everything is in {folder}: {SUMMARY}, curves.png, {MODEL_FOLDERS['guided']}/.")


if __name__ == "__main__":
    run_recipe(main, PRESETS, PretrainSummary)
