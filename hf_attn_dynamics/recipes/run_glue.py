# Licensed under the Apache License, Version 2.0.
"""Fine-tune a model on tasks of GLUE, with several seeds, and answer their test sets.

    accelerate launch recipes/run_glue.py                                 # a demonstration on embedded text
    accelerate launch recipes/run_glue.py recipes/configs/run_glue.yaml   # the same, every key explained
    accelerate launch recipes/run_glue.py --model_name_or_path roberta-base --dataset_name nyu-mll/glue
    accelerate launch recipes/run_glue.py --model_name_or_path runs/prune_heads/model-36 --data_dir glue_data \\
        --tasks sst2 mrpc stsb --num_seeds 5
    accelerate launch recipes/run_glue.py --model_name_or_path runs/sst2/model-36 --data_dir glue_data \\
        --tasks sst2 --num_train_epochs 0

The model may have all its heads, guided ones among them, or be one that heads were removed from. For each task it is
fine-tuned once with each seed, which draws the weights of the new layer, the order of the examples and dropout, and
evaluated on the validation text. With `--num_train_epochs 0` a classifier that has been trained for the task is
evaluated as it is, and not saved again. Guided heads are left to themselves unless `--guidance_weight` asks for more.

Data are those of the Hub (`--dataset_name`), or files below `--data_dir`: GLUE's own TSV files (`CoLA/dev.tsv`), or
JSON lines, CSV or Parquet with the columns of these or of the Hub (`cola/validation.jsonl`). Labels are matched by
name, or by the task's numbers.

Figures are those of GLUE: Matthews' correlation (cola), accuracy and F1 (mrpc, qqp), Pearson's and Spearman's
correlation (stsb), accuracy on matched and on mismatched genres (mnli), accuracy (the others). The score of a task is
the mean of its figures, that of a run the mean over its tasks.

Writes to `--output_dir`: `summary.json`, `table.csv`, `config.yaml` (the values of the run); `model/TASK/`, the model
of the first seed of each task, with tokenizer, code and card; and `submission/seed-N/`, answers to each test set that
is there, in the format of GLUE's server (`CoLA.tsv`, `MNLI-m.tsv`, …; `AX.tsv` is answered by the model of mnli). With
`--push_to_hub true --hub_model_id USER/NAME`, the model of a single task is pushed to the Hub once all is on disk.

Keys of `summary.json`:
    tasks                             names of the tasks
    metric, metric_mean, metric_sd    "score": the mean over tasks; its mean over seeds and standard deviation (of a
                                      sample; null for one seed)
    scores                            the score with each seed
    T_X_mean, T_X_sd                  the same of every figure X of task T: accuracy, f1, matthews_correlation,
                                      pearson, spearmanr and loss (matched_ and mismatched_ in front for mnli), score
    rows                              for each task and seed: task, seed, train_examples, eval_examples and all X
    seeds                             the seeds
    model, text, num_processes, and seed, device, command and versions
"""

import statistics
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from .._tables import format_table
from ..data import GLUE_TASKS, GlueTask, find_glue_file
from ..training import check_trainer_arguments
from .arguments.run_glue import GlueArguments
from .classifier_tasks import (
    EMBEDDED,
    SUBMISSION,
    BenchmarkTask,
    Training,
    own_metrics,
    train_classifiers,
    write_classifier_card,
)
from .classifying import (
    ClassifierTrainingArguments,
    check_guidance,
    check_room,
    mean_and_sd,
    means_and_sds,
)
from .run import SUMMARY, Run, run_recipe, write_csv


MODEL = "model"  # folder of the models that are saved


@dataclass
class GlueTrainingArguments(ClassifierTrainingArguments):
    """[`ClassifierTrainingArguments`], with `output_dir` runs/glue."""

    output_dir: str = field(default="runs/glue", metadata={"help": "Where to write; may not hold another run."})


