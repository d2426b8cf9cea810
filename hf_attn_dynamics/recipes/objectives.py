# Licensed under the Apache License, Version 2.0.
"""Objectives of `pretrain_ag`: model class, configuration, examples, batches and results of each.

mlm        RoBERTa, or another encoder, predicts masked tokens
clm        Llama, or another decoder, predicts each token from the previous ones
rtd        ELECTRA finds the tokens that a generator replaced: by their frequencies, or by a small model
mlm+nsp    BERT predicts masked tokens, and whether the second of two sentences follows the first
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .. import (
    HeadwiseElectraForJointPreTraining,
    MaskedLanguageModelCollator,
    ReplacedTokenCollator,
)
from ..data import (
    embedded_splits,
    load_documents,
    load_texts,
    pad_sentences,
    sentence_pairs,
    split_sentences,
    token_counts,
)
from ..data.tables import column_of_flag
from ..data.text import boundary_token_ids
from ..models.architectures import ARCHITECTURES
from ..models.headwise_classes import twin_class
from ..training import (
    check_trainer_arguments,
    mean_over_steps,
    replaced_token_metrics,
    replaced_token_predictions,
)
from .arguments.base import refuse_flags
from .small_models import (
    CAUSAL_CLASS,
    CAUSAL_ENDINGS,
    MASKED_CLASS,
    MASKED_ENDINGS,
    NextTokenCollator,
    architecture_row,
    causal_settings,
    language_model,
    masked_settings,
    packed_blocks,
    pad_by_end,
    readable_name,
    sizes_of,
    small_config,
)


Texts = Dataset | IterableDataset
# Tokens that begin and end an example, and that the pattern delim attends to.
BOUNDARIES = (("cls_token", "bos_token"), ("sep_token", "eos_token"))
COUNTED_EXAMPLES = 20_000  # with --streaming; more examples hardly change the frequencies


def without_special(counts: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Counts of tokens, 0 for special tokens."""
    return np.where(np.isin(np.arange(len(counts)), tokenizer.all_special_ids), 0, counts)


def entropy(counts: np.ndarray) -> float:
    """Entropy of frequencies, in nats."""
    fractions = counts[counts > 0] / counts.sum()
    return float(-(fractions * np.log(fractions)).sum())


