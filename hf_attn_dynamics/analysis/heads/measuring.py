# Licensed under the Apache License, Version 2.0.
"""Measuring forward passes: example inputs, FLOPs, and the time of models that alternate."""

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from ...models.compat import build_from_config
from ...models.cost_table import PHASES
from ...models.number_checks import is_integer
from ..model_views import ModelView, evaluation_view
from ..running import longest_input


WARM_UP = 2  # forward passes of each model before timing
LARGEST_CHUNK = 31 * 2**20  # bytes; glibc keeps no larger chunks in any case

Inputs = dict[str, Any]


def check_counts(**given: int | None) -> None:
    """Raises ValueError for numbers that are not integers greater than 0; `None` is allowed."""
    for name, value in given.items():
        if value is not None and not (is_integer(value) and value > 0):
            raise ValueError(f"{name} must be an integer greater than 0, got {value!r}.")


def check_phase(phase: str) -> None:
    """Raises ValueError unless `phase` is `forward` or `decode`."""
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}.")


def check_weights(name: str, model: PreTrainedModel) -> None:
    """Checks that weights are not quantized: their parameters and operations cannot be counted."""
    packed = [key for key, value in model.state_dict().items() if not torch.is_tensor(value)]
    if packed or getattr(model, "is_quantized", False):
        raise ValueError(
            f"{name} is a quantized {type(model).__name__}{f' ({packed[0]})' if packed else ''}, whose parameters and "
            "operations cannot be counted; pass the model before quantization."
        )


def check_buildable(model: Any, otherwise: str = "") -> None:
    """Raises ValueError for wrapped models, which cannot be built from a configuration.

    Args:
        model: The model.
        otherwise (`str`): What else to do, for the message.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}, which cannot be built with all its heads; pass the model inside "
            f"(model.merge_and_unload() of adapters){otherwise}."
        )


def built_anew(model: PreTrainedModel, device: str = "cpu", otherwise: str = "", **settings: Any) -> PreTrainedModel:
    """The same model with all heads and units and random weights, and without added biases.

    The global random state is not changed.

    Args:
        model (`PreTrainedModel`): The model.
        device (`str`): Where to build it.
        otherwise (`str`): See [`check_buildable`].
        settings: Other values of the configuration to change, where it has them.

    Raises:
        ValueError: if `model` is not a `PreTrainedModel`.
    """
    check_buildable(model, otherwise)
    config = copy.deepcopy(model.config)
    config.pruned_heads = config.pruned_units = None
    for name, value in ({"added_biases": False} | settings).items():
        if hasattr(config, name):
            setattr(config, name, value)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        return build_from_config(type(model), config, model.dtype)


def example_inputs(model: PreTrainedModel, batch: int, length: int | None) -> dict[str, torch.Tensor]:
    """Random inputs for text, image and speech models, on the CPU."""
    config, name = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    arguments = inspect.signature(model.forward).parameters
    inputs = {}
    if name == "pixel_values" and hasattr(config, "image_size"):
        if length is not None:
            raise ValueError(
                f"length={length}: {type(model).__name__} reads images of a fixed size; leave length out."
            )
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs[name] = torch.randn(batch, config.num_channels, height, width, generator=generator)
    elif name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # Its convolutions halve the number of frames.
        shape = batch, config.num_mel_bins, 2 * config.max_source_positions
        inputs[name] = torch.randn(shape, generator=generator)
    elif name == "input_ids" and not hasattr(config, "vision_config"):
        length = checked_length(model, length)
        inputs[name] = _random_ids(model, batch, length, generator)
        if "attention_mask" in arguments:
            inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
    else:
        raise ValueError(
            f"cannot make inputs for {type(model).__name__}, which reads {name!r}; pass inputs={{{name!r}: …}}."
        )
    if "decoder_input_ids" in arguments:
        length = checked_length(model, length)
        inputs["decoder_input_ids"] = _random_ids(model, batch, length, generator)
    return inputs


def checked_length(model: PreTrainedModel, length: int | None) -> int:
    """A number of tokens that a model has positions for; 128 or all of them by default.

    Raises:
        ValueError: if it has fewer.
    """
    longest = longest_input(model)
    if length is None:
        return 128 if longest is None else min(128, longest)
    if longest is not None and length > longest:
        raise ValueError(f"length is {length}, but {type(model).__name__} has positions for {longest} tokens.")
    return length


def _random_ids(model: PreTrainedModel, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random token ids without padding; the last one is the end of sentence, which some classification heads need."""
    config = model.config
    end = getattr(config, "eos_token_id", None)
    vocabulary = min(
        model.get_input_embeddings().num_embeddings,
        getattr(config, "decoder_vocab_size", None) or math.inf,
    )
    every = range(vocabulary)
    ordinary = torch.tensor([token for token in every if token not in (config.pad_token_id, end)] or list(every))
    ids = ordinary[torch.randint(len(ordinary), (batch, length), generator=generator)]
    # Small configurations keep the EOS token of the full vocabulary, which may be out of range.
    if end in every:
        ids[:, -1] = end
    return ids


