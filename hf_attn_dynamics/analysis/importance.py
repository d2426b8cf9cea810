# Licensed under the Apache License, Version 2.0.
"""Which heads matter: importance from the gradients of a trained model, from its gates, or by chance.

No training is needed for the first. All three return [`HeadScores`], which `retain_heads` takes.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .._files import write_text
from ..models.head_gates import at_least_single
from ..models.head_roles import HeadLayer, locate_heads
from ..models.head_sites import SITE_KINDS, HeadSite


if TYPE_CHECKING:
    import pandas


IGNORED = -100  # labels of this value have no loss


# ---------------------------------------------------------------------------------------------------------------------
# Scores
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadScores(Mapping):
    """One number for each head, by kind of site: `scores["encoder"][layer, head]`, in the original numbering.

    Args:
        scores (`dict[str, torch.Tensor]`): For each kind of site (`encoder`, `decoder`, `cross`) a tensor of shape
            `(layers, heads)`; kept in float64 on the CPU. NaN where a head is removed.

    Raises:
        ValueError: if there is no score, a kind is unknown, or a tensor does not have two dimensions.

    Example:
        >>> scores = HeadScores({"encoder": [[3.0, 4.0], [0.0, 2.0]]})
        >>> scores["encoder"][1, 1].item()
        2.0
        >>> scores.normalized().to_dict()
        {'encoder': [[0.6, 0.8], [0.0, 1.0]]}
    """

    scores: dict[str, torch.Tensor]

    def __post_init__(self):
        if not self.scores:
            raise ValueError("scores are empty: they need at least one kind of site.")
        for kind in self.scores:
            if kind not in SITE_KINDS:
                raise ValueError(f"scores name the site {kind!r}, which is not one of {', '.join(SITE_KINDS)}.")
        tables = {
            kind: torch.as_tensor(self.scores[kind], dtype=torch.float64, device="cpu").detach()
            for kind in SITE_KINDS
            if kind in self.scores
        }
        for kind, table in tables.items():
            if table.dim() != 2:
                raise ValueError(f"scores of the {kind} must have shape (layers, heads), got {tuple(table.shape)}.")
        object.__setattr__(self, "scores", tables)

    def __getitem__(self, kind: str) -> torch.Tensor:
        return self.scores[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    def __eq__(self, other: object) -> bool:
        """Equal scores; removed heads are equal to removed heads."""
        return (
            isinstance(other, HeadScores)
            and list(self) == list(other)
            and all(
                self[kind].shape == other[kind].shape and torch.allclose(self[kind], other[kind], 0, 0, equal_nan=True)
                for kind in self
            )
        )

    __hash__ = None

    @property
    def plain(self) -> torch.Tensor | dict[str, torch.Tensor]:
        """Without the name of the site if there is only one, as `retain_heads` takes scores: a tensor, or a `dict`."""
        return next(iter(self.scores.values())) if len(self) == 1 else dict(self.scores)

    def normalized(self) -> "HeadScores":
        """Scores divided by the ℓ2 norm of those of their layer, at each kind of site; layers of zeros stay zero."""
        return HeadScores({kind: _divided_by_norm(scores) for kind, scores in self.items()})

    def to_dict(self) -> dict[str, list[list[float | None]]]:
        """Scores as lists, `{kind: [layer][head]}`; `None` where a head is removed."""
        return {
            kind: [[None if math.isnan(score) else score for score in layer] for layer in scores.tolist()]
            for kind, scores in self.items()
        }

    def save(self, path: str | Path) -> None:
        """Writes the scores as JSON."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "HeadScores":
        """Reads what `save` wrote.

        Raises:
            ValueError: if the file does not hold scores.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            tables = {
                kind: [[math.nan if score is None else float(score) for score in layer] for layer in table]
                for kind, table in values.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold scores of heads, {{site: [[score, …], …]}}: {error}") from error
        return cls(tables)

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with one row for each head and the columns `site`, `layer`, `head`, `score`.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas, or use to_dict().") from error
        rows = [
            (kind, layer, head, score)
            for kind, table in self.items()
            for layer, scores in enumerate(table.tolist())
            for head, score in enumerate(scores)
        ]
        return pandas.DataFrame(rows, columns=["site", "layer", "head", "score"])


def _divided_by_norm(scores: torch.Tensor) -> torch.Tensor:
    norm = scores.nan_to_num().norm(dim=-1, keepdim=True)
    return scores / norm.where(norm > 0, torch.ones_like(norm))


def _tabulated(layers: list[HeadLayer], values: dict[HeadSite, torch.Tensor]) -> HeadScores:
    """Scores of the present heads of each site, as tables of all heads."""
    tables = {}
    for kind in SITE_KINDS:
        of_kind = [layer for layer in layers if layer.site.kind == kind and layer.site in values]
        if of_kind:
            shape = max(layer.site.layer for layer in of_kind) + 1, max(layer.num_heads for layer in of_kind)
            tables[kind] = torch.full(shape, math.nan, dtype=torch.float64)
            for layer in of_kind:
                tables[kind][layer.site.layer, layer.heads] = values[layer.site].detach().cpu().double()
    return HeadScores(tables)


# ---------------------------------------------------------------------------------------------------------------------
# Three ways to score heads
# ---------------------------------------------------------------------------------------------------------------------


def head_importance(
    model: PreTrainedModel,
    data: Iterable[Mapping[str, Any]],
    normalize: str | None = None,
    loss: Callable[[ModelOutput, dict[str, Any]], torch.Tensor] | None = None,
    progress: bool = False,
) -> HeadScores:
    """How much the loss depends on each head: the expected sensitivity to masking it (Michel et al. 2019, equation 2).

    `I_h = mean over tokens of |⟨context_h, ∂L/∂context_h⟩|`, where `context_h` is the output of head h before the
    output projection, and L the sum of the losses of all labels. How sentences are padded and split into batches does
    not matter. Positions with attention mask 0 are no tokens; on the decoder's side of an encoder–decoder model these
    are positions with decoder attention mask 0 or, without such a mask, with the label -100. A layer whose weights
    are used several times in one pass (ALBERT) counts each use. Heads with a closed gate have importance 0.

    The model runs in evaluation mode; its mode, its gradients and what it has frozen stay as they are.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` knows, also one that is frozen or pruned.
        data (iterable of `dict`): Batches, as the model takes them, with labels; moved to the model's device.
        normalize (`str`, *optional*): `"l2"` divides by the ℓ2 norm of the heads of the same layer and kind of site,
            as the authors do.
        loss (callable, *optional*): `loss(outputs, batch)` returns the sum, not the mean, of the losses of a batch. By
            default the loss that the model computes itself, times the number of its labels.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`HeadScores`]: NaN where a head is removed.

    Raises:
        ValueError: if `normalize` is unknown, there is no batch, a batch has no labels or its loss is not finite, a
            layer never ran, masks do not fit, or it is not known what a model's own loss is the mean of; pass `loss`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = BertForSequenceClassification(config)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8], [9, 6, 4]]), "labels": torch.tensor([0, 1])}
        >>> head_importance(model, [batch], normalize="l2")["encoder"].shape
        torch.Size([2, 4])
    """
    if normalize not in (None, "l2"):
        raise ValueError(f"normalize must be 'l2' or None, got {normalize!r}.")
    layers = locate_heads(model)
    present = [layer for layer in layers if layer.heads]
    sums = {layer.site: torch.zeros(len(layer.heads), dtype=torch.float64) for layer in layers}
    tokens = dict.fromkeys(sums, 0)
    summed_loss = loss or (_HeadwiseLoss if hasattr(model, "sentence_losses") else _StockLoss)(model)
    contexts: list[tuple[HeadLayer, torch.Tensor]] = []
    hooks = [layer.output.register_forward_pre_hook(partial(_keep_context, layer, contexts)) for layer in present]
    number = -1
    try:
        with evaluation_mode(model), torch.enable_grad():
            for number, batch in enumerate(tqdm(data, desc="head importance", disable=not progress)):
                if not isinstance(batch, Mapping):
                    raise ValueError(f"batch {number} of data must be a dictionary of tensors, got {type(batch)}.")
                batch = {k: v.to(model.device) if torch.is_tensor(v) else v for k, v in batch.items()}
                contexts.clear()
                outputs = model(**batch, return_dict=True)
                total = summed_loss(outputs, batch)
                if not contexts:
                    continue
                if total.dim() or not total.requires_grad:
                    raise ValueError(
                        f"loss must return a scalar that can be differentiated, got shape {tuple(total.shape)}, "
                        f"requires_grad={total.requires_grad} (batch {number})."
                    )
                if not total.isfinite():
                    raise ValueError(f"the loss of batch {number} is {total.item()}; importance needs a finite loss.")
                gradients = torch.autograd.grad(total, [context for _, context in contexts], allow_unused=True)
                seen = set()
                for (layer, context), gradient in zip(contexts, gradients):
                    real = _real_tokens(model, layer.site.kind, batch, context)
                    if layer.site not in seen:
                        tokens[layer.site] += int(real.sum())
                        seen.add(layer.site)
                    if gradient is not None:
                        sums[layer.site] += _sensitivity(context, gradient, layer)[real].sum(0).cpu().double()
    finally:
        for hook in hooks:
            hook.remove()
        contexts.clear()
    if number < 0:
        raise ValueError("data is empty: importance needs at least one batch.")
    for layer in present:
        if not tokens[layer.site]:
            raise ValueError(f"data has no token for the {layer.site}; check the inputs and their attention masks.")
    scores = _tabulated(layers, {site: total / max(tokens[site], 1) for site, total in sums.items()})
    return scores.normalized() if normalize else scores


def random_importance(model: PreTrainedModel, seed: int = 0) -> HeadScores:
    """Scores drawn uniformly from [0, 1), the baseline of any ranking.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` knows.
        seed (`int`): Same seed, same scores, whichever heads are already removed.

    Returns:
        [`HeadScores`]: NaN where a head is removed.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = locate_heads(model)
    values = {
        layer.site: torch.rand(layer.num_heads, generator=generator, dtype=torch.float64)[layer.heads]
        for layer in layers
    }
    return _tabulated(layers, values)


