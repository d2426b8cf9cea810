# Licensed under the Apache License, Version 2.0.
"""Which positions of a padded batch are tokens, by what tells them: a mask, token ids, labels, or a mask of scores.

A mask is 0 at padding and anything else at tokens, in the inputs of every model of this package, in its losses and in
its analyses. The one exception is the stock loss of ELECTRA's discriminator, which counts tokens whose mask is 1: what
looks for the loss that a stock model has computed does so, too.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .ignored_labels import IGNORED


def non_padding(
    mask: torch.Tensor | None, shape: tuple[int, ...], device: torch.device | None = None
) -> torch.BoolTensor:
    """True for tokens, False for padding.

    Args:
        mask (`torch.Tensor` of shape `shape`, *optional*): 0 at padding; without it, all positions are tokens. Its
            shape is not looked at, see [`check_mask_shape`].
        shape (`tuple[int, ...]`): Shape of the text, `(batch, length)`.
        device (`torch.device`, *optional*): Where the answer is wanted; that of the mask by default.

    Returns:
        `torch.BoolTensor` of shape `shape`

    Example:
        >>> non_padding(torch.tensor([[0, 1, 1]]), (1, 3))
        tensor([[False,  True,  True]])
    """
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    # Asked for only where it is known: compiled and exported code would keep the step.
    return (mask if device is None else mask.to(device)).bool()


def non_padding_ids(input_ids: torch.Tensor, pad_token_id: int | None) -> torch.BoolTensor:
    """True for ids that are not padding, in their shape; all are tokens where a model has no padding."""
    if pad_token_id is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return input_ids != pad_token_id


def labels_of_tokens(labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Labels of a model that learns from every token: ignored at padding, where they may be anything.

    Args:
        labels (`torch.Tensor` of shape `(batch, length)`): Labels.
        mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 at padding, on the device of the labels.

    Returns:
        `torch.Tensor`: of the same shape, and of the same type if it has negative numbers, else int64; `labels`
        themselves without a mask.

    Example:
        >>> labels_of_tokens(torch.tensor([[1, 0, 1]]), torch.tensor([[1, 1, 0]]))
        tensor([[   1,    0, -100]])
    """
    if mask is None:
        return labels
    # Truth values would hold the ignored label as True, which counts.
    labels = labels if labels.dtype.is_signed else labels.long()
    return labels.masked_fill(~non_padding(mask, labels.shape), IGNORED)


def may_attend(mask: torch.Tensor) -> torch.BoolTensor:
    """Where a mask of attention scores lets a query attend, in the shape of the mask.

    Args:
        mask (`torch.Tensor`): Boolean, True where it does, or floating-point numbers that are added to scores: there,
            the lowest number of the type hides a key. Other biases, such as T5's, may lie on top of it.
    """
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def num_sentences(batch: Mapping[str, Any]) -> torch.Tensor:
    """Number of sentences of a batch that have a token, a scalar: the guidance loss is the mean over them.

    Args:
        batch (`dict`): Arguments of a forward pass. Without an attention mask, all sentences count.

    Example:
        >>> num_sentences({"attention_mask": torch.tensor([[1, 1], [1, 0], [0, 0]])})
        tensor(2)
    """
    mask = batch.get("attention_mask")
    if mask is not None:
        return non_padding(mask, mask.shape).any(-1).sum()
    inputs = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if inputs is None:
        # Under other names, which a subclass of the trainer knows.
        inputs = next(value for value in batch.values() if torch.is_tensor(value) and value.dim())
    return torch.tensor(inputs.shape[0], device=inputs.device)


def check_mask_shape(
    name: str, mask: torch.Tensor | None, shape: tuple[int, int], needed_by: str | None = None
) -> None:
    """Refuses a mask that does not have one number for each token of a text.

    Args:
        name (`str`): Name of the argument, for the message.
        mask (`torch.Tensor`, *optional*): The mask.
        shape (`tuple[int, int]`): Batch and length of the text.
        needed_by (`str`, *optional*): What needs such a mask where the model itself takes others, too.

    Raises:
        ValueError: naming the argument and both shapes.

    Example:
        >>> check_mask_shape("attention_mask", torch.ones(1, 2), (1, 3))
        Traceback (most recent call last):
        ValueError: attention_mask must have shape (1, 3), a number for each token, got (1, 2).
    """
    if mask is None or tuple(mask.shape) == tuple(shape):
        return
    wanted, given = tuple(shape), tuple(mask.shape)
    if needed_by is not None:
        raise ValueError(f"{needed_by} needs {name} of shape (batch, length) = {wanted}, got {given}.")
    raise ValueError(f"{name} must have shape {wanted}, a number for each token, got {given}.")


def check_mask(name: str, mask: torch.Tensor | None, shape: tuple[int, int]) -> None:
    """[`check_mask_shape`] for models that take masks with a row for each token, too: those are not looked at."""
    if mask is not None and mask.dim() == 2:
        check_mask_shape(name, mask, shape)
