# Licensed under the Apache License, Version 2.0.
"""Compensation without training for removed heads and units: biases, and output projections fitted again.

dense = copy.deepcopy(model)
selection.apply(model)
compensate(model, dense, batches)          # or refit_outputs(model, dense, batches)
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ...models.added_biases import add_output_biases
from ...models.number_checks import is_finite
from ...models.projections import check_outputs
from ...models.prunable_models import Model, separate_configuration
from ..model_parts import ModelPart, PartSite, parts_of_model, prunable_parts, tables_of_parts
from ..model_views import ModelView, evaluation_view
from ..results import Result
from ..running import batches_of, real_tokens


Data = Iterable[Mapping[str, Any]] | Mapping[str, Any]
EXACT = 1e-20  # squared error, relative to the targets, of a projection that needs no refitting


def mean_unit_outputs(model: PreTrainedModel, data: Data, progress: bool = False) -> dict[str, torch.Tensor]:
    """Mean activations of all feed-forward units over the tokens of a corpus, before the output projection.

    The model runs in evaluation mode. The means depend neither on padding nor on batching; see [`mean_head_outputs`]
    for heads.

    Args:
        model (`PreTrainedModel`): Any model that `locate_units` supports, including pruned models.
        data (iterable of `dict`): Batches, or a single batch: arguments of the forward pass.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        `dict[str, torch.Tensor]`: a tensor of shape `(layers, units)` for `encoder` and `decoder`; NaN for removed
        units.

    Raises:
        ValueError: if there is no batch, or a padding mask has another shape.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> mean_unit_outputs(model, {"input_ids": torch.tensor([[5, 7, 8]])})["decoder"].shape
        torch.Size([2, 64])
    """
    parts = parts_of_model(model, ["units"])
    means = _mean_inputs(model, parts, data, "mean of unit outputs", progress)
    tables = tables_of_parts(parts, means)
    return {kind: table.to(model.device, model.dtype) for kind, table in tables.items()}


def compensate(model: Model, dense: PreTrainedModel, data: Data, progress: bool = False) -> Model:
    """Adds to the biases of output projections what removed heads and units gave on average, in place.

    The bias of each output projection W increases by `W[:, removed] · mean(z[removed])`, with the mean outputs z of
    the dense model over the tokens of a corpus (FLAP, An et al. 2024). Projections of architectures without biases get
    one, which the configuration records as `added_biases`. Call it once, right after pruning.

    Args:
        model (`PreTrainedModel`): A pruned model, with the weights of the dense model.
        dense (`PreTrainedModel`): The model before pruning.
        data (iterable of `dict`): Batches, or a single batch: arguments of the forward pass. Labels are not needed.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        `PreTrainedModel`: `model`; unchanged if it lacks nothing.

    Raises:
        ValueError: if `dense` has other layers, or lacks heads or units of `model`; if output projections have changed
            since pruning; or if there is no batch, or none runs a pruned block. The model is then unchanged.

    Example:
        >>> import copy
        >>> from transformers import GPT2Config, GPT2Model
        >>> from hf_attn_dynamics import prune_units
        >>> dense = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> model = prune_units(copy.deepcopy(dense), {0: "0-31"})
        >>> compensate(model, dense, {"input_ids": torch.tensor([[5, 7, 8]])}).h[0].mlp.c_proj.bias.shape
        torch.Size([16])
    """
    pairs = [pair for pair in _pairs(model, dense) if len(pair.own.elements) < len(pair.before.elements)]
    if not pairs:
        return model
    _check_weights(model, dense, pairs)
    for pair in pairs:
        _check_unchanged(pair)
    means = _mean_inputs(dense, [pair.before for pair in pairs], data, "compensation", progress)
    _check_runs([pair.own.key for pair in pairs], means)
    if any(pair.own.output.bias is None for pair in pairs):
        _add_biases(model)
    for pair in pairs:
        gone = pair.before.features(pair.removed)
        added = pair.before.columns()[:, gone].detach().double().cpu() @ means[pair.own.key].double().cpu()[gone]
        _add(pair.own.layer.output.bias, added)
    return model


@dataclass(frozen=True, eq=False)
class RefitErrors(Result):
    """Errors of the output projections before and after [`refit_outputs`].

    Args:
        errors (`list`): For each output projection in the order of the forward pass: `heads` or `units`, kind of site,
            layer, and its error before and after. An error is the sum of squared differences to the outputs of the
            dense model over the sum of squared deviations of these outputs from their mean.
    """

    errors: list[list]

    columns: ClassVar[list[str]] = ["part", "site", "layer", "before", "after"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        yield from map(tuple, self.errors)


def refit_outputs(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    data: Data,
    ridge: float = 1e-4,
    add_biases: bool = True,
    progress: bool = False,
) -> RefitErrors:
    """Fits the output projections of a pruned model to the outputs of the dense model, by least squares, in place.

    The output projections of all attention and feed-forward blocks are fitted in the order of the forward pass, except
    for mixtures of experts. The inputs of each come from the pruned model with all earlier projections fitted already;
    the targets are the outputs of the same projection in the dense model. Of all weights W and biases b, those with
    the smallest

        Σ_tokens ‖W x + b − y‖² + λ ‖W − W₀‖²

    replace the current ones, W₀, where λ is `ridge` times the mean of the diagonal of the (centered) matrix of the
    inputs. This generalizes the mask tuning of Kwon et al. (2022), which scales the remaining columns of W. Sums are
    over non-padding tokens, in float64. The error of no projection increases on the given data, for the inputs that it
    has at this time. Two forward passes over the data for each projection stop as soon as they reach it.

    Args:
        model (`PreTrainedModel`): A pruned model.
        dense (`PreTrainedModel`): The model before pruning.
        data (iterable of `dict`): Batches, or a single batch: arguments of the forward pass. A few hundred texts are
            enough; they are kept in memory. Labels are not needed.
        ridge (`float`): Strength of the penalty, at least 0. With 0, the solution with the smallest change is taken.
        add_biases (`bool`): Whether projections of architectures without biases get one, which the configuration
            records as `added_biases`.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`RefitErrors`]: the errors before and after.

    Raises:
        ValueError: if `ridge` is negative; if `dense` is `model`, has other layers, or lacks heads or units of
            `model`; if weights are quantized, adapted, sharded, tied or not loaded; or if there is no batch, or the
            first one does not run a pruned block. The model is then unchanged. A later batch that the model refuses,
            or that does not run a block, leaves some projections fitted.

    Example:
        >>> import copy
        >>> from transformers import GPT2Config, GPT2Model
        >>> from hf_attn_dynamics import prune_units
        >>> dense = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> model = prune_units(copy.deepcopy(dense), {0: "0-31"})
        >>> errors = refit_outputs(model, dense, {"input_ids": torch.tensor([[5, 7, 8]])})
        >>> all(after <= before for *_, before, after in errors.records())
        True
    """
    if not is_finite(ridge) or ridge < 0:
        raise ValueError(f"ridge must be a number of at least 0, got {ridge!r}.")
    pairs = _pairs(model, dense)
    _check_weights(model, dense, pairs)
    batches = [data] if isinstance(data, Mapping) else list(data)
    runs = _runs(dense, [pair.before for pair in pairs], batches)
    _check_runs([pair.own.key for pair in pairs if pair.removed], runs)
    if add_biases and any(pair.own.output.bias is None for pair in pairs):
        _add_biases(model)
    order = {pair.own.key: pair for pair in pairs}
    errors = []
    for key in tqdm([key for key in runs if key in order], desc="output projections", disable=not progress):
        sums = _sums(model, dense, order[key], batches, runs[key])
        errors.append([key.part, *key.site, *_refit(order[key].own, sums, ridge)])
    return RefitErrors(errors)


class _Pair(NamedTuple):
    """The same part of the pruned and of the dense model."""

    own: ModelPart
    before: ModelPart

    @property
    def removed(self) -> list[int]:
        stays = set(self.own.elements)
        return [element for element in self.before.elements if element not in stays]


def _pairs(model: PreTrainedModel, dense: PreTrainedModel) -> list[_Pair]:
    if model is dense:
        raise ValueError("dense is the pruned model itself; copy the model before pruning, copy.deepcopy(model).")
    own, before = ({part.key: part for part in prunable_parts(one)} for one in (model, dense))
    if own.keys() != before.keys():
        differing = next(key for key in (*own, *before) if (key in own) != (key in before))
        raise ValueError(f"dense must have the layers of model, but only one of them has {differing}.")
    for key, part in own.items():
        if part.count != before[key].count or part.width != before[key].width:
            raise ValueError(
                f"dense must have the sizes of model, but it has {before[key].count} {key}, not {part.count}."
            )
        if missing := sorted(set(part.elements) - set(before[key].elements)):
            raise ValueError(f"dense lacks {key.part[:-1]} {missing[0]} of {key.site}, which model has.")
    return [_Pair(part, before[key]) for key, part in own.items()]


def _check_weights(model: PreTrainedModel, dense: PreTrainedModel, pairs: Iterable[_Pair]) -> None:
    """Raises ValueError if the weights of output projections alone do not determine their outputs."""
    check_outputs(model, [pair.own.layer for pair in pairs if pair.own.elements])
    check_outputs(dense, [pair.before.layer for pair in pairs if pair.before.elements])


def _check_runs(keys: Iterable[PartSite], found: Mapping[PartSite, Any]) -> None:
    if unused := [key for key in keys if key not in found]:
        raise ValueError(
            f"data does not run the {unused[0]}, from which something was removed; give batches that do, such as with "
            "encoder_hidden_states for cross-attention."
        )


def _check_unchanged(pair: _Pair) -> None:
    own, before = pair.own, pair.before
    weight, dense = own.columns(), before.columns()[:, before.features(own.elements)]
    bias, dense_bias = own.output.bias, before.output.bias
    same_bias = (
        (bias is None or not bias.any())
        if dense_bias is None
        else bias is not None and torch.equal(dense_bias.to(bias), bias)
    )
    if not same_bias or not torch.equal(dense.to(weight), weight):
        raise ValueError(
            f"the output projection of the {own.key} has changed since pruning; call compensate() once, right after "
            "pruning."
        )


def _add_biases(model: PreTrainedModel) -> None:
    separate_configuration(model)
    add_output_biases(model)


@torch.no_grad()
def _add(bias: torch.Tensor, added: torch.Tensor) -> None:
    bias.copy_((bias.double().cpu() + added).to(bias))


@torch.no_grad()
def _mean_inputs(
    model: PreTrainedModel, parts: list[ModelPart], data: Data, purpose: str, progress: bool
) -> dict[PartSite, torch.Tensor]:
    """Mean inputs of the output projections over tokens, in float64; absent for layers that did not run."""
    sums: dict[PartSite, torch.Tensor] = {}
    counts: dict[PartSite, int] = {}
    batch: Mapping[str, Any] = {}

    def add(own: ModelPart, given: torch.Tensor) -> None:
        real = real_tokens(model, own.key.site.kind, batch, given.shape[:2], given.device)
        # Sums of many tokens in double precision, so that their order does not matter.
        sums[own.key] = sums.get(own.key, 0) + given[real].flatten(1).double().sum(0)
        counts[own.key] = counts.get(own.key, 0) + int(real.sum())

    view = evaluation_view(model)
    for own in parts:
        own.edit(view, partial(add, own))
    for _, batch in batches_of(data, model, purpose, progress):
        view.root(**batch)
    return {key: total / max(counts[key], 1) for key, total in sums.items()}


@torch.no_grad()
def _runs(model: PreTrainedModel, parts: list[ModelPart], batches: list[Mapping[str, Any]]) -> dict[PartSite, int]:
    """How often each part runs in a forward pass, in the order of their first runs."""
    counts: dict[PartSite, int] = {}
    view = evaluation_view(model)
    for own in parts:
        own.edit(view, lambda given, key=own.key: counts.update({key: counts.get(key, 0) + 1}))
    for _, batch in batches_of(batches[:1], model, "refit_outputs()"):
        view.root(**batch)
    return counts


class _Reached(Exception):
    """Ends a forward pass."""


class _Inputs:
    """Inputs of the output projection of a part at non-padding tokens, batch by batch."""

    def __init__(self, model: PreTrainedModel, own: ModelPart, runs: int):
        self.model, self.own, self.runs = model, own, runs
        self.batch: Mapping[str, Any] = {}
        self.found: list[torch.Tensor] = []
        self.view: ModelView = evaluation_view(model)
        own.edit(self.view, self._add)

    def _add(self, given: torch.Tensor) -> None:
        real = real_tokens(self.model, self.own.key.site.kind, self.batch, given.shape[:2], given.device)
        self.found.append(given[real].flatten(1))
        if len(self.found) == self.runs:
            raise _Reached

    def __call__(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Inputs of shape `(tokens, inputs)`, float64."""
        self.batch, self.found = batch, []
        with contextlib.suppress(_Reached):
            self.view.root(**batch)
        if not self.found:
            raise ValueError(
                f"a batch does not run the {self.own.key}, as the first one does; give batches of one kind."
            )
        return torch.cat(self.found).double()


