# Licensed under the Apache License, Version 2.0.
"""How analyses run a model: in which mode, with which attention function, and which of its positions are tokens."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..models.head_roles import HeadLayer


IGNORED = -100  # labels of this value have no loss
_NUMBERS = itertools.count()  # names of attention functions are never used twice


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


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode and afterwards each of its modules back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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


@contextmanager
def attention_implementation(
    model: PreTrainedModel, name: str | Callable[[PreTrainedModel, str], str]
) -> Iterator[None]:
    """Has attention computed by another function, and afterwards by the one that was chosen before.

    Args:
        model (`PreTrainedModel`): Parts that compute attention by themselves go on doing so; Transformers logs it.
        name (`str` or callable): Name of a registered function; or what gives it for a part of the model, from the
            name of the one before.
    """
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [part.config._attn_implementation or "eager" for part in parts]
    try:
        # A model hands the name on to its parts; those have their own turn after it.
        for part, old in zip(parts, before):
            part.set_attn_implementation(name if isinstance(name, str) else name(part, old))
        yield
    finally:
        for part, old in zip(parts, before):
            part.set_attn_implementation(old)


@contextmanager
def attention_function(
    model: PreTrainedModel, function_over: Callable[[str], Callable], kernel: str | None = None
) -> Iterator[None]:
    """Has a function called wherever a model attends, and afterwards the kernel that was chosen before.

    Args:
        model (`PreTrainedModel`): Parts that compute attention by themselves go on doing so.
        function_over (callable): Gives the function, from the name of the kernel that it stands for.
        kernel (`str`, *optional*): That kernel, whose masks the function gets; by default the one before, or for
            `flash` and `flex` kernels, whose masks cannot be read, `sdpa`, or `eager` where a model has no `sdpa`.
    """
    with ExitStack() as stack:
        stack.enter_context(attention_implementation(model, partial(_registered, stack, function_over, kernel)))
        yield


def _registered(
    stack: ExitStack, function_over: Callable[[str], Callable], kernel: str | None, part: PreTrainedModel, before: str
) -> str:
    """Registers a function for a part of a model until the stack is left, and returns its name."""
    readable = "sdpa" if part._supports_sdpa else "eager"
    kernel = kernel or (readable if "flash" in before or "flex" in before else before)
    # The last part of the name tells what is beneath.
    name = f"observed_{next(_NUMBERS)}|{kernel}"
    functions: dict[type, Any] = {AttentionInterface: function_over(kernel)}
    if (mask_function := ALL_MASK_ATTENTION_FUNCTIONS.get(kernel)) is not None:
        functions[AttentionMaskInterface] = mask_function
    for interface, function in functions.items():
        interface.register(name, function)
        # Masks are made for names of this mapping only, and there is no function that takes one out.
        stack.callback(interface._global_mapping.pop, name)
    return name


@contextmanager
def edited_outputs(layer: HeadLayer, edit: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Has the outputs of the heads of a layer seen, or replaced, before they reach the output projection.

    Args:
        layer (`HeadLayer`): The layer; one that has lost all its heads gives nothing.
        edit (callable): Takes the outputs of the heads that are left, `(batch, length, heads, head_dim)`, each time
            the layer runs; what it returns, if anything, takes their place.
    """

    def before_projection(module: nn.Module, inputs: tuple) -> tuple | None:
        edited = edit(inputs[0].unflatten(-1, (len(layer.heads), layer.head_dim)))
        return None if edited is None else (edited.flatten(-2), *inputs[1:])

    if not layer.heads:
        yield
        return
    hook = layer.output.register_forward_pre_hook(before_projection)
    try:
        yield
    finally:
        hook.remove()


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
    name, mask = token_mask(model, kind, batch, shape)
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if getattr(mask, "shape", None) != shape:
        given = f"the shape {tuple(mask.shape)}" if torch.is_tensor(mask) else f"the type {type(mask).__name__}"
        raise ValueError(
            f"{name} has {given}, but the {kind} attention has (batch, length) = {tuple(shape)}; give one mark "
            "a token, or leave it out."
        )
    return mask.to(device).bool()


def token_mask(model: PreTrainedModel, kind: str, batch: Mapping[str, Any], shape: tuple[int, int]) -> tuple[str, Any]:
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
            name, mask = "labels", labels.ne(IGNORED)
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
        return config.max_positions()
    counts = [getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    longest = min((count for count in counts if isinstance(count, int) and count > 0), default=None)
    # Where padding has a position of its own, sentences begin after it.
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return module.num_embeddings - module.padding_idx - 1
    return longest
