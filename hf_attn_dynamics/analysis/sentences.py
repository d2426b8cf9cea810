# Licensed under the Apache License, Version 2.0.
"""Tokenized sentences, in padded batches of similar length."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .running import longest_input


if TYPE_CHECKING:
    from ..data.conllu import Tree

    Sentence = str | tuple[str, str] | Tree | Sequence[int]

Item = TypeVar("Item")


def batches_by_length(items: Iterable[Item], batch_size: int, length: Callable[[Item], int] = len) -> list[list[Item]]:
    """Batches of items of similar length, which need little padding; the shortest come first.

    Args:
        items (iterable): Sentences as lists of token ids, or anything that `length` measures.
        batch_size (`int`): Items per batch.
        length (callable): Returns the length of an item.

    Returns:
        `list[list]`: the order of items of equal length is kept.

    Raises:
        ValueError: if `batch_size` is less than 1.

    Example:
        >>> batches_by_length([[5, 6, 7], [8], [9, 9]], 2)
        [[[8], [9, 9]], [[5, 6, 7]]]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    ordered = sorted(items, key=length)
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def padded(sentences: Iterable[Sequence[int]], padding: int | None) -> dict[str, torch.Tensor]:
    """A batch of sentences with padding on the right; padding on the left would shift absolute positions.

    Args:
        sentences (iterable of `list[int]`): Token ids.
        padding (`int`, *optional*): Token id of padding, 0 by default; the attention mask hides it.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask`, both of shape `(sentences, longest)`.

    Example:
        >>> padded([[5, 6], [7]], 0)["attention_mask"].tolist()
        [[1, 1], [1, 0]]
    """
    ids = [torch.as_tensor(sentence, dtype=torch.long) for sentence in sentences]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=padding or 0),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
    }


class Sentences:
    """Tokenized sentences. Sentences that are too short or too long are counted and left out; none is truncated.

    Logs a warning if a large fraction of the tokens is unknown.

    Args:
        sentences (iterable): Texts, pairs of texts, parsed sentences ([`Tree`]), or lists of token ids.
        model (`PreTrainedModel`): The model that reads them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the model; loaded from the model's checkpoint
            by default. Lists of token ids need none.
        shortest, longest (`int`): Minimum and maximum number of tokens; the model's own maximum always applies.
        name (`str`): Name of the sentences, for messages.

    Attributes:
        ids (`list[list[int]]`): Token ids of the sentences that fit.
        items (`list`): The sentences that fit, as given.
        too_short, too_long (`int`): Number of sentences that are left out.

    Raises:
        ValueError: if no sentence fits, a sentence is a list of words, or texts are given without a tokenizer.
    """

    def __init__(
        self,
        sentences: "Iterable[Sentence]",
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        shortest: int = 1,
        longest: int | None = None,
        name: str = "sentences",
    ):
        if isinstance(sentences, str):
            raise ValueError(f"{name} must be a list of sentences, got a single text; pass [text].")
        items = list(sentences)
        texts = [_text_of(item, f"{name}[{number}]") for number, item in enumerate(items) if not _is_encoded(item)]
        if texts and tokenizer is None:
            tokenizer = tokenizer_of(model)
        self.tokenizer = tokenizer
        longest = min((limit for limit in (longest, longest_input(model)) if limit is not None), default=None)
        found = tokenizer(texts, verbose=False) if texts else {"input_ids": []}
        # Second texts of pairs are in segments of their own, in models that know segments.
        self._segments = {
            tuple(ids): segments
            for ids, segments in zip(found["input_ids"], found.get("token_type_ids", ()))
            if any(segments)
        }
        tokens = iter(found["input_ids"])
        encoded = [[int(one) for one in item] if _is_encoded(item) else next(tokens) for item in items]
        fits = [len(ids) >= shortest and (longest is None or len(ids) <= longest) for ids in encoded]
        self.too_short = sum(len(ids) < shortest for ids in encoded)
        self.too_long = sum(longest is not None and len(ids) > longest for ids in encoded)
        self.ids = [ids for ids, fit in zip(encoded, fits) if fit]
        self.items = [item for item, fit in zip(items, fits) if fit]
        if not self.ids:
            lengths = [len(ids) for ids in encoded] or [0]
            raise ValueError(
                f"{name}: none of {len(encoded)} sentences fits; they have {min(lengths)} to {max(lengths)} tokens, "
                f"and the model is to read {shortest} to {longest}."
            )
        if texts:
            _warn_of_unknown(texts, tokenizer, name)

    @property
    def trees(self) -> "list[Tree]":
        """The parsed sentences."""
        return [item for item in self.items if _is_parsed(item)]

    @property
    def num_tokens(self) -> int:
        """Total number of tokens."""
        return sum(map(len, self.ids))

    @cached_property
    def counts(self) -> torch.Tensor:
        """Frequency of each token of the vocabulary in the sentences."""
        ids = torch.tensor([token for ids in self.ids for token in ids])
        return torch.bincount(ids, minlength=0 if self.tokenizer is None else len(self.tokenizer))

    def lists(self, batch_size: int, limit: int | None = None) -> list[list[list[int]]]:
        """The first `limit` sentences as lists of token ids, in batches of similar length."""
        return batches_by_length(self.ids[:limit], batch_size)

    def padded(self, ids: Iterable[Sequence[int]]) -> dict[str, torch.Tensor]:
        """A padded batch of sentences, with `token_type_ids` if the tokenizer gives pairs of texts several types."""
        ids = list(ids)
        batch = padded(ids, None if self.tokenizer is None else self.tokenizer.pad_token_id)
        if self._segments:
            types = [torch.tensor(self._segments.get(tuple(one), [0] * len(one))) for one in ids]
            batch["token_type_ids"] = pad_sequence(types, batch_first=True)
        return batch

    def batches(self, batch_size: int, limit: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Padded batches of [`lists`]."""
        return map(self.padded, self.lists(batch_size, limit))


def tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of the checkpoint that a model was loaded from.

    Raises:
        ValueError: if there is no tokenizer.
    """
    name = getattr(model.config, "name_or_path", "")
    try:
        if not name:
            raise OSError("it was not loaded from a checkpoint.")
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{type(model).__name__} has no tokenizer to read texts with: {reason} Pass one.") from error


def _is_encoded(item: Any) -> bool:
    """Whether a sentence is a list of token ids."""
    return not isinstance(item, str) and not _is_parsed(item) and not (len(item) and isinstance(item[0], str))


def _text_of(item: Any, name: str) -> str | tuple[str, str]:
    if _is_parsed(item):
        return item.text
    if isinstance(item, str):
        return item
    if len(item) != 2:
        raise ValueError(f"{name} is a list of {len(item)} strings; join words by spaces, or pass a pair of texts.")
    return tuple(item)


def _is_parsed(item: Any) -> bool:
    return hasattr(item, "relations")


def _warn_of_unknown(texts: list, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    # Imported here: reading data needs optional libraries, token ids do not.
    from ..data.tokenizer import warn_of_unknown

    flat = [text for one in texts for text in ([one] if isinstance(one, str) else one)]
    if any(text.strip() for text in flat):
        warn_of_unknown(flat, tokenizer, name)
