# Licensed under the Apache License, Version 2.0.
"""Attention between words from attention between tokens (Clark et al. 2019, section 4.1).

Attention to a word is the sum over its tokens, attention from a word the mean over them: `means @ weights @ pieces`.
"""

from collections.abc import Sequence

import torch


def number_units(words: Sequence[int | None], count: int) -> list[int]:
    """Number of the unit of each token: words keep their numbers, each special token is a further unit.

    Args:
        words (sequence of `int` or `None`): Word of each token, see `encode_words`; `None` for special tokens.
        count (`int`): Number of words.

    Example:
        >>> number_units([None, 0, 0, 2, None], count=3)
        [3, 0, 0, 2, 4]
    """
    special = iter(range(count, count + len(words)))
    return [next(special) if word is None else word for word in words]


def pieces_of_units(
    units: Sequence[Sequence[int | None]], length: int, positions: Sequence[Sequence[int]] | None = None
) -> torch.Tensor:
    """Indicator matrix of the tokens of each unit, in padded texts.

    Args:
        units (sequence of `list[int | None]`): Unit of each token, text by text; `None` for tokens without a unit.
        length (`int`): Number of tokens of a text, including padding.
        positions (sequence of `list[int]`, *optional*): Positions of the tokens; from 0 by default.

    Returns:
        `torch.Tensor` of shape `(texts, length, units)`, float32; `units` is the maximum over the texts.
    """
    width = 1 + max((unit for text in units for unit in text if unit is not None), default=0)
    pieces = torch.zeros(len(units), length, width)
    for index, text in enumerate(units):
        at = range(len(text)) if positions is None else positions[index]
        found = [(position, unit) for position, unit in zip(at, text, strict=True) if unit is not None]
        pieces[index, [position for position, _ in found], [unit for _, unit in found]] = 1
    return pieces


def mean_of_pieces(pieces: torch.Tensor) -> torch.Tensor:
    """Matrix that takes the mean over the tokens of each unit; zero for units without tokens.

    Args:
        pieces (`torch.Tensor` of shape `(texts, length, units)`): See [`pieces_of_units`].

    Returns:
        `torch.Tensor` of shape `(texts, units, length)`.
    """
    return pieces.mT / pieces.sum(1)[..., None].clamp(min=1)
