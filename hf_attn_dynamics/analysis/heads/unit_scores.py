# Licensed under the Apache License, Version 2.0.
"""Importance of heads and feed-forward units in one currency, so that they can be compared."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import ElectraForPreTraining, PreTrainedModel
from transformers.utils import ModelOutput

from ...models.cost_table import CostTable
from ...models.head_sites import SITE_KINDS
from ...models.projections import check_outputs
from ..head_scores import HeadScores
from ..model_parts import PARTS, ModelPart, PartSite, parts_of_model, tables_of_parts
from ..model_views import evaluation_view
from ..notebook import html_table
from ..results import Result, to_json
from ..running import batches_of, real_tokens, unwrapped
from .mask_gradients import check_tokens, mask_gradients, mean_sensitivities


METHODS = ("fisher", "margin", "michel", "magnitude", "random")
BY_SENTENCE = ("fisher", "margin")  # squared gradients of each sentence
Tables = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class UnitScores(Result):
    """One number for each head and each feed-forward unit, in the original numbering.

    Args:
        heads ([`HeadScores`]): Scores of the heads.
        units (`dict[str, torch.Tensor]`): A tensor of shape `(layers, units)` for `encoder` and `decoder`; stored in
            float64 on the CPU. NaN for removed units. Empty if only heads are scored.
        method (`str`): Method of [`unit_importance`].
        per (`str`): What the scores were divided by: `""` for nothing, `"ms"` or `"FLOP"`.
        gradients (`dict`, *optional*): Gradients of the masks for each sentence, `{part: {kind: tensor}}`, of shape
            `(sentences, layers, heads)` and `(sentences, layers, units)`; not saved.

    Raises:
        ValueError: if a kind of site is unknown, or a tensor does not have two dimensions.

    Example:
        >>> scores = UnitScores(HeadScores({"encoder": [[3.0, 4.0]]}), {"encoder": [[0.5, 0.0, 0.1]]})
        >>> [row[-1] for row in scores.records()]
        [3.0, 4.0, 0.5, 0.0, 0.1]
    """

    heads: HeadScores
    units: dict[str, torch.Tensor]
    method: str = ""
    per: str = ""
    gradients: dict[str, Tables] | None = None

    columns: ClassVar[list[str]] = ["part", "site", "layer", "index", "score"]

    def __post_init__(self):
        tables = {}
        for kind, table in self.units.items():
            if kind not in SITE_KINDS[:2]:
                raise ValueError(f"units name the site {kind!r}, which is not one of {', '.join(SITE_KINDS[:2])}.")
            tables[kind] = torch.as_tensor(table, dtype=torch.float64, device="cpu").detach()
            if tables[kind].dim() != 2:
                raise ValueError(
                    f"units of the {kind} must have shape (layers, units), got {tuple(tables[kind].shape)}."
                )
        object.__setattr__(self, "units", tables)

    def of(self, part: str) -> Tables:
        """Tables of `heads` or `units` by kind of site."""
        return dict(self.heads) if part == "heads" else self.units

    def per_cost(self, table: CostTable) -> "UnitScores":
        """Scores divided by the marginal cost of a head or unit: by milliseconds, or by FLOPs.

        The marginal cost is the difference in cost between a block with all of its heads or units and one with one
        fewer, which is the slope of the last segment of the table's grid. Where this is not positive, as noise can
        make it in measured tables, the mean cost of a head or unit over the whole grid takes its place.

        Args:
            table ([`CostTable`]): Costs of the same architecture.

        Raises:
            ValueError: if the scores have been divided already, or the table has no such kind of site or assigns it no
                positive cost.
        """
        if self.per:
            raise ValueError(f"the scores are divided by cost already, per {self.per}.")
        unit, name = (1e-3, "ms") if table.quantity == "seconds" else (1.0, "FLOP")
        divided = {
            part: {kind: scores * unit / _marginal_cost(table, part, kind) for kind, scores in self.of(part).items()}
            for part in PARTS
        }
        return replace(self, heads=HeadScores(divided["heads"]), units=divided["units"], per=name, gradients=None)

    def to_dict(self) -> dict[str, Any]:
        """All fields but the gradients as JSON types; `None` for NaN."""
        return {name: to_json(value) for name, value in vars(self).items() if name != "gradients"}

    def records(self) -> Iterator[tuple[str, str, int, int, float]]:
        """Rows of the table, see `columns`: heads, then units."""
        for part in PARTS:
            for kind, table in self.of(part).items():
                for layer, scores in enumerate(table.tolist()):
                    for index, score in enumerate(scores):
                        yield part, kind, layer, index, score

    def _repr_html_(self) -> str:
        """Scores of the heads, and quartiles of the scores of units in each layer, for notebooks."""
        rows = []
        for kind, table in self.units.items():
            for layer, scores in enumerate(table):
                left = scores[~scores.isnan()]
                quartiles = left.quantile(torch.linspace(0, 1, 5, dtype=left.dtype)).tolist() if len(left) else []
                cells = [f"{value:.3g}" for value in quartiles] or [None] * 5
                rows.append([kind, layer, len(left), *cells])
        header = ["site", "layer", "units", "lowest", "first quartile", "median", "third quartile", "highest"]
        caption = " ".join(filter(None, ["Scores of units:", self.method, f"per {self.per}" if self.per else ""]))
        return self.heads._repr_html_() + html_table(header, rows, caption)


def unit_importance(
    model: PreTrainedModel,
    data: Iterable[Mapping[str, Any]] | Mapping[str, Any] | None = None,
    method: str = "fisher",
    loss: Callable[[ModelOutput, dict[str, Any]], torch.Tensor] | None = None,
    seed: int = 0,
    keep_gradients: bool = False,
    progress: bool = False,
    parts: Iterable[str] = PARTS,
) -> UnitScores:
    """Importance of all heads and feed-forward units of a model, in one currency.

    Let z be what a head or unit gives to the output projection of its block: the output of the head, or the activation
    of the unit. Let L be the sum of the losses of all labels.

    - `fisher`: mean over sentences of `(Σ_tokens ⟨z, ∂L/∂z⟩)²`, the squared gradient of a mask. This is the diagonal
      of the empirical Fisher information (Kwon et al. 2022).
    - `margin`: the same with the margin of a classifier instead of L: the largest logit minus the second largest one,
      or the output itself if there is only one. It needs no labels. The losses of a classifier that fits its training
      texts are close to 0 for most of them, so that `fisher` depends on few texts; margins do not saturate.
    - `michel`: mean over tokens of `|⟨z, ∂L/∂z⟩|` (Michel et al. 2019), as [`head_importance`].
    - `magnitude`: `Σ_j Σ_i |W_ij| · ‖z_j‖₂` over the inputs j of the output projection W that belong to the head or
      unit, with the norm over all tokens: Wanda's scores of single weights (Sun et al. 2024), summed over columns. It
      needs no labels.
    - `random`: uniform on [0, 1) times the number of weights of the head or unit, so that heads and units are equal
      per weight. It needs no data.

    Results depend neither on padding nor on batching: sums are over non-padding tokens, see [`head_importance`]. A
    sentence is a row of the batch; rows without tokens do not count. If a module runs several times in one forward
    pass (ALBERT), the gradients of all its runs are summed. The model runs in evaluation mode; its mode, its gradients
    and its frozen parameters are not changed.

    Args:
        model (`PreTrainedModel`): A model that `locate_heads` and `locate_units` support, including frozen and pruned
            models.
        data (iterable of `dict`, *optional*): Batches, or a single batch: arguments of the forward pass, with labels
            for `fisher` and `michel`.
        method (`str`): `fisher`, `margin`, `michel`, `magnitude` or `random`.
        loss (callable, *optional*): `loss(outputs, batch)` returns the sum, not the mean, of the losses of a batch. By
            default, the model's own loss times the number of labels. Only for `fisher` and `michel`.
        seed (`int`): Random seed of `random`; a score does not depend on what is removed.
        keep_gradients (`bool`): Whether the result has the gradients of each sentence, which
            [`select_parts`] rearranges masks by; only for `fisher` and `margin`.
        progress (`bool`): Whether to show a progress bar.
        parts (`list[str]`): `heads` and `units`, or `heads` alone, as for mixtures of experts.

    Returns:
        [`UnitScores`]: NaN for removed heads and units.

    Raises:
        ValueError: if `method` is unknown, `data` is missing, `parts` lacks `heads`, `loss` or `keep_gradients` have
            no effect, `margin` is used for a model without one logit for each class, or for the reasons given in
            [`head_importance`].

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = BertForSequenceClassification(config)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8], [9, 6, 4]]), "labels": torch.tensor([0, 1])}
        >>> scores = unit_importance(model, [batch])
        >>> scores.heads["encoder"].shape, scores.units["encoder"].shape
        (torch.Size([2, 4]), torch.Size([2, 32]))
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if keep_gradients and method not in BY_SENTENCE:
        raise ValueError(f"keep_gradients needs method='fisher' or 'margin', got method={method!r}.")
    if loss is not None and method not in ("fisher", "michel"):
        raise ValueError(f"loss has no effect with method={method!r}; use fisher or michel.")
    if data is None and method != "random":
        raise ValueError(f"method={method!r} needs data: batches of the forward pass.")
    if "heads" not in (parts := [parts] if isinstance(parts, str) else list(parts)):
        raise ValueError(f"parts must have heads, got {parts!r}; units are scored beside them.")
    scored = parts_of_model(model, parts)
    gradients = None
    if method in BY_SENTENCE:
        differentiated = partial(_summed_margins, model) if method == "margin" else loss
        found = _sentence_gradients(model, data, scored, differentiated, progress)
        values = {key: own.double().square().mean(0) for key, own in found.items()}
        gradients = {part: _by_sentence(scored, found, part) for part in PARTS} if keep_gradients else None
    elif method == "michel":
        values = mean_sensitivities(model, data, scored, loss, "importance", progress)
    elif method == "magnitude":
        values = _magnitudes(model, data, scored, progress)
    else:
        values = _random(scored, seed)
    tables = {part: tables_of_parts([own for own in scored if own.part == part], values) for part in PARTS}
    return UnitScores(HeadScores(tables["heads"]), tables["units"], method, gradients=gradients)


