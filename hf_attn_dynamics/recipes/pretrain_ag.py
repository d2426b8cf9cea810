# Licensed under the Apache License, Version 2.0.
"""Pretrain a model with guided attention heads, and its unguided twin beside it.

    accelerate launch recipes/pretrain_ag.py                                     # a demonstration on embedded text
    accelerate launch recipes/pretrain_ag.py recipes/configs/pretrain_ag.yaml    # the same, every key explained
    accelerate launch recipes/pretrain_ag.py --preset roberta-12 --train_file corpus/ --output_dir runs/roberta-12
    accelerate launch recipes/pretrain_ag.py --objective clm                     # Llama
    accelerate launch recipes/pretrain_ag.py --objective clm --architecture gpt2
    accelerate launch recipes/pretrain_ag.py --architecture modernbert
    accelerate launch recipes/pretrain_ag.py --objective rtd                     # ELECTRA
    accelerate launch recipes/pretrain_ag.py --objective mlm+nsp                 # BERT

After Deshpande & Narasimhan (2020). What can be learnt is in `objectives.py`: masked tokens (`mlm`, RoBERTa), the
next token (`clm`, Llama), which tokens a generator replaced (`rtd`, ELECTRA), or masked tokens and next sentences
(`mlm+nsp`, BERT). With `mlm` and `clm`, `--architecture` names another model of the catalogue, by its `model_type`.

Writes to `--output_dir`: `summary.json`, `curves.png` and `.svg`, `config.yaml` (the values of the run), `model/` (the
guided model with tokenizer, code and card) and, with `--compare`, `model_unguided/`. With `--head_dynamics N`, the
confidence, entropy and relative positions of all heads are measured every N steps on a fixed part of the evaluation
text: `head_dynamics.png` and `.svg` show the runs side by side, `checkpoints/RUN/head_dynamics.csv` has the numbers.
With `--push_to_hub true --hub_model_id USER/NAME`, `model/` is pushed to the Hub once all of it is on disk.

Keys of `summary.json`, where LOSS is `mlm` (mean over masked tokens), with `--objective clm` `clm` (mean over tokens
but the first of each example), or with `--objective rtd` `rtd` (of the discriminator alone, mean over tokens); in
nats, guidance and α are no part of them:
    LOSS_loss_eval_guided, LOSS_loss_eval_unguided                on the evaluation text, at the last step
    LOSS_loss_train_guided, LOSS_loss_train_unguided              over the last logging window
    LOSS_loss_train_mean_guided, LOSS_loss_train_mean_unguided    mean over all training steps
    eval_curve_guided, eval_curve_unguided                        [step, LOSS_loss_eval] of all evaluations
    steps                                                         optimizer steps of each run
    steps_to_unguided_final                                       first guided evaluation at or below the unguided end
    step_ratio                                                    that over `steps`
    seconds_per_step_guided, seconds_per_step_unguided            wall time of a step; evaluation and fetching apart
    tokens_per_second_guided, tokens_per_second_unguided          real tokens trained on in a second of these steps
    guidance_weight_initial                                       α_0
    plateau                                                       loss of a model that knows frequencies alone: the
                                                                  entropy of the tokens (mlm, clm) or of the share that
                                                                  is replaced (rtd with the unigram generator)
    num_parameters, vocab_size, train_examples, eval_examples, train_text, objective, architecture, num_processes, and
    seed, device, command and versions
With rtd, for either run: replaced_precision_…, replaced_recall_…, replaced_f1_… of the tokens found, replaced_share_…
(how many there are) and, with a trained generator, generator_loss_eval_…; with mlm+nsp: nsp_loss_eval_…,
nsp_loss_train_mean_….
Keys of a run that was not made (unguided without --compare), and of a crossing that was never reached, are null.
"""

import copy
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, set_seed

from .. import (
    HeadConfidence,
    HeadDynamicsCallback,
    HeadEntropy,
    HeadTimeline,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
    RelativePositions,
)
from .._tables import format_table
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
from .arguments.pretrain_ag import PRESETS, PretrainArguments
from .curves import crossing_line, early_crossing
from .objectives import OBJECTIVES, Objective
from .run import SUMMARY, Run, cpu_only, run_recipe, write_json


