# Licensed under the Apache License, Version 2.0.
"""Remove attention heads of a classifier or a language model: which ones is learnt, computed, or drawn.

    accelerate launch recipes/prune_heads.py                                     # a demonstration on embedded text
    accelerate launch recipes/prune_heads.py recipes/configs/prune_heads.yaml    # the same, every key explained
    accelerate launch recipes/prune_heads.py --model_name bert-base-uncased --train_file sst2/train.tsv \\
        --validation_file sst2/dev.tsv --keep 72 36 --output_dir runs/sst2
    accelerate launch recipes/prune_heads.py --task causal-lm --num_key_value_heads 4 --keep 16 8    # a small Llama
    accelerate launch recipes/prune_heads.py --task masked-lm --architecture modernbert
    accelerate launch recipes/prune_heads.py --task image                        # a small ViT, on drawings

A classifier of texts is trained, or fine-tuned from a checkpoint; with `--task causal-lm` a decoder and with
`--task masked-lm` an encoder, on running text in blocks of `--max_length` tokens; with `--task image` a classifier of
images that are drawn by code. `--architecture` names another model of the catalogue. For each way to choose heads and
each number of them, heads are removed from a copy, which is then trained a little more; all ways get the same number
of epochs. `gates` are trained (Voita et al. 2019), `michel` removes the heads that the loss depends on least (Michel
et al. 2019), `random` draws. Where heads share keys and values, whole groups stay or go, and `--keep` counts heads.

Writes to `--output_dir`: `summary.json`, `curve.csv`, `curve.png`, `heads.png`, `gates.png`, `gate_history.png` and
`.svg` of each, `config.yaml` (the values of the run), `dense/` (the model with all heads) and `model-K/` (with K
heads, chosen in the first way that was named). With `--push_to_hub true --hub_model_id USER/NAME`, `model-K/` of the
first K is pushed to the Hub once all of it is on disk.

Keys of `summary.json`, of the first way and the first K that were named unless they say otherwise:
    metric                                        name of the metric, on the validation examples: accuracy, or of
                                                  language models perplexity, e to the mean loss: with causal-lm of
                                                  all tokens but the first of each block, with masked-lm of the
                                                  masked tokens, the same ones at each evaluation of a seed
    heads_total, heads_kept                       heads before and after
    metric_dense, metric_pruned                   metric before and after
    metric_from_scratch                           of the same heads, trained from random weights for as many epochs
    parameters_dense, parameters_pruned, bytes_dense, bytes_pruned, flops_ratio
    latency_ratio, latency_of_ideal, latency_device, latency_threads, latency_batch, latency_length
                                                  pruned over dense; speed-up reached over the one that FLOPs allow
    rows                                          as in curve.csv: method, heads, the metric, loss, parameters
    task, model, importance, train_examples, eval_examples, text, num_processes, and seed, device, command and versions
`metric_from_scratch` is null without --from_scratch, `latency_length` with images.
"""

import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import PartialState
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    PreTrainedModel,
    set_seed,
)

from .. import (
    GateHistory,
    HeadScores,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
    head_importance,
    head_report,
    headwise_model,
    random_importance,
    retain_heads,
)
from .._tables import format_table
from ..analysis.plots.base import (
    plot_gate_history,
    plot_gates,
    plot_heads_per_layer,
    plot_pruning_curve,
)
from ..hub.card import Metric, write_model_card
from ..models.head_roles import locate_heads
from ..training import check_trainer_arguments, masks_of_evaluation, show_progress, train_from_newest
from .arguments.prune_heads import PruneArguments
from .pruning_tasks import TASKS, Task
from .run import SUMMARY, Run, cpu_only, run_recipe, write_csv


