# Licensed under the Apache License, Version 2.0.
"""What recipes that classify share: arguments, encoded texts, checkpoints, and the training of one classifier."""

import contextlib
import copy
import logging
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoTokenizer,
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
from ..models.size_limits import check_folder
from ..training import show_progress, train_from_newest
from .arguments.classifying import DEFAULT_LENGTH, ClassifierArguments
from .run import cpu_only


logger = logging.getLogger("hf_attn_dynamics.recipes.classifying")

AUTO_CLASS = "AutoModelForSequenceClassification"
DEMONSTRATION_RATE, FINE_TUNING_RATE = 2e-3, 3e-5
# Files that tokenizers are read from.
TOKENIZER_FILE = re.compile(r"tokenizer|vocab|merges|spiece|sentencepiece|source|target")


@dataclass
class ClassifierTrainingArguments(HeadwiseTrainingArguments):
    """[`HeadwiseTrainingArguments`] with defaults for fine-tuning.

    These defaults differ: `learning_rate` 3e-5 for a checkpoint and 2e-3 for the small BERT, `guidance_weight` 0,
    `per_device_train_batch_size` 32, `per_device_eval_batch_size` 128, `warmup_steps` 0.06,
    `train_sampling_strategy` group_by_length, `save_strategy` no, `report_to` none.
    """

    learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate; 3e-5 for a checkpoint, 2e-3 for the small BERT."}
    )
    guidance_weight: str = field(
        default="0",
        metadata={"help": "Initial weight of the guidance loss of a guided checkpoint, or auto."},
    )
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Examples of a training batch."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Examples of an evaluation batch."})
    warmup_steps: float = field(default=0.06, metadata={"help": "Steps of linear warm-up, or their fraction."})
    train_sampling_strategy: str = field(default="group_by_length", metadata={"help": "Order of the examples."})
    save_strategy: str = field(default="no", metadata={"help": "The model of the first seed is kept in any case."})
    report_to: str | None = field(default="none", metadata={"help": "Trackers to report to."})

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        super().__post_init__()

    @property
    def trains(self) -> bool:
        """Whether there is anything to train, or a classifier is evaluated as it is."""
        return self.num_train_epochs > 0 or self.max_steps > 0

    def check_trains(self, args: ClassifierArguments) -> None:
        """Refuses to evaluate a model as it is that nobody has trained, or several times."""
        if self.trains:
            return
        if not args.model:
            raise ValueError("num_train_epochs=0 evaluates a classifier as it is; name it in model.")
        if (args.num_seeds or len(args.seeds or ())) > 1:
            raise ValueError(
                f"num_train_epochs=0 evaluates a classifier as it is, which no seed changes; leave out "
                f"{'seeds' if args.seeds else 'num_seeds'}."
            )

    def choose_defaults(self, args: ClassifierArguments) -> None:
        """Sets learning rate and length of texts to what suits the model, where they are not given."""
        name = args.model
        config = from_checkpoint("model", AutoConfig.from_pretrained, name) if name else None
        args.max_length = fitting_length("max_length", args.max_length, DEFAULT_LENGTH, config)
        if self.learning_rate is None:
            self.learning_rate = FINE_TUNING_RATE if name else DEMONSTRATION_RATE


def text_columns(texts: Dataset) -> list[str]:
    """Names of the one or two columns of texts."""
    return [name for name in ("text", "text_pair") if name in texts.column_names]


def without_blanks(texts: Dataset) -> Dataset:
    """Texts, or pairs of texts, with something in them."""
    sides = [texts[name] for name in text_columns(texts)]
    filled = [row for row, cells in enumerate(zip(*sides)) if "".join(cells).strip()]
    if len(filled) < len(texts):
        logger.warning("%d of %d texts are blank and left out.", len(texts) - len(filled), len(texts))
    return texts.select(filled)


def warn_of_repeats(train: Dataset, evaluation: Dataset, split: str) -> None:
    """Says how many examples to evaluate on have been trained on, too, which makes figures too good."""
    shared = set(train.column_names) & set(evaluation.column_names)
    columns = [name for name in ("text", "text_pair", "tokens") if name in shared]
    seen, others = ([*zip(*(map(repr, texts[name]) for name in columns))] for texts in (train, evaluation))
    if repeated := sum(map(set(seen).__contains__, others)):
        logger.warning(
            "%d of %d examples of the %s text are in the training text, too, which makes figures too good.",
            repeated,
            len(others),
            split,
        )


def occurring(texts: Dataset) -> set[str]:
    """Names of the classes that occur."""
    return {texts.features["label"].names[label] for label in texts["label"]}


def classes_to_learn(train: Dataset) -> list[str]:
    """Names of the classes of texts to train on.

    Raises:
        ValueError: if all texts are of one class.
    """
    if len(classes := occurring(train)) < 2:
        raise ValueError(f"all texts to train on have the label {', '.join(classes)}; two classes are needed.")
    return train.features["label"].names


