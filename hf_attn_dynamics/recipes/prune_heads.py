# Licensed under the Apache License, Version 2.0.
"""Remove attention heads of a classifier or a language model, chosen by gates, by importance or at random.

    accelerate launch recipes/prune_heads.py                                     # a demonstration on embedded text
    accelerate launch recipes/prune_heads.py recipes/configs/prune_heads.yaml    # the same, with every key explained
    accelerate launch recipes/prune_heads.py --model bert-base-uncased --train_file sst2/train.tsv \\
        --validation_file sst2/dev.tsv --keep 72 36 --output_dir runs/sst2
    accelerate launch recipes/prune_heads.py --task causal-lm --num_key_value_heads 4 --keep 16 8    # a small Llama
    accelerate launch recipes/prune_heads.py --task masked-lm --architecture modernbert
    accelerate launch recipes/prune_heads.py --task image                        # a small ViT, on drawings

The dense model is a classifier of texts, which is trained or fine-tuned from a checkpoint; with `--task causal-lm` a
decoder and with `--task masked-lm` an encoder, on running text in blocks of `--max_length` tokens; with `--task
image` a classifier of images that are drawn by code. `--architecture` names another model of the catalogue. For each
way to choose heads and each number of heads, a copy loses its other heads and is trained for some more epochs, as
many in each way: `gates` are trained (Voita et al. 2019), `michel` removes the heads with the least importance for
the loss (Michel et al. 2019), and `random` draws. Where heads share keys and values, groups are removed as a whole,
and `--keep` counts heads.

Writes to `--output_dir`: `summary.json`, `curve.csv`, `curve.png`, `heads.png`, `gates.png`, `gate_history.png` and
`.svg` of each, `config.yaml` (the values of the run), `dense/` (the model with all heads) and `model-K/` (with K
heads, chosen in the first way). `--push_to_hub true --hub_model_id USER/NAME` pushes `model-K/` of the first K to the
Hub after everything is written.
"""

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from .arguments.base import OF_A_TEACHER, flag, refuse_flags
from .arguments.prune_heads import PruneArguments
from .classifying import fitting_length
from .pictures import draw
from .pruning_tasks import PRUNING_TASKS, PruningTask
from .run import SUMMARY, Run, cpu_only, run_recipe, write_csv
from .summaries.base import rows_table
from .summaries.prune_heads import PrunedRow, PruneSummary


@dataclass
class PruneTrainingArguments(HeadwiseTrainingArguments):
    """[`HeadwiseTrainingArguments`] with defaults for a small classifier."""

    output_dir: str = flag("runs/prune_heads", "Output folder; it must not hold another run.")
    num_train_epochs: float = flag(6.0, "Epochs of the dense model.")
    per_device_train_batch_size: int = flag(32, "Examples per training batch.")
    per_device_eval_batch_size: int = flag(128, "Examples per evaluation batch.")
    learning_rate: float = flag(5e-4, "Learning rate of all parameters but the gates.")
    warmup_steps: float = flag(0.06, "Steps of linear warm-up, or their fraction.")
    train_sampling_strategy: str = flag("group_by_length", "Order of the examples.")
    save_strategy: str = flag("no", "When to save checkpoints; finished models are saved in any case.")
    report_to: str | None = flag("none", "Trackers to report to.")

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        for name, value, instead in (("max_steps", self.max_steps, "num_train_epochs"),
                                     ("target_heads", self.target_heads, "keep")):  # fmt: skip
            if value not in (None, -1):
                raise ValueError(f"{name}={value} has no effect here; set {instead}.")
        if self.gate_penalty:
            raise ValueError(f"gate_penalty={self.gate_penalty} has no effect here; set keep.")
        refuse_flags(self, OF_A_TEACHER)
        super().__post_init__()


def train_epochs(
    model: PreTrainedModel,
    name: str,
    epochs: float,
    training_args: PruneTrainingArguments,
    data: dict[str, Any],
    **settings: Any,
) -> HeadwiseTrainer:
    """Trains a model for some epochs; `settings` replace training arguments, `data` are arguments of the trainer."""
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


def evaluate_method(trainer: HeadwiseTrainer, method: str, task: PruningTask) -> dict[str, Any]:
    """Results of a model, with the number of heads per layer."""
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


def importance_of(
    method: str,
    model: PreTrainedModel,
    folder: Path,
    args: PruneArguments,
    training_args: PruneTrainingArguments,
    data: dict[str, Any],
) -> HeadScores:
    """Importance of the heads of the dense model, computed once for all numbers of heads."""
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


