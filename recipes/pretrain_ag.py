# Licensed under the Apache License, Version 2.0.
"""Pretrain a masked language model with guided attention heads, and its unguided twin beside it.

    accelerate launch recipes/pretrain_ag.py                                     # a demonstration on embedded text
    accelerate launch recipes/pretrain_ag.py recipes/configs/pretrain_ag.yaml    # the same, every key explained
    accelerate launch recipes/pretrain_ag.py --preset roberta-12 --train_file corpus/ --output_dir runs/roberta-12

Writes to `--output_dir`: `summary.json`, `curves.png` and `.svg`, `config.yaml` (the values of the run), `model/` (the
guided model with tokenizer, code and card) and, with `--compare`, `model_unguided/`.

Keys of `summary.json` (losses are means over masked tokens, in nats; guidance and α are not part of them):
    mlm_loss_eval_guided, mlm_loss_eval_unguided                on the evaluation text, at the last step
    mlm_loss_train_mean_guided, mlm_loss_train_mean_unguided    mean over all training steps
    steps                                                       optimizer steps of each run
    steps_to_unguided_final                                     first guided evaluation at or below the unguided end
    step_ratio                                                  that over `steps`
    seconds_per_step_guided, seconds_per_step_unguided          wall time of a step; evaluation and fetching apart
    tokens_per_second_guided, tokens_per_second_unguided        real tokens trained on in a second of these steps
    guidance_weight_initial                                     α_0
    unigram_entropy                                             of the training tokens: where the plateau is expected
    num_parameters, vocab_size, train_examples, eval_examples, train_text, and seed, device, command and versions
Keys of a run that was not made (unguided without --compare), and of a crossing that was never reached, are null.
"""

import copy
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_attn_dynamics import (
    HeadwiseRobertaConfig,
    HeadwiseRobertaForMaskedLM,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
    MaskedLanguageModelCollator,
)
from hf_attn_dynamics.analysis.plots import plot_pretraining
from hf_attn_dynamics.data import (
    delimiter_token_ids,
    embedded_splits,
    load_texts,
    pack_blocks,
    pad_sentences,
    period_token_ids,
    train_byte_level_bpe,
)
from hf_attn_dynamics.hub import Metric, write_model_card
from hf_attn_dynamics.runs import (
    CONFIG,
    SUMMARY,
    RunArguments,
    check_output_dir,
    cpu_only,
    device_name,
    format_table,
    provenance,
    refuse_bad_input,
    run_recipe,
    values_of_run,
    write_json,
    write_yaml,
)
from hf_attn_dynamics.training import (
    ProgressWithLosses,
    StepTimer,
    check_trainer_arguments,
    first_at_or_below,
    mean_over_steps,
)


MODEL_FOLDERS = {"guided": "model", "unguided": "model_unguided"}
TOKENIZER_TEXTS = 500_000  # of a stream; a tokenizer learns little from more

PAPER = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "vocab_size": 52000,
    "block_size": 512,
    "learning_rate": 1e-4,
    "per_device_train_batch_size": 16,
    "max_steps": 100_000,
    "eval_steps": 2000,
    "logging_steps": 100,
    "save_steps": 2000,
    "compare": False,
}
# Defaults of flags, by name; the first is used without --preset.
PRESETS = {
    "tiny": {
        "num_hidden_layers": 8,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 4000,
        "block_size": 64,
        "attention_dropout": 0.0,
        "learning_rate": 1e-3,
        "adam_beta2": 0.98,
        "guidance_weight": 0.1,
        "per_device_train_batch_size": 16,
        "max_steps": 800,
        "eval_steps": 50,
        "logging_steps": 10,
        "save_steps": 300,
        "compare": True,
    },
    "roberta-8": {**PAPER, "num_hidden_layers": 8},
    "roberta-12": {**PAPER, "num_hidden_layers": 12},
    "roberta-16": {**PAPER, "num_hidden_layers": 16, "num_attention_heads": 16},
}