def check_room(texts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Refuses a length that leaves no room for a token of each text."""
    columns = text_columns(texts)
    special = tokenizer.num_special_tokens_to_add(pair=len(columns) == 2)
    if max_length < special + len(columns):
        raise ValueError(f"max_length is {max_length}, but {special} special tokens are added; make it larger.")


def encode(texts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Tokens of texts, or of pairs of texts, with their labels if they have any; cut to a length."""
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
    """All texts, first and second of pairs, for those who look at words only."""
    return [text for name in text_columns(texts) for text in texts[name]]


def tokenizer_for(words: Sequence[str], name: str, args: ClassifierArguments) -> PreTrainedTokenizerBase:
    """That of the checkpoint, or one trained on the texts; warns if it knows little of them."""
    if args.model:
        tokenizer = from_checkpoint("model", AutoTokenizer.from_pretrained, args.model)
    else:
        tokenizer = train_byte_level_bpe(words, args.vocab_size, kind="bert")
    warn_of_unknown(words, tokenizer, name)
    return tokenizer


def model_inputs(examples: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """What a model is given; other columns are for the figures."""
    names = {*tokenizer.model_input_names, "labels"}
    return examples.select_columns([name for name in examples.column_names if name in names])


def class_names(names: Sequence[str]) -> dict[str, Any]:
    """What a configuration is told of its classes."""
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {label: number for number, label in enumerate(names)},
        "problem_type": "single_label_classification",
    }


def small_bert(args: Any, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> HeadwiseBertConfig:
    """A BERT of the sizes among the arguments."""
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


def from_checkpoint(flag: str, load: Callable[..., Any], name: str, *arguments: Any, **settings: Any) -> Any:
    """Loads from the checkpoint that a flag names.

    Args:
        flag, name (`str`): The flag, and the folder or name on the Hub that it gives.
        load (`Callable`): Such as `AutoConfig.from_pretrained`; it is given the name and all other arguments.

    Raises:
        ValueError: with one line that names the flag, the checkpoint and what is missing.
    """
    folder, is_tokenizer = Path(name), getattr(load, "__self__", None) is AutoTokenizer
    files = [path.name for path in sorted(folder.glob("*")) if TOKENIZER_FILE.match(path.name)]
    problem = ""
    try:
        check_folder(name)
        if not folder.is_dir():
            # Transformers knows no more of a name than that the Hub did not give it.
            problem = "there is no such folder, and from the Hub: "
        elif is_tokenizer:
            problem = f"its tokenizer, of which there is {' and '.join(files) or 'no file'}, cannot be read: "
            if not files:
                raise FileNotFoundError("save it there with tokenizer.save_pretrained().")
        elif not (folder / "config.json").is_file():
            raise FileNotFoundError("it has no config.json.")
        loaded = load(name, *arguments, **settings)
        # Some tokenizers are built without their files.
        if is_tokenizer and len(loaded) <= len(set(loaded.all_special_ids)):
            raise FileNotFoundError("it has no tokens but special ones.")
        return loaded
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{problem}{' '.join(str(error).split())}"
        raise ValueError(f"{flag} {str(name)!r} cannot be loaded: {why}") from error


def fitting_length(flag: str, length: int | None, default: int, config: PreTrainedConfig | None) -> int:
    """Tokens after which texts are cut: `default` or, where a model has positions for fewer, as many as these.

    Args:
        flag (`str`): The flag that asks for a length.
        length (`int`, *optional*): What it asks for, instead.
        default (`int`): What is taken without.
        config (`PreTrainedConfig`, *optional*): Configuration of the model, headwise or stock; none of a model that
            is built for any length.

    Raises:
        ValueError: naming the flag, if it asks for more tokens than the model has positions for.

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
    """Configuration of a checkpoint if it is a classifier, and names of classes in its order if it knows these."""
    config = from_checkpoint(flag, AutoConfig.from_pretrained, name)
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
    auto_class: str = AUTO_CLASS,
    are_all: bool = True,
) -> list[str]:
    """Names of the classes in the order of the checkpoint; in their own, if a new layer is to learn them.

    Args:
        flag, name (`str`): What names the checkpoint, and its name, if there is one.
        labels (sequence of `str`): Names of the classes of the text; none of a text with scores.
        is_trained (`bool`): Whether the checkpoint is to classify as it is.
        what (`str`): What to call the text.
        auto_class (`str`): Which layer on top it needs.
        are_all (`bool`): Whether these are all classes, as in a training text; a checkpoint that is to classify as it
            is may else have more.

    Raises:
        ValueError: if the checkpoint does not classify into these, although it is to.
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
            "The classes of %s are but numbered; they are taken to be %s, in this order. If they are not, say what "
            "they are in id2label of its config.json.",
            name,
            ", ".join(order),
        )
    return order


def load_classifier(flag: str, name: str, auto_class: str, settings: dict[str, Any]) -> PreTrainedModel:
    """The headwise model of a checkpoint, with the layer on top that it has if that knows these classes, or a new one.

    Args:
        flag (`str`): The flag that names the checkpoint.
        name (`str`): Folder, or name on the Hub.
        auto_class (`str`): Which layer on top it is to have.
        settings (`dict`): What its configuration is told of the classes: see [`class_names`].
    """
    # A layer for another number of classes, if there is one, is replaced.
    with without_load_report():
        model, loaded = from_checkpoint(
            flag, headwise_model, name, auto_class, ignore_mismatched_sizes=True, output_loading_info=True, **settings
        )
    body = f"{model.base_model_prefix}."
    # What only some layers on top need, a checkpoint for another task may lack.
    others = [*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])]
    if missing := sorted(key for key in others if key.startswith(body) and ".pooler." not in key):
        warn_once(
            f"{len(missing)} weights of the model are not in {name}, or not in this size, such as {missing[0]}; they "
            "are drawn at random."
        )
    config, order = order_in_checkpoint(flag, name, list(settings.get("id2label", {}).values()), auto_class)
    if config and order is None:
        # One for as many others is not, but knows nothing of these.
        for part, module in model.named_children():
            if part != model.base_model_prefix:
                initialise(model, module)
    return model


