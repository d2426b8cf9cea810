# Licensed under the Apache License, Version 2.0.
"""Remove heads and feed-forward units of a classifier or a language model, for a number of heads or a speed-up.

    accelerate launch recipes/prune_heads.py                                     # a demonstration on embedded text
    accelerate launch recipes/prune_heads.py recipes/configs/prune_heads.yaml    # the same, with every key explained
    accelerate launch recipes/prune_heads.py --model bert-base-uncased --train_file sst2/train.tsv \\
        --validation_file sst2/dev.tsv --keep 72 36 --output_dir runs/sst2
    accelerate launch recipes/prune_heads.py --task causal-lm --num_key_value_heads 4 --keep 16 8    # a small Llama
    accelerate launch recipes/prune_heads.py --task masked-lm --architecture modernbert
    accelerate launch recipes/prune_heads.py --task image                        # a small ViT, on drawings
    accelerate launch recipes/prune_heads.py --model bert-base-uncased --train_file sst2/train.tsv \\
        --validation_file sst2/dev.tsv --target_speedup 2 3 --distillation_weight 0.5 --output_dir runs/faster

The dense model is a classifier of texts, which is trained or fine-tuned from a checkpoint; with `--task causal-lm` a
decoder and with `--task masked-lm` an encoder, on running text in blocks of `--max_length` tokens; with `--task
image` a classifier of images that are drawn by code. `--architecture` names another model of the catalogue. For each
way to choose heads and each number of heads, a copy loses its other heads and is trained for some more epochs, as
many in each way: `gates` are trained (Voita et al. 2019), `michel` removes the heads with the least importance for
the loss (Michel et al. 2019), and `random` draws. Where heads share keys and values, groups are removed as a whole,
and `--keep` counts heads.

`--target_speedup` sets a speed-up instead, which units of the feed-forward blocks and whole blocks also contribute to
(`--parts`). The time of the model is measured first, for batches of `--latency_batch` texts of `--latency_length`
tokens on this device; a table says what can be reached. The table is a prediction: each pruned model is measured, and
more is removed if it misses the target. `gates` are trained until the expected time is below the target (Xia et al.
2022), `fisher` removes what the loss depends on least by the diagonal of its Fisher information (Kwon et al. 2022),
`margin` what the difference between the two largest logits of a classifier depends on least, and `michel` and
`random` as above; `--refit` adjusts what is left by least squares, before training. `fisher` and `margin` need no
training (`--gate_epochs 0 --finetune_epochs 0`). With `--distillation_weight` or `--hidden_distillation_weight`, all
copies learn from the dense model.

Writes to `--output_dir`: `summary.json`, `curve.csv`, `curve.png`, `heads.png`, `gates.png`, `gate_history.png` and
`.svg` of each, `config.yaml` (the values of the run), `dense/` (the model with all heads) and `model-K/` (with K
heads, chosen in the first way). For speed-ups, `parts.png` shows what is left of each layer, `latency_table.json` has
the measured times, and the models are `model-2x/` …. `--push_to_hub true --hub_model_id USER/NAME` pushes the first of
these models to the Hub after everything is written.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    PreTrainedModel,
    set_seed,
)

from .. import (
    CostTable,
    GateHistory,
    HeadReport,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
    headwise_model,
    measure_latency_table,
    prune_closed_gates,
    refit_outputs,
)
from .._processes import from_main_process
from ..models.head_roles import locate_heads
from ..models.head_sites import HeadSite
from ..training import check_trainer_arguments, masks_of_evaluation, show_progress, train_from_newest
from ..training.sharding import whole_model
from .arguments.base import check_names, flag, refuse_flags
from .arguments.prune_heads import PruneArguments
from .classifying import fitting_length
from .pruning_goals import Goal, HeadGoal, SpeedupGoal
from .pruning_reports import LATENCY_TABLE, Measurements, PruningResults
from .pruning_tasks import PRUNING_TASKS, PruningTask
from .run import Run, cpu_only, run_recipe
from .summaries.prune_heads import PruneSummary


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
    target_speedup: list[float] | None = flag(
        None, "Speed-ups to reach, each from the dense model, instead of numbers of heads; 2 is half of the time."
    )
    latency_batch: int = flag(8, "Batch size of the timed forward passes.")
    latency_length: int | None = flag(None, "Tokens per text in the timed passes; max_length by default.")

    def used_with(self) -> dict[str, tuple[str, ...]]:
        """Nothing, since `keep` is a target as well, and times are measured in any case."""
        return {}

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        for name, value, instead in (("max_steps", self.max_steps, "num_train_epochs"),
                                     ("target_heads", self.target_heads, "keep")):  # fmt: skip
            if value not in (None, -1):
                raise ValueError(f"{name}={value} has no effect here; set {instead}.")
        if self.gate_penalty:
            raise ValueError(f"gate_penalty={self.gate_penalty} has no effect here; set keep.")
        for name, instead in (("target_flops", "set target_speedup"), ("latency_table", "it is measured")):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} has no effect here; {instead}.")
        if self.target_speedup is not None:
            check_names("target_speedup", self.target_speedup)
            for speedup in self.target_speedup:
                if not 1 < speedup < math.inf:
                    raise ValueError(f"target_speedup must be greater than 1, got {speedup}.")
        # The trainer takes one target at a time, and a length in any case.
        own = {"target_speedup": self.target_speedup, "latency_length": self.latency_length}
        self.target_speedup, self.latency_length = None, 128 if self.latency_length is None else self.latency_length
        super().__post_init__()
        for name, value in own.items():
            setattr(self, name, value)


def train_epochs(
    model: PreTrainedModel,
    name: str,
    epochs: float,
    training_args: PruneTrainingArguments,
    data: dict[str, Any],
    callbacks: list | None = None,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> HeadwiseTrainer:
    """Trains a model for some epochs.

    Args:
        data (`dict`): Arguments of the trainer; `more` are further ones.
        settings: Replace training arguments; without a teacher, nothing is learnt from one.
    """
    run_args = copy.copy(training_args)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    run_args.num_train_epochs, run_args.target_speedup = epochs, None
    # Images have no length, and costs are not measured by the trainer.
    run_args.latency_length = run_args.latency_length or HeadwiseTrainingArguments.latency_length
    more = more or {}
    if more.get("teacher") is None:
        run_args.distillation_weight = run_args.hidden_distillation_weight = 0.0
    for key, value in settings.items():
        setattr(run_args, key, value)
    trainer = HeadwiseTrainer(model, run_args, callbacks=callbacks, **data, **more)
    show_progress(trainer, name)
    if epochs:
        train_from_newest(trainer)
    return trainer


def evaluate_method(trainer: HeadwiseTrainer, method: str, task: PruningTask) -> dict[str, Any]:
    """Results of a model, with the number of heads and units per layer."""
    metrics = trainer.evaluate()
    model = trainer.accelerator.unwrap_model(trainer.model)
    layers = counts_by_kind(model.config.kept_heads())
    return {
        "method": method,
        "heads": sum(map(sum, layers.values())),
        task.metric: task.value(metrics),
        "loss": metrics["eval_loss"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": layers,
    }


def counts_by_kind(parts: Mapping[HeadSite, Sequence[int]]) -> dict[str, list[int]]:
    """Number of heads or units in each layer, by kind of site."""
    counts: dict[str, list[int]] = {}
    for site, numbers in parts.items():
        counts.setdefault(site.kind, []).append(len(numbers))
    return counts


def pruned_by_gates(goal: Goal, gated: PreTrainedModel, value: float) -> PreTrainedModel:
    """A copy of a model without the parts with closed gates, and without gates."""
    goal.settle(gated, value)
    return prune_closed_gates(copy.deepcopy(gated))


class Pruning:
    """Copies of the dense model, pruned and trained."""

    def __init__(
        self,
        task: PruningTask,
        folder: Path,
        args: PruneArguments,
        training_args: PruneTrainingArguments,
        data: dict[str, Any],
        scored: Dataset,
    ):
        self.task, self.folder, self.args, self.training_args, self.data = task, folder, args, training_args, data
        self.scored = scored
        self.measurements = Measurements(folder / "dense", task.auto_class, args, training_args)

    def load(self, name: str) -> PreTrainedModel:
        """A model that the run has saved."""
        return headwise_model(self.folder / name, self.task.auto_class)

    def dense(self) -> PreTrainedModel:
        """The dense model, loaded anew."""
        return self.load("dense")

    def train(self, model: PreTrainedModel, name: str, epochs: float, **settings: Any) -> HeadwiseTrainer:
        """Trains a model for some epochs, with the dense model as its teacher if it has one."""
        own = self.training_args
        taught = own.distillation_weight or own.hidden_distillation_weight
        more = settings.pop("more", {}) | ({"teacher": self.dense()} if taught and epochs else {})
        return train_epochs(model, name, epochs, own, self.data, more=more, **settings)

    def examples(self) -> Any:
        """Batches of examples, on which importance is computed and projections are refitted."""
        args, training_args = self.args, self.training_args
        count = min(args.importance_examples, len(self.scored))
        examples = self.scored.shuffle(seed=training_args.seed).select(range(count))
        batch_size = training_args.per_device_train_batch_size
        return DataLoader(examples, batch_size=batch_size, collate_fn=self.data["data_collator"])

    def scores(self, method: str, model: PreTrainedModel, goal: Goal) -> Any:
        """Scores of the parts of the dense model, computed by one process, once for all goals."""
        record = self.folder / "checkpoints" / f"importance-{method}.json"

        def make() -> Any:
            if record.is_file():
                return goal.read_scores(record)
            model.to(self.training_args.device)
            with masks_of_evaluation(self.data["data_collator"]):
                progress = not self.training_args.disable_tqdm
                scores = goal.scores(method, model, self.examples, self.training_args.seed, progress)
            scores.save(record)
            return scores

        # On several devices, rounding would lead to different selections.
        return from_main_process(make)

    def pruned_by_scores(self, goal: Goal, scores: Any, value: float) -> PreTrainedModel:
        """A copy of the dense model without the parts with the lowest scores."""
        model = self.dense().to(self.training_args.device)
        goal.prune(model, scores, value)
        return model

    def results(self, trainer: HeadwiseTrainer, goal: SpeedupGoal) -> dict[str, Any]:
        """Speed-ups of a trained model, and what is left of it."""
        return self.measurements.results(whole_model(trainer.accelerator.unwrap_model(trainer.model)), goal)

    def report_of(self, row: dict[str, Any], goal: Goal) -> HeadReport:
        """Measurements of the model that reached a goal in the first way."""
        return (
            HeadReport(**row["report"])
            if "report" in row
            else self.measurements.first(self.load(f"model-{goal.name}"))
        )

    def prune(self, method: str, goal: Goal) -> tuple[HeadwiseTrainer, dict[str, Any]]:
        """Prunes a copy of the dense model and trains it; returns its trainer and further results."""
        name, args = f"{method}-{goal.name}", self.args
        set_seed(self.training_args.seed)
        if method == "gates":
            model, history = self.dense().add_gates(goal.gates(args)), GateHistory(every=5)
            trainer = self.train(
                model, name, args.gate_epochs, callbacks=[history], more=goal.trainer(), **goal.training()
            )
            if trainer.is_world_process_zero():
                history.save(self.folder / "checkpoints" / name / "gates.json")
            gated = whole_model(trainer.accelerator.unwrap_model(trainer.model))
            pruned = goal.reach(method, partial(pruned_by_gates, goal, gated), self.measurements.speedup)
            return self.train(pruned, f"{name} fine-tuned", args.finetune_epochs), {}
        scores = self.scores(method, self.dense(), goal)
        model = goal.reach(method, partial(self.pruned_by_scores, goal, scores), self.measurements.speedup)
        more = {}
        if isinstance(goal, SpeedupGoal):
            if args.refit:
                with masks_of_evaluation(self.data["data_collator"]):
                    refit_outputs(model, self.dense().to(model.device), self.examples())
            untrained = train_epochs(model, f"{name} untrained", 0, self.training_args, self.data)
            more["untrained"] = self.task.value(untrained.evaluate())
        return self.train(model, name, args.gate_epochs + args.finetune_epochs), more


def prepare(
    task: PruningTask, args: PruneArguments, training_args: PruneTrainingArguments
) -> tuple[PreTrainedModel, dict[str, Any], Dataset, dict[str, Any]]:
    """The dense model before training, arguments of the trainer, examples to score on, and values of the summary."""
    check_trainer_arguments(training_args)
    task.read(is_trained=training_args.num_train_epochs > 0)
    set_seed(training_args.seed)
    model, processor = task.build()
    task.check_examples(processor)
    if task.has_tokens:
        lengths = [("latency_length", training_args.latency_length)]
        lengths += [("latency_shapes", length) for _, length in args.more_shapes()]
        for flag_name, length in lengths:
            fitting_length(flag_name, length, length, model.config)
    with PartialState().main_process_first():
        train_set, validation_set = (task.examples(rows, processor) for rows in (task.train, task.validation))
        scored = train_set if task.scored is task.train else task.examples(task.scored, processor)
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
    return model, data, scored, facts


def choose_goals(model: PreTrainedModel, args: PruneArguments, training_args: PruneTrainingArguments) -> list[Goal]:
    """The goals of a run.

    Raises:
        ValueError: if one of them cannot be reached.
    """
    if training_args.target_speedup is not None:
        table = table_of_run(model, training_args)
        goals = [SpeedupGoal(speedup, table, tuple(args.parts)) for speedup in training_args.target_speedup]
        for goal in goals:
            goal.check(args.importance)
        return goals
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
    return [HeadGoal(keep) for keep in args.keep]


def table_of_run(model: PreTrainedModel, training_args: PruneTrainingArguments) -> CostTable:
    """The measured times of the model, those of the first start in a resumed run."""
    record = Path(training_args.output_dir) / LATENCY_TABLE

    def make() -> CostTable:
        if record.is_file():
            return CostTable.load(record)
        return measure_latency_table(
            model,
            training_args.latency_batch,
            training_args.latency_length,
            device=training_args.device,
            progress=not training_args.disable_tqdm,
        )

    table = from_main_process(make)
    if table.device.startswith("cpu") and table.threads != torch.get_num_threads():
        raise ValueError(
            f"{record} was measured with {table.threads} CPU threads, not {torch.get_num_threads()}; resume with "
            f"--cpu_threads {table.threads}."
        )
    return table


def check_and_choose(args: PruneArguments, training_args: PruneTrainingArguments) -> None:
    """Raises ValueError for flags that the task or the goal does not read; sets those that the user leaves out."""
    task = PRUNING_TASKS[args.task]
    task.check(args)
    task.choose_length(args)
    if not task.has_tokens:
        refuse_flags(training_args, {"latency_length": "images have no tokens"})
        refuse_flags(args, {"latency_shapes": "images have no tokens"})
    elif training_args.latency_length is None:
        training_args.latency_length = args.max_length
    if args.task == "causal-lm" and training_args.latency_length < 2:
        raise ValueError(
            f"latency_length={training_args.latency_length}, but the last token is decoded with the others in a "
            "cache; set it to at least 2."
        )
    args.choose_methods(training_args.target_speedup is not None)


def main(args: PruneArguments, training_args: PruneTrainingArguments) -> dict:
    """Run the recipe; returns the content of `summary.json`."""
    run = Run(args, training_args)
    with run.preparing(partial(check_and_choose, args, training_args)):
        task = PRUNING_TASKS[args.task](args)
        model, data, scored, facts = prepare(task, args, training_args)
        run.use_threads()
        goals = choose_goals(model, args, training_args)
    folder, pruning = run.folder, Pruning(task, run.folder, args, training_args, data, scored)
    if isinstance(goals[0], SpeedupGoal) and PartialState().is_main_process:
        goals[0].table.save(folder / LATENCY_TABLE)
        print(f"\n{goals[0].table}\n")

    def make_dense():
        trainer = train_epochs(model, "dense", training_args.num_train_epochs, training_args, data)
        return evaluate_method(trainer, "dense", task), trainer, "dense"

    def make_pruned(method: str, goal: Goal):
        trainer, more = pruning.prune(method, goal)
        results = evaluate_method(trainer, method, task) | more
        if isinstance(goal, SpeedupGoal):
            results |= pruning.results(trainer, goal)
        return results, trainer, f"model-{goal.name}" if method == args.importance[0] else None

    def make_from_scratch(goal: Goal):
        set_seed(training_args.seed)
        config = AutoConfig.from_pretrained(folder / f"model-{goal.name}")
        epochs = training_args.num_train_epochs + args.gate_epochs + args.finetune_epochs
        scratch = headwise_model(config, task.auto_class)
        trainer = train_epochs(scratch, f"scratch-{goal.name}", epochs, training_args, data)
        results = evaluate_method(trainer, "from scratch", task)
        if isinstance(goal, SpeedupGoal):
            results |= pruning.results(trainer, goal)
        return results, trainer, None

    dense = run.once("dense", make_dense)
    rows = [
        run.once(f"{method}-{goal.name}", partial(make_pruned, method, goal))
        for method in args.importance
        for goal in goals
    ]
    if args.from_scratch:
        rows += [run.once(f"scratch-{goal.name}", partial(make_from_scratch, goal)) for goal in goals]
    report = pruning.report_of(rows[0], goals[0])
    results = PruningResults(task, args, folder, goals, dense, rows, report)
    summary = results.summary(facts)
    return run.finish(
        summary,
        partial(results.publish, summary),
        partial(results.print, summary),
        pushed=f"model-{goals[0].name}",
    )


if __name__ == "__main__":
    run_recipe(main, summary=PruneSummary)