def prune_copy(
    method: str,
    keep: int,
    task: PruningTask,
    folder: Path,
    args: PruneArguments,
    training_args: PruneTrainingArguments,
    data: dict[str, Any],
) -> tuple[HeadwiseTrainer, GateHistory | None]:
    """Prunes a copy of the dense model to `keep` heads and trains it; returns its trainer and the history of gates."""
    name = f"{method}-{keep}"
    load = partial(headwise_model, folder / "dense", task.auto_class)
    set_seed(training_args.seed)
    if method == "gates":
        model, history = load().add_gates({"variant": args.gate_variant}), GateHistory(every=5)
        trainer = train_epochs(
            model, name, args.gate_epochs, training_args, data, target_heads=keep, callbacks=[history]
        )
        model = trainer.prune()
        return train_epochs(model, f"{name} fine-tuned", args.finetune_epochs, training_args, data), history
    model = load()
    retain_heads(model, keep, importance_of(method, model, folder, args, training_args, data))
    return train_epochs(model, name, args.gate_epochs + args.finetune_epochs, training_args, data), None


def prepare(
    task: PruningTask, args: PruneArguments, training_args: PruneTrainingArguments
) -> tuple[PreTrainedModel, dict[str, Any], dict[str, Any]]:
    """The dense model before training, arguments of the trainer, and values of the summary."""
    check_trainer_arguments(training_args)
    task.read(is_trained=training_args.num_train_epochs > 0)
    set_seed(training_args.seed)
    model, processor = task.build()
    task.check_examples(processor)
    if args.latency_length is not None:
        fitting_length("latency_length", args.latency_length, args.latency_length, model.config)
    total = sum(map(len, model.config.kept_heads().values()))
    if max(args.keep) >= total:
        raise ValueError(f"keep={max(args.keep)}, but the model has {total} heads; keep fewer.")
    group = max(layer.group_size for layer in locate_heads(model))
    for keep in args.keep:
        if keep % group:
            raise ValueError(
                f"keep={keep}, but {group} heads share a key/value head and are removed together; keep a multiple of "
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
        "model": args.model or task.small_name,
        "importance": args.importance[0],
        "train_examples": len(train_set),
        "eval_examples": len(validation_set),
        "text": task.text,
    }
    return model, data, facts


def check_and_choose(args: PruneArguments) -> None:
    """Raises ValueError for flags that the task does not read; sets the length of texts unless the user does."""
    task = PRUNING_TASKS[args.task]
    task.check(args)
    task.choose_length(args)


def main(args: PruneArguments, training_args: PruneTrainingArguments) -> dict:
    """Run the recipe; returns the content of `summary.json`."""
    run = Run(args, training_args)
    with run.preparing(partial(check_and_choose, args)):
        task = PRUNING_TASKS[args.task](args)
        model, data, facts = prepare(task, args, training_args)
    folder = run.folder

    def make_dense():
        trainer = train_epochs(model, "dense", training_args.num_train_epochs, training_args, data)
        return evaluate_method(trainer, "dense", task), trainer, "dense"

    def make_pruned(method: str, keep: int):
        trainer, history = prune_copy(method, keep, task, folder, args, training_args, data)
        if history is not None and trainer.is_world_process_zero():
            history.save(folder / "checkpoints" / f"{method}-{keep}" / "gates.json")
        return (
            evaluate_method(trainer, method, task),
            trainer,
            f"model-{keep}" if method == args.importance[0] else None,
        )

    def make_from_scratch(keep: int):
        set_seed(training_args.seed)
        config = AutoConfig.from_pretrained(folder / f"model-{keep}")
        epochs = training_args.num_train_epochs + args.gate_epochs + args.finetune_epochs
        trainer = train_epochs(headwise_model(config, task.auto_class), f"scratch-{keep}", epochs, training_args, data)
        return evaluate_method(trainer, "from scratch", task), trainer, None

    dense = run.once("dense", make_dense)
    rows = [
        run.once(f"{method}-{keep}", partial(make_pruned, method, keep))
        for method in args.importance
        for keep in args.keep
    ]
    if args.from_scratch:
        rows += [run.once(f"scratch-{keep}", partial(make_from_scratch, keep)) for keep in args.keep]
    summary = summarise(task, dense, rows, args, training_args, folder, facts)
    return run.finish(
        summary,
        lambda: publish(task, dense, rows, summary, args, folder),
        lambda: print_report(task, dense, summary, folder),
        pushed=f"model-{args.keep[0]}",
    )


def pruned_row(task: PruningTask, results: dict[str, Any]) -> PrunedRow:
    values = {key: results[key] for key in ("method", "heads", "loss", "parameters")}
    return PrunedRow(metric=task.metric, value=results[task.metric], **values)


