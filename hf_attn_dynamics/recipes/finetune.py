# Licensed under the Apache License, Version 2.0.
"""Fine-tune a model to classify texts or words, or on a task of GLUE, with several seeds or by cross-validation.

    accelerate launch recipes/finetune.py                                # a demonstration on embedded text
    accelerate launch recipes/finetune.py recipes/configs/finetune.yaml  # the same, every key explained
    accelerate launch recipes/finetune.py --model_name_or_path runs/guided/model --task token \\
        --train_file ner/train.conll --validation_file ner/dev.conll --test_file ner/test.conll --num_seeds 5
    accelerate launch recipes/finetune.py --model_name_or_path roberta-base --task token \\
        --train_file ner/all.conll --folds 10
    accelerate launch recipes/finetune.py --model_name_or_path roberta-base --task_name mrpc

The model is trained once for each seed, which draws the weights of the new layer, the order of the examples and
dropout, and evaluated on the validation and the test text. With `--num_train_epochs 0` a classifier that has been
trained is evaluated as it is, and not saved again; a validation text is enough. With `--folds k` there is one labelled
text in k parts, drawn by the seed: a model is trained for each part, on all others, so that every example is evaluated
once a seed. The parts have equal shares of each class, if all classes have k texts. Guided heads are left to
themselves unless `--guidance_weight` asks for more.

Metrics of `--task sequence` are accuracy, macro F1 (mean over the classes that occur or were predicted) and, for two
classes, Matthews' correlation. Those of `--task token` are precision, recall and F1 of whole entities, as the CoNLL
scorer counts them; words beyond `--max_length` count, too. A task of GLUE, from the Hub or `--data_dir`, has the
metrics and the answers to its test sets that `run_glue.py` describes, which trains several such tasks.

Writes to `--output_dir`: `summary.json`, `table.csv`, `config.yaml` (the values of the run) and `model/`: the model of
the first seed (and of the first part), with tokenizer, code and card; with a task of GLUE, `submission/seed-N/`, too.
With `--push_to_hub true --hub_model_id USER/NAME`, `model/` is pushed to the Hub once all of it is on disk.

Keys of `summary.json`:
    task, labels                      what was learnt, and the names of the labels
    metric, metric_mean, metric_sd    name of the main metric (accuracy, f1 or score, of the test text if there is
                                      one), its mean over all trainings and standard deviation (of a sample; null for
                                      one)
    X_mean, X_sd                      the same of every metric X: accuracy, macro_f1, mcc, or precision, recall, f1, or
                                      those of GLUE; and loss; and test_accuracy and so on of the test text
    rows                              as in table.csv: seed, fold, train_examples, eval_examples and all X
    folds                             number of parts, or null
    model, text, train_examples, eval_examples, test_examples, num_processes, and seed, device, command and versions
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from sklearn.model_selection import KFold, StratifiedKFold

from .._tables import format_table
from ..training import check_trainer_arguments
from .arguments.finetune import FinetuneArguments
from .classifier_tasks import SUBMISSION, TASKS, SequenceTask, Training, train_classifiers, write_classifier_card
from .classifying import ClassifierTrainingArguments, check_guidance, means_and_sds, metric_names
from .run import SUMMARY, Run, run_recipe, write_csv


MODEL = "model"  # folder of the model that is saved


@dataclass
class FinetuneTrainingArguments(ClassifierTrainingArguments):
    """[`ClassifierTrainingArguments`], with `output_dir` runs/finetune."""

    output_dir: str = field(default="runs/finetune", metadata={"help": "Where to write; may not hold another run."})


def folds_of(examples: Dataset, number: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows to train on and rows to evaluate on, for each of so many parts."""
    if len(examples) < number:
        raise ValueError(f"folds={number}, but there are only {len(examples)} examples; lower it.")
    labels = examples["labels"][:]
    # Sentences have many labels each.
    has_classes = isinstance(labels[0], int) and min(Counter(labels).values()) >= number
    parts = (StratifiedKFold if has_classes else KFold)(number, shuffle=True, random_state=seed)
    return list(parts.split(np.zeros(len(examples)), labels if has_classes else None))