class _Sums(NamedTuple):
    """Sums over tokens of the inputs x of a projection, its targets y, and the residuals r of its current weights.

    Sums of residuals, not of targets, give errors without cancellation.
    """

    count: int
    x: torch.Tensor
    r: torch.Tensor
    xx: torch.Tensor
    xr: torch.Tensor
    rr: float
    y: torch.Tensor
    yy: float


@torch.no_grad()
def _sums(
    model: PreTrainedModel, dense: PreTrainedModel, pair: _Pair, batches: list[Mapping[str, Any]], runs: int
) -> _Sums:
    """Sums for the output projection of a part, whose targets are the outputs of the dense model."""
    of_model = _Inputs(model, pair.own, runs) if pair.own.elements else None
    of_dense = _Inputs(dense, pair.before, runs)
    totals: list[Any] = [0] * len(_Sums._fields)
    for (_, own), (_, before) in zip(
        batches_of(batches, model, "refit_outputs()"), batches_of(batches, dense, "refit_outputs()")
    ):
        y = _projected(pair.before, of_dense(before)).to(model.device)
        x = of_model(own) if of_model else y[:, :0]
        r = y - _projected(pair.own, x)
        squares = float(r.square().sum()), float(y.square().sum())
        for index, one in enumerate((len(x), x.sum(0), r.sum(0), x.T @ x, x.T @ r, squares[0], y.sum(0), squares[1])):
            totals[index] += one
    return _Sums(*totals)


