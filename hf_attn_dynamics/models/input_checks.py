# Licensed under the Apache License, Version 2.0.
"""Checks of tokens, labels and shapes, with messages that name the argument."""

import torch

from .ignored_labels import IGNORED


def can_check() -> bool:
    """Whether code runs eagerly: compiled, exported and traced code cannot raise errors about values."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())


def check_integers(name: str, values: torch.Tensor, count: int, limit: str, ignored: int | None = None) -> None:
    """Checks that ids, positions or classes are integers from 0 to `count - 1`.

    Values are checked on CPUs only, where this takes microseconds; an accelerator would synchronise in each forward
    pass.

    Args:
        name (`str`): Name of the argument, for the message.
        values (`torch.Tensor`): Integers of any shape.
        count (`int`): Number of valid values.
        limit (`str`): Name of the limit, for the message, such as `vocab_size`.
        ignored (`int`, *optional*): A further valid value.

    Raises:
        ValueError: if `values` are not integers or out of range; the message names the value and the limit.

    Example:
        >>> check_integers("input_ids", torch.tensor([[5, 60]]), 60, "vocab_size")
        Traceback (most recent call last):
        ValueError: input_ids must be from 0 to 59 (vocab_size is 60), got 60.
    """
    if values.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be integers of type int64 or int32, got {values.dtype}.")
    extremes = _extremes(values)
    if extremes is None or (extremes[0] >= 0 and extremes[1] < count):
        return
    if ignored is not None:
        extremes = _extremes(values.masked_fill(values == ignored, 0))
        if extremes[0] >= 0 and extremes[1] < count:
            return
    wrong = extremes[0] if extremes[0] < 0 else extremes[1]
    spared = "" if ignored is None else f", or {ignored}, which is ignored"
    raise ValueError(f"{name} must be from 0 to {count - 1} ({limit} is {count}){spared}, got {wrong}.")


def _extremes(values: torch.Tensor) -> tuple[int, int] | None:
    """Minimum and maximum of some integers; `None` if reading them would synchronise or is impossible."""
    if values.device.type != "cpu" or not can_check() or not values.numel():
        return None
    try:
        least, largest = values.aminmax()
        return int(least), int(largest)
    except RuntimeError:
        return None  # fake tensors, and tensors inside `vmap`, have no values


def check_labels(
    labels: torch.Tensor | None, count: int, limit: str, name: str = "labels", sentences: int | None = None
) -> None:
    """Checks labels as [`check_integers`] does, -100 being valid; skipped in compiled code.

    Args:
        labels (`torch.Tensor`, *optional*): Classes.
        count (`int`), limit (`str`): Number of classes, and the name of the limit.
        name (`str`): Name of the argument.
        sentences (`int`, *optional*): Number of sentences, each of which has one label.

    Raises:
        ValueError: if a label is out of range, or the shape is not `(sentences,)`.
    """
    if labels is None or not can_check():
        return
    if sentences is not None and labels.shape != (sentences,):
        raise ValueError(
            f"{name} must have shape ({sentences},), one class for each sentence, got {tuple(labels.shape)}."
        )
    check_integers(name, labels, count, limit, ignored=IGNORED)


def check_text(name: str, text: torch.Tensor) -> None:
    """Checks that a batch has the right shape and is not empty.

    Args:
        name (`str`): Name of the argument; token ids, or embeddings if it ends in `embeds`.
        text (`torch.Tensor` of shape `(batch, length)` or `(batch, length, dim)`)

    Raises:
        ValueError: if it has another shape, no sentence, or no token.
    """
    shape, wanted = tuple(text.shape), "(batch, length, dim)" if name.endswith("embeds") else "(batch, length)"
    if len(shape) != wanted.count(",") + 1:
        raise ValueError(f"{name} must have shape {wanted}, got {shape}.")
    if not shape[0]:
        raise ValueError(f"{name} has shape {shape}: the batch is empty; pass at least one sentence.")
    if not shape[1]:
        raise ValueError(f"{name} has shape {shape}: sentence 0 of the batch is empty; leave it out.")