def check_folder_of_tasks(tasks: list[GlueTask], folder: str) -> None:
    """Refuses the folder of one task for several."""
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
    """The tasks of the run, with their texts; without data, the embedded text."""
    tasks = [GLUE_TASKS[name] for name in args.tasks or GLUE_TASKS]
    if args.data_dir:
        check_folder_of_tasks(tasks, args.data_dir)
    benchmark = [BenchmarkTask(args, task) for task in (tasks if args.data_dir or args.dataset_name else [EMBEDDED])]
    for task in benchmark:
        task.read(trains)
        # Each is encoded when its turn comes.
        check_room(next(iter(task.texts.values())), task.tokenizer, args.max_length)
    return benchmark


def main(args: GlueArguments, training_args: GlueTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args)
    with run.preparing(partial(training_args.choose_defaults, args)):
        check_trainer_arguments(training_args)
        training_args.check_trains(args)
        tasks = read_tasks(args, training_args.trains)
        config = tasks[0].build().config
        check_guidance(config, training_args)
        if run.is_pushed and not (training_args.trains and len(tasks) == 1):
            there_are = (
                f"there are {len(tasks)} tasks; name one" if training_args.trains else "num_train_epochs=0 makes none"
            )
            raise ValueError(f"push_to_hub pushes one model, but {there_are}.")
    seeds = list(args.seeds_from(training_args.seed, 3 if training_args.trains else 1))
    rows = []
    for task in tasks:
        name = task.glue.name
        trainings = [Training(f"{name}-seed-{seed}", {"task": name, "seed": seed}) for seed in seeds]
        # Examples of one task at a time.
        rows += train_classifiers(task, trainings, cache(task.encode), training_args, f"{MODEL}/{name}")

    def publish(summary: dict) -> None:
        print_and_write_table(summary, run.folder)
        for task in tasks if training_args.trains else ():
            own = [row for row in rows if row["task"] == task.glue.name]
            write_classifier_card(task, own, config, summary, run.folder / MODEL / task.glue.name)

    figures = summarise(rows, seeds, args, training_args, tasks[0].text)
    return run.finish(figures, publish, pushed=f"{MODEL}/{tasks[0].glue.name}")


def summarise(
    rows: list[dict], seeds: list[int], args: GlueArguments, training_args: GlueTrainingArguments, text: str
) -> dict:
    """All metrics, with mean and standard deviation over the seeds."""
    names = list(dict.fromkeys(row["task"] for row in rows))
    statistics_of_tasks = {}
    for name in names:
        statistics_of_tasks |= means_and_sds([row for row in rows if row["task"] == name], f"{name}_")
    scores = [statistics.fmean(row["score"] for row in rows if row["seed"] == seed) for seed in seeds]
    mean, sd = mean_and_sd(scores)
    return {
        "tasks": names,
        "metric": "score",
        "metric_mean": mean,
        "metric_sd": sd,
        "scores": scores,
        **statistics_of_tasks,
        "rows": rows,
        "seeds": seeds,
        "model": args.model_name_or_path or "small BERT",
        "text": text,
        "seed": seeds[0],
    }


def print_and_write_table(summary: dict, folder: Path) -> None:
    """One table over all tasks."""
    header = ["task", "figure", "mean", "sd", *(f"seed {seed}" for seed in summary["seeds"])]
    table = []
    for task in summary["tasks"]:
        rows = [row for row in summary["rows"] if row["task"] == task]
        names = own_metrics(rows[0])
        for name in names if len(names) == 1 else [*names, "score"]:
            means = [summary[f"{task}_{name}_{statistic}"] for statistic in ("mean", "sd")]
            table.append([task, name, *means, *(row[name] for row in rows)])
    table.append(["all", "score", summary["metric_mean"], summary["metric_sd"], *summary["scores"]])
    write_csv(folder / "table.csv", [dict(zip(header, line)) for line in table])
    # A mean of one seed is what stands beside it.
    shown = [place for place, name in enumerate(header) if len(summary["seeds"]) > 1 or name not in ("mean", "sd")]
    header, *table = ([line[place] for place in shown] for line in (header, *table))
    print("\n" + format_table(header, table))
    made = "".join(f", {name}/" for name in (MODEL, SUBMISSION) if (folder / name).is_dir())
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv{made}.")


if __name__ == "__main__":
    run_recipe(main)