@dataclass
class PruneTrainingArguments(HeadwiseTrainingArguments):
    """[`HeadwiseTrainingArguments`] with defaults for a small classifier; `num_train_epochs` are those of all heads.

    These defaults differ: `output_dir` runs/prune_heads, `num_train_epochs` 6, `per_device_train_batch_size` 32,
    `per_device_eval_batch_size` 128, `learning_rate` 5e-4, `warmup_steps` 0.06, `train_sampling_strategy`
    group_by_length, `save_strategy` no, `report_to` none.
    """

    output_dir: str = field(default="runs/prune_heads", metadata={"help": "Where to write; may not hold another run."})
    num_train_epochs: float = field(default=6.0, metadata={"help": "Epochs of the model with all heads."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Texts of a training batch."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Texts of an evaluation batch."})
    learning_rate: float = field(default=5e-4, metadata={"help": "Learning rate of all but the gates."})
    warmup_steps: float = field(default=0.06, metadata={"help": "Steps, or share of them, of linear warm-up."})
    train_sampling_strategy: str = field(default="group_by_length", metadata={"help": "Order of the texts."})
    save_strategy: str = field(default="no", metadata={"help": "Finished models are kept in any case."})
    report_to: str | None = field(default="none", metadata={"help": "Trackers to report to."})

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        for name, value, instead in (("max_steps", self.max_steps, "num_train_epochs"),
                                     ("target_heads", self.target_heads, "keep")):  # fmt: skip
            if value not in (None, -1):
                raise ValueError(f"{name}={value} has no effect here; set {instead}.")
        if self.gate_penalty:
            raise ValueError(f"gate_penalty={self.gate_penalty} has no effect here; set keep.")
        super().__post_init__()


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def train(model: PreTrainedModel, name: str, epochs: float, training_args, data: dict, **settings) -> HeadwiseTrainer:
    """Trains a model for some epochs; `settings` replace training arguments."""
    callbacks = settings.pop("callbacks", None)
    run_args = copy.copy(training_args)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    run_args.num_train_epochs = epochs
    for key, value in settings.items():
        setattr(run_args, key, value)
    trainer = HeadwiseTrainer(model, run_args, callbacks=callbacks, **data)
    show_progress(trainer, name)
    if epochs:
        train_from_newest(trainer)
    return trainer


