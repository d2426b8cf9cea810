# Licensed under the Apache License, Version 2.0.
"""The loss `task + α · guidance + λ · gate penalty`, over one batch or as a part of an accumulated batch.

By default the loss is a mean over its own batch. With gradient accumulation and several processes, the trainer counts
the items of the whole batch, and the model divides its sums by their number.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from .compat import shift_tokens_right
from .guidance_settings import check_each_weighted
from .ignored_labels import IGNORED
from .loss_terms import HEAD_LOSSES, SHIFTED_LABELS, LossTerm
from .precision import at_least_single
from .token_mask import labels_of_tokens


# Keys of `num_items_in_batch` other than label columns: number of sentences, and of forward passes, of the accumulated
# batch over all processes.
SENTENCES = "sentences"
FORWARD_PASSES = "forward_passes"


@cache
def loss_terms_of(model_class: type) -> tuple[LossTerm, ...]:
    """Loss terms of a model class of Transformers, or a class derived from one; empty without a loss.

    Args:
        model_class (`type[PreTrainedModel]`): The class. Losses that a derived class adds are not included.

    Example:
        >>> from transformers import BertForNextSentencePrediction
        >>> [(term.name, term.labels) for term in loss_terms_of(BertForNextSentencePrediction)]
        [('nsp', 'labels')]
    """
    stock = next((cls for cls in model_class.__mro__ if cls.__module__.startswith("transformers.models.")), None)
    ends = [end for end in HEAD_LOSSES if stock is not None and stock.__name__.endswith(end)]
    if not ends:
        return ()
    terms = HEAD_LOSSES[max(ends, key=len)]
    if "decoder_input_ids" in inspect.signature(stock.forward).parameters:
        # An encoder–decoder shifts the decoder's input instead of the labels.
        terms = tuple(term._replace(kind="class") if term.kind == "next" else term for term in terms)
    return terms


# ---- The task loss ----


def sentence_losses(
    terms: tuple[LossTerm, ...], config: PreTrainedConfig, outputs: ModelOutput, batch: Mapping[str, Any]
) -> dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]:
    """Task loss of each sentence, by term.

    Args:
        terms (`tuple[LossTerm, ...]`): Terms of the loss.
        config (`PreTrainedConfig`): Configuration of the model, for its `problem_type`.
        outputs (`ModelOutput`): Output of a forward pass, with logits.
        batch (`dict[str, torch.Tensor]`): Label columns, and the attention mask of the inputs.

    Returns:
        `dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]`: for each term whose labels are given, the summed loss and
        the number of labels of each sentence, both of shape `(batch,)`, without ignored labels. [`mean_loss`] reduces
        them to the loss of the batch.
    """
    losses = {}
    given = {**batch, **outputs}
    for term in terms:
        if given.get(term.labels) is None:
            continue
        logits = at_least_single(outputs[term.logits])
        target, ignored = _target(term, config, given[term.labels], given)
        target = target.to(logits.device)
        size = len(logits)
        if term.kind == "token":
            loss, counts = logits, target.ne(ignored)
        elif term.kind == "binary":
            counts = target.ne(ignored)
            loss = _binary_cross_entropy(logits, target.clamp(min=0).to(logits), "none") * counts
        elif ignored is not None:
            loss = nn.functional.cross_entropy(
                logits.flatten(0, -2), target.flatten(), ignore_index=ignored, reduction="none"
            )
            counts = target.ne(ignored)
        else:
            mean_squares = problem_type(config, target) == "regression"
            elementwise = nn.functional.mse_loss if mean_squares else _binary_cross_entropy
            loss = elementwise(logits, target.view_as(logits).to(logits), reduction="none")
            counts = torch.ones_like(loss)
        losses[term] = loss.view(size, -1).sum(1), counts.view(size, -1).sum(1)
    return losses


def mean_loss(losses: Mapping[LossTerm, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Task loss of a batch, a scalar: `Σ_terms weight · Σ sums / Σ counts`, NaN without labels."""
    return sum(term.weight * sums.sum() / counts.sum() for term, (sums, counts) in losses.items())


