# Licensed under the Apache License, Version 2.0.
"""Inputs that a model has no embedding, class or position for: refused by name before they fail deep inside."""

import torch

from .ignored_labels import IGNORED


def can_check() -> bool:
    """Whether code runs as it stands: compiled, exported and traced code has no errors of its own."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())


def check_integers(name: str, values: torch.Tensor, count: int, limit: str, ignored: int | None = None) -> None:
    """Refuses ids, positions and classes that there are none of.

    Values are looked at where they lie on a CPU, which takes microseconds. An accelerator would have to finish its
    work for it, at each forward pass.

    Args:
        name (`str`): Name of the argument, for the message.
        values (`torch.Tensor`): Integers of any shape.
        count (`int`): How many there are; the values are 0 to `count - 1`.
        limit (`str`): What says so, for the message, such as `vocab_size`.
        ignored (`int`, *optional*): A value that stands for none.

    Raises:
        ValueError: if `values` are not integers, or one of them is none of these; the message names it and the limit.

    Example:
        >>> check_integers("input_ids", torch.tensor([[5, 60]]), 60, "vocab_size")
        Traceback (most recent call last):
        ValueError: input_ids must be from 0 to 59 (vocab_size is 60), got 60.
    """
    if values.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be integers, of type int64 or int32, got {values.dtype}.")
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
    """The least and the largest of some integers, if they are to be had at once."""
    if values.device.type != "cpu" or not can_check() or not values.numel():
        return None
    try:
        least, largest = values.aminmax()
        return int(least), int(largest)
    except RuntimeError:
        return None  # tensors without values: fake ones, and those that `vmap` hands in


def check_labels(
    labels: torch.Tensor | None, count: int, limit: str, name: str = "labels", sentences: int | None = None
) -> None:
    """Refuses classes that there are none of; -100 is ignored, and compiled code not looked at. See `check_integers`.

    Args:
        labels (`torch.Tensor`, *optional*): Classes.
        count (`int`), limit (`str`): How many there are, and what says so.
        name (`str`): Name of the argument.
        sentences (`int`, *optional*): Number of sentences, where there is to be one class for each.

    Raises:
        ValueError: naming the label and the limit, or the shape.
    """
    if labels is None or not can_check():
        return
    if sentences is not None and labels.shape != (sentences,):
        raise ValueError(
            f"{name} must have shape ({sentences},), a class for each sentence, got {tuple(labels.shape)}."
        )
    check_integers(name, labels, count, limit, ignored=IGNORED)


def check_text(name: str, text: torch.Tensor) -> None:
    """Refuses a batch that is none.

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
        raise ValueError(f"{name} has shape {shape}: there is no sentence; give at least one.")
    if not shape[1]:
        raise ValueError(f"{name} has shape {shape}: sentence 0 of the batch is empty; leave it out.")
