# Licensed under the Apache License, Version 2.0.
"""How analyses run a model: which batches it reads, and which of their positions are tokens."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..models.ignored_labels import is_labelled
from ..models.token_mask import non_padding


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that adapters were put into, with them, of a wrapper as PEFT's; any other model is itself.

    Raises:
        ValueError: if the wrapper does more than the model in it: if it puts vectors of its own before the text.
    """
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__} puts trained vectors before the text, which the model in it knows nothing of; "
            "pass model.get_base_model() to see it without them."
        )
    return model.get_base_model()


def on_device(batch: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """A batch whose tensors are where the model takes them.

    Raises:
        ValueError: if it is no dictionary, or token ids are a list of numbers.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch must be a dictionary, as in {{'input_ids': ids}}, got {type(batch).__name__}.")
    if isinstance(batch.get("input_ids"), list):
        raise ValueError("input_ids of the batch are a list, not a tensor; tokenize with return_tensors='pt'.")
    return {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}


def batches_of(
    data: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    model: PreTrainedModel,
    purpose: str,
    progress: bool = False,
    argument: str = "data",
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Batches with their numbers, their tensors where the model takes them.

    Args:
        data (iterable of `dict`): Batches, as the model takes them; or a single one.
        model (`PreTrainedModel`): What is to read them.
        purpose (`str`): What they are read for, for the progress bar and messages.
        progress (`bool`): Whether to show a progress bar.
        argument (`str`): What the user knows `data` as.

    Raises:
        ValueError: if there is no batch, or one is not what [`on_device`] takes.
    """
    number = -1
    batches = [data] if isinstance(data, Mapping) else data
    for number, batch in enumerate(tqdm(batches, desc=purpose, disable=not progress)):
        if not isinstance(batch, Mapping):
            raise ValueError(f"batch {number} of {argument} must be a dictionary of tensors, got {type(batch)}.")
        yield number, on_device(batch, model)
    if number < 0:
        raise ValueError(f"{argument} is empty: {purpose} needs at least one batch.")


def real_tokens(
    model: PreTrainedModel, kind: str, batch: Mapping[str, Any], shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Which positions at a kind of site are tokens and no padding.

    Positions with attention mask 0 are no tokens. On the decoder's side of an encoder–decoder model these are
    positions with decoder attention mask 0 or, without such a mask, with the label -100.

    Args:
        model (`PreTrainedModel`): What reads the batch.
        kind (`str`): `encoder`, or `decoder` and `cross` for the positions of the decoder.
        batch (`dict`): Arguments of its forward pass.
        shape (`tuple[int, int]`): Batch and length of the positions.
        device (`torch.device`): Where the answer is wanted.

    Returns:
        `torch.Tensor` of shape `shape`, boolean.

    Raises:
        ValueError: if a mask does not fit.
    """
    name, mask = given_token_mask(model, kind, batch, shape)
    if mask is not None and getattr(mask, "shape", None) != shape:
        given = f"the shape {tuple(mask.shape)}" if torch.is_tensor(mask) else f"the type {type(mask).__name__}"
        raise ValueError(
            f"{name} has {given}, but the {kind} attention has (batch, length) = {tuple(shape)}; give one mark "
            "a token, or leave it out."
        )
    return non_padding(mask, shape, device)


def given_token_mask(
    model: PreTrainedModel, kind: str, batch: Mapping[str, Any], shape: tuple[int, int]
) -> tuple[str, Any]:
    """What a batch holds that tells which positions at a kind of site are tokens, see [`real_tokens`].

    Returns:
        Its name, and the mask or labels, which need not fit; `None` if all are tokens.
    """
    name, mask = "attention_mask", batch.get("attention_mask")
    if kind == "encoder" and batch.get("pixel_values") is not None:
        # The mask is that of the text beside the image.
        return name, None
    if kind != "encoder" and getattr(model.config, "is_encoder_decoder", False):
        labels = batch.get("labels")
        if batch.get("decoder_attention_mask") is not None:
            name, mask = "decoder_attention_mask", batch["decoder_attention_mask"]
        elif labels is not None and labels.shape == shape:
            name, mask = "labels", is_labelled(labels)
        elif batch.get("decoder_input_ids") is not None or batch.get("decoder_inputs_embeds") is not None:
            mask = None
        # Else the decoder reads the sentence of the encoder once more, as classifiers do.
    if torch.is_tensor(mask) and mask.dim() == 3 and mask.flatten(0, 1).shape == shape:
        mask = mask.flatten(0, 1)  # each of several choices is read as a sentence
    return name, mask


def longest_input(model: PreTrainedModel) -> int | None:
    """Number of tokens that a model has positions for; `None` if any."""
    config = model.config
    if hasattr(config, "max_positions"):
        longest = config.max_positions()
    else:
        counts = [getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions")]
        longest = min((count for count in counts if isinstance(count, int) and count > 0), default=None)
    # Where padding has a position of its own, sentences begin after it.
    tables = [
        module.num_embeddings - module.padding_idx - 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return min(tables + [longest] * (longest is not None), default=None)
