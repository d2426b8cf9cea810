# Licensed under the Apache License, Version 2.0.
"""Fine-tune a model to classify texts or the words of sentences, with several seeds or by cross-validation.

    accelerate launch recipes/finetune.py                                # a demonstration on embedded text
    accelerate launch recipes/finetune.py recipes/configs/finetune.yaml  # the same, every key explained
    accelerate launch recipes/finetune.py --model_name_or_path runs/guided/model --task token \\
        --train_file ner/train.conll --validation_file ner/dev.conll --test_file ner/test.conll --num_seeds 5
    accelerate launch recipes/finetune.py --model_name_or_path roberta-base --task token \\
        --train_file ner/all.conll --folds 10

The model is trained once for each seed, which draws the weights of the new layer, the order of the examples and
dropout, and evaluated on the validation and the test text. With `--num_train_epochs 0` a classifier that has been
trained is evaluated as it is, and not saved again. With `--folds k` there is one labelled text in k parts, drawn by
the seed: a model is trained for each part, on all others, so that every example is evaluated once a seed. The parts
have equal shares of each class, if all classes have k texts. Guided heads are left to themselves unless
`--guidance_weight` asks for more.

Figures of `--task sequence` are accuracy, macro F1 (mean over the classes that occur or were predicted) and, for two
classes, Matthews' correlation. Those of `--task token` are precision, recall and F1 of whole entities, as the CoNLL
scorer counts them; words beyond `--max_length` count, too.

Writes to `--output_dir`: `summary.json`, `table.csv`, `config.yaml` (the values of the run) and `model/`: the model of
the first seed (and of the first part), with tokenizer, code and card. With `--push_to_hub true --hub_model_id
USER/NAME`, `model/` is pushed to the Hub once all of it is on disk.

Keys of `summary.json`:
    task, labels                      what was learnt, and the names of the labels
    metric, metric_mean, metric_sd    name of the main figure (accuracy or f1, of the test text if there is one), its
                                      mean over all trainings and standard deviation (of a sample; null for one)
    X_mean, X_sd                      the same of every figure X: accuracy, macro_f1, mcc, or precision, recall, f1;
                                      and loss; and test_accuracy and so on of the test text
    rows                              as in table.csv: seed, fold, train_examples, eval_examples and all X
    folds                             number of parts, or null
    model, text, train_examples, eval_examples, test_examples, num_processes, and seed, device, command and versions
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from seqeval import metrics as entities
from sklearn.metrics import f1_score, matthews_corrcoef
from sklearn.model_selection import KFold, StratifiedKFold
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.trainer_utils import PredictionOutput

from .. import HeadwiseTrainer
from ..data import (
    align_labels,
    embedded_classification,
    entity_labels,
    label_words,
    load_classification,
    load_token_classification,
    word_tags,
)
from ..data.tables import column_of_flag
from ..hub.card import Metric, language_of, title_of, write_model_card
from ..hub.push import push_finished, take_push
from ..training import check_trainer_arguments
from .classifying import (
    ClassifierArguments,
    ClassifierTrainingArguments,
    all_words,
    build_classifier,
    check_model,
    check_sources,
    class_names,
    classes_of,
    classes_to_learn,
    encode,
    mean_and_sd,
    occurring,
    over_trainings,
    predict,
    tokenizer_for,
    train_classifier,
    warn_of_repeats,
    without_blanks,
)
from .run import (
    SUMMARY,
    begin_run,
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


logger = logging.getLogger("hf_attn_dynamics.recipes.finetune")

MODEL = "model"  # folder of the model that is saved
WHAT_IS_CLASSIFIED = {"sequence": "texts", "token": "the words of sentences"}


# ---------------------------------------------------------------------------------------------------------------------
# Tasks
# ---------------------------------------------------------------------------------------------------------------------


class SequenceTask:
    """A class for each text, or pair of texts."""

    auto_class = "AutoModelForSequenceClassification"
    pipeline = "text-classification"
    metric = "accuracy"
    collator = DataCollatorWithPadding

    def __init__(self, args: "FinetuneArguments"):
        self.args = args

    def embedded(self) -> dict[str, Dataset]:
        return dict(zip(("train", "validation"), embedded_classification(250, 100, seed=0)))

    def load(self, files: list[str] | None, split: str) -> Dataset:
        """Texts that are not blank."""
        args = self.args
        text = args.text_column and [column_of_flag(name) for name in args.text_column]
        columns = (text, column_of_flag(args.label_column))
        if files:
            texts = load_classification(files, *columns)
        else:
            hub = {"dataset_name": args.dataset_name, "dataset_config": args.dataset_config}
            texts = load_classification(None, *columns, **hub, split=split)
        return without_blanks(texts)

    def labels(self, train: Dataset) -> list[str]:
        return classes_to_learn(train)

    def classes(self, texts: Dataset) -> set[str]:
        """Names of the classes that occur."""
        return occurring(texts)

    def words(self, texts: Dataset) -> list[str]:
        return all_words(texts)

    def encode(self, texts: Dataset, tokenizer: PreTrainedTokenizerBase, labels: list[str], name: str) -> Dataset:
        return encode(align_labels(texts, labels), tokenizer, self.args.max_length)

    def figures(self, prediction: PredictionOutput, encoded: Dataset, labels: list[str]) -> dict[str, float]:
        true, found = prediction.label_ids, prediction.predictions.argmax(-1)
        figures = {
            "accuracy": (true == found).mean(),
            "macro_f1": f1_score(true, found, average="macro", zero_division=0),
        }
        if len(labels) == 2:
            figures["mcc"] = matthews_corrcoef(true, found)
        return figures


class TokenTask:
    """A tag for each word, which together make entities."""

    auto_class = "AutoModelForTokenClassification"
    pipeline = "token-classification"
    metric = "f1"
    collator = DataCollatorForTokenClassification

    def __init__(self, args: "FinetuneArguments"):
        self.args = args

    def embedded(self) -> dict[str, Dataset]:
        raise ValueError("task token has no embedded text: name a train_file and a validation_file, or folds.")

    def load(self, files: list[str] | None, split: str) -> Dataset:
        """Sentences that have words."""
        if not files:
            raise ValueError(f"task token is learnt from files, not from dataset_name={self.args.dataset_name!r}.")
        columns = self.args.text_column or [None]
        if len(columns) > 1:
            raise ValueError(f"text_column is {columns}, but task token has one column of words.")
        return load_token_classification(files, *map(column_of_flag, (columns[0], self.args.label_column)))

    def labels(self, train: Dataset) -> list[str]:
        return entity_labels(train["tags"])

    def classes(self, sentences: Dataset) -> set[str]:
        """Types of the entities that occur."""
        return {tag[2:] for tags in sentences["tags"] for tag in tags if tag != "O"}

    def words(self, sentences: Dataset) -> list[str]:
        return [" ".join(words) for words in sentences["tokens"]]

    def encode(self, sentences: Dataset, tokenizer: PreTrainedTokenizerBase, labels: list[str], name: str) -> Dataset:
        return label_words(sentences, tokenizer, labels, self.args.max_length, name)

    def figures(self, prediction: PredictionOutput, encoded: Dataset, labels: list[str]) -> dict[str, float]:
        found = word_tags(prediction.predictions.argmax(-1), prediction.label_ids, encoded, labels)
        true = encoded["tags"][:]
        scores = {
            "precision": entities.precision_score,
            "recall": entities.recall_score,
            "f1": entities.f1_score,
        }
        return {name: score(true, found, zero_division=0) for name, score in scores.items()}


TASKS = {"sequence": SequenceTask, "token": TokenTask}
Task = SequenceTask | TokenTask


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class FinetuneArguments(ClassifierArguments):
    """Task, model and text of the run; how to train is in [`FinetuneTrainingArguments`]."""

    task: str = field(default="sequence", metadata={"help": f"What to classify: {' or '.join(TASKS)}."})
    folds: int | None = field(
        default=None, metadata={"help": "Cross-validation: evaluate on each of so many parts of train_file in turn."}
    )

    train_file: list[str] | None = field(
        default=None,
        metadata={"help": "Files, folders or patterns: texts and labels (tsv, csv, jsonl, parquet), or words and tags "
                          "(conll, txt, tsv, jsonl, parquet)."},
    )  # fmt: skip
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same, to evaluate on."})
    test_file: list[str] | None = field(default=None, metadata={"help": "The same, for the main figure, if given."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set on the Hub, instead of train_file (texts only)."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    dataset_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str = field(default="validation", metadata={"help": "Its split to evaluate on."})
    text_column: list[str] | None = field(
        default=None, metadata={"help": "Column of the texts, two of a pair, or that of the words: name or position."}
    )
    label_column: str | None = field(
        default=None, metadata={"help": "Column of the labels or tags: name or position; found if not named."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.task not in TASKS:
            raise ValueError(f"task must be {' or '.join(TASKS)}, got {self.task!r}.")
        if self.folds is not None and self.folds < 2:
            raise ValueError(f"folds must be at least 2, got {self.folds}.")
        check_sources(self)
        if self.folds and (given := self.validation_file or self.test_file):
            raise ValueError(f"folds={self.folds} evaluates on parts of the training text; leave out {given}.")


@dataclass
class FinetuneTrainingArguments(ClassifierTrainingArguments):
    """[`ClassifierTrainingArguments`], with `output_dir` runs/finetune."""

    output_dir: str = field(default="runs/finetune", metadata={"help": "Where to write; may not hold another run."})


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Corpus:
    """Encoded examples of each split, and what they are of."""

    splits: dict[str, Dataset]
    labels: list[str]
    tokenizer: PreTrainedTokenizerBase
    text: str


def load_texts(task: Task, args: FinetuneArguments) -> tuple[dict[str, Dataset], str]:
    """Labelled text of each split, and what to call it."""
    if not args.train_file and not args.dataset_name:
        texts, name = task.embedded(), "documentation of eight Python libraries"
        return ({"train": texts["train"]} if args.folds else texts), name
    texts = {"train": task.load(args.train_file, args.dataset_split)}
    if not args.folds:
        if not args.validation_file and not args.dataset_name:
            raise ValueError("no text to evaluate on: name a validation_file, or a number of folds.")
        texts["validation"] = task.load(args.validation_file, args.validation_split)
    if args.test_file:
        texts["test"] = task.load(args.test_file, "test")
    return texts, args.dataset_name or ", ".join(Path(file).name for file in args.train_file)


def load_corpus(task: Task, args: FinetuneArguments, is_trained: bool) -> Corpus:
    texts, name = load_texts(task, args)
    labels = task.labels(texts["train"])
    labels = classes_of("model_name_or_path", args.model_name_or_path, labels, is_trained, name, task.auto_class)
    for split, dataset in texts.items():
        if split != "train":
            warn_of_repeats(texts["train"], dataset, split)
        if missing := sorted(task.classes(texts["train"]) - task.classes(dataset)):
            logger.warning("The %s text has no example of %s.", split, ", ".join(missing))
    tokenizer = tokenizer_for(task.words(texts["train"]), name, args)
    with PartialState().main_process_first():
        splits = {split: task.encode(texts[split], tokenizer, labels, f"the {split} text") for split in texts}
    return Corpus(splits, labels, tokenizer, name)


def folds_of(examples: Dataset, number: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows to train on and rows to evaluate on, for each of so many parts."""
    if len(examples) < number:
        raise ValueError(f"folds={number}, but there are only {len(examples)} examples; lower it.")
    labels = examples["labels"][:]
    # Sentences have many labels each.
    has_classes = isinstance(labels[0], int) and min(Counter(labels).values()) >= number
    parts = (StratifiedKFold if has_classes else KFold)(number, shuffle=True, random_state=seed)
    return list(parts.split(np.zeros(len(examples)), labels if has_classes else None))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def build_model(task: Task, args: FinetuneArguments, corpus: Corpus) -> PreTrainedModel:
    return build_classifier(args, corpus.tokenizer, class_names(corpus.labels), task.auto_class)