def gate_importance(model: PreTrainedModel) -> HeadScores:
    """How open the gate of each head is: the location φ of its distribution (Voita et al. 2019, section 6.1).

    Args:
        model (`PreTrainedModel`): A model with gates.

    Returns:
        [`HeadScores`]: for the kinds of sites that have gates; NaN where a head is removed.

    Raises:
        ValueError: if the model has no gates.
    """
    layers = locate_heads(model)
    gates = {layer.site: getattr(layer.module, "gate", None) for layer in layers}
    kinds = {site.kind for site, gate in gates.items() if gate is not None}
    if not kinds:
        raise ValueError(
            f"{type(model).__name__} has no gates: load or build a headwise model with gates={{}}, or rank its heads "
            "with head_importance()."
        )
    # Where all heads of a layer are removed, so is the gate.
    values = {
        site: torch.empty(0) if gate is None else gate.log_alpha for site, gate in gates.items() if site.kind in kinds
    }
    return _tabulated(layers, values)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode and afterwards each of its modules back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# ---------------------------------------------------------------------------------------------------------------------
# Contexts and tokens
# ---------------------------------------------------------------------------------------------------------------------


def _keep_context(layer: HeadLayer, contexts: list, module: nn.Module, inputs: tuple) -> tuple:
    """Forward pre-hook of an output projection: notes its input, which must be part of a graph."""
    context = inputs[0]
    if not context.requires_grad:
        # All that comes before is frozen: the graph begins here.
        context = context.detach().requires_grad_()
    contexts.append((layer, context))
    return context, *inputs[1:]


