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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedConfig, PreTrainedTokenizerBase

from .. import HeadwiseTrainer
from ..data import (
    GLUE_TASKS,
    GlueTask,
    align_labels,
    embedded_classification,
    find_glue_file,
    glue_task,
    load_glue,
    write_submission,
)
from ..hub.card import Metric, title_of, write_model_card
from ..hub.push import push_finished, take_push
from ..training import check_trainer_arguments
from ..training.glue_metric import GlueMetric
from .classifying import (
    ClassifierArguments,
    ClassifierTrainingArguments,
    all_words,
    build_classifier,
    check_model,
    check_room,
    class_names,
    classes_of,
    encode,
    mean_and_sd,
    over_trainings,
    predict,
    tokenizer_for,
    train_classifier,
)
from .run import (
    SUMMARY,
    begin_run,
    check_names,
    check_output_dir,
    device_name,
    format_table,
    provenance,
    refuse_bad_input,
    run_or_read,
    run_recipe,
    values_of_run,
    write_csv,
    write_json,
)


MODEL, SUBMISSION = "model", "submission"  # folders


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class GlueArguments(ClassifierArguments):
    """Tasks and model of the run; how to train is in [`GlueTrainingArguments`]."""

    tasks: list[str] | None = field(
        default=None, metadata={"help": f"Tasks: {', '.join(GLUE_TASKS)}; all by default."}
    )
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder of GLUE's files, or of those of the one task."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set on the Hub, such as nyu-mll/glue, instead of data_dir."}
    )
    submission: bool = field(default=True, metadata={"help": "Answer the test sets that are there."})

    def __post_init__(self):
        super().__post_init__()
        if self.data_dir and self.dataset_name:
            raise ValueError(f"data_dir {self.data_dir!r} and dataset_name {self.dataset_name!r} both name the data.")
        if self.tasks is not None:
            if not self.data_dir and not self.dataset_name:
                raise ValueError(f"tasks {self.tasks} need a data_dir, or dataset_name nyu-mll/glue, beside them.")
            self.tasks = [glue_task(name).name for name in self.tasks]
            check_names("tasks", self.tasks)


@dataclass
class GlueTrainingArguments(ClassifierTrainingArguments):
    """[`ClassifierTrainingArguments`], with `output_dir` runs/glue."""

    output_dir: str = field(default="runs/glue", metadata={"help": "Where to write; may not hold another run."})


# ---------------------------------------------------------------------------------------------------------------------
# Tasks and their texts
# ---------------------------------------------------------------------------------------------------------------------


def load_texts(args: GlueArguments) -> tuple[list[tuple[GlueTask, dict[str, Dataset]]], str]:
    """Each task with all its splits, and what to call the data."""
    if not args.data_dir and not args.dataset_name:
        texts = dict(zip(("train", "validation"), embedded_classification(250, 100, seed=0)))
        task = GlueTask("embedded", "embedded", (("text",),), tuple(texts["train"].features["label"].names))
        return [(task, texts)], "documentation of eight Python libraries"
    source = {"folder": args.data_dir} if args.data_dir else {"dataset_name": args.dataset_name}
    tasks = [GLUE_TASKS[name] for name in args.tasks or GLUE_TASKS]
    if args.data_dir:
        check_files(tasks, args.data_dir)
    loaded = []
    for task in tasks:
        tests = [split for split in task.test.values() if args.submission and is_there(task, split, args)]
        splits = ["train", *task.validation, *tests]
        loaded.append((task, {split: load_glue(task.name, split, **source) for split in splits}))
    return loaded, args.dataset_name or Path(args.data_dir).resolve().name


def is_there(task: GlueTask, split: str, args: GlueArguments) -> bool:
    """Whether the data have this test set."""
    return not args.data_dir or find_glue_file(task.name, split, args.data_dir) is not None


def check_files(tasks: list[GlueTask], folder: str) -> None:
    """Refuses the folder of one task for several."""
    of_file: dict[Path, str] = {}
    for task in tasks:
        path = find_glue_file(task.name, "train", folder)
        if path in of_file:
            raise ValueError(
                f"data_dir {folder!r} has one file, {path.name}, for {of_file[path]} and {task.name}; name the folder "
                "above it, or one task."
            )
        if path is not None:
            of_file[path] = task.name