def _summed_margins(model: PreTrainedModel, outputs: ModelOutput, batch: Mapping[str, Any]) -> torch.Tensor:
    """Sum over sentences of the largest logit minus the second largest one; of the output, if there is only one."""
    logits = outputs.get("logits")
    several = getattr(model.config, "problem_type", None) == "multi_label_classification"
    # Those of ELECTRA's discriminator are numbers of tokens.
    of_tokens = isinstance(unwrapped(model), ElectraForPreTraining)
    if not torch.is_tensor(logits) or logits.dim() != 2 or several or of_tokens:
        what = "several labels for a sentence" if several else "no single logit for each class"
        raise ValueError(f"method='margin' is for classifiers, but {type(model).__name__} has {what}; use fisher.")
    largest = logits.to(torch.promote_types(logits.dtype, torch.float32)).topk(min(2, logits.shape[1])).values
    return largest[:, 0].sum() - largest[:, 1:].sum()


def _sentence_gradients(
    model: PreTrainedModel, data: Any, parts: list[ModelPart], loss: Any, progress: bool
) -> dict[PartSite, torch.Tensor]:
    """Gradients of the masks for each sentence, `(sentences, elements)`, at least float32, on the CPU."""
    found: dict[PartSite, list[torch.Tensor]] = {own.key: [] for own in parts}
    tokens = dict.fromkeys(found, 0)
    for batch, calls in mask_gradients(model, data, parts, loss, "importance", progress):
        filled = _filled_rows(batch)
        sums = {}
        for own, gradient, real in calls:
            if own.key not in sums:
                tokens[own.key] += int(real.sum())
            sums[own.key] = sums.get(own.key, 0) + _summed(own, gradient, real, len(filled))
        # A layer that did not run, by layer drop for example, has no effect.
        for own in parts:
            none = torch.zeros(len(filled), len(own.elements))
            found[own.key].append(sums.get(own.key, none)[filled])
    check_tokens(parts, tokens)
    return {key: torch.cat(own) if own else torch.empty(0, 0) for key, own in found.items()}


