# Licensed under the Apache License, Version 2.0.
"""Running a model on batches: moving them to its device, and telling tokens from padding."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..models.adapters import without_adapters
from ..models.ignored_labels import is_labelled
from ..models.token_mask import non_padding


def unwrapped(model: nn.Module) -> nn.Module:
    """Unwraps a PEFT model, adapters active; returns any other model unchanged.

    Raises:
        ValueError: if the wrapper prepends trained vectors to the text (prompt learning).
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__} prepends trained vectors to the text, which the model inside does not contain; "
            "pass model.get_base_model() to analyse it without them."
        )
    return without_adapters(model)


def named_arguments(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call of a module, all by name."""
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}


def on_device(batch: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Moves the tensors of a batch to the device of the model.

    Raises:
        ValueError: if `batch` is not a dictionary, or its token ids are a list.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch must be a dictionary, as in {{'input_ids': ids}}, got {type(batch).__name__}.")
    if isinstance(batch.get("input_ids"), list):
        raise ValueError("input_ids of the batch are a list, not a tensor; tokenize with return_tensors='pt'.")
    return {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}


def is_seq2seq(model: PreTrainedModel) -> bool:
    """Whether the model has an encoder and a decoder."""
    # The encoder has the configuration of the whole model, but is its own encoder.
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and model.get_encoder() is not model


def reader_of(model: PreTrainedModel) -> PreTrainedModel:
    """The base model of a model, or the encoder of an encoder–decoder model.

    Raises:
        ValueError: if `model` is neither a `PreTrainedModel` nor a PEFT wrapper.
    """
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ValueError(f"model must be a PreTrainedModel, got {given}.")
    return model.get_encoder() if is_seq2seq(model) else model.base_model


def arguments_of(reader: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass that the reader accepts, on its device."""
    parameters = inspect.signature(reader.forward).parameters
    inputs = {name: value for name, value in on_device(batch, reader).items() if name in parameters}
    return {**inputs, "use_cache": False} if "use_cache" in parameters else inputs


def batches_of(
    data: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    model: PreTrainedModel,
    purpose: str,
    progress: bool = False,
    argument: str = "data",
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Enumerates batches, with their tensors on the device of the model.

    Args:
        data (iterable of `dict`): Batches, or a single batch: arguments of the forward pass.
        model (`PreTrainedModel`): The model.
        purpose (`str`): Name of the analysis, for the progress bar and messages.
        progress (`bool`): Whether to show a progress bar.
        argument (`str`): Name of the user's argument, for messages.

    Raises:
        ValueError: if there is no batch, or one is not a dictionary of tensors.
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
    """Padding mask at a kind of site: True at tokens.

    Padding has attention mask 0. In the decoder of an encoder–decoder model, it has decoder attention mask 0 or,
    without such a mask, the label -100.

    Args:
        model (`PreTrainedModel`): The model.
        kind (`str`): `encoder`, or `decoder` and `cross` for the positions of the decoder.
        batch (`dict`): Arguments of the forward pass.
        shape (`tuple[int, int]`): Batch size and length.
        device (`torch.device`): Device of the result.

    Returns:
        `torch.Tensor` of shape `shape`, boolean.

    Raises:
        ValueError: if the mask has another shape.
    """
    name, mask = given_token_mask(model, kind, batch, shape)
    if mask is not None and getattr(mask, "shape", None) != shape:
        given = f"the shape {tuple(mask.shape)}" if torch.is_tensor(mask) else f"the type {type(mask).__name__}"
        raise ValueError(
            f"{name} has {given}, but the {kind} attention has (batch, length) = {tuple(shape)}; give one value "
            "per token, or leave it out."
        )
    return non_padding(mask, shape, device)


def given_token_mask(
    model: PreTrainedModel, kind: str, batch: Mapping[str, Any], shape: tuple[int, int]
) -> tuple[str, Any]:
    """The argument of a batch that locates padding at a kind of site, see [`real_tokens`].

    Returns:
        Name of the argument and the mask, whose shape is not checked; `None` if there is no padding.
    """
    name, mask = "attention_mask", batch.get("attention_mask")
    if kind == "encoder" and batch.get("pixel_values") is not None:
        # The mask belongs to the text beside the image.
        return name, None
    if kind != "encoder" and is_seq2seq(model):
        labels = batch.get("labels")
        if batch.get("decoder_attention_mask") is not None:
            name, mask = "decoder_attention_mask", batch["decoder_attention_mask"]
        elif labels is not None and labels.shape == shape:
            name, mask = "labels", is_labelled(labels)
        elif batch.get("decoder_input_ids") is not None or batch.get("decoder_inputs_embeds") is not None:
            mask = None
        # Else the decoder reads the encoder's input once more, as in classifiers.
    if torch.is_tensor(mask) and mask.dim() == 3 and mask.flatten(0, 1).shape == shape:
        mask = mask.flatten(0, 1)  # multiple choice: each choice is a sequence of its own
    return name, mask


def longest_input(model: PreTrainedModel) -> int | None:
    """Maximum number of tokens that a model has positions for; `None` if unlimited."""
    config = model.config
    if hasattr(config, "max_positions"):
        longest = config.max_positions()
    else:
        counts = [getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions")]
        longest = min((count for count in counts if isinstance(count, int) and count > 0), default=None)
    # In RoBERTa's kind of position table, the first positions are reserved for padding.
    tables = [
        module.num_embeddings - module.padding_idx - 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return min(tables + [longest] * (longest is not None), default=None)