@dataclass
class PretrainArguments(RunArguments):
    """Model, text and guidance of the run; how to train is in [`PretrainTrainingArguments`]."""

    preset: str = field(default="tiny", metadata={"help": f"Sizes and training settings: {', '.join(PRESETS)}."})
    compare: bool = field(default=False, metadata={"help": "Also train the unguided twin, for comparison."})
    max_minutes: float | None = field(
        default=None, metadata={"help": "Take as many steps as fit into this time, at most max_steps."}
    )

    num_hidden_layers: int = field(default=8, metadata={"help": "Layers."})
    hidden_size: int = field(default=128, metadata={"help": "Width; the feed-forward layers are 4 times as wide."})
    num_attention_heads: int = field(default=4, metadata={"help": "Heads of a layer."})
    vocab_size: int = field(default=4000, metadata={"help": "Size of the tokenizer that is trained."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Take this tokenizer instead of training one (folder, or name on the Hub)."}
    )
    dropout: float = field(default=0.1, metadata={"help": "Dropout of hidden states."})
    attention_dropout: float = field(default=0.1, metadata={"help": "Dropout of attention weights."})

    train_file: list[str] | None = field(
        default=None,
        metadata={"help": "Files, folders or patterns of text to train on (txt, jsonl, csv, tsv, parquet)."},
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same, to evaluate on."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub, instead of train_file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    dataset_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str | None = field(default=None, metadata={"help": "Its split to evaluate on."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    streaming: bool = field(
        default=False, metadata={"help": "Read while training, instead of preparing all text first."}
    )
    block_size: int = field(default=64, metadata={"help": "Tokens of an example."})
    packing: bool = field(
        default=True, metadata={"help": "Fill every example with running text; else one text an example, padded."}
    )
    validation_examples: int = field(default=256, metadata={"help": "At most so many examples to evaluate on."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens that are predicted."})

    guidance_fraction: float = field(default=0.5, metadata={"help": "Share λ of the heads of a layer to guide."})
    guidance_patterns: list[str] | None = field(
        default=None, metadata={"help": "Patterns of head 0, head 1, …; the last one for all that are left."}
    )
    guidance_heads: str | None = field(
        default=None, metadata={"help": 'Explicit assignment instead, as JSON: {"next": [0], "first": [1, 2]}.'}
    )
    guidance_reduction: str = field(default="row_mean", metadata={"help": "row_mean, paper or code."})


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


def load_corpus(args: PretrainArguments) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset, str]:
    """Training and validation texts, and what to call them."""
    if not args.train_file and not args.dataset_name:
        if args.validation_file:
            raise ValueError(f"validation_file {args.validation_file} needs a train_file or dataset_name beside it.")
        train, validation = embedded_splits()
        return (
            *(Dataset.from_dict({"text": [p for d in part for p in d.split("\n")]}) for part in (train, validation)),
            "documentation of Python and of installed libraries",
        )
    source = {"text_column": args.text_column, "streaming": args.streaming}
    hub = {"dataset_name": args.dataset_name, "dataset_config": args.dataset_config}
    train = load_texts(args.train_file, **hub, split=args.dataset_split, **source)
    name = args.dataset_name or ", ".join(Path(file).name for file in args.train_file)
    if args.validation_file:
        return train, load_texts(args.validation_file, None, **source), name
    if args.validation_split:
        if not args.dataset_name:
            raise ValueError(f"validation_split {args.validation_split!r} needs dataset_name; use validation_file.")
        return train, load_texts(None, **hub, split=args.validation_split, **source), name
    raise ValueError("no text to evaluate on: name a validation_file, or the validation_split of the data set.")


def prepare_examples(
    args: PretrainArguments, texts: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase
) -> Dataset | IterableDataset:
    prepare = pack_blocks if args.packing else pad_sentences
    return prepare(texts, tokenizer, args.block_size)


def unigram_entropy(examples: Dataset | IterableDataset, special: list[int], limit: int = 20_000) -> float:
    """Entropy of the frequencies of ordinary tokens in the first examples, in nats."""
    ids = np.concatenate([np.asarray(example["input_ids"]) for example in examples.take(limit)])
    counts = np.bincount(ids[~np.isin(ids, special)])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


# ---------------------------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------------------------


def build_config(args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> HeadwiseRobertaConfig:
    guidance = {
        "reduction": args.guidance_reduction,
        "delimiter_token_ids": delimiter_token_ids(tokenizer),
        "period_token_ids": period_token_ids(tokenizer) or None,
    }
    if args.guidance_heads:
        try:
            guidance["heads"] = json.loads(args.guidance_heads)
        except json.JSONDecodeError as error:
            raise ValueError(f"guidance_heads {args.guidance_heads!r} is not valid JSON: {error}.") from error
    else:
        guidance |= {"fraction": args.guidance_fraction, "patterns": args.guidance_patterns}
    if args.hidden_size % args.num_attention_heads:
        raise ValueError(f"hidden_size {args.hidden_size} is no multiple of {args.num_attention_heads} heads.")
    return HeadwiseRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        intermediate_size=4 * args.hidden_size,
        # RoBERTa counts positions from the padding index on.
        max_position_embeddings=args.block_size + tokenizer.pad_token_id + 1,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.attention_dropout,
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        layer_norm_eps=1e-5,
        guidance=guidance,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def make_trainer(
    name: str, config: HeadwiseRobertaConfig, training_args: PretrainTrainingArguments, **data
) -> HeadwiseTrainer:
    """Trainer of one run; runs of one seed start from the same weights and see the same batches."""
    set_seed(training_args.seed)
    model = HeadwiseRobertaForMaskedLM(config)
    run_args = copy.copy(training_args)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    if config.guidance is None:
        run_args.guidance_weight = 0.0
    trainer = HeadwiseTrainer(model, run_args, **data)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if not training_args.disable_tqdm:
        trainer.add_callback(ProgressWithLosses(name))
    return trainer


def steps_within(minutes: float, folder: Path, configs: list, training_args, **data) -> int:
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
        trainer = make_trainer("trial", config, trial_args, **data)
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


def train_run(name: str, config: HeadwiseRobertaConfig, training_args, folder: Path, resume: bool, **data) -> dict:
    """Train one run, or read what is left of it if it was finished before; returns its figures and log."""
    record = folder / "checkpoints" / name / "run.json"
    if resume and record.is_file():
        return json.loads(record.read_text())
    trainer = make_trainer(name, config, training_args, **data)
    timer = StepTimer()
    trainer.add_callback(timer)
    has_checkpoint = resume and any(record.parent.glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=True if has_checkpoint else None)
    history = trainer.state.log_history
    if not any(entry["step"] == training_args.max_steps and "eval_loss" in entry for entry in history):
        trainer.evaluate()
    figures = {
        "mlm_loss_eval": next(entry["eval_loss"] for entry in reversed(history) if "eval_loss" in entry),
        "mlm_loss_train_mean": mean_over_steps(history, "task_loss"),
        "guidance_weight_initial": trainer.initial_guidance_weight,
        **timer.figures(),
        "history": history,
    }
    trainer.save_model(str(folder / MODEL_FOLDERS[name]))
    if trainer.is_world_process_zero():
        write_json(record, figures)
    return figures


# ---------------------------------------------------------------------------------------------------------------------


def prepare(
    args: PretrainArguments, training_args: PretrainTrainingArguments
) -> tuple[HeadwiseRobertaConfig, dict, dict]:
    """Configuration, what the trainer is given, and what the summary says of both; refuses what can not be trained."""
    if training_args.max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {training_args.max_steps}.")
    train_texts, validation_texts, corpus_name = load_corpus(args)
    # One process prepares, the others read what it left in the cache.
    with PartialState().main_process_first():
        if args.tokenizer_name:
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name)
        else:
            sample = train_texts.take(TOKENIZER_TEXTS) if args.streaming else train_texts
            tokenizer = train_byte_level_bpe((row["text"] for row in sample), args.vocab_size)
        config = build_config(args, tokenizer)
        collator = MaskedLanguageModelCollator(tokenizer, args.mlm_probability, training_args.seed)
        check_trainer_arguments(training_args, collator)
        train = prepare_examples(args, train_texts, tokenizer)
        evaluation = prepare_examples(args, validation_texts, tokenizer).take(args.validation_examples)
        evaluation = Dataset.from_list(list(evaluation))
        if not len(evaluation):
            raise ValueError("the evaluation text has no example; add text.")
        entropy = unigram_entropy(train, tokenizer.all_special_ids)
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
        "unigram_entropy": entropy,
        "vocab_size": config.vocab_size,
        "train_examples": None if args.streaming else len(train),
        "eval_examples": len(evaluation),
        "train_text": corpus_name,
    }
    return config, data, facts


def main(args: PretrainArguments, training_args: PretrainTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    with refuse_bad_input():
        values = values_of_run(args, training_args, PRESETS)
        folder = check_output_dir(training_args.output_dir, values, args.resume)
        config, data, facts = prepare(args, training_args)
    args.use_threads(training_args)
    unguided = copy.deepcopy(config)
    unguided.guidance = None
    configs = {"guided": config, **({"unguided": unguided} if args.compare else {})}

    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        write_yaml(folder / CONFIG, values)
    if args.max_minutes is not None:
        training_args.max_steps = steps_within(args.max_minutes, folder, list(configs.values()), training_args, **data)
    runs = {name: train_run(name, c, training_args, folder, args.resume, **data) for name, c in configs.items()}
    summary = summarise(runs, training_args, config, facts)
    if PartialState().is_main_process:
        publish(runs, summary, configs, folder)
        write_json(folder / SUMMARY, summary)
        print_report(runs, summary, folder)
    return summary


def summarise(runs: dict[str, dict], training_args, config: HeadwiseRobertaConfig, facts: dict) -> dict:
    """All figures, flat."""
    guided, other = runs["guided"], runs.get("unguided", {})
    crossing = first_at_or_below(guided["history"], other["mlm_loss_eval"]) if other else None
    summary = {}
    for key in ("mlm_loss_eval", "mlm_loss_train_mean", "seconds_per_step", "tokens_per_second"):
        summary |= {f"{key}_guided": guided[key], f"{key}_unguided": other.get(key)}
    return {
        **summary,
        "steps": training_args.max_steps,
        "steps_to_unguided_final": crossing[0] if crossing else None,
        "step_ratio": crossing[0] / training_args.max_steps if crossing else None,
        "guidance_weight_initial": guided["guidance_weight_initial"],
        "num_parameters": sum(p.numel() for p in HeadwiseRobertaForMaskedLM(config).parameters()),
        **facts,
        "num_processes": PartialState().num_processes,
        **provenance(training_args.seed, device_name(training_args)),
    }


def publish(runs: dict[str, dict], summary: dict, configs: dict[str, HeadwiseRobertaConfig], folder: Path) -> None:
    """Pictures, and the card of each model."""
    config = configs["guided"]
    size = f"{config.num_hidden_layers} layers × {config.hidden_size}, {config.num_attention_heads} heads"
    reached = summary["steps_to_unguided_final"]
    plot_pretraining(
        {name: run["history"] for name, run in runs.items()},
        folder / "curves.png",
        title=f"{size}; {summary['train_text']}",
        unigram_entropy=summary["unigram_entropy"],
        crossing=first_at_or_below(runs["guided"]["history"], summary["mlm_loss_eval_unguided"]) if reached else None,
    )
    losses = {"guided": "guided attention heads", "unguided": "the stock loss, beside its guided twin"}
    for name, run in runs.items():
        write_model_card(
            folder / MODEL_FOLDERS[name],
            name=f"{name} RoBERTa, {size}",
            description=f"A RoBERTa of {size}, pretrained by masked language modelling for {summary['steps']:,} steps "
            f"with {losses[name]}.",
            config=configs[name],
            task="fill-mask",
            figures={key: run[key] for key in ("mlm_loss_eval", "mlm_loss_train_mean", "guidance_weight_initial")},
            metric=Metric("loss", "masked-language-model loss (nats, mean over masked tokens)", run["mlm_loss_eval"]),
            dataset=summary["train_text"],
            provenance=summary,
        )


def print_report(runs: dict[str, dict], summary: dict, folder: Path) -> None:
    header = ["run", "eval loss", "mean train loss", "seconds a step", "tokens a second"]
    keys = ("mlm_loss_eval", "mlm_loss_train_mean", "seconds_per_step", "tokens_per_second")
    print("\n" + format_table(header, [[name, *(run[key] for key in keys)] for name, run in runs.items()]))
    if summary["step_ratio"] is not None:
        print(
            f"\nThe guided run reached the end of the unguided one at step {summary['steps_to_unguided_final']} of "
            f"{summary['steps']} ({summary['step_ratio']:.0%})."
        )
    print(f"Everything is in {folder}: {SUMMARY}, curves.png, {MODEL_FOLDERS['guided']}/.")


if __name__ == "__main__":
    run_recipe(main, PretrainArguments, PretrainTrainingArguments, presets=PRESETS)
