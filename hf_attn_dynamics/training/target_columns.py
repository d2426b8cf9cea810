# Licensed under the Apache License, Version 2.0.
"""Columns of a batch with the targets of guided heads: how examples of different lengths are padded."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from ..models.guidance_settings import COLUMN_PREFIX, RESERVED_TARGETS, WEIGHTS_SUFFIX
from ..models.ignored_labels import IGNORED


def target_names(features: list[dict]) -> list[str]:
    """Columns with targets, in order of first occurrence."""
    names = dict.fromkeys(name for feature in features for name in feature if name.startswith(COLUMN_PREFIX))
    return [name for name in names if name.removeprefix(COLUMN_PREFIX) not in RESERVED_TARGETS]


def collate_with_targets(
    collator: Callable[[list[dict]], Any],
    features: list[dict],
    names: list[str],
    padding_side: str,
    rows: Mapping[str, str] = MappingProxyType({}),
    keys: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The batch of a collator for the other columns, with padded columns of targets, see [`GuidanceCollator`].

    Args:
        collator (callable): Collator of the other columns.
        features (`list[dict]`): Examples.
        names (`list[str]`): Columns with targets, see [`target_names`].
        padding_side (`str`): Side on which the collator pads, `"right"` or `"left"`.
        rows, keys (`dict[str, str]`): Column of the tokens that are the rows or keys of a target, by column of the
            target; `input_ids` if missing.
    """
    for name in names:
        if (lacking := next((n for n, feature in enumerate(features) if name not in feature), None)) is not None:
            raise ValueError(f"example {lacking} has no {name}; set it to None if the example has no targets.")
    batch = collator([{name: value for name, value in one.items() if name not in names} for one in features])
    truncation_side = getattr(getattr(collator, "tokenizer", None), "truncation_side", "right")
    for name in names:
        sequences = {}
        for of, columns in (("rows", rows), ("keys", keys)):
            column = columns.get(name, "input_ids")
            sequences[of] = _sequence(f"the {of} of {name}", column, features, batch, padding_side, truncation_side)
        is_weight = name.removesuffix(WEIGHTS_SUFFIX) in {*names} - {name}
        values = [None if one[name] is None else _target_array(one[name], is_weight) for one in features]
        is_sparse = is_weight or name + WEIGHTS_SUFFIX in names
        batch[name] = torch.from_numpy(_padded_targets(name, values, is_weight, is_sparse, **sequences))
    return batch


class _Sequence(NamedTuple):
    """Tokens that are the rows or the keys of a target."""

    column: str
    width: int  # in the batch
    lengths: list[int]  # of the examples
    shifts: list[int]  # from positions in an example to positions in the batch


def _sequence(
    what: str, column: str, features: list[dict], batch: Mapping[str, Any], padding_side: str, truncation_side: str
) -> _Sequence:
    if column not in batch or any(feature.get(column) is None for feature in features):
        raise ValueError(f"{what} are the tokens of {column}, a column that the examples or the batch lack.")
    shape = tuple(np.shape(batch[column]))
    if len(shape) != 2 or shape[0] != len(features):
        raise ValueError(
            f"the collator makes {column} of shape {shape} of {len(features)} examples, but {what} need one row for "
            "each example; use a collator that pads."
        )
    lengths = [len(feature[column]) for feature in features]
    gaps = [shape[1] - length for length in lengths]
    shifts = [gap if (padding_side if gap > 0 else truncation_side) == "left" else 0 for gap in gaps]
    return _Sequence(column, shape[1], lengths, shifts)


def _target_array(values: Any, is_weight: bool) -> np.ndarray:
    """Targets of an example; rows with fewer keys than others are filled up."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    dtype = np.float64 if is_weight else None
    if not any(isinstance(value, (list, tuple)) for value in values):
        return np.asarray(values, dtype) if values else np.zeros(0, np.int64)
    slots = max(len(value) for value in values)
    is_weight |= any(isinstance(weight, float) for value in values for weight in value)
    fill = 0.0 if is_weight else IGNORED
    if not slots and not is_weight:
        dtype = np.int64
    rows = [[*value, *[fill] * (slots - len(value))] for value in values]
    return np.array(rows, dtype).reshape(len(values), slots)


def _padded_targets(
    name: str,
    values: list[np.ndarray | None],
    is_weight: bool,
    is_sparse: bool,
    rows: _Sequence,
    keys: _Sequence,
) -> np.ndarray:
    """Targets of all examples, of shape `(batch, rows)`, `(batch, keys)` or `(batch, rows, k)`.

    Values determine whether they are weights and sparse; the arguments do so for a batch without values.
    """
    known = [value for value in values if value is not None and (value.size or value.ndim == 2)]
    kinds = {(value.ndim, value.dtype.kind) for value in known}
    if known:
        is_weight, is_sparse = any(kind == "f" for _, kind in kinds), known[0].ndim == 2
    if len({ndim for ndim, _ in kinds}) > 1 or any(kind not in "iuf" for _, kind in kinds):
        raise ValueError(f"{name} must be lists of numbers, or lists of lists of numbers, in all examples.")
    if is_weight and not is_sparse and any(kind != "f" for _, kind in kinds):
        raise ValueError(f"{name} has integers, which are keys, and weights; write weights with a decimal point.")
    along = keys if is_weight and not is_sparse else rows
    slots = [max([1, *(value.shape[1] for value in known)])] if is_sparse else []
    fill, dtype = (0, np.float32) if is_weight else (IGNORED, np.int64)
    padded = np.full((len(values), along.width, *slots), fill, dtype)
    for number, value in enumerate(values):
        if value is None:
            continue
        if len(value) != along.lengths[number]:
            raise ValueError(
                f"{name} of example {number} has {len(value)} values, but its {along.column} {along.lengths[number]} "
                "tokens. If the example was truncated after its targets were aligned, pass the truncated encoding to "
                f"align_targets(); if another column has the rows, name it, as in rows={{{name!r}: 'labels'}}."
            )
        if not value.size:
            continue
        is_target = value != fill
        shifted = value if is_weight else _shifted(name, number, value, keys)
        at = np.arange(len(value)) + along.shifts[number]
        is_kept = (at >= 0) & (at < along.width)
        is_lost = is_target & ~is_kept.reshape(-1, *[1] * len(slots))
        if not is_weight:
            is_lost |= is_target & ((shifted < 0) | (shifted >= keys.width))
        if lost := int(is_lost.sum()):
            raise ValueError(
                f"{lost} of {int(is_target.sum())} targets of {name} in example {number} would be lost, because the "
                f"collator truncates {along.lengths[number]} tokens to {along.width}: truncate examples before their "
                "targets are aligned with align_targets()."
            )
        padded[(number, at[is_kept], *(slice(size) for size in value.shape[1:]))] = shifted[is_kept]
    return padded


def _shifted(name: str, number: int, value: np.ndarray, keys: _Sequence) -> np.ndarray:
    """Keys of an example as positions in the batch."""
    is_target = value != IGNORED
    wrong = value[is_target & ((value < 0) | (value >= keys.lengths[number]))]
    if wrong.size:
        raise ValueError(
            f"{name} of example {number} has the key {wrong.flat[0]}, but its {keys.column} has the keys 0 to "
            f"{keys.lengths[number] - 1}; rows without a target have {IGNORED}."
        )
    return np.where(is_target, value + keys.shifts[number], IGNORED)
