# Licensed under the Apache License, Version 2.0.
"""Task losses of headwise models, term by term: of each sentence, and as parts of an accumulated batch.

A stock head forms the mean over its batch. Where a batch is accumulated over several forward passes and processes, the
loss of the whole is a sum divided by a number that the trainer counts, and the model divides by.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers.utils import ModelOutput

from .ignored_labels import IGNORED
from .precision import at_least_single
from .token_mask import labels_of_tokens


class LossTerm(NamedTuple):
    """One term of a head's task loss.

    Args:
        name (`str`): Name in logs.
        labels (`str`): Column of its labels.
        logits (`str`): Output they are compared with.
        kind (`str`): What the labels are: `class`, -100 where there is none; `binary`, 0 or 1 for each real token,
            -100 where there is none; `position` in the sentence, past its end for answers that were cut off; or
            `problem`, as the configuration's `problem_type` says. `token`: as `class`, and the output is each token's
            loss already.
        weight (`float`): Factor in the loss.
        made (`bool`): Whether the model makes the labels itself: they are a column of its output, not of the batch.
        classes (`str` or `int`, *optional*): Number of classes, or the value of the configuration that is it; labels
            that are none of them are refused.
    """

    name: str
    labels: str
    logits: str
    kind: str = "class"
    weight: float = 1.0
    made: bool = False
    classes: str | int | None = None


class TaskLossMixin:
    """A model whose task loss is a sum of terms, each the mean over the labels of one column."""

    loss_terms: ClassVar[tuple[LossTerm, ...]] = ()

    def without_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch that gives the same logits and no loss: label columns out, the decoder's input made from them."""
        labels = {term.labels: batch.get(term.labels) for term in self.loss_terms}
        inputs = {name: value for name, value in batch.items() if name not in labels}
        if getattr(self.config, "is_encoder_decoder", False) and labels.get("labels") is not None:
            if all(inputs.get(name) is None for name in ("decoder_input_ids", "decoder_inputs_embeds")):
                inputs["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(labels["labels"])
            # As the stock classes do where they are given labels.
            inputs["use_cache"] = False
        return inputs

    @property
    def label_columns(self) -> list[str]:
        """Columns of labels that a batch has to bring; empty without a head that learns."""
        return [term.labels for term in self.loss_terms if not term.made]

    def sentence_losses(
        self, outputs: ModelOutput, batch: dict[str, torch.Tensor]
    ) -> dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]:
        """Task loss of each sentence, term by term.

        Args:
            outputs (`ModelOutput`): Output of a forward pass, with logits.
            batch (`dict[str, torch.Tensor]`): Label columns, and the attention mask of the inputs.

        Returns:
            `dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]`: for each term whose labels are given, the sum over
            the labels of each sentence and their number, both of shape `(batch,)`; ignored labels count nowhere. The
            stock loss is `Σ_terms weight · Σ sums / Σ counts`.
        """
        losses = {}
        given = {**batch, **outputs}
        for term in self.loss_terms:
            if given.get(term.labels) is None:
                continue
            logits = at_least_single(outputs[term.logits])
            target, ignored = self._target(term, given[term.labels], given)
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
                mean_squares = self._problem_type(target) == "regression"
                elementwise = nn.functional.mse_loss if mean_squares else _binary_cross_entropy
                loss = elementwise(logits, target.view_as(logits).to(logits), reduction="none")
                counts = torch.ones_like(loss)
            losses[term] = loss.view(size, -1).sum(1), counts.view(size, -1).sum(1)
        return losses

    def count_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Number of labels of a batch that are not ignored, for each label column it has.

        Args:
            batch (`dict[str, torch.Tensor]`): Inputs and labels of a forward pass.

        Returns:
            `dict[str, torch.Tensor]`: scalars, to be summed over micro-batches and processes, and handed to the
            forward pass as `num_items_in_batch`. Positions in sentences count only where the sentences are in the
            batch, too.
        """
        counts = {}
        has_inputs = any(batch.get(name) is not None for name in ("input_ids", "inputs_embeds"))
        for term in self.loss_terms:
            if batch.get(term.labels) is not None and (has_inputs or term.kind != "position"):
                target, ignored = self._target(term, batch[term.labels], batch)
                counts[term.labels] = (torch.ones_like(target) if ignored is None else target.ne(ignored)).sum()
        return counts

    def _target(self, term: LossTerm, labels: torch.Tensor, batch_or_outputs: dict) -> tuple[torch.Tensor, int | None]:
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
        if term.kind == "problem" and self._problem_type(labels) != "single_label_classification":
            return labels, None
        return labels, IGNORED

    def _problem_type(self, labels: torch.Tensor) -> str:
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.config.num_labels == 1:
            return "regression"
        # As the stock loss tells them apart.
        is_single = labels.dtype in (torch.long, torch.int)
        return "single_label_classification" if is_single else "multi_label_classification"

    def _accumulated_losses(self, outputs: ModelOutput, batch: dict, num_items: Any) -> dict[LossTerm, torch.Tensor]:
        """This batch's part of each term of the loss, before its weight."""
        losses = self.sentence_losses(outputs, batch)
        counted = num_items if isinstance(num_items, dict) else {self.loss_terms[0].labels: num_items}
        if (first := self.loss_terms[0].labels) not in counted:
            raise ValueError(
                f"num_items_in_batch has no number of {first}, but {', '.join(map(str, counted)) or 'no key'}; "
                "count_labels() of the model gives what it needs."
            )
        parts = {}
        for term, (sums, counts) in losses.items():
            if term.labels in counted:
                whole = torch.as_tensor(counted[term.labels], device=sums.device)
            else:
                # Only the labels of the first term were counted: this one has the same share of the whole.
                first = self.loss_terms[0]
                whole = counts.sum() * counted[first.labels] / losses[first][1].sum().clamp(min=1)
            # A batch may be without any label.
            parts[term] = sums.sum() / whole.clamp(min=1)
        return parts


def _binary_cross_entropy(logits: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, target, reduction=reduction)
