# Licensed under the Apache License, Version 2.0.
"""What `prune_heads.py` can take heads from: text, model and metric of each task.

text-classification    a small BERT, or a checkpoint; accuracy
causal-lm              a small Llama or another decoder, or a checkpoint; perplexity of text in blocks
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from classifying import (
    AUTO_CLASS,
    all_words,
    class_names,
    classes_of,
    classes_to_learn,
    encode,
    from_checkpoint,
    load_classifier,
    refuse_sizes,
    small_bert,
    without_blanks,
)
from datasets import Dataset
from small_models import (
    CAUSAL_CLASS,
    NextTokenCollator,
    architecture_row,
    decoder_class,
    pad_by_end,
    readable_name,
    small_config,
)
from transformers import AutoTokenizer, DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from hf_attn_dynamics import headwise_model
from hf_attn_dynamics.data import (
    align_labels,
    embedded_classification,
    embedded_splits,
    load_classification,
    pack_blocks,
    train_byte_level_bpe,
)
from hf_attn_dynamics.data import load_texts as load_running_text
from hf_attn_dynamics.data.tables import column_of_flag
from hf_attn_dynamics.model_card import title_of
from hf_attn_dynamics.models.headwise_classes import twin_class
from hf_attn_dynamics.runs import refuse_flags


EMBEDDED_CHARACTERS = 1_000_000
OF_DECODERS = ("architecture", "num_key_value_heads")


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids).mean())}


class Task:
    """What all tasks share; each names what is its own.

    Attributes:
        metric (`str`): What models are compared by.
        auto_class (`str`): Auto class of the models.
        hub_task (`str`): Pipeline of the models that are saved.
        compute_metrics (`Callable`, *optional*): Of the trainer.
        text, model_name (`str`): What to call them; once the text is read, and a model is built.
    """

    metric: str
    auto_class: str
    hub_task: str
    compute_metrics: Any = None
    text = ""

    def __init__(self, args: Any):
        self.args = args
        self.train: Dataset
        self.validation: Dataset

    @property
    def model_name(self) -> str:
        return title_of(self.args.model_name) if self.args.model_name else self.small_name

    @property
    def small_name(self) -> str:
        """What to call a model without a checkpoint."""
        raise NotImplementedError

    @classmethod
    def check(cls, args: Any) -> None:
        """Refuses flags that are not read.

        Raises:
            ValueError: naming the flag.
        """
        raise NotImplementedError

    def read(self, is_trained: bool) -> None:
        """Reads `train`, `validation` and `text`.

        Args:
            is_trained (`bool`): Whether the model with all heads is trained.
        """
        args = self.args
        if not args.train_file and not args.dataset_name:
            self.train, self.validation, self.text = self.embedded()
            return
        hub = {"dataset_name": args.dataset_name, "dataset_config": args.dataset_config}
        self.train = self.load(args.train_file, **hub, split=args.dataset_split)
        if args.validation_file:
            self.validation = self.load(args.validation_file, dataset_name=None)
        elif args.dataset_name:
            self.validation = self.load(None, **hub, split=args.validation_split)
        else:
            raise ValueError("no text to evaluate on: name a validation_file.")
        self.text = args.dataset_name or ", ".join(Path(file).name for file in args.train_file)

    def embedded(self) -> tuple[Dataset, Dataset, str]:
        raise NotImplementedError

    def load(self, files: list[str] | None, **source: Any) -> Dataset:
        raise NotImplementedError

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model with all heads, before it is trained here."""
        raise NotImplementedError

    def examples(self, texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        raise NotImplementedError

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        raise NotImplementedError

    def value(self, metrics: dict[str, float]) -> float:
        """The metric, from what a trainer evaluates."""
        return metrics[f"eval_{self.metric}"]

    def description(self, config: Any, heads: str) -> str:
        """Of a model with these heads, for its card."""
        raise NotImplementedError


class TextClassification(Task):
    """Texts with labels."""

    metric, auto_class, hub_task = "accuracy", AUTO_CLASS, "text-classification"
    compute_metrics = staticmethod(accuracy)
    small_name = "small BERT"

    @classmethod
    def check(cls, args: Any) -> None:
        refuse_flags(args, dict.fromkeys(OF_DECODERS, "it is of task causal-lm"))
        if args.model_name:
            refuse_sizes(args, "dropout", "attention_dropout")

    def embedded(self) -> tuple[Dataset, Dataset, str]:
        return (*embedded_classification(seed=0), "documentation of eight Python libraries")

    def load(self, files: list[str] | None, **source: Any) -> Dataset:
        columns = {
            "text_column": self.args.text_column and [column_of_flag(name) for name in self.args.text_column],
            "label_column": column_of_flag(self.args.label_column),
        }
        return load_classification(files, **columns, **source)

    def read(self, is_trained: bool) -> None:
        super().read(is_trained)
        if self.args.train_file or self.args.dataset_name:
            self.train, self.validation = without_blanks(self.train), without_blanks(self.validation)
        learnt = classes_to_learn(self.train)
        self.order = classes_of("model_name", self.args.model_name, learnt, not is_trained, self.text)

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        args, labels = self.args, class_names(self.order)
        if args.model_name:
            tokenizer = from_checkpoint("model_name", AutoTokenizer.from_pretrained, args.model_name)
            return load_classifier("model_name", args.model_name, AUTO_CLASS, labels), tokenizer
        tokenizer = train_byte_level_bpe(all_words(self.train), args.vocab_size, kind="bert")
        dropout = {"hidden_dropout_prob": args.dropout, "attention_probs_dropout_prob": args.attention_dropout}
        return headwise_model(small_bert(args, tokenizer, **dropout, **labels), AUTO_CLASS), tokenizer

    def examples(self, texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        return encode(align_labels(texts, self.order), tokenizer, self.args.max_length)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorWithPadding(tokenizer)

    def description(self, config: Any, heads: str) -> str:
        classes = ", ".join(sorted(config.label2id))
        return f"A classifier of texts ({self.model_name}) with {heads}. The classes are {classes}."


class CausalLanguageModel(Task):
    """Running text, in blocks."""

    metric, auto_class, hub_task = "perplexity", CAUSAL_CLASS, "text-generation"

    @property
    def small_name(self) -> str:
        return f"small {readable_name(self.row)}"

    @property
    def row(self) -> Any:
        return architecture_row(self.args.architecture or "llama")

    @classmethod
    def check(cls, args: Any) -> None:
        refuse_flags(args, {"label_column": "running text has no labels"})
        if args.text_column and len(args.text_column) > 1:
            raise ValueError(f"text_column {args.text_column} names several columns, but running text is one.")
        if args.model_name:
            sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
            names = (*sizes, *OF_DECODERS, "dropout", "attention_dropout")
            refuse_flags(args, dict.fromkeys(names, "it is of the small decoder, and a checkpoint is named"))
        elif decoder_class(row := architecture_row(args.architecture or "llama")) is None:
            raise ValueError(f"architecture {row.stock_type} has no head for task causal-lm.")

    def embedded(self) -> tuple[Dataset, Dataset, str]:
        parts = embedded_splits(max_characters=EMBEDDED_CHARACTERS)
        train, validation = (
            Dataset.from_dict({"text": [line for document in part for line in document.split("\n")]}) for part in parts
        )
        return train, validation, "documentation of Python and of installed libraries"

    def load(self, files: list[str] | None, **source: Any) -> Dataset:
        columns = {"text_column": self.args.text_column[0]} if self.args.text_column else {}
        return load_running_text(files, **columns, **source)

    def build(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        args = self.args
        if args.model_name:
            tokenizer = from_checkpoint("model_name", AutoTokenizer.from_pretrained, args.model_name)
            pad_by_end(tokenizer)
            return from_checkpoint("model_name", headwise_model, args.model_name, CAUSAL_CLASS), tokenizer
        tokenizer = train_byte_level_bpe(self.train["text"], args.vocab_size)
        config = small_config(
            self.row,
            tokenizer,
            length=args.max_length,
            num_hidden_layers=args.num_hidden_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_key_value_heads=args.num_key_value_heads,
            dropout=args.dropout,
            attention_dropout=args.attention_dropout,
            **({} if self.row.is_decoder else {"is_decoder": True}),
        )
        return twin_class(decoder_class(self.row))(config), tokenizer

    def examples(self, texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        return pack_blocks(texts, tokenizer, self.args.max_length)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        return NextTokenCollator(tokenizer)

    def value(self, metrics: dict[str, float]) -> float:
        return math.exp(metrics["eval_loss"])

    def description(self, config: Any, heads: str) -> str:
        return f"A causal language model ({self.model_name}) with {heads}."


TASKS: dict[str, type[Task]] = {"text-classification": TextClassification, "causal-lm": CausalLanguageModel}
