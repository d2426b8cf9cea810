# Licensed under the Apache License, Version 2.0.
"""The one loss: `task + α · guidance + λ · gate penalty`, each part over a batch or as a part of an accumulated one.

Transformers' models form the mean over their own batch. Where a batch is accumulated over several forward passes and
processes, the loss of the whole is a sum divided by a number that the trainer counts, and the model divides by.
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
from .ignored_labels import IGNORED
from .loss_terms import HEAD_LOSSES, SHIFTED_LABELS, LossTerm
from .precision import at_least_single
from .token_mask import labels_of_tokens, num_sentences


# Keys of `num_items_in_batch` beside label columns: sentences of the accumulated batch, and the forward passes that it
# is accumulated over, both over all processes.
SENTENCES = "sentences"
FORWARD_PASSES = "forward_passes"


@cache
def loss_terms_of(model_class: type) -> tuple[LossTerm, ...]:
    """Terms of the loss that a class of Transformers, or one derived from it, computes; empty if it computes none.

    Args:
        model_class (`type[PreTrainedModel]`): The class. Of a derived class with a loss of its own, the terms say
            nothing.

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
        # The decoder's input is shifted, and labels stay where they are.
        terms = tuple(term._replace(kind="class") if term.kind == "next" else term for term in terms)
    return terms


# ---- The task loss ----


def sentence_losses(
    terms: tuple[LossTerm, ...], config: PreTrainedConfig, outputs: ModelOutput, batch: Mapping[str, Any]
) -> dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]:
    """Task loss of each sentence, term by term.

    Args:
        terms (`tuple[LossTerm, ...]`): Terms of the loss.
        config (`PreTrainedConfig`): Configuration of the model, for its `problem_type`.
        outputs (`ModelOutput`): Output of a forward pass, with logits.
        batch (`dict[str, torch.Tensor]`): Label columns, and the attention mask of the inputs.

    Returns:
        `dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]`: for each term whose labels are given, the sum over the
        labels of each sentence and their number, both of shape `(batch,)`; ignored labels count nowhere. The loss of
        the batch is [`mean_loss`] of it.
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
    """The task loss of a batch, a scalar: `Σ_terms weight · Σ sums / Σ counts`, NaN without any label."""
    return sum(term.weight * sums.sum() / counts.sum() for term, (sums, counts) in losses.items())


def count_labels(
    terms: tuple[LossTerm, ...], config: PreTrainedConfig, batch: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Number of labels of a batch that are not ignored, for each label column it has, see [`TaskLossMixin`]."""
    counts = {}
    has_inputs = any(batch.get(name) is not None for name in ("input_ids", "inputs_embeds"))
    for term in terms:
        if batch.get(term.labels) is not None and (has_inputs or term.kind != "position"):
            target, ignored = _target(term, config, batch[term.labels], batch)
            counts[term.labels] = (torch.ones_like(target) if ignored is None else target.ne(ignored)).sum()
    return counts