def _filled_rows(batch: Mapping[str, Any]) -> torch.Tensor:
    """Rows of a batch with any token, a boolean vector on the CPU; the choices of a question are one row."""
    mask = batch.get("attention_mask")
    if torch.is_tensor(mask):
        return mask.flatten(1).bool().any(1).cpu()
    names = ("input_ids", "inputs_embeds", *batch)
    inputs = next(batch[name] for name in names if torch.is_tensor(batch.get(name)) and batch[name].dim())
    return torch.ones(len(inputs), dtype=torch.bool)


def _summed(own: ModelPart, gradient: torch.Tensor | None, real: torch.Tensor, rows: int) -> torch.Tensor:
    """Gradients summed over the non-padding tokens of each row of the batch."""
    if gradient is None:
        return torch.zeros(rows, len(own.elements))
    if len(gradient) % rows:
        raise ValueError(
            f"{own.layer.name} runs on {len(gradient)} sequences of a batch of {rows} sentences, so that gradients "
            "cannot be assigned to sentences; use method='michel'."
        )
    return gradient.masked_fill(~real[..., None], 0).sum(1).unflatten(0, (rows, -1)).sum(1).cpu()


def _by_sentence(parts: list[ModelPart], found: Mapping[PartSite, torch.Tensor], part: str) -> Tables:
    own = [one for one in parts if one.part == part]
    tables = tables_of_parts(own, {key: gradients.T for key, gradients in found.items()})
    return {kind: table.movedim(-1, 0) for kind, table in tables.items()}


