# Licensed under the Apache License, Version 2.0.
"""Tasks of `lexical_knowledge.py`: texts, tokenizers and models.

classification   a class per text: LSTM classifier with attention, bag-of-words proxy
translation      a translation per sentence: LSTM encoder–decoder with attention, proxy of the source words
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, PreTrainedTokenizerBase

from .. import (
    LstmConfig,
    LstmForSequenceClassification,
    LstmSeq2SeqConfig,
    LstmSeq2SeqForConditionalGeneration,
    ProxyForSeq2Seq,
    ProxyForSequenceClassification,
)
from ..data import (
    align_labels,
    embedded_classification,
    embedded_translation,
    load_class_files,
    load_classification,
    load_parallel,
    load_word_vectors,
    train_word_tokenizer,
)
from ..data.tables import column_of_flag
from .arguments.lexical_knowledge import LexicalArguments
from .classifying import all_words, class_names, classes_to_learn, encode
from .translation import drop_long_pairs, tokenize_pairs, train_shared_tokenizer


logger = logging.getLogger(__name__)


@dataclass
class LexicalCorpus:
    """Tokenized examples to train on and to evaluate on."""

    train: Dataset
    evaluation: Dataset
    tokenizer: PreTrainedTokenizerBase
    collator: Callable[[list[dict]], Any]
    batch_size: int
    labels: list[str] | None = None
    vectors: dict[str, np.ndarray] = field(default_factory=dict)

    def batches(self, rows: list[int] | None = None) -> list[dict[str, torch.Tensor]]:
        """Batches of the examples to evaluate on, or of some of them."""
        examples = (self.evaluation if rows is None else self.evaluation.select(rows)).to_list()
        starts = range(0, len(examples), self.batch_size)
        return [dict(self.collator(examples[start : start + self.batch_size])) for start in starts]


class LexicalClassification:
    """A class per text."""

    lstm, proxy = LstmForSequenceClassification, ProxyForSequenceClassification

    def __init__(self, args: LexicalArguments):
        self.args = args

    def embedded(self) -> tuple[tuple[Dataset, Dataset], str]:
        return embedded_classification(250, 100, seed=0), "documentation of eight Python libraries"

    def load(self, files: list[str] | None, **hub: Any) -> Dataset:
        """Texts with classes, from tables or from one path per class."""
        text, label = map(column_of_flag, self.args.columns or (None, None))
        if files and all("=" in file for file in files):
            if self.args.columns:
                raise ValueError(f"columns {self.args.columns} need tables, but {files[0]} is the path of a class.")
            paths = dict(file.split("=", 1) for file in files)
            if len(paths) < len(files):
                raise ValueError(f"{' '.join(files)} have two paths for a class; give one file or folder per class.")
            texts = load_class_files(paths, self.args.encoding)
        else:
            texts = load_classification(files, text, label, encoding=self.args.encoding, **hub)
        if "text_pair" in texts.column_names:
            raise ValueError("the examples are pairs of texts; give columns, one of texts and one of labels.")
        return texts

    def corpus(self, train: Dataset, validation: Dataset, batch_size: int) -> LexicalCorpus:
        args = self.args
        names = classes_to_learn(train)
        tokenizer = train_word_tokenizer(all_words(train), args.min_count, args.vocab_size)
        splits = [
            _drop_empty(encode(align_labels(texts, names), tokenizer, args.max_length))
            for texts in (train, validation)
        ]
        vectors = {}
        if args.glove is not None:
            vectors = load_word_vectors(args.glove, tokenizer.get_vocab())
            size = len(next(iter(vectors.values())))
            if size != args.embedding_size:
                raise ValueError(
                    f"the vectors of glove {args.glove} have {size} numbers, but embedding_size is "
                    f"{args.embedding_size}; set embedding_size={size}."
                )
        return LexicalCorpus(*splits, tokenizer, DataCollatorWithPadding(tokenizer), batch_size, names, vectors)

    def lstm_config(self, corpus: LexicalCorpus, **settings: Any) -> LstmConfig:
        args = self.args
        return LstmConfig(
            vocab_size=len(corpus.tokenizer),
            embedding_size=args.embedding_size,
            hidden_size=args.hidden_size,
            attention_size=args.hidden_size,
            num_hidden_layers=args.num_hidden_layers,
            dropout=args.dropout,
            pad_token_id=corpus.tokenizer.pad_token_id,
            **class_names(corpus.labels),
            **settings,
        )

    def proxy_settings(self, corpus: LexicalCorpus) -> dict[str, Any]:
        return class_names(corpus.labels)


class LexicalTranslation:
    """A translation per sentence."""

    lstm, proxy = LstmSeq2SeqForConditionalGeneration, ProxyForSeq2Seq

    def __init__(self, args: LexicalArguments):
        self.args = args

    def embedded(self) -> tuple[tuple[Dataset, Dataset], str]:
        return embedded_translation(10_000, 300, seed=0), "German number words to English"

    def load(self, files: list[str] | None, **hub: Any) -> Dataset:
        columns = tuple(map(column_of_flag, self.args.columns or (None, None)))
        if files and len(files) > 2:
            raise ValueError(f"task translation needs a source and a target file, or one table, got {files}.")
        if files and len(files) == 2:
            if self.args.columns:
                raise ValueError(f"columns {self.args.columns} need tables, but {' and '.join(files)} are plain text.")
            return load_parallel(*files, encoding=self.args.encoding)
        return load_parallel(files, None, *columns, encoding=self.args.encoding, **hub)

    def corpus(self, train: Dataset, validation: Dataset, batch_size: int) -> LexicalCorpus:
        args = self.args
        tokenizer = train_shared_tokenizer(train, args.vocab_size)
        train, evaluation = (tokenize_pairs(pairs, tokenizer) for pairs in (train, validation))
        train = drop_long_pairs(train, args.max_length)
        return LexicalCorpus(train, evaluation, tokenizer, DataCollatorForSeq2Seq(tokenizer), batch_size)

    def lstm_config(self, corpus: LexicalCorpus, **settings: Any) -> LstmSeq2SeqConfig:
        args, tokenizer = self.args, corpus.tokenizer
        return LstmSeq2SeqConfig(
            vocab_size=len(tokenizer),
            embedding_size=args.embedding_size,
            hidden_size=args.hidden_size,
            readout_size=args.hidden_size,
            num_hidden_layers=args.num_hidden_layers,
            bidirectional=True,
            dropout=args.dropout,
            readout=args.readout,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
            **settings,
        )

    def proxy_settings(self, corpus: LexicalCorpus) -> dict[str, Any]:
        return {"eos_token_id": corpus.tokenizer.eos_token_id}


LexicalTask = LexicalClassification | LexicalTranslation
LEXICAL_TASKS: dict[str, type[LexicalTask]] = {
    "classification": LexicalClassification,
    "translation": LexicalTranslation,
}


def _drop_empty(examples: Dataset) -> Dataset:
    """Examples whose text has words."""
    filled = [row for row, ids in enumerate(examples["input_ids"]) if len(ids)]
    if not filled:
        raise ValueError("every text is empty; give texts with words.")
    if len(filled) < len(examples):
        logger.warning("%d of %d texts have no words and are left out.", len(examples) - len(filled), len(examples))
    return examples.select(filled)


def read_lexical_splits(task: LexicalTask, args: LexicalArguments, seed: int) -> tuple[tuple[Dataset, Dataset], str]:
    """Texts to train on and to evaluate on, and the name of the data."""
    if args.is_embedded:
        return task.embedded()
    hub = {"dataset_name": args.dataset_name, "dataset_config": args.dataset_config}
    train = task.load(args.train_file, **({} if args.train_file else {**hub, "split": args.dataset_split}))
    name = _name_of_text(args)
    if args.validation_file is not None:
        return (train, task.load(args.validation_file)), name
    if args.validation_split is not None:
        return (train, task.load(None, **hub, split=args.validation_split)), name
    fraction = 0.1 if args.validation_fraction is None else args.validation_fraction
    if len(train) * min(fraction, 1 - fraction) < 1:
        raise ValueError(
            f"validation_fraction={fraction} of {len(train)} examples leaves one side empty; give validation_file."
        )
    parts = train.train_test_split(fraction, seed=seed)
    return (parts["train"], parts["test"]), name


def _name_of_text(args: LexicalArguments) -> str:
    """The dataset and its configuration, or the files, each with its folder."""
    if args.dataset_name is not None:
        return ", ".join(filter(None, (args.dataset_name, args.dataset_config)))
    paths = (Path(file.rpartition("=")[2]).absolute() for file in args.train_file)
    return ", ".join("/".join(path.parts[1:][-2:]) for path in paths)