@dataclass
class Training:
    """One training: its seed, its part if there are parts, and the rows of its examples."""

    seed: int
    fold: int | None
    train: Dataset
    evaluation: Dataset

    @property
    def name(self) -> str:
        return f"seed-{self.seed}" + (f"-fold-{self.fold}" if self.fold is not None else "")


def plan(args: FinetuneArguments, training_args: FinetuneTrainingArguments, corpus: Corpus) -> list[Training]:
    seeds = args.seeds_from(training_args.seed, 3 if training_args.trains and not args.folds else 1)
    train = corpus.splits["train"]
    if not args.folds:
        return [Training(seed, None, train, corpus.splits["validation"]) for seed in seeds]
    return [
        Training(seed, fold, train.select(rows), train.select(others))
        for seed in seeds
        for fold, (rows, others) in enumerate(folds_of(train, args.folds, seed), 1)
    ]


def fine_tune(
    training: Training, task: Task, args: FinetuneArguments, training_args: FinetuneTrainingArguments, corpus: Corpus
) -> tuple[dict, HeadwiseTrainer]:
    """A row of the table, and what made it."""
    trainer = train_classifier(
        training.name,
        training.seed,
        partial(build_model, task, args, corpus),
        training_args,
        corpus.tokenizer,
        training.train,
        training.evaluation,
        task.collator(corpus.tokenizer),
    )

    def figures(examples: Dataset, prefix: str = "") -> dict[str, float]:
        prediction = predict(trainer, examples)
        found = {**task.figures(prediction, examples, corpus.labels), "loss": prediction.metrics["test_loss"]}
        return {prefix + name: float(value) for name, value in found.items()}

    row = {
        "seed": training.seed,
        "fold": training.fold,
        "train_examples": len(training.train),
        "eval_examples": len(training.evaluation),
        **figures(training.evaluation),
    }
    if "test" in corpus.splits:
        row |= figures(corpus.splits["test"], "test_")
    return row, trainer