def moved(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Inputs on a device, floating-point ones in the data type of the model."""
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}


def checked_decoding(model: PreTrainedModel, length: int | None) -> int:
    """Number of tokens in the cache of a decoder; 127 or all positions but one by default.

    Raises:
        ValueError: if the model has no cache, or no position for the next token.
    """
    if "cache" not in inspect.signature(model.forward).parameters or not model.can_generate():
        raise ValueError(
            f"phase='decode' needs a model that generates text with a cache, which {type(model).__name__} does not; "
            "use phase='forward'."
        )
    if length is None:
        return checked_length(model, None) - 1
    return checked_length(model, length + 1) - 1


@torch.inference_mode()
def decoding_inputs(model: PreTrainedModel, inputs: Inputs) -> Callable[[], Inputs]:
    """Prepares the decoding of one token with a filled cache.

    Args:
        model (`PreTrainedModel`): A decoder, or an encoder–decoder, in evaluation mode; a copy of any number of heads.
        inputs (`dict`): Its inputs, see [`example_inputs`]: the last token of the decoder is decoded, the cache holds
            the ones before it.

    Returns:
        callable: returns the arguments of the forward pass, each time with a cache of its own, since the model appends
        to it.
    """
    ids_name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids = inputs[ids_name]
    filling = {**inputs, ids_name: ids[:, :-1]}
    arguments = {ids_name: ids[:, -1:]}
    if ids_name == "decoder_input_ids":
        encoder_inputs = {name: value for name, value in inputs.items() if name != ids_name}
        arguments["encoder_outputs"] = model.get_encoder()(**encoder_inputs)
        filling = {"encoder_outputs": arguments["encoder_outputs"], ids_name: ids[:, :-1]}
        if "attention_mask" in inputs:
            arguments["attention_mask"] = filling["attention_mask"] = inputs["attention_mask"]
    elif "attention_mask" in inputs:
        arguments["attention_mask"] = inputs["attention_mask"]
        filling["attention_mask"] = inputs["attention_mask"][:, :-1]
    cache = model(**filling, use_cache=True).cache
    return lambda: {**arguments, "cache": copy.deepcopy(cache), "use_cache": True}


def cache_bytes(cache: Any) -> float:
    """Bytes of keys and values of self-attention that a cache holds for each token of a sentence."""
    cache = getattr(cache, "self_attention_cache", cache)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() / (tensor.shape[0] * tensor.shape[-2]) for tensor in tensors)


def count_flops(model: PreTrainedModel, inputs: Inputs) -> int:
    """FLOPs of one forward pass, with attention as matrix products: the counter misses fused kernels on CPUs."""
    view = evaluation_view(model)
    view.name_attention(model, lambda part, before: before if before in ("eager", "sdpa") else "eager")
    # The counter keeps references to tensors that require gradients.
    view.detach_parameters()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        without_mixed_precision(view)(**inputs)
    return counter.get_total_flops()


def without_mixed_precision(view: ModelView) -> PreTrainedModel:
    """The root of a view, which computes in the data type of its weights also if a trainer has prepared the model."""
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(view.root, keep_fp32_wrapper=False)


def alternating_times(
    models: Sequence[PreTrainedModel], inputs: Sequence[Callable[[], Inputs]], rounds: int, device: torch.device
) -> list[list[float]]:
    """Seconds of forward passes of models that alternate, so that all see the same load of the machine.

    On CPUs, page faults of temporary tensors are avoided as far as possible: they slow the larger model down, and more
    so in a new process than in one that has freed a large tensor before.

    Args:
        models (sequence): The models; the first of a round alternates as well.
        inputs (sequence of callables): Make the inputs of each model before each of its passes, which is not timed.
        rounds (`int`): Number of timed rounds, after [`WARM_UP`] passes of each model.
        device (`torch.device`): Device of the models.

    Returns:
        `list[list[float]]`: seconds of each round, by model.
    """
    # Once a chunk was freed, the allocator of glibc keeps chunks of this size instead of returning them to the system.
    torch.empty(LARGEST_CHUNK, dtype=torch.uint8)
    for _ in range(WARM_UP):
        for model, make in zip(models, inputs):
            model(**make())
    times: list[list[float]] = [[] for _ in models]
    for turn in range(rounds):
        for which in sorted(range(len(models)), reverse=bool(turn % 2)):
            arguments = inputs[which]()
            _synchronize(device)
            start = time.perf_counter()
            models[which](**arguments)
            _synchronize(device)
            times[which].append(time.perf_counter() - start)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """Context in which PyTorch uses a number of CPU threads."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)
