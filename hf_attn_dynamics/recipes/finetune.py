# Licensed under the Apache License, Version 2.0.
"""Fine-tune a model to classify texts or words, or on a task of GLUE, with several seeds or by cross-validation.

    accelerate launch recipes/finetune.py                                # a demonstration on embedded text
    accelerate launch recipes/finetune.py recipes/configs/finetune.yaml  # the same, with every key explained
    accelerate launch recipes/finetune.py --model runs/guided/model --task token \\
        --train_file ner/train.conll --validation_file ner/dev.conll --test_file ner/test.conll --num_seeds 5
    accelerate launch recipes/finetune.py --model roberta-base --task token \\
        --train_file ner/all.conll --folds 10
    accelerate launch recipes/finetune.py --model roberta-base --task mrpc

The model is trained once per seed and evaluated on the validation and the test text; the seed determines the weights
of the new layer, the order of the examples and dropout. With `--num_train_epochs 0`, a trained classifier is
evaluated and not saved again. With `--folds K`, one labelled text is divided into K parts, and a model is trained for
each part on all others, so that every example is evaluated once per seed. `--guidance_weight` turns guidance on.

`--task token` reports precision, recall and F1 of entities as the CoNLL scorer does; words beyond `--max_length`
count. A task of GLUE has the metrics, and the answers to its test sets, that `run_glue` describes.

Writes to `--output_dir`: `summary.json`, `table.csv`, `config.yaml` (the values of the run) and `model/`: the model of
the first seed (and of the first part), with tokenizer, code and card; for a task of GLUE, also `submission/seed-N/`.
`--push_to_hub true --hub_model_id USER/NAME` pushes `model/` to the Hub after everything is written.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from sklearn.model_selection import KFold, StratifiedKFold

from .._tables import format_table
from ..training import check_trainer_arguments
from .arguments.base import flag
from .arguments.finetune import FinetuneArguments
from .classifier_tasks import (
    CLASSIFIER_TASKS,
    MODEL_FOLDER,
    SequenceTask,
    Training,
    print_made,
    train_classifiers,
    write_classifier_card,
)
from .classifying import ClassifierTrainingArguments, check_guidance, means_and_sds
from .run import Run, run_recipe, write_csv
from .summaries.base import rows_table
from .summaries.finetune import FinetuneRow, FinetuneSummary


@dataclass
class FinetuneTrainingArguments(ClassifierTrainingArguments):
    """[`ClassifierTrainingArguments`] with another output folder."""

    output_dir: str = flag("runs/finetune", "Output folder; it must not hold another run.")


def folds_of(examples: Dataset, number: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Indices of training and evaluation examples for each part; parts have equal fractions of each class.

    Classes with fewer than `number` examples, and sentences with a label per word, are divided at random.
    """
    if len(examples) < number:
        raise ValueError(f"folds={number}, but there are only {len(examples)} examples; lower it.")
    labels = examples["labels"][:]
    has_classes = isinstance(labels[0], int) and min(Counter(labels).values()) >= number
    parts = (StratifiedKFold if has_classes else KFold)(number, shuffle=True, random_state=seed)
    return list(parts.split(np.zeros(len(examples)), labels if has_classes else None))


def planned_trainings(
    args: FinetuneArguments, training_args: FinetuneTrainingArguments, splits: dict[str, Dataset]
) -> list[Training]:
    """A training per seed and, with folds, per part."""
    seeds = args.seeds_from(training_args.seed, 3 if training_args.trains and not args.folds else 1)
    if not args.folds:
        return [Training(f"seed-{seed}", {"seed": seed, "fold": None}) for seed in seeds]
    return [
        Training(f"seed-{seed}-fold-{fold}", {"seed": seed, "fold": fold}, rows)
        for seed in seeds
        for fold, rows in enumerate(folds_of(splits["train"], args.folds, seed), 1)
    ]


def main(args: FinetuneArguments, training_args: FinetuneTrainingArguments) -> dict:
    """Run the recipe; returns the content of `summary.json`."""
    run = Run(args, training_args)
    with run.preparing(partial(training_args.choose_defaults, args)):
        check_trainer_arguments(training_args)
        training_args.check_trains(args)
        task = CLASSIFIER_TASKS[args.task](args)
        task.read(training_args.trains)
        with PartialState().main_process_first():
            splits = task.encode()
        trainings = planned_trainings(args, training_args, splits)
        config = task.build().config
        check_guidance(config, training_args)
        if run.is_pushed and not training_args.trains:
            raise ValueError("push_to_hub pushes a trained model, but num_train_epochs=0 only evaluates.")
    rows = train_classifiers(task, trainings, FinetuneRow, lambda: splits, training_args, MODEL_FOLDER)
    summary = summarise(rows, task, args, splits)

    def publish() -> None:
        header, lines = finetune_table(summary)
        write_csv(run.folder / "table.csv", [dict(zip(header, line)) for line in lines])
        if training_args.trains:
            part = f", on all but part {rows[0].fold} of {args.folds} of the text" if args.folds else ""
            write_classifier_card(task, rows, config, summary, run.folder / MODEL_FOLDER, part)

    return run.finish(summary, publish, lambda: print_report(summary, run.folder), pushed=MODEL_FOLDER)


def summarise(
    rows: list[FinetuneRow], task: SequenceTask, args: FinetuneArguments, splits: dict[str, Dataset]
) -> FinetuneSummary:
    metric = task.main_metric(rows[0].metrics)
    means, sds = means_and_sds(rows)
    return FinetuneSummary(
        task=args.task,
        labels=task.labels,
        metric=metric,
        metric_mean=means[metric],
        metric_sd=sds[metric],
        means=means,
        sds=sds,
        rows=rows,
        folds=args.folds,
        model=args.model or "small BERT",
        text=task.text,
        train_examples=len(splits["train"]) if "train" in splits else None,
        eval_examples=len(splits["train"]) if args.folds else rows[0].eval_examples,
        test_examples=len(splits["test"]) if args.test_file else None,
        seed=rows[0].seed,
    )


def finetune_table(summary: FinetuneSummary) -> tuple[list[str], list[list]]:
    """Header and lines: a line per training, then mean and standard deviation."""
    header, lines = rows_table(summary.rows)
    for name, values in (("mean", summary.means), ("sd", summary.sds)):
        lines.append([name, *(values.get(column) for column in header[1:])])
    shown = [index for index, column in enumerate(header) if column != "fold" or summary.folds]
    header, *lines = ([line[index] for index in shown] for line in (header, *lines))
    return header, lines


def print_report(summary: FinetuneSummary, folder: Path) -> None:
    header, lines = finetune_table(summary)
    print("\n" + format_table(header, lines if len(summary.rows) > 1 else lines[:1]))
    print_made(folder)


if __name__ == "__main__":
    run_recipe(main, summary=FinetuneSummary)