@dataclass
class TaskData:
    """Texts of a task, and how a model is to read and to answer them."""

    task: GlueTask
    texts: dict[str, Dataset]
    labels: list[str]  # names of the classes in the order of the model; none of scores
    tokenizer: PreTrainedTokenizerBase
    max_length: int

    def encode(self) -> dict[str, Dataset]:
        """Tokens and labels of each split."""
        aligned = {
            split: align_labels(texts, self.labels) if self.labels and "label" in texts.column_names else texts
            for split, texts in self.texts.items()
        }
        return {split: encode(texts, self.tokenizer, self.max_length) for split, texts in aligned.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """What the configuration of a model is told of the task."""
        return class_names(self.labels) if self.labels else {"num_labels": 1, "problem_type": "regression"}

    def answers(self, outputs: np.ndarray) -> list[int] | list[float]:
        """Classes in the order of the task, or scores, from the outputs of a model: `(examples, classes or 1)`."""
        if not self.labels:
            return outputs[:, 0].tolist()
        numbers = np.array([self.task.labels.index(name) for name in self.labels])
        return numbers[outputs.argmax(-1)].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def fine_tune(
    name: str,
    seed: int,
    data: TaskData,
    encoded: dict[str, Dataset],
    args: GlueArguments,
    training_args: GlueTrainingArguments,
) -> tuple[dict, HeadwiseTrainer]:
    """A row of the summary, and what made it; writes the answers to the test sets."""
    task = data.task
    trainer = train_classifier(
        name,
        seed,
        partial(build_classifier, args, data.tokenizer, data.settings),
        training_args,
        data.tokenizer,
        encoded["train"],
        encoded[task.validation[0]],
        DataCollatorWithPadding(data.tokenizer),
    )

    figures, losses = {}, {}
    for split in task.validation:
        prefix = "".join(f"{part}_" for part in split.split("_")[1:])  # of matched and mismatched genres
        prediction = predict(trainer, encoded[split])
        metric = GlueMetric(task.name if task.name in GLUE_TASKS else None, keep_in_memory=True)
        found = metric.compute(predictions=data.answers(prediction.predictions), references=data.texts[split]["label"])
        figures |= {prefix + name: value for name, value in found.items()}
        losses[prefix + "loss"] = prediction.metrics["test_loss"]
    for title, split in task.test.items():
        if split in encoded:
            answers = data.answers(predict(trainer, encoded[split]).predictions)
            if trainer.is_world_process_zero():
                path = Path(training_args.output_dir) / SUBMISSION / f"seed-{seed}" / f"{title}.tsv"
                write_submission(path, task.name, data.texts[split]["index"], answers)
    row = {
        "task": task.name,
        "seed": seed,
        "train_examples": len(data.texts["train"]),
        "eval_examples": sum(len(data.texts[split]) for split in task.validation),
        **figures,
        **losses,
        "score": statistics.fmean(figures.values()),
    }
    return row, trainer


def figures_of(row: dict) -> list[str]:
    """Names of the figures in a row: all that comes after the numbers of examples."""
    return list(row)[list(row).index("eval_examples") + 1 :]


# ---------------------------------------------------------------------------------------------------------------------


def prepare(args: GlueArguments, training_args: GlueTrainingArguments) -> tuple[list[TaskData], PreTrainedConfig, str]:
    """Texts of all tasks, after a look at whether the model can be built for them."""
    check_trainer_arguments(training_args)
    training_args.check_trains(args)
    loaded, name = load_texts(args)
    tasks = [
        TaskData(
            task,
            texts,
            classes_of(
                "model_name_or_path", args.model_name_or_path, task.labels or (), not training_args.trains, task.name
            ),
            tokenizer_for(all_words(texts["train"]), f"{task.name}, {name}", args),
            args.max_length,
        )
        for task, texts in loaded
    ]
    for data in tasks:
        check_room(data.texts["train"], data.tokenizer, data.max_length)
    config = build_classifier(args, tasks[0].tokenizer, tasks[0].settings).config
    check_model(config, args, training_args)
    return tasks, config, name


def main(args: GlueArguments, training_args: GlueTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    training_args.choose_learning_rate(args)
    with refuse_bad_input():
        push = take_push(training_args)
        values = values_of_run(args, training_args, {})
        folder = check_output_dir(training_args.output_dir, values, args.resume)
        tasks, config, text = prepare(args, training_args)
        if push is not None and not (training_args.trains and len(tasks) == 1):
            there_are = (
                f"there are {len(tasks)} tasks; name one" if training_args.trains else "num_train_epochs=0 makes none"
            )
            raise ValueError(f"push_to_hub pushes one model, but {there_are}.")
    args.use_threads()
    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        begin_run(folder, values)
    seeds = list(args.seeds_from(training_args.seed, 3 if training_args.trains else 1))

    def make(data: TaskData, tokens: Callable, seed: int, name: str) -> tuple[dict, HeadwiseTrainer, str | None]:
        with PartialState().main_process_first():
            encoded = tokens()
        row, trainer = fine_tune(name, seed, data, encoded, args, training_args)
        return row, trainer, f"{MODEL}/{data.task.name}" if training_args.trains and seed == seeds[0] else None

    rows = []
    for data in tasks:
        tokens = cache(data.encode)  # of one task at a time, when its first training asks for them
        for seed in seeds:
            name = f"{data.task.name}-seed-{seed}"
            rows.append(run_or_read(name, folder, partial(make, data, tokens, seed, name)))
    summary = summarise(rows, seeds, args, training_args, text)
    if PartialState().is_main_process:
        print_and_write_table(summary, folder)
        for data in tasks if training_args.trains else ():
            write_card(data, summary, config, args, folder / MODEL / data.task.name)
        write_json(folder / SUMMARY, summary)
        push_finished(folder / MODEL / tasks[0].task.name, push)
    return summary


def summarise(
    rows: list[dict], seeds: list[int], args: GlueArguments, training_args: GlueTrainingArguments, text: str
) -> dict:
    """All figures, with mean and standard deviation over the seeds."""
    names = list(dict.fromkeys(row["task"] for row in rows))
    figures = {}
    for name in names:
        of_task = [row for row in rows if row["task"] == name]
        for figure in figures_of(of_task[0]):
            mean, sd = mean_and_sd([row[figure] for row in of_task])
            figures |= {f"{name}_{figure}_mean": mean, f"{name}_{figure}_sd": sd}
    scores = [statistics.fmean(row["score"] for row in rows if row["seed"] == seed) for seed in seeds]
    mean, sd = mean_and_sd(scores)
    return {
        "tasks": names,
        "metric": "score",
        "metric_mean": mean,
        "metric_sd": sd,
        "scores": scores,
        **figures,
        "rows": rows,
        "seeds": seeds,
        "model": args.model_name_or_path or "small BERT",
        "text": text,
        "num_processes": PartialState().num_processes,
        **provenance(seeds[0], device_name(training_args)),
    }


def shown_figures(row: dict) -> list[str]:
    """Names of the figures of a task in a table: all but loss and score."""
    return [name for name in figures_of(row) if not name.endswith(("loss", "score"))]


def print_and_write_table(summary: dict, folder: Path) -> None:
    """One table over all tasks."""
    header = ["task", "figure", "mean", "sd", *(f"seed {seed}" for seed in summary["seeds"])]
    table = []
    for task in summary["tasks"]:
        rows = [row for row in summary["rows"] if row["task"] == task]
        names = shown_figures(rows[0])
        for name in names if len(names) == 1 else [*names, "score"]:
            means = [summary[f"{task}_{name}_{statistic}"] for statistic in ("mean", "sd")]
            table.append([task, name, *means, *(row[name] for row in rows)])
    table.append(["all", "score", summary["metric_mean"], summary["metric_sd"], *summary["scores"]])
    write_csv(folder / "table.csv", [dict(zip(header, line)) for line in table])
    print("\n" + format_table(header, table))
    made = "".join(f", {name}/" for name in (MODEL, SUBMISSION) if (folder / name).is_dir())
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv{made}.")


def write_card(data: TaskData, summary: dict, config: PreTrainedConfig, args: GlueArguments, folder: Path) -> None:
    """The card of the model of the first seed of a task."""
    row = next(row for row in summary["rows"] if row["task"] == data.task.name)
    model_name, title = title_of(summary["model"]), data.task.title
    write_model_card(
        folder,
        name=f"{model_name}, fine-tuned on {title}",
        description=f"{model_name}, fine-tuned on {title} ({summary['text']}) with seed {row['seed']}. It answers "
        f"with {', '.join(data.labels) or 'a score from 0 to 5'}."
        + over_trainings(
            len(summary["seeds"]), "score", *(summary[f"{row['task']}_score_{x}"] for x in ("mean", "sd"))
        ),
        config=config,
        task="text-classification",
        figures={name: row[name] for name in figures_of(row)},
        metric=[Metric(name.rpartition("matched_")[2], name, row[name]) for name in shown_figures(row)],
        dataset=f"{title} ({summary['text']})",
        provenance=summary,
        language="en",
        license=args.license,
        base_model=args.model_name_or_path,
        hub_dataset=args.dataset_name,
    )


def cli() -> None:
    """Runs the recipe with the words of the command line."""
    run_recipe(main, GlueArguments, GlueTrainingArguments)


if __name__ == "__main__":
    cli()
