# Licensed under the Apache License, Version 2.0.
"""Attention patterns (Deshpande & Narasimhan 2020): the keys that each query row should attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .head_settings import TOKEN_SET_PATTERNS


@dataclass(frozen=True)
class PatternRows:
    """Target distributions P of one pattern for a batch, row by row, as a few weighted keys.

    Args:
        keys (`torch.LongTensor` of shape `(batch, rows, k)`): Attended key positions; `rows` is the length of the
            batch, or 1 if all rows of a sentence share one target.
        weights (`torch.FloatTensor` of the same shape): Target weight of each key, 0 for unused slots. The keys of a
            row must differ wherever their weights are not 0.
        uniform (`torch.BoolTensor` of shape `(batch, rows)`, *optional*): Rows whose target is uniform over the real
            keys that they see (the last row of `next`); their `weights` are 0.
        included (`torch.BoolTensor` of shape `(batch,)`, *optional*): Sentences the pattern applies to; the others
            (no "." for `period`) add nothing to the loss.
    """

    keys: torch.Tensor
    weights: torch.Tensor
    uniform: torch.Tensor | None = None
    included: torch.Tensor | None = None


def exact_dtype(device: torch.device) -> torch.dtype:
    """Precision of the small per-row tensors; they are rounded once, where they meet the attention."""
    return torch.float32 if device.type == "mps" else torch.float64


PatternFunction = Callable[[torch.Tensor | None, torch.Tensor], PatternRows]


def _neighbour_rows(offset: int, attention_mask: torch.Tensor, row_mask: torch.Tensor | None) -> PatternRows:
    """Row number i attends to key number i + `offset`, counting real tokens; rows without such a key uniformly.

    Args:
        attention_mask (`torch.BoolTensor` of shape `(batch, keys)`): True for real keys.
        row_mask (`torch.BoolTensor` of shape `(batch, rows)`, *optional*): True for the real tokens that the rows
            belong to, if these are not the keys.
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
    """Each token attends to the following real token; the last one uniformly."""
    return _neighbour_rows(1, attention_mask, row_mask)


def previous_token(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor, row_mask: torch.Tensor | None = None
) -> PatternRows:
    """Each token attends to the preceding real token; the first one uniformly."""
    return _neighbour_rows(-1, attention_mask, row_mask)


def same_token(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor, row_mask: torch.Tensor | None = None
) -> PatternRows:
    """Each token attends to itself, or to the token of the same number in the sentence that the keys belong to."""
    return _neighbour_rows(0, attention_mask, row_mask)


def first_token(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
    """Each token attends to the first real token."""
    keys = attention_mask.int().argmax(1, keepdim=True).unsqueeze(-1)
    return PatternRows(keys, torch.ones_like(keys, dtype=torch.float32))


def token_set(token_ids: Sequence[int]) -> PatternFunction:
    """Pattern whose rows are uniform over the tokens of the sentence whose id is in `token_ids`.

    Args:
        token_ids (`Sequence[int]`): Ids of the attended tokens, such as the delimiters of a tokenizer.

    Returns:
        `PatternFunction`: leaves out sentences without any such token.
    """

    def pattern(input_ids: torch.Tensor | None, attention_mask: torch.Tensor) -> PatternRows:
        if input_ids is None:
            raise ValueError(
                "guidance patterns `delim` and `period` read the ids of the tokens attended to: pass `input_ids`, not "
                "embeddings (`decoder_input_ids` to a decoder); other models' hidden states come without any."
            )
        wanted = torch.tensor(token_ids, device=input_ids.device)
        members = torch.isin(input_ids, wanted) & attention_mask
        count = members.sum(1, keepdim=True)
        # Compiled graphs have no data-dependent shapes: there every position keeps a slot, most with weight 0.
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
# Those that take the rows of another sentence than that of the keys, `row_mask`.
NEIGHBOURS = ("next", "prev", "self")
_BUILT_IN = frozenset([*_PATTERNS, *TOKEN_SET_PATTERNS])


def register_pattern(name: str, pattern: PatternFunction) -> None:
    """Make an attention pattern available to `guidance` configurations under `name`.

    Args:
        name (`str`): Name used in configurations.
        pattern (`PatternFunction`): Called with `input_ids` (`(batch, length)`, or `None` if the model was given
            embeddings) and the boolean `attention_mask` (`(batch, length)`, True for real tokens), both of the
            sentence attended to; returns [`PatternRows`]. It must depend on the inputs alone. In a decoder, its
            targets are cut down to what each row sees (see [`GuidanceTargets`]); for attention between two
            sentences, it must return one row for all.

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
    """A pattern that needs no token ids of a configuration, by its name."""
    return _PATTERNS[name]


def pattern_names() -> list[str]:
    """Names that a `guidance` configuration may use: the built-in patterns and the registered ones."""
    return [*_PATTERNS, *TOKEN_SET_PATTERNS]
