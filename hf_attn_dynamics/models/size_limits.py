# Licensed under the Apache License, Version 2.0.
"""Limits of the sizes in a configuration, so that a damaged checkpoint cannot exhaust the memory."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .compat import MissingWeightsMixin
from .number_checks import is_integer


# Minimum and maximum of each size, under all names that configurations have for it.
SIZE_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers"), (1, 1024)),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), (0, 1024)),
    **dict.fromkeys(
        ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads",
         "num_heads", "n_head", "n_heads"),
        (1, 1024),
    ),
    **dict.fromkeys(
        ("hidden_size", "embedding_size", "intermediate_size", "d_model", "d_ff", "d_kv", "encoder_ffn_dim",
         "decoder_ffn_dim", "ffn_dim", "head_dim", "dim", "hidden_dim", "n_embd", "n_inner", "key_size",
         "classifier_hidden_size", "attention_size", "readout_size"),
        (1, 2**17),
    ),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "n_positions", "n_ctx"), (1, 2**20)),
    # Rotary positions take no memory, and models with 10 million positions are in use.
    "max_position_embeddings": (1, 2**24),
    **dict.fromkeys(("type_vocab_size", "num_labels"), (0, 2**20)),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "target_vocab_size"), (1, 2**24)),
}  # fmt: skip
FRESH_WEIGHTS = 2**26  # elements that a checkpoint may lack, in addition to as many as it has


def check_folder(path: str | Path | None) -> None:
    """Raises FileNotFoundError for a path that neither exists nor can be a name on the Hub.

    Example:
        >>> check_folder("/models/nowhere")
        Traceback (most recent call last):
        FileNotFoundError: there is no folder /models/nowhere; pass the folder that save_pretrained wrote, or a ...
    """
    if path is None or Path(path).exists():
        return
    # A name on the Hub is `model` or `owner/model`.
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(path)):
        raise FileNotFoundError(
            f"there is no folder {path}; pass the folder that save_pretrained wrote, or a model on the Hub, as "
            "'model' or 'owner/model'."
        )


def read_config_dict(read: Callable[..., tuple[dict, dict]], path: str | Path, **kwargs: Any) -> tuple[dict, dict]:
    """Calls `get_config_dict` of a configuration class, with clear errors.

    Raises:
        ValueError: if the file does not contain a JSON object.
        OSError: if it is not found.
    """
    check_folder(path)
    try:
        config_dict, others = read(path, **kwargs)
    except OSError as error:
        if path is None or Path(path).exists():
            raise
        raise OSError(f"there is no folder {path}, and no model of that name on the Hub: {error}") from error
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the configuration of {path} is not a JSON object: {error}.") from error
    if not isinstance(config_dict, dict):
        raise ValueError(f"the configuration of {path} is not a JSON object, but {type(config_dict).__name__}.")
    return config_dict, others


def check_size_limits(values: Mapping[str, Any], where: str = "") -> None:
    """Checks the sizes in a configuration against `SIZE_LIMITS`, nested dictionaries included.

    Args:
        values (`dict`): Values of a configuration. `None` stands for the default, except in `num_labels`. A list has
            one size per layer.
        where (`str`): Name of the dictionary, for messages.

    Raises:
        ValueError: if a size is out of range; the message names it, its value and the limits.

    Example:
        >>> check_size_limits({"hidden_size": 768, "num_hidden_layers": 10**9})
        Traceback (most recent call last):
        ValueError: num_hidden_layers must be an integer from 1 to 1,024, got 1000000000.
    """
    for name, value in values.items():
        if name in ("id2label", "label2id"):
            continue  # keys are names of classes
        if isinstance(value, Mapping):
            check_size_limits(value, f"{where}{name} ")
        elif name in SIZE_LIMITS and (value is not None or name == "num_labels"):
            least, most = SIZE_LIMITS[name]
            for size in value if isinstance(value, list) else [value]:
                if not (is_integer(size) and least <= size <= most):
                    raise ValueError(f"{where}{name} must be an integer from {least} to {most:,}, got {size!r}.")


class LimitedConfigMixin:
    """A configuration that checks its sizes, and that its file contains a JSON object."""

    def __post_init__(self, **kwargs):
        # Not by `getattr`, which warns that `torch_dtype` is deprecated.
        values = {**vars(self), **kwargs}
        check_size_limits(values)
        if self.id2label is not None and not isinstance(self.id2label, Mapping):
            raise ValueError(f"id2label must be a dictionary from class ids to names, got {self.id2label!r:.60}.")
        for name in ("dtype", "torch_dtype"):
            if isinstance(values.get(name), list):
                raise ValueError(f"{name} must be the name of a dtype, got {values[name]!r:.60}.")
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        return read_config_dict(super().get_config_dict, pretrained_model_name_or_path, **kwargs)


def check_missing_weights(model: nn.Module, missing: Iterable[str]) -> None:
    """Checks that a checkpoint does not lack many more weights than it has.

    Args:
        model (`nn.Module`): A model whose missing weights are still on the meta device.
        missing (iterable of `str`): Names of parameters and buffers that the checkpoint lacks, or has in another size.

    Raises:
        ValueError: if they have more elements than the loaded weights and 2²⁶ together.
    """
    fresh = sum(model.get_parameter_or_buffer(name).numel() for name in missing)
    loaded = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    if fresh > loaded + FRESH_WEIGHTS:
        raise ValueError(
            f"the configuration needs {fresh:,} elements that are missing from the weights, which have {loaded:,}: "
            "configuration and weights do not match; copy or download both again."
        )


class LimitedModelMixin(MissingWeightsMixin):
    """A model that refuses checkpoints that lack most of its weights; precedes the model class."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        # Before an installed PEFT looks for adapters of this name on the Hub.
        check_folder(pretrained_model_name_or_path)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def missing_weights_found(self, names: set[str]) -> None:
        """Raises ValueError for too many missing weights, before memory is allocated for them."""
        check_missing_weights(self, names)