def problem_type(config: PreTrainedConfig, labels: torch.Tensor) -> str:
    """What the labels of a sequence classifier are, as Transformers tells it from the configuration and their type."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    is_single = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if is_single else "multi_label_classification"


def _target(
    term: LossTerm, config: PreTrainedConfig, labels: torch.Tensor, batch_or_outputs: Mapping[str, Any]
) -> tuple[torch.Tensor, int | None]:
    """Labels of a term as the stock loss takes them, and the one that is ignored (`None`: they are no classes)."""
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


# ---- Parts of an accumulated batch, and their sum ----


def task_parts(
    losses: Mapping[LossTerm, tuple[torch.Tensor, torch.Tensor]], num_items: Any
) -> dict[LossTerm, torch.Tensor]:
    """This batch's part of each term of the loss of an accumulated batch, before its weight.

    Args:
        losses: What [`sentence_losses`] returns.
        num_items (`int`, `torch.Tensor` or `dict`): Labels of the accumulated batch, of the first term or by column.

    Raises:
        ValueError: if the number of the first column is missing.
    """
    first = next(iter(losses))
    counted = num_items if isinstance(num_items, dict) else {first.labels: num_items}
    if first.labels not in counted:
        raise ValueError(
            f"num_items_in_batch has no number of {first.labels}, but {', '.join(map(str, counted)) or 'no key'}; "
            "count_labels() of the model gives what it needs."
        )
    parts = {}
    for term, (sums, counts) in losses.items():
        if term.labels in counted:
            whole = torch.as_tensor(counted[term.labels], device=sums.device)
        else:
            # Only the labels of the first term were counted: this one has the same fraction of the whole.
            whole = counts.sum() * counted[first.labels] / losses[first][1].sum().clamp(min=1)
        # A batch may be without any label.
        parts[term] = sums.sum() / whole.clamp(min=1)
    return parts


def head_loss_parts(losses: dict[str, torch.Tensor], batch: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
    """This batch's parts of the guidance loss and the gate penalty of an accumulated batch, before their weights.

    Args:
        losses (`dict[str, torch.Tensor]`): `guidance_loss`, the mean over the sentences of this batch, and
            `gate_penalty`, as far as they are requested.
        batch (`dict`): Arguments of the forward pass.
        num_items (`dict`, *optional*): `num_items_in_batch` of the forward pass. Without `sentences` in it the
            guidance loss stays the mean over this batch, and without `forward_passes` the penalty stays whole.
    """
    counted = num_items if isinstance(num_items, dict) else {}
    parts = dict(losses)
    if "guidance_loss" in losses and SENTENCES in counted:
        fraction = num_sentences(batch) / counted[SENTENCES]
        parts["guidance_loss"] = losses["guidance_loss"] * torch.as_tensor(
            fraction, device=losses["guidance_loss"].device
        )
    if "gate_penalty" in losses and FORWARD_PASSES in counted:
        parts["gate_penalty"] = losses["gate_penalty"] / counted[FORWARD_PASSES]
    return parts


def add_head_losses(
    loss: torch.Tensor,
    outputs: Mapping[str, Any],
    guidance_weight: float | torch.Tensor | None = None,
    gate_penalty_weight: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """`loss + α · guidance_loss + λ · gate_penalty`, the terms that have a weight.

    Args:
        loss (`torch.Tensor`): The task loss, a scalar.
        outputs (`ModelOutput` or `dict`): With `guidance_loss` and `gate_penalty`, where they have a weight.
        guidance_weight (`float` or `torch.Tensor`, *optional*): α.
        gate_penalty_weight (`float` or `torch.Tensor`, *optional*): λ.

    Example:
        >>> losses = {"guidance_loss": torch.tensor(2.0), "gate_penalty": torch.tensor(3.0)}
        >>> add_head_losses(torch.tensor(1.0), losses, guidance_weight=0.5, gate_penalty_weight=0.1)
        tensor(2.3000)
    """
    for weight, name in ((guidance_weight, "guidance_loss"), (gate_penalty_weight, "gate_penalty")):
        if weight is not None:
            loss = loss + weight * outputs[name]
    return loss


def decoder_inputs_of(model: PreTrainedModel, labels: torch.Tensor) -> torch.Tensor:
    """What the decoder of an encoder–decoder reads where it is given labels, shifted by one."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    # Some classes shift labels within their forward pass alone.
    return shift_tokens_right(labels, model.config.pad_token_id, model.config.decoder_start_token_id)


class TaskLossMixin:
    """A model whose task loss is a sum of terms, each the mean over the labels of one column."""

    loss_terms: ClassVar[tuple[LossTerm, ...]] = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        terms = loss_terms_of(cls)
        # A class that names its terms, such as one that makes its labels, has others than its stock parent.
        if terms and not any("loss_terms" in vars(base) for base in cls.__mro__ if base is not TaskLossMixin):
            cls.loss_terms = terms

    @property
    def labels_are_target(self) -> bool:
        """Whether labels of an encoder–decoder are what its decoder is to write, and not classes or positions."""
        return all(term.kind not in ("problem", "position") for term in self.loss_terms)

    def without_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch that gives the same logits and no loss: label columns out, the decoder's input made from them."""
        labels = {term.labels: batch.get(term.labels) for term in self.loss_terms}
        inputs = {name: value for name, value in batch.items() if name not in (*labels, SHIFTED_LABELS)}
        if getattr(self.config, "is_encoder_decoder", False) and labels.get("labels") is not None:
            given = any(inputs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
            if self.labels_are_target and not given:
                inputs["decoder_input_ids"] = decoder_inputs_of(self, labels["labels"])
            # As the stock classes do where they are given labels.
            inputs["use_cache"] = False
        return inputs

    @property
    def reads_shifted_labels(self) -> bool:
        """Whether the loss takes `shift_labels` in place of `labels`, where a batch has both."""
        return any(term.kind == "next" for term in self.loss_terms)

    @property
    def label_columns(self) -> list[str]:
        """Columns of labels that a batch has to bring; empty without a head that learns."""
        return [term.labels for term in self.loss_terms if not term.made]

    def sentence_losses(
        self, outputs: ModelOutput, batch: dict[str, torch.Tensor]
    ) -> dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]:
        """Task loss of each sentence, term by term: the function [`sentence_losses`] of this model."""
        return sentence_losses(self.loss_terms, self.config, outputs, batch)

    def count_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Number of labels of a batch that are not ignored, for each label column it has.

        Args:
            batch (`dict[str, torch.Tensor]`): Inputs and labels of a forward pass.

        Returns:
            `dict[str, torch.Tensor]`: scalars, to be summed over micro-batches and processes, and handed to the
            forward pass as `num_items_in_batch`. Positions in sentences count only where the sentences are in the
            batch, too.
        """
        return count_labels(self.loss_terms, self.config, batch)