def plan(
    args: FinetuneArguments, training_args: FinetuneTrainingArguments, splits: dict[str, Dataset]
) -> list[Training]:
    """A training for each seed, and for each part if there are parts."""
    seeds = args.seeds_from(training_args.seed, 3 if training_args.trains and not args.folds else 1)
    if not args.folds:
        return [Training(f"seed-{seed}", {"seed": seed, "fold": None}) for seed in seeds]
    return [
        Training(f"seed-{seed}-fold-{fold}", {"seed": seed, "fold": fold}, rows)
        for seed in seeds
        for fold, rows in enumerate(folds_of(splits["train"], args.folds, seed), 1)
    ]


def main(args: FinetuneArguments, training_args: FinetuneTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args)
    with run.preparing(partial(training_args.choose_defaults, args)):
        check_trainer_arguments(training_args)
        training_args.check_trains(args)
        task = TASKS[args.task](args)
        task.read(training_args.trains)
        with PartialState().main_process_first():
            splits = task.encode()
        trainings = plan(args, training_args, splits)
        config = task.build().config
        check_guidance(config, training_args)
        if run.is_pushed and not training_args.trains:
            raise ValueError("push_to_hub pushes a model, but num_train_epochs=0 makes none.")
    rows = train_classifiers(task, trainings, lambda: splits, training_args, MODEL)

    def publish(summary: dict) -> None:
        print_and_write_table(rows, summary, args, run.folder)
        if training_args.trains:
            part = f", on all but part {rows[0]['fold']} of {args.folds} of the text" if args.folds else ""
            write_classifier_card(task, rows, config, summary, run.folder / MODEL, part)

    return run.finish(summarise(rows, task, args, training_args, splits), publish, pushed=MODEL)


def summarise(
    rows: list[dict],
    task: SequenceTask,
    args: FinetuneArguments,
    training_args: FinetuneTrainingArguments,
    splits: dict[str, Dataset],
) -> dict:
    """All metrics, with mean and standard deviation over the trainings."""
    metric, statistics = task.main_metric(rows[0]), means_and_sds(rows)
    return {
        "task": args.task,
        "labels": task.labels,
        "metric": metric,
        "metric_mean": statistics[f"{metric}_mean"],
        "metric_sd": statistics[f"{metric}_sd"],
        **statistics,
        "rows": rows,
        "folds": args.folds,
        "model": args.model_name_or_path or "small BERT",
        "text": task.text,
        "train_examples": len(splits["train"]) if "train" in splits else None,
        "eval_examples": len(splits["train"]) if args.folds else rows[0]["eval_examples"],
        "test_examples": len(splits["test"]) if args.test_file else None,
        "seed": rows[0]["seed"],
    }


def print_and_write_table(rows: list[dict], summary: dict, args: FinetuneArguments, folder: Path) -> None:
    """Prints one line for each training and, of several, their mean and standard deviation; writes all of it."""
    names = metric_names(rows[0])
    shown = [name for name in rows[0] if not (name == "fold" and args.folds is None)]
    table = [[row[name] for name in shown] for row in rows]
    for statistic in ("mean", "sd"):
        values = [summary[f"{name}_{statistic}"] for name in names]
        table.append([statistic, *[None] * (len(shown) - 1 - len(names)), *values])
    write_csv(folder / "table.csv", [dict(zip(shown, line)) for line in table])
    print("\n" + format_table(shown, table if len(rows) > 1 else table[:1]))
    made = "".join(f", {name}/" for name in (MODEL, SUBMISSION) if (folder / name).is_dir())
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv{made}.")


if __name__ == "__main__":
    run_recipe(main)
