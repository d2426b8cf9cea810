# Licensed under the Apache License, Version 2.0.
"""Tasks of `finetune` and `run_glue`: their texts, classes and metrics.

sequence             a class per text, or per pair of texts
token                a tag per word; the tags of a sentence form entities
cola, sst2, mrpc …   the tasks of GLUE, from its own files or the Hub
"""

import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import ClassLabel, Dataset
from seqeval import metrics as entities
from sklearn.metrics import f1_score, matthews_corrcoef
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding, PreTrainedConfig, PreTrainedModel
from transformers.trainer_utils import PredictionOutput

from .. import HeadwiseTrainer
from ..data import (
    GLUE_TASKS,
    GlueTask,
    align_labels,
    embedded_classification,
    entity_labels,
    find_glue_file,
    label_words,
    load_classification,
    load_glue,
    load_token_classification,
    word_tags,
    write_submission,
)
from ..data.classification import LIBRARIES
from ..data.tables import column_of_flag
from ..hub.card import Metric, language_of, title_of, write_model_card
from ..training.glue_metric import GlueMetric
from .arguments.classifying import check_sources
from .classifying import (
    SEQUENCE_CLASSIFIER,
    ClassifierTrainingArguments,
    all_words,
    build_classifier,
    class_names,
    classes_of,
    classes_to_learn,
    encode,
    mean_and_sd,
    occurring,
    predict,
    tokenizer_for,
    train_classifier,
    warn_of_repeats,
    without_blanks,
)
from .run import SUMMARY, named_files, run_or_read
from .summaries.base import Summary
from .summaries.classifying import AnyRow, TrainingRow
from .summaries.finetune import FinetuneRow, FinetuneSummary
from .summaries.run_glue import GlueSummary


logger = logging.getLogger("hf_attn_dynamics.recipes.classifier_tasks")

EMBEDDED_TEXT = "documentation of eight Python libraries"
EMBEDDED_TASK = GlueTask("embedded", "embedded", (("text",),), LIBRARIES)  # this text as a task of GLUE
MODEL_FOLDER, SUBMISSION = "model", "submission"  # folders of the saved models, and of the answers to test sets
Outputs = Callable[[Dataset], PredictionOutput]  # outputs of a model for encoded examples


@dataclass
class Training:
    """One training of a classifier.

    Attributes:
        name (`str`): Name of its folder in `checkpoints`.
        key (`dict`): First values of its row: `seed`, and `fold` or `task`.
        rows (`tuple`, *optional*): Indices of training and evaluation examples in the training text.
    """

    name: str
    key: dict[str, Any]
    rows: tuple[Sequence[int], Sequence[int]] | None = None


