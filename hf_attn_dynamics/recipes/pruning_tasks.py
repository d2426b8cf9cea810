# Licensed under the Apache License, Version 2.0.
"""Tasks of `prune_heads`: examples, model and metric of each.

text-classification    a small BERT, or a checkpoint; accuracy
causal-lm              a small Llama or another decoder, or a checkpoint; perplexity of running text in blocks
masked-lm              a small RoBERTa or another encoder, or a checkpoint; perplexity of the masked tokens of blocks
image                  a small ViT or DeiT, or a checkpoint, on images that are drawn by code; accuracy
"""

import math
from contextlib import suppress
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import (
    BaseImageProcessor,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ViTImageProcessorPil,
    default_data_collator,
)

from .. import MaskedLanguageModelCollator, headwise_model
from ..data import (
    align_labels,
    embedded_classification,
    embedded_images,
    embedded_splits,
    load_classification,
    load_texts,
    train_byte_level_bpe,
    warn_of_unknown,
)
from ..data.demo.images import PATCH
from ..data.tables import column_of_flag
from ..hub.card import language_of, title_of
from ..models.architectures import Architecture
from ..models.headwise_classes import twin_class
from .arguments.base import refuse_flags
from .arguments.prune_heads import DEFAULT_LENGTH
from .checkpoints import load_config, load_tokenizer, refused
from .classifying import (
    SEQUENCE_CLASSIFIER,
    accuracy,
    all_words,
    class_names,
    classes_of,
    classes_to_learn,
    encode,
    fitting_length,
    load_classifier,
    small_bert,
    warn_of_repeats,
    without_blanks,
)
from .run import named_files
from .small_models import (
    CAUSAL_CLASS,
    CAUSAL_ENDINGS,
    MASKED_CLASS,
    MASKED_ENDINGS,
    SIZE_FLAGS,
    NextTokenCollator,
    architecture_row,
    causal_settings,
    language_model,
    masked_settings,
    packed_blocks,
    pad_by_end,
    readable_name,
    sized_config,
    sizes_of,
    small_config,
)


EMBEDDED_CHARACTERS = 1_000_000
# Flags that only some tasks read; these tasks list them in `reads`.
TASK_FLAGS = ("architecture", "num_key_value_heads", "mlm_probability")
# Flags that task image does not read.
TEXT_FLAGS = (
    "train_file", "validation_file", "importance_file", "dataset_name", "dataset_config", "dataset_split",
    "validation_split", "text_column", "label_column", "encoding",
)  # fmt: skip
TOKEN_FLAGS = ("vocab_size", "max_length")
Processor = PreTrainedTokenizerBase | BaseImageProcessor


