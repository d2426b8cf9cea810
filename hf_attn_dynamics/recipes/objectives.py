# Licensed under the Apache License, Version 2.0.
"""What `pretrain_ag.py` can have a model learn: its class and configuration, its examples and batches, its figures.

mlm        RoBERTa, or another encoder, fills in masked tokens
clm        Llama, or another decoder, predicts each token from those before it
rtd        ELECTRA finds the tokens that a generator replaced: drawn by frequency, or by a small model
mlm+nsp    BERT fills in masked tokens, and tells whether the second of two sentences followed the first
"""

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
    pack_blocks,
    pad_sentences,
    sentence_pairs,
    split_sentences,
    token_counts,
)
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
    pad_by_end,
    readable_name,
    sizes_of,
    small_config,
)


Texts = Dataset | IterableDataset
COUNTED_EXAMPLES = 20_000  # of a stream; frequencies change little with more


def ordinary(counts: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Counts of tokens without those of special ones."""
    return np.where(np.isin(np.arange(len(counts)), tokenizer.all_special_ids), 0, counts)


def entropy(counts: np.ndarray) -> float:
    """Entropy of frequencies, in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


class Objective:
    """What all objectives share; each names what is its own.

    Attributes:
        loss (`str`): Name of the loss that is compared, in the keys of a summary.
        loss_in_words, mean_over (`str`): The same for people, in nats, and what it is the mean over.
        evaluated, trained (`str`): Its keys in the log: on the evaluation text, and in training.
        default_architecture (`str`): The one that is trained if none is named.
        auto_class, endings (`str`, `tuple[str, ...]`): Auto class of the models, and how the names of the stock
            classes end: those that Auto classes open beside them learn something else.
        row, architecture (`Architecture`, `str`): What is trained, and its name for people.
        task (`str`): Pipeline of the model that is saved.
        tokenizer_kind (`str`): Which special tokens a tokenizer gets that is trained for it.
        plateau (`tuple[str, float]`): Where a model stays that has learnt nothing but frequencies; known once the
            collator is.
    """

    loss = "mlm"
    loss_in_words, mean_over = "masked-language-model loss", "masked tokens"
    evaluated, trained = "eval_loss", "task_loss"
    default_architecture = "roberta"
    auto_class, endings = MASKED_CLASS, MASKED_ENDINGS
    task = "fill-mask"
    tokenizer_kind = "roberta"
    model_class: type[PreTrainedModel]

    def __init__(self, args: Any):
        self.args = args
        self.plateau: tuple[str, float] | None = None
        self.row = architecture_row(args.architecture or self.default_architecture)
        stock_name = language_model(self.row, self.auto_class, self.endings)
        if stock_name is None:
            learners = [
                name for name, row in ARCHITECTURES.items() if language_model(row, self.auto_class, self.endings)
            ]
            raise ValueError(
                f"architecture {self.row.stock_type} has no head for objective {args.objective}, which is for "
                f"{', '.join(learners)}."
            )
        self.model_class = twin_class(stock_name)
        self.architecture = readable_name(self.row)

    # ---- Text ----

    def embedded(self) -> tuple[Texts, Texts]:
        """Training and validation texts that need no file."""
        return tuple(
            Dataset.from_dict({"text": [p for d in part for p in d.split("\n")]}) for part in embedded_splits()
        )

    def load(self, files: list[str] | None, **source: Any) -> Texts:
        return load_texts(
            files, source.pop("dataset_name", None), streaming=self.args.streaming, text_column=self.args.text_column,
            **source,
        )  # fmt: skip

    def words(self, texts: Texts) -> Any:
        """All strings of some texts, one by one."""
        return (row["text"] for row in texts)

    def examples(self, texts: Texts, tokenizer: PreTrainedTokenizerBase, seed: int) -> Texts:
        prepare = pack_blocks if self.args.packing else pad_sentences
        return prepare(texts, tokenizer, self.args.block_size)

    # ---- Batches ----

    def collator(self, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray, seed: int) -> Any:
        self.plateau = ("unigram entropy", entropy(ordinary(counts, tokenizer)))
        return MaskedLanguageModelCollator(tokenizer, self.args.mlm_probability, seed)

    def frequencies(self, examples: Texts, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
        """How often each token of the vocabulary occurs, padding apart."""
        counts = token_counts(examples, len(tokenizer), limit=COUNTED_EXAMPLES if self.args.streaming else None)
        counts[tokenizer.pad_token_id] = 0
        return counts

    # ---- Model ----

    def check(self, training_args: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses what cannot be trained, before the text is read."""
        check_trainer_arguments(training_args, MaskedLanguageModelCollator(tokenizer, self.args.mlm_probability))

    def config(self, tokenizer: PreTrainedTokenizerBase, guidance: dict) -> PreTrainedConfig:
        return small_config(
            self.row,
            tokenizer,
            length=self.args.block_size,
            guidance=guidance,
            **sizes_of(self.args),
            **self.own_config(tokenizer),
        )

    def own_config(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return {}

    def published(self, model: PreTrainedModel) -> PreTrainedModel:
        """What is left of a trained model for others."""
        return model

    # ---- Figures ----

    trainer_settings: dict[str, Any] = {}

    def figures(self, history: list[dict]) -> dict[str, float]:
        """What a run is compared by, and more, from its log."""
        last = next(entry for entry in reversed(history) if self.evaluated in entry)
        return {
            f"{self.loss}_loss_eval": last[self.evaluated],
            f"{self.loss}_loss_train_mean": mean_over_steps(history, self.trained),
            f"{self.loss}_loss_train": next(e[self.trained] for e in reversed(history) if self.trained in e),
            **self.own_figures(history, last),
        }

    def own_figures(self, history: list[dict], last: dict) -> dict[str, float]:
        return {}


class MaskedLanguageModelling(Objective):
    """RoBERTa's: 15 % of the tokens are to be filled in."""

    def own_config(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return masked_settings(self.row)


class CausalLanguageModelling(Objective):
    """Llama's: each token is to be predicted from those before it."""

    loss = "clm"
    loss_in_words, mean_over = "causal-language-model loss", "tokens but the first of each example"
    default_architecture = "llama"
    auto_class, endings = CAUSAL_CLASS, CAUSAL_ENDINGS
    task = "text-generation"

    def __init__(self, args: Any):
        super().__init__(args)
        refuse_flags(args, {"mlm_probability": "objective clm masks no tokens"})

    def check(self, training_args: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        check_trainer_arguments(training_args)
        pad_by_end(tokenizer)

    def frequencies(self, examples: Texts, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
        return token_counts(examples, len(tokenizer), limit=COUNTED_EXAMPLES if self.args.streaming else None)

    def collator(self, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray, seed: int) -> Any:
        # The first token of an example is predicted by none.
        begins = np.arange(len(counts)) == boundary_token_ids(tokenizer)[0]
        self.plateau = ("unigram entropy", entropy(np.where(begins, 0, counts)))
        return NextTokenCollator(tokenizer)

    def own_config(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return causal_settings(self.row)


class ReplacedTokenDetection(Objective):
    """ELECTRA's: which tokens were replaced? Reports the loss of the discriminator alone."""

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
            # How many tokens it replaces depends on how well the generator guesses.
            return MaskedLanguageModelCollator(tokenizer, self.args.mlm_probability, seed)
        words = ordinary(counts, tokenizer)
        # A draw may be the token that was there; special tokens are never replaced, as any model sees.
        share = self.args.mlm_probability * (1 - float(np.square(words / words.sum()).sum()))
        loss = entropy(np.array([share, 1 - share])) * float(words.sum() / counts.sum())
        self.plateau = ("entropy of the share replaced", loss)
        return ReplacedTokenCollator(tokenizer, counts, self.args.mlm_probability, seed)

    def own_config(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return {"generator_settings": {} if self.is_joint else None}

    def published(self, model: PreTrainedModel) -> PreTrainedModel:
        return model.get_discriminator() if self.is_joint else model

    def own_figures(self, history: list[dict], last: dict) -> dict[str, float]:
        own = {f"replaced_{key}": last[f"eval_{key}"] for key in ("precision", "recall", "f1", "share")}
        if self.is_joint:
            own["generator_loss_eval"] = last["eval_mlm_loss"]
        return own


class NextSentencePrediction(Objective):
    """BERT's: masked tokens, and whether two sentences follow each other. Compared by the former."""

    evaluated, trained = "eval_mlm_loss", "mlm_loss"
    default_architecture = "bert"
    auto_class, endings = "AutoModelForPreTraining", ("BertForPreTraining",)
    tokenizer_kind = "bert"

    def __init__(self, args: Any):
        super().__init__(args)
        for name, value in (("streaming", args.streaming), ("packing", not args.packing)):
            if value:
                raise ValueError(
                    f"objective mlm+nsp pairs the sentences of documents, for which {name}={getattr(args, name)} has "
                    "no meaning; leave it out."
                )

    def embedded(self) -> tuple[Texts, Texts]:
        return tuple(
            Dataset.from_dict({"sentences": [[s for p in d.split("\n") for s in split_sentences(p)] for d in part]})
            for part in embedded_splits()
        )

    def load(self, files: list[str] | None, **source: Any) -> Texts:
        return load_documents(files, text_column=self.args.text_column, **source)

    def words(self, texts: Texts) -> Any:
        return (sentence for row in texts for sentence in row["sentences"])

    def examples(self, texts: Texts, tokenizer: PreTrainedTokenizerBase, seed: int) -> Texts:
        return sentence_pairs(texts, tokenizer, self.args.block_size, seed=seed)

    def own_figures(self, history: list[dict], last: dict) -> dict[str, float]:
        return {"nsp_loss_eval": last["eval_nsp_loss"], "nsp_loss_train_mean": mean_over_steps(history, "nsp_loss")}


OBJECTIVES: dict[str, type[Objective]] = {
    "mlm": MaskedLanguageModelling,
    "clm": CausalLanguageModelling,
    "rtd": ReplacedTokenDetection,
    "mlm+nsp": NextSentencePrediction,
}
