# Licensed under the Apache License, Version 2.0.
"""Fine-tune a model on tasks of GLUE with several seeds, and answer their test sets.

    accelerate launch recipes/run_glue.py                                 # a demonstration on embedded text
    accelerate launch recipes/run_glue.py recipes/configs/run_glue.yaml   # the same, with every key explained
    accelerate launch recipes/run_glue.py --model roberta-base --dataset_name nyu-mll/glue
    accelerate launch recipes/run_glue.py --model runs/prune_heads/model-36 --data_dir glue_data \\
        --tasks sst2 mrpc stsb --num_seeds 5
    accelerate launch recipes/run_glue.py --model runs/sst2/model-36 --data_dir glue_data \\
        --tasks sst2 --num_train_epochs 0

For each task, the model is fine-tuned once per seed and evaluated on the validation text; the seed determines the
weights of the new layer, the order of the examples and dropout. With `--num_train_epochs 0`, a classifier that was
trained for the task is evaluated and not saved again. Guided heads, and models without some of their heads, stay as
they are; `--guidance_weight` turns guidance on.

`--dataset_name` is a dataset of the Hub; `--data_dir` has GLUE's own TSV files (`CoLA/dev.tsv`), or JSON lines, CSV
or Parquet with the columns of these or of the Hub (`cola/validation.jsonl`). The metrics are those of GLUE; the score
of a task is their mean, and the score of a run is the mean over its tasks.

Writes to `--output_dir`: `summary.json`, `table.csv`, `config.yaml` (the values of the run); `model/TASK/`, the model
of the first seed of each task, with tokenizer, code and card; and `submission/seed-N/`, the answers to the test sets
in the format of GLUE's server (`CoLA.tsv`, `MNLI-m.tsv`, …; the model of mnli answers `AX.tsv`). `--push_to_hub true
--hub_model_id USER/NAME` pushes the model of a single task to the Hub after everything is written.
"""

import statistics
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from .._tables import format_table
from ..data import GLUE_TASKS, GlueTask, find_glue_file
from ..training import check_trainer_arguments
from .arguments.base import flag
from .arguments.run_glue import GlueArguments
from .classifier_tasks import (
    EMBEDDED_TASK,
    MODEL_FOLDER,
    BenchmarkTask,
    Training,
    own_metrics,
    print_made,
    train_classifiers,
    write_classifier_card,
)
from .classifying import ClassifierTrainingArguments, check_guidance, check_room, mean_and_sd, means_and_sds
from .run import Run, run_recipe, write_csv
from .summaries.run_glue import GlueRow, GlueSummary


@dataclass
class GlueTrainingArguments(ClassifierTrainingArguments):
    """[`ClassifierTrainingArguments`] with another output folder."""

    output_dir: str = flag("runs/glue", "Output folder; it must not hold another run.")


def check_folder_of_tasks(tasks: list[GlueTask], folder: str) -> None:
    """Raises ValueError if several tasks would read the same file, which is in the folder of one task."""
    of_file: dict[Path, str] = {}
    for task in tasks:
        path = find_glue_file(task.name, "train", folder) or find_glue_file(task.name, task.validation[0], folder)
        if path in of_file:
            raise ValueError(
                f"data_dir {folder!r} has one file, {path.name}, for {of_file[path]} and {task.name}; name the folder "
                "above it, or one task."
            )
        if path is not None:
            of_file[path] = task.name


def read_tasks(args: GlueArguments, trains: bool) -> list[BenchmarkTask]:
    """The tasks of the run with their texts; without data, the embedded text."""
    tasks = [GLUE_TASKS[name] for name in args.tasks or GLUE_TASKS]
    if args.data_dir:
        check_folder_of_tasks(tasks, args.data_dir)
    has_data = args.data_dir or args.dataset_name
    benchmark = [BenchmarkTask(args, task) for task in (tasks if has_data else [EMBEDDED_TASK])]
    for task in benchmark:
        task.read(trains)
        # Texts are encoded task by task.
        check_room(next(iter(task.texts.values())), task.tokenizer, args.max_length)
    return benchmark


