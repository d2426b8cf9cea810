# Licensed under the Apache License, Version 2.0.
"""How surely heads attend: confidence and entropy."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from ..entropy import above_zero, times_log
from ..head_scores import HeadScores
from .base import AttentionCall, HeadMeans, ObservedBatch, Observer
from .excluded_tokens import ExcludedTokens


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
