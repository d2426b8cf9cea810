# Licensed under the Apache License, Version 2.0.
"""Heads that attend to delimiters, such as [CLS] and [SEP] (Clark et al. 2019, section 3.2)."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedTokenizerBase

from ..head_scores import HeadScores
from .base import AttentionCall, HeadMeans, ObservedBatch, Observer
from .excluded_tokens import checked_token_ids


DELIMITER_THRESHOLD = 0.5  # mean attention from which delimiters count as the function of a head


class DelimiterAttention(Observer):
    """Mean attention to delimiters: the sum of the weights on special tokens, averaged over all other tokens.

    Special tokens such as [CLS], [SEP], `<s>` and `</s>` count as keys, not as queries; padding counts as neither.
    Many heads attend to these tokens where their own function does not apply (Clark et al. 2019, section 3.2).
    [`HeadReading`] reports the function "delimiters" for heads whose mean is at least 0.5: more than half of their
    attention carries no word. Sentences without special tokens have the value 0. The result is [`HeadScores`], from 0
    to 1; NaN if all tokens are special.

    Args:
        delimiter_ids (iterable of `int`, *optional*): Token ids of delimiters, which may include those of punctuation;
            by default `tokenizer.all_special_ids` of the tokenizer that [`observe`] is given.
        name (`str`): Name of the result.

    Raises:
        ValueError: if `delimiter_ids` does not hold token ids; while observing, if token ids are unknown, or neither
            `delimiter_ids` nor a tokenizer was given.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import observe
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertModel(config)
        >>> with torch.no_grad(), observe(model, DelimiterAttention([2, 3])) as seen:
        ...     _ = model(input_ids=torch.tensor([[2, 7, 8, 3], [2, 6, 4, 3]]))
        >>> seen.delimiter_attention["encoder"].shape
        torch.Size([2, 4])
    """

    def __init__(self, delimiter_ids: Iterable[int] | None = None, *, name: str = "delimiter_attention"):
        self.name = name
        self._are_given = delimiter_ids is not None
        self._ids = _tensor(delimiter_ids, "delimiter_ids") if self._are_given else None
        self.means = HeadMeans(type(self).__name__)

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not self._are_given:
            self._ids = _tensor(tokenizer.all_special_ids, "all_special_ids")

    def begin(self, batch: ObservedBatch) -> None:
        if self._ids is None:
            raise ValueError(
                f"{type(self).__name__} does not know which tokens are delimiters: pass observe(model, …, "
                "tokenizer=tokenizer), or delimiter_ids=tokenizer.all_special_ids."
            )

    def update(self, call: AttentionCall) -> None:
        self._ids = self._ids.to(call.weights.device)
        delimiters = call.real_keys & torch.isin(call.key_ids, self._ids)
        on_delimiters = (call.weights * delimiters[:, None, None]).sum(-1)
        self.means.add(call, on_delimiters, call.real_queries & ~torch.isin(call.query_ids, self._ids))

    def compute(self) -> HeadScores:
        return self.means.compute()


def _tensor(ids: Iterable[int], argument: str) -> torch.Tensor:
    return torch.tensor(checked_token_ids(ids, argument), dtype=torch.long)