def _projected(own: ModelPart, x: torch.Tensor) -> torch.Tensor:
    """Outputs of an output projection, float64."""
    y = x @ own.columns().double().T
    return y if own.output.bias is None else y + own.output.bias.double()


@torch.no_grad()
def _refit(own: ModelPart, sums: _Sums, ridge: float) -> tuple[float, float]:
    """Solves the least-squares problem of an output projection; returns its error before and after."""
    weight, bias, count = own.columns(), own.output.bias, max(sums.count, 1)
    spread = max(sums.yy - float(sums.y.square().sum()) / count, 0.0) or 1.0
    if sums.rr <= EXACT * sums.yy:
        return sums.rr / spread, sums.rr / spread
    xx, xr = sums.xx, sums.xr
    if bias is not None:
        xx, xr = xx - torch.outer(sums.x, sums.x) / count, xr - torch.outer(sums.x, sums.r) / count
    # The error of the weights as they are stored, which may be rounded.
    fitted = (weight.double() + _ridge_solution(xx, xr, ridge).T).to(weight.dtype)
    change, shift = fitted.double() - weight.double(), torch.zeros_like(sums.r)
    if bias is not None:
        constant = (bias.double() + (sums.r - change @ sums.x) / count).to(bias.dtype)
        shift = constant.double() - bias.double()
    error = sums.rr + (change * (change @ sums.xx - 2 * sums.xr.T)).sum()
    error = float(error + sums.count * shift.square().sum() + 2 * shift @ (change @ sums.x - sums.r))
    if not error < sums.rr:
        return sums.rr / spread, sums.rr / spread
    weight.copy_(fitted)
    if bias is not None:
        bias.copy_(constant)
    return sums.rr / spread, max(error, 0.0) / spread


def _ridge_solution(matrix: torch.Tensor, right: torch.Tensor, ridge: float) -> torch.Tensor:
    """D with the smallest norm that minimizes `tr(Dᵀ A D) − 2 tr(Dᵀ R) + λ ‖D‖²`, where λ is relative to A."""
    if not len(matrix) or not matrix.trace() > 0:
        return torch.zeros_like(right)
    penalty = ridge * matrix.trace() / len(matrix)
    factor, failed = torch.linalg.cholesky_ex(matrix + penalty * torch.eye(len(matrix)).to(matrix))
    if ridge > 0 and not failed:
        return torch.cholesky_solve(right, factor)
    values, vectors = torch.linalg.eigh(matrix)
    small = values <= values[-1] * len(matrix) * torch.finfo(values.dtype).eps
    inverse = (1 / (values + penalty)).masked_fill(small, 0)
    return vectors @ (inverse[:, None] * (vectors.T @ right))