def _sensitivity(context: torch.Tensor, gradient: torch.Tensor, layer: HeadLayer) -> torch.Tensor:
    """|⟨context_h, ∂L/∂context_h⟩| of each position and head, `(batch, length, heads)`, at least float32."""
    dtype = torch.promote_types(context.dtype, torch.float32)
    products = context.detach().to(dtype) * gradient.to(dtype)
    return products.unflatten(-1, (len(layer.heads), layer.head_dim)).sum(-1).abs()


def _real_tokens(model: PreTrainedModel, kind: str, batch: dict, context: torch.Tensor) -> torch.Tensor:
    """Which positions of a context, `(batch, length)`, are tokens and no padding."""
    if context.dim() != 3:
        raise ValueError(
            f"the {kind} attention of {type(model).__name__} gives contexts of shape {tuple(context.shape)}, not "
            "(batch, length, heads · head_dim); choose attn_implementation='sdpa'."
        )
    name, mask = "attention_mask", batch.get("attention_mask")
    if kind != "encoder" and getattr(model.config, "is_encoder_decoder", False):
        labels = batch.get("labels")
        if batch.get("decoder_attention_mask") is not None:
            name, mask = "decoder_attention_mask", batch["decoder_attention_mask"]
        elif labels is not None and labels.shape == context.shape[:2]:
            name, mask = "labels", labels.ne(IGNORED)
        elif batch.get("decoder_input_ids") is not None or batch.get("decoder_inputs_embeds") is not None:
            mask = None
        # Else the decoder reads the sentence of the encoder once more, as classifiers do.
    if mask is None:
        return torch.ones(context.shape[:2], dtype=torch.bool, device=context.device)
    if mask.shape != context.shape[:2]:
        raise ValueError(
            f"{name} has the shape {tuple(mask.shape)}, but the {kind} attention has (batch, length) = "
            f"{tuple(context.shape[:2])}; give one mark a token, or leave it out."
        )
    return mask.to(context.device).bool()


