# Licensed under the Apache License, Version 2.0.
"""How surely heads attend: confidence and entropy, and which tokens count as targets."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from ..models.number_checks import is_integer
from .head_scores import HeadScores
from .observers import AttentionCall, HeadMeans, ObservedBatch, Observer


logger = logging.get_logger(__name__)

END_OF_SENTENCE = ("eos_token_id", "sep_token_id")  # what configurations call it


class HeadConfidence(Observer):
    """Confidence of heads: the mean over tokens of the largest attention weight (Voita et al. 2019, section 4.1).

    The end of sentence does not count as a target, since it is no real token; as a query, it counts. The weights of
    other tokens are not divided by what it leaves. The result is [`HeadScores`], from 0 to 1.

    Args:
        excluded_ids (`list[int]`, *optional*): Token ids that do not count as targets; `[]` for none. By default
            `eos_token_id` and `sep_token_id` of the tokenizer that `observe` is given, or else of the model's
            configuration; if neither names one, as is so for most BERT models without the tokenizer, all tokens
            count, and a warning says so.
        name (`str`): Under which the result is found.

    Raises:
        ValueError: if `excluded_ids` are no token ids; while observing, if tokens are excluded, but the model reads
            no token ids, or a cache holds earlier ones outside of `generate()`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import observe
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = BertModel(config)
        >>> with torch.no_grad(), observe(model, HeadConfidence(excluded_ids=[3])) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 3], [9, 6, 4, 3]]))
        >>> seen.confidence["encoder"].shape
        torch.Size([2, 4])
    """

    def __init__(self, excluded_ids: Iterable[int] | None = None, *, name: str = "confidence"):
        self.name = name
        self.excluded = ExcludedTokens(excluded_ids, type(self).__name__)
        self.means = HeadMeans(type(self).__name__)

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.excluded.use_tokenizer(tokenizer)

    def begin(self, batch: ObservedBatch) -> None:
        self.excluded.begin(batch)

    def update(self, call: AttentionCall) -> None:
        weights, _ = call.largest(self.excluded.ids)
        self.means.add(call, weights)

    def compute(self) -> HeadScores:
        return self.means.compute()


class HeadEntropy(Observer):
    """Mean over tokens of the entropy of their attention weights, `−Σ w ln w`, in nats.

    All tokens count, as queries and as keys. The result is [`HeadScores`], from 0 (one key has all attention) to the
    logarithm of the number of tokens.

    Args:
        name (`str`): Under which the result is found.
    """

    def __init__(self, *, name: str = "entropy"):
        self.name = name
        self.means = HeadMeans(type(self).__name__)

    def update(self, call: AttentionCall) -> None:
        self.means.add(call, -times_log(above_zero(call.weights)).sum(-1))

    def compute(self) -> HeadScores:
        return self.means.compute()


def above_zero(weights: torch.Tensor) -> torch.Tensor:
    """Weights whose logarithm is finite; those that are 0 stay so small that w ln w is next to 0."""
    return weights.clamp(min=torch.finfo(weights.dtype).tiny)


def times_log(weights: torch.Tensor) -> torch.Tensor:
    """w ln w of weights above 0."""
    # The logarithm is vectorised, and `torch.special.entr` is not.
    return weights.log().mul_(weights)


class ExcludedTokens:
    """Tokens that do not count as targets.

    Args:
        ids (`list[int]`, *optional*): Which; by default those that the tokenizer, or else the configuration, calls the
            end of a sentence.
        user (`str`): What asks, for messages.
    """

    def __init__(self, ids: Iterable[int] | None, user: str):
        self.given = None if ids is None else checked_token_ids(ids)
        self.ids = self.given or ()
        self.user = user
        self._of_tokenizer: tuple[int, ...] = ()

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Looks up what the tokenizer calls the end of a sentence."""
        self._of_tokenizer = end_of_sentence_ids(tokenizer)

    def begin(self, batch: ObservedBatch) -> None:
        """Looks up what the model calls the end of a sentence, if nothing else has said it."""
        if self.given is not None:
            return
        self.ids = self._of_tokenizer or end_of_sentence_ids(batch.model.config)
        if not self.ids:
            logger.warning_once(
                f"the configuration of {type(batch.model).__name__} names no end of sentence, so that all tokens "
                "count as targets; name those that do not, by observe(model, …, tokenizer=tokenizer) or as in "
                f"{self.user}(excluded_ids=[tokenizer.sep_token_id]), or pass [] if all do."
            )


def checked_token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Ids that `excluded_ids` names, each once.

    Raises:
        ValueError: if they are no token ids.
    """
    values = list(ids) if isinstance(ids, Iterable) else None
    if values is None or not all(is_integer(one) and one >= 0 for one in values):
        raise ValueError(f"excluded_ids must be a list of token ids, or None, got {ids!r}.")
    return tuple(sorted(set(map(int, values))))


def end_of_sentence_ids(source: PreTrainedConfig | PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that a configuration or a tokenizer names as the end of a sentence: its eos and sep token."""
    named = [getattr(source, name, None) for name in END_OF_SENTENCE]
    lists = [ids if isinstance(ids, (list, tuple)) else [ids] for ids in named if ids is not None]
    return tuple(sorted({one for ids in lists for one in ids}))