def count_labels(
    terms: tuple[LossTerm, ...], config: PreTrainedConfig, batch: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Number of labels in each label column of a batch, without ignored ones, see [`TaskLossMixin`]."""
    counts = {}
    has_inputs = any(batch.get(name) is not None for name in ("input_ids", "inputs_embeds"))
    for term in terms:
        if batch.get(term.labels) is not None and (has_inputs or term.kind != "position"):
            target, ignored = _target(term, config, batch[term.labels], batch)
            counts[term.labels] = (torch.ones_like(target) if ignored is None else target.ne(ignored)).sum()
    return counts


def labelled_rows(terms: tuple[LossTerm, ...], config: PreTrainedConfig, batch: Mapping[str, Any]) -> torch.Tensor:
    """Rows of the logits that have a label, a boolean tensor: of shape `(batch,)` for classifiers of sentences,
    `(batch, length)` for tokens.

    Args:
        terms (`tuple[LossTerm, ...]`): Terms of the loss, of which the first is a loss over classes.
        config (`PreTrainedConfig`): Configuration of the model.
        batch (`dict[str, torch.Tensor]`): Labels.
    """
    target, ignored = _target(terms[0], config, batch[terms[0].labels], batch)
    return torch.ones_like(target, dtype=torch.bool) if ignored is None else target.ne(ignored)


def problem_type(config: PreTrainedConfig, labels: torch.Tensor) -> str:
    """Problem type of a sequence classifier, inferred as in Transformers from the configuration and the labels."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    is_single = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if is_single else "multi_label_classification"


def _target(
    term: LossTerm, config: PreTrainedConfig, labels: torch.Tensor, batch_or_outputs: Mapping[str, Any]
) -> tuple[torch.Tensor, int | None]:
    """Labels of a term as the stock loss reads them, and the ignored label (`None` unless labels are classes)."""
    if term.kind == "position":
        inputs = next(
            batch_or_outputs[name]
            for name in (term.logits, "input_ids", "inputs_embeds")
            if batch_or_outputs.get(name) is not None
        )
        return labels.view(-1).clamp(0, inputs.shape[1]), inputs.shape[1]
    if term.kind == "binary":
        labels = labels_of_tokens(labels, batch_or_outputs.get("attention_mask"))
    if term.kind == "next" and batch_or_outputs.get(SHIFTED_LABELS) is not None:
        labels = batch_or_outputs[SHIFTED_LABELS]
    elif term.kind == "next":
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if term.kind == "problem" and problem_type(config, labels) != "single_label_classification":
        return labels, None
    return labels, IGNORED


def _binary_cross_entropy(logits: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, target, reduction=reduction)


# ---- Parts of the loss of an accumulated batch ----


def task_parts(
    losses: Mapping[LossTerm, tuple[torch.Tensor, torch.Tensor]], num_items: Any
) -> dict[LossTerm, torch.Tensor]:
    """Contribution of this batch to each unweighted loss term of an accumulated batch.

    Args:
        losses: Output of [`sentence_losses`].
        num_items (`int`, `torch.Tensor` or `dict`): Number of labels of the accumulated batch, of the first term or by
            label column.

    Raises:
        ValueError: if the number for the first column is missing.
    """
    first = next(iter(losses))
    counted = num_items if isinstance(num_items, dict) else {first.labels: num_items}
    if first.labels not in counted:
        raise ValueError(
            f"num_items_in_batch needs the key {first.labels!r}, got {', '.join(map(str, counted)) or 'no key'}; "
            "pass the output of the model's count_labels()."
        )
    parts = {}
    for term, (sums, counts) in losses.items():
        if term.labels in counted:
            whole = torch.as_tensor(counted[term.labels], device=sums.device)
        else:
            # Only labels of the first term were counted: assume the same fraction of the accumulated batch.
            whole = counts.sum() * counted[first.labels] / losses[first][1].sum().clamp(min=1)
        # A batch may have no labels.
        parts[term] = sums.sum() / whole.clamp(min=1)
    return parts


def fraction_of_sentences(sentences: torch.Tensor | None, num_items: Any) -> torch.Tensor | None:
    """Fraction of the sentences of an accumulated batch that are in this one; `None` if they are not counted."""
    if sentences is None or not isinstance(num_items, dict) or SENTENCES not in num_items:
        return None
    return sentences / num_items[SENTENCES]


def head_loss_parts(losses: dict[str, Any], sentences: torch.Tensor | None, num_items: Any) -> dict[str, Any]:
    """Contribution of this batch to the unweighted guidance loss and gate penalty of an accumulated batch.

    Args:
        losses (`dict[str, torch.Tensor]`): `guidance_loss`, the mean over the sentences of this batch, with its
            summands `guidance_losses` by name, and `gate_penalty`, if requested.
        sentences (`torch.Tensor`, *optional*): Number of sentences of this batch, from [`number_of_sentences`].
        num_items (`dict`, *optional*): `num_items_in_batch` of the forward pass. Without its key `sentences` the
            guidance loss remains the mean over this batch; without `forward_passes` the penalty is not divided.
    """
    counted = num_items if isinstance(num_items, dict) else {}
    parts = dict(losses)
    fraction = fraction_of_sentences(sentences, num_items) if "guidance_loss" in losses else None
    if fraction is not None:
        fraction = torch.as_tensor(fraction, device=losses["guidance_loss"].device)
        parts["guidance_loss"] = losses["guidance_loss"] * fraction
        parts["guidance_losses"] = {name: loss * fraction for name, loss in losses["guidance_losses"].items()}
    if "gate_penalty" in losses and FORWARD_PASSES in counted:
        parts["gate_penalty"] = losses["gate_penalty"] / counted[FORWARD_PASSES]
    return parts


def add_head_losses(
    loss: torch.Tensor,
    outputs: Mapping[str, Any],
    guidance_weight: float | torch.Tensor | Mapping[str, float | torch.Tensor] | None = None,
    gate_penalty_weight: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `loss + α · guidance_loss + λ · gate_penalty`, without the terms whose weight is `None`.

    Args:
        loss (`torch.Tensor`): The task loss, a scalar.
        outputs (`ModelOutput` or `dict`): Contains `guidance_loss` and `gate_penalty`, where they have a weight, and
            `guidance_losses` for weights by name.
        guidance_weight (`float`, `torch.Tensor` or `dict`, *optional*): α; or one of each summand in
            `guidance_losses`, by name.
        gate_penalty_weight (`float` or `torch.Tensor`, *optional*): λ.

    Raises:
        ValueError: if weights by name lack a name.

    Example:
        >>> losses = {"guidance_loss": torch.tensor(2.0), "gate_penalty": torch.tensor(3.0)}
        >>> add_head_losses(torch.tensor(1.0), losses, guidance_weight=0.5, gate_penalty_weight=0.1)
        tensor(2.3000)
    """
    for weight, name in ((guidance_weight, "guidance_loss"), (gate_penalty_weight, "gate_penalty")):
        if isinstance(weight, Mapping):
            check_each_weighted(weight, outputs["guidance_losses"])
            for of, part in outputs["guidance_losses"].items():
                loss = loss + weight[of] * part
        elif weight is not None:
            loss = loss + weight * outputs[name]
    return loss


def decoder_inputs_of(model: PreTrainedModel, labels: torch.Tensor) -> torch.Tensor:
    """Inputs of the decoder of an encoder–decoder: its labels, shifted by one."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    # Some classes shift labels only within their forward pass.
    return shift_tokens_right(labels, model.config.pad_token_id, model.config.decoder_start_token_id)


class TaskLossMixin:
    """A model whose task loss is a weighted sum of terms, each the mean over the labels of one column."""

    loss_terms: ClassVar[tuple[LossTerm, ...]] = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        terms = loss_terms_of(cls)
        # A class may define its own terms, such as one that creates its labels.
        if terms and not any("loss_terms" in vars(base) for base in cls.__mro__ if base is not TaskLossMixin):
            cls.loss_terms = terms

    @property
    def labels_are_target(self) -> bool:
        """Whether labels of an encoder–decoder are target tokens, not classes or positions."""
        return all(term.kind not in ("problem", "position") for term in self.loss_terms)

    def without_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Removes the labels from a batch, after computing the decoder's input from them: same logits, no loss."""
        labels = {term.labels: batch.get(term.labels) for term in self.loss_terms}
        inputs = {name: value for name, value in batch.items() if name not in (*labels, SHIFTED_LABELS)}
        if getattr(self.config, "is_encoder_decoder", False) and labels.get("labels") is not None:
            given = any(inputs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
            if self.labels_are_target and not given:
                inputs["decoder_input_ids"] = decoder_inputs_of(self, labels["labels"])
            # As in the stock classes, if labels are given.
            inputs["use_cache"] = False
        return inputs

    @property
    def reads_shifted_labels(self) -> bool:
        """Whether the loss reads `shift_labels` instead of `labels`, if a batch has both."""
        return any(term.kind == "next" for term in self.loss_terms)

    @property
    def label_columns(self) -> list[str]:
        """Label columns that a batch must contain; empty without a task head."""
        return [term.labels for term in self.loss_terms if not term.made]

    def sentence_losses(
        self, outputs: ModelOutput, batch: dict[str, torch.Tensor]
    ) -> dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]:
        """Task loss of each sentence, by term; see the function [`sentence_losses`]."""
        return sentence_losses(self.loss_terms, self.config, outputs, batch)

    def router_loss(self, outputs: ModelOutput, num_items: Any) -> torch.Tensor | float:
        """Contribution of this batch to the weighted loss of routers, which balances the load of a mixture of experts.

        Stock forward passes add it to the task loss if the batch has labels and `output_router_logits` is set.

        Args:
            outputs (`ModelOutput`): Output of the stock forward pass, with `aux_loss` if it computes this loss.
            num_items (`int`, `torch.Tensor` or `dict`): `num_items_in_batch` of the forward pass. With its key
                `forward_passes` the loss is a mean over them.
        """
        balance = outputs.get("aux_loss")
        if balance is None:
            return 0.0
        passes = num_items.get(FORWARD_PASSES, 1) if isinstance(num_items, dict) else 1
        holder = self if hasattr(self, "router_aux_loss_coef") else self.config.get_text_config()
        return holder.router_aux_loss_coef * balance / passes

    def check_loss_function(self) -> None:
        """Raises ValueError if a user has replaced `loss_function`, which the loss of an accumulated batch is not."""
        if "_loss_function" in vars(self):
            raise ValueError(
                f"the loss_function of {type(self).__name__} has been replaced, whose sum over labels is not known: "
                "pass compute_loss_func to the trainer instead, or leave out num_items_in_batch."
            )

    def count_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Number of labels in each label column of a batch, without ignored ones.

        Args:
            batch (`dict[str, torch.Tensor]`): Inputs and labels of a forward pass.

        Returns:
            `dict[str, torch.Tensor]`: scalars, to be summed over micro-batches and processes and passed to the forward
            pass as `num_items_in_batch`. Labels that are positions need the inputs in the batch.
        """
        return count_labels(self.loss_terms, self.config, batch)
