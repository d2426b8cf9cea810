# Licensed under the Apache License, Version 2.0.
"""Headwise models of the supported architectures, built or loaded from stock ones.

`models/architectures.py` lists the architectures.
"""

import difflib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .models.architectures import ARCHITECTURES, Architecture, headwise_name
from .models.compat import MODULE_HOOKS, attention_kernel
from .models.hard_concrete import is_of_gate
from .models.head_gates import gates_of
from .models.head_roles import built_in_roles
from .models.head_settings import FIELDS
from .models.headwise_classes import twin_class
from .models.pruned_checkpoints import hub_arguments
from .models.pruned_checkpoints import load_pruned as load_pruned
from .models.size_limits import check_folder


def headwise_model(
    source: str | Path | PreTrainedConfig | PreTrainedModel, auto_class: str = "AutoModel", **kwargs: Any
) -> PreTrainedModel:
    """Builds or loads the headwise counterpart of a configuration, checkpoint or model.

    Args:
        source (`str`, `Path`, `PreTrainedConfig` or `PreTrainedModel`): A folder or name on the Hub to load from; a
            configuration, for random weights; or a model of Transformers, whose weights are shared, not copied.
        auto_class (`str`): Name of the Auto class that selects the task head; ignored for a model.
        kwargs: `guidance`, `gates`, `hard_coded` and, except for a model, `pruned_heads`, see [`HeadwiseConfigMixin`];
            for a checkpoint also arguments of `from_pretrained`, such as `num_labels`.

    Returns:
        `PreTrainedModel`: in evaluation mode if it was loaded; in the mode of `source` if that is a model.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ValueError: if the architecture or the head has no headwise class, in which case the message lists those that
            exist; or if a model cannot share its weights because it has hooks, or is quantized, adapted, compiled or
            not loaded.

    Example:
        >>> from transformers import BertConfig, GPT2Config, GPT2LMHeadModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
        >>> type(headwise_model(config, "AutoModelForMaskedLM")).__name__
        'HeadwiseBertForMaskedLM'
        >>> stock = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> model = headwise_model(stock, gates={})
        >>> len(model.head_gates()), model.lm_head.weight is stock.lm_head.weight
        (2, True)
    """
    if isinstance(source, PreTrainedModel):
        return _around(source, kwargs)
    is_config = isinstance(source, PreTrainedConfig)
    if is_config and (others := sorted(kwargs.keys() - set(FIELDS))):
        raise ValueError(f"{', '.join(others)} cannot be passed with a configuration; set them in it.")
    if not is_config:
        check_folder(source)
    config = source if is_config else AutoConfig.from_pretrained(source, **hub_arguments(kwargs))
    row = _row_of(config)
    heads = row.stock_models()
    if auto_class not in heads:
        prefix = headwise_name(row.stock_config).removesuffix("Config")
        raise ValueError(f"{prefix} has no head for {auto_class!r}, only for {', '.join(heads)}.")
    cls = twin_class(heads[auto_class])
    if not is_config:
        return cls.from_pretrained(source, **kwargs)
    return cls(_headwise_config(config, cls, kwargs) if kwargs or config.model_type == row.stock_type else config)


def _row_of(config: PreTrainedConfig) -> Architecture:
    row = ARCHITECTURES.get(config.model_type.removeprefix("headwise-"))
    if row is None:
        nearest = difflib.get_close_matches(config.model_type, ARCHITECTURES, n=1, cutoff=0)
        raise ValueError(
            f"there is no headwise class for the architecture {config.model_type!r}, only for "
            f"{', '.join(ARCHITECTURES)}; the nearest is {nearest[0]}. To remove heads of other architectures, "
            "register their attention class with register_attention()."
        )
    return row


def _headwise_config(config: PreTrainedConfig, cls: type[PreTrainedModel], heads: dict[str, Any]) -> PreTrainedConfig:
    """Converts a configuration to the configuration of a headwise class, with settings of heads."""
    values = {**config.to_dict(), "model_type": cls.config_class.model_type, **heads}
    # `to_dict` leaves out the kernel.
    return cls.config_class.from_dict(values, attn_implementation=attention_kernel(config))


