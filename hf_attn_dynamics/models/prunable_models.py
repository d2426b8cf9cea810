# Licensed under the Apache License, Version 2.0.
"""What pruning checks and changes of a whole model: its wrappers and its configuration."""

import copy
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .compat import is_compiled_in_place, is_compiled_model
from .headwise_classes import twin_class
from .in_place import take_class


logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)  # functions that change a model in place return the same class


def check_prunable(model: Any) -> None:
    """Raises ValueError for compiled, wrapped or partial models."""
    if is_compiled_model(model):
        raise ValueError("model is compiled: remove heads from model._orig_mod, then compile it again.")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a PreTrainedModel, got {type(model).__name__}; unwrap it first "
            "(model.module of parallel training, model.merge_and_unload() of adapters)."
        )
    name = type(model).__name__
    is_seq2seq = getattr(model.config, "is_encoder_decoder", False)
    if name.endswith("Stack") or (is_seq2seq and name.endswith(("Encoder", "Decoder"))):
        raise ValueError(
            f"{name} is a part of an encoder–decoder model, whose configuration records removed heads: pass the "
            "whole model, and name the site, as in {'encoder': {0: [1, 2]}}."
        )
    for name, module in model.named_modules():
        where = name or type(model).__name__
        if is_compiled_in_place(module):
            raise ValueError(f"{where} is compiled: remove heads first, then call compile().")
        if type(module).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            raise ValueError(f"{where} is wrapped in {type(module).__name__}: remove heads first, then wrap it.")


def separate_configuration(model: PreTrainedModel) -> None:
    """Copies the configuration of a model before it is changed, since other models may share it.

    A stock body, such as the `bert` of a `BertForMaskedLM`, keeps its configuration: it shares the object with the
    model around it, which is saved. See [`prune_heads`] for a headwise body inside another model.
    """
    is_headwise = hasattr(model, "head_gates")
    if model.base_model is model and not is_headwise:
        return
    copies: dict[int, Any] = {}
    for attributes in map(vars, model.modules()):
        for name, value in attributes.items():
            # Attention modules of headwise models have a view of the configuration.
            if isinstance(getattr(value, "_config", value), PreTrainedConfig):
                attributes[name] = copy.deepcopy(value, copies)


def make_loadable(model: PreTrainedModel) -> None:
    """Takes the headwise configuration of a pruned model, or warns that only [`load_pruned`] loads what it saves."""
    if not take_twin_configuration(model):
        logger.warning_once(
            f"Auto classes cannot load {type(model).__name__} after pruning: save it by itself, not as part of "
            "another model, and load it with hf_attn_dynamics.load_pruned(path)."
        )


def take_twin_configuration(model: PreTrainedModel) -> bool:
    """Converts the configuration of a stock model to its headwise counterpart, under whose `model_type` it is saved.

    Args:
        model (`PreTrainedModel`): A model with removed heads.

    Returns:
        `bool`: whether Auto classes can load the saved model: whether it has a headwise counterpart, or is headwise.
    """
    config = model.config
    if config.model_type.startswith("headwise-"):
        return True
    stock = all(type(one).__module__.startswith("transformers.models.") for one in (model, config))
    if not stock or twin_class(type(model).__name__) is None:
        return False
    take_class(config, twin_class(type(config).__name__))
    return True