@contextlib.contextmanager
def without_load_report() -> Iterator[None]:
    """Keeps Transformers from listing the weights of layers that are replaced, each time that a model is loaded."""
    loading = logging.getLogger("transformers.modeling_utils")
    shown = lambda record: "LOAD REPORT" not in record.getMessage()  # noqa: E731
    loading.addFilter(shown)
    try:
        yield
    finally:
        loading.removeFilter(shown)


@cache
def warn_once(message: str) -> None:
    """Logs a warning, of models that are built for each training, once a process."""
    logger.warning(message)


def build_classifier(
    args: ClassifierArguments,
    tokenizer: PreTrainedTokenizerBase,
    settings: dict[str, Any],
    auto_class: str = AUTO_CLASS,
) -> PreTrainedModel:
    """The checkpoint, or a small BERT, with a layer for these classes: see [`class_names`]."""
    if args.model:
        return load_classifier("model", args.model, auto_class, settings)
    # The fast CPU kernels have no dropout.
    return headwise_model(small_bert(args, tokenizer, attention_probs_dropout_prob=0.0, **settings), auto_class)


def check_guidance(config: PreTrainedConfig, training_args: ClassifierTrainingArguments) -> None:
    """Refuses guidance of a model that has no guided head."""
    if training_args.guidance_weight not in (None, 0) and not config.guidance:
        raise ValueError(
            f"guidance_weight={training_args.guidance_weight}, but no head of the model is guided; leave it out."
        )


def train_classifier(
    task: Any, name: str, seed: int, splits: Mapping[str, Dataset], training_args: ClassifierTrainingArguments
) -> HeadwiseTrainer:
    """A model for a `SequenceTask` in its trainer: built with a seed and trained on the encoded examples of `splits`.

    Where nothing is to be trained, it is as it was. `name` is that of the training.
    """
    set_seed(seed)
    run_args = copy.copy(training_args)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    run_args.seed = seed
    trainer = HeadwiseTrainer(
        task.build(),
        run_args,
        train_dataset=model_inputs(splits["train"], task.tokenizer) if "train" in splits else None,
        eval_dataset=model_inputs(splits[task.validation[0]], task.tokenizer),
        data_collator=task.collator(task.tokenizer),
        processing_class=task.tokenizer,
    )
    show_progress(trainer, name)
    if run_args.trains:
        train_from_newest(trainer)
    return trainer


def predict(trainer: HeadwiseTrainer, examples: Dataset) -> PredictionOutput:
    """Outputs for examples, in their order, of the model as it is now."""
    # Transformers would group these by length, too, and return them in that order.
    trainer.args.train_sampling_strategy = "random"
    return trainer.predict(model_inputs(examples, trainer.processing_class))


def metric_names(row: Mapping[str, Any]) -> list[str]:
    """Names of the metrics in a row: all that comes after the numbers of examples."""
    return list(row)[list(row).index("eval_examples") + 1 :]


def mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation of a sample, None for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def means_and_sds(rows: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, float | None]:
    """Mean and standard deviation over rows of each of their metrics, as keys of a summary."""
    found = {}
    for name in metric_names(rows[0]):
        found[f"{prefix}{name}_mean"], found[f"{prefix}{name}_sd"] = mean_and_sd([row[name] for row in rows])
    return found