class PruningTask:
    """Base class of the tasks.

    Attributes:
        metric (`str`): Main metric.
        auto_class (`str`): Auto class of the models.
        hub_task (`str`): Pipeline of the saved models.
        default_architecture (`str`): Architecture of the small model without --architecture.
        compute_metrics (`Callable`, *optional*): Argument of the trainer.
        reads (`tuple[str, ...]`): Flags of `TASK_FLAGS` that the task reads.
        language (`str`, *optional*): Language of the examples, for the card.
        has_tokens (`bool`): Whether examples are texts.
        text, model_name (`str`): Names of the data, set by `read`, and of the model.
    """

    metric: str
    auto_class: str
    hub_task: str
    default_architecture: str
    compute_metrics: Any = None
    reads: tuple[str, ...] = ()
    has_tokens = True
    text = ""

    def __init__(self, args: Any):
        self.args = args
        self.train: Dataset
        self.validation: Dataset
        self.scored: Dataset

    @property
    def model_name(self) -> str:
        return title_of(self.args.model) if self.args.model else self.small_name

    @property
    def row(self) -> Architecture:
        """Architecture of the small model."""
        return architecture_row(self.args.architecture or self.default_architecture)

    @property
    def small_name(self) -> str:
        """Name of the small model."""
        return f"small {readable_name(self.row)}"

    @classmethod
    def stock_class(cls, row: Architecture) -> str | None:
        """Name of the stock class of an architecture for this task, or `None`."""
        return row.stock_models().get(cls.auto_class)

    @property
    def language(self) -> str | None:
        return language_of(self.args)

    @classmethod
    def check(cls, args: Any) -> None:
        """Raises ValueError for flags that the task does not read, and architectures without a head for the task."""
        for name in TASK_FLAGS:
            if name not in cls.reads:
                readers = [task for task, kind in PRUNING_TASKS.items() if name in kind.reads]
                refuse_flags(args, {name: f"only {', '.join(readers)} read{'s' * (len(readers) == 1)} it"})
        if args.model:
            names = (*SIZE_FLAGS, "vocab_size", "architecture")
            refuse_flags(args, dict.fromkeys(names, "the checkpoint of --model has its own sizes"))
        elif cls.stock_class(row := cls(args).row) is None:
            raise ValueError(f"architecture {row.stock_type} has no head for task {args.task}.")

    @classmethod
    def choose_length(cls, args: Any) -> None:
        """Sets `max_length` to a length that fits the checkpoint, unless the user sets it."""
        config = load_config("model", args.model) if args.model else None
        args.max_length = fitting_length("max_length", args.max_length, DEFAULT_LENGTH, config)

    def read(self, is_trained: bool) -> None:
        """Reads `train`, `validation`, `scored` (what importance is computed on) and `text`.

        Args:
            is_trained (`bool`): Whether the dense model is trained.
        """
        args = self.args
        if not args.train_file and not args.dataset_name:
            self.train, self.validation, self.text = self.embedded()
        else:
            self._read_files()
        files = args.importance_file
        self.scored = self.load(files, dataset_name=None) if files else self.train

    def _read_files(self) -> None:
        args = self.args
        hub = {"dataset_name": args.dataset_name, "dataset_config": args.dataset_config}
        self.train = self.load(args.train_file, **hub, split=args.dataset_split)
        if args.validation_file:
            self.validation = self.load(args.validation_file, dataset_name=None)
        elif args.dataset_name:
            self.validation = self.load(None, **hub, split=args.validation_split)
        else:
            raise ValueError("there is no text to evaluate on; give --validation_file.")
        self.text = args.dataset_name or named_files(args.train_file)

    def embedded(self) -> tuple[Dataset, Dataset, str]:
        raise NotImplementedError

    def load(self, files: list[str] | None, **source: Any) -> Dataset:
        raise NotImplementedError

    def build(self) -> tuple[PreTrainedModel, Processor]:
        """The untrained dense model or the checkpoint, and its tokenizer or image processor."""
        raise NotImplementedError

    def check_examples(self, processor: Processor) -> None:
        """Warns of words that the tokenizer does not know, and of validation texts in the training text."""
        warn_of_unknown(all_words(self.train), processor, self.text)
        warn_of_repeats(self.train, self.validation, "validation")
        if self.scored is not self.train:
            warn_of_repeats(self.scored, self.validation, "validation", "importance")

    def examples(self, rows: Dataset, processor: Processor) -> Dataset:
        """Inputs of the model for `train`, `validation` or `scored`."""
        raise NotImplementedError

    def collator(self, processor: Processor, seed: int) -> Any:
        """The data collator; the seed determines masked tokens."""
        raise NotImplementedError

    def value(self, metrics: dict[str, float]) -> float:
        """The main metric among those of a trainer."""
        return metrics[f"eval_{self.metric}"]

    def description(self, config: Any, heads: str) -> str:
        """Description of a model with these heads for its card."""
        raise NotImplementedError


