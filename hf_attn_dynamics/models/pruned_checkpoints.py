# Licensed under the Apache License, Version 2.0.
"""Loading checkpoints of stock architectures some of whose attention heads were removed."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from .head_pruning import apply_pruned_heads, take_twin_configuration
from .head_roles import HeadLayer, locate_heads
from .head_sites import SITE_KINDS
from .headwise_classes import twin_class
from .size_limits import LimitedModelMixin, check_size_limits, read_config_dict


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_pruned(path: str | Path, model_class: type[PreTrainedModel] | None = None, **kwargs: Any) -> PreTrainedModel:
    """Loads a checkpoint of a stock architecture some of whose heads were removed.

    It is saved as any other, by `save_pretrained` after [`prune_heads`], or by Transformers 4, whose `prune_heads`
    left the same record. One without removed heads is loaded as it is.

    Args:
        path (`str` or `Path`): Folder or name on the Hub.
        model_class (`type[PreTrainedModel]`, *optional*): Class to load; by default the one that `config.json` names
            under `architectures`, of Transformers or this package. What it has beside, a new classifier for instance,
            starts from random numbers, as Transformers says when it loads it.
        **kwargs: Arguments of `from_pretrained`: `dtype`, `device_map`, `revision`, `output_loading_info` …

    Returns:
        `PreTrainedModel`: of exactly that class, in eval mode; with `output_loading_info=True` a tuple of it and the
        loading information.

    Raises:
        OSError: if there is no such folder, no `config.json`, or there are no weights.
        ValueError: if the class is not known, or is none of models, as Auto classes are not; or the weights are
            damaged, do not fit `pruned_heads`, or have gates that the class lacks. Attention with random weights is
            never returned.
    """
    if kwargs.pop("ignore_mismatched_sizes", False):
        raise ValueError("load_pruned(ignore_mismatched_sizes=True) would return random weights; leave it out.")
    if model_class is not None and not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        given = getattr(model_class, "__name__", model_class)
        raise ValueError(
            f"model_class must be a class of models, such as LlamaForCausalLM, got {given!r}; leave it out to load "
            "the one that config.json names."
        )
    kwargs = {name: value for name, value in kwargs.items() if value is not None or name not in _HUB_ARGUMENTS}
    config_dict, _ = read_config_dict(PreTrainedConfig.get_config_dict, path, **hub_arguments(kwargs))
    if not config_dict:
        raise OSError(f"{path} has no config.json; name the folder that save_pretrained wrote.")
    check_size_limits(config_dict)
    stock = model_class or _architecture(path, config_dict)

    def build(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **others: Any) -> None:
        stock.__init__(self, config, *args, **others)
        apply_pruned_heads(self)

    # Under the same name, since Transformers registers what it knows of a class by its name.
    names = {"__init__": build, "__module__": stock.__module__, "__qualname__": stock.__qualname__}
    bases = (stock,) if issubclass(stock, LimitedModelMixin) else (LimitedModelMixin, stock)
    cls = type(stock.__name__, bases, names)
    model_type = str(config_dict.get("model_type"))
    if model_type.startswith("headwise-"):
        # A stock class that was saved under the name of its twin.
        cls.config_class = twin_class(stock.config_class.__name__) or stock.config_class
    with_info = kwargs.pop("output_loading_info", False)
    try:
        model, info = cls.from_pretrained(path, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs)
    except Exception as error:
        if damaged := _damaged_file(Path(path, kwargs.get("subfolder", ""))):
            raise ValueError(f"the weights in {damaged} cannot be read, copy them again: {error}") from error
        raise
    model.__class__ = stock
    _check_loaded(path, model, info, has_new_parts=model_class is not None)
    if getattr(model.config, "pruned_heads", None):
        take_twin_configuration(model)
    return (model, info) if with_info else model


def saved_heads(path: str | Path) -> list[HeadLayer]:
    """Heads of a saved model, of this package or of Transformers, without loading its weights.

    Args:
        path (`str` or `Path`): Folder that `save_pretrained` wrote.

    Returns:
        `list[HeadLayer]`: see [`locate_heads`], by kind of site and layer; modules are on the meta device.

    Raises:
        OSError: if there is no `config.json`.
        ValueError: if the class that it names is not known, or has attention that is not.
    """
    config_dict, _ = read_config_dict(PreTrainedConfig.get_config_dict, path)
    cls = _architecture(path, config_dict)
    with torch.device("meta"):
        model = cls(cls.config_class.from_pretrained(path))
        apply_pruned_heads(model)
    return sorted(locate_heads(model), key=lambda layer: (SITE_KINDS.index(layer.site.kind), layer.site.layer))


def _architecture(path: str | Path, config_dict: dict) -> type[PreTrainedModel]:
    names = config_dict.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(f"config.json of {path} names no architectures; pass model_class to load_pruned.")
    cls = getattr(transformers, names[0], None) or twin_class(names[0].removeprefix("Headwise"))
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ValueError(
            f"config.json of {path} names the architecture {names[0]!r}, which is no class of transformers "
            f"{transformers.__version__}; pass model_class to load_pruned."
        )
    return cls


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of `from_pretrained` that say where to look for files."""
    return {name: kwargs[name] for name in _HUB_ARGUMENTS if kwargs.get(name) is not None}


