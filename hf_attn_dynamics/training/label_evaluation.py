# Licensed under the Apache License, Version 2.0.
"""Evaluation losses as means over all labels, and accuracies of guided heads over all rows, for any batch size."""

from collections import defaultdict

import torch
from transformers import PreTrainedModel, Trainer

from ..models.head_losses import LossTerm
from ..models.ignored_labels import is_labelled
from .epoch_masks import masks_of_evaluation


class LabelSums:
    """Sums of losses and numbers of labels over an evaluation, by loss term, and hits of guided heads, by target.

    Args:
        needed (`bool`): Whether labels are required.
    """

    def __init__(self, needed: bool = True):
        self.needed = needed
        self._parts: dict[LossTerm, list[torch.Tensor]] = defaultdict(list)
        self._hits: dict[str, list[torch.Tensor]] = defaultdict(list)

    def add(self, term: LossTerm, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Adds sums and counts of sentences, both of shape `(sentences,)`."""
        self._parts[term].append(torch.stack([sums, counts]).sum(1))

    def add_hits(self, name: str, hits: torch.Tensor) -> None:
        """Adds the hits of the sentences of a batch, of shape `(sentences, 2)`, see [`guided_hits`]."""
        self._hits[name].append(hits.sum(0))

    def metrics(self, prefix: str) -> dict[str, float] | None:
        """The loss and, if there are several, its terms, and accuracies; `None` if no loss was computed here.

        Terms without labels and accuracies without rows are left out.

        Raises:
            ValueError: if labels are required and all are ignored.
        """
        if not self._parts:
            return None
        means = {}
        for term, parts in self._parts.items():
            # Apple GPUs have no double precision.
            total, count = torch.stack(parts).cpu().double().sum(0).tolist()
            if count:
                means[term] = total / count
        # Labels that the model creates depend on those in the batch.
        is_labelled = any(not term.made for term in means)
        if not is_labelled and self.needed:
            columns = " and ".join(dict.fromkeys(term.labels for term in self._parts if not term.made))
            raise ValueError(
                f"eval_dataset has no labels: all {columns} are ignored; pass some that are not -100, or call "
                "predict() for predictions without a loss."
            )
        metrics = {f"{prefix}_loss": sum(term.weight * mean for term, mean in means.items())} if is_labelled else {}
        if len(self._parts) > 1:
            metrics |= {f"{prefix}_{term.name}_loss": mean for term, mean in means.items()}
        for name, parts in self._hits.items():
            hits, count = torch.stack(parts).sum(0).tolist()
            if count:
                metrics[f"{prefix}_guided_accuracy_{name}"] = hits / count
        return metrics


class LabelEvaluationMixin:
    """A trainer whose evaluation loss is the mean over all labels; precedes the trainer class.

    A loss that the trainer computes is averaged as the trainer class does.
    """

    def __init__(self, *args, **kwargs):
        self._evaluation: LabelSums | None = None  # during an evaluation
        super().__init__(*args, **kwargs)

    @property
    def computes_loss(self) -> bool:
        """Whether the trainer class computes its own loss from the outputs of the model."""
        return super().compute_loss.__func__ is not Trainer.compute_loss

    def evaluation_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """`compute_loss` during an evaluation, which collects sums over labels."""
        own = self.accelerator.unwrap_model(self.model)
        # By the label columns of the model, to which a subclass may have renamed those in `label_names`.
        has_labels = any(inputs.get(name) is not None for name in own.label_columns)
        is_foreign = self.compute_loss_func is not None or self.computes_loss
        if is_foreign or not has_labels or self._evaluation is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**own.without_labels(inputs), **_hits_arguments(own, inputs), return_dict=True)
        if (hits := outputs.get("guided_hits")) is not None:
            for name, own_hits in hits.items():
                self._evaluation.add_hits(name, self.accelerator.gather_for_metrics(own_hits))
            # Predictions are the logits, whatever `ignore_keys` leaves out.
            outputs = type(outputs)(**{key: value for key, value in outputs.items() if key != "guided_hits"})
        is_smoothed = self.label_smoother is not None and inputs.get("labels") is not None
        losses = self._smoothed_losses if is_smoothed else own.sentence_losses
        loss = 0.0
        for term, (sums, counts) in losses(outputs, inputs).items():
            loss = loss + term.weight * sums.sum() / counts.sum().clamp(min=1)
            # Drops the duplicate sentences that fill the last batch of a process.
            self._evaluation.add(term, *self.accelerator.gather_for_metrics((sums, counts.to(sums.dtype))))
        return (loss, outputs) if return_outputs else loss

    def _smoothed_losses(self, outputs, inputs: dict) -> dict:
        """`sentence_losses` with label smoothing, for models with a single label column."""
        labels = inputs["labels"]
        (term,) = self.accelerator.unwrap_model(self.model).loss_terms
        sums = [
            self.label_smoother({"logits": logits[None]}, own[None], num_items_in_batch=1)
            for logits, own in zip(outputs["logits"], labels)
        ]
        counts = labels.ne(self.label_smoother.ignore_index).view(len(labels), -1).sum(1)
        return {term._replace(weight=1.0): (torch.stack(sums), counts)}

    def predict(self, *args, **kwargs):
        """The stock method, without `test_loss` if the test set has no labels."""
        self._evaluation = LabelSums(needed=False)
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._evaluation = None

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """The stock loop, with the loss averaged over labels instead of over batches.

        Raises:
            ValueError: if all labels of the evaluation set are ignored.
        """
        if self._evaluation is None:
            self._evaluation = LabelSums()
        try:
            with masks_of_evaluation(self.data_collator):
                output = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
            metrics = self._evaluation.metrics(metric_key_prefix)
            if metrics is not None:
                output.metrics.pop(f"{metric_key_prefix}_loss", None)
                output.metrics.update(metrics)
        finally:
            self._evaluation = None
        return output


def _hits_arguments(model: PreTrainedModel, inputs: dict) -> dict:
    """Arguments that request the hits of heads guided to the targets of a batch, if it has any."""
    if all(inputs.get(name) is None for name in getattr(model, "target_columns", ())):
        return {}
    arguments = {"output_guided_hits": True}
    if model.config.is_encoder_decoder and model.labels_are_target and inputs.get("labels") is not None:
        # The model does not get the labels, which tell the rows that count.
        arguments["guidance_rows"] = is_labelled(inputs["labels"])
    return arguments