MODEL_FOLDERS = {"guided": "model", "unguided": "model_unguided"}
TOKENIZER_TEXTS = 500_000  # of a stream; a tokenizer learns little from more
PROBE_EXAMPLES, PROBE_BATCH = 64, 16  # that heads are measured on


@dataclass
class PretrainTrainingArguments(HeadwiseTrainingArguments):
    """[`HeadwiseTrainingArguments`] with defaults for pretraining, beside those of the preset.

    These defaults differ: `output_dir` runs/pretrain_ag, `per_device_eval_batch_size` 64, `eval_strategy` steps,
    `save_total_limit` 1, `report_to` none, `include_num_input_tokens_seen` non_padding.
    """

    output_dir: str = field(default="runs/pretrain_ag", metadata={"help": "Where to write; may not hold another run."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Examples of an evaluation batch."})
    eval_strategy: str = field(default="steps", metadata={"help": "When to evaluate."})
    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints to keep."})
    report_to: str | None = field(default="none", metadata={"help": "Trackers to report to."})
    include_num_input_tokens_seen: str = field(default="non_padding", metadata={"help": "Tokens to count."})

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        super().__post_init__()


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


def load_corpus(args: PretrainArguments, objective: Objective) -> tuple[Any, Any, str]:
    """Training and validation texts, and what to call them."""
    if not args.train_file and not args.dataset_name:
        if args.validation_file:
            raise ValueError(f"validation_file {args.validation_file} needs a train_file or dataset_name beside it.")
        return *objective.embedded(), "documentation of Python and of installed libraries"
    hub = {"dataset_name": args.dataset_name, "dataset_config": args.dataset_config}
    train = objective.load(args.train_file, **hub, split=args.dataset_split)
    name = args.dataset_name or ", ".join(Path(file).name for file in args.train_file)
    if args.validation_file:
        return train, objective.load(args.validation_file), name
    if args.validation_split:
        if not args.dataset_name:
            raise ValueError(f"validation_split {args.validation_split!r} needs dataset_name; use validation_file.")
        return train, objective.load(None, **hub, split=args.validation_split), name
    raise ValueError("no text to evaluate on: name a validation_file, or the validation_split of the data set.")


# ---------------------------------------------------------------------------------------------------------------------
# Guidance
# ---------------------------------------------------------------------------------------------------------------------


def guidance_settings(args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> dict:
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


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def make_trainer(
    name: str, objective: Objective, config: PreTrainedConfig, training_args: PretrainTrainingArguments, **data
) -> HeadwiseTrainer:
    """Trainer of one run; runs of one seed start from the same weights and see the same batches."""
    set_seed(training_args.seed)
    model = objective.model_class(config)
    run_args = copy.copy(training_args)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    if config.guidance is None:
        run_args.guidance_weight = 0.0
    trainer = HeadwiseTrainer(model, run_args, **data, **objective.trainer_settings)
    show_progress(trainer, name)
    return trainer


def steps_within(
    minutes: float, folder: Path, objective: Objective, configs: list, training_args: PretrainTrainingArguments, **data
) -> int:
    """Optimizer steps of each run that fit into a time, judged by the first few of each; at most `max_steps`.

    What was found is kept for a resumed run, whose schedules depend on it.
    """
    record = folder / "checkpoints" / "steps.json"
    if record.is_file():
        return json.loads(record.read_text())["max_steps"]
    seconds = 0.0
    for config in configs:
        trial_args = copy.copy(training_args)
        trial_args.max_steps, trial_args.eval_strategy, trial_args.save_strategy = 12, "no", "no"
        timer = StepTimer()
        trainer = make_trainer("trial", objective, config, trial_args, **data)
        trainer.add_callback(timer)
        trainer.train()
        evaluation = time.perf_counter()
        trainer.evaluate()
        seconds += timer.seconds / timer.steps
        seconds += (time.perf_counter() - evaluation) / (training_args.eval_steps or training_args.logging_steps)
    # All processes take the number of the first one.
    steps = torch.tensor(int(60 * minutes / seconds), device=PartialState().device)
    if PartialState().num_processes > 1:
        torch.distributed.broadcast(steps, 0)
    found = min(max(int(steps), 2), training_args.max_steps)
    if PartialState().is_main_process:
        write_json(record, {"max_steps": found})
    return found


def watch_heads(every: int, eval_dataset: Dataset, data_collator: Any) -> HeadDynamicsCallback:
    """Measures heads on the first examples of the evaluation text."""
    examples = eval_dataset.select(range(min(PROBE_EXAMPLES, len(eval_dataset)))).to_list()
    probe = [data_collator(examples[i : i + PROBE_BATCH]) for i in range(0, len(examples), PROBE_BATCH)]
    return HeadDynamicsCallback([HeadConfidence(), HeadEntropy(), RelativePositions()], probe, every)


def train_run(
    name: str, objective: Objective, config: PreTrainedConfig, training_args, folder: Path, resume: bool, **data
) -> dict:
    """Train one run, or read what is left of it if it was finished before; returns its figures and log."""
    record = folder / "checkpoints" / name / "run.json"
    if resume and record.is_file():
        return json.loads(record.read_text())
    trainer = make_trainer(name, objective, config, training_args, **data)
    if objective.args.head_dynamics:
        # Before the timer, which does not count what happens between steps.
        watch = watch_heads(objective.args.head_dynamics, data["eval_dataset"], data["data_collator"])
        trainer.add_callback(watch)
    timer = StepTimer()
    trainer.add_callback(timer)
    trainer.add_callback(LogWhenSaved())
    train_from_newest(trainer)
    history = trainer.state.log_history
    if not any(entry["step"] == training_args.max_steps and objective.evaluated in entry for entry in history):
        trainer.evaluate()
    figures = {
        **objective.figures(history),
        "guidance_weight_initial": trainer.initial_guidance_weight,
        "num_parameters": sum(p.numel() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()),
        **timer.figures(),
        "history": history,
    }
    trainer.model = objective.published(trainer.accelerator.unwrap_model(trainer.model))
    trainer.save_model(str(folder / MODEL_FOLDERS[name]))
    if trainer.is_world_process_zero():
        write_json(record, figures)
    return figures


# ---------------------------------------------------------------------------------------------------------------------


def prepare(
    args: PretrainArguments, training_args: PretrainTrainingArguments, objective: Objective
) -> tuple[PreTrainedConfig, dict, dict]:
    """Configuration, what the trainer is given, and what the summary says of both; refuses what cannot be trained."""
    if training_args.max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {training_args.max_steps}.")
    train_texts, validation_texts, corpus_name = load_corpus(args, objective)
    # One process prepares, the others read what it left in the cache.
    with PartialState().main_process_first():
        if args.tokenizer_name:
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name)
        else:
            sample = train_texts.take(TOKENIZER_TEXTS) if args.streaming else train_texts
            tokenizer = train_byte_level_bpe(objective.words(sample), args.vocab_size, objective.tokenizer_kind)
        objective.check(training_args, tokenizer)
        config = objective.config(tokenizer, guidance_settings(args, tokenizer))
        train = objective.examples(train_texts, tokenizer, training_args.seed)
        evaluation = objective.examples(validation_texts, tokenizer, training_args.seed)
        evaluation = Dataset.from_list(list(evaluation.take(args.validation_examples)))
        warn_of_unknown(evaluation["input_ids"], tokenizer, corpus_name)
        if not len(evaluation):
            raise ValueError("the evaluation text has no example; add text.")
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


def main(args: PretrainArguments, training_args: PretrainTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args, PRESETS)
    with run.preparing():
        objective = OBJECTIVES[args.objective](args)
        config, data, facts = prepare(args, training_args, objective)
    unguided = copy.deepcopy(config)
    unguided.guidance = None
    configs = {"guided": config, **({"unguided": unguided} if args.compare else {})}
    if args.max_minutes is not None:
        training_args.max_steps = steps_within(
            args.max_minutes, run.folder, objective, list(configs.values()), training_args, **data
        )
    runs = {
        name: train_run(name, objective, config, training_args, run.folder, args.resume, **data)
        for name, config in configs.items()
    }
    return run.finish(
        summarise(runs, objective, training_args, facts),
        lambda summary: publish(runs, objective, summary, configs, run.folder),
        lambda summary: print_report(runs, objective, summary, run.folder),
        pushed=MODEL_FOLDERS["guided"],
    )


def summarise(runs: dict[str, dict], objective: Objective, training_args, facts: dict) -> dict:
    """All figures, flat."""
    guided, other = runs["guided"], runs.get("unguided", {})
    crossing = crossing_of(runs, objective)
    summary = {}
    for key in guided.keys() - {"history", "guidance_weight_initial", "num_parameters"}:
        summary |= {f"{key}_guided": guided[key], f"{key}_unguided": other.get(key)}
    curves = {f"eval_curve_{name}": curve(run, objective) for name, run in runs.items()}
    return {
        **{key: summary[key] for key in sorted(summary)},
        "eval_curve_unguided": None,
        **curves,
        "steps": training_args.max_steps,
        "steps_to_unguided_final": crossing[0] if crossing else None,
        "step_ratio": crossing[0] / training_args.max_steps if crossing else None,
        "guidance_weight_initial": guided["guidance_weight_initial"],
        "num_parameters": guided["num_parameters"],
        **facts,
    }


def curve(run: dict, objective: Objective) -> list[list]:
    return [[e["step"], e[objective.evaluated]] for e in run["history"] if objective.evaluated in e]


def crossing_of(runs: dict[str, dict], objective: Objective) -> tuple[int, float] | None:
    """Step and loss of the first guided evaluation at or below the end of the unguided run."""
    if "unguided" not in runs:
        return None
    final = runs["unguided"][f"{objective.loss}_loss_eval"]
    return first_at_or_below(runs["guided"]["history"], final, objective.evaluated)


def publish(
    runs: dict[str, dict], objective: Objective, summary: dict, configs: dict[str, PreTrainedConfig], folder: Path
) -> None:
    """Pictures, and the card of each model."""
    config = configs["guided"]
    size = f"{config.num_hidden_layers} layers × {config.hidden_size}, {config.num_attention_heads} heads"
    plot_pretraining(
        {name: run["history"] for name, run in runs.items()},
        folder / "curves.png",
        title=f"{objective.architecture} of {size}; {summary['train_text']}",
        plateau=objective.plateau,
        crossing=early_crossing(crossing_of(runs, objective), summary["steps"]),
        loss=f"{objective.loss_in_words} (nats)",
        keys=(objective.trained, objective.evaluated),
    )
    if objective.args.head_dynamics:
        timelines = {name: HeadTimeline.load(folder / "checkpoints" / name / TIMELINE) for name in runs}
        plot_head_dynamics(timelines, folder / "head_dynamics.png", title=f"{objective.architecture} of {size}")
    loss = f"{objective.loss_in_words} (nats, mean over {objective.mean_over})"
    losses = {"guided": "guided attention heads", "unguided": "the stock loss, beside its guided twin"}
    for name, run in runs.items():
        write_model_card(
            folder / MODEL_FOLDERS[name],
            name=f"{name} {objective.architecture}, {size}",
            description=f"{objective.architecture} of {size}, pretrained for {summary['steps']:,} steps with "
            f"{losses[name]}. Losses are the {loss}.",
            config=configs[name],
            task=objective.task,
            figures={
                key: value
                for key, value in run.items()
                if key not in ("history", "num_parameters", "seconds_per_step", "tokens_per_second")
            },
            metric=Metric("loss", loss, run[f"{objective.loss}_loss_eval"]),
            dataset=summary["train_text"],
            provenance=summary,
            language=language_of(objective.args),
            license=objective.args.license,
            hub_dataset=objective.args.dataset_name,
        )


def print_report(runs: dict[str, dict], objective: Objective, summary: dict, folder: Path) -> None:
    header = ["run", "eval loss", "mean train loss", "seconds a step", "tokens a second"]
    losses = (f"{objective.loss}_loss_eval", f"{objective.loss}_loss_train_mean")
    keys = [*losses, "seconds_per_step", "tokens_per_second"]
    if "replaced_precision" in runs["guided"]:
        header += ["precision", "recall"]
        keys += ["replaced_precision", "replaced_recall"]
    print("\n" + format_table(header, [[name, *(run[key] for key in keys)] for name, run in runs.items()]))
    print()
    if "unguided" in runs:
        step = summary["steps_to_unguided_final"]
        print(crossing_line("The guided run", "the unguided one", step, summary["steps"]))
    print(f"Everything is in {folder}: {SUMMARY}, curves.png, {MODEL_FOLDERS['guided']}/.")


if __name__ == "__main__":
    run_recipe(main, PRESETS)
