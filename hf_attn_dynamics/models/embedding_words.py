# Licensed under the Apache License, Version 2.0.
"""Embeddings and masks of padded batches of words."""

import torch
from torch import nn

from .input_checks import can_check, check_integers, check_text
from .token_mask import check_mask_shape, non_padding, non_padding_ids


def real_positions(
    inputs: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int | None
) -> torch.BoolTensor:
    """Mask of the non-padding tokens, from the attention mask or else from the ids.

    Args:
        inputs (`torch.Tensor` of shape `(batch, length)` or `(batch, length, dim)`): Ids, or embeddings.
        attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 for padding, on either side.
        pad_token_id (`int`, *optional*): Without a mask, this id is padding; embeddings then have no padding.

    Returns:
        `torch.BoolTensor` of shape `(batch, length)`

    Raises:
        ValueError: if the mask does not have the shape of the batch.
    """
    if attention_mask is not None:
        if can_check():
            check_mask_shape("attention_mask", attention_mask, inputs.shape[:2])
        return non_padding(attention_mask, inputs.shape[:2])
    if inputs.dim() == 2:
        return non_padding_ids(inputs, pad_token_id)
    return non_padding(None, inputs.shape[:2], inputs.device)


def uniform_weights(real: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """Uniform weights over the words of each sentence, 0 for padding; shape `(batch, length)`."""
    return real.to(dtype) / real.sum(1, keepdim=True)


def check_words(name: str, given: torch.Tensor, embeddings: nn.Embedding, limit: str = "vocab_size") -> None:
    """Raises ValueError for an empty batch, and for ids outside an embedding table.

    Args:
        name (`str`): Name of the argument, for the message.
        given (`torch.Tensor` of shape `(batch, length)` or `(batch, length, dim)`): Ids, or embeddings.
        embeddings (`nn.Embedding`): The table.
        limit (`str`): Name of the table's size in the configuration, for the message.
    """
    check_text(name, given)
    if not name.endswith("embeds"):
        check_integers(name, given, embeddings.num_embeddings, limit)


def check_sentences(real: torch.BoolTensor) -> None:
    """Raises ValueError for sentences without words, over which no average exists."""
    empty = ~real.any(1)
    if empty.any():
        raise ValueError(f"sentence {int(empty.nonzero()[0])} of the batch is empty; leave it out.")


class WordReader:
    """A module that embeds words; it has a `config` and `embeddings`."""

    def embedded_words(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.FloatTensor | None,
    ) -> tuple[torch.Tensor, torch.BoolTensor]:
        """Embeddings of a batch given as ids or embeddings, and its mask of non-padding tokens.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): Words.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): See [`real_positions`].
            inputs_embeds (`torch.FloatTensor` of shape `(batch, length, dim)`, *optional*): Replaces `input_ids`.

        Returns:
            `tuple[torch.Tensor, torch.BoolTensor]`: of shapes `(batch, length, dim)` and `(batch, length)`.

        Raises:
            ValueError: unless exactly one of ids and embeddings is given; if the batch or a sentence is empty; if a
                shape does not fit; or if an id is not in the vocabulary (see [`check_integers`]).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds.")
        size = self.config.embedding_size
        # LSTM kernels are called without the checks of `nn.LSTM`, and would read beyond the weights.
        if inputs_embeds is not None and (inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != size):
            raise ValueError(
                f"inputs_embeds must have shape (batch, length, {size}), got {tuple(inputs_embeds.shape)}."
            )
        given = input_ids if inputs_embeds is None else inputs_embeds
        if can_check():
            check_words("input_ids" if inputs_embeds is None else "inputs_embeds", given, self.embeddings)
        real = real_positions(given, attention_mask, self.config.pad_token_id)
        if can_check():
            check_sentences(real)
        return self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds, real