# ---------------------------------------------------------------------------------------------------------------------


def prepare(
    args: FinetuneArguments, training_args: FinetuneTrainingArguments
) -> tuple[Task, Corpus, list[Training], PreTrainedConfig]:
    """Task, text and all trainings, after a look at whether the model can be built for them."""
    check_trainer_arguments(training_args)
    training_args.check_trains(args)
    task = TASKS[args.task](args)
    corpus = load_corpus(task, args, not training_args.trains)
    trainings = plan(args, training_args, corpus)
    config = build_model(task, args, corpus).config
    check_model(config, args, training_args)
    return task, corpus, trainings, config


def main(args: FinetuneArguments, training_args: FinetuneTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    training_args.choose_learning_rate(args)
    with refuse_bad_input():
        push = take_push(training_args)
        values = values_of_run(args, training_args, {})
        folder = check_output_dir(training_args.output_dir, values, args.resume)
        task, corpus, trainings, config = prepare(args, training_args)
        if push is not None and not training_args.trains:
            raise ValueError("push_to_hub pushes a model, but num_train_epochs=0 makes none.")
    args.use_threads()
    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        begin_run(folder, values)

    def make(training: Training) -> tuple[dict, HeadwiseTrainer, str | None]:
        row, trainer = fine_tune(training, task, args, training_args, corpus)
        return row, trainer, MODEL if training_args.trains and training is trainings[0] else None

    rows = [run_or_read(training.name, folder, partial(make, training)) for training in trainings]
    summary = summarise(rows, task, args, training_args, corpus)
    if PartialState().is_main_process:
        print_and_write_table(rows, summary, args, folder)
        if training_args.trains:
            write_card(rows, summary, task, args, config, folder)
        write_json(folder / SUMMARY, summary)
        push_finished(folder / MODEL, push)
    return summary


def summarise(
    rows: list[dict], task: Task, args: FinetuneArguments, training_args: FinetuneTrainingArguments, corpus: Corpus
) -> dict:
    """All figures, with mean and standard deviation over the trainings."""
    statistics_of = {}
    for name in figures_of(rows):
        mean, sd = mean_and_sd([row[name] for row in rows])
        statistics_of |= {f"{name}_mean": mean, f"{name}_sd": sd}
    metric = f"test_{task.metric}" if "test" in corpus.splits else task.metric
    examples = {split: len(dataset) for split, dataset in corpus.splits.items()}
    return {
        "task": args.task,
        "labels": corpus.labels,
        "metric": metric,
        "metric_mean": statistics_of[f"{metric}_mean"],
        "metric_sd": statistics_of[f"{metric}_sd"],
        **statistics_of,
        "rows": rows,
        "folds": args.folds,
        "model": args.model_name_or_path or "small BERT",
        "text": corpus.text,
        "train_examples": examples["train"],
        "eval_examples": examples.get("validation", examples["train"]),
        "test_examples": examples.get("test"),
        "num_processes": PartialState().num_processes,
        **provenance(rows[0]["seed"], device_name(training_args)),
    }


def figures_of(rows: list[dict]) -> list[str]:
    """Names of the figures in a row: all that comes after the numbers of examples."""
    return list(rows[0])[list(rows[0]).index("eval_examples") + 1 :]


def print_and_write_table(rows: list[dict], summary: dict, args: FinetuneArguments, folder: Path) -> None:
    names = figures_of(rows)
    shown = [name for name in rows[0] if not (name == "fold" and args.folds is None)]
    table = [[row[name] for name in shown] for row in rows]
    for statistic in ("mean", "sd"):
        figures = [summary[f"{name}_{statistic}"] for name in names]
        table.append([statistic, *[None] * (len(shown) - 1 - len(names)), *figures])
    write_csv(folder / "table.csv", [dict(zip(shown, line)) for line in table])
    print("\n" + format_table(shown, table))
    made = f", {MODEL}/" if (folder / MODEL).is_dir() else ""
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv{made}.")


def write_card(
    rows: list[dict], summary: dict, task: Task, args: FinetuneArguments, config: PreTrainedConfig, folder: Path
) -> None:
    model_name = title_of(summary["model"])
    first, metric = rows[0], summary["metric"]
    part = f", on all but part {first['fold']} of {args.folds} of the text" if args.folds else ""
    write_model_card(
        folder / MODEL,
        name=f"{model_name}, fine-tuned on {summary['text']}",
        description=f"{model_name}, fine-tuned to classify {WHAT_IS_CLASSIFIED[args.task]} with seed "
        f"{first['seed']}{part}. The classes are {', '.join(sorted(summary['labels']))}."
        + over_trainings(len(rows), metric, summary["metric_mean"], summary["metric_sd"]),
        config=config,
        task=task.pipeline,
        figures={name: first[name] for name in figures_of(rows)},
        metric=Metric(task.metric, metric, first[metric], "test" if metric.startswith("test_") else "validation"),
        dataset=summary["text"],
        provenance=summary,
        language=language_of(args),
        license=args.license,
        base_model=args.model_name_or_path,
        hub_dataset=args.dataset_name,
    )


def cli() -> None:
    """Runs the recipe with the words of the command line."""
    run_recipe(main, FinetuneArguments, FinetuneTrainingArguments)


if __name__ == "__main__":
    cli()