def main(args: GlueArguments, training_args: GlueTrainingArguments) -> dict:
    """Run the recipe; returns the content of `summary.json`."""
    run = Run(args, training_args)
    with run.preparing(partial(training_args.choose_defaults, args)):
        check_trainer_arguments(training_args)
        training_args.check_trains(args)
        tasks = read_tasks(args, training_args.trains)
        config = tasks[0].build().config
        check_guidance(config, training_args)
        if run.is_pushed and not (training_args.trains and len(tasks) == 1):
            reason = (
                f"there are {len(tasks)} tasks; name one"
                if training_args.trains
                else "num_train_epochs=0 only evaluates"
            )
            raise ValueError(f"push_to_hub pushes one trained model, but {reason}.")
    seeds = list(args.seeds_from(training_args.seed, 3 if training_args.trains else 1))
    rows: list[GlueRow] = []
    for task in tasks:
        name = task.glue.name
        trainings = [Training(f"{name}-seed-{seed}", {"task": name, "seed": seed}) for seed in seeds]
        # Only one task keeps its encoded examples in memory.
        examples = cache(task.encode)
        rows += train_classifiers(task, trainings, GlueRow, examples, training_args, f"{MODEL_FOLDER}/{name}")
    summary = summarise(rows, seeds, args, tasks[0].text)

    def publish() -> None:
        header, lines = glue_table(summary)
        write_csv(run.folder / "table.csv", [dict(zip(header, line)) for line in lines])
        for task in tasks if training_args.trains else ():
            own = rows_of(task.glue.name, rows)
            write_classifier_card(task, own, config, summary, run.folder / MODEL_FOLDER / task.glue.name)

    return run.finish(
        summary, publish, lambda: print_report(summary, run.folder), pushed=f"{MODEL_FOLDER}/{tasks[0].glue.name}"
    )


def rows_of(task: str, rows: list[GlueRow]) -> list[GlueRow]:
    return [row for row in rows if row.task == task]


def summarise(rows: list[GlueRow], seeds: list[int], args: GlueArguments, text: str) -> GlueSummary:
    names = list(dict.fromkeys(row.task for row in rows))
    means, sds = {}, {}
    for name in names:
        means_of_task, sds_of_task = means_and_sds(rows_of(name, rows), f"{name}_")
        means |= means_of_task
        sds |= sds_of_task
    scores = [statistics.fmean(row.metrics["score"] for row in rows if row.seed == seed) for seed in seeds]
    mean, sd = mean_and_sd(scores)
    return GlueSummary(
        tasks=names,
        metric="score",
        metric_mean=mean,
        metric_sd=sd,
        scores=scores,
        means=means,
        sds=sds,
        rows=rows,
        seeds=seeds,
        model=args.model or "small BERT",
        text=text,
        seed=seeds[0],
    )


def glue_table(summary: GlueSummary) -> tuple[list[str], list[list]]:
    """Header and lines: a line per metric of each task, then the score of the run."""
    lines = []
    for task in summary.tasks:
        rows = rows_of(task, summary.rows)
        names = own_metrics(rows[0].metrics)
        for name in names if len(names) == 1 else [*names, "score"]:
            key = f"{task}_{name}"
            lines.append([task, name, summary.means[key], summary.sds[key], *(row.metrics[name] for row in rows)])
    lines.append(["all", "score", summary.metric_mean, summary.metric_sd, *summary.scores])
    return ["task", "metric", "mean", "sd", *(f"seed {seed}" for seed in summary.seeds)], lines


def print_report(summary: GlueSummary, folder: Path) -> None:
    header, lines = glue_table(summary)
    # With one seed, the mean is its value.
    shown = [index for index, name in enumerate(header) if len(summary.seeds) > 1 or name not in ("mean", "sd")]
    header, *lines = ([line[index] for index in shown] for line in (header, *lines))
    print("\n" + format_table(header, lines))
    print_made(folder)


if __name__ == "__main__":
    run_recipe(main, summary=GlueSummary)
