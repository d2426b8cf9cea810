# Licensed under the Apache License, Version 2.0.
"""Attention patterns (Deshpande & Narasimhan 2020): the keys that each query row should attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .guidance_settings import TOKEN_SET_PATTERNS


@dataclass(frozen=True)
class PatternRows:
    """Target distributions P of one pattern for a batch, as a few weighted keys per row.

    Args:
        keys (`torch.LongTensor` of shape `(batch, rows, k)`): Indices of the attended keys; `rows` is the length of
            the batch, or 1 if all rows of a sentence share one target.
        weights (`torch.FloatTensor` of the same shape): Target weight of each key, 0 for unused slots. Keys of a row
            with non-zero weights must be unique.
        uniform (`torch.BoolTensor` of shape `(batch, rows)`, *optional*): Rows whose target is uniform over the
            visible non-padding keys (the last row of `next`); their `weights` are 0.
        included (`torch.BoolTensor` of shape `(batch,)`, *optional*): Sentences that the pattern applies to; others
            (without "." for `period`) do not contribute to the loss.
        counted (`torch.BoolTensor` of shape `(batch, rows)` or `(batch, 1)`, *optional*): Rows that the loss is
            averaged over, for targets that a batch brings.
    """

    keys: torch.Tensor
    weights: torch.Tensor
    uniform: torch.Tensor | None = None
    included: torch.Tensor | None = None
    counted: torch.Tensor | None = None


def exact_dtype(device: torch.device) -> torch.dtype:
    """Precision of the small tensors per row, which are converted to the precision of attention once."""
    return torch.float32 if device.type == "mps" else torch.float64


PatternFunction = Callable[[torch.Tensor | None, torch.Tensor], PatternRows]


def _neighbour_rows(offset: int, attention_mask: torch.Tensor, row_mask: torch.Tensor | None) -> PatternRows:
    """Row i attends to key i + `offset`, counting non-padding tokens; rows without such a key attend uniformly.

    Args:
        attention_mask (`torch.BoolTensor` of shape `(batch, keys)`): True for non-padding keys.
        row_mask (`torch.BoolTensor` of shape `(batch, rows)`, *optional*): True for non-padding rows, in
            cross-attention.
    """
    row_mask = attention_mask if row_mask is None else row_mask
    wanted = row_mask.cumsum(1) - 1 + offset
    missing = (wanted < 0) | (wanted >= attention_mask.sum(1, keepdim=True))
    numbered = attention_mask.int().argsort(dim=1, descending=True, stable=True)
    keys = numbered.gather(1, wanted.clamp(0, attention_mask.shape[1] - 1))
    return PatternRows(keys.unsqueeze(-1), (~missing).float().unsqueeze(-1), uniform=missing)


def next_token(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor, row_mask: torch.Tensor | None = None
) -> PatternRows:
    """Each token attends to the next non-padding token; the last one attends uniformly."""
    return _neighbour_rows(1, attention_mask, row_mask)


def previous_token(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor, row_mask: torch.Tensor | None = None
) -> PatternRows:
    """Each token attends to the previous non-padding token; the first one attends uniformly."""
    return _neighbour_rows(-1, attention_mask, row_mask)


def same_token(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor, row_mask: torch.Tensor | None = None
) -> PatternRows:
    """Each token attends to itself or, in cross-attention, to the source token with the same index."""
    return _neighbour_rows(0, attention_mask, row_mask)


def first_token(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
    """Each token attends to the first non-padding token."""
    keys = attention_mask.int().argmax(1, keepdim=True).unsqueeze(-1)
    return PatternRows(keys, torch.ones_like(keys, dtype=torch.float32))


def token_set(token_ids: Sequence[int]) -> PatternFunction:
    """Returns a pattern whose rows are uniform over the tokens with the given ids.

    Args:
        token_ids (`Sequence[int]`): Ids of the attended tokens, such as the delimiters of a tokenizer.

    Returns:
        `PatternFunction`: the pattern, which excludes sentences without these tokens.
    """

    def pattern(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
        if input_ids is None:
            raise ValueError(
                "guidance patterns `delim` and `period` read the ids of the attended tokens: pass `input_ids` "
                "(`decoder_input_ids` to a decoder) instead of embeddings or hidden states."
            )
        wanted = torch.tensor(token_ids, device=input_ids.device)
        members = torch.isin(input_ids, wanted) & attention_mask
        count = members.sum(1, keepdim=True)
        # Compiled graphs have no data-dependent shapes: they have one slot per key, most with weight 0. Otherwise,
        # accelerators synchronise once, which takes less time than slots that are not needed.
        slots = members.shape[1] if torch.compiler.is_compiling() else max(int(count.max()), 1)
        found, keys = members.int().sort(dim=1, descending=True, stable=True)
        weights = found[:, :slots].to(exact_dtype(found.device)) / count.clamp(min=1)
        return PatternRows(keys[:, None, :slots], weights[:, None], included=count.squeeze(1) > 0)

    return pattern


_PATTERNS: dict[str, PatternFunction] = {
    "next": next_token,
    "prev": previous_token,
    "first": first_token,
    "self": same_token,
}
# Patterns with the argument `row_mask`, for cross-attention.
NEIGHBOURS = ("next", "prev", "self")
_BUILT_IN = frozenset([*_PATTERNS, *TOKEN_SET_PATTERNS])


def register_pattern(name: str, pattern: PatternFunction) -> None:
    """Registers an attention pattern for `guidance` configurations.

    Args:
        name (`str`): Name used in configurations.
        pattern (`PatternFunction`): Called with `input_ids` (`(batch, length)`, or `None` if the model was given
            embeddings) and the boolean `attention_mask` (`(batch, length)`, True for non-padding tokens) of the
            attended sentence; returns [`PatternRows`]. It must be a pure function. In a decoder, targets are
            restricted to the visible keys (see [`GuidanceTargets`]); in cross-attention, it must return a single row.

    Raises:
        ValueError: if `name` belongs to a built-in pattern, or is not a non-empty string.

    Example:
        >>> def second_token(input_ids, attention_mask):
        ...     keys = torch.ones(len(attention_mask), 1, 1, dtype=torch.long)
        ...     return PatternRows(keys, torch.ones_like(keys, dtype=torch.float32))
        >>> register_pattern("second", second_token)
        >>> "second" in pattern_names()
        True
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"pattern name must be a non-empty string, got {name!r}.")
    if name in _BUILT_IN:
        raise ValueError(f"pattern name {name!r} is built in; choose another one.")
    _PATTERNS[name] = pattern


def pattern_function(name: str) -> PatternFunction:
    """The positional or registered pattern of this name."""
    return _PATTERNS[name]


def pattern_names() -> list[str]:
    """Names of the built-in and registered patterns."""
    return [*_PATTERNS, *TOKEN_SET_PATTERNS]
