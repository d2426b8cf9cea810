# Licensed under the Apache License, Version 2.0.
"""Confidence and entropy of attention heads."""

from collections.abc import Iterable

from ..entropy import above_zero, times_log
from ..head_scores import HeadScores
from .base import AttentionCall, HeadMeans, Observer
from .excluded_tokens import ExcludedTokens


class HeadConfidence(Observer):
    """Confidence of heads: mean over tokens of the largest attention weight (Voita et al. 2019, section 4.1).

    The end-of-sentence token counts as a query but not as a target. The other weights are not renormalized. The result
    is [`HeadScores`], from 0 to 1.

    Args:
        excluded_ids (`list[int]`, *optional*): Token ids that do not count as targets; `[]` for none. By default
            `eos_token_id` and `sep_token_id` of the tokenizer that `observe` is given, or else of the model's
            configuration. If neither names one, as for most BERT models without the tokenizer, all tokens count, with
            a warning.
        name (`str`): Name of the result.

    Raises:
        ValueError: if `excluded_ids` does not hold token ids; while observing, if tokens are excluded but the token
            ids are unknown: without `input_ids`, or with a cache filled outside of `generate()`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import observe
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertModel(config)
        >>> with torch.no_grad(), observe(model, HeadConfidence(excluded_ids=[3])) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 3], [9, 6, 4, 3]]))
        >>> seen.confidence["encoder"].shape
        torch.Size([2, 4])
    """

    def __init__(self, excluded_ids: Iterable[int] | None = None, *, name: str = "confidence"):
        self.name = name
        self.special = ExcludedTokens(excluded_ids, type(self).__name__)
        self.means = HeadMeans(type(self).__name__)

    def update(self, call: AttentionCall) -> None:
        weights, _ = call.largest(self.special.ids)
        self.means.add(call, weights)

    def compute(self) -> HeadScores:
        return self.means.compute()


class HeadEntropy(Observer):
    """Mean over tokens of the entropy of their attention weights, `−Σ w ln w`, in nats.

    All tokens count, as queries and as keys. The result is [`HeadScores`], from 0 (all attention on one key) to the
    logarithm of the number of tokens.

    Args:
        name (`str`): Name of the result.
    """

    def __init__(self, *, name: str = "entropy"):
        self.name = name
        self.means = HeadMeans(type(self).__name__)

    def update(self, call: AttentionCall) -> None:
        self.means.add(call, -times_log(above_zero(call.weights)).sum(-1))

    def compute(self) -> HeadScores:
        return self.means.compute()
