# Licensed under the Apache License, Version 2.0.
"""Shared code of recipes that train classifiers: arguments, encoded texts, checkpoints and the training itself."""

import contextlib
import copy
import logging
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import (
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import PredictionOutput

from .. import HeadwiseBertConfig, HeadwiseTrainer, HeadwiseTrainingArguments, headwise_model
from ..data import class_order, train_byte_level_bpe, warn_of_unknown
from ..models.architectures import ARCHITECTURES
from ..models.compat import initialise
from ..models.headwise_classes import twin_class
from ..training import show_progress, train_from_newest
from ..training.target_columns import target_names
from .arguments.base import OF_A_TEACHER, flag, refuse_flags
from .arguments.classifying import DEFAULT_LENGTH, CheckpointArguments, ClassifierArguments
from .checkpoints import load_config, load_tokenizer, refused
from .run import cpu_only
from .summaries.classifying import TrainingRow


logger = logging.getLogger("hf_attn_dynamics.recipes.classifying")

SEQUENCE_CLASSIFIER = "AutoModelForSequenceClassification"
DEMONSTRATION_RATE, FINE_TUNING_RATE = 2e-3, 3e-5


@dataclass
class ClassifierTrainingArguments(HeadwiseTrainingArguments):
    """[`HeadwiseTrainingArguments`] with defaults for fine-tuning."""

    learning_rate: float | None = flag(
        None,
        f"Learning rate; by default {FINE_TUNING_RATE:g} for a checkpoint, {DEMONSTRATION_RATE:g} for the small BERT.",
    )
    guidance_weight: str = flag("0", "Initial weight of the guidance loss of a guided checkpoint, or auto.")
    per_device_train_batch_size: int = flag(32, "Examples per training batch.")
    per_device_eval_batch_size: int = flag(128, "Examples per evaluation batch.")
    warmup_steps: float = flag(0.06, "Steps of linear warm-up, or their fraction.")
    train_sampling_strategy: str = flag("group_by_length", "Order of the examples.")
    save_strategy: str = flag("no", "When to save checkpoints; the model of the first seed is saved in any case.")
    report_to: str | None = flag("none", "Trackers to report to.")

    without_effect: ClassVar[dict[str, str]] = OF_A_TEACHER  # flags that the recipe ignores

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        refuse_flags(self, self.without_effect)
        super().__post_init__()

    @property
    def trains(self) -> bool:
        """Whether a classifier is trained, or only evaluated."""
        return self.num_train_epochs > 0 or self.max_steps > 0

    def check_trains(self, args: ClassifierArguments) -> None:
        """Raises ValueError if the run only evaluates, and names no checkpoint or several seeds."""
        if self.trains:
            return
        if not args.model:
            raise ValueError("num_train_epochs=0 evaluates a trained classifier; it needs --model.")
        if (args.num_seeds or len(args.seeds or ())) > 1:
            raise ValueError(
                f"num_train_epochs=0 evaluates a trained classifier, which does not depend on seeds; leave out "
                f"--{'seeds' if args.seeds else 'num_seeds'}."
            )

    def choose_defaults(self, args: CheckpointArguments) -> None:
        """Sets the learning rate and the maximum length of texts where the user does not."""
        name = args.model
        config = load_config("model", name) if name else None
        args.max_length = fitting_length("max_length", args.max_length, DEFAULT_LENGTH, config)
        if self.learning_rate is None:
            self.learning_rate = FINE_TUNING_RATE if name else DEMONSTRATION_RATE


def text_columns(texts: Dataset) -> list[str]:
    """Names of the columns with texts: one, or two for pairs."""
    return [name for name in ("text", "text_pair") if name in texts.column_names]


def without_blanks(texts: Dataset) -> Dataset:
    """Texts, or pairs of texts, without blank ones."""
    sides = [texts[name] for name in text_columns(texts)]
    filled = [row for row, cells in enumerate(zip(*sides)) if "".join(cells).strip()]
    if len(filled) < len(texts):
        logger.warning("%d of %d texts are blank and left out.", len(texts) - len(filled), len(texts))
    return texts.select(filled)


def warn_of_repeats(train: Dataset, evaluation: Dataset, split: str, source: str = "training") -> None:
    """Warns if evaluation examples also occur in the training text."""
    shared = set(train.column_names) & set(evaluation.column_names)
    columns = [name for name in ("text", "text_pair", "tokens") if name in shared]
    seen, others = ([*zip(*(map(repr, texts[name]) for name in columns))] for texts in (train, evaluation))
    if repeated := sum(map(set(seen).__contains__, others)):
        logger.warning(
            "%d of %d examples of the %s text also occur in the %s text, so that its metrics are too good.",
            repeated,
            len(others),
            split,
            source,
        )


def occurring(texts: Dataset) -> set[str]:
    """Names of the classes that occur."""
    return {texts.features["label"].names[label] for label in texts["label"]}


def classes_to_learn(train: Dataset) -> list[str]:
    """Names of the classes of texts to train on.

    Raises:
        ValueError: if all texts have the same class.
    """
    if len(classes := occurring(train)) < 2:
        raise ValueError(f"all training texts have the label {', '.join(classes)}; two classes are needed.")
    return train.features["label"].names


def check_room(texts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Raises ValueError if `max_length` leaves no room for a token of each text."""
    columns = text_columns(texts)
    special = tokenizer.num_special_tokens_to_add(pair=len(columns) == 2)
    if max_length < special + len(columns):
        raise ValueError(f"max_length must be greater than the number of special tokens, {special}, got {max_length}.")


def encode(texts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Token ids of texts, or of pairs of texts, truncated to `max_length`, with the labels if there are any."""
    check_room(texts, tokenizer, max_length)
    columns = text_columns(texts)
    encoded = texts.map(
        lambda batch: tokenizer(*(batch[name] for name in columns), truncation=True, max_length=max_length),
        batched=True,
        remove_columns=columns,
        desc="Tokenizing",
    )
    return encoded.rename_column("label", "labels") if "label" in encoded.column_names else encoded


def all_words(texts: Dataset) -> list[str]:
    """All texts as one list, of pairs the first and the second ones."""
    return [text for name in text_columns(texts) for text in texts[name]]


def tokenizer_for(words: Sequence[str], name: str, args: CheckpointArguments) -> PreTrainedTokenizerBase:
    """The tokenizer of the checkpoint, or one trained on the texts; warns if many of their words are unknown."""
    if args.model:
        tokenizer = load_tokenizer("model", args.model)
    else:
        tokenizer = train_byte_level_bpe(words, args.vocab_size, kind="bert")
    warn_of_unknown(words, tokenizer, name)
    return tokenizer


def model_inputs(examples: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The columns that the model takes, with those of guidance targets; metrics use the others."""
    names = {*tokenizer.model_input_names, "labels", *target_names([examples.features])}
    return examples.select_columns([name for name in examples.column_names if name in names])


def class_names(names: Sequence[str]) -> dict[str, Any]:
    """Settings of a configuration for single-label classification into these classes."""
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {label: number for number, label in enumerate(names)},
        "problem_type": "single_label_classification",
    }


def small_bert(args: Any, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> HeadwiseBertConfig:
    """Configuration of a BERT with the sizes of the arguments."""
    return HeadwiseBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.max_length,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )


def fitting_length(flag: str, length: int | None, default: int, config: PreTrainedConfig | None) -> int:
    """Maximum number of tokens per text: `length`, or `default` as far as the model has positions.

    Args:
        flag (`str`): Name of the flag.
        length (`int`, *optional*): Its value.
        default (`int`): The length without the flag, unless the model has fewer positions.
        config (`PreTrainedConfig`, *optional*): Configuration of the model, headwise or stock; None for a model that
            is built for the length.

    Raises:
        ValueError: naming the flag, if its value is larger than the number of positions.

    Example:
        >>> config = HeadwiseBertConfig(max_position_embeddings=24)
        >>> fitting_length("max_length", None, 128, config), fitting_length("max_length", 16, 128, config)
        (24, 16)
    """
    row = config and ARCHITECTURES.get(config.model_type.removeprefix("headwise-"))
    most = row and twin_class(row.stock_config).max_positions(config)
    if length is None:
        return min(default, most or default)
    if most and length > most:
        raise ValueError(f"{flag}={length}, but the model has positions for {most} tokens.")
    return length


def order_in_checkpoint(
    flag: str, name: str, labels: Sequence[str], auto_class: str
) -> tuple[PreTrainedConfig | None, list[str] | None]:
    """Configuration of a checkpoint if it is a classifier, and the classes in its order if it has these classes."""
    config = load_config(flag, name)
    head = auto_class.removeprefix("AutoModel")
    if not any(architecture.endswith(head) for architecture in config.architectures or ()):
        return None, None
    return config, class_order(labels, config.id2label)


def classes_of(
    flag: str,
    name: str | None,
    labels: Sequence[str],
    is_trained: bool,
    what: str,
    auto_class: str = SEQUENCE_CLASSIFIER,
    are_all: bool = True,
) -> list[str]:
    """Names of the classes in the order of the checkpoint, or in their own order for a new classification layer.

    Args:
        flag (`str`): The flag that names the checkpoint.
        name (`str`, *optional*): The checkpoint, if there is one.
        labels (sequence of `str`): Names of the classes of the text; empty for scores.
        is_trained (`bool`): Whether the checkpoint is evaluated without training.
        what (`str`): Name of the text, for messages.
        auto_class (`str`): Auto class of the classifier.
        are_all (`bool`): Whether `labels` are all classes, as in a training text; otherwise, a checkpoint that is
            evaluated without training may have more.

    Raises:
        ValueError: if a checkpoint that is evaluated without training has other classes.
    """
    if not name:
        return list(labels)
    config, order = order_in_checkpoint(flag, name, labels, auto_class)
    if not is_trained:
        return list(labels) if order is None else order
    if order is None and config and not are_all:
        return [own for _, own in sorted((int(number), own) for number, own in config.id2label.items())]
    if order is None:
        wanted = f"the classes {', '.join(labels)}" if labels else "one score"
        found = f"has {', '.join(config.id2label.values())}" if config else "is no classifier"
        raise ValueError(f"num_train_epochs=0, but {what} needs a model with {wanted}, and {name} {found}.")
    numbered = all(re.fullmatch(r"LABEL_\d+", own) for own in config.id2label.values())
    if numbered and not all(map(str.isdecimal, labels)):
        logger.warning(
            "The classes of %s have numbers, not names; they are assumed to be %s, in this order. If that is wrong, "
            "name them in id2label of its config.json.",
            name,
            ", ".join(order),
        )
    return order


def load_classifier(flag: str, name: str, auto_class: str, settings: dict[str, Any]) -> PreTrainedModel:
    """The headwise model of a checkpoint, with its classification layer if it has these classes, or else a new one.

    Args:
        flag (`str`): The flag that names the checkpoint.
        name (`str`): Folder, or name on the Hub.
        auto_class (`str`): Auto class of the classifier.
        settings (`dict`): Settings of the configuration, see [`class_names`].
    """
    # A layer for another number of classes is replaced.
    with without_load_report(), refused(flag, name):
        model, loaded = headwise_model(
            name, auto_class, ignore_mismatched_sizes=True, output_loading_info=True, **settings
        )
    body = f"{model.base_model_prefix}."
    # A checkpoint for another task may lack the pooler.
    others = [*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])]
    if missing := sorted(key for key in others if key.startswith(body) and ".pooler." not in key):
        warn_once(
            f"{len(missing)} weights of the model are missing in {name} or have another size, such as {missing[0]}; "
            "they are initialised at random."
        )
    config, order = order_in_checkpoint(flag, name, list(settings.get("id2label", {}).values()), auto_class)
    if config and order is None:
        # A layer for as many other classes was loaded.
        for part, module in model.named_children():
            if part != model.base_model_prefix:
                initialise(model, module)
    return model


@contextlib.contextmanager
def without_load_report() -> Iterator[None]:
    """Hides the list of replaced weights that Transformers logs whenever a model is loaded."""
    loading = logging.getLogger("transformers.modeling_utils")
    shown = lambda record: "LOAD REPORT" not in record.getMessage()  # noqa: E731
    loading.addFilter(shown)
    try:
        yield
    finally:
        loading.removeFilter(shown)


@cache
def warn_once(message: str) -> None:
    """Logs a warning once per process."""
    logger.warning(message)


def build_classifier(
    args: CheckpointArguments,
    tokenizer: PreTrainedTokenizerBase,
    settings: dict[str, Any],
    auto_class: str = SEQUENCE_CLASSIFIER,
) -> PreTrainedModel:
    """The checkpoint, or a small BERT, with a classification layer; for `settings`, see [`class_names`]."""
    if args.model:
        return load_classifier("model", args.model, auto_class, settings)
    # The fast CPU kernels have no dropout.
    return headwise_model(small_bert(args, tokenizer, attention_probs_dropout_prob=0.0, **settings), auto_class)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, as `compute_metrics` of a trainer."""
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids).mean())}