@torch.no_grad()
def _magnitudes(
    model: PreTrainedModel, data: Any, parts: list[ModelPart], progress: bool
) -> dict[PartSite, torch.Tensor]:
    """Absolute weights of the output projection times the norm of its inputs, summed over heads and units."""
    check_outputs(model, [own.layer for own in parts if own.elements])
    squares = {own.key: torch.zeros(len(own.elements) * own.width, dtype=torch.float64) for own in parts}
    tokens = dict.fromkeys(squares, 0)
    batch: Mapping[str, Any] = {}

    def add(own: ModelPart, given: torch.Tensor) -> None:
        real = real_tokens(model, own.key.site.kind, batch, given.shape[:2], given.device)
        squares[own.key] += given[real].flatten(1).double().square().sum(0).cpu()
        tokens[own.key] += int(real.sum())

    view = evaluation_view(model)
    for own in parts:
        own.edit(view, partial(add, own))
    for _, batch in batches_of(data, model, "importance", progress):
        view.root(**batch)
    check_tokens(parts, tokens)
    return {
        own.key: (own.columns().abs().double().sum(0).cpu() * squares[own.key].sqrt())
        .unflatten(0, (-1, own.width))
        .sum(1)
        if own.elements
        else torch.empty(0)
        for own in parts
    }


def _random(parts: list[ModelPart], seed: int) -> dict[PartSite, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for own in parts:
        drawn = torch.rand(own.count, generator=generator, dtype=torch.float64)[own.elements]
        values[own.key] = drawn * own.weights_per_element() if own.elements else drawn
    return values


def _marginal_cost(table: CostTable, part: str, kind: str) -> float:
    grids = table.attention if part == "heads" else table.feed_forward
    if kind not in grids:
        raise ValueError(f"the table has no cost of {part} of the {kind}; use a table of this architecture.")
    count = int(grids[kind][-1][0])
    cost = table.attention_cost if part == "heads" else table.feed_forward_cost
    last = float(cost(kind, count)) - float(cost(kind, count - 1))
    mean = (float(cost(kind, count)) - float(cost(kind, 0))) / count
    chosen = last if last > 0 else mean
    if not (math.isfinite(chosen) and chosen > 0):
        raise ValueError(f"the table assigns {part} of the {kind} no positive cost; measure it with more rounds.")
    return chosen