def summarise(
    task: PruningTask,
    dense: dict[str, Any],
    rows: list[dict[str, Any]],
    args: PruneArguments,
    training_args: PruneTrainingArguments,
    folder: Path,
    facts: dict[str, Any],
) -> PruneSummary:
    keep, first, metric = args.keep[0], rows[0], task.metric
    scratch = [row[metric] for row in rows if row["method"] == "from scratch" and row["heads"] == keep]
    report = head_report(
        headwise_model(folder / f"model-{keep}", task.auto_class),
        batch=args.latency_batch,
        length=task.latency_length,
        device=training_args.device,
        dense=headwise_model(folder / "dense", task.auto_class),
    ).to_dict()
    return PruneSummary(
        metric=metric,
        heads_total=dense["heads"],
        heads_kept=first["heads"],
        metric_dense=dense[metric],
        metric_pruned=first[metric],
        metric_from_scratch=scratch[0] if scratch else None,
        parameters={kind: report[f"parameters_{kind}"] for kind in ("dense", "pruned")},
        bytes={kind: report[f"bytes_{kind}"] for kind in ("dense", "pruned")},
        **{key: report[key] for key in ("flops_ratio", "latency_ratio", "latency_of_ideal")},
        latency={key: report[key] for key in ("device", "threads", "batch", "length")},
        rows=[pruned_row(task, row) for row in rows],
        **facts,
    )


def publish(
    task: PruningTask, dense: dict, rows: list[dict], summary: PruneSummary, args: PruneArguments, folder: Path
) -> None:
    """Writes the table, the pictures and the card of each model."""
    write_csv(folder / "curve.csv", [row.to_dict() for row in (pruned_row(task, dense), *summary.rows)])
    metric, title, total = task.metric, f"{task.model_name}; {summary.text}", summary.heads_total
    shown = [{key: row[key] for key in ("method", "heads", metric)} for row in rows]
    draw(plot_pruning_curve, folder / "curve.png", shown, title, metric, dense[metric], total)
    chosen = {f"keep {row['heads']}": row["layers"] for row in rows if row["method"] == args.importance[0]}
    built = max(AutoConfig.from_pretrained(folder / "dense").attention_sites().values())
    draw(plot_heads_per_layer, folder / "heads.png", chosen, total=built, title=title)
    if "gates" in args.importance:
        keep = args.keep[0]
        history = GateHistory.load(folder / "checkpoints" / f"gates-{keep}" / "gates.json")
        of_all = {"target": keep, "settled_heads": history.settled_heads}
        draw(plot_gate_history, folder / "gate_history.png", history.steps, history.open_heads, title, **of_all)
        last = {kind: np.asarray(records[-1]) for kind, records in history.log_alpha.items()}
        draw(plot_gates, folder / "gates.png", last, f"{title}; target: {keep} of {total} heads")
    for row in (dense, *rows[: len(args.keep)]):
        is_dense = row is dense
        of_model = folder / ("dense" if is_dense else f"model-{row['heads']}")
        config = AutoConfig.from_pretrained(of_model)
        heads = f"all {total}" if is_dense else f"{row['heads']} of {total}"
        chosen_by = f", chosen by {row['method']}" * (not is_dense)
        # The other ways train the remaining heads instead of gates.
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
            dataset=summary.text,
            provenance=summary.provenance,
            methods={"gates": ["gates"], "michel": ["importance"]}.get(row["method"], []),
            language=task.language,
            license=args.license,
            base_model=args.model,
            hub_dataset=args.dataset_name,
        )


def print_report(task: PruningTask, dense: dict, summary: PruneSummary, folder: Path) -> None:
    print("\n" + format_table(*rows_table([pruned_row(task, dense), *summary.rows])))
    latency = summary.latency
    length = f" × {latency['length']}" * (latency["length"] is not None)
    print(
        f"\n{summary.heads_kept} of {summary.heads_total} heads: {summary.latency_ratio:.0%} of the time "
        f"(batch {latency['batch']}{length}, {latency['threads']} threads, {latency['device']}), "
        f"{summary.parameters['pruned'] / summary.parameters['dense']:.0%} of the parameters."
    )
    models = ", ".join(["dense/", *(f"model-{heads}/" for heads in dict.fromkeys(row.heads for row in summary.rows))])
    print(f"Everything is in {folder}: {SUMMARY}, curve.csv, curve.png, {models}.")


if __name__ == "__main__":
    run_recipe(main, summary=PruneSummary)
