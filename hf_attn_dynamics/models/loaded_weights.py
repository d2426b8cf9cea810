# Licensed under the Apache License, Version 2.0.
"""Checks of loaded weights: heads are never silently initialised at random."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from .hard_concrete import is_of_gate
from .head_roles import locate_heads, roles_of
from .unit_roles import locate_units


@contextmanager
def telling_damaged_weights(path: str | Path | None, subfolder: str | None = None) -> Iterator[None]:
    """Context for loading a checkpoint that replaces errors caused by a damaged file of weights.

    Raises:
        ValueError: if a file of weights is damaged; the message names it.
    """
    try:
        yield
    except Exception as error:
        files = sorted(Path(path, subfolder or "").glob("*.safetensors")) if path is not None else []
        damaged = next((file for file in files if not is_whole(file)), None)
        if damaged is None and not isinstance(error, SafetensorError):
            raise
        which = f"{damaged.name} cannot be read, " if damaged else ""
        raise ValueError(f"the weights in {path} are damaged, copy or download them again: {which}{error}") from error


def check_loaded_heads(path: str | Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Checks that the weights of a checkpoint fit the removed heads and units of a model.

    Args:
        path (`str` or `Path`): The checkpoint.
        model (`PreTrainedModel`): The loaded model, headwise or stock.
        info (`dict`): The loading information of `from_pretrained(…, ignore_mismatched_sizes=True)`.

    Raises:
        ValueError: if weights of attention, or of feed-forward blocks if units were removed, are missing or have
            another shape; the message names the first one.
    """
    is_headwise, pruned_heads = hasattr(model, "head_gates"), getattr(model.config, "pruned_heads", None)
    missing = set(info["missing_keys"])
    way_out = ""
    if is_headwise:
        _check_scores(path, model, missing)
        way_out = " To remove heads from a model, load it as it is and call prune_heads()."
    elif not (pruned_heads or getattr(model.config, "pruned_units", None)):
        return
    _check_units(path, model, info)
    if not (is_headwise or pruned_heads):
        return
    owners = {id(module) for layer in locate_heads(model) for module in (layer.module, layer.output)}
    attention = tuple(f"{name}." for name, module in model.named_modules() if id(module) in owners)
    does_not_fit = f"the weights in {path} do not fit pruned_heads {pruned_heads}"
    for name, saved, built in sorted(info["mismatched_keys"]):
        if name.startswith(attention):
            raise ValueError(
                f"{does_not_fit}: {name} has shape {tuple(saved)}, but should have {tuple(built)}.{way_out}"
            )
    for name in sorted(missing) if pruned_heads else ():
        if name.startswith(attention) and not is_of_gate(name):
            raise ValueError(f"{does_not_fit}: {name} is missing.{way_out}")


def _check_units(path: str | Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raises ValueError if weights of feed-forward blocks do not fit the removed units."""
    if not getattr(model.config, "pruned_units", None):
        return
    does_not_fit = f"the weights in {path} do not fit pruned_units in its config.json"
    projections = tuple(f"{name}." for layer in locate_units(model) for name in (*layer.inputs, layer.output_name))
    for name, saved, built in sorted(info["mismatched_keys"]):
        if name.startswith(projections):
            raise ValueError(f"{does_not_fit}: {name} has shape {tuple(saved)}, but should have {tuple(built)}.")
    for name in sorted(info["missing_keys"]):
        if name.startswith(projections):
            raise ValueError(f"{does_not_fit}: {name} is missing.")
    empty = tuple(f"{name}." for layer in locate_units(model) if not layer.units for name in layer.inputs)
    for name in sorted(info["unexpected_keys"]):
        if name.startswith(empty):
            raise ValueError(f"{does_not_fit}: {name} belongs to a block without units.")


def _check_scores(path: str | Path, model: PreTrainedModel, missing: set[str]) -> None:
    """Raises ValueError if a model with learned attention was loaded from hard-coded attention."""
    for layer in locate_heads(model):
        roles = roles_of(layer.module)
        scores = [f"{layer.name}.{name}.weight" for name in roles.score_projections]
        others = {f"{layer.name}.{name}.weight" for name in roles.keys[1:]}
        # A fused projection to queries, keys and values is always saved.
        if roles.keys and missing.issuperset(scores) and not others & missing:
            raise ValueError(
                f"the weights in {path} are of hard-coded attention, without {scores[0]}: load them with the "
                "hard_coded that they were saved with."
            )


def check_all_loaded(path: str | Path, model: PreTrainedModel, info: dict[str, Any], new_parts: bool) -> None:
    """Checks that the weights of a checkpoint and of a model are the same.

    Args:
        path, model, info: See [`check_loaded_heads`].
        new_parts (`bool`): Whether weights that the checkpoint lacks, except attention weights, may be initialised at
            random.

    Raises:
        ValueError: if a weight is missing, unexpected or of another shape; the message names the first one.
    """
    check_loaded_heads(path, model, info)
    pruned_heads = getattr(model.config, "pruned_heads", None)
    # For models with sub-configurations, such as that of a language model that reads images.
    way_out = (
        ""
        if pruned_heads or getattr(model.config, "pruned_units", None)
        else " prune_heads() records heads in the model that it is given: pass the whole one."
    )
    does_not_fit = f"the weights in {path} do not fit its config.json"
    for name, saved, built in sorted(info["mismatched_keys"]):
        raise ValueError(f"{does_not_fit}: {name} has shape {tuple(saved)}, but should have {tuple(built)}.{way_out}")
    for name in sorted(info["missing_keys"]) if not new_parts else ():
        raise ValueError(f"{does_not_fit}: {name} is missing; pass model_class to initialise it at random.{way_out}")
    empty = tuple(f"{layer.name}." for layer in locate_heads(model) if not layer.heads) if pruned_heads else ()
    for name in sorted(info["unexpected_keys"]):
        if is_of_gate(name):
            raise ValueError(
                f"the weights in {path} have gates ({name}), which {type(model).__name__} would ignore: load them "
                "with an Auto class, such as AutoModel, or call prune_closed_gates() before saving."
            )
        if name.startswith(empty):
            raise ValueError(
                f"the weights in {path} do not fit pruned_heads {pruned_heads}: {name} belongs to a layer without "
                "heads."
            )


def is_whole(file: Path) -> bool:
    """Whether a safetensors file has a valid header and the length given there."""
    try:
        stored_numbers(file)
    except ValueError:
        return False
    return True


def stored_numbers(file: Path) -> Counter[str]:
    """Number of elements of each dtype, such as `F32`, in a safetensors file, read from its header.

    Raises:
        ValueError: if the header or the length of the file is invalid.
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