def check_guidance(config: PreTrainedConfig, training_args: ClassifierTrainingArguments) -> None:
    """Raises ValueError if a guidance weight is set and no head of the model is guided."""
    if training_args.guidance_weight not in (None, 0) and not config.guidance:
        raise ValueError(
            f"guidance_weight={training_args.guidance_weight}, but no head of the model is guided; leave it out."
        )


def train_classifier(
    task: Any,
    name: str,
    seed: int,
    splits: Mapping[str, Dataset],
    training_args: ClassifierTrainingArguments,
    model: PreTrainedModel | None = None,
    **settings: Any,
) -> HeadwiseTrainer:
    """The trainer of a model that was built and, unless the run only evaluates, trained with a seed.

    Args:
        task (`SequenceTask`): The task.
        name (`str`): Name of the training.
        seed (`int`): Random seed.
        splits (`dict[str, Dataset]`): Encoded examples.
        training_args ([`ClassifierTrainingArguments`]): Training arguments of the run.
        model (`PreTrainedModel`, *optional*): The model; by default, the task builds it with the seed.
        settings: Other arguments of the trainer.
    """
    set_seed(seed)
    run_args = copy.copy(training_args)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    run_args.seed = seed
    trainer = HeadwiseTrainer(
        model or task.build(),
        run_args,
        train_dataset=model_inputs(splits["train"], task.tokenizer) if "train" in splits else None,
        eval_dataset=model_inputs(splits[task.validation[0]], task.tokenizer),
        data_collator=task.collator(task.tokenizer),
        processing_class=task.tokenizer,
        **settings,
    )
    show_progress(trainer, name)
    if run_args.trains:
        train_from_newest(trainer)
    return trainer


def predict(trainer: HeadwiseTrainer, examples: Dataset) -> PredictionOutput:
    """Outputs of the model for examples, in their order."""
    # Transformers would group the examples by length and return them in that order.
    trainer.args.train_sampling_strategy = "random"
    return trainer.predict(model_inputs(examples, trainer.processing_class))


def mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (of a sample; None for a single value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def means_and_sds(rows: Sequence[TrainingRow], prefix: str = "") -> tuple[dict[str, float], dict[str, float | None]]:
    """Means and standard deviations over rows of each of their metrics, whose names get a prefix."""
    found = {prefix + name: mean_and_sd([row.metrics[name] for row in rows]) for name in rows[0].metrics}
    return {name: mean for name, (mean, _) in found.items()}, {name: sd for name, (_, sd) in found.items()}