class SequenceTask:
    """A class per text, or per pair of texts; subclasses override what differs.

    Attributes:
        auto_class, pipeline (`str`): Auto class and pipeline of the models.
        collator (`type`): Class of the data collator.
        metric (`str`): Main metric.
        validation (`tuple[str, ...]`): Splits to evaluate on.
        texts, text (`dict`, `str`): Labelled texts of all splits, and their name; set by `read`.
        labels (`list[str]`): Names of the classes in the order of the model, empty for scores; set by `read`.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer; set by `read`.
    """

    auto_class, pipeline = SEQUENCE_CLASSIFIER, "text-classification"
    collator: type = DataCollatorWithPadding
    metric = "accuracy"
    validation: tuple[str, ...] = ("validation",)
    what = "texts"
    words, occurring = staticmethod(all_words), staticmethod(occurring)

    def __init__(self, args: Any):
        self.args = args
        self.folds = getattr(args, "folds", None)

    def read(self, trains: bool) -> None:
        """Reads texts, tokenizer and names of the classes.

        Args:
            trains (`bool`): Whether models are trained, or a classifier is only evaluated.
        """
        self.texts = self.load_splits(trains)
        first, name = next(iter(self.texts.values())), self.name
        self.labels = classes_of(
            "model",
            self.args.model,
            self.classes_in(first),
            not trains,
            name,
            self.auto_class,
            are_all="train" in self.texts,
        )
        self.tokenizer = tokenizer_for(self.words(first), name, self.args)

    @property
    def name(self) -> str:
        """Name of the texts in messages."""
        return self.text

    def load_splits(self, trains: bool) -> dict[str, Dataset]:
        args = self.args
        check_sources(args, evaluates=not trains)
        if not args.train_file and not args.dataset_name and not args.validation_file:
            self.text, texts = EMBEDDED_TEXT, self.embedded()
            return {"train": texts["train"]} if self.folds else texts
        texts = {}
        if args.train_file or args.dataset_name:
            texts["train"] = self.load(args.train_file, args.dataset_split)
        if not self.folds:
            if not args.validation_file and not args.dataset_name:
                raise ValueError("there is no text to evaluate on; give --validation_file or --folds.")
            texts["validation"] = self.load(args.validation_file, args.validation_split)
        if args.test_file:
            texts["test"] = self.load(args.test_file, "test")
        files = args.train_file or args.validation_file or ()
        self.text = args.dataset_name or named_files(files)
        self.compare_splits(texts)
        return texts

    def embedded(self) -> dict[str, Dataset]:
        return dict(zip(("train", "validation"), embedded_classification(250, 100, seed=0)))

    def load(self, files: list[str] | None, split: str) -> Dataset:
        """Labelled texts without blank ones."""
        args = self.args
        text = args.text_column and [column_of_flag(name) for name in args.text_column]
        columns = (text, column_of_flag(args.label_column), args.class_names)
        hub = {"dataset_name": args.dataset_name, "dataset_config": args.dataset_config, "split": split}
        try:
            source = {"encoding": args.encoding} if files else hub
            texts = load_classification(files, *columns, **source, first_label=args.first_label)
        except ValueError as error:
            raise ValueError(str(error).replace("label_names", "class_names")) from error
        return without_blanks(texts)

    def compare_splits(self, texts: Mapping[str, Dataset]) -> None:
        """Warns of evaluation examples in the training text, and of classes without evaluation examples."""
        for split in [split for split in texts if split != "train" and "train" in texts]:
            warn_of_repeats(texts["train"], texts[split], split)
            if missing := sorted(self.occurring(texts["train"]) - self.occurring(texts[split])):
                logger.warning("The %s text has no example of %s.", split, ", ".join(missing))

    def classes_in(self, texts: Dataset) -> Sequence[str]:
        """Names of the classes of the training text, or of the text that a classifier is evaluated on."""
        return classes_to_learn(texts) if "train" in self.texts else texts.features["label"].names

    def encode(self) -> dict[str, Dataset]:
        """Token ids and labels of each split."""
        aligned = {
            split: align_labels(texts, self.labels) if isinstance(texts.features.get("label"), ClassLabel) else texts
            for split, texts in self.texts.items()
        }
        return {split: encode(texts, self.tokenizer, self.args.max_length) for split, texts in aligned.items()}

    def build(self) -> PreTrainedModel:
        """The model to train or evaluate."""
        settings = class_names(self.labels) if self.labels else {"num_labels": 1, "problem_type": "regression"}
        return build_classifier(self.args, self.tokenizer, settings, self.auto_class)

    def evaluate(self, outputs_of: Outputs, splits: Mapping[str, Dataset]) -> dict[str, float]:
        """Metrics and loss on the validation text and, if there is one, on the test text."""
        found = {}
        for split, prefix in (("validation", ""), ("test", "test_")):
            if split in splits:
                prediction = outputs_of(splits[split])
                values = {**self.metrics(prediction, splits[split]), "loss": prediction.metrics["test_loss"]}
                found |= {prefix + name: float(value) for name, value in values.items()}
        return found

    def metrics(self, prediction: PredictionOutput, examples: Dataset) -> dict[str, float]:
        true, found = prediction.label_ids, prediction.predictions.argmax(-1)
        metrics = {
            "accuracy": (true == found).mean(),
            "macro_f1": f1_score(true, found, average="macro", zero_division=0),
        }
        if len(self.labels) == 2:
            metrics["mcc"] = matthews_corrcoef(true, found)
        return metrics

    def main_metric(self, metrics: Mapping[str, float]) -> str:
        """Name of the main metric: on the test text, if there is one."""
        return f"test_{self.metric}" if f"test_{self.metric}" in metrics else self.metric

    def write_answers(self, outputs_of: Outputs, splits: Mapping[str, Dataset], folder: Path) -> None:
        """Writes the answers to test sets without labels, if the task has any."""

    def card(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Arguments of [`write_model_card`] for a model with these metrics; `answers` goes into the description."""
        metric = self.main_metric(metrics)
        split = "test" if metric.startswith("test_") else "validation"
        return {
            "name": self.text,
            "description": f"to classify {self.what}",
            "answers": f"The classes are {', '.join(sorted(self.labels))}.",
            "metric": Metric(self.metric, metric, metrics[metric], split),
            "dataset": self.text,
            "language": language_of(self.args),
        }


class SampledTask(SequenceTask):
    """A class per text, for recipes that compare trainings on the same texts, see [`ComparisonArguments`].

    Args:
        args ([`ComparisonArguments`]): Flags.
        seed (`int`): Determines the training texts that `max_examples` draws.
    """

    def __init__(self, args: Any, seed: int):
        super().__init__(args)
        self.seed = seed

    def embedded(self) -> dict[str, Dataset]:
        train, rest = embedded_classification(100, 60, seed=0)
        half = len(rest) // 2
        return {
            "train": train,
            "validation": rest.select(range(half)),
            "test": rest.select(range(half, len(rest))),
        }

    def load_splits(self, trains: bool) -> dict[str, Dataset]:
        splits, most = super().load_splits(trains), self.args.max_examples
        if most is not None and most < len(splits["train"]):
            splits["train"] = splits["train"].shuffle(self.seed).select(range(most))
        return splits


class TokenTask(SequenceTask):
    """A tag per word; the tags of a sentence form entities."""

    auto_class, pipeline = "AutoModelForTokenClassification", "token-classification"
    collator = DataCollatorForTokenClassification
    metric = "f1"
    what = "the words of sentences"

    def embedded(self) -> dict[str, Dataset]:
        raise ValueError("task token has no embedded text; give --train_file, and --validation_file or --folds.")

    def load(self, files: list[str] | None, split: str) -> Dataset:
        """Sentences with at least one word."""
        if not files:
            raise ValueError(f"task token reads files, not dataset_name={self.args.dataset_name!r}.")
        columns = self.args.text_column or [None]
        if len(columns) > 1:
            raise ValueError(f"text_column is {columns}, but task token takes one column of words.")
        columns = map(column_of_flag, (columns[0], self.args.label_column))
        return load_token_classification(files, *columns, encoding=self.args.encoding)

    def classes_in(self, texts: Dataset) -> list[str]:
        return entity_labels(texts["tags"])

    def occurring(self, texts: Dataset) -> set[str]:
        """Types of the entities of the texts."""
        return {tag[2:] for tags in texts["tags"] for tag in tags if tag != "O"}

    def words(self, texts: Dataset) -> list[str]:
        return [" ".join(words) for words in texts["tokens"]]

    def encode(self) -> dict[str, Dataset]:
        length = self.args.max_length
        return {
            split: label_words(sentences, self.tokenizer, self.labels, length, f"the {split} text")
            for split, sentences in self.texts.items()
        }

    def metrics(self, prediction: PredictionOutput, examples: Dataset) -> dict[str, float]:
        found = word_tags(prediction.predictions.argmax(-1), prediction.label_ids, examples, self.labels)
        true = examples["tags"][:]
        scores = {
            "precision": entities.precision_score,
            "recall": entities.recall_score,
            "f1": entities.f1_score,
        }
        return {name: score(true, found, zero_division=0) for name, score in scores.items()}


class BenchmarkTask(SequenceTask):
    """A task of GLUE, with its classes and metrics; or the embedded text as such a task."""

    metric = "score"

    def __init__(self, args: Any, glue: GlueTask | None = None):
        super().__init__(args)
        self.glue = glue or GLUE_TASKS[args.task]
        self.validation = self.glue.validation

    @property
    def name(self) -> str:
        return self.glue.name

    def load_splits(self, trains: bool) -> dict[str, Dataset]:
        args, task = self.args, self.glue.name
        if self.glue is EMBEDDED_TASK:
            self.text = EMBEDDED_TEXT
            return self.embedded()
        source = {"folder": args.data_dir} if args.data_dir else {"dataset_name": args.dataset_name}
        self.text = args.dataset_name or Path(args.data_dir).resolve().name
        needed = (*["train"] * trains, *self.validation)
        wanted = ("train", *self.validation, *(self.glue.test.values() if args.submission else ()))
        there = [split for split in wanted if not args.data_dir or find_glue_file(task, split, args.data_dir)]
        return {split: load_glue(task, split, **source) for split in wanted if split in (*needed, *there)}

    def classes_in(self, texts: Dataset) -> Sequence[str]:
        return self.glue.labels or ()

    def answers(self, outputs: np.ndarray) -> list[int] | list[float]:
        """Indices of classes in the order of the task, or scores, from outputs of shape `(examples, classes or 1)`."""
        if not self.labels:
            return outputs[:, 0].tolist()
        numbers = np.array([self.glue.labels.index(name) for name in self.labels])
        return numbers[outputs.argmax(-1)].tolist()

    def evaluate(self, outputs_of: Outputs, splits: Mapping[str, Dataset]) -> dict[str, float]:
        """Metrics of GLUE, losses, and the score, which is the mean of the metrics."""
        metrics, losses = {}, {}
        for split in self.validation:
            prefix = "".join(f"{part}_" for part in split.split("_")[1:])  # mnli: matched or mismatched genres
            prediction = outputs_of(splits[split])
            metric = GlueMetric(None if self.glue is EMBEDDED_TASK else self.glue.name, keep_in_memory=True)
            answers, true = self.answers(prediction.predictions), self.texts[split]["label"]
            found = metric.compute(predictions=answers, references=true)
            metrics |= {prefix + name: value for name, value in found.items()}
            losses[prefix + "loss"] = prediction.metrics["test_loss"]
        return {**metrics, **losses, "score": statistics.fmean(metrics.values())}

    def write_answers(self, outputs_of: Outputs, splits: Mapping[str, Dataset], folder: Path) -> None:
        for title, split in self.glue.test.items():
            if split in splits:
                answers = self.answers(outputs_of(splits[split]).predictions)
                if PartialState().is_main_process:
                    write_submission(folder / f"{title}.tsv", self.glue.name, self.texts[split]["index"], answers)

    def card(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        data = f"{self.glue.title} ({self.text})"
        return {
            "name": self.glue.title,
            "description": f"on {data}",
            "answers": f"It answers with {', '.join(self.labels) or 'a score from 0 to 5'}.",
            "metric": [Metric(name.rpartition("matched_")[2], name, metrics[name]) for name in own_metrics(metrics)],
            "dataset": data,
            "language": "en",
        }


def own_metrics(metrics: Iterable[str]) -> list[str]:
    """Names of the metrics that GLUE defines for a task, without losses and score."""
    return [name for name in metrics if not name.endswith(("loss", "score"))]


CLASSIFIER_TASKS: dict[str, type[SequenceTask]] = {
    "sequence": SequenceTask,
    "token": TokenTask,
    **dict.fromkeys(GLUE_TASKS, BenchmarkTask),
}


def train_classifiers(
    task: SequenceTask,
    trainings: Sequence[Training],
    row_class: type[AnyRow],
    examples: Callable[[], dict[str, Dataset]],
    training_args: ClassifierTrainingArguments,
    saved_as: str,
) -> list[AnyRow]:
    """Trains and evaluates the classifiers of a task; results that an interrupted run left are read.

    Args:
        task ([`SequenceTask`]): The task.
        trainings (sequence of [`Training`]): Its trainings.
        row_class (`type`): Class of the rows.
        examples (callable): Returns the encoded examples of all splits; called when a training needs them.
        training_args ([`ClassifierTrainingArguments`]): Training arguments of the run.
        saved_as (`str`): Folder for the model of the first training, unless the run only evaluates.

    Returns:
        `list`: A row per training.
    """

    def make(training: Training) -> tuple[dict, HeadwiseTrainer, str | None]:
        seed = training.key["seed"]
        with PartialState().main_process_first():
            splits = examples()
        if training.rows:
            train, evaluation = map(splits["train"].select, training.rows)
            splits = {"train": train, "validation": evaluation}
        trainer = train_classifier(task, training.name, seed, splits, training_args)
        row = {
            **training.key,
            "train_examples": len(splits["train"]) if "train" in splits else None,
            "eval_examples": sum(len(splits[split]) for split in task.validation),
            **task.evaluate(partial(predict, trainer), splits),
        }
        answers = Path(training_args.output_dir, SUBMISSION, f"seed-{seed}")
        task.write_answers(partial(predict, trainer), splits, answers)
        return row, trainer, saved_as if training_args.trains and training is trainings[0] else None

    folder = training_args.output_dir
    return [row_class.of(run_or_read(one.name, folder, partial(make, one))) for one in trainings]


def write_classifier_card(
    task: SequenceTask,
    rows: Sequence[TrainingRow],
    config: PreTrainedConfig,
    summary: FinetuneSummary | GlueSummary,
    folder: Path,
    part: str = "",
) -> None:
    """Writes the card of the model of the first row of a task; of several rows, it has mean and standard deviation."""
    row = rows[0]
    metric, model, card = task.main_metric(row.metrics), title_of(summary.model), task.card(row.metrics)
    mean, sd = mean_and_sd([other.metrics[metric] for other in rows])
    over = "" if sd is None else f" Over {len(rows)} trainings, {metric.replace('_', ' ')} is {mean:.3f} ± {sd:.3f}."
    card["name"] = f"{model}, fine-tuned on {card['name']}"
    how = f"{model}, fine-tuned {card['description']} with seed {row.seed}{part}."
    card["description"] = f"{how} {card.pop('answers')}{over}"
    write_model_card(
        folder,
        config=config,
        task=task.pipeline,
        figures=row.metrics,
        provenance=summary.provenance,
        license=task.args.license,
        base_model=task.args.model,
        hub_dataset=task.args.dataset_name,
        **card,
    )


def write_classifier_card_of_run(
    task: SequenceTask, metrics: dict[str, float], config: PreTrainedConfig, summary: Summary, folder: Path, part: str
) -> None:
    """Writes the card of a classifier that a recipe trains once.

    Args:
        task ([`SequenceTask`]): Its task.
        metrics (`dict[str, float]`): Its metrics.
        config (`PreTrainedConfig`): Its configuration.
        summary ([`Summary`]): Results of the recipe, with the number of examples.
        folder (`Path`): Its folder.
        part (`str`): End of the sentence about its training.
    """
    row = FinetuneRow(
        seed=summary.provenance["seed"],
        fold=None,
        train_examples=summary.train_examples,
        eval_examples=summary.eval_examples,
        metrics=metrics,
    )
    write_classifier_card(task, [row], config, summary, folder, part)


def print_made(folder: Path) -> None:
    """Prints where the results are."""
    made = "".join(f", {name}/" for name in (MODEL_FOLDER, SUBMISSION) if (folder / name).is_dir())
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv{made}.")
