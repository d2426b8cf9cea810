# Licensed under the Apache License, Version 2.0.
"""Class and sizes of a model, which determine what it costs; pruning does not change them."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .adapters import without_adapters
from .number_checks import is_integer


# Integers of a configuration that are no sizes end so.
_NO_SIZES = ("_id", "_ids", "_index", "_token")
# Values beside integers that select a computation.
_SELECTING = {"hidden_act", "activation_function", "is_gated_act", "layer_types"}


def architecture_sizes(model: nn.Module) -> dict[str, Any]:
    """Class and sizes of a model.

    They are the same for a pruned and its dense model, for a headwise model and its stock class, and for a model with
    adapters and the model inside.

    Args:
        model (`PreTrainedModel`): The model.

    Returns:
        `dict`: `class`, then integers and a few other values of the configuration by name, with a prefix for those of
        sub-configurations.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
        >>> sizes = architecture_sizes(BertModel(config))
        >>> sizes["class"], sizes["hidden_size"], sizes["intermediate_size"]
        ('BertModel', 16, 3072)
    """
    model = without_adapters(model)
    return {"class": type(model).__name__.removeprefix("Headwise"), **_sizes(model.config)}


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    found = {}
    for name, value in sorted(config.to_dict().items()):
        inner = getattr(config, name, None) if name in config.sub_configs else None
        if isinstance(inner, PreTrainedConfig):
            found |= {f"{name}.{key}": one for key, one in _sizes(inner).items()}
        elif name in _SELECTING or (is_integer(value) and not name.endswith(_NO_SIZES)):
            found[name] = value
    if getattr(config, "hard_coded", None) is not None:
        found["hard_coded"] = True
    return found


def differences(expected: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[str]:
    """What differs between the sizes of two models, in words."""
    return [
        f"{name} {expected.get(name, 'unknown')}, not {sizes.get(name, 'unknown')}"
        for name in dict.fromkeys((*expected, *sizes))
        if expected.get(name) != sizes.get(name)
    ]
