# Licensed under the Apache License, Version 2.0.
"""Masks of the non-padding tokens of a batch.

In all models, losses and analyses of this package, an attention mask is 0 at padding and any other value at tokens.
The stock loss of ELECTRA's discriminator is an exception: it counts tokens whose mask is 1.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .ignored_labels import IGNORED


def non_padding(
    mask: torch.Tensor | None, shape: tuple[int, ...], device: torch.device | None = None
) -> torch.BoolTensor:
    """Boolean mask of the non-padding tokens.

    Args:
        mask (`torch.Tensor` of shape `shape`, *optional*): 0 at padding; `None` for no padding. Its shape is not
            checked, see [`check_mask_shape`].
        shape (`tuple[int, ...]`): Shape of the text, `(batch, length)`.
        device (`torch.device`, *optional*): Device of the result; defaults to that of the mask.

    Returns:
        `torch.BoolTensor` of shape `shape`

    Example:
        >>> non_padding(torch.tensor([[0, 1, 1]]), (1, 3))
        tensor([[False,  True,  True]])
    """
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    # Without a device, compiled and exported code contains no conversion.
    return (mask if device is None else mask.to(device)).bool()


def non_padding_ids(input_ids: torch.Tensor, pad_token_id: int | None) -> torch.BoolTensor:
    """Boolean mask of the ids that are not padding; all True without a padding token."""
    if pad_token_id is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return input_ids != pad_token_id


def labels_of_tokens(labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Replaces labels at padding by -100.

    Args:
        labels (`torch.Tensor` of shape `(batch, length)`): Labels.
        mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 at padding, on the device of the labels.

    Returns:
        `torch.Tensor`: of the same shape and, if signed, the same dtype, otherwise int64; `labels` without a mask.

    Example:
        >>> labels_of_tokens(torch.tensor([[1, 0, 1]]), torch.tensor([[1, 1, 0]]))
        tensor([[   1,    0, -100]])
    """
    if mask is None:
        return labels
    # In a boolean tensor, -100 would become True.
    labels = labels if labels.dtype.is_signed else labels.long()
    return labels.masked_fill(~non_padding(mask, labels.shape), IGNORED)


def may_attend(mask: torch.Tensor) -> torch.BoolTensor:
    """Converts an attention mask to a boolean mask of the visible keys.

    Args:
        mask (`torch.Tensor`): Boolean, True for visible keys; or additive, with the lowest value of the dtype for
            masked keys, to which biases, such as T5's, may have been added.
    """
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def num_sentences(batch: Mapping[str, Any]) -> torch.Tensor:
    """Number of non-empty sentences of a batch, a scalar, over which the guidance loss is averaged.

    Args:
        batch (`dict`): Arguments of a forward pass. Without an attention mask, no sentence is empty.

    Example:
        >>> num_sentences({"attention_mask": torch.tensor([[1, 1], [1, 0], [0, 0]])})
        tensor(2)
    """
    mask = batch.get("attention_mask")
    if mask is not None:
        return non_padding(mask, mask.shape).any(-1).sum()
    inputs = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if inputs is None:
        # Models of other modalities have other input names.
        inputs = next(value for value in batch.values() if torch.is_tensor(value) and value.dim())
    return torch.tensor(inputs.shape[0], device=inputs.device)


def check_mask_shape(
    name: str, mask: torch.Tensor | None, shape: tuple[int, int], needed_by: str | None = None
) -> None:
    """Raises ValueError unless a mask has the shape `(batch, length)` of a text.

    Args:
        name (`str`): Name of the argument, for the message.
        mask (`torch.Tensor`, *optional*): The mask.
        shape (`tuple[int, int]`): Batch and length of the text.
        needed_by (`str`, *optional*): Feature that needs this shape, if the model also accepts others.

    Example:
        >>> check_mask_shape("attention_mask", torch.ones(1, 2), (1, 3))
        Traceback (most recent call last):
        ValueError: attention_mask must have shape (1, 3), one value for each token, got (1, 2).
    """
    if mask is None or tuple(mask.shape) == tuple(shape):
        return
    wanted, given = tuple(shape), tuple(mask.shape)
    if needed_by is not None:
        raise ValueError(f"{needed_by} needs {name} of shape (batch, length) = {wanted}, got {given}.")
    raise ValueError(f"{name} must have shape {wanted}, one value for each token, got {given}.")


def check_mask(name: str, mask: torch.Tensor | None, shape: tuple[int, int]) -> None:
    """[`check_mask_shape`] for two-dimensional masks; masks with a row for each token are not checked."""
    if mask is not None and mask.dim() == 2:
        check_mask_shape(name, mask, shape)
