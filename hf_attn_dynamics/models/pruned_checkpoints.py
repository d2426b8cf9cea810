# Licensed under the Apache License, Version 2.0.
"""Loading pruned checkpoints of stock architectures."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from .architectures import ARCHITECTURES
from .head_roles import HeadLayer, locate_heads
from .head_sites import SITE_KINDS
from .headwise_classes import twin_class
from .in_place import take_class
from .loaded_weights import check_all_loaded, telling_damaged_weights
from .prunable_models import take_twin_configuration
from .size_limits import LimitedModelMixin, check_size_limits, read_config_dict
from .unit_pruning import apply_pruning, is_pruned
from .unit_roles import UnitLayer, locate_units


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_pruned(path: str | Path, model_class: type[PreTrainedModel] | None = None, **kwargs: Any) -> PreTrainedModel:
    """Loads a checkpoint of a stock architecture with removed heads.

    It was saved by `save_pretrained` after [`prune_heads`], or by Transformers 4, whose `prune_heads` recorded heads
    in the same way. Checkpoints without removed heads are loaded as usual.

    Args:
        path (`str` or `Path`): Folder or name on the Hub.
        model_class (`type[PreTrainedModel]`, *optional*): Class to load; defaults to the first of `architectures` in
            `config.json`, of Transformers or this package. Weights that the checkpoint lacks, such as a new
            classifier, are initialised at random, with Transformers' warning.
        **kwargs: Arguments of `from_pretrained`: `dtype`, `device_map`, `revision`, `output_loading_info` …

    Returns:
        `PreTrainedModel`: an instance of this class in evaluation mode; with `output_loading_info=True` a tuple of it
        and the loading information.

    Raises:
        OSError: if the folder, `config.json` or the weights are missing.
        ValueError: if the class is unknown or not a model class (Auto classes are not); or if weights are damaged, do
            not fit `pruned_heads`, or have gates that the class lacks. Attention is never initialised at random.
    """
    if kwargs.pop("ignore_mismatched_sizes", False):
        raise ValueError("load_pruned(ignore_mismatched_sizes=True) could return random weights; leave it out.")
    if model_class is not None and not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        given = getattr(model_class, "__name__", model_class)
        raise ValueError(
            f"model_class must be a model class, such as LlamaForCausalLM, got {given!r}; leave it out to load the "
            "class that config.json names."
        )
    kwargs = {name: value for name, value in kwargs.items() if value is not None or name not in _HUB_ARGUMENTS}
    config_dict, _ = read_config_dict(PreTrainedConfig.get_config_dict, path, **hub_arguments(kwargs))
    if not config_dict:
        raise OSError(f"{path} has no config.json; pass the folder that save_pretrained wrote.")
    check_size_limits(config_dict)
    stock = model_class or _architecture(path, config_dict)

    def build(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **others: Any) -> None:
        stock.__init__(self, config, *args, **others)
        apply_pruning(self)

    # Under the same name, by which Transformers registers conversions of weights.
    names = {"__init__": build, "__module__": stock.__module__, "__qualname__": stock.__qualname__}
    bases = (stock,) if issubclass(stock, LimitedModelMixin) else (LimitedModelMixin, stock)
    cls = type(stock.__name__, bases, names)
    cls.config_class = _configuration_class(stock, config_dict)
    with_info = kwargs.pop("output_loading_info", False)
    with telling_damaged_weights(path, kwargs.get("subfolder")):
        model, info = cls.from_pretrained(path, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs)
    take_class(model, stock)
    check_all_loaded(path, model, info, new_parts=model_class is not None)
    if is_pruned(model.config):
        take_twin_configuration(model)
    return (model, info) if with_info else model


def saved_heads(path: str | Path) -> list[HeadLayer]:
    """Lists the heads of a saved model of this package or Transformers, without loading its weights.

    Args:
        path (`str` or `Path`): Folder that `save_pretrained` wrote.

    Returns:
        `list[HeadLayer]`: see [`locate_heads`], sorted by kind of site and layer; modules are on the meta device.

    Raises:
        OSError: if there is no `config.json`.
        ValueError: if the model class or its attention class is unknown.
    """
    return sorted(locate_heads(_without_weights(path)), key=_place)


def saved_units(path: str | Path) -> list[UnitLayer]:
    """Lists the feed-forward units of a saved model of this package or Transformers, without loading its weights.

    Args:
        path (`str` or `Path`): Folder that `save_pretrained` wrote.

    Returns:
        `list[UnitLayer]`: see [`locate_units`], sorted by kind of site and layer; modules are on the meta device.

    Raises:
        OSError: if there is no `config.json`.
        ValueError: if the model class is unknown, or units of this architecture cannot be located.
    """
    return sorted(locate_units(_without_weights(path)), key=_place)


def _without_weights(path: str | Path) -> PreTrainedModel:
    config_dict, _ = read_config_dict(PreTrainedConfig.get_config_dict, path)
    cls = _architecture(path, config_dict)
    with torch.device("meta"):
        model = cls(_configuration_class(cls, config_dict).from_pretrained(path))
        apply_pruning(model)
    return model


def _place(layer: HeadLayer | UnitLayer) -> tuple[int, int]:
    return SITE_KINDS.index(layer.site.kind), layer.site.layer


def _configuration_class(cls: type[PreTrainedModel], config_dict: dict) -> type[PreTrainedConfig]:
    """The class of the saved configuration: that of the headwise counterpart if a stock class was saved with it."""
    is_twin = str(config_dict.get("model_type")).startswith("headwise-")
    return (is_twin and twin_class(cls.config_class.__name__)) or cls.config_class


def _architecture(path: str | Path, config_dict: dict) -> type[PreTrainedModel]:
    names = config_dict.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(f"config.json of {path} names no architectures; pass model_class to load_pruned.")
    cls = getattr(transformers, names[0], None)
    if cls is None and str(config_dict.get("model_type")).removeprefix("headwise-") in ARCHITECTURES:
        cls = twin_class(names[0].removeprefix("Headwise"))
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ValueError(
            f"config.json of {path} names the architecture {names[0]!r}, which transformers "
            f"{transformers.__version__} does not have; pass model_class to load_pruned."
        )
    return cls


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Selects the arguments of `from_pretrained` that locate files."""
    return {name: kwargs[name] for name in _HUB_ARGUMENTS if kwargs.get(name) is not None}