class Objective:
    """Base class of the objectives.

    Attributes:
        loss (`str`): Name of the loss that runs are compared by, in keys of the summary.
        loss_in_words, mean_over (`str`): Name of this loss in text, and what it is the mean over.
        evaluated, trained (`str`): Its keys in the log of evaluation and of training.
        default_architecture (`str`): Architecture without --architecture.
        auto_class, endings (`str`, `tuple[str, ...]`): Auto class of the models, and endings of the names of its stock
            classes for this objective.
        row, architecture (`Architecture`, `str`): The architecture, and its name in text.
        task (`str`): Pipeline of the saved model.
        tokenizer_kind (`str`): Special tokens of a tokenizer that is trained on the text.
        special_tokens (`tuple`): Special tokens that the objective needs; of each group, a tokenizer must have one.
        trainer_settings (`dict`): Arguments of the trainer.
        plateau (`tuple[str, float]`): Name and loss of a model that has only learnt frequencies; set by `collator`.
    """

    loss = "mlm"
    loss_in_words, mean_over = "masked-language-model loss", "masked tokens"
    evaluated, trained = "eval_loss", "task_loss"
    default_architecture = "roberta"
    auto_class, endings = MASKED_CLASS, MASKED_ENDINGS
    task = "fill-mask"
    tokenizer_kind = "roberta"
    special_tokens: tuple[tuple[str, ...], ...] = (*BOUNDARIES, ("pad_token",), ("mask_token",))
    trainer_settings: dict[str, Any] = {}
    model_class: type[PreTrainedModel]

    def __init__(self, args: Any):
        self.args = args
        self.plateau: tuple[str, float] | None = None
        self.row = architecture_row(args.architecture or self.default_architecture)
        stock_name = language_model(self.row, self.auto_class, self.endings)
        if stock_name is None:
            others = [
                name for name, row in ARCHITECTURES.items() if language_model(row, self.auto_class, self.endings)
            ]
            raise ValueError(
                f"architecture {self.row.stock_type} has no head for objective {args.objective}; these have: "
                f"{', '.join(others)}."
            )
        self.model_class = twin_class(stock_name)
        self.architecture = readable_name(self.row)

    def embedded(self) -> tuple[Texts, Texts]:
        """Training and validation texts of the package."""
        return tuple(
            Dataset.from_dict({"text": [p for d in part for p in d.split("\n")]}) for part in embedded_splits()
        )

    def load(self, files: list[str] | None, dataset_name: str | None = None, **source: Any) -> Texts:
        """Texts of files, or of a dataset of the Hub."""
        return load_texts(files, dataset_name, streaming=self.args.streaming, **self.form, **source)

    @property
    def form(self) -> dict[str, Any]:
        """Column and encoding of the texts."""
        return {"text_column": column_of_flag(self.args.text_column), "encoding": self.args.encoding}

    def strings(self, texts: Texts) -> Iterator[str]:
        """All strings of the texts, for training a tokenizer."""
        return (row["text"] for row in texts)

    def examples(self, texts: Texts, tokenizer: PreTrainedTokenizerBase, seed: int) -> Texts:
        """Token ids of the examples."""
        prepare = packed_blocks if self.args.packing else pad_sentences
        return prepare(texts, tokenizer, self.args.max_length)

    def collator(self, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray, seed: int) -> Any:
        """The data collator, from the counts of tokens; sets `plateau`."""
        self.plateau = ("unigram entropy", entropy(without_special(counts, tokenizer)))
        return MaskedLanguageModelCollator(tokenizer, self.args.mlm_probability, seed)

    def frequencies(self, examples: Texts, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
        """Counts of the tokens of the vocabulary, without padding."""
        counts = token_counts(examples, len(tokenizer), limit=COUNTED_EXAMPLES if self.args.streaming else None)
        counts[tokenizer.pad_token_id] = 0
        return counts

    def check(self, training_args: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError for a tokenizer or training arguments that do not suit the objective."""
        self.check_tokenizer(tokenizer)
        check_trainer_arguments(training_args, MaskedLanguageModelCollator(tokenizer, self.args.mlm_probability))

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError if a special token is missing."""
        missing = [names for names in self.special_tokens if all(getattr(tokenizer, name) is None for name in names)]
        if missing:
            raise ValueError(
                f"tokenizer_name {self.args.tokenizer_name!r} has no {' and no '.join(map(' or '.join, missing))}, "
                f"but objective {self.args.objective} needs it; add it by tokenizer.add_special_tokens() and save "
                "the tokenizer, or leave out --tokenizer_name to train one on the text."
            )

    def config(self, tokenizer: PreTrainedTokenizerBase, guidance: dict) -> PreTrainedConfig:
        """Configuration of the guided model."""
        return small_config(
            self.row,
            tokenizer,
            length=self.args.max_length,
            guidance=guidance,
            **sizes_of(self.args),
            **self.own_settings(tokenizer),
        )

    def own_settings(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Settings of the configuration for this objective."""
        return {}

    def model_to_save(self, model: PreTrainedModel) -> PreTrainedModel:
        """The part of a trained model that is saved."""
        return model

    def results(self, history: list[dict]) -> dict[str, float]:
        """Losses and other results of a run from its log."""
        last = next(entry for entry in reversed(history) if self.evaluated in entry)
        return {
            f"{self.loss}_loss_eval": last[self.evaluated],
            f"{self.loss}_loss_train_mean": mean_over_steps(history, self.trained),
            f"{self.loss}_loss_train": next(e[self.trained] for e in reversed(history) if self.trained in e),
            **self.own_results(history, last),
        }

    def own_results(self, history: list[dict], last: dict) -> dict[str, float]:
        """Other results of this objective; `last` is the last evaluation."""
        return {}


class MaskedLanguageModelling(Objective):
    """Masked tokens, as RoBERTa learns them."""

    def own_settings(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return masked_settings(self.row)


class CausalLanguageModelling(Objective):
    """The next token, as Llama learns it."""

    loss = "clm"
    loss_in_words, mean_over = "causal-language-model loss", "tokens but the first of each example"
    default_architecture = "llama"
    auto_class, endings = CAUSAL_CLASS, CAUSAL_ENDINGS
    task = "text-generation"
    special_tokens = BOUNDARIES

    def __init__(self, args: Any):
        super().__init__(args)
        refuse_flags(args, {"mlm_probability": "objective clm masks no tokens"})

    def check(self, training_args: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.check_tokenizer(tokenizer)
        check_trainer_arguments(training_args)
        pad_by_end(tokenizer)

    def frequencies(self, examples: Texts, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
        return token_counts(examples, len(tokenizer), limit=COUNTED_EXAMPLES if self.args.streaming else None)

    def collator(self, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray, seed: int) -> Any:
        # No token predicts the first one of an example.
        begins = np.arange(len(counts)) == boundary_token_ids(tokenizer)[0]
        self.plateau = ("unigram entropy", entropy(np.where(begins, 0, counts)))
        return NextTokenCollator(tokenizer)

    def own_settings(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return causal_settings(self.row)


class ReplacedTokenDetection(Objective):
    """Which tokens a generator replaced, as ELECTRA learns it; the loss is that of the discriminator alone."""

    loss = "rtd"
    loss_in_words, mean_over = "discriminator loss", "tokens"
    default_architecture = "electra"
    auto_class, endings = "AutoModelForPreTraining", ("ElectraForPreTraining",)
    task = "feature-extraction"
    tokenizer_kind = "bert"
    trainer_settings = {
        "compute_metrics": replaced_token_metrics,
        "preprocess_logits_for_metrics": replaced_token_predictions,
    }

    def __init__(self, args: Any):
        super().__init__(args)
        self.is_joint = args.generator == "trained"
        if self.is_joint:
            self.model_class = HeadwiseElectraForJointPreTraining
            self.evaluated, self.trained = "eval_replaced_loss", "replaced_loss"

    def collator(self, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray, seed: int) -> Any:
        if self.is_joint:
            # The fraction of replaced tokens depends on the accuracy of the generator; there is no plateau.
            return MaskedLanguageModelCollator(tokenizer, self.args.mlm_probability, seed)
        words = without_special(counts, tokenizer)
        # The generator may draw the original token; special tokens are never replaced, and models know that.
        replaced = self.args.mlm_probability * (1 - float(np.square(words / words.sum()).sum()))
        loss = entropy(np.array([replaced, 1 - replaced])) * float(words.sum() / counts.sum())
        self.plateau = ("entropy of the replaced fraction", loss)
        return ReplacedTokenCollator(tokenizer, counts, self.args.mlm_probability, seed)

    def own_settings(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return {"generator_settings": {} if self.is_joint else None}

    def model_to_save(self, model: PreTrainedModel) -> PreTrainedModel:
        return model.get_discriminator() if self.is_joint else model

    def own_results(self, history: list[dict], last: dict) -> dict[str, float]:
        own = {f"replaced_{key}": last[f"eval_{key}"] for key in ("precision", "recall", "f1", "share")}
        if self.is_joint:
            own["generator_loss_eval"] = last["eval_mlm_loss"]
        return own


class NextSentencePrediction(Objective):
    """Masked tokens, and whether two sentences follow each other, as BERT learns; runs are compared by the former."""

    evaluated, trained = "eval_mlm_loss", "mlm_loss"
    default_architecture = "bert"
    auto_class, endings = "AutoModelForPreTraining", ("BertForPreTraining",)
    tokenizer_kind = "bert"

    def __init__(self, args: Any):
        super().__init__(args)
        for name, value in (("streaming", args.streaming), ("packing", not args.packing)):
            if value:
                raise ValueError(
                    f"objective mlm+nsp pairs sentences of documents and cannot use {name}={getattr(args, name)}; "
                    "leave it out."
                )

    def embedded(self) -> tuple[Texts, Texts]:
        return tuple(
            Dataset.from_dict({"sentences": [[s for p in d.split("\n") for s in split_sentences(p)] for d in part]})
            for part in embedded_splits()
        )

    def load(self, files: list[str] | None, dataset_name: str | None = None, **source: Any) -> Texts:
        return load_documents(files, dataset_name, **self.form, **source)

    def strings(self, texts: Texts) -> Iterator[str]:
        return (sentence for row in texts for sentence in row["sentences"])

    def examples(self, texts: Texts, tokenizer: PreTrainedTokenizerBase, seed: int) -> Texts:
        return sentence_pairs(texts, tokenizer, self.args.max_length, seed=seed)

    def own_results(self, history: list[dict], last: dict) -> dict[str, float]:
        return {"nsp_loss_eval": last["eval_nsp_loss"], "nsp_loss_train_mean": mean_over_steps(history, "nsp_loss")}


PRETRAINING_OBJECTIVES: dict[str, type[Objective]] = {
    "mlm": MaskedLanguageModelling,
    "clm": CausalLanguageModelling,
    "rtd": ReplacedTokenDetection,
    "mlm+nsp": NextSentencePrediction,
}