# ---------------------------------------------------------------------------------------------------------------------
# Losses: sums, since the mean over a batch depends on how sentences are batched
# ---------------------------------------------------------------------------------------------------------------------


class _HeadwiseLoss:
    """Headwise models know the loss of each sentence."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, outputs: ModelOutput, batch: dict) -> torch.Tensor:
        losses = self.model.sentence_losses(outputs, batch)
        if not losses:
            raise ValueError(_no_labels(self.model, self.model.label_columns or ["labels"]))
        return sum(term.weight * sums.sum() for term, (sums, _) in losses.items())


class _StockLoss:
    """Stock models return a mean. The loss whose mean it is gives the sum, and proves that we know what it is of."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.form: str | None = None

    def __call__(self, outputs: ModelOutput, batch: dict) -> torch.Tensor:
        own = outputs.get("loss")
        if own is None:
            raise ValueError(_no_labels(self.model, ["labels"]))
        forms = _loss_forms(outputs, batch)
        if own.isnan() and any(mean.isnan() for _, mean in forms.values()):
            # A batch without any label: the mean over none.
            return next(total for total, mean in forms.values() if mean.isnan())
        distances = {name: abs(float(mean.detach()) - float(own.detach())) for name, (_, mean) in forms.items()}
        closest = self.form or min(distances, key=distances.get, default=None)
        tolerance = (1e-4 if own.dtype in (torch.float32, torch.float64) else 2e-2) * max(1, abs(float(own.detach())))
        if closest is None or not distances.get(closest, math.inf) <= tolerance:
            raise ValueError(
                f"it is not known what the loss of {type(self.model).__name__} is the mean of; pass "
                "loss=lambda outputs, batch: …, which returns the sum of the losses of a batch."
            )
        self.form = closest
        return forms[closest][0]


def _no_labels(model: nn.Module, columns: list[str]) -> str:
    return (
        f"{type(model).__name__} gives no loss: each batch needs {' or '.join(map(repr, columns))}, or pass "
        "loss=lambda outputs, batch: …, which returns the sum of the losses of a batch."
    )


def _loss_forms(outputs: ModelOutput, batch: dict) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Sum and mean of every loss that a model with these outputs and labels may compute."""
    forms = {}
    labels, logits = batch.get("labels"), outputs.get("logits")
    if labels is not None and torch.is_tensor(logits):
        logits = at_least_single(logits)
        if labels.is_floating_point() and labels.numel() == logits.numel():
            target = labels.to(logits).view_as(logits)
            for name, function in (("squares", mse_loss), ("binary", binary_cross_entropy_with_logits)):
                total = function(logits, target, reduction="sum")
                forms[name] = total, total / labels.numel()
        elif not labels.is_floating_point() and labels.numel() * logits.shape[-1] == logits.numel():
            forms["classes"] = _cross_entropy(logits, labels)
            if labels.dim() == 2 and logits.dim() == 3:
                forms["next tokens"] = _cross_entropy(logits[:, :-1], labels[:, 1:])
    spans = [(outputs.get(f"{end}_logits"), batch.get(f"{end}_positions")) for end in ("start", "end")]
    if all(torch.is_tensor(logits) and labels is not None for logits, labels in spans):
        # Answers that were cut off lie past the end.
        ends = [
            _cross_entropy(at_least_single(logits), labels.view(-1).clamp(0, logits.shape[1]), logits.shape[1])
            for logits, labels in spans
        ]
        forms["spans"] = tuple((start + end) / 2 for start, end in zip(*ends))
    return forms


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int = IGNORED
) -> tuple[torch.Tensor, torch.Tensor]:
    labels = labels.reshape(-1).to(logits.device)
    total = cross_entropy(logits.flatten(0, -2), labels, ignore_index=ignored, reduction="sum")
    return total, total / labels.ne(ignored).sum()
