# Licensed under the Apache License, Version 2.0.
"""Targets of guided heads that a batch brings: a key for each row, a distribution for all rows, or weighted keys."""

from collections.abc import Mapping

import torch

from .guidance_settings import target_columns
from .ignored_labels import IGNORED
from .patterns import PatternRows, exact_dtype


def rows_of_target(
    name: str, form: str, columns: Mapping[str, torch.Tensor], shape: tuple[int, int, int], device: torch.device
) -> PatternRows:
    """Target distributions of one target of a batch, each normalised to the sum 1.

    Args:
        name (`str`): Name of the target.
        form (`str`): How the batch describes it:

            - `keys`: `guidance_NAME` of shape `(batch, rows)` contains the index of the key that each row should
              attend to, -100 for rows that do not count.
            - `weights`: `guidance_NAME` of shape `(batch, keys)` contains one distribution for all rows of a sentence;
              sentences whose weights are all 0 do not count.
            - `sparse`: `guidance_NAME` of shape `(batch, rows, k)` contains keys, -100 for unused slots, and
              `guidance_NAME_weights` of the same shape their weights; without it, the keys of a row have equal
              weights. The weights of a key that occurs twice are summed. Rows without positive weights do not count.
        columns (`dict[str, torch.Tensor]`): The batch.
        shape (`tuple[int, int, int]`): `(batch, rows, keys)` of the attention.
        device (`torch.device`): Device of the result.

    Raises:
        ValueError: if the column is missing or has another shape or dtype, a key is not in the sentence, or a weight
            is negative or not finite. Values are not checked in compiled code.

    Example:
        >>> columns = {"guidance_syntax": torch.tensor([[2, 2, -100]])}
        >>> rows = rows_of_target("syntax", "keys", columns, (1, 3, 3), torch.device("cpu"))
        >>> rows.weights.squeeze(-1).tolist(), rows.counted.tolist()
        ([[1.0, 1.0, 0.0]], [[True, True, False]])
    """
    column, *weights_column = target_columns(name, form)
    num_keys = shape[2]
    axes = {"keys": "(batch, rows)", "weights": "(batch, keys)", "sparse": "(batch, rows, k)"}[form]
    given = columns.get(column)
    if given is None:
        raise ValueError(
            f"guidance to the target {name!r} needs the column {column} of shape {axes} in the batch; if a dataset "
            "has it, keep it in the collator, or load the model with guidance=None."
        )
    wanted = (shape[0], num_keys if form == "weights" else shape[1])
    if given.dim() != (3 if form == "sparse" else 2) or tuple(given.shape[:2]) != wanted:
        sizes = f"({', '.join(map(str, wanted))}{', k' if form == 'sparse' else ''})"
        raise ValueError(f"{column} must have shape {axes} = {sizes}, got {tuple(given.shape)}.")
    if form == "weights":
        return _shared_row(_checked_weights(column, given.to(device)))
    if given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"{column} must contain the indices of keys as integers, got {given.dtype}.")
    keys = given.to(device).long()
    if form == "keys":
        keys = keys.unsqueeze(-1)
    elif not keys.shape[-1]:
        # No row of the batch has a target.
        none = keys.new_zeros((*wanted, 1))
        return PatternRows(none, none.to(exact_dtype(device)), counted=none.squeeze(-1).bool())
    used = keys != IGNORED
    if not torch.compiler.is_compiling():
        _check_keys(column, keys, used, num_keys)
    keys = keys.clamp(0, num_keys - 1)
    weights = used.to(exact_dtype(device))
    if form == "sparse":
        own = columns.get(weights_column[0])
        if own is not None:
            if own.shape != given.shape:
                raise ValueError(
                    f"{weights_column[0]} must have the shape {tuple(given.shape)} of {column}, got "
                    f"{tuple(own.shape)}."
                )
            weights = torch.where(used, _checked_weights(weights_column[0], own.to(device), used), 0)
        keys, weights = _merged(keys, weights)
    total = weights.sum(-1, keepdim=True)
    return PatternRows(keys, weights / torch.where(total > 0, total, 1), counted=total.squeeze(-1) > 0)


def check_visible(name: str, rows: PatternRows, real: torch.Tensor, counted: torch.Tensor) -> None:
    """Raises ValueError if a row that counts has a target key that is padding.

    Args:
        name (`str`): Name of the target.
        rows ([`PatternRows`]): Its rows.
        real (`torch.BoolTensor` of shape `(batch, keys)`): True for non-padding keys.
        counted (`torch.BoolTensor` of shape `(batch, rows)`): Rows that count.
    """
    if torch.compiler.is_compiling():
        return
    of_sentence = counted.any(1, keepdim=True) if rows.keys.shape[1] == 1 else counted
    wrong = ~real.gather(1, rows.keys.flatten(1)).view_as(rows.keys) & (rows.weights > 0) & of_sentence.unsqueeze(-1)
    if bool(wrong.any()):
        sentence, row, slot = wrong.nonzero()[0].tolist()
        column, key = target_columns(name, "keys")[0], int(rows.keys[sentence, row, slot])
        raise ValueError(
            f"{column} names key {key} in sentence {sentence} of the batch, which is padding; keys are positions in "
            "the row of a sentence, or within it in packed batches, and rows without a target are -100."
        )


def _check_keys(column: str, keys: torch.Tensor, used: torch.Tensor, num_keys: int) -> None:
    wrong = used & ((keys < 0) | (keys >= num_keys))
    if bool(wrong.any()):
        sentence, row, slot = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{column} names key {int(keys[sentence, row, slot])} (sentence {sentence}, row {row}), but the sentence "
            f"has the keys 0 to {num_keys - 1}; rows without a target are {IGNORED}."
        )


def _checked_weights(column: str, weights: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
    weights = weights.to(exact_dtype(weights.device))
    if not torch.compiler.is_compiling():
        wrong = ~(weights.isfinite() & (weights >= 0))
        if used is not None:
            wrong = wrong & used
        if bool(wrong.any()):
            raise ValueError(f"{column} must contain weights of at least 0, got {float(weights[wrong][0])}.")
    return weights


def _shared_row(weights: torch.Tensor) -> PatternRows:
    """One distribution for all rows of a sentence, from weights of shape `(batch, keys)`."""
    members = weights > 0
    # Compiled graphs have no data-dependent shapes: they have one slot per key.
    slots = members.shape[1] if torch.compiler.is_compiling() else max(int(members.sum(1).max()), 1)
    keys = members.int().argsort(dim=1, descending=True, stable=True)[:, :slots]
    total = weights.sum(1, keepdim=True)
    weights = weights.gather(1, keys) / torch.where(total > 0, total, 1)
    return PatternRows(keys.unsqueeze(1), weights.unsqueeze(1), counted=total > 0)


def _merged(keys: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of rows, each once, and the sums of their weights; unused slots have weight 0."""
    keys, order = keys.sort(dim=-1)
    is_new = torch.ones_like(keys, dtype=torch.bool)
    is_new[..., 1:] = keys[..., 1:] != keys[..., :-1]
    slots = is_new.long().cumsum(-1) - 1
    summed = torch.zeros_like(weights).scatter_add(-1, slots, weights.gather(-1, order))
    return torch.zeros_like(keys).scatter(-1, slots, keys), summed
