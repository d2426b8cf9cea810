# Licensed under the Apache License, Version 2.0.
"""Heads that attend to delimiters, such as [CLS] and [SEP] (Clark et al. 2019, section 3.2)."""

from collections.abc import Iterable

from ..head_scores import HeadScores
from .base import AttentionCall, HeadMeans, Observer
from .excluded_tokens import SpecialTokens


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
        >>> import torch
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
        self.special = SpecialTokens(delimiter_ids, type(self).__name__, "delimiter_ids", "delimiters")
        self.means = HeadMeans(type(self).__name__)

    def update(self, call: AttentionCall) -> None:
        delimiters = call.real_keys & self.special.among(call.key_ids)
        on_delimiters = (call.weights * delimiters[:, None, None]).sum(-1)
        self.means.add(call, on_delimiters, call.real_queries & ~self.special.among(call.query_ids))

    def compute(self) -> HeadScores:
        return self.means.compute()
