# Licensed under the Apache License, Version 2.0.
"""Pruning of a trained model without further training, within minutes on a few hundred texts (Kwon et al. 2022)."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...models.cost_table import CostTable
from ...models.number_checks import is_finite
from ...models.projections import check_outputs
from ..model_parts import PARTS, prunable_parts
from ..results import Result
from .compensation import RefitErrors, refit_outputs
from .compensation import compensate as compensate_biases
from .selection import Selection, select_parts
from .unit_scores import BY_SENTENCE, unit_importance


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class FisherPruning(Result):
    """What [`fisher_pruning`] did to a model; `print` it.

    Args:
        selection ([`Selection`]): Heads and units that stay, with the predicted speed-up.
        errors ([`RefitErrors`]): Errors of the output projections before and after refitting; empty without.
        compensation (`str`): `refit`, `bias` or `none`.
        seconds (`float`): Duration.
    """

    selection: Selection
    errors: RefitErrors
    compensation: str
    seconds: float

    columns: ClassVar[list[str]] = [*Selection.columns, "error_before", "error_after"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`: what stays in each block, and the errors of its output projection."""
        errors = {tuple(row[:3]): tuple(row[3:]) for row in self.errors.records()}
        for row in self.selection.records():
            yield *row, *errors.get(row[:3], (None, None))

    def __str__(self) -> str:
        ways = {"refit": "output projections fitted again", "bias": "biases compensate", "none": "no compensation"}
        return f"{self.selection}\nPruned in {self.seconds:.1f} s; {ways[self.compensation]}."

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws the number of heads and units that stay in each layer, see [`Selection`]."""
        return self.selection.plot(path, title)


def fisher_pruning(
    model: PreTrainedModel,
    data: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    table: CostTable,
    speedup: float,
    parts: Iterable[str] = PARTS,
    refit: bool = True,
    compensate: bool = True,
    rearrange: bool = True,
    ridge: float = 1e-4,
    loss: Callable[[ModelOutput, dict[str, Any]], torch.Tensor] | None = None,
    progress: bool = False,
    method: str = "fisher",
) -> FisherPruning:
    """Prunes heads and units of a trained model for a speed-up, in place and without training (Kwon et al. 2022).

    1. [`unit_importance`] estimates the Fisher information of the masks of all heads and units, or how much they
       change the margin of a classifier.
    2. [`select_parts`] selects those that stay, and rearranges them within each block.
    3. They are removed, and [`refit_outputs`] fits the output projections to the outputs of the dense model, or
       [`compensate`] adds the mean outputs of what was removed to the biases.

    Args:
        model (`PreTrainedModel`): The trained model. Without `refit` and `compensate`, no copy of it is made.
        data (iterable of `dict`): Batches with labels, or a single batch; a few hundred texts are enough, which are
            kept in memory. They should be as long as those that the model will get.
        table ([`CostTable`]): Cost of the model, from `measure_latency_table` or `count_flops_table`.
        speedup (`float`): Cost of the dense model over the cost of the pruned model, greater than 1.
        parts (`list[str]`): What may be removed: `heads`, `units`, or both.
        refit (`bool`): Whether to fit the output projections.
        compensate (`bool`): Whether to compensate by biases if `refit` is `False`; fitting includes biases.
        rearrange (`bool`): Whether to rearrange masks within each block.
        ridge (`float`): See [`refit_outputs`].
        loss (callable, *optional*): See [`unit_importance`].
        progress (`bool`): Whether to show progress bars.
        method (`str`): `fisher` or `margin`, see [`unit_importance`]. `margin` is for classifiers and needs no
            labels.

    Returns:
        [`FisherPruning`]: the selection, the errors of the projections, and the duration.

    Raises:
        ValueError: if `method` is unknown, or for the reasons given in the functions above; the model is then
            unchanged, unless it refuses a batch only for `refit_outputs`.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from hf_attn_dynamics import count_flops_table
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = BertForSequenceClassification(config)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8], [9, 6, 4]]), "labels": torch.tensor([0, 1])}
        >>> table = count_flops_table(model, length=8)
        >>> report = fisher_pruning(model, [batch], table, speedup=1.5)
        >>> report.selection.speedup >= 1.5
        True
    """
    start = time.perf_counter()
    if not is_finite(ridge) or ridge < 0:
        raise ValueError(f"ridge must be a number of at least 0, got {ridge!r}.")
    if method not in BY_SENTENCE:
        raise ValueError(f"method must be one of {', '.join(BY_SENTENCE)}, got {method!r}.")
    parts = [parts] if isinstance(parts, str) else list(parts)
    # Raises errors about the target and the table before any gradient is computed.
    scored = ["heads", *(part for part in parts if part != "heads")]
    select_parts(model, unit_importance(model, method="random", parts=scored), table, speedup, parts)
    if refit or compensate:
        check_outputs(model, [own.layer for own in prunable_parts(model) if own.elements])
    batches = [data] if isinstance(data, Mapping) else list(data)
    scores = unit_importance(model, batches, method, loss, keep_gradients=rearrange, progress=progress, parts=scored)
    selection = select_parts(model, scores, table, speedup, parts, rearrange)
    dense = copy.deepcopy(model) if refit or compensate else None
    selection.apply(model)
    errors = RefitErrors([])
    if refit:
        errors = refit_outputs(model, dense, batches, ridge, progress=progress)
    elif compensate:
        compensate_biases(model, dense, batches, progress)
    way = "refit" if refit else "bias" if compensate else "none"
    return FisherPruning(selection, errors, way, time.perf_counter() - start)
