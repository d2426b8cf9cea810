# Licensed under the Apache License, Version 2.0.
"""Tokens that the user names, or else the tokenizer: the end of the sentence, and special tokens."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from ...models.number_checks import is_integer
from .base import ObservedBatch


logger = logging.get_logger(__name__)

END_OF_SENTENCE = ("eos_token_id", "sep_token_id")


class ExcludedTokens:
    """Tokens that do not count as targets.

    Args:
        ids (`list[int]`, *optional*): Token ids; by default the end-of-sentence tokens of the tokenizer, or else of
            the configuration.
        user (`str`): Name of the observer, for messages.
    """

    def __init__(self, ids: Iterable[int] | None, user: str):
        self.given = None if ids is None else checked_token_ids(ids)
        self.ids = self.given or ()
        self.user = user
        self._of_tokenizer: tuple[int, ...] = ()

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Looks up the end-of-sentence tokens of the tokenizer."""
        self._of_tokenizer = end_of_sentence_ids(tokenizer)

    def begin(self, batch: ObservedBatch) -> None:
        """Looks up the end-of-sentence tokens of the model, unless the user or the tokenizer named some."""
        if self.given is not None:
            return
        self.ids = self._of_tokenizer or end_of_sentence_ids(batch.model.config)
        if not self.ids:
            logger.warning_once(
                f"the configuration of {type(batch.model).__name__} names no end of sentence, so that all tokens "
                "count as targets; exclude some by observe(model, …, tokenizer=tokenizer) or "
                f"{self.user}(excluded_ids=[tokenizer.sep_token_id]), or pass [] to count all of them."
            )


class SpecialTokens:
    """Tokens that the user names, or else all special tokens of the tokenizer.

    Args:
        ids (`list[int]`, *optional*): Token ids; by default `tokenizer.all_special_ids`.
        user (`str`): Name of the observer, for messages.
        argument (`str`): Name of the user's argument.
        meaning (`str`): What the tokens are, for messages.
    """

    def __init__(self, ids: Iterable[int] | None, user: str, argument: str = "excluded_ids", meaning: str = "special"):
        self.user, self.argument, self.meaning = user, argument, meaning
        self._are_given = ids is not None
        self._ids = None if ids is None else torch.tensor(checked_token_ids(ids, argument), dtype=torch.long)

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Takes the special tokens of the tokenizer, unless the user named some."""
        if not self._are_given:
            self._ids = torch.tensor(checked_token_ids(tokenizer.all_special_ids, "all_special_ids"))

    def begin(self, batch: ObservedBatch) -> None:
        """Raises ValueError if neither the user nor a tokenizer named them."""
        if self._ids is None:
            raise ValueError(
                f"{self.user} does not know which tokens are {self.meaning}: pass observe(model, …, "
                f"tokenizer=tokenizer), or {self.argument}=tokenizer.all_special_ids, or [] if none is."
            )

    def among(self, ids: torch.Tensor) -> torch.Tensor:
        """Which token ids belong to them, a boolean tensor of the same shape."""
        self._ids = self._ids.to(ids.device)
        return torch.isin(ids, self._ids)


def checked_token_ids(ids: Iterable[int], argument: str = "excluded_ids") -> tuple[int, ...]:
    """Sorted unique token ids of an argument.

    Args:
        ids (iterable of `int`): Value of the argument.
        argument (`str`): Name of the argument, for messages.

    Raises:
        ValueError: if it does not hold token ids.
    """
    values = list(ids) if isinstance(ids, Iterable) else None
    if values is None or not all(is_integer(one) and one >= 0 for one in values):
        raise ValueError(f"{argument} must be a list of token ids, or None, got {ids!r}.")
    return tuple(sorted(set(map(int, values))))


def end_of_sentence_ids(source: PreTrainedConfig | PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End-of-sentence token ids of a configuration or a tokenizer: EOS and SEP."""
    named = [getattr(source, name, None) for name in END_OF_SENTENCE]
    lists = [ids if isinstance(ids, (list, tuple)) else [ids] for ids in named if ids is not None]
    return tuple(sorted({one for ids in lists for one in ids}))
