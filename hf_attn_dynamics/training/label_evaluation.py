# Licensed under the Apache License, Version 2.0.
"""Evaluation by the mean over all labels, whatever the size of batches."""

from collections import defaultdict

import torch
from transformers import Trainer

from ..models.head_losses import LossTerm
from .epoch_masks import masks_of_evaluation


class LabelSums:
    """Sums of losses over an evaluation, and numbers of labels, for each term of the loss.

    Args:
        needed (`bool`): Whether there are to be labels.
    """

    def __init__(self, needed: bool = True):
        self.needed = needed
        self._parts: dict[LossTerm, list[torch.Tensor]] = defaultdict(list)

    def add(self, term: LossTerm, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Adds sums and counts of sentences, both of shape `(sentences,)`."""
        self._parts[term].append(torch.stack([sums, counts]).sum(1))

    def metrics(self, prefix: str) -> dict[str, float] | None:
        """The loss, and each term of several; `None` if no loss was computed here, nothing if no label counts.

        Of a loss with several terms, those without any label are left out.

        Raises:
            ValueError: if labels are needed, and none counts.
        """
        if not self._parts:
            return None
        means = {}
        for term, parts in self._parts.items():
            total, count = torch.stack(parts).double().sum(0).tolist()
            if count:
                means[term] = total / count
        # Labels that the model makes itself are of those in the batch.
        is_labelled = any(not term.made for term in means)
        if not is_labelled and self.needed:
            columns = " and ".join(dict.fromkeys(term.labels for term in self._parts if not term.made))
            raise ValueError(
                f"eval_dataset has no label: all {columns} are ignored; give some that are not -100, or call "
                "predict() for predictions alone."
            )
        metrics = {f"{prefix}_loss": sum(term.weight * mean for term, mean in means.items())} if is_labelled else {}
        if len(self._parts) > 1:
            metrics |= {f"{prefix}_{term.name}_loss": mean for term, mean in means.items()}
        return metrics


class LabelEvaluationMixin:
    """A trainer that evaluates models with terms of a loss by the mean over all labels; before the trainer's class.

    A loss that is not the model's is averaged as the trainer's class does it.
    """

    def __init__(self, *args, **kwargs):
        self._evaluation: LabelSums | None = None  # while there is one
        super().__init__(*args, **kwargs)

    @property
    def computes_loss(self) -> bool:
        """Whether the class of the trainer computes a loss of its own, from what the model returns."""
        return super().compute_loss.__func__ is not Trainer.compute_loss

    def evaluation_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """What `compute_loss` returns in an evaluation; the sums over labels are kept until it ends."""
        own = self.accelerator.unwrap_model(self.model)
        # By the names that the model knows: a subclass may have put them in place of `label_names`.
        is_labelled = any(inputs.get(name) is not None for name in own.label_columns)
        is_foreign = self.compute_loss_func is not None or self.computes_loss
        if is_foreign or not is_labelled or self._evaluation is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**own.without_labels(inputs), return_dict=True)
        is_smoothed = self.label_smoother is not None and inputs.get("labels") is not None
        losses = self._smoothed_losses if is_smoothed else own.sentence_losses
        loss = 0.0
        for term, (sums, counts) in losses(outputs, inputs).items():
            loss = loss + term.weight * sums.sum() / counts.sum().clamp(min=1)
            # Sentences that only fill up the last batch of a process are dropped here.
            self._evaluation.add(term, *self.accelerator.gather_for_metrics((sums, counts.to(sums.dtype))))
        return (loss, outputs) if return_outputs else loss

    def _smoothed_losses(self, outputs, inputs: dict) -> dict:
        """What `sentence_losses` of the model is without smoothing; the stock smoother reads one column of labels."""
        labels = inputs["labels"]
        (term,) = self.accelerator.unwrap_model(self.model).loss_terms
        sums = [
            self.label_smoother({"logits": logits[None]}, own[None], num_items_in_batch=1)
            for logits, own in zip(outputs["logits"], labels)
        ]
        counts = labels.ne(self.label_smoother.ignore_index).view(len(labels), -1).sum(1)
        return {term._replace(weight=1.0): (torch.stack(sums), counts)}

    def predict(self, *args, **kwargs):
        """The stock method; where no label of the test set counts, there is no `test_loss`."""
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
            ValueError: if no label of the evaluation set counts.
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
