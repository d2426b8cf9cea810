# Licensed under the Apache License, Version 2.0.
"""What `pretrain_ag.py` can have a model learn: its class and configuration, its examples and batches, its figures.

mlm        RoBERTa fills in masked tokens
rtd        ELECTRA finds the tokens that a generator replaced: drawn by frequency, or by a small model
mlm+nsp    BERT fills in masked tokens, and tells whether the second of two sentences followed the first
"""

from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_attn_dynamics import (
    HeadwiseBertConfig,
    HeadwiseBertForPreTraining,
    HeadwiseElectraConfig,
    HeadwiseElectraForJointPreTraining,
    HeadwiseElectraForPreTraining,
    HeadwiseRobertaConfig,
    HeadwiseRobertaForMaskedLM,
    MaskedLanguageModelCollator,
    ReplacedTokenCollator,
)
from hf_attn_dynamics.data import (
    embedded_splits,
    load_documents,
    load_texts,
    pack_blocks,
    pad_sentences,
    sentence_pairs,
    split_sentences,
    token_counts,
)
from hf_attn_dynamics.training import mean_over_steps, replaced_token_metrics, replaced_token_predictions


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
        architecture (`str`): Name of the model for people.
        task (`str`): Pipeline of the model that is saved.
        tokenizer_kind (`str`): Which special tokens a tokenizer gets that is trained for it.
        plateau (`tuple[str, float]`): Where a model stays that has learnt nothing but frequencies; known once the
            collator is.
    """

    loss = "mlm"
    loss_in_words, mean_over = "masked-language-model loss", "masked tokens"
    evaluated, trained = "eval_loss", "task_loss"
    architecture = "RoBERTa"
    task = "fill-mask"
    tokenizer_kind = "roberta"
    model_class: type[PreTrainedModel] = HeadwiseRobertaForMaskedLM
    config_class: type[PreTrainedConfig] = HeadwiseRobertaConfig

    def __init__(self, args: Any):
        self.args = args
        self.plateau: tuple[str, float] | None = None

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

    def config(self, tokenizer: PreTrainedTokenizerBase, guidance: dict) -> PreTrainedConfig:
        args = self.args
        if args.hidden_size % args.num_attention_heads:
            raise ValueError(f"hidden_size {args.hidden_size} is no multiple of {args.num_attention_heads} heads.")
        return self.config_class(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden_size,
            num_hidden_layers=args.num_hidden_layers,
            num_attention_heads=args.num_attention_heads,
            intermediate_size=4 * args.hidden_size,
            hidden_dropout_prob=args.dropout,
            attention_probs_dropout_prob=args.attention_dropout,
            pad_token_id=tokenizer.pad_token_id,
            guidance=guidance,
            **self.own_config(tokenizer),
        )

    def own_config(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return {
            # RoBERTa counts positions from the padding index on.
            "max_position_embeddings": self.args.block_size + tokenizer.pad_token_id + 1,
            "type_vocab_size": 1,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "layer_norm_eps": 1e-5,
        }

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


class ReplacedTokenDetection(Objective):
    """ELECTRA's: which tokens were replaced? Reports the loss of the discriminator alone."""

    loss = "rtd"
    loss_in_words, mean_over = "discriminator loss", "tokens"
    architecture = "ELECTRA"
    task = "feature-extraction"
    tokenizer_kind = "bert"
    config_class = HeadwiseElectraConfig
    trainer_settings = {
        "compute_metrics": replaced_token_metrics,
        "preprocess_logits_for_metrics": replaced_token_predictions,
    }

    def __init__(self, args: Any):
        super().__init__(args)
        self.is_joint = args.generator == "trained"
        self.model_class = HeadwiseElectraForJointPreTraining if self.is_joint else HeadwiseElectraForPreTraining
        if self.is_joint:
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
        return {
            "embedding_size": self.args.hidden_size,
            "max_position_embeddings": self.args.block_size,
            "type_vocab_size": 2,
            "generator_settings": {} if self.is_joint else None,
        }

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
    architecture = "BERT"
    tokenizer_kind = "bert"
    model_class = HeadwiseBertForPreTraining
    config_class = HeadwiseBertConfig

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

    def own_config(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return {"max_position_embeddings": self.args.block_size, "type_vocab_size": 2}

    def own_figures(self, history: list[dict], last: dict) -> dict[str, float]:
        return {"nsp_loss_eval": last["eval_nsp_loss"], "nsp_loss_train_mean": mean_over_steps(history, "nsp_loss")}


OBJECTIVES: dict[str, type[Objective]] = {
    "mlm": MaskedLanguageModelling,
    "rtd": ReplacedTokenDetection,
    "mlm+nsp": NextSentencePrediction,
}
