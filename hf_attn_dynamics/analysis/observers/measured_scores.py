# Licensed under the Apache License, Version 2.0.
"""Scores of heads that observers measure on some batches, by name."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..head_scores import HeadScores
from .base import Observer
from .observation import observe


def probe_batches(probe_data: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked batches of probe data, on the CPU.

    Args:
        probe_data (`dict` or iterable of `dict`): One batch, or several: arguments of forward passes.

    Raises:
        ValueError: if there is none, or one is no dictionary with tensors.
    """
    from accelerate.utils import send_to_device

    batches = [probe_data] if isinstance(probe_data, Mapping) else list(probe_data)
    if not batches:
        raise ValueError("probe_data is empty: pass at least one batch.")
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping) or not any(torch.is_tensor(value) for value in batch.values()):
            held = {type(value).__name__ for value in batch.values()} if isinstance(batch, Mapping) else ()
            kinds = f" of {', '.join(sorted(held))}" if held else ""
            raise ValueError(
                f"batch {number} of probe_data must be a dictionary of tensors, got {type(batch).__name__}{kinds}; "
                "a DataLoader converts the rows of a dataset to tensors."
            )
    return [send_to_device(dict(batch), "cpu") for batch in batches]


@torch.no_grad()
def measured_scores(
    model: PreTrainedModel,
    observers: Iterable[Observer],
    batches: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    hide_progress: bool = True,
) -> dict[str, HeadScores]:
    """Scores of all heads on some batches, by fresh copies of observers.

    Args:
        model (`PreTrainedModel`): The model.
        observers (iterable of [`Observer`]): The observers, whose results are [`HeadScores`] or have a method
            `head_scores()`.
        batches (iterable of `dict`): Arguments of forward passes, moved to the device of the model.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): See [`observe`].
        hide_progress (`bool`): Whether to show no progress bar.

    Returns:
        `dict[str, HeadScores]`: by name of the observer, or `OBSERVER/NAME` if its result has several.

    Raises:
        ValueError: if a result has no scores of heads.
    """
    from accelerate.utils import send_to_device

    with observe(model, *copy.deepcopy(list(observers)), tokenizer=tokenizer) as seen:
        for batch in tqdm(batches, "measuring heads", leave=False, disable=hide_progress):
            model(**send_to_device(batch, model.device))
    measured = {}
    for name, result in seen.results().items():
        if isinstance(result, HeadScores):
            measured[name] = result
        elif hasattr(result, "head_scores"):
            measured |= {f"{name}/{part}": scores for part, scores in result.head_scores().items()}
        else:
            raise ValueError(
                f"the result of observer {name!r}, {type(result).__name__}, has no scores of heads: return "
                "HeadScores, or an object with a method head_scores() that returns several by name."
            )
    return measured