def evaluated(trainer: HeadwiseTrainer, method: str, task: Task) -> dict:
    """A row of the curve."""
    metrics = trainer.evaluate()
    model = trainer.accelerator.unwrap_model(trainer.model)
    kept = model.config.kept_heads()
    layers: dict[str, list[int]] = {}
    for site, heads in kept.items():
        layers.setdefault(site.kind, []).append(len(heads))
    return {
        "method": method,
        "heads": sum(map(len, kept.values())),
        task.metric: task.value(metrics),
        "loss": metrics["eval_loss"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": layers,
    }


def importance_of(method: str, model: PreTrainedModel, folder: Path, args, training_args, data: dict) -> HeadScores:
    """Scores of the heads of the dense model, computed once for all numbers of heads."""
    record = folder / "checkpoints" / f"importance-{method}.json"
    if record.is_file():
        return HeadScores.load(record)
    if method == "random":
        scores = random_importance(model, seed=training_args.seed)
    else:
        examples = data["train_dataset"].shuffle(seed=training_args.seed).take(args.importance_examples)
        batches = DataLoader(examples, batch_size=64, collate_fn=data["data_collator"])
        model.to(training_args.device)
        with masks_of_evaluation(data["data_collator"]):
            scores = head_importance(model, batches, normalize="l2", progress=not training_args.disable_tqdm)
    if PartialState().is_main_process:
        scores.save(record)
    return scores


def prune(
    method: str, keep: int, task: Task, folder: Path, args: PruneArguments, training_args, data: dict
) -> tuple[HeadwiseTrainer, GateHistory | None]:
    """A copy of the dense model with so many heads, chosen in this way and trained a little more."""
    name = f"{method}-{keep}"
    load = partial(headwise_model, folder / "dense", task.auto_class)
    set_seed(training_args.seed)
    if method == "gates":
        model, history = load().add_gates({"variant": args.gate_variant}), GateHistory(every=5)
        trainer = train(model, name, args.gate_epochs, training_args, data, target_heads=keep, callbacks=[history])
        model = trainer.prune()
        return train(model, f"{name} fine-tuned", args.finetune_epochs, training_args, data), history
    model = load()
    retain_heads(model, keep, importance_of(method, model, folder, args, training_args, data))
    return train(model, name, args.gate_epochs + args.finetune_epochs, training_args, data), None


# ---------------------------------------------------------------------------------------------------------------------


def prepare(
    task: Task, args: PruneArguments, training_args: PruneTrainingArguments
) -> tuple[PreTrainedModel, dict, dict]:
    """The model with all heads before training, what the trainer is given, and what the summary says of both."""
    check_trainer_arguments(training_args)
    task.read(is_trained=training_args.num_train_epochs > 0)
    set_seed(training_args.seed)
    model, processor = task.build()
    task.check_examples(processor)
    longest = model.config.max_positions()
    for flag in ("max_length", "latency_length"):
        if longest is not None and (getattr(args, flag) or 0) > longest:
            raise ValueError(f"{flag}={getattr(args, flag)}, but the model has positions for {longest} tokens.")
    total = sum(map(len, model.config.kept_heads().values()))
    if max(args.keep) >= total:
        raise ValueError(f"keep={max(args.keep)}, but the model has {total} heads; keep fewer.")
    group = max(layer.group_size for layer in locate_heads(model))
    for keep in args.keep:
        if keep % group:
            raise ValueError(
                f"keep={keep}, but {group} heads share a key/value head, of which all stay or go; keep a multiple of "
                f"{group}."
            )
    with PartialState().main_process_first():
        train_set, validation_set = (task.examples(rows, processor) for rows in (task.train, task.validation))
    data = {
        "train_dataset": train_set,
        "eval_dataset": validation_set,
        "data_collator": task.collator(processor, training_args.seed),
        "processing_class": processor,
        "compute_metrics": task.compute_metrics,
    }
    facts = {
        "task": args.task,
        "model": args.model_name or task.small_name,
        "importance": args.importance[0],
        "train_examples": len(train_set),
        "eval_examples": len(validation_set),
        "text": task.text,
    }
    return model, data, facts


def main(args: PruneArguments, training_args: PruneTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args)
    with run.preparing():
        TASKS[args.task].check(args)
        task = TASKS[args.task](args)
        model, data, facts = prepare(task, args, training_args)
    folder = run.folder

    def make_dense():
        trainer = train(model, "dense", training_args.num_train_epochs, training_args, data)
        return evaluated(trainer, "dense", task), trainer, "dense"

    def make_pruned(method: str, keep: int):
        trainer, history = prune(method, keep, task, folder, args, training_args, data)
        if history is not None and trainer.is_world_process_zero():
            history.save(folder / "checkpoints" / f"{method}-{keep}" / "gates.json")
        return evaluated(trainer, method, task), trainer, f"model-{keep}" if method == args.importance[0] else None

    def make_from_scratch(keep: int):
        set_seed(training_args.seed)
        config = AutoConfig.from_pretrained(folder / f"model-{keep}")
        epochs = training_args.num_train_epochs + args.gate_epochs + args.finetune_epochs
        trainer = train(headwise_model(config, task.auto_class), f"scratch-{keep}", epochs, training_args, data)
        return evaluated(trainer, "from scratch", task), trainer, None

    dense = run.once("dense", make_dense)
    rows = [
        run.once(f"{method}-{keep}", partial(make_pruned, method, keep))
        for method in args.importance
        for keep in args.keep
    ]
    if args.from_scratch:
        rows += [run.once(f"scratch-{keep}", partial(make_from_scratch, keep)) for keep in args.keep]
    figures = summarise(task, dense, rows, args, training_args, folder, facts)
    return run.finish(
        figures,
        lambda summary: publish(task, dense, rows, summary, args, folder),
        lambda summary: print_report(task, dense, rows, summary, folder),
        pushed=f"model-{args.keep[0]}",
    )


def summarise(task: Task, dense: dict, rows: list[dict], args, training_args, folder: Path, facts: dict) -> dict:
    """All figures; those of one model are flat."""
    keep = args.keep[0]
    first = rows[0]
    scratch = [row[task.metric] for row in rows if row["method"] == "from scratch" and row["heads"] == keep]
    model = headwise_model(folder / f"model-{keep}", task.auto_class)
    report = head_report(
        model,
        batch=args.latency_batch,
        length=task.latency_length,
        device=training_args.device,
        dense=headwise_model(folder / "dense", task.auto_class),
    ).to_dict()
    return {
        "metric": task.metric,
        "heads_total": dense["heads"],
        "heads_kept": first["heads"],
        "metric_dense": dense[task.metric],
        "metric_pruned": first[task.metric],
        "metric_from_scratch": scratch[0] if scratch else None,
        **{key: report[key] for key in ("parameters_dense", "parameters_pruned", "bytes_dense", "bytes_pruned")},
        **{key: report[key] for key in ("flops_ratio", "latency_ratio", "latency_of_ideal")},
        **{f"latency_{key}": report[key] for key in ("device", "threads", "batch", "length")},
        "rows": [{key: row[key] for key in row_keys(task)} for row in rows],
        **facts,
    }


def row_keys(task: Task) -> tuple[str, ...]:
    return "method", "heads", task.metric, "loss", "parameters"


def publish(task: Task, dense: dict, rows: list[dict], summary: dict, args: PruneArguments, folder: Path) -> None:
    """Table, pictures, and a card for each model."""
    write_csv(folder / "curve.csv", [dense, *rows], row_keys(task))
    metric, title = task.metric, f"{task.model_name}; {summary['text']}"
    total = summary["heads_total"]
    plot_pruning_curve(rows, folder / "curve.png", title=title, metric=metric, dense=dense[metric], total=total)
    chosen = {f"keep {row['heads']}": row["layers"] for row in rows if row["method"] == args.importance[0]}
    built = max(AutoConfig.from_pretrained(folder / "dense").attention_sites().values())
    plot_heads_per_layer(chosen, folder / "heads.png", total=built, title=title)
    if "gates" in args.importance:
        keep = args.keep[0]
        history = GateHistory.load(folder / "checkpoints" / f"gates-{keep}" / "gates.json")
        plot_gate_history(
            history.steps, history.open_heads, folder / "gate_history.png", title, None, keep, history.settled_heads
        )
        last = {kind: np.asarray(records[-1]) for kind, records in history.log_alpha.items()}
        plot_gates(last, folder / "gates.png", title=f"{title}; {keep} of {total} heads")
    for row in (dense, *rows[: len(args.keep)]):
        is_dense = row is dense
        of_model = folder / ("dense" if is_dense else f"model-{row['heads']}")
        config = AutoConfig.from_pretrained(of_model)
        heads = f"all {total}" if is_dense else f"{row['heads']} of {total}"
        chosen_by = f", chosen by {row['method']}" * (not is_dense)
        # In place of gates, the other ways train what is left.
        is_tuned = not is_dense and (args.finetune_epochs or row["method"] != "gates")
        more = f"{chosen_by}{'; it was fine-tuned after the others were removed' * bool(is_tuned)}"
        write_model_card(
            of_model,
            name=f"{task.model_name}, {heads} heads",
            description=task.description(config, f"{heads} attention heads{more}"),
            config=config,
            task=task.hub_task,
            figures={metric: row[metric], f"{metric}_dense": None if is_dense else dense[metric]},
            metric=[Metric(metric, metric, row[metric]), Metric("loss", "loss (nats)", row["loss"])],
            dataset=summary["text"],
            provenance=summary,
            methods={"gates": ["gates"], "michel": ["importance"]}.get(row["method"], []),
            language=task.language,
            license=args.license,
            base_model=args.model_name,
            hub_dataset=args.dataset_name,
        )


def print_report(task: Task, dense: dict, rows: list[dict], summary: dict, folder: Path) -> None:
    print("\n" + format_table(list(row_keys(task)), [[row[key] for key in row_keys(task)] for row in [dense, *rows]]))
    length = f" × {summary['latency_length']}" * (summary["latency_length"] is not None)
    print(
        f"\n{summary['heads_kept']} of {summary['heads_total']} heads: {summary['latency_ratio']:.0%} of the time "
        f"(batch {summary['latency_batch']}{length}, {summary['latency_threads']} threads, "
        f"{summary['latency_device']}), {summary['parameters_pruned'] / summary['parameters_dense']:.0%} of the "
        "parameters."
    )
    kept = dict.fromkeys(row["heads"] for row in rows)
    models = ", ".join(["dense/", *(f"model-{heads}/" for heads in kept)])
    print(f"Everything is in {folder}: {SUMMARY}, curve.csv, curve.png, {models}.")


if __name__ == "__main__":
    run_recipe(main)