def check_heads_fit(
    path: str | Path,
    model: PreTrainedModel,
    mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]],
    missing: Iterable[str],
    record: str,
    way_out: str = "",
) -> None:
    """Refuses weights of attention that were cut otherwise than a model, or some of which are missing.

    Args:
        path (`str` or `Path`): The checkpoint.
        model (`PreTrainedModel`): What was loaded.
        mismatched (iterable of `tuple`): Names of weights, with their shapes in the checkpoint and in the model.
        missing (iterable of `str`): Names of weights that the checkpoint lacks.
        record (`str`): What tells which heads were removed, for the message.
        way_out (`str`): What to do about it, likewise.

    Raises:
        ValueError: naming the first of them.
    """
    owners = {id(module) for layer in locate_heads(model) for module in (layer.module, layer.output)}
    names = tuple(f"{name}." for name, module in model.named_modules() if id(module) in owners)
    for name, saved, built in sorted(mismatched):
        if name.startswith(names):
            raise ValueError(
                f"the weights in {path} do not fit {record}: {name} has shape {tuple(saved)}, but should have "
                f"{tuple(built)}.{way_out}"
            )
    for name in sorted(missing):
        if name.startswith(names) and not name.endswith("log_alpha"):
            raise ValueError(f"the weights in {path} do not fit {record}: {name} is missing.{way_out}")


def _check_loaded(path: str | Path, model: PreTrainedModel, info: dict, has_new_parts: bool) -> None:
    """Refuses a model some of whose weights were not in the checkpoint."""
    pruned_heads = getattr(model.config, "pruned_heads", None)
    record = f"pruned_heads {pruned_heads!r} of its config.json"
    # Parts with a configuration of their own, such as the language model of one that reads images.
    way_out = "" if pruned_heads else " Heads are recorded by the model that prune_heads() is given: give the whole."
    if pruned_heads:
        check_heads_fit(path, model, info["mismatched_keys"], info["missing_keys"], record)
    for name, saved, built in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"the weights in {path} do not fit its config.json: {name} has shape {tuple(saved)}, but should have "
            f"{tuple(built)}.{way_out}"
        )
    for name in sorted(info["missing_keys"]) if not has_new_parts else ():
        raise ValueError(
            f"the weights in {path} do not fit its config.json: {name} is missing; if it is to start from random "
            f"numbers, name the class in model_class.{way_out}"
        )
    empty = tuple(f"{layer.name}." for layer in locate_heads(model) if not layer.heads) if pruned_heads else ()
    for name in sorted(info["unexpected_keys"]):
        if name.endswith(".gate.log_alpha"):
            raise ValueError(
                f"the weights in {path} have gates ({name}), without which {type(model).__name__} computes something "
                "else: load them by an Auto class, such as AutoModel, or call prune_closed_gates() before saving."
            )
        if name.startswith(empty):
            raise ValueError(f"the weights in {path} do not fit {record}: {name} belongs to a layer without heads.")


def _damaged_file(folder: Path) -> Path | None:
    """The first weights file of a folder that is not whole."""
    return next((file for file in sorted(folder.glob("*.safetensors")) if not is_whole(file)), None)


def is_whole(file: Path) -> bool:
    """Whether a safetensors file has a header, and the length that it asks for."""
    try:
        stored_numbers(file)
    except ValueError:
        return False
    return True


def stored_numbers(file: Path) -> Counter[str]:
    """How many numbers of each type, such as `F32`, a safetensors file holds, from its header.

    Raises:
        ValueError: naming the file, if it has no header, or not the length that this asks for.
    """
    counts: Counter[str] = Counter()
    try:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                tensor = stored.get_slice(name)
                counts[tensor.get_dtype()] += math.prod(tensor.get_shape())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors, save it again: {error}") from error
    return counts