class TextClassification(PruningTask):
    """Texts with labels."""

    metric, auto_class, hub_task = "accuracy", SEQUENCE_CLASSIFIER, "text-classification"
    compute_metrics = staticmethod(accuracy)
    default_architecture = "bert"

    def embedded(self) -> tuple[Dataset, Dataset, str]:
        return (*embedded_classification(seed=0), "documentation of eight Python libraries")

    def load(self, files: list[str] | None, **source: Any) -> Dataset:
        columns = {
            "text_column": self.args.text_column and [column_of_flag(name) for name in self.args.text_column],
            "label_column": column_of_flag(self.args.label_column),
        }
        return load_classification(files, **columns, **source, encoding=self.args.encoding)

    def read(self, is_trained: bool) -> None:
        super().read(is_trained)
        if self.args.train_file or self.args.dataset_name:
            self.train, self.validation = without_blanks(self.train), without_blanks(self.validation)
        self.scored = without_blanks(self.scored) if self.args.importance_file else self.train
        learnt = classes_to_learn(self.train)
        self.order = classes_of("model", self.args.model, learnt, not is_trained, self.text)

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        args, labels = self.args, class_names(self.order)
        if args.model:
            tokenizer = load_tokenizer("model", args.model)
            return load_classifier("model", args.model, SEQUENCE_CLASSIFIER, labels), tokenizer
        tokenizer = train_byte_level_bpe(all_words(self.train), args.vocab_size, kind="bert")
        dropout = {"hidden_dropout_prob": args.dropout, "attention_probs_dropout_prob": args.attention_dropout}
        return headwise_model(small_bert(args, tokenizer, **dropout, **labels), SEQUENCE_CLASSIFIER), tokenizer

    def examples(self, texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        return encode(align_labels(texts, self.order), tokenizer, self.args.max_length)

    def collator(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
        return DataCollatorWithPadding(tokenizer)

    def description(self, config: Any, heads: str) -> str:
        classes = ", ".join(sorted(config.label2id))
        return f"A classifier of texts ({self.model_name}) with {heads}. The classes are {classes}."


class LanguageModel(PruningTask):
    """Running text in blocks.

    Attributes:
        endings (`tuple[str, ...]`): Endings of the names of the stock classes.
        kind (`str`): Name of such a model in descriptions.
    """

    metric = "perplexity"
    reads = ("architecture", "num_key_value_heads")
    endings: tuple[str, ...]
    kind: str

    @classmethod
    def stock_class(cls, row: Architecture) -> str | None:
        return language_model(row, cls.auto_class, cls.endings)

    @classmethod
    def check(cls, args: Any) -> None:
        super().check(args)
        refuse_flags(args, {"label_column": "running text has no labels"})
        if args.text_column and len(args.text_column) > 1:
            raise ValueError(f"text_column {args.text_column} has several columns, but running text has one.")

    def embedded(self) -> tuple[Dataset, Dataset, str]:
        parts = embedded_splits(max_characters=EMBEDDED_CHARACTERS)
        train, validation = (
            Dataset.from_dict({"text": [line for document in part for line in document.split("\n")]}) for part in parts
        )
        return train, validation, "documentation of Python and of installed libraries"

    def load(self, files: list[str] | None, **source: Any) -> Dataset:
        columns = {"text_column": column_of_flag(self.args.text_column[0])} if self.args.text_column else {}
        return load_texts(files, **columns, **source, encoding=self.args.encoding)

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        args = self.args
        if args.model:
            tokenizer = load_tokenizer("model", args.model)
            with refused("model", args.model):
                return headwise_model(args.model, self.auto_class), tokenizer
        tokenizer = train_byte_level_bpe(self.train["text"], args.vocab_size)
        own_settings = self.own_settings(self.row)
        config = small_config(self.row, tokenizer, length=args.max_length, **sizes_of(args), **own_settings)
        return twin_class(self.stock_class(self.row))(config), tokenizer

    def own_settings(self, row: Architecture) -> dict[str, Any]:
        """Settings of the small model's configuration beside its sizes."""
        raise NotImplementedError

    def examples(self, texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        return packed_blocks(texts, tokenizer, self.args.max_length)

    def value(self, metrics: dict[str, float]) -> float:
        return math.exp(metrics["eval_loss"])

    def description(self, config: Any, heads: str) -> str:
        return f"A {self.kind} ({self.model_name}) with {heads}."


class CausalLanguageModel(LanguageModel):
    """A decoder, which predicts each token from the previous ones."""

    auto_class, endings, hub_task = CAUSAL_CLASS, CAUSAL_ENDINGS, "text-generation"
    default_architecture, kind = "llama", "causal language model"

    def own_settings(self, row: Architecture) -> dict[str, Any]:
        return causal_settings(row)

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        model, tokenizer = super().build()
        pad_by_end(tokenizer)
        return model, tokenizer

    def collator(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
        return NextTokenCollator(tokenizer)


class MaskedLanguageModel(LanguageModel):
    """An encoder, which predicts masked tokens: the same ones in every evaluation, for any batch size."""

    auto_class, endings, hub_task = MASKED_CLASS, MASKED_ENDINGS, "fill-mask"
    default_architecture, kind = "roberta", "masked language model"
    reads = (*LanguageModel.reads, "mlm_probability")

    def own_settings(self, row: Architecture) -> dict[str, Any]:
        return masked_settings(row)

    def collator(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
        return MaskedLanguageModelCollator(tokenizer, self.args.mlm_probability, seed)


class ImageClassification(PruningTask):
    """Images that are drawn by code; the positions of their marks determine the class."""

    metric, auto_class, hub_task = "accuracy", "AutoModelForImageClassification", "image-classification"
    compute_metrics = staticmethod(accuracy)
    default_architecture = "vit"
    reads = ("architecture",)
    has_tokens, language = False, None

    @classmethod
    def check(cls, args: Any) -> None:
        super().check(args)
        refuse_flags(args, dict.fromkeys(TEXT_FLAGS, "the images of task image are drawn by code"))
        refuse_flags(args, dict.fromkeys(TOKEN_FLAGS, "images have no tokens"))

    @classmethod
    def choose_length(cls, args: Any) -> None:
        """Images have no tokens."""

    def embedded(self) -> tuple[Dataset, Dataset, str]:
        return (*embedded_images(seed=0), "drawings of marks whose places tell the class")

    def read(self, is_trained: bool) -> None:
        super().read(is_trained)
        learnt = self.train.features["label"].names
        self.order = classes_of("model", self.args.model, learnt, not is_trained, self.text, self.auto_class)

    def check_examples(self, processor: BaseImageProcessor) -> None:
        """Images need no check: no two of them are alike."""

    def build(self) -> tuple[PreTrainedModel, BaseImageProcessor]:
        args, labels = self.args, class_names(self.order)
        side, _, channels = self.train.features["image"].shape
        if args.model:
            model = load_classifier("model", args.model, self.auto_class, labels)
            if (model.config.image_size, model.config.num_channels) != (side, channels):
                raise ValueError(
                    f"model {args.model!r} takes images of {model.config.image_size} pixels and "
                    f"{model.config.num_channels} channels, but the images of task image have {side} and {channels}."
                )
        else:
            shape = {"image_size": side, "patch_size": PATCH, "num_channels": channels}
            config = sized_config(self.row, shape, **sizes_of(args), **labels)
            model = headwise_model(config, self.auto_class)
        return model, _image_processor(args.model, {"height": side, "width": side})

    def examples(self, images: Dataset, processor: BaseImageProcessor) -> Dataset:
        examples = align_labels(images, self.order).rename_column("label", "labels").with_format("numpy")
        examples = examples.map(
            lambda batch: processor([image.astype(np.uint8) for image in batch["image"]]),
            batched=True,
            remove_columns="image",
            desc="Processing",
        )
        return examples.with_format("torch")

    def collator(self, processor: BaseImageProcessor, seed: int) -> Any:
        return default_data_collator

    def description(self, config: Any, heads: str) -> str:
        classes = ", ".join(sorted(config.label2id))
        return f"A classifier of images ({self.model_name}) with {heads}. The classes are {classes}."


def _image_processor(checkpoint: str | None, size: dict[str, int]) -> BaseImageProcessor:
    """The processor of a checkpoint, with the mean and standard deviation of its training; the default without one."""
    if checkpoint is not None:
        with suppress(OSError):  # a checkpoint without processor
            return ViTImageProcessorPil.from_pretrained(checkpoint, size=size)
    return ViTImageProcessorPil(size=size)


PRUNING_TASKS: dict[str, type[PruningTask]] = {
    "text-classification": TextClassification,
    "causal-lm": CausalLanguageModel,
    "masked-lm": MaskedLanguageModel,
    "image": ImageClassification,
}