def _around(model: PreTrainedModel, heads: dict[str, Any]) -> PreTrainedModel:
    """Builds the headwise counterpart of a stock model, which shares its tensors."""
    name = type(model).__name__
    for record, function in (("pruned_heads", "prune_heads"), ("pruned_units", "prune_units")):
        if record in heads:
            raise ValueError(f"{name} is already loaded; call {function}() on the headwise model.")
    if others := sorted(heads.keys() - set(FIELDS)):
        raise ValueError(f"{name} is already loaded; only guidance and gates can be set, got {', '.join(others)}.")
    row = _row_of(model.config)
    cls = twin_class(name)
    if cls is None or not type(model).__module__.startswith("transformers.models."):
        names = ", ".join(dict.fromkeys(row.stock_models().values()))
        raise ValueError(f"{name} has no headwise class; for {row.stock_type}, these have one: {names}.")
    _check_plain(model)
    config = _headwise_config(model.config, cls, heads)
    with torch.device("meta"):
        made = cls(config)
    left = made.load_state_dict(model.state_dict(keep_vars=True), strict=False, assign=True)
    odd = [key for key in left.missing_keys if not is_of_gate(key)] + left.unexpected_keys
    # Hard-coded attention does not need the query and key projections.
    if odd and config.hard_coded is None:
        raise ValueError(
            f"{name} does not have the weights of its class ({odd[0]}); merge adapters first with PEFT's "
            "merge_and_unload()."
        )
    buffers = dict(model.named_buffers())
    for owner_name, owner in made.named_modules():
        for leaf, _ in list(owner.named_buffers(recurse=False)):
            setattr(owner, leaf, buffers[f"{owner_name}.{leaf}".removeprefix(".")])
    for gate in gates_of(made):
        gate.to_empty(device=model.device)
        gate.reset_parameters()
    made.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        made.generation_config = model.generation_config
    return made.train(model.training)


def _check_plain(model: PreTrainedModel) -> None:
    """Raises ValueError for a model with hooks, or that is quantized, adapted, compiled or not loaded."""
    name = type(model).__name__
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"{name} is quantized, so its weights cannot be shared; load it without quantization.")
    for where, module in model.named_modules():
        if any(getattr(module, hooks, None) for hooks in MODULE_HOOKS) or "forward" in vars(module):
            raise ValueError(
                f"{where or name} of {name} has hooks or a replaced forward method, which the headwise model would "
                "lose; remove them first, or load the model on one device."
            )
    for where, parameter in model.named_parameters():
        if parameter.is_meta or type(parameter) is not nn.Parameter:
            raise ValueError(
                f"{where} of {name} is not a plain parameter with values; load the model on one device, without "
                "quantization."
            )


class HeadwiseArchitecture(NamedTuple):
    """Headwise classes of an architecture.

    Attributes:
        model_type (`str`): `model_type` of the stock configuration.
        classes (`dict[str, str]`): Names of the headwise classes, by Auto class.
    """

    model_type: str
    classes: dict[str, str]

    @property
    def can_be_guided(self) -> bool:
        """Whether guidance is supported: scores must be products of queries and keys. Imports the stock models."""
        stock = getattr(transformers, ARCHITECTURES[self.model_type].stock_models()["AutoModel"])
        classes = [one for one in vars(sys.modules[stock.__module__]).values() if isinstance(one, type)]
        return not any(roles.biased for one in classes if (roles := built_in_roles(one)))


def headwise_architectures() -> dict[str, HeadwiseArchitecture]:
    """Lists the supported architectures by the `model_type` of their stock configuration.

    All of them support gates and removed heads; `can_be_guided` tells whether guidance is supported.

    Example:
        >>> found = headwise_architectures()
        >>> found["llama"].classes["AutoModelForCausalLM"], found["llama"].can_be_guided, found["t5"].can_be_guided
        ('HeadwiseLlamaForCausalLM', True, False)
    """
    return {
        row.stock_type: HeadwiseArchitecture(
            row.stock_type, {auto: headwise_name(name) for auto, name in row.stock_models().items()}
        )
        for row in ARCHITECTURES.values()
    }
